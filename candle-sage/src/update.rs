//! The settings of an update of all parameters: numbers alone, for CPU and GPU.

/// One step of AdamW (Adam with decoupled weight decay, arXiv 1711.05101), with clipping by the global norm.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the mean of gradients.
    pub beta1: f64,
    /// Decay of the mean of squared gradients.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// The first so many parameters decay.
    pub decayed: usize,
    /// The step's number, from 1.
    pub step: u64,
    /// Factor of the gradient: one over the number of micro-batches that were added up.
    pub gradient_factor: f64,
    /// Largest norm of the gradient times that factor; larger ones are scaled down to it.
    pub clip: Option<f64>,
}

/// What the step's number makes of the settings.
pub(crate) struct Factors {
    pub(crate) rate: f32,
    pub(crate) root: f32,
    pub(crate) keep: f32,
}

impl AdamW {
    pub(crate) fn factors(&self) -> Factors {
        let corrected = |beta: f64| 1.0 - beta.powf(self.step as f64);
        Factors {
            rate: (self.lr / corrected(self.beta1)) as f32,
            root: (1.0 / corrected(self.beta2)) as f32,
            keep: (1.0 - self.lr * self.weight_decay) as f32,
        }
    }
}
