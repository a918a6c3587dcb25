//! The forward: embedding, blocks, final norm, and the loss through the tied embedding.

use candle_core::{Device, Module, Result, Tensor};
use candle_nn::VarBuilder;
use candle_sage::nn::{FeedForward, RmsNorm, Rotary, SelfAttention, SelfAttentionConfig};
use candle_sage::ops::{CrossEntropy, RopeStyle, embedding, linear_cross_entropy};
use candle_sage::{Attention, Scheme};

use super::config::LlamaConfig;

/// An attention in the place of a block's own: query, key and value to output.
pub type Attend<'a> = dyn FnMut(&Tensor, &Tensor, &Tensor) -> Result<Tensor> + 'a;

/// A Llama with a tied embedding.
#[derive(Debug, Clone)]
pub struct Llama {
    embedding: Tensor,
    blocks: Vec<Block>,
    norm: RmsNorm,
    rotary: Rotary,
}

#[derive(Debug, Clone)]
struct Block {
    attention: Option<(RmsNorm, SelfAttention)>,
    mlp_norm: RmsNorm,
    mlp: FeedForward,
}

impl Llama {
    /// Loads the parameters that [`LlamaConfig::parameter_specs`] names.
    ///
    /// # Errors
    /// When a parameter is missing or has another shape.
    pub fn load(config: &LlamaConfig, vb: VarBuilder<'_>, device: &Device) -> Result<Self> {
        let vb = vb.pp("model");
        let blocks = (0..config.layers)
            .map(|layer| Block::load(config, vb.pp("layers").pp(layer)))
            .collect::<Result<_>>()?;
        Ok(Self {
            embedding: vb.get((config.vocab, config.width), "embed_tokens.weight")?,
            blocks,
            norm: RmsNorm::load(config.width, config.norm_eps, vb.pp("norm"))?,
            rotary: Rotary::new(
                config.context,
                config.head_dim,
                config.rope_base,
                RopeStyle::Halves,
                device,
            )?,
        })
    }

    /// The normalized hidden states of `ids`, (batch, sequence) -> (batch, sequence, width).
    ///
    /// # Errors
    /// When an id is not in the vocabulary, or the sequence is longer than the context.
    pub fn hidden(&self, ids: &Tensor) -> Result<Tensor> {
        self.hidden_with(ids, None)
    }

    fn hidden_with(&self, ids: &Tensor, mut attend: Option<&mut Attend<'_>>) -> Result<Tensor> {
        let mut x = embedding(&self.embedding, ids)?;
        for block in &self.blocks {
            x = block.forward(x, &self.rotary, attend.as_deref_mut())?;
        }
        self.norm.forward(&x)
    }

    /// Mean cross-entropy of `targets`, the ids one position later.
    ///
    /// # Errors
    /// As [`Llama::hidden`].
    pub fn loss(&self, ids: &Tensor, targets: &Tensor) -> Result<Tensor> {
        self.loss_with(ids, targets, None)
    }

    /// As [`Llama::loss`], with another attention in every block, first to last.
    ///
    /// # Errors
    /// As [`Llama::hidden`], and those of `attend`.
    pub fn loss_with(
        &self,
        ids: &Tensor,
        targets: &Tensor,
        attend: Option<&mut Attend<'_>>,
    ) -> Result<Tensor> {
        let hidden = self.hidden_with(ids, attend)?.flatten(0, 1)?;
        linear_cross_entropy(&hidden, &self.embedding, &targets.flatten_all()?, CrossEntropy::default())
    }

    /// Logits of the token after the last one, (batch, vocab).
    ///
    /// # Errors
    /// As [`Llama::hidden`].
    pub fn next_logits(&self, ids: &Tensor) -> Result<Tensor> {
        let last = ids.dim(1)? - 1;
        let hidden = self.hidden(ids)?.narrow(1, last, 1)?.squeeze(1)?;
        hidden.contiguous()?.matmul(&self.embedding.t()?)
    }
}

impl Block {
    fn load(config: &LlamaConfig, vb: VarBuilder<'_>) -> Result<Self> {
        let norm = |name| RmsNorm::load(config.width, config.norm_eps, vb.pp(name));
        let attention = match config.scheme {
            None => None,
            Some(scheme) => {
                Some((norm("input_layernorm")?, self_attention(config, scheme, vb.pp("self_attn"))?))
            }
        };
        Ok(Self {
            attention,
            mlp_norm: norm("post_attention_layernorm")?,
            mlp: FeedForward::load(config.width, config.ffn, vb.pp("mlp"))?,
        })
    }

    fn forward(&self, x: Tensor, rotary: &Rotary, attend: Option<&mut Attend<'_>>) -> Result<Tensor> {
        let x = match &self.attention {
            None => x,
            Some((norm, attention)) => {
                let normed = norm.forward(&x)?;
                (&x + match attend {
                    None => attention.forward(&normed, rotary)?,
                    Some(attend) => attention.forward_with(&normed, rotary, attend)?,
                })?
            }
        };
        &x + self.mlp.forward(&self.mlp_norm.forward(&x)?)?
    }
}

fn self_attention(config: &LlamaConfig, scheme: Scheme, vb: VarBuilder<'_>) -> Result<SelfAttention> {
    let shape = SelfAttentionConfig {
        width: config.width,
        heads: config.heads,
        key_heads: config.key_heads,
        head_dim: config.head_dim,
        qk_norm_eps: config.qk_norm.then_some(config.norm_eps),
    };
    SelfAttention::load(shape, Attention::new(scheme).causal(true), vb)
}
