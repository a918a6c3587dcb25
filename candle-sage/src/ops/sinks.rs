//! Attention sinks: a learned logit of each head in the denominator of the softmax.

use candle_core::{D, DType, Result, Tensor};

use super::Attention;
use super::support::dims4;
use crate::error::Error;

impl Attention {
    /// As [`Attention::apply`], with a sink: a logit of each query head that takes its share of the probabilities and has no value, so
    /// that a query can attend to nothing,
    /// `out_i = sum_j exp(l_ij) v_j / (exp(sink) + sum_j exp(l_ij))` with the logits `l_ij = softmax_scale q_i k_j`.
    /// GPT-OSS has them ("sinks"), as `(heads)` parameters.
    ///
    /// `sinks` is (query heads) in any float type. It has a gradient, and so have query, key and value.
    ///
    /// The output of [`Attention::apply_with_lse`] is multiplied by `sigmoid(lse - sink)`, in f32 and by candle's operators; it is then
    /// rounded to the element type a second time. This reads and writes a few tensors of the output's size, in f32.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use candle_sage::Attention;
    ///
    /// let x = Tensor::zeros((1, 3, 2, 8), candle_core::DType::F32, &Device::Cpu)?;
    /// let v = x.ones_like()?;
    /// // All logits are 0. The sink of the first head is as much as all three keys, that of the second is nothing.
    /// let sinks = Var::new(&[3f32.ln(), f32::NEG_INFINITY], &Device::Cpu)?;
    /// let out = Attention::default().apply_with_sinks(&x, &x, &v, &sinks)?;
    /// let heads = out.narrow(3, 0, 1)?.narrow(1, 0, 1)?.flatten_all()?.to_vec1::<f32>()?;
    /// assert!((heads[0] - 0.5).abs() < 1e-6 && (heads[1] - 1.0).abs() < 1e-6);
    /// assert!(out.sum_all()?.backward()?.get(&sinks).is_some());
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Attention::apply_with_lse`], and when there is not one sink for each query head.
    ///
    /// Source: GPT-OSS's model card, arXiv 2508.10925.
    pub fn apply_with_sinks(&self, q: &Tensor, k: &Tensor, v: &Tensor, sinks: &Tensor) -> Result<Tensor> {
        let (_, _, heads, _) = dims4("query", q)?;
        if sinks.dims() != [heads] || !sinks.dtype().is_float() {
            return Err(Error::shape("the sinks do not fit the heads")
                .got(format!("{:?} {:?}", sinks.dims(), sinks.dtype()))
                .allowed(format!("[{heads}] in a float type: a sink for each query head"))
                .hint("flatten or expand the parameter to one number a head")
                .into());
        }
        let (out, lse) = self.apply_with_lse(q, k, v)?;
        let sinks = sinks.to_dtype(DType::F32)?.reshape((1, heads, 1))?;
        // Of a query that sees no key the log-sum-exp is minus infinity, and the share 0.
        let share = candle_nn::ops::sigmoid(&lse.broadcast_sub(&sinks)?)?;
        let share = share.transpose(1, 2)?.unsqueeze(D::Minus1)?;
        out.to_dtype(DType::F32)?.broadcast_mul(&share)?.to_dtype(out.dtype())
    }
}
