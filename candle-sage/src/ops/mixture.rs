//! The linear tail and its mixture with attention over selected keys (exact attention), computed outside candle's
//! graph.
//!
//! On a GPU the tail's kernels also compute the mixture: neither the tail's output nor its gradient is stored in
//! memory. On the CPU, and for tails without kernels, [`past_linear`] and [`blend`] run one after the other.

use candle_core::{CudaStorage, Result, Tensor};

use super::blend::{Alpha, Blend, blend, blend_backward};
use super::past_linear::{PastLinear, Tail, past_linear, past_linear_backward_onto};
use super::support::{cuda_tensor, supported, with_cuda};
use crate::launch::Launch;
use crate::selection::Selection;

const NAME: &str = "past-linear mixture";

/// The [`blend`] of exact attention's output and the output of [`past_linear`].
pub(crate) struct Mixture {
    pub(crate) tail: PastLinear,
    pub(crate) blend: Blend,
}

/// Query, key, value, the output of exact attention, and the `theta` of [`blend`].
type Inputs<'a> = [&'a Tensor; 5];

impl Mixture {
    /// # Errors
    /// When the inputs do not match the selection or each other.
    pub(crate) fn new(
        [q, k, v, sparse, theta]: Inputs<'_>,
        selection: &Selection,
        tail: Tail,
        alpha: Alpha,
    ) -> Result<Self> {
        let tail = PastLinear::new([q, k, v], selection, tail)?;
        // `q` stands for the tail's output, which has the same shape and type.
        let blend = Blend::new([sparse, q, theta], selection, alpha)?;
        Ok(Self { tail, blend })
    }

    fn tail_of(&self, [q, k, v, ..]: Inputs<'_>) -> Result<Tensor> {
        past_linear(q, k, v, &self.tail.selection, self.tail.tail)
    }

    /// The output and, if the backward needs it, the tail's output.
    ///
    /// # Errors
    /// When the device fails.
    pub(crate) fn forward(&self, inputs: Inputs<'_>) -> Result<(Tensor, Option<Tensor>)> {
        let [q, k, v, sparse, theta] = inputs;
        if q.device().is_cuda() && !self.tail.lacks_kernels(q) {
            let theta = &theta.contiguous()?;
            let out = with_cuda(NAME, [q, k, v, sparse, theta], |operands| self.launch(operands))?;
            return Ok((cuda_tensor(out, q.shape()), None));
        }
        let tail = self.tail_of(inputs)?;
        let out = blend(sparse, &tail, theta, &self.blend.selection, self.blend.alpha)?;
        Ok((out, Some(tail)))
    }

    /// The gradient of [`blend`]'s `theta`. `tail` is the output of [`past_linear`]; if it is `None`, it is recomputed.
    ///
    /// # Errors
    /// When `dout` does not fit the output.
    pub(crate) fn theta_gradient(
        &self,
        inputs: Inputs<'_>,
        tail: Option<&Tensor>,
        dout: &Tensor,
    ) -> Result<Tensor> {
        let [.., sparse, theta] = inputs;
        let tail = tail.map_or_else(|| self.tail_of(inputs), |tail| Ok(tail.clone()))?;
        let [_, _, dtheta] =
            blend_backward([sparse, &tail, theta], &self.blend.selection, self.blend.alpha, dout)?;
        Ok(dtheta)
    }

    /// The gradients of query, key, value and `theta`. `exact` is the backward of the attention over selected keys.
    ///
    /// # Errors
    /// When `dout` does not match the output, and the errors of `exact`.
    pub(crate) fn backward(
        &self,
        inputs: Inputs<'_>,
        tail: Option<&Tensor>,
        dout: &Tensor,
        exact: impl FnOnce(&Tensor) -> Result<[Tensor; 3]>,
    ) -> Result<[Tensor; 4]> {
        let [q, k, v, sparse, theta] = inputs;
        let selection = &self.blend.selection;
        let Some(tail) = tail else { return self.backward_on_cuda(inputs, dout, exact) };
        let [dsparse, dtail, dtheta] =
            blend_backward([sparse, tail, theta], selection, self.blend.alpha, dout)?;
        let gradients = exact(&dsparse)?;
        let [dq, dk, dv] =
            past_linear_backward_onto([q, k, v], selection, self.tail.tail, &dtail, gradients)?;
        Ok([dq, dk, dv, dtheta])
    }

    /// [`Self::backward`] on a GPU, in two launches, with the backward of exact attention between them. The first
    /// launch computes the gradient of exact attention's output, and partial sums of `theta`'s gradient. The second
    /// launch adds the tail's gradients to the gradients of query, key and value in place, adds the tail's terms to the
    /// partial sums, and computes the gradient of `theta`.
    fn backward_on_cuda(
        &self,
        [q, k, v, sparse, theta]: Inputs<'_>,
        dout: &Tensor,
        exact: impl FnOnce(&Tensor) -> Result<[Tensor; 3]>,
    ) -> Result<[Tensor; 4]> {
        let theta = &theta.contiguous()?;
        self.tail.check_dout(q, dout)?;
        supported(NAME, &[q, k, v, sparse, theta, dout])?;
        let [dsparse, parts]: [CudaStorage; 2] =
            with_cuda(NAME, [sparse, theta, dout], |operands| self.launch(operands))?;
        let (dsparse, parts) =
            (cuda_tensor(dsparse, q.shape()), cuda_tensor(parts, self.blend.theta_parts()));
        let [dq, dk, dv] = exact(&dsparse)?;
        // `dsparse` is freed, and the tail's gradients are added in place: peak memory is as low as without a tail.
        drop(dsparse);
        let all = [q, k, v, theta, dout, &dq, &dk, &dv, &parts];
        let dtheta: CudaStorage = with_cuda(NAME, all, |operands| self.launch(operands))?;
        Ok([dq, dk, dv, cuda_tensor(dtheta, theta.shape())])
    }
}
