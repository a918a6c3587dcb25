//! A source of data as it is typed: `PATH` or `PATH=WEIGHT`.

use std::path::PathBuf;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A path of data and its weight in the mixture.
#[derive(Debug, Clone, PartialEq)]
pub struct SourceSetting {
    /// A file, a folder or a pattern.
    pub path: PathBuf,
    /// The source's share of the batches is its weight divided by the sum of all weights. If no source has a weight,
    /// the sources are mixed by their sizes.
    pub weight: Option<f64>,
}

impl std::str::FromStr for SourceSetting {
    type Err = candle_sage::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        // The name of an existing path may contain `=`.
        if std::path::Path::new(text).exists() {
            return Ok(Self { path: text.into(), weight: None });
        }
        let weighted =
            text.rsplit_once('=').and_then(|(path, weight)| Some((path, weight.parse::<f64>().ok()?)));
        let (path, weight) = weighted.map_or((text, None), |(path, weight)| (path, Some(weight)));
        if path.is_empty() || weight.is_some_and(|weight| !(weight > 0.0 && weight.is_finite())) {
            return Err(candle_sage::Error::new("not a source of data")
                .got(format!("`{text}`"))
                .allowed("PATH or PATH=WEIGHT, with a weight above 0")
                .hint("--data web.bin=0.7 --data books.txt=0.3"));
        }
        Ok(Self { path: path.into(), weight })
    }
}

impl std::fmt::Display for SourceSetting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.weight {
            None => write!(f, "{}", self.path.display()),
            Some(weight) => write!(f, "{}={weight}", self.path.display()),
        }
    }
}

impl Serialize for SourceSetting {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// One source, or a list of them.
pub(super) fn one_or_more<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Vec<SourceSetting>>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Sources {
        One(String),
        Many(Vec<String>),
    }
    let list = match Sources::deserialize(deserializer)? {
        Sources::One(source) => vec![source],
        Sources::Many(sources) => sources,
    };
    list.iter().map(|text| text.parse().map_err(serde::de::Error::custom)).collect::<Result<_, _>>().map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_read_back_as_they_were_written() {
        for (text, path, weight) in [
            ("a.bin", "a.bin", None),
            ("a.bin=0.25", "a.bin", Some(0.25)),
            ("crawl/year=2024=1", "crawl/year=2024", Some(1.0)),
        ] {
            let source: SourceSetting = text.parse().expect("a source");
            assert_eq!(source, SourceSetting { path: path.into(), weight });
            assert_eq!(source.to_string().parse(), Ok(source), "{text}");
        }
        assert_eq!("crawl/year=x".parse::<SourceSetting>().expect("a path").weight, None);
        for bad in ["", "a=0", "a=-1", "a=inf", "=1"] {
            assert!(bad.parse::<SourceSetting>().is_err(), "{bad}");
        }
    }
}
