//! Attention sinks: a learned logit per head in the denominator of the softmax.

use std::sync::{Arc, PoisonError};

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, CudaStorage, CustomOp2, DType, Layout, Result, Shape, Tensor};

use super::Attention;
use super::attention::{AttentionVjp, Saved};
use super::support::of_heads;
use crate::error::{Error, REPORT};
use crate::shape::AttentionShape;

impl Attention {
    /// Sinks: an additional logit per query head in the denominator of the softmax, so that a query can attend to
    /// nothing: `out_i = sum_j exp(l_ij) v_j / (exp(sink) + sum_j exp(l_ij))` with the logits `l_ij`. `sinks` is (query
    /// heads) in any float type, on the query's device. In [`Attention::apply`] the sinks are constants; with
    /// [`Attention::apply_with_sinks`] they receive a gradient.
    ///
    /// In the forward, sinks do not change how probabilities are quantized. The log-sum-exps of
    /// [`Attention::apply_with_lse`] include the sink.
    #[must_use]
    pub fn sinks(mut self, sinks: &Tensor) -> Self {
        self.sinks = Some(sinks.clone());
        self
    }

    /// [`Attention::apply`] with [`Attention::sinks`] that receive a gradient, as query, key and value do. GPT-OSS uses
    /// sinks: its parameter "sinks" has the shape `(heads)`.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use candle_sage::Attention;
    ///
    /// let x = Tensor::zeros((1, 3, 2, 8), candle_core::DType::F32, &Device::Cpu)?;
    /// let v = x.ones_like()?;
    /// // All logits are 0. In the first head the sink has the same weight as the three keys together, in the second
    /// // head it has the weight 0.
    /// let sinks = Var::new(&[3f32.ln(), f32::NEG_INFINITY], &Device::Cpu)?;
    /// let out = Attention::default().apply_with_sinks(&x, &x, &v, &sinks)?;
    /// let heads = out.narrow(3, 0, 1)?.narrow(1, 0, 1)?.flatten_all()?.to_vec1::<f32>()?;
    /// assert!((heads[0] - 0.5).abs() < 1e-6 && (heads[1] - 1.0).abs() < 1e-6);
    /// assert!(out.sum_all()?.backward()?.get(&sinks).is_some());
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Attention::apply`]; when the number of sinks is not the number of query heads; and when the scheme smooths
    /// keys ([`Smoothing`](crate::Smoothing)), as `SageBwd::default()` does. Smoothing shifts the logits, but not
    /// the sinks.
    ///
    /// Source: GPT-OSS's model card, arXiv 2508.10925.
    pub fn apply_with_sinks(&self, q: &Tensor, k: &Tensor, v: &Tensor, sinks: &Tensor) -> Result<Tensor> {
        if let Some(widths) = self.widths([q, k, v]) {
            let [q_wide, k_wide, v_wide] = widths.widen([q, k, v])?;
            let wide = self.scaled_for(q)?.apply_with_sinks(&q_wide, &k_wide, &v_wide, sinks)?;
            return widths.narrow_output(&wide);
        }
        let attention = self.clone().sinks(&sinks.detach());
        if !sinks.track_op() {
            return attention.apply(q, k, v);
        }
        let op = attention.op(q, k, v, true)?;
        // The conversion to f32 is in candle's graph, so that the gradient is converted back to the sinks' type.
        let sinks = sinks.to_dtype(DType::F32)?;
        let saved = op
            .saved
            .clone()
            .ok_or_else(|| Error::new("the forward of attention with sinks kept no state").hint(REPORT))?;
        let k = k.apply_op2(&sinks, WithSinks(saved))?;
        q.apply_op3(&k, v, op)
    }

    pub(crate) fn check_sinks(&self) -> Result<()> {
        if self.scheme.smooths_keys() {
            return Err(Error::unsupported("sinks are not supported with smoothed keys")
                .got(self.scheme)
                .allowed("unquantized attention, or a scheme with Smoothing::None")
                .hint("use `.smoothing(Smoothing::None)`: smoothing shifts the logits, but not the sink")
                .into());
        }
        Ok(())
    }

    pub(super) fn sinks_of(&self, shape: &AttentionShape, q: &Tensor) -> Result<Option<Tensor>> {
        let Some(sinks) = &self.sinks else { return Ok(None) };
        self.check_sinks()?;
        let hints = [
            "flatten or expand the parameter to one number per head",
            "`Attention::apply_with_sinks` returns their gradient; `Tensor::detach` makes them constants",
        ];
        of_heads("the sinks", sinks, shape.query_heads(), q.device(), hints).map(Some)
    }
}

impl AttentionVjp {
    /// The gradient of the sinks of [`Attention::sinks`], (query heads) in f32. `None` without sinks, or before
    /// [`AttentionVjp::apply`], which also computes this gradient.
    pub fn sink_gradient(&self) -> Option<Tensor> {
        self.op.saved.as_ref()?.dsinks.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Returns the key unchanged. Attention takes this op's output as its key, so Candle runs this op's backward after
/// attention's backward, which stores the sinks' gradient in `Saved`. This op's backward returns that gradient as the
/// gradient of the op's second input, the sinks.
struct WithSinks(Arc<Saved>);

impl CustomOp2 for WithSinks {
    fn name(&self) -> &'static str {
        "attention-sinks"
    }

    fn cpu_fwd(
        &self,
        k: &CpuStorage,
        layout: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        copied(k, layout)
    }

    fn cuda_fwd(
        &self,
        k: &CudaStorage,
        layout: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        copied(k, layout)
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        dk: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let dsinks = self.0.dsinks.lock().unwrap_or_else(PoisonError::into_inner).take();
        Ok((Some(dk.clone()), dsinks))
    }
}

fn copied<S: BackendStorage>(from: &S, layout: &Layout) -> Result<(S, Shape)>
where
    S::Device: BackendDevice<Storage = S>,
{
    let mut copy = from.device().zeros_impl(layout.shape(), from.dtype())?;
    from.copy_strided_src(&mut copy, 0, layout)?;
    Ok((copy, layout.shape().clone()))
}
