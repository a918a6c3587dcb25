//! The backward of attention outside candle's graph.

use candle_core::{CustomOp3, Result, Tensor};

use super::{AttentionOp, NAME};
use crate::error::Error;
use crate::ops::support::{shapes_of, supported};
use crate::ops::widths::Widths;

/// The backward of one call of [`Attention::vjp`](super::Attention::vjp). It keeps the inputs and the output of this
/// call.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_sage::Attention;
///
/// let x = || Tensor::randn(0f32, 1., (1, 16, 2, 32), &Device::Cpu);
/// let (q, k, v) = (x()?, x()?, x()?);
/// let (out, vjp) = Attention::default().causal(true).vjp(&q, &k, &v)?;
/// let [dq, dk, dv] = vjp.apply(&out.ones_like()?)?;
/// assert_eq!((dq.dims(), dk.dims()), (q.dims(), k.dims()));
/// // The probabilities of each of the 16 queries sum to 1.
/// let sums = dv.sum(1)?.flatten_all()?.to_vec1::<f32>()?;
/// assert!(sums.iter().all(|sum| (sum - 16.0).abs() < 1e-4));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub struct AttentionVjp {
    pub(in crate::ops) op: AttentionOp,
    /// The inputs and the output, all padded to the larger head_dim if `widths` is set.
    pub(super) inputs: [Tensor; 3],
    pub(super) out: Tensor,
    /// Set if values have another head_dim than queries and keys, so that the narrower heads were padded.
    pub(super) widths: Option<Widths>,
}

impl AttentionVjp {
    /// The log-sum-exps of the logits: see [`Attention::apply_with_lse`](super::Attention::apply_with_lse).
    ///
    /// # Errors
    /// When the scheme smooths keys.
    pub fn lse(&self) -> Result<Tensor> {
        super::log_sum_exp::of(&self.op, &self.out)
    }

    /// The gradients of query, key and value for the output's gradient `dout`.
    ///
    /// # Errors
    /// When `dout` has another shape or element type than the output.
    pub fn apply(&self, dout: &Tensor) -> Result<[Tensor; 3]> {
        self.apply_with_lse(dout, None)
    }

    /// [`AttentionVjp::apply`] if the loss also depends on the log-sum-exps. `dlse` is the gradient of
    /// [`AttentionVjp::lse`], and has its shape.
    ///
    /// # Errors
    /// As [`AttentionVjp::apply`], and when `dlse` has another shape or element type than the log-sum-exps.
    pub fn apply_with_lse<'a>(
        &self,
        dout: &Tensor,
        dlse: impl Into<Option<&'a Tensor>>,
    ) -> Result<[Tensor; 3]> {
        let mut dims = self.out.dims().to_vec();
        if let Some(widths) = self.widths {
            dims[3] = widths.value();
        }
        if dout.dims() != dims || dout.dtype() != self.out.dtype() {
            return Err(Error::shape("the output's gradient does not fit the output")
                .got(shapes_of(&[("dout", dout)]))
                .allowed(format!("{dims:?} {}", self.out.dtype().as_str()))
                .hint("`dout` has the shape and element type of the output")
                .into());
        }
        supported(NAME, &[&self.out, dout])?;
        let dout = self.widths.map_or(Ok(dout.clone()), |widths| widths.widen_output(dout))?;
        // `dlse` is stored only after all other checks, so that a failed call leaves no `dlse` for the next call.
        if let Some(saved) = &self.op.saved {
            saved.set_gradient(dlse.into(), &self.op.shape)?;
        }
        let [q, k, v] = &self.inputs;
        match self.op.bwd(q, k, v, &self.out, &dout)? {
            (Some(dq), Some(dk), Some(dv)) => match self.widths {
                None => Ok([dq, dk, dv]),
                Some(widths) => widths.narrow([dq, dk, dv]),
            },
            _ => unreachable!("attention has three gradients"),
        }
    }
}

impl AttentionVjp {
    /// Drops query, key and value, to save memory in a caller that recomputes them before the backward.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_sage::Attention;
    ///
    /// let x = Tensor::randn(0f32, 1., (1, 16, 2, 32), &Device::Cpu)?;
    /// let (out, vjp) = Attention::default().vjp(&x, &x, &x)?;
    /// let [dq, ..] = vjp.apply(&out)?;
    /// let state = vjp.without_inputs();
    /// let [again, ..] = state.with_inputs(&x, &x, &x)?.apply(&out)?;
    /// assert_eq!((dq - again)?.abs()?.max_all()?.to_scalar::<f32>()?, 0.0);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn without_inputs(self) -> AttentionState {
        let Self { op, out, widths, .. } = self;
        AttentionState { op, out, widths }
    }
}

/// What a forward keeps for its backward, without query, key and value: see [`AttentionVjp::without_inputs`].
pub struct AttentionState {
    op: AttentionOp,
    out: Tensor,
    widths: Option<Widths>,
}

impl AttentionState {
    /// The backward, given the query, key and value of the forward. This function compares shapes and types with
    /// the forward's, but not elements.
    ///
    /// # Errors
    /// When a shape or an element type differs from the forward's.
    pub fn with_inputs(self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<AttentionVjp> {
        let Self { op, out, widths } = self;
        let inputs = [q, k, v].map(Tensor::detach);
        let inputs = widths.map_or(Ok(inputs.clone()), |widths| widths.widen(inputs.each_ref()))?;
        let dims = [op.shape.query_dims(), op.shape.key_dims(), op.shape.value_dims()];
        for (x, dims) in inputs.iter().zip(dims) {
            if x.dims4()? != dims || x.dtype() != out.dtype() {
                return Err(Error::shape("query, key or value differs from the forward's")
                    .got(format!("{:?} {}", x.dims(), x.dtype().as_str()))
                    .allowed(format!("{dims:?} {}", out.dtype().as_str()))
                    .hint("recompute them exactly as for the forward")
                    .into());
            }
        }
        Ok(AttentionVjp { op, inputs, out, widths })
    }
}

impl std::fmt::Debug for AttentionState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AttentionState").field("out", &self.out.dims()).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for AttentionVjp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AttentionVjp").field("out", &self.out.dims()).finish_non_exhaustive()
    }
}
