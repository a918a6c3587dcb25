//! AdamW, gradient norms and learning rates.

mod adamw;
mod clip;
mod schedule;

pub use adamw::{AdamW, AdamWConfig};
pub use clip::{clip_factor, first_non_finite, global_norm};
pub use schedule::LearningRate;
