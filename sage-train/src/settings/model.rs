//! The settings of table `[model]`.

use std::path::PathBuf;

use clap::Args;
use serde::{Deserialize, Serialize};

use super::Switch;
use super::layer::layer;
use crate::model::{RopeScaling, WindowPattern};
use crate::quantity::Quantity;

/// Table `[model]`: the shape of the model, and its initial weights.
#[derive(Debug, Clone, Default, PartialEq, Args, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct ModelSettings {
    /// Start from the weights, shape and tokenizer of a run, of one of its checkpoints (RUN/checkpoints/step-N), or of
    /// a Hugging Face folder with a Llama, Mistral, Ministral, Qwen2 or Qwen3 model
    #[arg(long, value_name = "DIR")]
    pub init_from: Option<PathBuf>,
    /// Number of transformer blocks
    #[arg(long, value_name = "N")]
    pub layers: Option<usize>,
    /// Width of the residual stream
    #[arg(long, value_name = "N")]
    pub width: Option<usize>,
    /// Number of query heads
    #[arg(long, value_name = "N")]
    pub heads: Option<usize>,
    /// Number of key heads, and of value heads; it divides the number of query heads [default: --heads]
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
    /// Llama 3's scaling of the rotary embedding for longer sequences: factor, low and high frequency factor, and the
    /// original context, as in `8,1,4,8192` [default: none]
    #[arg(long, value_name = "FACTOR,LOW,HIGH,N")]
    pub rope_scaling: Option<RopeScaling>,
    /// Use an output matrix separate from the embedding [default: off]
    #[arg(long, value_enum)]
    pub untied: Option<Switch>,
    /// Biases in the query, key and value projections, as in Qwen2 [default: off]
    #[arg(long, value_enum)]
    pub qkv_bias: Option<Switch>,
    /// Sliding window: largest number of tokens that a query attends to, including its own [default: all]
    #[arg(long, value_name = "TOKENS")]
    pub window: Option<Quantity>,
    /// Layers with the sliding window of --window, as a repeated pattern with one letter per layer: S has the window, L
    /// attends to all tokens. With `SSSL` every fourth layer attends to all tokens [default: S]
    #[arg(long, value_name = "LETTERS")]
    pub window_pattern: Option<WindowPattern>,
    /// Soft cap of attention's logits, which become cap tanh(logit / cap): 50 in Gemma 2, 0 for no cap. With a cap,
    /// sagebwd needs --smoothing none; on a GPU, it also needs --products scores [default: 0]
    #[arg(long, value_name = "CAP")]
    pub softcap: Option<f64>,
    /// Attention sinks, as in GPT-OSS: a learned logit per query head in the denominator of the softmax, so that a
    /// query can attend to nothing. With sinks, sagebwd needs --smoothing none [default: off]
    #[arg(long, value_enum)]
    pub sinks: Option<Switch>,
    /// Epsilon of every RMSNorm [default: 1e-6]
    #[arg(long, value_name = "EPS")]
    pub norm_eps: Option<f64>,
}

layer! {
    ModelSettings:
    init_from [Path NotList], layers, width, heads, key_heads, head_dim, ffn, init_std, rope_base, rope_scaling [NotList], untied, qkv_bias,
    window, window_pattern, softcap, sinks, norm_eps
}
