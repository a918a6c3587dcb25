//! Differentiable operators, one file each: what a transformer needs and candle has no gradient for, or
//! only a slow or large one.
//!
//! Each is a candle custom op: it joins candle's graph, and `backward()` reaches its inputs.

mod attention;
mod cross_entropy;
mod embedding;
mod qk_norm_rope;
mod rms_norm;
mod rope;
mod support;
mod swiglu;

pub use attention::{Attention, AttentionVjp};
pub use cross_entropy::{CrossEntropy, cross_entropy, linear_cross_entropy};
pub use embedding::embedding;
pub use qk_norm_rope::qk_norm_rope;
pub use rms_norm::rms_norm;
pub use rope::{RopeStyle, rope, rope_tables};
pub use swiglu::swiglu;
