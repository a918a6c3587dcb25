//! The settings of Muon for a run. The update itself is [`candle_sage::ops::Muon`]; parameters that are not hidden matrices have AdamW.

use candle_core::Tensor;
use candle_sage::Result;
use candle_sage::ops::{Muon, MuonScale, Orthogonalization};

use super::sharing::Sharing;
use super::{AdamWConfig, OptimizerStep};
use crate::checks::{above_zero, in_range, need};
use crate::model::Shard;
use crate::settings::{MuonHeadsSetting, OptimizerSettings};

/// The settings of Muon, which do not change during a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MuonConfig {
    /// Of all other parameters; its weight decay and clipping are those of matrices too.
    pub adamw: AdamWConfig,
    /// The learning rate of matrices divided by the learning rate of all other parameters.
    pub rate: f64,
    /// Decay of the momentum.
    pub momentum: f64,
    /// The polynomials of the orthogonalization.
    pub orthogonalization: Orthogonalization,
    /// The length of a step.
    pub scale: MuonScale,
    /// Whether each head of query, key and value is a matrix.
    pub heads_apart: bool,
}

impl MuonConfig {
    /// The optimizer that settings describe: part of table `[optimizer]`.
    ///
    /// # Errors
    /// When a setting is out of range.
    pub fn resolve(s: &OptimizerSettings) -> Result<Self> {
        let lr = need(s.lr);
        let of_matrices = above_zero("muon-lr", s.muon_lr.unwrap_or(lr))?;
        Ok(Self {
            adamw: AdamWConfig::resolve(s)?,
            rate: of_matrices / lr,
            momentum: in_range("muon-momentum", s.muon_momentum.unwrap_or(0.95), 0.0, 0.999_999)?,
            orthogonalization: s.muon_orthogonalization.unwrap_or_default().into(),
            scale: s.muon_scale.unwrap_or_default().into(),
            heads_apart: s.muon_heads.unwrap_or_default() == MuonHeadsSetting::Apart,
        })
    }

    /// The running mean of a matrix's gradient.
    pub(super) const MOMENTS: &'static [&'static str] = &["muon.momentum/"];

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
        let mut muon = Muon::new(update.lr * self.rate);
        muon.momentum = self.momentum;
        muon.weight_decay = self.adamw.weight_decay;
        (muon.orthogonalization, muon.scale) = (self.orthogonalization, self.scale);
        muon.gradient_factor = 1.0 / update.gradients as f64;
        muon.clip = self.adamw.clip;
        let (sharing, ranks) = (Sharing::new(matrices, self.heads_apart), matrices.ranks);
        let directions =
            muon.directions(shard.state, shard.gradient, squares, &sharing.parts, sharing.len)?;
        ranks.wait(sharing.collect(&directions, ranks)?)?;
        muon.orthogonalize(&directions, &sharing.own)?;
        ranks.wait(sharing.give_back(&directions, ranks)?)?;
        muon.apply(shard.state, &directions, squares, &sharing.parts, shard.copy)
    }
}
