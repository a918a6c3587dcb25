//! Qwen3 with the variable names and the configuration of candle-transformers, built from ops that have gradients.

use candle_core::{Device, Module, Result, Tensor};
use candle_nn::VarBuilder;
use candle_sage::Attention;
use candle_sage::nn::{Biases, FeedForward, KvCache, RmsNorm, Rotary, SelfAttention, SelfAttentionConfig};
use candle_sage::ops::{self, CrossEntropy, RopeStyle};
use candle_transformers::models::qwen3::Config;

struct Block {
    attention_norm: RmsNorm,
    attention: SelfAttention,
    mlp_norm: RmsNorm,
    mlp: FeedForward,
}

pub(crate) struct Qwen3 {
    embedding: Tensor,
    blocks: Vec<Block>,
    norm: RmsNorm,
    head: Tensor,
    rotary: Rotary,
}

impl Qwen3 {
    /// Reads the same weights as candle-transformers. Every layer uses `attention`.
    pub(crate) fn new(config: &Config, attention: &Attention, vb: VarBuilder<'_>) -> Result<Self> {
        let (width, eps) = (config.hidden_size, config.rms_norm_eps);
        let shape = SelfAttentionConfig::new(width, config.num_attention_heads, config.head_dim)
            .key_heads(config.num_key_value_heads)
            .qk_norm(eps)
            .biases(if config.attention_bias { Biases::All } else { Biases::None });
        let block = |layer: usize| {
            let vb = vb.pp("model.layers").pp(layer);
            Ok(Block {
                attention_norm: RmsNorm::load(width, eps, vb.pp("input_layernorm"))?,
                attention: SelfAttention::load(shape, attention.clone(), vb.pp("self_attn"))?,
                mlp_norm: RmsNorm::load(width, eps, vb.pp("post_attention_layernorm"))?,
                mlp: FeedForward::load(width, config.intermediate_size, vb.pp("mlp"))?,
            })
        };
        let table = |name: &str| {
            let init = candle_nn::Init::Randn { mean: 0.0, stdev: 0.02 };
            vb.pp(name).get_with_hints((config.vocab_size, width), "weight", init)
        };
        let embedding = table("model.embed_tokens")?;
        let head = if config.tie_word_embeddings { embedding.clone() } else { table("lm_head")? };
        let positions = config.max_position_embeddings.min(4096);
        Ok(Self {
            embedding,
            blocks: (0..config.num_hidden_layers).map(block).collect::<Result<_>>()?,
            norm: RmsNorm::load(width, eps, vb.pp("model.norm"))?,
            head,
            rotary: Rotary::new(
                positions,
                config.head_dim,
                config.rope_theta,
                RopeStyle::Halves,
                vb.device(),
            )?,
        })
    }

    /// The hidden states of `ids` (batch, sequence). `attend` computes the attention of a block.
    fn hidden(
        &self,
        ids: &Tensor,
        mut attend: impl FnMut(usize, &SelfAttention, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let mut x = ops::embedding(&self.embedding, ids)?;
        for (layer, block) in self.blocks.iter().enumerate() {
            x = (&x + attend(layer, &block.attention, &block.attention_norm.forward(&x)?)?)?;
            x = (&x + block.mlp.forward(&block.mlp_norm.forward(&x)?)?)?;
        }
        self.norm.forward(&x)
    }

    /// The mean cross-entropy of `targets`: for each of `ids`, the id that follows it.
    pub(crate) fn loss(&self, ids: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let hidden = self.hidden(ids, |_, attention, x| attention.forward(x, &self.rotary))?;
        ops::linear_cross_entropy(
            &hidden.flatten(0, 1)?,
            &self.head,
            &targets.flatten_all()?,
            CrossEntropy::default(),
        )
    }

    pub(crate) fn caches(&self, tokens: usize) -> Vec<KvCache> {
        self.blocks.iter().map(|block| block.attention.cache(tokens)).collect()
    }

    /// The logits of the token after `ids`: (vocabulary). The caches contain the tokens before `ids`.
    pub(crate) fn next(&self, ids: &[u32], caches: &mut [KvCache], device: &Device) -> Result<Tensor> {
        let ids = Tensor::new(ids, device)?.unsqueeze(0)?;
        let attend = |layer: usize, attention: &SelfAttention, x: &Tensor| {
            attention.forward_cached(x, &self.rotary, &mut caches[layer])
        };
        let hidden = self.hidden(&ids, attend)?.squeeze(0)?;
        hidden.narrow(0, hidden.dim(0)? - 1, 1)?.matmul(&self.head.t()?)?.squeeze(0)
    }
}
