//! Self-attention of Llama, Qwen2 and Qwen3, for training and for decoding.

use candle_core::{Module, Result, Tensor};
use candle_nn::VarBuilder;
use candle_nn::kv_cache::KvCache;

use super::{Linear, RmsNorm, Rotary};
use crate::error::Error;
use crate::ops::{self, Attention};
use crate::scheme::Scheme;
use crate::shape::AttentionShape;

/// The index of the sequence dimension in (batch, sequence, heads, head_dim).
const SEQUENCE: usize = 1;

/// Which of a layer's linear maps have a bias.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_nn::{VarBuilder, VarMap};
/// use candle_sage::Attention;
/// use candle_sage::nn::{Biases, SelfAttention, SelfAttentionConfig};
///
/// let qwen2 = SelfAttentionConfig::new(16, 2, 8).key_heads(1).biases(Biases::QueryKeyValue);
/// let variables = VarMap::new();
/// let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
/// SelfAttention::load(qwen2, Attention::default().causal(true), vb)?;
/// // Four weights and three biases.
/// assert_eq!(variables.all_vars().len(), 7);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Biases {
    /// None, as in Llama and Qwen3.
    #[default]
    None,
    /// Query, key and value, as in Qwen2.
    QueryKeyValue,
    /// Query, key, value and output, as with `attention_bias` in the `config.json` of Llama and Qwen3.
    All,
}

/// The shape of a [`SelfAttention`] layer.
///
/// ```
/// use candle_sage::nn::{Biases, SelfAttentionConfig};
///
/// // Qwen3-0.6B: 16 query heads of 128 channels, which share 8 key heads.
/// let qwen3 = SelfAttentionConfig::new(1024, 16, 128).key_heads(8).qk_norm(1e-6);
/// assert_eq!((qwen3.key_heads, qwen3.biases), (8, Biases::None));
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct SelfAttentionConfig {
    /// Width of the layer's input and output.
    pub width: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads, a divisor of `heads`.
    pub key_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Epsilon of the per-head RMSNorm of queries and keys before the rotary embedding, as in Qwen3; `None` for no
    /// norm, as in Llama and Qwen2.
    pub qk_norm_eps: Option<f64>,
    /// Which linear maps have a bias.
    pub biases: Biases,
}

impl SelfAttentionConfig {
    /// A layer with as many key heads as query heads, without QK-norm or biases.
    pub const fn new(width: usize, heads: usize, head_dim: usize) -> Self {
        Self { width, heads, key_heads: heads, head_dim, qk_norm_eps: None, biases: Biases::None }
    }

    /// Sets the number of key and value heads.
    #[must_use]
    pub const fn key_heads(self, key_heads: usize) -> Self {
        Self { key_heads, ..self }
    }

    /// Sets the epsilon of an RMSNorm of each head's queries and keys; `None` for no norm.
    #[must_use]
    pub fn qk_norm(self, eps: impl Into<Option<f64>>) -> Self {
        Self { qk_norm_eps: eps.into(), ..self }
    }

    /// Sets which maps have a bias.
    #[must_use]
    pub const fn biases(self, biases: Biases) -> Self {
        Self { biases, ..self }
    }

    /// Checks `heads`, `key_heads` and `head_dim`.
    fn check(&self) -> Result<()> {
        let dims = |heads| (1, 1, heads, self.head_dim);
        let (q, k) = (dims(self.heads), dims(self.key_heads));
        AttentionShape::new(q, k, k, true, None)?;
        if !self.head_dim.is_multiple_of(2) {
            return Err(Error::shape("head_dim of the layer is odd")
                .got(self.head_dim)
                .allowed("an even head_dim")
                .hint("the rotary embedding rotates pairs of channels")
                .into());
        }
        Ok(())
    }
}

/// Self-attention of Llama, Qwen2 and Qwen3: projections, per-head RMSNorm of queries and keys (QK-norm), rotary
/// embedding, attention, output projection.
///
/// [`SelfAttention::forward`] is for training; [`SelfAttention::forward_cached`] decodes, with one [`KvCache`] per
/// layer:
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use candle_sage::nn::{Biases, Rotary, SelfAttention, SelfAttentionConfig};
/// use candle_sage::{Attention, SageBwd, ops::RopeStyle};
///
/// let config =
///     SelfAttentionConfig::new(64, 4, 16).key_heads(2).qk_norm(1e-6);
/// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
/// let layer = SelfAttention::load(config, Attention::new(SageBwd::default()).causal(true), vb)?;
/// let rotary = Rotary::new(128, 16, 10_000.0, RopeStyle::Halves, &Device::Cpu)?;
///
/// let mut cache = layer.cache(128);
/// let prompt = Tensor::randn(0f32, 1., (1, 20, 64), &Device::Cpu)?;
/// layer.forward_cached(&prompt, &rotary, &mut cache)?;
/// let token = Tensor::randn(0f32, 1., (1, 1, 64), &Device::Cpu)?;
/// assert_eq!(layer.forward_cached(&token, &rotary, &mut cache)?.dims(), [1, 1, 64]);
/// assert_eq!(cache.current_seq_len(), 21);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct SelfAttention {
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    qk_norm: Option<(RmsNorm, RmsNorm)>,
    config: SelfAttentionConfig,
    attention: Attention,
    decoding: Attention,
}

impl SelfAttention {
    /// A layer from the maps `[q, k, v, o]` and, with QK-norm, the norms of queries and keys. Weights are
    /// (outputs, inputs): (heads * head_dim, width) for q, (key_heads * head_dim, width) for k and v, and
    /// (width, heads * head_dim) for o. The config's epsilon and biases are ignored: the norms and maps contain them.
    ///
    /// # Errors
    /// When the shapes of maps and norms do not match the config, or the config's heads are not supported.
    pub fn new(
        config: SelfAttentionConfig,
        attention: Attention,
        [q, k, v, o]: [Linear; 4],
        qk_norm: Option<(RmsNorm, RmsNorm)>,
    ) -> Result<Self> {
        config.check()?;
        let SelfAttentionConfig { width, heads, key_heads, head_dim, .. } = config;
        let (queries, keys) = (heads * head_dim, key_heads * head_dim);
        let maps = [
            ("q", &q, (queries, width)),
            ("k", &k, (keys, width)),
            ("v", &v, (keys, width)),
            ("o", &o, (width, queries)),
        ];
        for (name, map, expected) in maps {
            let given = map.dims()?;
            if given != expected {
                return Err(Error::shape(format!("the projection {name} does not fit the layer"))
                    .got(format!("a weight {given:?}"))
                    .allowed(format!("{expected:?}"))
                    .hint("weights are (outputs, inputs); the projections are [q, k, v, o]")
                    .into());
            }
        }
        for (name, norm) in qk_norm.iter().flat_map(|(q, k)| [("queries", q), ("keys", k)]) {
            if norm.weight.dims() != [head_dim] {
                return Err(Error::shape(format!("the norm of {name} does not fit a head"))
                    .got(format!("a weight {:?}", norm.weight.dims()))
                    .allowed(format!("[{head_dim}]"))
                    .hint("QK-norm normalizes each head: the weight has one value per channel of a head")
                    .into());
            }
        }
        let decoding = attention.clone().scheme(Scheme::Unquantized);
        Ok(Self { q, k, v, o, qk_norm, config, attention, decoding })
    }

    /// Loads `q_proj`, `k_proj`, `v_proj`, `o_proj` and, with QK-norm, `q_norm` and `k_norm`.
    ///
    /// `attention` defines the numerics and the mask; a language model needs a causal mask.
    ///
    /// # Errors
    /// When a weight is missing or has the wrong shape, or the config's heads are not supported.
    pub fn load(config: SelfAttentionConfig, attention: Attention, vb: VarBuilder<'_>) -> Result<Self> {
        config.check()?;
        let SelfAttentionConfig { width, heads, key_heads, head_dim, qk_norm_eps, biases } = config;
        let qk_norm = match qk_norm_eps {
            None => None,
            Some(eps) => Some((
                RmsNorm::load(head_dim, eps, vb.pp("q_norm"))?,
                RmsNorm::load(head_dim, eps, vb.pp("k_norm"))?,
            )),
        };
        let map = |inputs, outputs, name: &str, biased| match biased {
            true => Linear::load_with_bias(inputs, outputs, vb.pp(name)),
            false => Linear::load(inputs, outputs, vb.pp(name)),
        };
        let biased = biases != Biases::None;
        let maps = [
            map(width, heads * head_dim, "q_proj", biased)?,
            map(width, key_heads * head_dim, "k_proj", biased)?,
            map(width, key_heads * head_dim, "v_proj", biased)?,
            map(heads * head_dim, width, "o_proj", biases == Biases::All)?,
        ];
        Self::new(config, attention, maps, qk_norm)
    }

    /// Replaces the attention of tokens that follow a prompt in [`SelfAttention::forward_cached`]. The default is the
    /// layer's attention without quantization: a decoding step reads every key once, and with quantization it would
    /// first quantize all keys again.
    #[must_use]
    pub fn decoding(self, decoding: Attention) -> Self {
        Self { decoding, ..self }
    }

    /// Attends over a sequence whose first token is at position 0. `x` and the output are (batch, sequence, width).
    /// Without a rotary embedding (`None`) queries and keys are not rotated, as in BERT and GPT-2, which add positions
    /// to the input.
    ///
    /// # Errors
    /// When the shapes do not match, or the sequence is longer than the rotary tables.
    pub fn forward<'a>(&self, x: &Tensor, rotary: impl Into<Option<&'a Rotary>>) -> Result<Tensor> {
        self.forward_with(x, rotary, |q, k, v| self.attention.apply(q, k, v))
    }

    /// [`SelfAttention::forward`] with `attend` instead of the layer's attention. `attend` receives query, key and
    /// value as (batch, sequence, heads, head_dim). Query and key are already normalized and rotated. Use `attend` to
    /// inspect a model's tensors, or to compute attention differently.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use candle_sage::nn::{Biases, Rotary, SelfAttention, SelfAttentionConfig};
    /// # use candle_sage::{Attention, ops::RopeStyle};
    /// # let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    /// # let rotary = Rotary::new(8, 8, 10_000.0, RopeStyle::Halves, &Device::Cpu)?;
    /// let config =
    ///     SelfAttentionConfig::new(16, 2, 8).key_heads(1);
    /// let attention = Attention::default().causal(true);
    /// let layer = SelfAttention::load(config, attention.clone(), vb)?;
    /// let x = Tensor::randn(0f32, 1., (1, 4, 16), &Device::Cpu)?;
    /// let mut dims = None;
    /// layer.forward_with(&x, &rotary, |q, k, v| {
    ///     dims = Some((q.dims4()?, k.dims4()?));
    ///     attention.apply(q, k, v)
    /// })?;
    /// assert_eq!(dims, Some(((1, 4, 2, 8), (1, 4, 1, 8))));
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`SelfAttention::forward`], and the errors of `attend`.
    pub fn forward_with<'a>(
        &self,
        x: &Tensor,
        rotary: impl Into<Option<&'a Rotary>>,
        attend: impl FnOnce(&Tensor, &Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        self.forward_at(x, rotary, 0, attend)
    }

    /// As [`SelfAttention::forward_with`] for a sequence whose first token is at `position`.
    pub(super) fn forward_at<'a>(
        &self,
        x: &Tensor,
        rotary: impl Into<Option<&'a Rotary>>,
        position: usize,
        attend: impl FnOnce(&Tensor, &Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let [q, k, v] = self.project(x, rotary.into(), position)?;
        let attended = attend(&q, &k, &v)?;
        if attended.dims() != q.dims() {
            return Err(Error::shape("the output of `attend` does not fit the query")
                .got(format!("{:?}", attended.dims()))
                .allowed(format!("{:?}: (batch, sequence, heads, head_dim)", q.dims()))
                .hint("`transpose(1, 2)` an output that is (batch, heads, sequence, head_dim)")
                .into());
        }
        self.output(&attended)
    }

    /// An empty cache for [`SelfAttention::forward_cached`]. The cache allocates memory for `len` tokens at its first
    /// use, and for `len` more tokens whenever it is full.
    pub fn cache(&self, len: usize) -> KvCache {
        KvCache::new(SEQUENCE, len.max(1))
    }

    /// [`SelfAttention::forward`] for tokens that follow the tokens in `cache`: first a prompt, then one or several
    /// tokens at a time. The keys and values of these tokens are added to the cache. `x` and the output are (batch,
    /// tokens, width).
    ///
    /// The prompt uses the layer's attention, later tokens use [`SelfAttention::decoding`]. The output is detached: a
    /// cache does not propagate gradients.
    ///
    /// # Errors
    /// As [`SelfAttention::forward`]. When the layer is not causal: earlier tokens would have to see later tokens. When
    /// the cache does not fit the batch or the layer, or does not grow along dimension 1.
    pub fn forward_cached<'a>(
        &self,
        x: &Tensor,
        rotary: impl Into<Option<&'a Rotary>>,
        cache: &mut KvCache,
    ) -> Result<Tensor> {
        if !self.attention.is_causal() || !self.decoding.is_causal() {
            return Err(Error::new("a cache needs causal attention")
                .got("Attention::causal(false)")
                .allowed("causal attention, in which a token attends only to itself and to earlier tokens")
                .hint("`.causal(true)`, or `SelfAttention::forward` over the whole sequence")
                .into());
        }
        self.check_cache(x, cache)?;
        let past = cache.current_seq_len();
        let attention = if past == 0 { &self.attention } else { &self.decoding };
        let [q, k, v] = self.project(x, rotary.into(), past)?.map(|x| x.detach());
        let (k, v) = cache.append(&k, &v.contiguous()?)?;
        Ok(self.output(&attention.apply(&q, &k, &v)?)?.detach())
    }

    fn check_cache(&self, x: &Tensor, cache: &KvCache) -> Result<()> {
        if cache.k_cache().dim() != SEQUENCE {
            return Err(Error::shape("the cache does not grow along the sequence")
                .got(format!("it grows along dimension {}", cache.k_cache().dim()))
                .allowed(format!(
                    "dimension {SEQUENCE}: keys and values are (batch, sequence, heads, head_dim)"
                ))
                .hint("`SelfAttention::cache` makes a matching cache")
                .into());
        }
        let (batch, _) = self.input_dims(x)?;
        let expected = (batch, self.config.key_heads, self.config.head_dim);
        if let Some(keys) = cache.k_cache().all_data() {
            let (batch, _, heads, head_dim) = ops::dims4("the cache", keys)?;
            if (batch, heads, head_dim) != expected {
                return Err(Error::shape("the cache contains keys of another shape")
                    .got(format!("batch, heads, head_dim {:?}", (batch, heads, head_dim)))
                    .allowed(format!("{expected:?}"))
                    .hint("a cache belongs to one layer and one batch; `reset` empties it")
                    .into());
            }
        }
        Ok(())
    }

    fn input_dims(&self, x: &Tensor) -> Result<(usize, usize)> {
        match *x.dims() {
            [batch, sequence, width] if width == self.config.width => Ok((batch, sequence)),
            _ => Err(Error::shape("the input does not fit the layer")
                .got(format!("{:?}", x.dims()))
                .allowed(format!("(batch, sequence, {})", self.config.width))
                .hint("the last dimension is the `width` of the layer's config; `unsqueeze(0)` makes a batch of one sequence")
                .into()),
        }
    }

    /// Query, key and value, (batch, sequence, heads, head_dim) each. The first token is at `position`.
    fn project(&self, x: &Tensor, rotary: Option<&Rotary>, position: usize) -> Result<[Tensor; 3]> {
        let (batch, sequence) = self.input_dims(x)?;
        let SelfAttentionConfig { heads, key_heads, head_dim, .. } = self.config;
        let split = |x: Tensor, heads| x.reshape((batch, sequence, heads, head_dim));
        let q = split(self.q.forward(x)?, heads)?;
        let k = split(self.k.forward(x)?, key_heads)?;
        let v = split(self.v.forward(x)?, key_heads)?;
        let turn = |x: Tensor, norm: Option<&RmsNorm>| match (norm, rotary) {
            (Some(norm), Some(rotary)) => rotary.forward_normalized(&x, norm, position),
            (Some(norm), None) => norm.forward(&x),
            (None, Some(rotary)) => rotary.forward(&x, position),
            (None, None) => Ok(x),
        };
        let (q_norm, k_norm) = self.qk_norm.as_ref().map(|(q, k)| (q, k)).unzip();
        Ok([turn(q, q_norm)?, turn(k, k_norm)?, v])
    }

    fn output(&self, attended: &Tensor) -> Result<Tensor> {
        self.o.forward(&attended.flatten_from(2)?)
    }
}
