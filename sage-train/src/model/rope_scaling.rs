//! Llama 3's scaling of the rotary embedding, which extends a model to longer sequences than it was trained on.

use std::fmt;
use std::str::FromStr;

use candle_sage::ops::Llama3Scaling;
use candle_sage::{Error, Result};
use serde::{Deserialize, Serialize};

/// Llama 3's scaling of the rotary embedding. Its text form is `FACTOR,LOW,HIGH,CONTEXT`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RopeScaling {
    /// Divisor of low frequencies.
    pub factor: f64,
    /// Frequencies with fewer rotations than this in the original context are divided by `factor`.
    pub low_freq_factor: f64,
    /// Frequencies with more rotations than this in the original context are not changed.
    pub high_freq_factor: f64,
    /// The context of the original training, in tokens.
    pub original_context: usize,
}

impl RopeScaling {
    /// Checks the ranges of the numbers.
    ///
    /// # Errors
    /// When a number is out of range.
    pub fn check(self) -> Result<()> {
        let Self { factor, low_freq_factor: low, high_freq_factor: high, original_context } = self;
        if factor.is_finite()
            && factor >= 1.0
            && low > 0.0
            && high > low
            && high.is_finite()
            && original_context > 0
        {
            return Ok(());
        }
        Err(Error::new("rope-scaling is out of range")
            .got(self)
            .allowed("FACTOR,LOW,HIGH,N with FACTOR at least 1, 0 < LOW < HIGH, and a context N of at least 1 token")
            .hint("Llama 3.1 has 8,1,4,8192"))
    }
}

impl From<RopeScaling> for Llama3Scaling {
    fn from(scaling: RopeScaling) -> Self {
        let RopeScaling { factor, low_freq_factor, high_freq_factor, original_context: original_len } =
            scaling;
        Self { factor, low_freq_factor, high_freq_factor, original_len }
    }
}

impl FromStr for RopeScaling {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let unusable = || {
            Error::new("not a scaling of the rotary embedding")
                .got(format!("`{text}`"))
                .allowed("four numbers, separated by commas: factor, low and high frequency factor, original context")
                .hint("Llama 3.1 has 8,1,4,8192")
        };
        let words: Vec<&str> = text.split(',').map(str::trim).collect();
        let &[factor, low, high, context] = words.as_slice() else { return Err(unusable()) };
        let number = |word: &str| word.parse::<f64>().map_err(|_| unusable());
        let scaling = Self {
            factor: number(factor)?,
            low_freq_factor: number(low)?,
            high_freq_factor: number(high)?,
            original_context: context.parse().map_err(|_| unusable())?,
        };
        scaling.check().map(|()| scaling)
    }
}

impl fmt::Display for RopeScaling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { factor, low_freq_factor, high_freq_factor, original_context } = self;
        write!(f, "{factor},{low_freq_factor},{high_freq_factor},{original_context}")
    }
}

impl TryFrom<String> for RopeScaling {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<RopeScaling> for String {
    fn from(scaling: RopeScaling) -> Self {
        scaling.to_string()
    }
}
