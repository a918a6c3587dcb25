//! Neural-network modules: each stores its parameters and calls an operator of [`crate::ops`].
//!
//! `new` makes a module from its tensors. `load` reads the tensors from a `candle_nn::VarBuilder`, under the names that
//! Hugging Face's Llama, Qwen2 and Qwen3 checkpoints use. A module with one input implements candle's `Module`.
//! [`AdamW`] and [`Muon`] implement candle's `Optimizer`.

mod feed_forward;
mod fp8_linear;
mod layer_norm;
mod linear;
mod optimizer;
mod rms_norm;
mod rotary;
mod self_attention;
mod sparse_linear;

pub use candle_nn::kv_cache::KvCache;
pub use feed_forward::FeedForward;
pub use fp8_linear::Fp8Linear;
pub use layer_norm::LayerNorm;
pub use linear::Linear;
pub use optimizer::{AdamW, Muon, MuonConfig};
pub use rms_norm::RmsNorm;
pub use rotary::Rotary;
pub use self_attention::{Biases, SelfAttention, SelfAttentionConfig};
pub use sparse_linear::SparseLinearAttention;
