//! Norms with their backward, and the residual stream. Weight gradients are accumulated in place, in f32.

use candle_core::{Result, Tensor};
use candle_sage::ops;

use super::parameters::{Parameters, Weight};

/// RMSNorm of the residual stream before attention, before the feed-forward network and before the output, or
/// of each head's queries or keys.
#[derive(Debug, Clone)]
pub(super) struct Norm {
    pub(super) weight: Weight,
    pub(super) eps: f64,
}

/// The residual stream, (rows, width), as two tensors: a sum, and the output of the previous layer, which is not yet
/// added to the sum. The next norm adds the two tensors and normalizes the sum in one pass over memory.
#[derive(Debug, Clone)]
pub(super) struct Stream {
    pub(super) sum: Tensor,
    pub(super) last: Option<Tensor>,
}

impl Norm {
    pub(super) fn new(parameters: &Parameters, name: &str, eps: f64) -> Result<Self> {
        Ok(Self { weight: parameters.weight(name)?, eps })
    }

    /// Adds the previous layer's output to the residual stream. Returns the sum and the normalized sum.
    pub(super) fn enter(&self, stream: &Stream) -> Result<(Tensor, Tensor)> {
        let weight = &self.weight.value()?;
        match &stream.last {
            Some(last) => ops::residual_rms_norm(&stream.sum, last, weight, self.eps),
            None => Ok((stream.sum.clone(), ops::rms_norm(&stream.sum, weight, self.eps)?)),
        }
    }

    /// Returns the gradient of the norm's input, `sum`. `dnormed` is the gradient of the norm's output. `dstream` is
    /// the gradient that reaches `sum` through the residual connection; `None` for the final norm.
    pub(super) fn backward(
        &self,
        sum: &Tensor,
        dnormed: &Tensor,
        dstream: Option<&Tensor>,
    ) -> Result<Tensor> {
        let [dx, dweight] = ops::rms_norm_backward(sum, &self.weight.value()?, dnormed, dstream, self.eps)?;
        ops::add_into(self.weight.gradient()?, &dweight)?;
        Ok(dx)
    }
}
