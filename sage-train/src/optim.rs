//! Settings of AdamW, and learning rates.

mod adamw;
mod schedule;

pub use adamw::AdamWConfig;
pub use schedule::LearningRate;
