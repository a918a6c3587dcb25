//! Optimizers: what they keep and move for each parameter, and their updates; and learning-rate schedules.

mod adamw;
mod schedule;

pub use adamw::AdamWConfig;
pub use schedule::LearningRate;

use candle_core::Tensor;
use candle_sage::Result;

use crate::model::Shard;
use crate::settings::OptimizerSettings;

/// How parameters are updated. The settings do not change during a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Optimizer {
    /// AdamW.
    AdamW(AdamWConfig),
}

/// An update by a gradient that is a sum of mean gradients.
#[derive(Debug, Clone, Copy)]
pub struct OptimizerStep {
    /// Number of the step, from 1.
    pub step: u64,
    /// Learning rate.
    pub lr: f64,
    /// Number of mean gradients in the sum.
    pub gradients: usize,
}

impl Optimizer {
    /// The optimizer that table `[optimizer]` describes.
    ///
    /// # Errors
    /// When a setting is out of range.
    pub fn resolve(s: &OptimizerSettings) -> Result<Self> {
        AdamWConfig::resolve(s).map(Self::AdamW)
    }

    /// What is kept of each parameter in addition to its weights, in f32: prefixes of its name in checkpoints, each with a `/`.
    pub fn moments(&self) -> &'static [&'static str] {
        match self {
            Self::AdamW(_) => AdamWConfig::MOMENTS,
        }
    }

    /// Bytes of memory that the norm of the gradient and the update read and write for each parameter, if the model computes in elements of
    /// `element` bytes.
    pub fn moved_bytes(&self, element: u64) -> u64 {
        let copy = if element == 4 { 0 } else { element };
        let state = 1 + self.moments().len() as u64;
        // The gradient twice, weights and moments in both directions.
        match self {
            Self::AdamW(_) => 2 * 4 + 2 * 4 * state + copy,
        }
    }

    /// Largest gradient norm; `None` turns clipping off.
    pub fn clip(&self) -> Option<f64> {
        match self {
            Self::AdamW(adamw) => adamw.clip,
        }
    }

    /// Whether a run begins with moments of a checkpoint.
    pub fn has_initial_moments(&self) -> bool {
        match self {
            Self::AdamW(adamw) => adamw.initial_moments,
        }
    }

    /// The factor that takes the bias of zero initial values from a moment after `step` steps.
    pub fn unbiased(&self, moment: &str, step: u64) -> f64 {
        match self {
            Self::AdamW(adamw) => adamw.unbiased(moment, step),
        }
    }

    /// Updates a shard. `squares` is the sum of squares of the whole gradient: where it is not finite nothing changes.
    ///
    /// # Errors
    /// When the shard's state is another optimizer's.
    pub fn update(
        &self,
        update: OptimizerStep,
        shard: &Shard<'_>,
        squares: &Tensor,
    ) -> candle_core::Result<()> {
        match self {
            Self::AdamW(adamw) => adamw.update(update, shard, squares),
        }
    }
}
