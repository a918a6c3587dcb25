//! Values of candle-sage as text: they are written with `Display` and read with `FromStr`.

use candle_sage::{Error, Scheme};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A value of candle-sage that is serialized as its `Display`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Text<T>(pub T);

impl<T: std::str::FromStr> std::str::FromStr for Text<T> {
    type Err = T::Err;

    fn from_str(text: &str) -> Result<Self, T::Err> {
        text.parse().map(Text)
    }
}

impl<T: std::fmt::Display> Serialize for Text<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl<'de, T: std::str::FromStr<Err: std::fmt::Display>> Deserialize<'de> for Text<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// A scheme with its default settings. As text, it is the scheme's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Numerics(Scheme);

impl Numerics {
    pub(super) fn scheme(self) -> Scheme {
        self.0
    }
}

impl std::str::FromStr for Numerics {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let all = Scheme::all();
        all.iter().find(|scheme| scheme.name() == text).map(|scheme| Self(*scheme)).ok_or_else(|| {
            Error::new("unknown numerics of SLA2")
                .got(format!("`{text}`"))
                .allowed(all.iter().map(Scheme::name).collect::<Vec<_>>().join(", "))
                .hint("--sla2-numerics takes a scheme; a variant of SLA2 belongs in --attn")
        })
    }
}

impl std::fmt::Display for Numerics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0.name())
    }
}
