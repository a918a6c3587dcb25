//! Attention with a backward, as a `CustomOp3`.

mod log_sum_exp;
mod op;
mod score_mod;
mod vjp;

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use super::support::{dims4, supported, swap_heads};
use super::widths::Widths;
use crate::error::Error;
use crate::scheme::Scheme;
use crate::selection::Selection;
use crate::shape::{AttentionShape, Dims, Packing, Window};

pub(crate) use op::AttentionOp;
#[cfg(feature = "cuda")]
pub(crate) use op::{BackwardInputs, CompletedOnGpu, GradientsOnGpu};
pub(super) use op::{Completed, Saved};
use score_mod::Requested;
#[cfg(feature = "cuda")]
pub(crate) use score_mod::ScoreMod;
pub use score_mod::alibi_slopes;
pub use vjp::{AttentionState, AttentionVjp};

const NAME: &str = "attention";

/// Attention with a backward: `softmax(softmax_scale Q K^T) V`.
///
/// Query, key and value are (batch, sequence, heads, head_dim) in f32, f16 or bf16, with any strides; the output has
/// the query's shape and type. The number of query heads may be a multiple of the number of key heads. Values may have
/// another head_dim than queries and keys (values 128, queries and keys 192, as in multi-head latent attention); the
/// output then has the head_dim of the values. If the two head_dims differ, the smaller is padded to the larger, and
/// attention takes the time and memory of the larger; unquantized attention on CUDA does not need this padding. All
/// three inputs receive gradients through candle's `backward()`. A gradient cannot be differentiated again.
/// [`Attention::apply_heads_first`] accepts tensors that are (batch, heads, sequence, head_dim).
///
/// candle-nn's fused `softmax_last_dim`, `rms_norm`, `layer_norm` and `rope` have no gradient and report no error. To
/// train a model, use other operators, such as those of [`crate::ops`]. [`crate::untrained`] lists the variables that
/// received no gradient.
///
/// ```
/// use candle_core::{Device, Var};
/// use candle_sage::{ops::Attention, scheme::SageBwd};
///
/// let (q, k, v) = {
///     let var = || Var::randn(0f32, 1., (1, 128, 4, 64), &Device::Cpu);
///     (var()?, var()?, var()?)
/// };
/// let out = Attention::new(SageBwd::default()).causal(true).apply(&q, &k, &v)?;
/// let gradients = out.sqr()?.mean_all()?.backward()?;
/// assert_eq!(gradients.get(&k).unwrap().dims(), k.dims());
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Attention {
    pub(crate) scheme: Scheme,
    causal: bool,
    window: Window,
    softmax_scale: Option<f64>,
    packing: Option<Packing>,
    deterministic: bool,
    selection: Option<Selection>,
    modified: Requested,
    /// The sinks' logits: (query heads) in f32.
    pub(super) sinks: Option<Tensor>,
}

impl Attention {
    /// Attention in the numerics of `scheme`: not causal, with the default softmax scale `1 / sqrt(head_dim)`
    /// and without packing.
    pub fn new(scheme: impl Into<Scheme>) -> Self {
        Self { scheme: scheme.into(), ..Self::default() }
    }

    /// Replaces the scheme.
    #[must_use]
    pub fn scheme(mut self, scheme: impl Into<Scheme>) -> Self {
        self.scheme = scheme.into();
        self
    }

    /// Whether a query sees only the keys up to its own position. Positions are aligned at the end: if the numbers of
    /// queries and keys differ, the last query still sees every key (as in FlashAttention).
    ///
    /// With low-bit schemes the matmuls are causal, but some scales and means also depend on later tokens. SageBwd's
    /// smoothing subtracts the mean of all keys of the sequence (with [`Smoothing::Kv`](crate::Smoothing::Kv) also the
    /// mean of all values), and a tile of 64 keys shares a scale. A later token can therefore change an earlier output.
    /// In a test with 256 tokens, keys from position 200 on were multiplied by 50: outputs before position 128 changed
    /// by up to .16 of the outputs' root mean square. (`docs/support.md` has the results of this test for all schemes.)
    /// A NaN in the last key reaches the first output. [`Smoothing::None`](crate::Smoothing::None) removes the
    /// dependence on the mean; the caller can subtract a fixed mean from the keys instead. The scale of a tile of 64
    /// keys still depends on the tile's later tokens. For Attn-QAT see [`ValueGroups`](crate::ValueGroups).
    ///
    /// Unquantized attention is strictly causal for finite inputs. A query multiplies the values of later tokens in its
    /// own tile by the probability 0. If such a value is infinite or NaN, the outputs of up to 127 earlier queries
    /// become NaN. Other documents and batch entries are not affected.
    #[must_use]
    pub fn causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    /// A sliding window: a query sees its own position, `left` keys before it and `right` keys after it; `None` sets no
    /// limit. With [`Attention::causal`] a query sees no later key, whatever `right` is. The last query has the
    /// position of the last key. `left` and `right` are FlashAttention's `window_size`. The window is exact to the
    /// token in every scheme, forward and backward. Blocks of 128 keys outside the window are skipped, so a smaller
    /// window takes less time. The means of SageBwd's smoothing are over all keys, also those outside the window.
    ///
    /// A model's `sliding_window` may include the query's own token: for Mistral and Gemma, `sliding_window: 4096` is
    /// `window(4095, None)`.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_sage::Attention;
    ///
    /// let (zeros, v) = (Tensor::zeros((1, 4, 1, 8), candle_core::DType::F32, &Device::Cpu)?, [0f32, 2., 4., 6.]);
    /// let v = Tensor::new(&v, &Device::Cpu)?.reshape((1, 4, 1, 1))?.broadcast_as((1, 4, 1, 8))?;
    /// // All logits are 0: each output is the mean of the query's own value and the value before it.
    /// let out = Attention::default().causal(true).window(1, None).apply(&zeros, &zeros, &v)?;
    /// assert_eq!(out.narrow(3, 0, 1)?.flatten_all()?.to_vec1::<f32>()?, [0., 1., 3., 5.]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    #[must_use]
    pub fn window(mut self, left: impl Into<Option<usize>>, right: impl Into<Option<usize>>) -> Self {
        self.window = Window { before: left.into(), after: right.into() };
        self
    }

    /// Whether a query sees only the keys up to its own position.
    pub fn is_causal(&self) -> bool {
        self.causal || self.window.after == Some(0)
    }

    /// Sets the softmax scale, the factor of `Q K^T`.
    #[must_use]
    pub fn softmax_scale(mut self, softmax_scale: f64) -> Self {
        self.softmax_scale = Some(softmax_scale);
        self
    }

    /// The softmax scale for inputs of this shape.
    pub(crate) fn scale_of(&self, shape: &AttentionShape) -> f64 {
        self.softmax_scale.unwrap_or_else(|| shape.default_softmax_scale())
    }

    /// Packed documents: a query sees only keys of its document. The batch must be 1.
    #[must_use]
    pub fn packing(mut self, packing: Packing) -> Self {
        self.packing = Some(packing);
        self
    }

    /// Whether gradients on CUDA have the same bits in repeated runs. By default thread blocks add to dQ with atomic
    /// f32 additions. Their order varies between runs, which changes the last bits. With a selection, dK and dV of a
    /// key block that many query blocks select are also summed with atomics. A deterministic backward adds in a fixed
    /// order, which takes longer. CPU results never vary.
    #[must_use]
    pub fn deterministic(mut self, deterministic: bool) -> Self {
        self.deterministic = deterministic;
        self
    }

    #[cfg(feature = "kernels")]
    pub(crate) fn has_tensors(&self) -> bool {
        self.selection.is_some() || self.sinks.is_some() || self.modified.has_slopes()
    }

    #[cfg(feature = "kernels")]
    pub(crate) fn is_deterministic(&self) -> bool {
        self.deterministic
    }

    /// Restricts attention to the listed blocks of keys, forward and backward, with any scheme: block-sparse attention.
    /// Keys that are not listed are masked. The time depends on the lengths of the lists. On CUDA, these lengths also
    /// change the order in which gradients are summed.
    ///
    /// On CUDA, a selection's blocks must have 128 tokens; on the CPU, a multiple of [`Scheme::block_unit`].
    /// Smoothing of keys or values, and [`ValueScale::Head`](crate::ValueScale::Head), use all tokens of a batch entry
    /// or document, not only the listed blocks. In exact arithmetic, smoothing does not change attention to any subset
    /// of the keys.
    #[must_use]
    pub fn select(mut self, selection: &Selection) -> Self {
        self.selection = Some(selection.clone());
        self
    }

    /// Runs the forward. If an input needs a gradient, the output's graph node keeps the state for the backward. The
    /// state is freed with the graph.
    ///
    /// # Errors
    /// When shapes, element types or settings are not supported: see [`AttentionShape::new`].
    pub fn apply(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        if let Some(widths) = self.widths([q, k, v]) {
            let [wide_q, wide_k, wide_v] = widths.widen([q, k, v])?;
            return widths.narrow_output(&self.scaled_for(q)?.apply(&wide_q, &wide_k, &wide_v)?);
        }
        let tracked = q.track_op() || k.track_op() || v.track_op();
        let op = self.op(q, k, v, tracked)?;
        if tracked { q.apply_op3(k, v, op) } else { q.apply_op3_no_bwd(k, v, &op) }
    }

    /// [`Attention::apply`] for tensors that are (batch, heads, sequence, head_dim), as in PyTorch's
    /// `scaled_dot_product_attention` and many candle models. The output has the same order. The inputs are not copied.
    /// (`apply` would mistake the heads of such a tensor for tokens.)
    ///
    /// # Errors
    /// As [`Attention::apply`].
    pub fn apply_heads_first(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let [q, k, v] = [("query", q), ("key", k), ("value", v)].map(|(name, x)| swap_heads(name, x));
        self.apply(&q?, &k?, &v?)?.transpose(1, 2)
    }

    /// Runs the forward outside candle's graph. Returns the output and its vector-Jacobian product, which computes the
    /// inputs' gradients from the output's gradient. For training loops that do not use candle's graph, and for timing
    /// the backward alone.
    ///
    /// # Errors
    /// As [`Attention::apply`].
    pub fn vjp(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<(Tensor, AttentionVjp)> {
        let inputs = [q, k, v].map(Tensor::detach);
        let widths = self.widths(inputs.each_ref());
        let (attention, inputs) = match widths {
            None => (self.clone(), inputs),
            Some(widths) => (self.scaled_for(q)?, widths.widen(inputs.each_ref())?),
        };
        let [q, k, v] = &inputs;
        let op = attention.op(q, k, v, true)?;
        let out = q.apply_op3_no_bwd(k, v, &op)?;
        let narrow = widths.map_or(Ok(out.clone()), |widths| widths.narrow_output(&out))?;
        Ok((narrow, AttentionVjp { op, inputs, out, widths }))
    }

    /// The head_dims of the inputs, if heads of values are narrower or wider than heads of queries and keys, and the
    /// narrower heads must be padded. On a GPU unquantized attention needs no padding.
    pub(super) fn widths(&self, inputs: [&Tensor; 3]) -> Option<Widths> {
        let takes_both = self.scheme == Scheme::Unquantized && inputs[0].device().is_cuda();
        let [q, k, v] = inputs.map(|x| x.dims4().ok());
        Widths::of([q?, k?, v?]).filter(|_| !takes_both)
    }

    /// Sets the softmax scale to `1 / sqrt(head_dim)` of the unpadded `q`, unless the caller set a scale.
    pub(super) fn scaled_for(&self, q: &Tensor) -> Result<Self> {
        let scale = 1.0 / (q.dim(candle_core::D::Minus1)? as f64).sqrt();
        Ok(Self { softmax_scale: self.softmax_scale.or(Some(scale)), ..self.clone() })
    }

    pub(crate) fn shape(&self, [q, k, v]: [&Tensor; 3]) -> Result<AttentionShape> {
        self.shape_of([dims4("query", q)?, dims4("key", k)?, dims4("value", v)?])
    }

    /// The validated shape of a call on tensors of these dimensions.
    fn shape_of(&self, [q, k, v]: [Dims; 3]) -> Result<AttentionShape> {
        let value_dim = Widths::of([q, k, v]).map(Widths::value);
        let as_wide = if value_dim.is_some() { k } else { v };
        let after = if self.causal { Some(0) } else { self.window.after };
        let shape = AttentionShape::new(q, k, as_wide, self.causal, self.packing.clone())?
            .with_window(self.window.before, after);
        Ok(match value_dim {
            Some(value_dim) => shape.with_value_dim(value_dim),
            None => shape,
        })
    }

    /// The validated shape and softmax scale of a call on tensors of these dimensions and types. `keep`: whether a
    /// backward will follow.
    pub(crate) fn checked(
        &self,
        dims: [Dims; 3],
        dtypes: [DType; 3],
        keep: bool,
    ) -> Result<(AttentionShape, f32)> {
        self.scheme.validate()?;
        if keep && self.scheme.is_forward_only() {
            return Err(Error::new("FP4 matmuls have no backward")
                .got("inputs with a gradient (`Var`), `vjp`, `apply_with_lse`, or `ForeignAttention::new` with `keep`")
                .allowed("`Attention::apply` with inputs without a gradient (`Tensor::detach`)")
                .hint(
                    "to train, use AttnQat::products(Products::SixteenBit): 16-bit matmuls, same FP4 values",
                )
                .into());
        }
        let shape = self.shape_of(dims)?;
        if dtypes.iter().any(|dtype| *dtype != dtypes[0]) {
            let got = dtypes.map(|dtype| dtype.as_str()).join(", ");
            return Err(Error::new("query, key and value differ in element type")
                .got(got)
                .allowed("one of f32, f16, bf16 for all three")
                .hint("convert with `to_dtype`")
                .into());
        }
        let softmax_scale = self.scale_of(&shape);
        let as_f32 = softmax_scale as f32;
        if !as_f32.is_finite() || (as_f32 == 0.0 && softmax_scale != 0.0) {
            return Err(Error::new("softmax scale is out of range")
                .got(softmax_scale)
                .allowed("a number that f32 does not round to 0 or infinity")
                .hint("omit it for 1 / sqrt(head_dim)")
                .into());
        }
        Ok((shape, as_f32))
    }

    pub(super) fn op(&self, q: &Tensor, k: &Tensor, v: &Tensor, keep: bool) -> Result<AttentionOp> {
        let dims = [dims4("query", q)?, dims4("key", k)?, dims4("value", v)?];
        let (shape, softmax_scale) = self.checked(dims, [q, k, v].map(Tensor::dtype), keep)?;
        supported(NAME, &[q, k, v])?;
        if let Some(selection) = &self.selection {
            if shape.window().is_finite() {
                return Err(Error::new("a selection cannot be combined with a window of tokens")
                    .got(shape.window())
                    .allowed("a selection or a window")
                    .hint("select the blocks of the window instead: `Selection::window`")
                    .into());
            }
            selection.check(&shape, self.scheme.block_unit())?;
            if !selection.lists().device().same_device(q.device()) {
                return Err(Error::new("the selection is on another device")
                    .got(format!(
                        "selection {:?}, query {:?}",
                        selection.lists().device().location(),
                        q.device().location()
                    ))
                    .allowed("the device of query, key and value")
                    .hint("`Selection::to_device` copies the selection")
                    .into());
            }
        }
        Ok(AttentionOp {
            scheme: self.scheme,
            score_mod: self.score_mod(&shape, q)?,
            sinks: self.sinks_of(&shape, q)?,
            shape,
            softmax_scale,
            deterministic: self.deterministic,
            selection: self.selection.clone(),
            saved: keep.then(Arc::default),
        })
    }
}
