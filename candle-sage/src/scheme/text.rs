//! Schemes by name, and their settings as text, for command lines, files and other languages.

use std::str::FromStr;

use super::{AttnQat, Products, SageBwd, Scheme, Smoothing};
use crate::error::{Error, Result};

impl Scheme {
    /// The scheme of a [name](Scheme::name), with its default settings.
    ///
    /// ```
    /// use candle_sage::{SageBwd, Scheme};
    ///
    /// assert_eq!(Scheme::from_name("sagebwd")?, SageBwd::default().into());
    /// assert!(Scheme::from_name("int8").is_err());
    /// # Ok::<(), candle_sage::Error>(())
    /// ```
    ///
    /// # Errors
    /// When no scheme has this name.
    pub fn from_name(name: &str) -> Result<Self> {
        let all = Self::all();
        all.iter().find(|scheme| scheme.name() == name).copied().ok_or_else(|| {
            let names: Vec<_> = all.iter().map(Self::name).collect();
            Error::new("unknown attention scheme")
                .got(format!("`{name}`"))
                .allowed(names.join(", "))
                .hint("sagebwd computes in INT8, attn-qat in FP4, fpa in the type of the tensors")
        })
    }

    /// Replaces one setting. Names and values are as in [`Scheme::settings`]. Attn-QAT has one more setting,
    /// `products`, with the values `16-bit` and `nvfp4`.
    ///
    /// ```
    /// use candle_sage::{Int8Products, SageBwd, Scheme};
    ///
    /// let scores = Scheme::from_name("sagebwd")?.with_setting("products", "scores")?;
    /// assert_eq!(scores, SageBwd::default().products(Int8Products::SCORES).into());
    /// assert!(scores.with_setting("value-groups", "tokens").is_err());
    /// # Ok::<(), candle_sage::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the scheme does not have the setting, or the setting does not accept the value.
    pub fn with_setting(mut self, name: &str, value: &str) -> Result<Self> {
        let known = match &mut self {
            Self::Unquantized => false,
            Self::SageBwd(settings) => settings.set(name, value)?,
            Self::AttnQat(settings) => settings.set(name, value)?,
        };
        if known {
            return Ok(self);
        }
        let mut allowed: Vec<_> = self.settings().into_iter().map(|(name, _)| name).collect();
        if let Self::AttnQat(_) = self {
            allowed.push("products");
        }
        let allowed = if allowed.is_empty() { "no settings".to_owned() } else { allowed.join(", ") };
        Err(Error::new(format!("scheme {} has no such setting", self.name()))
            .got(format!("`{name}`"))
            .allowed(allowed)
            .hint("omit it, or choose a scheme that has it"))
    }
}

impl SageBwd {
    /// Sets the value if the setting exists, and returns whether it exists.
    fn set(&mut self, name: &str, value: &str) -> Result<bool> {
        match name {
            "smoothing" => self.smoothing = value.parse()?,
            "key-mean" => self.key_mean = value.parse()?,
            "products" => self.products = value.parse()?,
            "granularity" => self.granularity = value.parse()?,
            "tile-q" => self.tile_q = rows(value)?,
            "tile-k" => self.tile_k = rows(value)?,
            _ => return Ok(false),
        }
        Ok(true)
    }
}

impl AttnQat {
    fn set(&mut self, name: &str, value: &str) -> Result<bool> {
        match name {
            "smoothing" => self.smoothing = value.parse()?,
            "value-groups" => self.value_groups = value.parse()?,
            "value-scale" => self.value_scale = value.parse()?,
            "p-reference" => self.p_reference = value.parse()?,
            "high-precision-output" => self.high_precision_output = switch(name, value)?,
            "matched-recomputation" => self.matched_recomputation = switch(name, value)?,
            "requantized-p" => self.requantized_p = switch(name, value)?,
            "products" => self.products = value.parse()?,
            _ => return Ok(false),
        }
        Ok(true)
    }
}

fn rows(text: &str) -> Result<usize> {
    text.parse().map_err(|_| {
        Error::new("tile-q and tile-k must be whole numbers")
            .got(format!("`{text}`"))
            .allowed(format!("{} to {}", SageBwd::TILE_ROWS.start(), SageBwd::TILE_ROWS.end()))
            .hint("a GPU supports only 64")
    })
}

fn switch(name: &str, text: &str) -> Result<bool> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(Error::new(format!("unknown value of {name}"))
            .got(format!("`{text}`"))
            .allowed("on, off")
            .hint("omit the setting for its default")),
    }
}

impl FromStr for Smoothing {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let all = [Self::None, Self::K, Self::Qk, Self::Kv];
        all.into_iter().find(|smoothing| smoothing.to_string() == text).ok_or_else(|| {
            Error::new("unknown smoothing")
                .got(format!("`{text}`"))
                .allowed("none, k, qk, kv")
                .hint("k subtracts the mean of the keys; kv also the mean of the values")
        })
    }
}

impl FromStr for Products {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "16-bit" => Ok(Self::SixteenBit),
            "nvfp4" => Ok(Self::Nvfp4),
            _ => Err(Error::new("unknown type of Attn-QAT's matmuls")
                .got(format!("`{text}`"))
                .allowed("16-bit, nvfp4")
                .hint("16-bit trains on every GPU; nvfp4 is for inference on Blackwell")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheme::{Granularity, Int8Products, KeyMean, ValueGroups, ValueScale};

    #[test]
    fn every_setting_is_parsed_from_its_text() {
        let sagebwd = SageBwd::default()
            .smoothing(Smoothing::Qk)
            .key_mean(KeyMean::Sample(7))
            .products(Int8Products::FORWARD_AND_S)
            .granularity(Granularity::Group(4))
            .tile_q(32)
            .tile_k(128);
        let qat = AttnQat::default()
            .smoothing(Smoothing::Kv)
            .value_groups(ValueGroups::HeadDim)
            .value_scale(ValueScale::Head);
        let qat = qat.matched_recomputation(false).requantized_p(false).high_precision_output(false);
        let all = [Scheme::Unquantized, sagebwd.into(), qat.into()];
        assert!(Scheme::contains_all(&all));
        for scheme in all {
            let mut again = Scheme::from_name(scheme.name()).expect("its name");
            for (name, value) in scheme.settings() {
                again = again.with_setting(name, &value).expect("its own words");
                assert!(again.with_setting(name, "nonsense").is_err(), "{name}");
            }
            assert_eq!(again, scheme);
            assert!(again.with_setting("nonsense", "on").is_err());
        }
    }
}
