//! Shapes of the tensors of an attention call, and their validation.

use std::ops::Range;

use crate::error::{Error, Result};

/// Dimensions of a query, key or value: (batch, sequence, heads, head_dim).
pub type Dims = (usize, usize, usize, usize);

/// The supported values of `head_dim`.
///
/// ```
/// use candle_sage::{AttentionShape, shape::HEAD_DIM};
///
/// for head_dim in [HEAD_DIM.start() - 1, *HEAD_DIM.end() + 1] {
///     let dims = (1, 4, 2, head_dim);
///     assert!(AttentionShape::new(dims, dims, dims, false, None).is_err());
/// }
/// ```
pub const HEAD_DIM: std::ops::RangeInclusive<usize> = 8..=256;

/// Several documents, concatenated along the sequence into a batch of one.
///
/// Document `n` contains the query tokens `cu_seqlens_q[n]..cu_seqlens_q[n + 1]` and the key tokens
/// `cu_seqlens_k[n]..cu_seqlens_k[n + 1]`; a token attends only to its own document. FlashAttention calls this form
/// "varlen". A document may be empty.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_sage::{Attention, Packing, Scheme};
///
/// let x = Tensor::randn(0f32, 1., (1, 5, 1, 8), &Device::Cpu)?;
/// let alone = Attention::new(Scheme::Unquantized);
/// let packed = alone.clone().packing(Packing::self_attention(vec![0, 2, 5]));
/// // The result for the second document is the same as if it were alone.
/// let second = x.narrow(1, 2, 3)?;
/// let (packed, alone) = (packed.apply(&x, &x, &x)?.narrow(1, 2, 3)?, alone.apply(&second, &second, &second)?);
/// assert!((packed - alone)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Packing {
    /// Cumulative query lengths: the first is 0, they never decrease, and the last is the number of query
    /// tokens.
    pub cu_seqlens_q: Vec<usize>,
    /// Cumulative key lengths, with as many entries as `cu_seqlens_q`.
    pub cu_seqlens_k: Vec<usize>,
}

impl Packing {
    /// A packing from cumulative lengths of queries and of keys, which may differ. [`AttentionShape::new`] checks the
    /// lengths.
    pub fn new(cu_seqlens_q: Vec<usize>, cu_seqlens_k: Vec<usize>) -> Self {
        Self { cu_seqlens_q, cu_seqlens_k }
    }

    /// A packing for self-attention, in which queries and keys have the same document bounds.
    ///
    /// ```
    /// use candle_sage::Packing;
    ///
    /// let packing = Packing::self_attention(vec![0, 2, 5]);
    /// assert_eq!(packing.cu_seqlens_q, packing.cu_seqlens_k);
    /// ```
    pub fn self_attention(cu_seqlens: Vec<usize>) -> Self {
        Self { cu_seqlens_k: cu_seqlens.clone(), cu_seqlens_q: cu_seqlens }
    }
}

/// The validated shape of one attention call.
///
/// Tensors are (batch, sequence, heads, head_dim). `query_heads` is a multiple of `key_heads`
/// (grouped-query attention: query head `h` reads key head `h / group()`).
///
/// ```
/// use candle_sage::AttentionShape;
///
/// let (q, k) = ((2, 10, 4, 16), (2, 30, 2, 16));
/// let shape = AttentionShape::new(q, k, k, true, None)?;
/// assert_eq!((shape.group(), shape.default_softmax_scale()), (2, 0.25));
/// let odd = (2, 30, 3, 16);
/// let message = AttentionShape::new(q, odd, odd, true, None).unwrap_err().to_string();
/// assert!(message.contains("4 query heads, 3 key heads"));
/// # Ok::<(), candle_sage::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttentionShape {
    batch: usize,
    query_len: usize,
    key_len: usize,
    query_heads: usize,
    key_heads: usize,
    head_dim: usize,
    value_dim: usize,
    window: Window,
    packing: Option<Packing>,
}

/// The number of tokens that a query sees before and after its own position. `None`: no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) before: Option<usize>,
    pub(crate) after: Option<usize>,
}

impl std::fmt::Display for Window {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let tokens = |end: Option<usize>| end.map_or("all".to_string(), |tokens| tokens.to_string());
        write!(f, "{} tokens before and {} after each query", tokens(self.before), tokens(self.after))
    }
}

impl Window {
    /// Whether the window is neither dense attention nor a causal mask.
    pub(crate) fn is_finite(self) -> bool {
        self.before.is_some() || self.after.is_some_and(|after| after > 0)
    }
}

/// One independent attention problem: the tokens of one batch entry, or of one packed document.
///
/// ```
/// use candle_sage::{AttentionShape, Packing};
///
/// let dims = (1, 5, 1, 8);
/// let packing = Packing::self_attention(vec![0, 2, 5]);
/// let shape = AttentionShape::new(dims, dims, dims, true, Some(packing))?;
/// let second = &shape.segments()[1];
/// assert_eq!((second.batch, second.query.clone()), (0, 2..5));
/// // In the second document the first query sees one key, and only the last query sees the last key.
/// assert_eq!((second.visible_keys(0), second.first_query(2)), (1, 2));
/// # Ok::<(), candle_sage::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Index of the tokens' batch entry.
    pub batch: usize,
    /// The query tokens, as indices in the sequence dimension of Q.
    pub query: Range<usize>,
    /// The key and value tokens, as indices in the sequence dimension of K and V.
    pub key: Range<usize>,
    window: Window,
}

impl Segment {
    /// The end (exclusive) of the range of keys that query `i` attends to. The range begins at [`Segment::first_key`].
    /// Indices count within the segment, which has `queries` queries and `keys` keys. Positions are aligned at the
    /// bottom right, as in FlashAttention: the last query has the position of the last key. With a causal mask
    /// query `i` sees key `j` when `j <= i + keys - queries`, and with a window when
    /// `i + keys - queries - before <= j <= i + keys - queries + after`.
    pub fn visible_keys(&self, i: usize) -> usize {
        let keys = self.key.len();
        match self.window.after {
            Some(after) => (i + 1 + keys).saturating_add(after).saturating_sub(self.query.len()).min(keys),
            None => keys,
        }
    }

    /// The first key that query `i` attends to, if it sees any key; 0 unless a window limits the earlier keys.
    pub fn first_key(&self, i: usize) -> usize {
        self.window
            .before
            .map_or(0, |before| (i + self.key.len()).saturating_sub(self.query.len()).saturating_sub(before))
    }

    /// The first query that attends to key `j`, if any query sees this key. Both are indices inside the segment.
    pub fn first_query(&self, j: usize) -> usize {
        match self.window.after {
            Some(after) => (j + self.query.len())
                .saturating_sub(self.key.len())
                .saturating_sub(after)
                .min(self.query.len()),
            None => 0,
        }
    }

    /// The end (exclusive) of the range of queries that attend to key `j`. The range begins at
    /// [`Segment::first_query`].
    pub fn end_query(&self, j: usize) -> usize {
        let queries = self.query.len();
        match self.window.before {
            Some(before) => {
                (j + 1 + queries).saturating_add(before).saturating_sub(self.key.len()).min(queries)
            }
            None => queries,
        }
    }
}

impl AttentionShape {
    /// Checks the dimensions of query, key and value against each other.
    ///
    /// # Errors
    /// When batch sizes, heads, lengths or head_dims do not match or are out of range, or when the packing does not
    /// cover the tokens.
    pub fn new(q: Dims, k: Dims, v: Dims, causal: bool, packing: Option<Packing>) -> Result<Self> {
        let (batch, query_len, query_heads, head_dim) = q;
        let (_, key_len, key_heads, _) = k;
        if !HEAD_DIM.contains(&head_dim) {
            return Err(Error::shape("head_dim of the query is out of range")
                .got(format!("head_dim {head_dim} in query {q:?}"))
                .allowed(format!("{} to {}", HEAD_DIM.start(), HEAD_DIM.end()))
                .hint(head_dim_hint(head_dim)));
        }
        if batch == 0 || query_len == 0 || key_len == 0 {
            return Err(Error::shape("attention without tokens")
                .got(format!("query {q:?}, key {k:?}"))
                .allowed("batch and sequence lengths of at least 1")
                .hint("skip the call when there is nothing to attend to"));
        }
        if k != v {
            return Err(Error::shape("key and value differ in shape")
                .got(format!("key {k:?}, value {v:?}"))
                .allowed("the same (batch, sequence, heads, head_dim)")
                .hint("only `Attention` accepts values of another head_dim (8 to 256)"));
        }
        if k.0 != batch || k.3 != head_dim {
            return Err(Error::shape("query and key do not fit together")
                .got(format!("query {q:?}, key {k:?}"))
                .allowed("the same batch and the same head_dim")
                .hint("tensors are (batch, sequence, heads, head_dim)"));
        }
        if key_heads == 0 || query_heads == 0 || query_heads % key_heads != 0 {
            return Err(Error::shape("query heads do not share key heads evenly")
                .got(format!("{query_heads} query heads, {key_heads} key heads"))
                .allowed("query heads = n x key heads, n = 1, 2, ...")
                .hint("tensors are (batch, sequence, heads, head_dim): heads come third"));
        }
        let window = Window { before: None, after: causal.then_some(0) };
        let value_dim = head_dim;
        let shape =
            Self { batch, query_len, key_len, query_heads, key_heads, head_dim, value_dim, window, packing };
        if let Some(packing) = &shape.packing {
            shape.check_packing(packing)?;
        }
        Ok(shape)
    }

    /// The shape with a window: a query sees at most `before` keys before its own position and `after` keys after it.
    /// `None` sets no limit. The window replaces the causal mask, which is a window with `after` = 0.
    ///
    /// ```
    /// use candle_sage::AttentionShape;
    ///
    /// let dims = (1, 8, 1, 16);
    /// let shape = AttentionShape::new(dims, dims, dims, true, None)?.with_window(Some(2), Some(0));
    /// let segment = &shape.segments()[0];
    /// // The query at position 5 sees the keys 3, 4 and 5.
    /// assert_eq!((segment.first_key(5), segment.visible_keys(5)), (3, 6));
    /// # Ok::<(), candle_sage::Error>(())
    /// ```
    #[must_use]
    pub fn with_window(self, before: Option<usize>, after: Option<usize>) -> Self {
        Self { window: Window { before, after }, ..self }
    }

    pub(crate) fn window(&self) -> Window {
        self.window
    }

    pub(crate) fn with_head_dim(&self, head_dim: usize) -> Self {
        Self { head_dim, value_dim: head_dim, ..self.clone() }
    }

    /// The shape with `value_dim` as the head_dim of values; queries and keys keep their head_dim.
    pub(crate) fn with_value_dim(self, value_dim: usize) -> Self {
        Self { value_dim, ..self }
    }

    /// head_dim of values and outputs.
    #[cfg(feature = "kernels")]
    pub(crate) fn value_dim(&self) -> usize {
        self.value_dim
    }

    #[cfg(feature = "kernels")]
    pub(crate) fn widest(&self) -> usize {
        self.head_dim.max(self.value_dim)
    }

    /// Dimensions of the output and of its gradient.
    pub(crate) fn output_dims(&self) -> Dims {
        (self.batch, self.query_len, self.query_heads, self.value_dim)
    }

    /// Dimensions of the value and of its gradient.
    pub(crate) fn value_dims(&self) -> Dims {
        (self.batch, self.key_len, self.key_heads, self.value_dim)
    }

    fn check_packing(&self, packing: &Packing) -> Result<()> {
        if self.batch != 1 {
            return Err(Error::shape("packed documents need a batch of one")
                .got(format!("batch {}", self.batch))
                .allowed("batch 1")
                .hint("reshape (batch, sequence, ..) to (1, batch * sequence, ..) and extend cu_seqlens"));
        }
        let (q, k) = (&packing.cu_seqlens_q, &packing.cu_seqlens_k);
        if q.len() != k.len() {
            return Err(Error::shape("cu_seqlens_q and cu_seqlens_k have different numbers of documents")
                .got(format!("{} and {} entries", q.len(), k.len()))
                .allowed("equal numbers of entries: one more than there are documents")
                .hint("use Packing::self_attention when both are the same"));
        }
        for (name, cu, len) in [("cu_seqlens_q", q, self.query_len), ("cu_seqlens_k", k, self.key_len)] {
            let sound = cu.first() == Some(&0)
                && cu.last() == Some(&len)
                && cu.windows(2).all(|pair| pair[0] <= pair[1]);
            if !sound {
                return Err(Error::shape(format!("{name} does not cover the tokens"))
                    .got(Preview(cu))
                    .allowed(format!("0, ..., {len}, non-decreasing"))
                    .hint("cumulative sequence lengths start at 0 and end at the number of tokens"));
            }
        }
        Ok(())
    }

    /// Number of batch entries.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Number of query tokens of a batch entry.
    pub fn query_len(&self) -> usize {
        self.query_len
    }

    /// Number of key tokens of a batch entry.
    pub fn key_len(&self) -> usize {
        self.key_len
    }

    /// Number of query heads.
    pub fn query_heads(&self) -> usize {
        self.query_heads
    }

    /// Number of key and value heads.
    pub fn key_heads(&self) -> usize {
        self.key_heads
    }

    /// Width of a head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Whether a token attends only to its own and earlier positions.
    pub fn causal(&self) -> bool {
        self.window.after == Some(0)
    }

    /// Whether the tokens are packed documents.
    pub fn is_packed(&self) -> bool {
        self.packing.is_some()
    }

    /// How many query heads share a key head.
    pub fn group(&self) -> usize {
        self.query_heads / self.key_heads
    }

    /// Dimensions of the query and its gradient; also of the output if values have the same head_dim.
    pub fn query_dims(&self) -> Dims {
        (self.batch, self.query_len, self.query_heads, self.head_dim)
    }

    /// Dimensions of the key and its gradient; also of the value and its gradient if values have the same head_dim.
    pub fn key_dims(&self) -> Dims {
        (self.batch, self.key_len, self.key_heads, self.head_dim)
    }

    /// The softmax scale used when none is given: `1 / sqrt(head_dim)`.
    pub fn default_softmax_scale(&self) -> f64 {
        1.0 / (self.head_dim as f64).sqrt()
    }

    /// One segment for each batch entry, or for each packed document.
    pub fn segments(&self) -> Vec<Segment> {
        let window = self.window;
        match &self.packing {
            None => (0..self.batch)
                .map(|batch| Segment { batch, query: 0..self.query_len, key: 0..self.key_len, window })
                .collect(),
            Some(packing) => packing
                .cu_seqlens_q
                .windows(2)
                .zip(packing.cu_seqlens_k.windows(2))
                .map(|(q, k)| Segment { batch: 0, query: q[0]..q[1], key: k[0]..k[1], window })
                .collect(),
        }
    }
}

fn head_dim_hint(head_dim: usize) -> &'static str {
    if head_dim > *HEAD_DIM.end() {
        // A head cannot be split, because its logits are sums over all its channels.
        "candle's `matmul` and `candle_nn::ops::softmax` support wider heads, with gradients"
    } else {
        "tensors are (batch, sequence, heads, head_dim); widen heads with `pad_with_zeros`, and keep the old `softmax_scale`"
    }
}

/// The first few entries of a long list, for an error message.
struct Preview<'a>(&'a [usize]);

impl std::fmt::Display for Preview<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        const SHOWN: usize = 8;
        let head = &self.0[..self.0.len().min(SHOWN)];
        write!(f, "{head:?}")?;
        if self.0.len() > SHOWN {
            write!(f, " and {} more, the last {}", self.0.len() - SHOWN, self.0[self.0.len() - 1])?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_of_queries_and_keys_agree() {
        let lengths = [(1, 1), (5, 5), (3, 7), (7, 3), (1, 9), (9, 1)];
        let ends = [None, Some(0), Some(1), Some(4), Some(usize::MAX)];
        for (queries, keys) in lengths {
            for (before, after) in ends.iter().flat_map(|before| ends.map(|after| (*before, after))) {
                let window = Window { before, after };
                let segment = Segment { batch: 0, query: 0..queries, key: 0..keys, window };
                for (i, j) in (0..queries).flat_map(|i| (0..keys).map(move |j| (i, j))) {
                    // The key's position minus the query's position.
                    let behind = (j + queries) as i128 - (i + keys) as i128;
                    let within = |end: Option<usize>, distance| end.is_none_or(|end| distance <= end as i128);
                    let sees = within(before, -behind) && within(after, behind);
                    let what = format!("{queries}x{keys} {window:?} ({i}, {j})");
                    assert_eq!((segment.first_key(i)..segment.visible_keys(i)).contains(&j), sees, "{what}");
                    assert_eq!((segment.first_query(j)..segment.end_query(j)).contains(&i), sees, "{what}");
                }
            }
        }
    }
}
