//! Modules that models import: each holds its parameters and calls an operator of [`crate::ops`].
//!
//! They are made from parts with `new`, or from a `candle_nn::VarBuilder` with `load`, under the names
//! that Hugging Face's Llama and Qwen3 checkpoints use. Those of one input are candle `Module`s.

mod sparse_linear;

use candle_core::{Device, Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};

use crate::error::Error;
use crate::ops::{self, RopeStyle};
pub use sparse_linear::SparseLinearAttention;

/// Root-mean-square normalization over the last dimension, (.., width): see [`ops::rms_norm`].
#[derive(Debug, Clone)]
pub struct RmsNorm {
    weight: Tensor,
    eps: f64,
}

impl RmsNorm {
    /// From a weight of shape (width).
    pub fn new(weight: Tensor, eps: f64) -> Self {
        Self { weight, eps }
    }

    /// Loads `weight`.
    ///
    /// # Errors
    /// When it is missing or has another shape.
    pub fn load(width: usize, eps: f64, vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self::new(vb.get_with_hints(width, "weight", Init::Const(1.0))?, eps))
    }
}

impl Module for RmsNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        ops::rms_norm(x, &self.weight, self.eps)
    }
}

/// A linear map without bias, `y = x W^T`, of the last dimension. All leading dimensions go into one
/// product, so that the weight's gradient is one product too.
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Tensor,
}

impl Linear {
    /// From a weight of shape (outputs, inputs).
    pub fn new(weight: Tensor) -> Self {
        Self { weight }
    }

    /// Loads `weight`, initialised as candle's linear layers are.
    ///
    /// # Errors
    /// When it is missing or has another shape.
    pub fn load(inputs: usize, outputs: usize, vb: VarBuilder<'_>) -> Result<Self> {
        let init = candle_nn::init::DEFAULT_KAIMING_NORMAL;
        Ok(Self::new(vb.get_with_hints((outputs, inputs), "weight", init)?))
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut dims = x.dims().to_vec();
        let inputs = dims.pop().unwrap_or(0);
        let rows: usize = dims.iter().product();
        dims.push(self.weight.dim(0)?);
        x.reshape((rows, inputs))?.matmul(&self.weight.t()?)?.reshape(dims)
    }
}

/// Rotary position embedding with its tables: see [`ops::rope`].
#[derive(Debug, Clone)]
pub struct Rotary {
    cos: Tensor,
    sin: Tensor,
    style: RopeStyle,
}

impl Rotary {
    /// Tables for positions below `max_len`.
    ///
    /// # Errors
    /// See [`ops::rope_tables`].
    pub fn new(
        max_len: usize,
        head_dim: usize,
        base: f64,
        style: RopeStyle,
        device: &Device,
    ) -> Result<Self> {
        let (cos, sin) = ops::rope_tables(max_len, head_dim, base, device)?;
        Ok(Self { cos, sin, style })
    }

    /// Rotates `x`, (batch, sequence, heads, head_dim), whose first token is at `position`.
    ///
    /// # Errors
    /// When the sequence runs past the tables.
    pub fn forward(&self, x: &Tensor, position: usize) -> Result<Tensor> {
        let (cos, sin) = self.tables(x, position)?;
        ops::rope(x, &cos, &sin, self.style)
    }

    /// Normalizes each head of `x`, then rotates it, in one op: see [`ops::qk_norm_rope`].
    ///
    /// # Errors
    /// As [`Rotary::forward`], and when the norm's weight is not as wide as a head.
    pub fn forward_normalized(&self, x: &Tensor, norm: &RmsNorm, position: usize) -> Result<Tensor> {
        let (cos, sin) = self.tables(x, position)?;
        ops::qk_norm_rope(x, &norm.weight, &cos, &sin, norm.eps, self.style)
    }

    /// The tables from `position` on, as long as the sequence.
    fn tables(&self, x: &Tensor, position: usize) -> Result<(Tensor, Tensor)> {
        let len = x.dim(1)?;
        let positions = self.cos.dim(0)?;
        if position + len > positions {
            return Err(Error::new("the sequence runs past the rotary tables")
                .got(format!("positions {position} to {}", position + len - 1))
                .allowed(format!("below {positions}"))
                .hint("make the tables longer: the first argument of Rotary::new")
                .into());
        }
        Ok((self.cos.narrow(0, position, len)?, self.sin.narrow(0, position, len)?))
    }
}

/// Llama's feed-forward network: `W_down swiglu(W_gate x, W_up x)`.
#[derive(Debug, Clone)]
pub struct FeedForward {
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl FeedForward {
    /// From its three maps.
    pub fn new(gate: Linear, up: Linear, down: Linear) -> Self {
        Self { gate, up, down }
    }

    /// Loads `gate_proj`, `up_proj` and `down_proj`.
    ///
    /// # Errors
    /// When a weight is missing or has another shape.
    pub fn load(width: usize, hidden: usize, vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self {
            gate: Linear::load(width, hidden, vb.pp("gate_proj"))?,
            up: Linear::load(width, hidden, vb.pp("up_proj"))?,
            down: Linear::load(hidden, width, vb.pp("down_proj"))?,
        })
    }
}

impl Module for FeedForward {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.down.forward(&ops::swiglu(&self.gate.forward(x)?, &self.up.forward(x)?)?)
    }
}

/// The shape of a [`SelfAttention`] layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SelfAttentionConfig {
    /// Width of the layer's input and output.
    pub width: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; a divisor of `heads`.
    pub key_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Epsilon of the per-head RMSNorm of queries and keys before the rotary embedding; `None`
    /// leaves the norm out.
    pub qk_norm_eps: Option<f64>,
}

/// Self-attention of a Llama block: projections, per-head RMSNorm of queries and keys (QK-norm, as
/// in Qwen3), rotary embedding, attention, output projection.
#[derive(Debug, Clone)]
pub struct SelfAttention {
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    qk_norm: Option<(RmsNorm, RmsNorm)>,
    config: SelfAttentionConfig,
    attention: ops::Attention,
}

impl SelfAttention {
    /// From its maps `[q, k, v, o]` and, with QK-norm, the norms of queries and keys. The config's
    /// epsilon is not used: the norms have their own.
    pub fn new(
        config: SelfAttentionConfig,
        attention: ops::Attention,
        [q, k, v, o]: [Linear; 4],
        qk_norm: Option<(RmsNorm, RmsNorm)>,
    ) -> Self {
        Self { q, k, v, o, qk_norm, config, attention }
    }

    /// Loads `q_proj`, `k_proj`, `v_proj`, `o_proj` and, with QK-norm, `q_norm` and `k_norm`.
    ///
    /// `attention` says with which numerics to attend; for a language model make it causal.
    ///
    /// # Errors
    /// When a weight is missing or has another shape.
    pub fn load(config: SelfAttentionConfig, attention: ops::Attention, vb: VarBuilder<'_>) -> Result<Self> {
        let SelfAttentionConfig { width, heads, key_heads, head_dim, qk_norm_eps } = config;
        let qk_norm = match qk_norm_eps {
            None => None,
            Some(eps) => Some((
                RmsNorm::load(head_dim, eps, vb.pp("q_norm"))?,
                RmsNorm::load(head_dim, eps, vb.pp("k_norm"))?,
            )),
        };
        let maps = [
            Linear::load(width, heads * head_dim, vb.pp("q_proj"))?,
            Linear::load(width, key_heads * head_dim, vb.pp("k_proj"))?,
            Linear::load(width, key_heads * head_dim, vb.pp("v_proj"))?,
            Linear::load(heads * head_dim, width, vb.pp("o_proj"))?,
        ];
        Ok(Self::new(config, attention, maps, qk_norm))
    }

    /// `x` is (batch, sequence, width), its first token at position 0; so is the output.
    ///
    /// # Errors
    /// When the shapes do not fit, or the sequence runs past the rotary tables.
    pub fn forward(&self, x: &Tensor, rotary: &Rotary) -> Result<Tensor> {
        self.forward_with(x, rotary, |q, k, v| self.attention.apply(q, k, v))
    }

    /// As [`SelfAttention::forward`], with another attention in the place of its own: `attend` gets
    /// query, key and value as (batch, sequence, heads, head_dim), normalized and rotated. For looking
    /// at real tensors, or for numerics of your own.
    ///
    /// # Errors
    /// As [`SelfAttention::forward`], and those of `attend`.
    pub fn forward_with(
        &self,
        x: &Tensor,
        rotary: &Rotary,
        attend: impl FnOnce(&Tensor, &Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let (batch, sequence, _) = x.dims3()?;
        let SelfAttentionConfig { heads, key_heads, head_dim, .. } = self.config;
        let split = |x: Tensor, heads| x.reshape((batch, sequence, heads, head_dim));
        let q = split(self.q.forward(x)?, heads)?;
        let k = split(self.k.forward(x)?, key_heads)?;
        let v = split(self.v.forward(x)?, key_heads)?;
        let (q, k) = match &self.qk_norm {
            Some((q_norm, k_norm)) => {
                (rotary.forward_normalized(&q, q_norm, 0)?, rotary.forward_normalized(&k, k_norm, 0)?)
            }
            None => (rotary.forward(&q, 0)?, rotary.forward(&k, 0)?),
        };
        let out = attend(&q, &k, &v)?;
        self.o.forward(&out.reshape((batch, sequence, heads * head_dim))?)
    }
}
