//! The settings of AdamW for a run. The update itself is [`candle_sage::ops::AdamW`].

use candle_core::Tensor;
use candle_sage::Result;
use candle_sage::ops::AdamW;

use super::OptimizerStep;
use crate::checks::{above_zero, in_range, need};
use crate::model::Shard;
use crate::settings::{OptimizerSettings, Switch};

/// The settings of AdamW, which do not change during a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWConfig {
    /// Decay of the first moment, the mean of gradients.
    pub beta1: f64,
    /// Decay of the second moment, the mean of squared gradients.
    pub beta2: f64,
    /// Added to the square root of the second moment.
    pub eps: f64,
    /// Whether the run began with the bias-corrected moments of a checkpoint instead of zeros.
    pub initial_moments: bool,
    /// Decoupled weight decay of matrices.
    pub weight_decay: f64,
    /// Largest gradient norm; `None` turns clipping off.
    pub clip: Option<f64>,
}

impl AdamWConfig {
    /// The optimizer that table `[optimizer]` of the settings describes.
    ///
    /// # Errors
    /// When a setting is out of range.
    pub fn resolve(s: &OptimizerSettings) -> Result<Self> {
        Ok(Self {
            beta1: in_range("beta1", need(s.beta1), 0.0, 0.999_999)?,
            beta2: in_range("beta2", need(s.beta2), 0.0, 0.999_999)?,
            eps: above_zero("adam-eps", need(s.adam_eps))?,
            initial_moments: s.init_moments == Some(Switch::On),
            weight_decay: in_range("weight-decay", need(s.weight_decay), 0.0, 1.0)?,
            clip: Some(in_range("clip", need(s.clip), 0.0, 1e9)?).filter(|norm| *norm > 0.0),
        })
    }

    /// Name prefixes of the moments: the running means of the gradient and of its square.
    pub(super) const MOMENTS: &'static [&'static str] = &["adamw.mean/", "adamw.square/"];

    /// The factor that corrects a moment, after `step` steps, for its zero initialization.
    pub(super) fn unbiased(&self, moment: &str, step: u64) -> f64 {
        let beta = if moment == Self::MOMENTS[0] { self.beta1 } else { self.beta2 };
        1.0 / (1.0 - beta.powf(self.correction_step(step) as f64))
    }

    /// The step number for the bias correction after `step` steps. If the run began with bias-corrected moments, it
    /// is the largest `u64`, so that nothing is corrected.
    fn correction_step(&self, step: u64) -> u64 {
        if self.initial_moments { u64::MAX } else { step }
    }

    pub(super) fn update(
        &self,
        update: OptimizerStep,
        shard: &Shard<'_>,
        squares: &Tensor,
    ) -> candle_core::Result<()> {
        let Self { beta1, beta2, eps, weight_decay, clip, initial_moments: _ } = *self;
        let mut adamw = AdamW::new(update.lr);
        (adamw.beta1, adamw.beta2, adamw.eps, adamw.weight_decay) = (beta1, beta2, eps, weight_decay);
        adamw.decayed = if shard.decays { shard.gradient.elem_count() } else { 0 };
        adamw.step = self.correction_step(update.step);
        adamw.gradient_factor = 1.0 / update.gradients as f64;
        adamw.clip = clip;
        adamw.step(shard.state, shard.gradient, squares, shard.copy)
    }
}
