//! Optimizers and learning-rate schedules: the state that an optimizer keeps for each parameter, the memory traffic of
//! an update, and the update itself.

mod adamw;
mod muon;
mod schedule;
mod sharing;

pub use adamw::AdamWConfig;
pub use muon::MuonConfig;
pub use schedule::LearningRate;

use candle_core::Tensor;
use candle_sage::Result;

use crate::model::{Moments, ParameterSpec, Shard};
use crate::ranks::PIECE;
use crate::settings::{OptimizerSetting, OptimizerSettings};

/// How parameters are updated. The settings do not change during a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Optimizer {
    /// AdamW.
    AdamW(AdamWConfig),
    /// Muon for hidden matrices, AdamW for everything else.
    Muon(MuonConfig),
}

/// The scalars that an update needs.
#[derive(Debug, Clone, Copy)]
pub struct OptimizerStep {
    /// Number of the step, from 1.
    pub step: u64,
    /// Learning rate of all parameters except Muon's matrices, which follow [`MuonConfig::learning_rate`].
    pub lr: f64,
    /// Number of summed gradients (of micro-batches, or of parts of them). The update divides the sum by this number.
    pub gradients: usize,
}

impl Optimizer {
    /// The optimizer that table `[optimizer]` describes, for a run with this schedule.
    ///
    /// # Errors
    /// When a setting is out of range.
    pub fn resolve(s: &OptimizerSettings, lr: &LearningRate) -> Result<Self> {
        match s.optimizer.unwrap_or(OptimizerSetting::AdamW) {
            OptimizerSetting::AdamW => AdamWConfig::resolve(s).map(Self::AdamW),
            OptimizerSetting::Muon => MuonConfig::resolve(s, lr).map(Self::Muon),
        }
    }

    /// The value of the setting `optimizer` that selects this optimizer.
    pub fn setting(&self) -> OptimizerSetting {
        match self {
            Self::AdamW(_) => OptimizerSetting::AdamW,
            Self::Muon(_) => OptimizerSetting::Muon,
        }
    }

    /// The f32 tensors that the optimizer keeps for each parameter.
    pub fn moments(&self) -> Moments {
        let others = AdamWConfig::MOMENTS;
        match self {
            Self::AdamW(_) => Moments { matrices: others, others, rows: None, whole_matrices: false },
            Self::Muon(muon) => {
                Moments { matrices: MuonConfig::MOMENTS, others, rows: muon.rows(), whole_matrices: true }
            }
        }
    }

    /// The optimizer of parameters that are not hidden matrices.
    pub fn adamw(&self) -> &AdamWConfig {
        match self {
            Self::AdamW(adamw) => adamw,
            Self::Muon(muon) => &muon.adamw,
        }
    }

    /// Bytes of memory that one optimizer step (gradient norm and update) reads and writes for each parameter, if the
    /// model computes in elements of `element` bytes.
    pub fn moved_bytes(&self, element: u64) -> u64 {
        let copy = if element == 4 { 0 } else { element };
        let state = 1 + self.moments().matrices.len() as u64;
        // Muon's update direction, in 16 bit, is written, copied and read. Each of the orthogonalization's five
        // iterations passes over it five times. With `beta2`, row normalization adds two reads and one write.
        let directions = match self {
            Self::AdamW(_) => 0,
            Self::Muon(muon) => 2 * (1 + 2 + 1 + 5 * 5 + if muon.beta2.is_some() { 3 } else { 0 }),
        };
        // The gradient is read twice; weights and moments are read and written.
        2 * 4 + 2 * 4 * state + copy + directions
    }

    /// Peak bytes of the temporary tensors of an update, without the tensors of the orthogonalization.
    pub fn scratch_bytes(&self, specs: &[ParameterSpec], element: u64) -> u64 {
        match self {
            Self::AdamW(_) => 0,
            // The update directions of hidden matrices. They exist for one piece (about `PIECE` parameters) at a time.
            Self::Muon(_) => {
                let matrices = specs.iter().filter(|spec| spec.kind.is_hidden_matrix());
                matrices.map(ParameterSpec::len).sum::<u64>().min(PIECE as u64) * element
            }
        }
    }

    /// Largest gradient norm; `None` turns clipping off.
    pub fn clip(&self) -> Option<f64> {
        self.adamw().clip
    }

    /// Whether the run began with the moments of the checkpoint of `--init-from` instead of zeros.
    pub fn has_initial_moments(&self) -> bool {
        self.adamw().initial_moments
    }

    /// The factor that corrects a moment, after `step` steps, for its zero initialization.
    pub fn unbiased(&self, moment: &str, step: u64) -> f64 {
        match self {
            Self::AdamW(adamw) => adamw.unbiased(moment, step),
            Self::Muon(muon) => muon.unbiased(moment, step),
        }
    }

    /// Updates a shard of the parameters. `squares` is the sum of squares of the gradient of all parameters: if it is
    /// not finite, nothing changes.
    ///
    /// # Errors
    /// When the shard's state belongs to another optimizer.
    pub fn update(
        &self,
        update: OptimizerStep,
        shard: &Shard<'_>,
        squares: &Tensor,
    ) -> candle_core::Result<()> {
        match self {
            Self::AdamW(adamw) => adamw.update(update, shard, squares),
            Self::Muon(muon) => muon.update(update, shard, squares),
        }
    }
}
