//! The log-sum-exps of attention's logits, returned with the output, and their gradient.

use std::sync::{Arc, PoisonError};

use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Layout, Result, Shape, Tensor};

use super::{Attention, AttentionOp, Completed, Saved};
use crate::error::{Error, REPORT};
use crate::ops::shapes_of;
use crate::scheme::{Products, Scheme};
use crate::shape::AttentionShape;

const NAME: &str = "attention-lse";

impl Attention {
    /// [`Attention::apply`] that also returns the log-sum-exps of the logits, `ln(sum_j exp(softmax_scale q k_j))` over
    /// the keys that a query sees: (batch, heads, sequence) in f32, minus infinity where a query sees no key. Both
    /// results have gradients.
    ///
    /// Attention to several sets of keys is the mean of the sets' outputs, weighted by `exp(lse)`. Ring attention, and
    /// a KV cache in several chunks, use this mean. (The code below gives NaN for a query that sees no key in either
    /// set.) Only one of the sets may have sinks. With `ALiBi`, each call measures distances as if its last key were at
    /// the last query's position.
    ///
    /// ```
    /// use candle_core::{D, Device, Tensor, Var};
    /// use candle_sage::Attention;
    ///
    /// let var = || Var::randn(0f32, 1., (1, 8, 2, 16), &Device::Cpu);
    /// let (q, k, v) = (var()?, var()?, var()?);
    /// let attention = Attention::default();
    /// let part = |start| attention.apply_with_lse(&q, &k.narrow(1, start, 4)?, &v.narrow(1, start, 4)?);
    /// let [(left, left_lse), (right, right_lse)] = [part(0)?, part(4)?];
    /// let share = candle_nn::ops::sigmoid(&(left_lse - right_lse)?)?.transpose(1, 2)?.unsqueeze(D::Minus1)?;
    /// let merged = (left.broadcast_mul(&share)? + right.broadcast_mul(&(1. - share)?)?)?;
    /// let whole = attention.apply(&q, &k, &v)?;
    /// assert!((&merged - whole)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6);
    /// assert!(merged.sqr()?.sum_all()?.backward()?.get(&k).is_some());
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Attention::apply`]; when the scheme smooths keys ([`Smoothing`](crate::Smoothing)), as `SageBwd::default()`
    /// does, because the logits are then computed from keys minus their mean; and for FP4 matmuls.
    pub fn apply_with_lse(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        if let Some(widths) = self.widths([q, k, v]) {
            let [wide_q, wide_k, wide_v] = widths.widen([q, k, v])?;
            let (out, lse) = self.scaled_for(q)?.apply_with_lse(&wide_q, &wide_k, &wide_v)?;
            return Ok((widths.narrow_output(&out)?, lse));
        }
        self.check_lse()?;
        let op = self.op(q, k, v, true)?;
        let of = LogSumExp { saved: op.saved.clone(), shape: op.shape.clone() };
        let out = q.apply_op3(k, v, op)?;
        let lse = out.apply_op1(of)?;
        Ok((out, lse))
    }

    /// An error if log-sum-exps are not supported with the scheme.
    pub(crate) fn check_lse(&self) -> Result<()> {
        check(&self.scheme)
    }
}

/// The log-sum-exps, without a gradient.
pub(super) fn of(op: &AttentionOp, out: &Tensor) -> Result<Tensor> {
    check(&op.scheme)?;
    out.apply_op1_no_bwd(&LogSumExp { saved: op.saved.clone(), shape: op.shape.clone() })
}

/// Refuses FP4 matmuls, and schemes that subtract a mean from the keys: the subtraction changes the log-sum-exps.
fn check(scheme: &Scheme) -> Result<()> {
    if let Scheme::AttnQat(settings) = scheme
        && settings.products != Products::SixteenBit
    {
        return Err(Error::unsupported("log-sum-exps are not supported with FP4 matmuls")
            .got(scheme)
            .allowed("AttnQat::products(Products::SixteenBit)")
            .hint("the kernels with FP4 matmuls do not compute log-sum-exps; those that multiply FP4 values in 16 bit do")
            .into());
    }
    if !scheme.smooths_keys() {
        return Ok(());
    }
    Err(Error::unsupported("log-sum-exps are not supported with smoothed keys")
        .got(scheme)
        .allowed("unquantized attention, or a scheme with Smoothing::None")
        .hint("use `.smoothing(Smoothing::None)`; to smooth, subtract a mean m from the keys yourself and add softmax_scale * (q . m) to the log-sum-exp")
        .into())
}

fn dims(shape: &AttentionShape) -> (usize, usize, usize) {
    (shape.batch(), shape.query_heads(), shape.query_len())
}

impl Saved {
    /// Stores the gradient of the log-sum-exps, or `None`, for attention's backward.
    pub(super) fn set_gradient(&self, dlse: Option<&Tensor>, shape: &AttentionShape) -> Result<()> {
        let (batch, heads, sequence) = dims(shape);
        if let Some(dlse) =
            dlse.filter(|dlse| dlse.dims() != [batch, heads, sequence] || dlse.dtype() != DType::F32)
        {
            return Err(Error::shape("the gradient of the log-sum-exps has another shape or type")
                .got(shapes_of(&[("dlse", dlse)]))
                .allowed(format!("{:?} f32: (batch, heads, sequence)", [batch, heads, sequence]))
                .hint("`dlse` has the shape and type of `AttentionVjp::lse`")
                .into());
        }
        let dlse = dlse.map(Tensor::contiguous).transpose()?;
        *self.dlse.lock().unwrap_or_else(PoisonError::into_inner) = dlse;
        Ok(())
    }
}

/// An op that returns the log-sum-exps. The op's input is attention's output. Candle therefore runs the op's backward
/// before attention's backward, which uses the gradient of the log-sum-exps.
struct LogSumExp {
    saved: Option<Arc<Saved>>,
    shape: AttentionShape,
}

impl LogSumExp {
    fn completed(&self) -> Result<&Completed> {
        let completed = self.saved.as_ref().and_then(|saved| saved.completed.get());
        completed.ok_or_else(|| {
            Error::new("attention's forward has not stored the log-sum-exps").hint(REPORT).into()
        })
    }
}

impl CustomOp1 for LogSumExp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        match self.completed()? {
            Completed::Cpu(completed) => Ok((CpuStorage::F32(completed.lse()), dims(&self.shape).into())),
            Completed::Cuda(_) => candle_core::bail!("{NAME}: the forward ran on a GPU"),
        }
    }

    fn cuda_fwd(&self, out: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        match self.completed()? {
            Completed::Cuda(completed) => {
                Ok((completed.launch((&self.shape, (out, layout)))?, dims(&self.shape).into()))
            }
            Completed::Cpu(_) => candle_core::bail!("{NAME}: the forward ran on the CPU"),
        }
    }

    fn bwd(&self, out: &Tensor, _: &Tensor, dlse: &Tensor) -> Result<Option<Tensor>> {
        if let Some(saved) = &self.saved {
            saved.set_gradient(Some(dlse), &self.shape)?;
        }
        out.detach().zeros_like().map(Some)
    }
}
