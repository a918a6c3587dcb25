//! Changes of the logits before the softmax, in addition to their scale: a soft cap and `ALiBi`.

use candle_core::{Device, Result, Tensor};

use super::Attention;
use crate::cpu;
use crate::error::Error;
use crate::ops::support::of_heads;
use crate::shape::AttentionShape;

#[derive(Debug, Clone, Default)]
pub(super) struct Requested {
    softcap: Option<f64>,
    alibi_slopes: Option<Tensor>,
}

impl Requested {
    #[cfg(feature = "kernels")]
    pub(super) fn has_slopes(&self) -> bool {
        self.alibi_slopes.is_some()
    }
}

/// The validated settings of one call.
#[derive(Debug, Clone, Default)]
pub(crate) struct ScoreMod {
    /// 0 for no soft cap.
    pub(crate) softcap: f32,
    /// One number for each query head: contiguous, f32, on the device of the query.
    pub(crate) alibi_slopes: Option<Tensor>,
}

impl ScoreMod {
    pub(super) fn on_cpu(&self) -> Result<cpu::ScoreMod> {
        let slopes = self.alibi_slopes.as_ref().map(Tensor::to_vec1).transpose()?;
        Ok(cpu::ScoreMod::new(self.softcap, slopes.unwrap_or_default()))
    }
}

impl Attention {
    /// A soft cap: a logit x becomes `cap tanh(x / cap)`, which is between `-cap` and `cap`. Gemma 2 uses 50
    /// (`attn_logit_softcapping`). 0 removes the cap.
    ///
    /// Schemes that subtract a mean from the keys, as `SageBwd::default()` does, do not support a soft cap, because
    /// the subtraction shifts the logits. On CUDA three schemes support it: unquantized attention, Attn-QAT with 16-bit
    /// matmuls, and SageBwd with the INT8 matmuls [`SCORES`](crate::Int8Products::SCORES). On CUDA the hyperbolic
    /// tangent has a relative error of up to 2^-15.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_sage::Attention;
    ///
    /// let (x, v) = (Tensor::ones((1, 2, 1, 8), candle_core::DType::F32, &Device::Cpu)?, [0f32, 1.]);
    /// // The logits of both keys are far above the cap, so the cap makes them equal.
    /// let keys = x.broadcast_mul(&Tensor::new(&[10f32, 90.], &Device::Cpu)?.reshape((1, 2, 1, 1))?)?;
    /// let v = Tensor::new(&v, &Device::Cpu)?.reshape((1, 2, 1, 1))?.broadcast_as((1, 2, 1, 8))?;
    /// let first = |attention: Attention| attention.apply(&x, &keys, &v)?.flatten_all()?.get(0)?.to_scalar::<f32>();
    /// assert!((first(Attention::default().softcap(1.0))? - 0.5).abs() < 1e-6);
    /// assert_eq!(first(Attention::default())?, 1.0);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// Source: Gemma 2, arXiv 2408.00118, section 2.
    #[must_use]
    pub fn softcap(mut self, cap: f64) -> Self {
        self.modified.softcap = (cap != 0.0).then_some(cap);
        self
    }

    /// `ALiBi`: subtracts from each logit the query head's slope times the distance between query and key. The last
    /// query has the position of the last key. `slopes` is (query heads) in any float type, on the query's device, and
    /// has no gradient. A soft cap is applied before the slopes. On CUDA the three schemes that
    /// [`softcap`](Self::softcap) names support `ALiBi`. Unlike a soft cap, `ALiBi` also works with smoothed keys.
    /// [`alibi_slopes`](crate::ops::alibi_slopes) returns the slopes of the `ALiBi` paper.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_sage::Attention;
    ///
    /// let (zeros, v) = (Tensor::zeros((1, 2, 1, 8), candle_core::DType::F32, &Device::Cpu)?, [0f32, 3.]);
    /// let v = Tensor::new(&v, &Device::Cpu)?.reshape((1, 2, 1, 1))?.broadcast_as((1, 2, 1, 8))?;
    /// // A key one token away has half the weight of the key at the query's own position.
    /// let slopes = Tensor::new(&[2f32.ln()], &Device::Cpu)?;
    /// let out = Attention::default().alibi(&slopes).apply(&zeros, &zeros, &v)?;
    /// let out: Vec<f32> = out.narrow(3, 0, 1)?.flatten_all()?.to_vec1()?;
    /// assert!((out[0] - 1.0).abs() < 1e-6 && (out[1] - 2.0).abs() < 1e-6);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// Source: arXiv 2108.12409.
    #[must_use]
    pub fn alibi(mut self, slopes: &Tensor) -> Self {
        self.modified.alibi_slopes = Some(slopes.clone());
        self
    }

    /// The soft cap, or 0 for no cap.
    pub(crate) fn checked_softcap(&self) -> Result<f32> {
        let Some(cap) = self.modified.softcap else { return Ok(0.0) };
        if !(1e-6..=1e30).contains(&cap) {
            return Err(Error::new("the soft cap is out of range")
                .got(cap)
                .allowed("1e-6 to 1e30, or 0 for no cap")
                .hint("Gemma 2 caps at 50")
                .into());
        }
        if self.scheme.smooths_keys() {
            return Err(Error::unsupported("a soft cap is not supported with smoothed keys")
                .got(self.scheme)
                .allowed("unquantized attention, or a scheme with Smoothing::None")
                .hint("`.smoothing(Smoothing::None)`; on CUDA SageBwd also needs `.products(Int8Products::SCORES)`")
                .into());
        }
        Ok(cap as f32)
    }

    /// Checks the caller's settings. `None` if there is neither a soft cap nor `ALiBi`.
    pub(super) fn score_mod(&self, shape: &AttentionShape, q: &Tensor) -> Result<Option<ScoreMod>> {
        let softcap = self.checked_softcap()?;
        let alibi_slopes = &self.modified.alibi_slopes;
        if softcap == 0.0 && alibi_slopes.is_none() {
            return Ok(None);
        }
        if self.selection.is_some() {
            return Err(Error::unsupported("a selection is not supported with a soft cap or ALiBi")
                .got("a selection, and a soft cap or ALiBi")
                .allowed("a selection alone, or a soft cap and ALiBi without a selection")
                .hint("`Attention::window` also restricts attention, and supports a soft cap and ALiBi")
                .into());
        }
        let hints =
            ["`ops::alibi_slopes` returns the paper's slopes", "`Tensor::detach` makes the slopes constants"];
        let slopes = |x: &Tensor| of_heads("the ALiBi slopes", x, shape.query_heads(), q.device(), hints);
        Ok(Some(ScoreMod { softcap, alibi_slopes: alibi_slopes.as_ref().map(slopes).transpose()? }))
    }
}

/// `ALiBi`'s slopes, (heads) in f32. If the number of heads is a power of two, head h = 1, 2, .. has the slope
/// `2^(-8 h / heads)`. Otherwise, with p the next lower power of two, the slopes for p heads come first, then the
/// first, third, fifth, .. of the slopes for 2 p heads. BLOOM and MPT use these slopes.
///
/// ```
/// use candle_core::Device;
/// use candle_sage::ops::alibi_slopes;
///
/// assert_eq!(alibi_slopes(4, &Device::Cpu)?.to_vec1::<f32>()?, [0.25, 0.0625, 0.015625, 0.00390625]);
/// assert_eq!(alibi_slopes(3, &Device::Cpu)?.to_vec1::<f32>()?, [0.0625, 0.00390625, 0.25]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// When there are no heads.
///
/// Source: arXiv 2108.12409, section 3, and its authors' code.
pub fn alibi_slopes(heads: usize, device: &Device) -> Result<Tensor> {
    if heads == 0 {
        return Err(Error::shape("ALiBi needs at least one head")
            .got(0)
            .allowed("1 or more")
            .hint("a slope belongs to a query head")
            .into());
    }
    let all = heads.next_power_of_two();
    let slope = |head: usize| (-8.0 * head as f32 / all as f32).exp2();
    let slopes: Vec<f32> = match all == heads {
        true => (1..=heads).map(slope).collect(),
        false => (2..=all).step_by(2).chain((1..=all).step_by(2)).take(heads).map(slope).collect(),
    };
    Tensor::from_vec(slopes, heads, device)
}
