//! Linear maps and norms with their way back: gradients of weights are added where they are kept, in f32.

use candle_core::{Result, Tensor};
use candle_sage::ops;

use super::parameters::{Parameters, Weight};

/// `y = x W^T` of rows, without bias.
#[derive(Debug, Clone)]
pub(super) struct Linear(Weight);

impl Linear {
    /// Of the matrix `{at}.{name}.weight`; several of the same input in one product, whose outputs lie side by side.
    pub(super) fn new(parameters: &Parameters, at: &str, names: &[&str]) -> Result<Self> {
        let names: Vec<String> = names.iter().map(|name| format!("{at}.{name}.weight")).collect();
        Ok(Self(parameters.joined(&names)?))
    }

    /// (rows, inputs) -> (rows, outputs).
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.matmul(&self.0.value.t()?)
    }

    /// Adds the weight's gradient; returns the input's.
    pub(super) fn backward(&self, x: &Tensor, dy: &Tensor) -> Result<Tensor> {
        self.backward_weight(x, dy)?;
        self.backward_input(dy)
    }

    /// As [`Linear::backward`], but adds the input's gradient to `dx`.
    pub(super) fn backward_into(&self, dx: &Tensor, x: &Tensor, dy: &Tensor) -> Result<()> {
        self.backward_weight(x, dy)?;
        ops::product_into(dx, dy, &self.0.value, 1.0, true)
    }

    /// The input's gradient alone.
    pub(super) fn backward_input(&self, dy: &Tensor) -> Result<Tensor> {
        dy.matmul(&self.0.value)
    }

    /// Adds the weight's gradient alone.
    pub(super) fn backward_weight(&self, x: &Tensor, dy: &Tensor) -> Result<()> {
        let add = self.0.take_turn();
        ops::product_into(self.0.gradient()?, &dy.t()?, x, 1.0, add)
    }
}

/// RMSNorm: of the residual stream, at the door of a layer, or of each head of queries or keys.
#[derive(Debug, Clone)]
pub(super) struct Norm {
    pub(super) weight: Weight,
    pub(super) eps: f64,
}

/// The residual stream, (rows, width): a sum, and what the last layer adds to it. The next norm adds the two up.
#[derive(Debug, Clone)]
pub(super) struct Stream {
    pub(super) sum: Tensor,
    pub(super) last: Option<Tensor>,
}

impl Norm {
    pub(super) fn new(parameters: &Parameters, name: &str, eps: f64) -> Result<Self> {
        Ok(Self { weight: parameters.weight(name)?, eps })
    }

    /// The whole sum, and that normalized.
    pub(super) fn enter(&self, stream: &Stream) -> Result<(Tensor, Tensor)> {
        let weight = &self.weight.value;
        match &stream.last {
            Some(last) => ops::residual_rms_norm(&stream.sum, last, weight, self.eps),
            None => Ok((stream.sum.clone(), ops::rms_norm(&stream.sum, weight, self.eps)?)),
        }
    }

    /// The gradient of the stream before, from that of the normalized rows and, where the stream went on, of the stream
    /// after.
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
