//! The attention layer: projections, QK-norm, rotary embedding, attention, output projection.

use candle_core::{Device, Result, Tensor};
use candle_sage::ops::{self, AttentionVjp, RopeStyle};
use candle_sage::shape::Packing;
use candle_sage::{Attention, Scheme};

use super::config::LlamaConfig;
use super::layers::{Linear, Norm};
use super::parameters::Parameters;

/// Sees each layer's query, key and value, and the gradient of its output, last layer first.
pub type Observe<'a> = dyn FnMut([&Tensor; 3], &Tensor) -> Result<()> + 'a;

/// Where tokens are: angles of the rotary embedding for a sequence, and the documents that attention stays inside of.
#[derive(Debug, Clone)]
pub(super) struct Rotary {
    cos: Tensor,
    sin: Tensor,
    documents: Option<Packing>,
}

impl Rotary {
    pub(super) fn new(config: &LlamaConfig, device: &Device) -> Result<Self> {
        let (cos, sin) = ops::rope_tables(config.context, config.head_dim, config.rope_base, device)?;
        Ok(Self { cos, sin, documents: None })
    }

    /// For sequences of `len` tokens. (Angles do not begin again with a document: attention sees differences alone.)
    pub(super) fn narrow(&self, len: usize, documents: Option<&Packing>) -> Result<Self> {
        let (cos, sin) = (self.cos.narrow(0, 0, len)?, self.sin.narrow(0, 0, len)?);
        Ok(Self { cos, sin, documents: documents.cloned() })
    }

    fn forward(&self, x: &Tensor, norm: Option<&Norm>) -> Result<Tensor> {
        let (cos, sin) = (&self.cos, &self.sin);
        match norm {
            Some(norm) => ops::qk_norm_rope(x, &norm.weight.value, cos, sin, norm.eps, RopeStyle::Halves),
            None => ops::rope(x, cos, sin, RopeStyle::Halves),
        }
    }

    fn backward(&self, x: &Tensor, norm: Option<&Norm>, dy: &Tensor) -> Result<Tensor> {
        let (cos, sin) = (&self.cos, &self.sin);
        let Some(Norm { weight, eps }) = norm else {
            return ops::rope_backward(dy, cos, sin, RopeStyle::Halves);
        };
        let [dx, dweight] =
            ops::qk_norm_rope_backward(x, &weight.value, [cos, sin], dy, *eps, RopeStyle::Halves)?;
        ops::add_into(weight.gradient()?, &dweight)?;
        Ok(dx)
    }
}

/// The layer between the norm and the residual stream, (rows, width) -> (rows, width); rows are the tokens of sequences
/// as long as the rotary tables.
#[derive(Debug, Clone)]
pub(super) struct SelfAttention {
    /// Of query, key, value.
    projections: [Linear; 3],
    output: Linear,
    norms: Option<[Norm; 2]>,
    heads: [usize; 3],
    head_dim: usize,
    attention: Attention,
}

/// What the way back needs.
pub(super) struct Kept {
    /// Query and key as they were projected, and value.
    projected: [Tensor; 3],
    /// Query and key after norm and rotation, and the way back through attention; made again where they are not kept.
    core: Option<Core>,
}

struct Core {
    query: Tensor,
    key: Tensor,
    out: Tensor,
    vjp: AttentionVjp,
}

impl SelfAttention {
    pub(super) fn new(
        config: &LlamaConfig,
        scheme: Scheme,
        parameters: &Parameters,
        at: &str,
    ) -> Result<Self> {
        let linear = |name: &str| Linear::new(parameters, &format!("{at}.{name}.weight"));
        let norm = |name: &str| Norm::new(parameters, &format!("{at}.{name}.weight"), config.norm_eps);
        Ok(Self {
            projections: [linear("q_proj")?, linear("k_proj")?, linear("v_proj")?],
            output: linear("o_proj")?,
            norms: if config.qk_norm { Some([norm("q_norm")?, norm("k_norm")?]) } else { None },
            heads: [config.heads, config.key_heads, config.key_heads],
            head_dim: config.head_dim,
            attention: Attention::new(scheme).causal(true).deterministic(config.deterministic),
        })
    }

    fn norm(&self, n: usize) -> Option<&Norm> {
        self.norms.as_ref().map(|norms| &norms[n])
    }

    fn project(&self, x: &Tensor, rotary: &Rotary) -> Result<[Tensor; 3]> {
        let sequence = rotary.cos.dim(0)?;
        let batch = x.dim(0)? / sequence;
        let project = |n: usize| {
            self.projections[n].forward(x)?.reshape((batch, sequence, self.heads[n], self.head_dim))
        };
        Ok([project(0)?, project(1)?, project(2)?])
    }

    /// Forward only.
    pub(super) fn forward(&self, x: &Tensor, rotary: &Rotary) -> Result<Tensor> {
        let [query, key, value] = self.project(x, rotary)?;
        let (query, key) = (rotary.forward(&query, self.norm(0))?, rotary.forward(&key, self.norm(1))?);
        let (attention, [query, key, value]) = self.within(rotary, [&query, &key, &value])?;
        self.output.forward(&attention.apply(&query, &key, &value)?.reshape((x.dim(0)?, ()))?)
    }

    /// Attention over each sequence, or over all documents as one batch.
    fn within(&self, rotary: &Rotary, inputs: [&Tensor; 3]) -> Result<(Attention, [Tensor; 3])> {
        let [query, key, value] = inputs;
        let Some(documents) = &rotary.documents else {
            return Ok((self.attention.clone(), inputs.map(Tensor::clone)));
        };
        let joined = |x: &Tensor| x.flatten(0, 1)?.unsqueeze(0);
        let attention = self.attention.clone().packing(documents.clone());
        Ok((attention, [joined(query)?, joined(key)?, joined(value)?]))
    }

    fn core(&self, [query, key, value]: &[Tensor; 3], rotary: &Rotary) -> Result<Core> {
        let (query, key) = (rotary.forward(query, self.norm(0))?, rotary.forward(key, self.norm(1))?);
        let (attention, [query, key, value]) = self.within(rotary, [&query, &key, value])?;
        let (out, vjp) = attention.vjp(&query, &key, &value)?;
        Ok(Core { query, key, out, vjp })
    }

    /// Forward for training. Without `keep_core` norm, rotation and attention run once more on the way back.
    pub(super) fn train(&self, x: &Tensor, rotary: &Rotary, keep_core: bool) -> Result<(Tensor, Kept)> {
        let projected = self.project(x, rotary)?;
        let core = self.core(&projected, rotary)?;
        let y = self.output.forward(&core.out.reshape((x.dim(0)?, ()))?)?;
        Ok((y, Kept { projected, core: keep_core.then_some(core) }))
    }

    /// Adds the gradients of the weights; returns the input's.
    pub(super) fn backward(
        &self,
        kept: Kept,
        x: &Tensor,
        dy: &Tensor,
        rotary: &Rotary,
        observe: Option<&mut Observe<'_>>,
    ) -> Result<Tensor> {
        let Kept { projected, core } = kept;
        let core = match core {
            Some(core) => core,
            None => self.core(&projected, rotary)?,
        };
        let rows = x.dim(0)?;
        let dout = self.output.backward(&core.out.reshape((rows, ()))?, dy)?.reshape(core.out.dims())?;
        if let Some(observe) = observe {
            observe([&core.query, &core.key, &projected[2]], &dout)?;
        }
        let [dquery, dkey, dvalue] = core.vjp.apply(&dout)?;
        drop(core);
        let back = |n: usize, dy: Tensor| {
            let dy = dy.reshape(projected[n].dims())?;
            rotary.backward(&projected[n], self.norm(n), &dy)?.reshape((rows, ()))
        };
        let (dquery, dkey) = (back(0, dquery)?, back(1, dkey)?);
        let [query, key, value] = &self.projections;
        let dx = query.backward(x, &dquery)?;
        key.backward_into(&dx, x, &dkey)?;
        value.backward_into(&dx, x, &dvalue.reshape((rows, ()))?)?;
        Ok(dx)
    }
}
