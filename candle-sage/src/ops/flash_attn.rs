//! Attention with the signatures of candle-flash-attn, so that a model has to change only one `use`.

use candle_core::{DType, Device, Result, Tensor};

use super::Attention;
use super::support::shapes_of;
use crate::error::Error;
use crate::shape::Packing;

/// Unquantized `softmax(softmax_scale Q K^T) V` with a gradient: [`Attention`] with the signature of
/// candle-flash-attn's function of this name, which has no gradient.
///
/// Query, key and value are (batch, sequence, heads, head_dim) in f32 (CPU), f16 or bf16. The number of query heads may
/// be a multiple of the number of key heads. With `causal` the last query sees every key, also if there are more keys
/// than queries. For INT8 attention use `Attention::new(SageBwd::default())`.
///
/// ```
/// use candle_core::{Device, Var};
/// use candle_sage::flash_attn;
///
/// let q = Var::randn(0f32, 1., (1, 64, 4, 32), &Device::Cpu)?;
/// let out = flash_attn(&q, &q, &q, 1. / (32f32).sqrt(), true)?;
/// assert!(out.sqr()?.mean_all()?.backward()?.get(&q).is_some());
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As [`Attention::apply`].
pub fn flash_attn(q: &Tensor, k: &Tensor, v: &Tensor, softmax_scale: f32, causal: bool) -> Result<Tensor> {
    unquantized(softmax_scale, None, causal.then_some(0)).apply(q, k, v)
}

/// [`flash_attn`] with a sliding window: a query sees `window_size_left` keys before its own position and
/// `window_size_right` keys after it. `None` sets no limit. See [`Attention::window`].
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_sage::{flash_attn, flash_attn_windowed};
///
/// let q = Tensor::randn(0f32, 1., (1, 64, 4, 32), &Device::Cpu)?;
/// let causal = flash_attn(&q, &q, &q, 0.2, true)?;
/// let window = flash_attn_windowed(&q, &q, &q, 0.2, Some(7), Some(0))?;
/// // The first eight queries see all keys before them in both cases.
/// let same = |tokens| causal.narrow(1, 0, tokens)?.sub(&window.narrow(1, 0, tokens)?)?.abs()?.max_all()?.to_scalar::<f32>();
/// assert!(same(8)? < 1e-6 && same(9)? > 1e-3);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As [`Attention::apply`].
pub fn flash_attn_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    unquantized(softmax_scale, window_size_left, window_size_right).apply(q, k, v)
}

/// [`flash_attn`] with `ALiBi`: see [`Attention::alibi`]. `alibi_slopes` is (query heads).
///
/// # Errors
/// As [`Attention::apply`].
pub fn flash_attn_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    unquantized(softmax_scale, None, causal.then_some(0)).alibi(alibi_slopes).apply(q, k, v)
}

/// [`flash_attn_windowed`] with `ALiBi`: see [`flash_attn_alibi`].
///
/// # Errors
/// As [`Attention::apply`].
pub fn flash_attn_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    unquantized(softmax_scale, window_size_left, window_size_right).alibi(alibi_slopes).apply(q, k, v)
}

/// [`flash_attn_windowed`] with a soft cap (0 for no cap) and optional `ALiBi` slopes: see [`Attention::softcap`] and
/// [`Attention::alibi`].
///
/// ```
/// use candle_core::{Device, Var};
/// use candle_sage::flash_attn_alibi_windowed_softcap;
///
/// let q = Var::randn(0f32, 1., (1, 64, 4, 32), &Device::Cpu)?;
/// let out = flash_attn_alibi_windowed_softcap(&q, &q, &q, None, 0.2, Some(20), Some(0), 50.)?;
/// assert!(out.sqr()?.mean_all()?.backward()?.get(&q).is_some());
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As [`Attention::apply`].
#[allow(clippy::too_many_arguments, reason = "the signature is candle-flash-attn's")]
pub fn flash_attn_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let attention = unquantized(softmax_scale, window_size_left, window_size_right);
    with_alibi(attention.softcap(f64::from(softcap)), alibi_slopes).apply(q, k, v)
}

/// [`flash_attn`] over concatenated documents: query, key and value are (tokens, heads, head_dim).
///
/// Document `n` contains the query tokens `seqlens_q[n]..seqlens_q[n + 1]` and the key tokens
/// `seqlens_k[n]..seqlens_k[n + 1]`. `seqlens_q` and `seqlens_k` are cumulative lengths that start at 0, of an integer
/// type, on any device. The host reads the lengths, and so waits for their device. [`Attention::packing`] accepts
/// lengths on the host, and does not wait.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_sage::{flash_attn, flash_attn_varlen};
///
/// // Documents of 5 and 7 tokens.
/// let q = Tensor::randn(0f32, 1., (12, 2, 32), &Device::Cpu)?;
/// let lengths = Tensor::new(&[0u32, 5, 12], &Device::Cpu)?;
/// let out = flash_attn_varlen(&q, &q, &q, &lengths, &lengths, 7, 7, 0.2, true)?;
/// let second = q.narrow(0, 5, 7)?.unsqueeze(0)?;
/// let alone = flash_attn(&second, &second, &second, 0.2, true)?.squeeze(0)?;
/// let difference = (out.narrow(0, 5, 7)? - alone)?.abs()?.max_all()?.to_scalar::<f32>()?;
/// assert!(difference < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As [`Attention::apply`], and when the lengths are not cumulative, or a document is longer than `max_seqlen_q` or
/// `max_seqlen_k`.
#[allow(clippy::too_many_arguments, reason = "the signature is candle-flash-attn's")]
pub fn flash_attn_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let attention = unquantized(softmax_scale, None, causal.then_some(0));
    varlen(attention, [q, k, v], [seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k])
}

/// [`flash_attn_varlen`] with a sliding window in each document: see [`flash_attn_windowed`].
///
/// # Errors
/// As [`flash_attn_varlen`].
#[allow(clippy::too_many_arguments, reason = "the signature is candle-flash-attn's")]
pub fn flash_attn_varlen_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let attention = unquantized(softmax_scale, window_size_left, window_size_right);
    varlen(attention, [q, k, v], [seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k])
}

/// [`flash_attn_varlen`] with `ALiBi`: see [`flash_attn_alibi`].
///
/// # Errors
/// As [`flash_attn_varlen`].
#[allow(clippy::too_many_arguments, reason = "the signature is candle-flash-attn's")]
pub fn flash_attn_varlen_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let attention = unquantized(softmax_scale, None, causal.then_some(0)).alibi(alibi_slopes);
    varlen(attention, [q, k, v], [seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k])
}

/// [`flash_attn_varlen_windowed`] with `ALiBi`: see [`flash_attn_alibi`].
///
/// # Errors
/// As [`flash_attn_varlen`].
#[allow(clippy::too_many_arguments, reason = "the signature is candle-flash-attn's")]
pub fn flash_attn_varlen_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let attention = unquantized(softmax_scale, window_size_left, window_size_right).alibi(alibi_slopes);
    varlen(attention, [q, k, v], [seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k])
}

/// [`flash_attn_varlen_windowed`] with a soft cap (0 for no cap) and optional `ALiBi` slopes: see
/// [`flash_attn_alibi_windowed_softcap`].
///
/// # Errors
/// As [`flash_attn_varlen`].
#[allow(clippy::too_many_arguments, reason = "the signature is candle-flash-attn's")]
pub fn flash_attn_varlen_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let attention = unquantized(softmax_scale, window_size_left, window_size_right);
    let attention = with_alibi(attention.softcap(f64::from(softcap)), alibi_slopes);
    varlen(attention, [q, k, v], [seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k])
}

fn varlen(
    attention: Attention,
    inputs: [&Tensor; 3],
    [queries, keys]: [&Tensor; 2],
    [most_queries, most_keys]: [usize; 2],
) -> Result<Tensor> {
    for (name, x) in ["query", "key", "value"].into_iter().zip(inputs) {
        if x.rank() != 3 {
            return Err(Error::shape(format!("{name} does not have three dimensions"))
                .got(format!("{:?}", x.dims()))
                .allowed("(tokens, heads, head_dim)")
                .hint("`flatten(0, 1)` joins batch and sequence; `flash_attn` accepts four dimensions")
                .into());
        }
    }
    let packing = Packing::new(
        cumulative("seqlens_q", queries, most_queries)?,
        cumulative("seqlens_k", keys, most_keys)?,
    );
    let [q, k, v] = inputs.map(|x| x.unsqueeze(0));
    attention.packing(packing).apply(&q?, &k?, &v?)?.squeeze(0)
}

fn with_alibi(attention: Attention, slopes: Option<&Tensor>) -> Attention {
    match slopes {
        Some(slopes) => attention.alibi(slopes),
        None => attention,
    }
}

fn unquantized(softmax_scale: f32, left: Option<usize>, right: Option<usize>) -> Attention {
    Attention::default().softmax_scale(f64::from(softmax_scale)).window(left, right)
}

/// Copies cumulative lengths to the host and checks them.
fn cumulative(name: &str, lengths: &Tensor, longest: usize) -> Result<Vec<usize>> {
    if !lengths.dtype().is_int() || lengths.rank() != 1 {
        return Err(Error::new(format!("{name} is not a list of lengths"))
            .got(shapes_of(&[(name, lengths)]))
            .allowed("a tensor of one dimension and an integer type: 0, then the end of each document")
            .hint("Tensor::new(&[0u32, 5, 12], device)? are documents of 5 and 7 tokens")
            .into());
    }
    let lengths: Vec<i64> = lengths.to_device(&Device::Cpu)?.to_dtype(DType::I64)?.to_vec1()?;
    let rises = lengths.first() == Some(&0) && lengths.windows(2).all(|pair| pair[0] <= pair[1]);
    let most = lengths.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0);
    if !rises || most > i64::try_from(longest).unwrap_or(i64::MAX) {
        return Err(Error::new(format!(
            "{name} are not cumulative lengths of documents, or a document is longer than max_seqlen"
        ))
        .got(format!("{lengths:?}, max_seqlen {longest}"))
        .allowed("0 first, non-decreasing, each document at most max_seqlen long")
        .hint("lengths are added up: documents of 5 and 7 tokens are 0, 5, 12")
        .into());
    }
    Ok(lengths.into_iter().map(|length| length as usize).collect())
}
