//! The settings of table `[model]`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use candle_sage::ops::Llama3Scaling;
use candle_sage::{Error, Result};
use clap::Args;
use serde::{Deserialize, Serialize};

use super::Switch;
use super::layer::layer;

/// Llama 3's scaling of the rotary embedding, as `FACTOR,LOW,HIGH,CONTEXT`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RopeScaling {
    /// Divisor of low frequencies.
    pub factor: f64,
    /// A frequency with fewer turns in the original context is low.
    pub low_freq_factor: f64,
    /// A frequency with more turns in the original context is not changed.
    pub high_freq_factor: f64,
    /// The context of the training before, in tokens.
    pub original_context: usize,
}

impl RopeScaling {
    /// Checks that the numbers are a scaling.
    ///
    /// # Errors
    /// When one is out of range.
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
            .allowed("a factor of at least 1, 0 < low < high, a context of at least 1 token")
            .hint("that of Llama 3.1 is 8,1,4,8192"))
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
                .allowed("four numbers with commas: factor, low and high frequency factor, original context")
                .hint("that of Llama 3.1 is 8,1,4,8192")
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

/// Table `[model]`: the shape of the model, and its initial weights.
#[derive(Debug, Clone, Default, PartialEq, Args, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct ModelSettings {
    /// Begin with the weights, the shape and the tokenizer of a run, of one of its checkpoints (RUN/checkpoints/step-N), or of a
    /// Hugging Face folder: a Llama, Mistral, Qwen2 or Qwen3
    #[arg(long, value_name = "DIR")]
    pub init_from: Option<PathBuf>,
    /// Transformer blocks
    #[arg(long, value_name = "N")]
    pub layers: Option<usize>,
    /// Width of the residual stream
    #[arg(long, value_name = "N")]
    pub width: Option<usize>,
    /// Query heads
    #[arg(long, value_name = "N")]
    pub heads: Option<usize>,
    /// Key and value heads, a divisor of the query heads [default: as many]
    #[arg(long, value_name = "N")]
    pub key_heads: Option<usize>,
    /// Width of a head
    #[arg(long, value_name = "N")]
    pub head_dim: Option<usize>,
    /// Hidden width of the SwiGLU network
    #[arg(long, value_name = "N")]
    pub ffn: Option<usize>,
    /// Standard deviation of the initial weights
    #[arg(long, value_name = "STD")]
    pub init_std: Option<f64>,
    /// Base of the rotary embedding [default: 10000]
    #[arg(long, value_name = "BASE")]
    pub rope_base: Option<f64>,
    /// Llama 3's scaling of the rotary embedding for longer sequences: factor, low and high frequency factor, and the original context,
    /// as in 8,1,4,8192 [default: none]
    #[arg(long, value_name = "FACTOR,LOW,HIGH,N")]
    pub rope_scaling: Option<RopeScaling>,
    /// An output matrix apart from the embedding [default: off]
    #[arg(long, value_enum)]
    pub untied: Option<Switch>,
    /// Biases in the projections of query, key and value, as Qwen2 has them [default: off]
    #[arg(long, value_enum)]
    pub qkv_bias: Option<Switch>,
    /// Epsilon of every RMSNorm [default: 1e-6]
    #[arg(long, value_name = "EPS")]
    pub norm_eps: Option<f64>,
}

layer! {
    ModelSettings:
    init_from [Path Whole], layers, width, heads, key_heads, head_dim, ffn, init_std, rope_base, rope_scaling, untied, qkv_bias,
    norm_eps
}
