//! The settings of Muon for a run. The update itself is [`candle_sage::ops::Muon`]; AdamW updates all parameters that
//! are not hidden matrices.

use candle_core::Tensor;
use candle_sage::Result;
use candle_sage::ops::{Muon, MuonScale, Orthogonalization};

use super::sharing::WorkShare;
use super::{AdamWConfig, LearningRate, OptimizerStep};
use crate::checks::{above_zero, in_range};
use crate::model::Shard;
use crate::settings::{MuonHeadsSetting, OptimizerSettings};

/// The settings of Muon for a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MuonConfig {
    /// AdamW's settings, for all parameters except hidden matrices. Its `clip` also applies to hidden matrices.
    pub adamw: AdamWConfig,
    /// The learning-rate schedule of hidden matrices.
    pub learning_rate: LearningRate,
    /// Decoupled weight decay of hidden matrices.
    pub weight_decay: f64,
    /// Decay of the momentum.
    pub momentum: f64,
    /// Decay of the running mean square of each row of an orthogonalized matrix; `None` turns row normalization off.
    pub beta2: Option<f64>,
    /// The polynomials of the orthogonalization.
    pub orthogonalization: Orthogonalization,
    /// The scale of a step.
    pub scale: MuonScale,
    /// Whether each head of a query, key or value matrix is orthogonalized as a separate matrix.
    pub heads_apart: bool,
}

impl MuonConfig {
    /// The optimizer that table `[optimizer]` of the settings describes. `lr` is the learning-rate schedule of
    /// the weights that AdamW updates.
    ///
    /// # Errors
    /// When a setting is out of range.
    pub fn resolve(s: &OptimizerSettings, lr: &LearningRate) -> Result<Self> {
        let adamw = AdamWConfig::resolve(s)?;
        let peak = above_zero("muon-lr", s.muon_lr.unwrap_or(lr.peak))?;
        let warmup =
            s.muon_warmup_steps.map(|warmup| in_range("muon-warmup-steps", warmup.0, 0, lr.steps - 1));
        Ok(Self {
            adamw,
            learning_rate: LearningRate {
                peak,
                floor: lr.floor * (peak / lr.peak),
                warmup: warmup.transpose()?.unwrap_or(lr.warmup),
                ..*lr
            },
            weight_decay: in_range(
                "muon-weight-decay",
                s.muon_weight_decay.unwrap_or(adamw.weight_decay),
                0.0,
                1.0,
            )?,
            beta2: s.muon_beta2.map(|beta| in_range("muon-beta2", beta, 0.0, 0.999_999)).transpose()?,
            momentum: in_range("muon-momentum", s.muon_momentum.unwrap_or(0.95), 0.0, 0.999_999)?,
            orthogonalization: s.muon_orthogonalization.unwrap_or_default().into(),
            scale: s.muon_scale.unwrap_or_default().into(),
            heads_apart: s.muon_heads.unwrap_or_default() == MuonHeadsSetting::Apart,
        })
    }

    /// The running mean of a matrix's gradient.
    pub(super) const MOMENTS: &'static [&'static str] = &["muon.momentum/"];

    /// Prefix of the names of the row statistics (a mean square for each row of a hidden matrix); `None` without row
    /// normalization.
    pub(super) fn rows(&self) -> Option<&'static str> {
        self.beta2.map(|_| "muon.row_square/")
    }

    /// As [`AdamWConfig::unbiased`].
    pub(super) fn unbiased(&self, moment: &str, step: u64) -> f64 {
        if moment != Self::MOMENTS[0] {
            return self.adamw.unbiased(moment, step);
        }
        if self.adamw.initial_moments { 1.0 } else { 1.0 / (1.0 - self.momentum.powf(step as f64)) }
    }

    pub(super) fn update(
        &self,
        update: OptimizerStep,
        shard: &Shard<'_>,
        squares: &Tensor,
    ) -> candle_core::Result<()> {
        let Some(matrices) = &shard.matrices else { return self.adamw.update(update, shard, squares) };
        let Self {
            adamw,
            learning_rate,
            weight_decay,
            momentum,
            beta2,
            orthogonalization,
            scale,
            heads_apart,
        } = self;
        let mut muon = Muon::new(learning_rate.at(update.step - 1));
        (muon.momentum, muon.beta2) = (*momentum, *beta2);
        muon.weight_decay = *weight_decay;
        (muon.orthogonalization, muon.scale) = (*orthogonalization, *scale);
        muon.gradient_factor = 1.0 / update.gradients as f64;
        muon.clip = adamw.clip;
        let (sharing, ranks) = (WorkShare::new(matrices, *heads_apart), matrices.ranks);
        let directions =
            muon.directions(shard.state, shard.gradient, squares, &sharing.parts, sharing.len)?;
        ranks.wait(sharing.collect(&directions, ranks)?)?;
        muon.orthogonalize(&directions, &sharing.own)?;
        let rows = matrices.rows.map(|rows| sharing.own_rows(rows, ranks)).transpose()?;
        muon.normalize_rows(&directions, squares, &sharing.own, rows.as_ref())?;
        ranks.wait(sharing.give_back(&directions, matrices.rows, ranks)?)?;
        muon.apply(shard.state, &directions, squares, &sharing.parts, shard.copy)
    }
}
