//! The attention layer: projections, QK-norm, rotary embedding, attention, output projection.

use candle_core::{Result, Tensor};
use candle_sage::nn::KvCache;
use candle_sage::ops::{self, AttentionState, AttentionVjp};
use candle_sage::sla2::{Sla2Cache, Sla2Vjp};
use candle_sage::{Attention, Scheme};

use super::config::{LlamaConfig, Recompute};
use super::layers::Norm;
use super::linear::{Bias, Linear};
use super::operands::{Operand, Operands};
use super::parameters::{Parameters, Weight};
use super::precision::OperandRole;
use super::rotary::Rotary;
use super::sla2::{Selected, Sla2Layer};
use super::sla2_config::Stage;
use super::ulysses::{Heads, Ulysses};
use crate::ranks::Group;

/// Callback that receives each layer's query, key and value and the gradient of its attention output, in the
/// order of the backward (last layer first).
pub type Observe<'a> = dyn FnMut([&Tensor; 3], &Tensor) -> Result<()> + 'a;

/// Input and output are (rows, width). The input is normalized; the output is added to the residual stream. Rows are
/// this rank's tokens of all sequences. The tables of the [`Rotary`] are for whole sequences, including the tokens of
/// other ranks.
#[derive(Debug, Clone)]
pub(super) struct SelfAttention {
    /// Query, key and value in one matmul. The forward uses it, and so does the backward of an FP8 layer. The backward
    /// of any other layer uses `query_key` and `value`, because the gradient of the values is in a separate tensor.
    projection: Linear,
    query_key: Linear,
    value: Linear,
    output: Linear,
    biases: Option<Biases>,
    /// Makes the operands of this layer's matmuls in training.
    operands: Operands,
    norms: Option<[Norm; 2]>,
    /// Numbers of query, key and value heads.
    heads: [usize; 3],
    head_dim: usize,
    attention: Attention,
    /// A logit for each query head, including the heads of other ranks that share the sequence.
    sinks: Option<Weight>,
    pub(super) sla2: Option<Sla2Layer>,
    /// Present if several ranks share each sequence. `heads` then counts only the heads of this rank.
    ulysses: Option<Ulysses>,
}

/// The biases of `projection`, `query_key` and `value` of [`SelfAttention`].
#[derive(Debug, Clone)]
struct Biases {
    projection: Bias,
    query_key: Bias,
    value: Bias,
}

/// The cached keys and values of earlier tokens. `following` is the scheme of tokens after the prompt; `None`: the
/// layer's scheme.
#[derive(Debug)]
pub(super) struct Cached<'a> {
    pub(super) cache: &'a mut LayerCache,
    pub(super) following: Option<Scheme>,
}

/// What a layer keeps of earlier tokens.
#[derive(Debug)]
pub(super) enum LayerCache {
    Dense(KvCache),
    /// The cache of SLA2, in SLA2's sparse stage.
    Sparse(Box<Sla2Cache>),
}

impl LayerCache {
    pub(super) fn tokens(&self) -> usize {
        match self {
            Self::Dense(cache) => cache.current_seq_len(),
            Self::Sparse(cache) => cache.current_seq_len(),
        }
    }
}

/// The kinds of heads in the joint projection's output. Values have as many heads as keys.
const QUERY_KEY_VALUE: [Heads; 3] = [Heads::Queries, Heads::Keys, Heads::Keys];

/// What the forward keeps for the backward.
pub(super) struct Kept {
    /// The projected query, key and value, concatenated along the heads: (batch, sequence, heads of all
    /// three, head_dim).
    projected: Tensor,
    /// What attention's backward reads. `None` if it is recomputed from `projected`.
    core: Option<KeptCore>,
}

enum KeptCore {
    Whole(Core),
    /// `out` and `rows` of [`Core`], and what else attention's backward needs. The backward repeats the norm and the
    /// rotation of query and key.
    Unrotated(Tensor, Operand, Box<AttentionState>),
}

struct Core {
    /// Query and key (both after norm and rotation), and value.
    inputs: [Tensor; 3],
    out: Tensor,
    /// The attention output for this rank's tokens, (rows, width).
    rows: Operand,
    vjp: Vjp,
}

/// The backward of attention.
enum Vjp {
    Dense(Box<AttentionVjp>),
    Sparse(Box<Sla2Vjp>),
}

impl Biases {
    fn new(parameters: &Parameters, at: &str) -> Result<Self> {
        let bias = |names: &[&str]| Bias::new(parameters, at, names);
        Ok(Self {
            projection: bias(&["q_proj", "k_proj", "v_proj"])?,
            query_key: bias(&["q_proj", "k_proj"])?,
            value: bias(&["v_proj"])?,
        })
    }
}

impl SelfAttention {
    pub(super) fn new(
        config: &LlamaConfig,
        scheme: Scheme,
        parameters: &Parameters,
        layer: usize,
    ) -> Result<Self> {
        let at = &format!("model.layers.{layer}.self_attn");
        let linear = |names: &[&str]| Linear::new(parameters, at, names);
        let norm = |name: &str| Norm::new(parameters, &format!("{at}.{name}.weight"), config.norm_eps);
        Ok(Self {
            projection: linear(&["q_proj", "k_proj", "v_proj"])?,
            query_key: linear(&["q_proj", "k_proj"])?,
            value: linear(&["v_proj"])?,
            output: linear(&["o_proj"])?,
            biases: if config.qkv_bias { Some(Biases::new(parameters, at)?) } else { None },
            operands: Operands::new(config, parameters, layer)?,
            norms: if config.qk_norm { Some([norm("q_norm")?, norm("k_norm")?]) } else { None },
            heads: [config.heads, config.key_heads, config.key_heads],
            head_dim: config.head_dim,
            attention: Attention::new(scheme)
                .causal(true)
                .window(config.window_of(layer).map(|tokens| tokens - 1), None)
                .softcap(config.softcap.unwrap_or(0.0))
                .deterministic(config.deterministic),
            sinks: if config.sinks { Some(parameters.weight(&format!("{at}.sinks"))?) } else { None },
            sla2: config
                .sla2
                .as_ref()
                .map(|sla2| Sla2Layer::new(sla2, config, scheme, parameters, at))
                .transpose()?,
            ulysses: None,
        })
    }

    /// Turns this layer into the layer of a rank that has one part of every sequence. The ranks of `group` together
    /// have the whole sequence.
    pub(super) fn across(&mut self, group: &Group) {
        let [queries, keys] = match &self.ulysses {
            None => [self.heads[0], self.heads[1]],
            Some(ulysses) => ulysses.heads(),
        };
        let ulysses = Ulysses::new(group, [queries, keys]);
        let [queries, keys] = ulysses.own();
        self.heads = [queries, keys, keys];
        self.ulysses = (group.rank().of > 1).then_some(ulysses);
        if let Some(sla2) = &mut self.sla2 {
            sla2.share(self.ulysses.as_ref());
        }
    }

    /// Query, key and value, concatenated along the heads, for all tokens and this rank's heads.
    fn project(&self, x: &Operand, rotary: &Rotary) -> Result<Tensor> {
        let mut projected = self.projection.forward(x)?;
        if let Some(biases) = &self.biases {
            projected = biases.projection.forward(&projected)?;
        }
        self.to_heads(&projected, rotary, &QUERY_KEY_VALUE)
    }

    /// Rows of this rank's tokens -> (batch, tokens of whole sequences, this rank's heads, head_dim). With context
    /// parallelism, this is an all-to-all.
    fn to_heads(&self, rows: &Tensor, rotary: &Rotary, kinds: &[Heads]) -> Result<Tensor> {
        let ranks = self.ulysses.as_ref().map_or(1, Ulysses::ranks);
        let tokens = rotary.cos.dim(0)? / ranks;
        let (rows_of_all, width) = rows.dims2()?;
        let rows = rows.reshape((rows_of_all / tokens, tokens, width / self.head_dim, self.head_dim))?;
        self.ulysses.as_ref().map_or(Ok(rows.clone()), |ulysses| ulysses.to_heads(&rows, kinds))
    }

    /// The inverse of `to_heads`.
    fn to_rows(&self, heads: &Tensor, rotary: &Rotary, rows: usize, kinds: &[Heads]) -> Result<Tensor> {
        let Some(ulysses) = &self.ulysses else { return heads.reshape((rows, ())) };
        let tokens = rotary.cos.dim(0)?;
        let batch = rows * ulysses.ranks() / tokens;
        ulysses.to_tokens(&heads.reshape((batch, tokens, (), self.head_dim))?, kinds)?.reshape((rows, ()))
    }

    /// Splits the projected tensor into query, key and value.
    fn parts(&self, projected: &Tensor) -> Result<[Tensor; 3]> {
        let [query, key, value] = self.heads;
        Ok([
            projected.narrow(2, 0, query)?,
            projected.narrow(2, query, key)?,
            projected.narrow(2, query + key, value)?,
        ])
    }

    /// The attention operator and its inputs: query, key and value. With packed documents, the sequences of the batch
    /// are joined into one.
    fn inputs(&self, projected: &Tensor, rotary: &Rotary) -> Result<(Attention, [Tensor; 3])> {
        let [query, key, value] = self.parts(projected)?;
        let [query_norm, key_norm] = match &self.norms {
            Some([query, key]) => [Some(query), Some(key)],
            None => [None, None],
        };
        let (query, key) = (rotary.forward(&query, query_norm)?, rotary.forward(&key, key_norm)?);
        let attention = match &self.sinks {
            Some(sinks) => self.attention.clone().sinks(&self.own_sinks(&sinks.value()?)?),
            None => self.attention.clone(),
        };
        let Some(documents) = &rotary.documents else {
            return Ok((attention, [query, key, value]));
        };
        // `value` is sliced from the flattened projection, because flattening a slice would copy it.
        let joined = |x: &Tensor| x.flatten(0, 1)?.unsqueeze(0);
        let [_, _, value] = self.parts(&joined(projected)?)?;
        Ok((attention.packing(documents.clone()), [joined(&query)?, joined(&key)?, value]))
    }

    /// The sinks of this rank's heads.
    fn own_sinks(&self, all: &Tensor) -> Result<Tensor> {
        let first = self.ulysses.as_ref().map_or(0, |ulysses| ulysses.first()[0]);
        all.narrow(0, first, self.heads[0])
    }

    /// The forward without a backward, for whole sequences or for tokens that follow the tokens in a cache.
    pub(super) fn forward(
        &self,
        x: &Operand,
        rotary: &Rotary,
        operands: &Operands,
        cached: Option<Cached<'_>>,
    ) -> Result<Tensor> {
        let (mut attention, mut inputs) = self.inputs(&self.project(x, rotary)?, rotary)?;
        let mut sparse_cache = None;
        match cached {
            None => (),
            Some(Cached { cache: LayerCache::Sparse(cache), .. }) => sparse_cache = Some(cache),
            Some(Cached { cache: LayerCache::Dense(cache), following }) => {
                if let Some(following) = following.filter(|_| cache.current_seq_len() > 0) {
                    attention = attention.scheme(following);
                }
                let [query, key, value] = inputs;
                let (key, value) = cache.append(&key, &value.contiguous()?)?;
                inputs = [query, key, value];
            }
        }
        let [query, key, value] = &inputs;
        let out = match (self.sparse(rotary), sparse_cache) {
            (Some(sla2), None) => sla2.forward(inputs.each_ref(), rotary.documents.as_ref())?,
            (Some(sla2), Some(cache)) => sla2.forward_cached(inputs.each_ref(), cache)?,
            (None, None) => attention.apply(query, key, value)?,
            (None, Some(_)) => candle_core::bail!("the cache was made in another stage of SLA2"),
        };
        let rows = self.to_rows(&out, rotary, x.rows()?, &[Heads::Queries])?;
        self.output.forward(&operands.without_backward(rows, OperandRole::Attended)?)
    }

    /// Statistics of the key blocks that SLA2 selects for this input; `None` without SLA2.
    pub(super) fn selected(&self, x: &Operand, rotary: &Rotary) -> Result<Option<Selected>> {
        let Some(sla2) = &self.sla2 else { return Ok(None) };
        let (_, [query, key, _]) = self.inputs(&self.project(x, rotary)?, rotary)?;
        sla2.selected([&query, &key], rotary.documents.as_ref()).map(Some)
    }

    /// The SLA2 layer, if the current stage attends sparsely.
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
        let rows =
            self.operands.of(self.to_rows(&out, rotary, rows, &[Heads::Queries])?, OperandRole::Attended)?;
        Ok(Core { inputs, out, rows, vjp })
    }

    pub(super) fn linears(&mut self) -> [(&'static str, &mut Linear); 2] {
        [("query-key-value", &mut self.projection), ("output", &mut self.output)]
    }

    /// The forward for training.
    pub(super) fn train(&self, x: &Operand, rotary: &Rotary, recompute: Recompute) -> Result<(Tensor, Kept)> {
        let projected = self.project(x, rotary)?;
        let core = self.core(&projected, rotary, x.rows()?)?;
        let y = self.output.forward(&core.rows)?;
        let core = Core { rows: core.rows.kept(), ..core };
        let core = match (recompute, core) {
            (Recompute::Attention | Recompute::Block, _) => None,
            (Recompute::Rotary, Core { vjp: Vjp::Dense(vjp), out, rows, .. }) => {
                Some(KeptCore::Unrotated(out, rows, Box::new(vjp.without_inputs())))
            }
            (Recompute::None | Recompute::Rotary, core) => Some(KeptCore::Whole(core)),
        };
        Ok((y, Kept { projected, core }))
    }

    /// Only for a layer in FP8: returns the gradient of the output of `projection`.
    fn rotate_back(
        &self,
        x: [&Tensor; 2],
        [dquery, dkey, dvalue]: [&Tensor; 3],
        rotary: &Rotary,
        rows: usize,
    ) -> Result<Operand> {
        // The fused path quantizes the gradients in the rotary embedding's backward. Ranks that share a
        // sequence do not use it, because they exchange heads after this backward and before quantization. Layers with
        // biases do not use it, because the gradient of a bias is a sum of unquantized gradients.
        let fused = self.ulysses.is_none() && self.biases.is_none();
        let delayed = self.operands.delayed(OperandRole::Projected).filter(|_| fused);
        if let (Some(norms), Some((settings, scale))) = (&self.norms, delayed) {
            let dx = rotary.backward_fp8(x, norms, [dquery, dkey], dvalue, scale)?;
            return Ok(Operand::Fp8(dx, settings));
        }
        let rotated = rotary.backward(x, self.norms.as_ref(), [dquery, dkey])?;
        let dprojected = Tensor::cat(&[&rotated, dvalue], 2)?;
        let dprojected = self.to_rows(&dprojected, rotary, rows, &QUERY_KEY_VALUE)?;
        self.biases.as_ref().map_or(Ok(()), |biases| biases.projection.backward(&dprojected))?;
        self.operands.of(dprojected, OperandRole::Projected)
    }

    /// Accumulates the gradients of the weights, and returns the gradient of the input.
    pub(super) fn backward(
        &self,
        kept: Kept,
        x: &Operand,
        dy: &Operand,
        rotary: &Rotary,
        observe: Option<&mut Observe<'_>>,
    ) -> Result<Tensor> {
        let Kept { projected, core } = kept;
        let rows = x.rows()?;
        let core = match core {
            Some(KeptCore::Whole(core)) => core,
            Some(KeptCore::Unrotated(out, rows, state)) => {
                let (_, inputs) = self.inputs(&projected, rotary)?;
                let [query, key, value] = &inputs;
                let vjp = Vjp::Dense(Box::new(state.with_inputs(query, key, value)?));
                Core { inputs, out, rows, vjp }
            }
            None => self.core(&projected, rotary, rows)?,
        };
        let dout = self.output.backward(&core.rows, dy)?;
        let dout = self.to_heads(&dout, rotary, &[Heads::Queries])?.reshape(core.out.dims())?;
        if let Some(observe) = observe {
            observe(core.inputs.each_ref(), &dout)?;
        }
        let [dquery, dkey, dvalue] = match (&core.vjp, &self.sla2) {
            (Vjp::Dense(vjp), _) => {
                let gradients = vjp.apply(&dout)?;
                if let Some((sinks, gradient)) = self.sinks.as_ref().zip(vjp.sink_gradient()) {
                    ops::add_into(&self.own_sinks(sinks.gradient()?)?, &gradient)?;
                }
                gradients
            }
            (Vjp::Sparse(vjp), Some(sla2)) => sla2.backward(vjp, &dout)?,
            (Vjp::Sparse(_), None) => unreachable!("only SLA2 has a sparse backward"),
        };
        if let (Stage::Router, Some(sla2)) = (rotary.stage, &self.sla2) {
            sla2.train_router(core.inputs.each_ref(), &core.out, rotary.documents.as_ref())?;
        }
        drop(core);
        let [query, key, value] = self.parts(&projected)?;
        let (dquery, dkey) = (dquery.reshape(query.dims())?, dkey.reshape(key.dims())?);
        if self.operands.in_fp8() {
            let gradients = [&dquery, &dkey, &dvalue.reshape(value.dims())?];
            let dprojected = self.rotate_back([&query, &key], gradients, rotary, rows)?;
            return self.projection.backward(x, &dprojected);
        }
        let dprojected = rotary.backward([&query, &key], self.norms.as_ref(), [&dquery, &dkey])?;
        let dprojected = self.to_rows(&dprojected, rotary, rows, &[Heads::Queries, Heads::Keys])?;
        let dvalue = self.to_rows(&dvalue, rotary, rows, &[Heads::Keys])?;
        self.projection.show(x, || Tensor::cat(&[&dprojected, &dvalue], 1))?;
        if let Some(biases) = &self.biases {
            biases.query_key.backward(&dprojected)?;
            biases.value.backward(&dvalue)?;
        }
        let dx = self.query_key.backward(x, &Operand::Compute(dprojected))?;
        self.value.backward_into(&dx, x, &Operand::Compute(dvalue))?;
        Ok(dx)
    }
}
