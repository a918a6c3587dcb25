//! Settings of AdamW that stay the same for a run; the update itself is [`candle_sage::ops::AdamW`].

use candle_sage::ops::AdamW;

/// Settings that stay the same for a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWConfig {
    /// Decay of the mean of gradients.
    pub beta1: f64,
    /// Decay of the mean of squared gradients.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay of matrices.
    pub weight_decay: f64,
    /// Largest gradient norm; `None` does not clip.
    pub clip: Option<f64>,
}

impl AdamWConfig {
    /// The update of a step, from 1, whose gradients are the sum of `micro_batches`.
    pub fn step(&self, step: u64, lr: f64, micro_batches: usize) -> AdamW {
        AdamW {
            lr,
            beta1: self.beta1,
            beta2: self.beta2,
            eps: self.eps,
            weight_decay: self.weight_decay,
            decayed: 0,
            step,
            gradient_factor: 1.0 / micro_batches as f64,
            clip: self.clip,
        }
    }
}
