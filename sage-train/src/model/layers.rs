//! Linear maps and norms with their backward. Gradients of weights are added in place, in f32.

use candle_core::{Result, Tensor};
use candle_sage::ops;

use super::parameters::{Parameters, Weight};

/// `y = x W^T` on rows, without bias.
#[derive(Debug, Clone)]
pub(super) struct Linear(Weight);

impl Linear {
    /// The matrix `{at}.{name}.weight`. Several names make one product over a common input, whose outputs are
    /// concatenated along the columns.
    pub(super) fn new(parameters: &Parameters, at: &str, names: &[&str]) -> Result<Self> {
        let names: Vec<String> = names.iter().map(|name| format!("{at}.{name}.weight")).collect();
        Ok(Self(parameters.joined(&names)?))
    }

    /// (rows, inputs) -> (rows, outputs).
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.matmul(&self.0.value.t()?)
    }

    /// Adds the gradient of the weight and returns that of the input.
    pub(super) fn backward(&self, x: &Tensor, dy: &Tensor) -> Result<Tensor> {
        self.backward_weight(x, dy)?;
        self.backward_input(dy)
    }

    /// As [`Linear::backward`], but adds the gradient of the input to `dx`.
    pub(super) fn backward_into(&self, dx: &Tensor, x: &Tensor, dy: &Tensor) -> Result<()> {
        self.backward_weight(x, dy)?;
        ops::product_into(dx, dy, &self.0.value, 1.0, true)
    }

    /// Returns the gradient of the input alone.
    pub(super) fn backward_input(&self, dy: &Tensor) -> Result<Tensor> {
        dy.matmul(&self.0.value)
    }

    /// Adds the gradient of the weight alone.
    pub(super) fn backward_weight(&self, x: &Tensor, dy: &Tensor) -> Result<()> {
        let add = self.0.take_turn();
        ops::product_into(self.0.gradient()?, &dy.t()?, x, 1.0, add)
    }
}

/// RMSNorm of the residual stream before attention, before the feed-forward network and before the output, or
/// of each head's queries or keys.
#[derive(Debug, Clone)]
pub(super) struct Norm {
    pub(super) weight: Weight,
    pub(super) eps: f64,
}

/// The residual stream, (rows, width), as a sum and the output of the last layer, which is not yet added: the
/// next norm adds the two in the same pass over memory.
#[derive(Debug, Clone)]
pub(super) struct Stream {
    pub(super) sum: Tensor,
    pub(super) last: Option<Tensor>,
}

impl Norm {
    pub(super) fn new(parameters: &Parameters, name: &str, eps: f64) -> Result<Self> {
        Ok(Self { weight: parameters.weight(name)?, eps })
    }

    /// Returns the residual stream with the last layer's output added, and its normalization.
    pub(super) fn enter(&self, stream: &Stream) -> Result<(Tensor, Tensor)> {
        let weight = &self.weight.value;
        match &stream.last {
            Some(last) => ops::residual_rms_norm(&stream.sum, last, weight, self.eps),
            None => Ok((stream.sum.clone(), ops::rms_norm(&stream.sum, weight, self.eps)?)),
        }
    }

    /// Returns the gradient of the residual stream at the norm's input. `dnormed` is the gradient of the
    /// normalized rows, `dstream` that of the stream that continues past the norm, if it does.
    pub(super) fn backward(
        &self,
        sum: &Tensor,
        dnormed: &Tensor,
        dstream: Option<&Tensor>,
    ) -> Result<Tensor> {
        let [dx, dweight] = ops::rms_norm_backward(sum, &self.weight.value, dnormed, dstream, self.eps)?;
        ops::add_into(self.weight.gradient()?, &dweight)?;
        Ok(dx)
    }
}
