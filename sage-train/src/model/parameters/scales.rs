//! The scales of FP8 operands with delayed scaling. They are computed from the operands' largest absolute values in
//! earlier steps, and are part of the training state in a checkpoint.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use candle_sage::ops::Fp8Scales;

use super::Parameters;
use crate::model::LlamaConfig;
use crate::ranks::{Group, Ranks};

impl Parameters {
    /// The scales of the FP8 operands of linear layers, created at the first call.
    pub(in crate::model) fn scales(&self, config: &LlamaConfig) -> Result<Arc<Fp8Scales>> {
        if let Some(scales) = self.scales.get() {
            return Ok(scales.clone());
        }
        let device = self.held.first().map_or(&Device::Cpu, |held| held.state.device());
        let made = Fp8Scales::new(&config.operand_formats(), device)?;
        Ok(self.scales.get_or_init(|| made).clone())
    }

    /// Restores the scales of FP8 operands from a checkpoint's `state`. If `state` is empty, each scale is computed at
    /// the first use of its operand.
    ///
    /// # Errors
    /// When the scales belong to another model.
    pub fn restore_scales(&self, config: &LlamaConfig, state: &[[f32; 2]]) -> Result<()> {
        if state.is_empty() || config.operand_formats().is_empty() {
            return Ok(());
        }
        self.scales(config)?.restore(state)
    }

    /// How many values of FP8 operands have saturated since the last call; `None` without delayed scaling.
    ///
    /// # Errors
    /// When the device fails.
    pub fn take_saturated(&self) -> Result<Option<u64>> {
        self.scales.get().map(|scales| scales.take_saturated()).transpose()
    }
}

/// Called once in each step: computes the next step's scales from the operands' largest absolute values on all ranks.
pub(super) fn rescale(scales: &Fp8Scales, ranks: &Ranks) -> Result<()> {
    if ranks.rank().of > 1 {
        scales.set_largest(&largest_of(&scales.largest()?.force_contiguous()?, ranks.all())?)?;
    }
    scales.rescale()
}

/// The elementwise maximum of `own` over the ranks of a group.
pub(super) fn largest_of(own: &Tensor, group: &Group) -> Result<Tensor> {
    let (of, len) = (group.rank().of, own.elem_count());
    let all = Tensor::zeros(of * len, DType::F32, own.device())?;
    group.wait(group.gather(own, &all)?)?;
    // One `maximum` per rank instead of a reduction, because candle's reductions copy the tensor's shape to the device,
    // and this copy waits for all earlier work.
    let of_rank = |rank: usize| all.narrow(0, rank * len, len);
    (1..of).try_fold(of_rank(0)?, |largest, rank| largest.maximum(&of_rank(rank)?))
}
