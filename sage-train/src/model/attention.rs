//! The attention layer: projections, QK-norm, rotary embedding, attention, output projection.

use candle_core::{Device, Result, Tensor};
use candle_sage::nn::KvCache;
use candle_sage::ops::{self, AttentionVjp, QkNormRopeGrad, RopeStyle};
use candle_sage::shape::Packing;
use candle_sage::sla2::Sla2Vjp;
use candle_sage::{Attention, Scheme};

use super::config::LlamaConfig;
use super::layers::{Linear, Norm};
use super::parameters::Parameters;
use super::sla2::{Sla2Layer, Stage};
use super::ulysses::{Heads, Ulysses};
use crate::ranks::Group;

/// Sees each layer's query, key and value, and the gradient of its output, last layer first.
pub type Observe<'a> = dyn FnMut([&Tensor; 3], &Tensor) -> Result<()> + 'a;

/// Where tokens are: angles of the rotary embedding for a sequence, and the documents that attention stays inside of; and
/// what attention looks at.
#[derive(Debug, Clone)]
pub(super) struct Rotary {
    cos: Tensor,
    sin: Tensor,
    documents: Option<Packing>,
    stage: Stage,
}

impl Rotary {
    pub(super) fn new(config: &LlamaConfig, device: &Device) -> Result<Self> {
        let (cos, sin) = ops::rope_tables(config.context, config.head_dim, config.rope_base, device)?;
        Ok(Self { cos, sin, documents: None, stage: Stage::Sparse })
    }

    /// Positions that have angles: the context.
    pub(super) fn positions(&self) -> usize {
        self.cos.dims()[0]
    }

    /// For sequences of `len` tokens from `position` on. (Angles do not begin again with a document: attention sees differences alone.)
    pub(super) fn narrow(
        &self,
        position: usize,
        len: usize,
        documents: Option<&Packing>,
        stage: Stage,
    ) -> Result<Self> {
        let (cos, sin) = (self.cos.narrow(0, position, len)?, self.sin.narrow(0, position, len)?);
        Ok(Self { cos, sin, documents: documents.cloned(), stage })
    }

    fn forward(&self, x: &Tensor, norm: Option<&Norm>) -> Result<Tensor> {
        let (cos, sin) = (&self.cos, &self.sin);
        match norm {
            Some(norm) => ops::qk_norm_rope(x, &norm.weight.value, cos, sin, norm.eps, RopeStyle::Halves),
            None => ops::rope(x, cos, sin, RopeStyle::Halves),
        }
    }

    /// The gradients of query and key, side by side. Adds those of the norms.
    fn backward(&self, x: [&Tensor; 2], norms: Option<&[Norm; 2]>, dy: [&Tensor; 2]) -> Result<Tensor> {
        let (cos, sin) = (&self.cos, &self.sin);
        let Some(norms) = norms else {
            return ops::rope_backward(&dy, cos, sin, RopeStyle::Halves);
        };
        let grad = |n: usize| QkNormRopeGrad { x: x[n], weight: &norms[n].weight.value, dout: dy[n] };
        let (dx, dweights) =
            ops::qk_norm_rope_backward(&[grad(0), grad(1)], [cos, sin], norms[0].eps, RopeStyle::Halves)?;
        for (norm, dweight) in norms.iter().zip(dweights) {
            ops::add_into(norm.weight.gradient()?, &dweight)?;
        }
        Ok(dx)
    }
}

/// The layer between the norm and the residual stream, (rows, width) -> (rows, width); rows are the tokens of sequences
/// as long as the rotary tables.
#[derive(Debug, Clone)]
pub(super) struct SelfAttention {
    /// Query, key and value in one product; their way back, in two.
    projection: Linear,
    query_key: Linear,
    value: Linear,
    output: Linear,
    norms: Option<[Norm; 2]>,
    /// Of query, key, value.
    heads: [usize; 3],
    head_dim: usize,
    attention: Attention,
    pub(super) sla2: Option<Sla2Layer>,
    /// Where several ranks have one sequence together: `heads` are this one's then.
    ulysses: Option<Ulysses>,
}

/// The keys and values of the tokens before, and the numerics in which others attend to them.
#[derive(Debug)]
pub(super) struct Cached<'a> {
    pub(super) cache: &'a mut KvCache,
    pub(super) following: Scheme,
}

/// What was projected lies side by side.
const QUERY_KEY_VALUE: [Heads; 3] = [Heads::Queries, Heads::Keys, Heads::Keys];

/// What the way back needs.
pub(super) struct Kept {
    /// Query, key and value as they were projected, side by side: (batch, sequence, heads of all, head_dim).
    projected: Tensor,
    /// What attention read, and the way back through it; made again where it is not kept.
    core: Option<Core>,
}

struct Core {
    /// Query and key after norm and rotation, and value.
    inputs: [Tensor; 3],
    out: Tensor,
    /// The output of this rank's tokens, (rows, width).
    rows: Tensor,
    vjp: Vjp,
}

/// The way back through attention.
enum Vjp {
    Dense(Box<AttentionVjp>),
    Sparse(Box<Sla2Vjp>),
}

impl SelfAttention {
    pub(super) fn new(
        config: &LlamaConfig,
        scheme: Scheme,
        parameters: &Parameters,
        at: &str,
    ) -> Result<Self> {
        let linear = |names: &[&str]| Linear::new(parameters, at, names);
        let norm = |name: &str| Norm::new(parameters, &format!("{at}.{name}.weight"), config.norm_eps);
        Ok(Self {
            projection: linear(&["q_proj", "k_proj", "v_proj"])?,
            query_key: linear(&["q_proj", "k_proj"])?,
            value: linear(&["v_proj"])?,
            output: linear(&["o_proj"])?,
            norms: if config.qk_norm { Some([norm("q_norm")?, norm("k_norm")?]) } else { None },
            heads: [config.heads, config.key_heads, config.key_heads],
            head_dim: config.head_dim,
            attention: Attention::new(scheme).causal(true).deterministic(config.deterministic),
            sla2: config
                .sla2
                .as_ref()
                .map(|sla2| Sla2Layer::new(sla2, config, scheme, parameters, at))
                .transpose()?,
            ulysses: None,
        })
    }

    /// The layer of a rank that has a part of every sequence; the group has the whole.
    pub(super) fn across(&mut self, group: &Group) {
        let [queries, keys] = match &self.ulysses {
            None => [self.heads[0], self.heads[1]],
            Some(ulysses) => ulysses.heads(),
        };
        let ulysses = Ulysses::new(group, [queries, keys]);
        let [queries, keys] = ulysses.own();
        self.heads = [queries, keys, keys];
        self.ulysses = (group.rank().of > 1).then_some(ulysses);
    }

    /// Query, key and value, side by side, of all tokens and this rank's heads.
    fn project(&self, x: &Tensor, rotary: &Rotary) -> Result<Tensor> {
        let projected = self.projection.forward(x)?;
        self.to_heads(&projected, rotary, &QUERY_KEY_VALUE)
    }

    /// Rows of this rank's tokens -> (batch, tokens of whole sequences, this rank's heads, head_dim).
    fn to_heads(&self, rows: &Tensor, rotary: &Rotary, kinds: &[Heads]) -> Result<Tensor> {
        let ranks = self.ulysses.as_ref().map_or(1, Ulysses::ranks);
        let tokens = rotary.cos.dim(0)? / ranks;
        let (rows_of_all, width) = rows.dims2()?;
        let rows = rows.reshape((rows_of_all / tokens, tokens, width / self.head_dim, self.head_dim))?;
        self.ulysses.as_ref().map_or(Ok(rows.clone()), |ulysses| ulysses.to_heads(&rows, kinds))
    }

    /// The way back, of anything with so many elements.
    fn to_rows(&self, heads: &Tensor, rotary: &Rotary, rows: usize, kinds: &[Heads]) -> Result<Tensor> {
        let Some(ulysses) = &self.ulysses else { return heads.reshape((rows, ())) };
        let tokens = rotary.cos.dim(0)?;
        let batch = rows * ulysses.ranks() / tokens;
        ulysses.to_tokens(&heads.reshape((batch, tokens, (), self.head_dim))?, kinds)?.reshape((rows, ()))
    }

    /// Query, key and value out of what was projected.
    fn parts(&self, projected: &Tensor) -> Result<[Tensor; 3]> {
        let [query, key, value] = self.heads;
        Ok([
            projected.narrow(2, 0, query)?,
            projected.narrow(2, query, key)?,
            projected.narrow(2, query + key, value)?,
        ])
    }

    /// What attention reads: over each sequence, or over all documents as one batch.
    fn inputs(&self, projected: &Tensor, rotary: &Rotary) -> Result<(Attention, [Tensor; 3])> {
        let [query, key, value] = self.parts(projected)?;
        let [query_norm, key_norm] = match &self.norms {
            Some([query, key]) => [Some(query), Some(key)],
            None => [None, None],
        };
        let (query, key) = (rotary.forward(&query, query_norm)?, rotary.forward(&key, key_norm)?);
        let Some(documents) = &rotary.documents else {
            return Ok((self.attention.clone(), [query, key, value]));
        };
        // Of the whole: a part would have to be copied.
        let joined = |x: &Tensor| x.flatten(0, 1)?.unsqueeze(0);
        let [_, _, value] = self.parts(&joined(projected)?)?;
        Ok((self.attention.clone().packing(documents.clone()), [joined(&query)?, joined(&key)?, value]))
    }

    /// Forward only, of whole sequences or of what follows those in a cache.
    pub(super) fn forward(&self, x: &Tensor, rotary: &Rotary, cached: Option<Cached<'_>>) -> Result<Tensor> {
        let (mut attention, mut inputs) = self.inputs(&self.project(x, rotary)?, rotary)?;
        if let Some(Cached { cache, following }) = cached {
            if cache.current_seq_len() > 0 {
                attention = attention.scheme(following);
            }
            let [query, key, value] = inputs;
            let (key, value) = cache.append(&key, &value.contiguous()?)?;
            inputs = [query, key, value];
        }
        let [query, key, value] = &inputs;
        let out = match self.sparse(rotary) {
            Some(sla2) => sla2.forward(inputs.each_ref(), rotary.documents.as_ref())?,
            None => attention.apply(query, key, value)?,
        };
        self.output.forward(&self.to_rows(&out, rotary, x.dim(0)?, &[Heads::Queries])?)
    }

    /// SLA2, where it is what attention does now.
    fn sparse(&self, rotary: &Rotary) -> Option<&Sla2Layer> {
        self.sla2.as_ref().filter(|_| rotary.stage == Stage::Sparse)
    }

    fn core(&self, projected: &Tensor, rotary: &Rotary, rows: usize) -> Result<Core> {
        let (attention, inputs) = self.inputs(projected, rotary)?;
        let [query, key, value] = &inputs;
        let (out, vjp) = match self.sparse(rotary) {
            Some(sla2) => {
                let (out, vjp) = sla2.vjp(inputs.each_ref(), rotary.documents.as_ref())?;
                (out, Vjp::Sparse(Box::new(vjp)))
            }
            None => {
                let (out, vjp) = attention.vjp(query, key, value)?;
                (out, Vjp::Dense(Box::new(vjp)))
            }
        };
        let rows = self.to_rows(&out, rotary, rows, &[Heads::Queries])?;
        Ok(Core { inputs, out, rows, vjp })
    }

    /// Forward for training. Without `keep_core` norm, rotation and attention run once more on the way back.
    pub(super) fn train(&self, x: &Tensor, rotary: &Rotary, keep_core: bool) -> Result<(Tensor, Kept)> {
        let projected = self.project(x, rotary)?;
        let core = self.core(&projected, rotary, x.dim(0)?)?;
        let y = self.output.forward(&core.rows)?;
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
        let rows = x.dim(0)?;
        let core = match core {
            Some(core) => core,
            None => self.core(&projected, rotary, rows)?,
        };
        let dout = self.output.backward(&core.rows, dy)?;
        let dout = self.to_heads(&dout, rotary, &[Heads::Queries])?.reshape(core.out.dims())?;
        if let Some(observe) = observe {
            observe(core.inputs.each_ref(), &dout)?;
        }
        let [dquery, dkey, dvalue] = match (&core.vjp, &self.sla2) {
            (Vjp::Dense(vjp), _) => vjp.apply(&dout)?,
            (Vjp::Sparse(vjp), Some(sla2)) => sla2.backward(vjp, &dout)?,
            (Vjp::Sparse(_), None) => unreachable!("SLA2 makes its own way back"),
        };
        if let (Stage::Router, Some(sla2)) = (rotary.stage, &self.sla2) {
            sla2.teach(core.inputs.each_ref(), &core.out, rotary.documents.as_ref())?;
        }
        drop(core);
        let [query, key, _] = self.parts(&projected)?;
        let (dquery, dkey) = (dquery.reshape(query.dims())?, dkey.reshape(key.dims())?);
        let dprojected = rotary.backward([&query, &key], self.norms.as_ref(), [&dquery, &dkey])?;
        let dprojected = self.to_rows(&dprojected, rotary, rows, &[Heads::Queries, Heads::Keys])?;
        let dx = self.query_key.backward(x, &dprojected)?;
        self.value.backward_into(&dx, x, &self.to_rows(&dvalue, rotary, rows, &[Heads::Keys])?)?;
        Ok(dx)
    }
}
