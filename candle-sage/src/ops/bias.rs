//! Attention with a bias for each pair of a query and a key.

use candle_core::{D, DType, Device, Result, Tensor};

use super::Attention;
use crate::error::Error;
use crate::scheme::Scheme;
use crate::shape::{AttentionShape, Window};

/// The logit of a hidden key: far below other logits, but finite, so that a query that sees no key gives no NaN.
const HIDDEN: f64 = -1e30;

impl Attention {
    /// [`Attention::apply`] with a bias that is added to the logits: `softmax(softmax_scale Q K^T + bias) V`. Examples
    /// are T5's relative positions, and masks of zeros and minus infinities.
    ///
    /// `bias` is (batch or 1, query heads or 1, queries, keys) in any float type, and receives a gradient, like query,
    /// key and value. A bias requires unquantized attention, and can be combined with a causal mask, windows, packed
    /// documents, grouped-query heads and a soft cap. The soft cap is applied before the bias.
    ///
    /// **This function needs memory for all pairs of queries and keys**: several f32 tensors (batch, query heads,
    /// queries, keys), on every device, because candle's operators compute the attention. [`Attention::alibi`], for a
    /// bias that is linear in the distance, and [`Padding`](crate::ops::Padding), for a padding mask, need less memory.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use candle_sage::Attention;
    ///
    /// let x = Tensor::zeros((1, 2, 1, 8), candle_core::DType::F32, &Device::Cpu)?;
    /// let v = Tensor::new(&[0f32, 3.], &Device::Cpu)?.reshape((1, 2, 1, 1))?.broadcast_as((1, 2, 1, 8))?;
    /// // The first query gives the second key twice the weight of the first key. The second query does not see the
    /// // first key.
    /// let bias = Var::new(&[[[[0f32, 2f32.ln()], [f32::NEG_INFINITY, 0.]]]], &Device::Cpu)?;
    /// let out = Attention::default().apply_with_bias(&x, &x, &v, &bias)?;
    /// let first: Vec<f32> = out.narrow(3, 0, 1)?.flatten_all()?.to_vec1()?;
    /// assert!((first[0] - 2.).abs() < 1e-6 && (first[1] - 3.).abs() < 1e-6);
    /// assert!(out.sum_all()?.backward()?.get(&bias).is_some());
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Attention::apply`]; when the bias has a wrong shape, is not of a float type, or is on another device than
    /// the query; and for low-bit schemes, selections, ALiBi and sinks.
    pub fn apply_with_bias(&self, q: &Tensor, k: &Tensor, v: &Tensor, bias: &Tensor) -> Result<Tensor> {
        // The op only checks inputs and settings; its kernels do not run.
        let op = self.op(q, k, v, false)?;
        let slopes = op.score_mod.as_ref().is_some_and(|score_mod| score_mod.alibi_slopes.is_some());
        let no_sinks = "without a window, prepend a key and a value of zeros; the sink is the key's bias";
        for (asked, got, hint) in [
            (op.scheme != Scheme::Unquantized, "a low-bit scheme", "use `.scheme(Scheme::Unquantized)`"),
            (op.selection.is_some(), "a selection", "a bias of minus infinity hides a key"),
            (op.sinks.is_some(), "sinks", no_sinks),
            (slopes, "ALiBi", "add `-slope * distance` to the bias"),
        ] {
            if asked {
                return Err(Error::unsupported("attention with a bias does not support this setting")
                    .got(got)
                    .allowed(
                        "unquantized attention; optional: a causal mask, windows, packed documents, a soft cap",
                    )
                    .hint(hint)
                    .into());
            }
        }
        let shape = &op.shape;
        check(bias, shape, q.device())?;
        let dtype = q.dtype();
        let [q, k, v] = [q, k, v].map(|x| x.to_dtype(DType::F32)?.transpose(1, 2)?.contiguous());
        let [q, k, v] = [q?, repeated(&k?, shape.group())?, repeated(&v?, shape.group())?];
        let mut logits = (q.matmul(&k.t()?.contiguous()?)? * f64::from(op.softmax_scale))?;
        if let Some(score_mod) = &op.score_mod {
            let cap = f64::from(score_mod.softcap);
            logits = ((logits / cap)?.tanh()? * cap)?;
        }
        let logits = logits.broadcast_add(&bias.to_dtype(DType::F32)?)?.maximum(HIDDEN)?;
        let logits = match seen(shape, q.device())? {
            Some(seen) => {
                let hidden = Tensor::full(HIDDEN as f32, logits.shape(), logits.device())?;
                seen.broadcast_as(logits.shape())?.where_cond(&logits, &hidden)?
            }
            None => logits,
        };
        let weights = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?.detach())?.exp()?;
        let seen = logits.gt(HIDDEN)?.to_dtype(DType::F32)?;
        let weights = (weights * &seen)?;
        // The output of a query that sees no key is zero.
        let sums = (weights.sum_keepdim(D::Minus1)? + (1.0 - seen.max_keepdim(D::Minus1)?)?)?;
        weights.broadcast_div(&sums)?.matmul(&v)?.transpose(1, 2)?.contiguous()?.to_dtype(dtype)
    }
}

fn check(bias: &Tensor, shape: &AttentionShape, device: &Device) -> Result<()> {
    let all = [shape.batch(), shape.query_heads(), shape.query_len(), shape.key_len()];
    let fits = |(n, size): (usize, &usize)| *size == all[n] || (n < 2 && *size == 1);
    let here = bias.device().same_device(device);
    if bias.rank() == 4 && bias.dims().iter().enumerate().all(fits) && bias.dtype().is_float() && here {
        return Ok(());
    }
    Err(Error::shape("the bias does not fit attention")
        .got(format!("{:?} {:?} on {:?}", bias.dims(), bias.dtype(), bias.device().location()))
        .allowed(format!(
            "{all:?}, where the batch, the heads or both may be 1; a float type; on the query's device"
        ))
        .hint("a bias is (batch, heads, queries, keys); `unsqueeze` adds a dimension of 1")
        .into())
}

/// Repeats each head of keys or values, (batch, heads, tokens, channels), once per query head that reads it.
fn repeated(x: &Tensor, times: usize) -> Result<Tensor> {
    let (batch, heads, tokens, channels) = x.dims4()?;
    let all = (batch, heads, times, tokens, channels);
    x.unsqueeze(2)?.broadcast_as(all)?.reshape((batch, heads * times, tokens, channels))
}

/// (1, 1, queries, keys): 1 if the query sees the key, else 0. `None` if every query sees all keys. All batch entries
/// have this mask: without packed documents their masks are equal, and with packed documents the batch has one entry.
fn seen(shape: &AttentionShape, device: &Device) -> Result<Option<Tensor>> {
    let (queries, keys) = (shape.query_len(), shape.key_len());
    if !shape.is_packed() && shape.window() == Window::default() {
        return Ok(None);
    }
    let mut seen = vec![0u8; queries * keys];
    for segment in shape.segments().iter().filter(|segment| segment.batch == 0) {
        for (i, query) in segment.query.clone().enumerate() {
            let row = &mut seen[query * keys..][segment.key.clone()];
            let visible = segment.visible_keys(i);
            row[segment.first_key(i).min(visible)..visible].fill(1);
        }
    }
    Tensor::from_vec(seen, (1, 1, queries, keys), device).map(Some)
}
