//! Settings of AdamW, and learning-rate schedules.

mod adamw;
mod schedule;

pub use adamw::AdamWConfig;
pub use schedule::LearningRate;
