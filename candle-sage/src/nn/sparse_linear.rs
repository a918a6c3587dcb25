//! SLA2 as an attention layer.

use candle_core::{DType, Result, Tensor};
use candle_nn::{Init, VarBuilder};

use super::{Rotary, SelfAttention, SelfAttentionConfig};
use crate::ops::Attention;
use crate::scheme::Scheme;
use crate::sla2::{Router, Sla2, Sla2Cache};
use crate::variables;

/// A [`SelfAttention`] layer with [`Sla2`]: softmax attention to the blocks of keys that a router selects, mixed with
/// linear attention to the blocks that [`Sla2::tail`](crate::Sla2::tail) sets.
///
/// `theta` is one learned number for each query head. It sets the weights of the mixture: see
/// [`Alpha`](crate::ops::Alpha). The output's gradient trains the projections, the norms and `theta`;
/// [`Self::router_loss`] trains the router.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use candle_sage::nn::{Biases, Rotary, SelfAttentionConfig, SparseLinearAttention};
/// use candle_sage::{Scheme, Sla2, ops::RopeStyle};
///
/// let config =
///     SelfAttentionConfig::new(16, 2, 8).key_heads(1);
/// let map = VarMap::new();
/// let vb = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
/// let sla2 = Sla2::new(Scheme::Unquantized).block((16, 16)).blocks(1).causal(true);
/// let layer = SparseLinearAttention::load(config, sla2, vb)?;
/// let rotary = Rotary::new(64, 8, 10_000.0, RopeStyle::Halves, &Device::Cpu)?;
/// let x = Tensor::randn(0f32, 1., (1, 64, 16), &Device::Cpu)?;
/// assert_eq!(layer.forward(&x, &rotary)?.dims(), x.dims());
/// // A prompt, then a token.
/// let mut cache = layer.cache(64);
/// layer.forward_cached(&x.narrow(1, 0, 63)?, &rotary, &mut cache)?;
/// assert_eq!(layer.forward_cached(&x.narrow(1, 63, 1)?, &rotary, &mut cache)?.dims(), [1, 1, 16]);
/// assert!(layer.router_loss(&x, &rotary)?.to_scalar::<f32>()? > 0.0);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct SparseLinearAttention {
    layer: SelfAttention,
    sla2: Sla2,
    router: Router,
    theta: Tensor,
}

impl SparseLinearAttention {
    /// A layer that uses the projections and norms of `layer`, but not its attention. `theta`, (query heads) in
    /// f32, is a parameter of [`ops::blend`](crate::ops::blend).
    pub fn new(layer: SelfAttention, sla2: Sla2, router: Router, theta: Tensor) -> Self {
        Self { layer, sla2, router, theta }
    }

    /// Loads the router, `theta`, and the tensors that [`SelfAttention::load`] loads. The router's `q_router.weight`
    /// and `k_router.weight` are (key heads, head_dim, head_dim) each. `theta` is (query heads); a new model
    /// initializes it to 2. A language model needs a causal `sla2`.
    ///
    /// # Errors
    /// When a weight is missing or has the wrong shape.
    pub fn load(config: SelfAttentionConfig, sla2: Sla2, vb: VarBuilder<'_>) -> Result<Self> {
        let SelfAttentionConfig { heads, key_heads, head_dim, .. } = config;
        let router = Router::load(key_heads, head_dim, vb.clone())?;
        let theta = variables::load(&vb, heads, "theta", Init::Const(2.0), DType::F32)?;
        let unused = Attention::new(Scheme::Unquantized);
        Ok(Self::new(SelfAttention::load(config, unused, vb)?, sla2, router, theta))
    }

    /// Attends over a sequence whose first token is at position 0. `x` and the output are (batch, sequence,
    /// width).
    ///
    /// # Errors
    /// When the shapes do not match, or the sequence is longer than the rotary tables.
    pub fn forward(&self, x: &Tensor, rotary: &Rotary) -> Result<Tensor> {
        self.layer.forward_with(x, rotary, |q, k, v| {
            let selection = self.sla2.select(&self.router, q, k)?;
            self.sla2.apply(q, k, v, &selection, &self.theta)
        })
    }

    /// An empty cache for [`Self::forward_cached`]. The cache allocates memory for `len` tokens at its first use, and
    /// for `len` more tokens whenever it is full.
    pub fn cache(&self, len: usize) -> Sla2Cache {
        Sla2Cache::new(len)
    }

    /// [`Self::forward`] for tokens that follow the tokens in `cache`. Adds the new tokens to the cache: see
    /// [`Sla2::apply_cached`]. `x` and the output are (batch, tokens, width). The output is detached: a cache does not
    /// propagate gradients.
    ///
    /// # Errors
    /// As [`Self::forward`] and [`Sla2::apply_cached`].
    pub fn forward_cached(&self, x: &Tensor, rotary: &Rotary, cache: &mut Sla2Cache) -> Result<Tensor> {
        let out = self.layer.forward_at(x, rotary, cache.current_seq_len(), |q, k, v| {
            self.sla2.apply_cached(&self.router, [q, k, v], &self.theta, cache)
        });
        Ok(out?.detach())
    }

    /// The loss that trains the router on the layer's queries and keys: see [`Sla2::router_loss`]. Only the router
    /// receives gradients.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn router_loss(&self, x: &Tensor, rotary: &Rotary) -> Result<Tensor> {
        let mut loss = None;
        self.layer.forward_with(&x.detach(), rotary, |q, k, _| {
            loss = Some(self.sla2.router_loss(&self.router, q, k)?);
            // The layer's output is not used.
            q.zeros_like()
        })?;
        match loss {
            Some(loss) => Ok(loss),
            None => candle_core::bail!("the layer did not attend"),
        }
    }
}
