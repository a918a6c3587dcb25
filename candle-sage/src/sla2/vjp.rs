//! The backward of SLA2 without candle's graph.

use candle_core::{Result, Tensor};

use crate::ops::AttentionVjp;
use crate::ops::mixture::Mixture;

/// The backward of one forward: see [`Sla2::vjp`](crate::Sla2::vjp).
pub struct Sla2Vjp {
    pub(super) attention: AttentionVjp,
    /// The inputs of [`Mixture`]: query, key, value, the output of attention over the selected blocks, and `theta`.
    pub(super) inputs: [Tensor; 5],
    /// `None` without a tail. The inner tensor is the tail's output, if the forward kept it.
    pub(super) mixture: Option<(Mixture, Option<Tensor>)>,
}

impl Sla2Vjp {
    /// Only the gradient of [`Sla2`](crate::Sla2)'s `theta` for the output's gradient `dout`. Does not run attention's
    /// backward. The gradient is zero without a tail.
    ///
    /// # Errors
    /// When `dout` does not fit the output.
    pub fn theta_gradient(&self, dout: &Tensor) -> Result<Tensor> {
        let [.., theta] = &self.inputs;
        let Some((mixture, tail)) = &self.mixture else { return theta.zeros_like() };
        mixture.theta_gradient(self.inputs.each_ref(), tail.as_ref(), dout)
    }

    /// The gradients of query, key, value and `theta` for the output's gradient `dout`. The gradient of `theta` is zero
    /// without a tail.
    ///
    /// # Errors
    /// When `dout` does not fit the output.
    pub fn apply(&self, dout: &Tensor) -> Result<[Tensor; 4]> {
        let exact = |dout: &Tensor| self.attention.apply(dout);
        let Some((mixture, tail)) = &self.mixture else {
            let [.., theta] = &self.inputs;
            let [dq, dk, dv] = exact(dout)?;
            return Ok([dq, dk, dv, theta.zeros_like()?]);
        };
        mixture.backward(self.inputs.each_ref(), tail.as_ref(), dout, exact)
    }
}

impl std::fmt::Debug for Sla2Vjp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [.., sparse, _] = &self.inputs;
        f.debug_struct("Sla2Vjp").field("out", &sparse.dims()).finish_non_exhaustive()
    }
}
