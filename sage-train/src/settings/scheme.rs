//! Schemes with their settings as text, such as `sagebwd:products=scores:key-mean=sample-64`, and schemes of single
//! layers, such as `0,-1=fpa;2-4=sagebwd:products=scores`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use candle_sage::{Error, Result, Scheme};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use toml::Table;

use super::{AttentionSettings, Attn, Settings};

/// A scheme with its settings. As text it is the scheme's name, and `:KEY=VALUE` for each setting that is not the
/// default.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchemeSetting(pub Scheme);

/// A scheme's settings without tile sizes, which follow from the scheme and from `sla2-block`.
fn own_settings(scheme: &Scheme) -> Vec<(&'static str, String)> {
    scheme.settings().into_iter().filter(|(key, _)| !key.starts_with("tile-")).collect()
}

impl FromStr for SchemeSetting {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        const HINT: &str = "settings follow the name: sagebwd:products=scores:key-mean=sample-64";
        let all = Scheme::all();
        let mut words = text.split(':');
        let name = words.next().unwrap_or_default();
        let Some(scheme) = all.iter().find(|scheme| scheme.name() == name) else {
            return Err(Error::new("not a scheme for this setting")
                .got(format!("`{name}`"))
                .allowed(all.iter().map(Scheme::name).collect::<Vec<_>>().join(", "))
                .hint(HINT));
        };
        let known: Vec<&str> = own_settings(scheme).into_iter().map(|(key, _)| key).collect();
        let unusable = |got: String| {
            Error::new(format!("cannot use the settings of {name}"))
                .got(got)
                .allowed(match known.as_slice() {
                    [] => "nothing: it has no settings".into(),
                    keys => keys.join(", "),
                })
                .hint(HINT)
        };
        let mut table = Table::new();
        for word in words {
            let setting = word.split_once('=').filter(|(key, _)| known.contains(key));
            let (key, value) = setting.ok_or_else(|| unusable(format!("`{word}`")))?;
            if table.insert(key.into(), value.into()).is_some() {
                return Err(unusable(format!("`{key}` twice")));
            }
        }
        let attention = AttentionSettings::deserialize(table)
            .map_err(|error: toml::de::Error| unusable(format!("`{text}`: {}", error.message())))?;
        let settings = Settings::with(|s| s.attention = attention);
        let scheme = Attn::from(*scheme).scheme(&settings).unwrap_or(*scheme);
        scheme.validate()?;
        Ok(Self(scheme))
    }
}

impl fmt::Display for SchemeSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(scheme) = self;
        f.write_str(scheme.name())?;
        let all = Scheme::all();
        let default =
            all.iter().find(|other| other.name() == scheme.name()).map_or_else(Vec::new, own_settings);
        let mut other = own_settings(scheme).into_iter().filter(|setting| !default.contains(setting));
        other.try_for_each(|(key, value)| write!(f, ":{key}={value}"))
    }
}

/// Schemes of single layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerSettings(Vec<(Vec<Span>, SchemeSetting)>);

/// A range of layers, from `first` to `last` inclusive. Numbers below 0 count from the model's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Span {
    first: i64,
    last: i64,
}

const EXAMPLE: &str = "--attn-layers \"0,-1=fpa\" leaves the first and the last layer unquantized";

impl LayerSettings {
    /// The scheme of each layer that the setting lists, in a model of `layers` layers.
    ///
    /// # Errors
    /// When the model lacks a listed layer, or a layer has two schemes.
    pub fn resolve(&self, layers: usize) -> Result<BTreeMap<usize, Scheme>> {
        let mut found = BTreeMap::new();
        for (spans, SchemeSetting(scheme)) in &self.0 {
            for layer in numbered(spans, layers, &self.to_string())? {
                if found.insert(layer, *scheme).is_some_and(|before| before != *scheme) {
                    return Err(Error::new("a layer has two schemes")
                        .got(format!("layer {layer} in `{self}`"))
                        .allowed("one scheme for each layer")
                        .hint("-1 is the last layer, -2 the one before"));
                }
            }
        }
        Ok(found)
    }
}

/// The indices of the layers in `spans`. The model has `layers` layers.
fn numbered(spans: &[Span], layers: usize, text: &str) -> Result<Vec<usize>> {
    let numbers = spans.iter().flat_map(|span| span.first..=span.last);
    let layer = |number: i64| {
        let layer = if number < 0 { number + layers as i64 } else { number };
        usize::try_from(layer).ok().filter(|layer| *layer < layers).ok_or_else(|| {
            Error::new("the model has no such layer")
                .got(format!("layer {number} in `{text}`"))
                .allowed(format!("0 to {}, or -{layers} to -1 from the end", layers - 1))
                .hint("0 is the first layer, -1 is the last layer")
        })
    };
    numbers.map(layer).collect()
}

/// A list of layers: `0,-1` or `2-4`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerList(Vec<Span>);

impl LayerList {
    /// The listed layers, in a model of `layers` layers.
    ///
    /// # Errors
    /// When the model lacks one of the layers.
    pub fn resolve(&self, layers: usize) -> Result<BTreeSet<usize>> {
        Ok(numbered(&self.0, layers, &self.to_string())?.into_iter().collect())
    }
}

impl FromStr for LayerList {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let spans: std::result::Result<_, ()> = text.split(',').map(|layer| layer.trim().parse()).collect();
        spans.map(Self).map_err(|()| {
            Error::new("not a list of layers")
                .got(format!("`{text}`"))
                .allowed("layers and ranges of layers, separated by commas")
                .hint("0,-1 is the first and the last layer, 2-4 is three layers")
        })
    }
}

impl fmt::Display for LayerList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.iter().map(Span::to_string).collect::<Vec<_>>().join(","))
    }
}

impl FromStr for Span {
    type Err = ();

    fn from_str(text: &str) -> std::result::Result<Self, ()> {
        if let Ok(layer) = text.parse() {
            return Ok(Self { first: layer, last: layer });
        }
        let (first, last) = text.split_once('-').ok_or(())?;
        let number = |text: &str| text.parse::<u32>().map(i64::from).map_err(drop);
        let span = Self { first: number(first)?, last: number(last)? };
        if span.first < span.last { Ok(span) } else { Err(()) }
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.first)?;
        if self.last > self.first { write!(f, "-{}", self.last) } else { Ok(()) }
    }
}

impl FromStr for LayerSettings {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let entry = |entry: &str| {
            let unusable = || {
                Error::new("not a list of layers and schemes")
                    .got(format!("`{entry}`"))
                    .allowed(
                        "LAYERS=SCHEME entries separated by semicolons, with LAYERS such as 0, -1 or 2-4, \
                         separated by commas",
                    )
                    .hint(EXAMPLE)
            };
            let (layers, scheme) = entry.split_once('=').ok_or_else(unusable)?;
            let spans: std::result::Result<Vec<Span>, ()> =
                layers.split(',').map(|layer| layer.trim().parse()).collect();
            Ok((spans.map_err(|()| unusable())?, scheme.trim().parse()?))
        };
        text.split(';').filter(|entry| !entry.trim().is_empty()).map(entry).collect::<Result<_>>().map(Self)
    }
}

impl fmt::Display for LayerSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spans = |spans: &[Span]| spans.iter().map(Span::to_string).collect::<Vec<_>>().join(",");
        let entries: Vec<String> =
            self.0.iter().map(|(layers, scheme)| format!("{}={scheme}", spans(layers))).collect();
        f.write_str(&entries.join(";"))
    }
}

/// The scheme of each layer as text. Equal maps have equal texts.
pub fn in_words_by_layer(schemes: &BTreeMap<usize, Scheme>) -> String {
    let mut layers_of: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (layer, scheme) in schemes {
        layers_of.entry(SchemeSetting(*scheme).to_string()).or_default().push(layer.to_string());
    }
    let entries: Vec<String> =
        layers_of.iter().map(|(scheme, layers)| format!("{}={scheme}", layers.join(","))).collect();
    entries.join(";")
}

/// Serializes types as their text.
macro_rules! as_text {
    ($($type:ty),+) => {$(
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
            }
        }
    )+};
}

as_text!(SchemeSetting, LayerSettings, LayerList);

#[cfg(test)]
mod tests {
    use candle_sage::{AttnQat, Granularity, Int8Products, SageBwd, Smoothing};

    use super::*;

    #[test]
    fn a_scheme_is_read_as_it_is_written() {
        let sage = SageBwd::default();
        for (text, scheme) in [
            ("fpa", Scheme::Unquantized),
            ("sagebwd", sage.into()),
            ("sagebwd:granularity=tile", sage.granularity(Granularity::Tile).into()),
            (
                "sagebwd:smoothing=none:products=scores",
                sage.smoothing(Smoothing::None).products(Int8Products::SCORES).into(),
            ),
            ("attn-qat:requantized-p=off", AttnQat::default().requantized_p(false).into()),
        ] {
            assert_eq!(
                (text.parse(), SchemeSetting(scheme).to_string()),
                (Ok(SchemeSetting(scheme)), text.to_owned())
            );
        }
        // Giving the default value of a setting is the same as giving no value.
        assert_eq!("sagebwd:smoothing=k".parse(), Ok(SchemeSetting(sage.into())));
        for wrong in [
            "",
            "sla2",
            "fpa:smoothing=k",
            "sagebwd:smoothing",
            "sagebwd:tile-q=32",
            "sagebwd:smoothing=x",
            "sagebwd:smoothing=k:smoothing=k",
            "attn-qat:products=paper",
        ] {
            let error = wrong.parse::<SchemeSetting>().expect_err(wrong).to_string();
            assert!(error.contains("got:") && error.contains("hint:"), "{error}");
        }
    }

    #[test]
    fn layers_count_from_both_ends() {
        let layers = |text: &str| text.parse::<LayerSettings>().and_then(|layers| layers.resolve(6));
        let exact = Scheme::Unquantized;
        assert_eq!(layers(""), Ok(BTreeMap::new()));
        assert_eq!(layers("0,-1=fpa"), Ok([(0, exact), (5, exact)].into()));
        assert_eq!(
            layers("1-3=fpa; -1=sagebwd"),
            Ok([(1, exact), (2, exact), (3, exact), (5, SageBwd::default().into())].into())
        );
        assert_eq!(layers("0,-6=fpa"), Ok([(0, exact)].into()), "the same layer, with the same scheme");
        for wrong in ["6=fpa", "-7=fpa", "3-1=fpa", "fpa", "0=sla2", "a=fpa", "0=fpa;0=sagebwd", "=fpa"] {
            assert!(layers(wrong).is_err(), "{wrong}");
        }
        let text = "0,-1=fpa;2-4=sagebwd:products=scores";
        assert_eq!(text.parse::<LayerSettings>().map(|layers| layers.to_string()), Ok(text.to_owned()));
        assert_eq!(
            layers("3,1=fpa;2=sagebwd").map(|found| in_words_by_layer(&found)),
            Ok("1,3=fpa;2=sagebwd".into())
        );
    }
}
