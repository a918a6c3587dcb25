//! Modules that models import: each holds its parameters and calls an operator of [`crate::ops`].
//!
//! They are made from parts with `new`, or from a `candle_nn::VarBuilder` with `load`, under the names
//! that Hugging Face's Llama, Qwen2 and Qwen3 checkpoints use. Those of one input are candle `Module`s.

mod feed_forward;
mod linear;
mod rms_norm;
mod rotary;
mod self_attention;
mod sparse_linear;

pub use candle_nn::kv_cache::KvCache;
pub use feed_forward::FeedForward;
pub use linear::Linear;
pub use rms_norm::RmsNorm;
pub use rotary::Rotary;
pub use self_attention::{Biases, SelfAttention, SelfAttentionConfig};
pub use sparse_linear::SparseLinearAttention;
