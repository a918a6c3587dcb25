//! The settings of table `[attention]`: the scheme and the scheme's settings.

use std::sync::LazyLock;

use candle_sage::{
    AttnQat, Error, Granularity, Int8Products, KeyMean, PReference, SageBwd, Scheme, Smoothing, ValueGroups,
    ValueScale,
};
use clap::builder::PossibleValue;
use clap::{Args, ValueEnum};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use toml::Table;

use super::layer::layer;
use super::sla2::{self, Form, Sla2Settings};
use super::text::Text;
use super::{LayerSettings, Settings, Switch};
use crate::model::Sla2Config;

/// Table `[attention]`: the kind of attention, and its settings.
#[derive(Debug, Clone, Default, PartialEq, Args, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct AttentionSettings {
    /// Kind of attention; a list such as `fpa,sagebwd` starts a sweep: one run for each kind [default: sagebwd]
    #[arg(long, value_enum)]
    pub attn: Option<Attn>,
    /// Overrides --attn for single layers: `0,-1=fpa` leaves the first and the last layer unquantized.
    /// Semicolons separate entries: `0=fpa;2-4=sagebwd:products=scores`
    #[arg(long, value_name = "LAYERS=SCHEME", allow_hyphen_values = true)]
    pub attn_layers: Option<LayerSettings>,
    /// RMSNorm of each head's queries and keys before the rotary embedding [default: on]
    #[arg(long, value_enum)]
    pub qk_norm: Option<Switch>,
    /// Operands whose mean over tokens is subtracted before quantizing [default: k for sagebwd, none for attn-qat]
    #[arg(long, value_enum)]
    pub smoothing: Option<SmoothingSetting>,
    /// SageBwd: tokens from which --smoothing computes the means of K and V: `all`, or `sample-N` for N evenly spaced
    /// tokens [default: all]
    #[arg(long)]
    pub key_mean: Option<Text<KeyMean>>,
    /// SageBwd: which of attention's matmuls are in INT8. `paper`: all except dP; `forward`: S = Q K^T and O = P V in
    /// the forward; `scores`: S in forward and backward; `forward-and-s`: as `forward`, and S in the backward. On a
    /// CPU, more matmuls of the backward (s, dv, dq, dk) may follow `forward` or `scores`, as in `forward,s,dv`
    /// [default: paper]
    #[arg(long)]
    pub products: Option<Text<Int8Products>>,
    /// SageBwd: number of rows or columns of P, dS and dO that share a scale in the backward: one (`vector`), N
    /// (`group-N`), or all of a tile (`tile`) [default: vector]
    #[arg(long)]
    pub granularity: Option<Text<Granularity>>,
    /// Attn-QAT: axis along which 16 values of V share a scale: `tokens` or `head-dim` [default: tokens]
    #[arg(long)]
    pub value_groups: Option<Text<ValueGroups>>,
    /// Attn-QAT: factor that multiplies V before quantizing. `none`: no factor; `head`: a power of two for each key
    /// head of a sequence, so that V does not become zero if all its values are below 0.006, and does not saturate if
    /// some are above 2688 [default: none]
    #[arg(long)]
    pub value_scale: Option<Text<ValueScale>>,
    /// Attn-QAT: number that divides each row of exp(logits) before the row is quantized. `row-max`: the row's largest
    /// exponential, rounded up to a power of two. `two-level`: 1/2048 of that, so that small exponentials keep
    /// their precision. `literal`: the largest exponential in the forward and the sum of the
    /// exponentials in the backward, as in the Attn-QAT paper's text [default: row-max]
    #[arg(long)]
    pub p_reference: Option<Text<PReference>>,
    /// Attn-QAT: compute the backward's delta (each row's dot product of dO and O) from an output O whose probabilities
    /// P were not quantized [default: on]
    #[arg(long, value_enum)]
    pub high_precision_output: Option<Switch>,
    /// Attn-QAT: compute the backward from the quantized query, key and value [default: on]
    #[arg(long, value_enum)]
    pub matched_recomputation: Option<Switch>,
    /// Attn-QAT: compute dV from quantized probabilities [default: on]
    #[arg(long, value_enum)]
    pub requantized_p: Option<Switch>,
}

layer! {
    AttentionSettings:
    attn, attn_layers [NotList], qk_norm, smoothing, key_mean, products, granularity, value_groups, value_scale,
    p_reference, high_precision_output, matched_recomputation, requantized_p
}

/// The kind of attention: a dense scheme with its default settings, a form of SLA2, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attn(Kind);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    None,
    Dense(Scheme),
    Sla2(Form),
}

impl Attn {
    /// No attention at all, to measure how much attention lowers the loss.
    pub const NONE: Self = Self(Kind::None);
    /// Unquantized attention.
    pub const EXACT: Self = Self(Kind::Dense(Scheme::Unquantized));

    /// Whether the same settings apply to `self` and `other`: they are equal, or both are forms of SLA2.
    pub(super) fn shares_settings(self, other: Self) -> bool {
        self == other || matches!((self.0, other.0), (Kind::Sla2(_), Kind::Sla2(_)))
    }

    /// The configuration of SLA2 from `settings`, for a run of `steps` steps over sequences of `context` tokens; `None`
    /// for other attention.
    ///
    /// # Errors
    /// When the settings of SLA2 are out of range.
    pub fn sla2(
        self,
        settings: &Sla2Settings,
        context: usize,
        steps: u64,
        gpu: bool,
    ) -> Result<Option<Sla2Config>, Error> {
        match self.0 {
            Kind::Sla2(form) => sla2::resolve(form, settings, context, steps, gpu).map(Some),
            Kind::None | Kind::Dense(_) => Ok(None),
        }
    }

    /// Whether this attention is dense. All dense schemes use weights of the same names and shapes.
    pub fn is_dense(self) -> bool {
        matches!(self.0, Kind::Dense(_))
    }

    /// The scheme, with its options taken from `settings`. For SLA2: the scheme of attention to the selected blocks.
    pub fn scheme(self, settings: &Settings) -> Option<Scheme> {
        let scheme = match self.0 {
            Kind::None => return None,
            Kind::Dense(scheme) => scheme,
            Kind::Sla2(_) => {
                settings.sla2.sla2_numerics.map_or(SageBwd::default().into(), |text| text.0.scheme())
            }
        };
        let typed = Table::try_from(&settings.attention).expect("settings are plain values");
        let own = scheme.settings().into_iter().filter_map(|(key, _)| Some((key, typed.get(key)?)));
        Some(own.fold(scheme, |scheme, (key, value)| {
            let word = value.as_str().expect("settings of schemes are words");
            scheme.with_setting(key, word).expect("the words are the scheme's")
        }))
    }
}

impl Attn {
    /// The settings of `scheme` and `sla2`: keys and values as in a settings file.
    pub fn settings_of(scheme: Option<Scheme>, sla2: Option<&Sla2Config>) -> Vec<(&'static str, String)> {
        let mut own = scheme.map_or_else(Vec::new, |scheme| scheme.settings());
        if let Some(sla2) = sla2 {
            own.extend(sla2::own_settings(sla2));
            own.push(("sla2-numerics", scheme.map_or("none", |scheme| scheme.name()).to_string()));
        }
        own
    }
}

impl From<Scheme> for Attn {
    fn from(scheme: Scheme) -> Self {
        Self(Kind::Dense(scheme))
    }
}

impl From<SageBwd> for Attn {
    fn from(scheme: SageBwd) -> Self {
        Self(Kind::Dense(scheme.into()))
    }
}

impl From<AttnQat> for Attn {
    fn from(scheme: AttnQat) -> Self {
        Self(Kind::Dense(scheme.into()))
    }
}

impl std::fmt::Display for Attn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.0 {
            Kind::None => "none",
            Kind::Dense(scheme) => scheme.name(),
            Kind::Sla2(form) => form.name(),
        })
    }
}

impl ValueEnum for Attn {
    fn value_variants<'a>() -> &'a [Self] {
        static ALL: LazyLock<Vec<Attn>> = LazyLock::new(|| {
            let dense = Scheme::all().into_iter().map(Kind::Dense);
            let sla2 = Form::ALL.into_iter().map(Kind::Sla2);
            dense.chain(sla2).chain([Kind::None]).map(Attn).collect()
        });
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(match self.0 {
            Kind::Dense(scheme) => PossibleValue::new(scheme.name()).help(scheme.summary()),
            Kind::Sla2(form) => PossibleValue::new(form.name()).help(form.summary()),
            Kind::None => PossibleValue::new("none")
                .help("No attention at all, to measure how much attention lowers the loss"),
        })
    }
}

impl std::str::FromStr for Attn {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let names = Self::value_variants();
        names.iter().copied().find(|attn| attn.to_string() == text).ok_or_else(|| {
            Error::new("unknown attention")
                .got(format!("`{text}`"))
                .allowed(names.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))
                .hint("`sage-train --help` describes them")
        })
    }
}

impl Serialize for Attn {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Attn {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Operands whose mean over tokens is subtracted before quantizing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SmoothingSetting {
    /// No operand
    None,
    /// K's mean over all tokens, or over the tokens that --key-mean selects
    K,
    /// K's mean, and the mean of each tile of Q (not for Attn-QAT)
    Qk,
    /// The means of K and V; V's mean is added back to the output
    Kv,
}

impl From<SmoothingSetting> for Smoothing {
    fn from(setting: SmoothingSetting) -> Self {
        match setting {
            SmoothingSetting::None => Smoothing::None,
            SmoothingSetting::K => Smoothing::K,
            SmoothingSetting::Qk => Smoothing::Qk,
            SmoothingSetting::Kv => Smoothing::Kv,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::layer::Layer as _;

    #[test]
    fn every_scheme_has_a_name_that_reads_back() {
        for attn in Attn::value_variants() {
            assert_eq!(attn.to_string().parse(), Ok(*attn));
        }
        assert_eq!(Attn::value_variants().len(), Scheme::all().len() + Form::ALL.len() + 1);
        assert!("sage".parse::<Attn>().is_err());
    }

    /// A setting without a flag would be lost when a run is saved. Tile sizes need no flag, because they
    /// follow from the scheme and from `sla2-block`.
    #[test]
    fn every_setting_of_a_scheme_is_a_flag() {
        let flags = AttentionSettings::DECLARED.iter().map(|(field, _)| field.replace('_', "-"));
        let flags: Vec<_> = flags.collect();
        for (key, _) in Scheme::all().iter().flat_map(Scheme::settings) {
            assert!(key.starts_with("tile-") || flags.iter().any(|flag| flag == key), "{key}");
        }
    }

    #[test]
    fn settings_reach_their_scheme() {
        let settings = Settings::with(|s| {
            s.attention.smoothing = Some(SmoothingSetting::K);
            s.attention.requantized_p = Some(Switch::Off);
        });
        let qat = AttnQat::default();
        let expected = qat.smoothing(Smoothing::K).requantized_p(false);
        assert_eq!(Attn::from(qat).scheme(&settings), Some(expected.into()));
        assert_eq!(Attn::from(qat).scheme(&Settings::default()), Some(qat.into()));
        assert_eq!(Attn::EXACT.scheme(&settings), Some(Scheme::Unquantized));
        assert_eq!(Attn::NONE.scheme(&settings), None);
    }
}
