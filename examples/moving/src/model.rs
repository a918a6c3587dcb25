//! Llama, Mistral, Qwen2, Gemma and Gemma 2 with candle-transformers' weight names. The attention layer is that of
//! candle-transformers, changed to call candle-sage (`HeadsFirst`), or `nn::SelfAttention`, as in docs/moving.md.

use candle_core::{D, Module, Result, Tensor};
use candle_nn::{Activation, Embedding, Linear, VarBuilder, embedding, linear_b, linear_no_bias};
use candle_sage::nn::{Biases, KvCache, RmsNorm, Rotary, SelfAttention, SelfAttentionConfig};
use candle_sage::ops::{self, RopeStyle};
use candle_sage::{Attention, Scheme};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    Llama,
    Mistral,
    Qwen2,
    Gemma,
    Gemma2,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) family: Family,
    pub(crate) vocabulary: usize,
    pub(crate) width: usize,
    pub(crate) hidden: usize,
    pub(crate) layers: usize,
    pub(crate) heads: usize,
    pub(crate) key_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) positions: usize,
    pub(crate) base: f32,
    pub(crate) eps: f64,
    /// The number of tokens that a query sees before its own; `None`: all.
    pub(crate) window: Option<usize>,
    /// Soft caps of the attention logits and of the model's logits: low, so that they affect small models.
    pub(crate) softcaps: Option<(f64, f64)>,
}

impl Sizes {
    /// `positions` is larger than `heads`, as in real models. Therefore, if a rotary embedding takes heads for tokens,
    /// it causes wrong logits instead of an error.
    pub(crate) fn of(family: Family) -> Self {
        Self {
            family,
            vocabulary: 96,
            width: 64,
            hidden: 160,
            layers: 2,
            heads: 4,
            key_heads: 2,
            // Gemma's head_dim is not width / heads.
            head_dim: if matches!(family, Family::Gemma | Family::Gemma2) { 32 } else { 16 },
            positions: 64,
            base: 10_000.0,
            eps: 1e-6,
            window: (family == Family::Mistral).then_some(7),
            softcaps: (family == Family::Gemma2).then_some((1.0, 2.0)),
        }
    }

    fn biased(&self) -> bool {
        self.family == Family::Qwen2
    }

    fn is_gemma(&self) -> bool {
        matches!(self.family, Family::Gemma | Family::Gemma2)
    }

    fn attention(&self) -> Attention {
        let attention = Attention::new(Scheme::Unquantized).causal(true).window(self.window, Some(0));
        self.softcaps.map_or(attention.clone(), |(cap, _)| attention.softcap(cap))
    }
}

/// The part of a layer that is replaced.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Move {
    HeadsFirst,
    WholeLayer,
}

/// An attention layer of candle-transformers, with candle-sage's rotary embedding and attention.
struct HeadsFirst {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    sizes: Sizes,
    rotary: Rotary,
    attention: Attention,
    kv_cache: Option<(Tensor, Tensor)>,
}

impl HeadsFirst {
    fn new(sizes: Sizes, rotary: Rotary, attention: Attention, vb: VarBuilder<'_>) -> Result<Self> {
        let Sizes { width, heads, key_heads, head_dim, .. } = sizes;
        let biased = sizes.biased();
        Ok(Self {
            q_proj: linear_b(width, heads * head_dim, biased, vb.pp("q_proj"))?,
            k_proj: linear_b(width, key_heads * head_dim, biased, vb.pp("k_proj"))?,
            v_proj: linear_b(width, key_heads * head_dim, biased, vb.pp("v_proj"))?,
            o_proj: linear_no_bias(heads * head_dim, width, vb.pp("o_proj"))?,
            sizes,
            rotary,
            attention,
            kv_cache: None,
        })
    }

    /// The first token of `x` is at `position`. With `decoding`, queries also attend to the keys of earlier calls.
    fn forward(&mut self, x: &Tensor, position: usize, decoding: bool) -> Result<Tensor> {
        let (batch, sequence, _) = x.dims3()?;
        let split = |map: &Linear, heads: usize| {
            map.forward(x)?.reshape((batch, sequence, heads, self.sizes.head_dim))?.transpose(1, 2)
        };
        let q = split(&self.q_proj, self.sizes.heads)?;
        let k = split(&self.k_proj, self.sizes.key_heads)?;
        let v = split(&self.v_proj, self.sizes.key_heads)?;
        let q = self.rotary.forward_heads_first(&q, position)?;
        let k = self.rotary.forward_heads_first(&k, position)?;
        let past = self.kv_cache.take().filter(|_| decoding);
        let (k, v) = match past {
            None => (k, v),
            Some((past_k, past_v)) => (Tensor::cat(&[past_k, k], 2)?, Tensor::cat(&[past_v, v], 2)?),
        };
        if decoding {
            self.kv_cache = Some((k.clone(), v.clone()));
        }
        let out = self.attention.apply_heads_first(&q, &k, &v)?;
        out.transpose(1, 2)?.reshape((batch, sequence, ()))?.apply(&self.o_proj)
    }
}

/// The attention of a transformer block. (Boxed, because the variants differ in size.)
enum Layer {
    HeadsFirst(Box<HeadsFirst>),
    WholeLayer(Box<(SelfAttention, Rotary, KvCache)>),
}

impl Layer {
    fn new(sizes: Sizes, made: Move, vb: VarBuilder<'_>) -> Result<Self> {
        let attention = sizes.attention();
        let Sizes { width, heads, key_heads, head_dim, positions, .. } = sizes;
        Ok(match made {
            Move::HeadsFirst => {
                let (cos, sin) = tables(sizes, &vb)?;
                let rotary = Rotary::from_tables(cos, sin, RopeStyle::Halves)?;
                Self::HeadsFirst(Box::new(HeadsFirst::new(sizes, rotary, attention, vb)?))
            }
            Move::WholeLayer => {
                let biases = if sizes.biased() { Biases::QueryKeyValue } else { Biases::None };
                let config =
                    SelfAttentionConfig::new(width, heads, head_dim).key_heads(key_heads).biases(biases);
                let base = f64::from(sizes.base);
                let rotary = Rotary::new(positions, head_dim, base, RopeStyle::Halves, vb.device())?;
                let layer = SelfAttention::load(config, attention, vb)?;
                let cache = layer.cache(positions);
                Self::WholeLayer(Box::new((layer, rotary, cache)))
            }
        })
    }

    fn forward(&mut self, x: &Tensor, position: usize, decoding: bool) -> Result<Tensor> {
        match self {
            Self::HeadsFirst(layer) => layer.forward(x, position, decoding),
            Self::WholeLayer(layer) => {
                let (layer, rotary, cache) = &mut **layer;
                match decoding {
                    true => layer.forward_cached(x, &*rotary, cache),
                    false => layer.forward(x, &*rotary),
                }
            }
        }
    }
}

/// The rotary tables of candle-transformers, in f32 as in that crate.
fn tables(sizes: Sizes, vb: &VarBuilder<'_>) -> Result<(Tensor, Tensor)> {
    let Sizes { head_dim, positions, base, .. } = sizes;
    let frequencies: Vec<f32> =
        (0..head_dim).step_by(2).map(|i| 1.0 / base.powf(i as f32 / head_dim as f32)).collect();
    let frequencies = Tensor::from_vec(frequencies, (1, head_dim / 2), vb.device())?;
    let positions = Tensor::arange(0f32, positions as f32, vb.device())?.unsqueeze(1)?;
    let angles = positions.matmul(&frequencies)?;
    Ok((angles.cos()?, angles.sin()?))
}

/// The norm of a block. Gemma stores the norm's weight minus 1.
enum Norm {
    Plain(RmsNorm),
    PlusOne { weight: Tensor, eps: f64 },
}

impl Norm {
    fn new(sizes: Sizes, vb: VarBuilder<'_>) -> Result<Self> {
        Ok(match sizes.is_gemma() {
            true => Self::PlusOne { weight: vb.get(sizes.width, "weight")?, eps: sizes.eps },
            false => Self::Plain(RmsNorm::load(sizes.width, sizes.eps, vb)?),
        })
    }
}

impl Module for Norm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Plain(norm) => norm.forward(x),
            // Computed in every forward: a stored sum would not change when an optimizer changes `weight`.
            Self::PlusOne { weight, eps } => ops::rms_norm(x, &(weight + 1.0)?, *eps),
        }
    }
}

/// The norm before attention or a feed-forward network, and the norm after it in Gemma 2.
struct Norms {
    before: Norm,
    after: Option<Norm>,
}

impl Norms {
    fn new(sizes: Sizes, [before, after]: [&str; 2], vb: &VarBuilder<'_>) -> Result<Self> {
        let after = (sizes.family == Family::Gemma2).then(|| Norm::new(sizes, vb.pp(after)));
        Ok(Self { before: Norm::new(sizes, vb.pp(before))?, after: after.transpose()? })
    }

    fn add(&self, x: &Tensor, branch: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let y = branch(&self.before.forward(x)?)?;
        x + self.after.as_ref().map_or(Ok(y.clone()), |norm| norm.forward(&y))?
    }
}

struct Block {
    norms: [Norms; 2],
    attention: Layer,
    gate: Linear,
    up: Linear,
    down: Linear,
    activation: Activation,
}

impl Block {
    fn new(sizes: Sizes, made: Move, vb: VarBuilder<'_>) -> Result<Self> {
        let Sizes { width, hidden, family, .. } = sizes;
        let mlp = vb.pp("mlp");
        let post = "post_attention_layernorm";
        let names = match family {
            Family::Gemma2 => {
                [["input_layernorm", post], ["pre_feedforward_layernorm", "post_feedforward_layernorm"]]
            }
            _ => [["input_layernorm", ""], [post, ""]],
        };
        Ok(Self {
            norms: [Norms::new(sizes, names[0], &vb)?, Norms::new(sizes, names[1], &vb)?],
            attention: Layer::new(sizes, made, vb.pp("self_attn"))?,
            gate: linear_no_bias(width, hidden, mlp.pp("gate_proj"))?,
            up: linear_no_bias(width, hidden, mlp.pp("up_proj"))?,
            down: linear_no_bias(hidden, width, mlp.pp("down_proj"))?,
            activation: if sizes.is_gemma() { Activation::GeluPytorchTanh } else { Activation::Silu },
        })
    }

    fn forward(&mut self, x: &Tensor, position: usize, decoding: bool) -> Result<Tensor> {
        let Self { norms: [around_attention, around_mlp], attention, gate, up, down, activation } = self;
        let x = around_attention.add(x, |y| attention.forward(y, position, decoding))?;
        around_mlp.add(&x, |y| (y.apply(gate)?.apply(activation)? * y.apply(up)?)?.apply(down))
    }
}

pub(crate) struct Model {
    embedding: Embedding,
    scale: f64,
    blocks: Vec<Block>,
    norm: Norm,
    head: Linear,
    softcap: Option<f64>,
}

impl Model {
    /// Reads the same weights as candle-transformers.
    pub(crate) fn new(sizes: Sizes, made: Move, vb: VarBuilder<'_>) -> Result<Self> {
        let Sizes { vocabulary, width, family, .. } = sizes;
        let model = vb.pp("model");
        let table = embedding(vocabulary, width, model.pp("embed_tokens"))?;
        let head = match family {
            Family::Llama | Family::Mistral => linear_no_bias(width, vocabulary, vb.pp("lm_head"))?,
            _ => Linear::new(table.embeddings().clone(), None),
        };
        let block = |layer: usize| Block::new(sizes, made, model.pp("layers").pp(layer));
        Ok(Self {
            embedding: table,
            scale: if sizes.is_gemma() { (width as f64).sqrt() } else { 1.0 },
            blocks: (0..sizes.layers).map(block).collect::<Result<_>>()?,
            norm: Norm::new(sizes, model.pp("norm"))?,
            head,
            softcap: sizes.softcaps.map(|(_, cap)| cap),
        })
    }

    /// The logits of the token after `ids`, (batch, sequence). The first id of each sequence is at `position`. Without
    /// `decoding`, `ids` are whole sequences, and the logits have a graph.
    pub(crate) fn forward(&mut self, ids: &Tensor, position: usize, decoding: bool) -> Result<Tensor> {
        let mut x = (self.embedding.forward(ids)? * self.scale)?;
        for block in &mut self.blocks {
            x = block.forward(&x, position, decoding)?;
        }
        let last = x.narrow(1, x.dim(1)? - 1, 1)?;
        let logits = self.head.forward(&self.norm.forward(&last)?)?.flatten_to(D::Minus2)?;
        self.softcap.map_or(Ok(logits.clone()), |cap| (logits / cap)?.tanh()? * cap)
    }
}
