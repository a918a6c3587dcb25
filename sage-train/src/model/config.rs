//! The shape of a Llama, and what follows from it: parameters, FLOPs, memory.

use candle_sage::{Error, Result, Scheme};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::sla2::{Sla2Config, Stage};

/// The shape of a decoder-only transformer in Llama's style, with a tied embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct LlamaConfig {
    /// Rows of the embedding.
    pub vocab: usize,
    /// Blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub key_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Hidden width of the feed-forward network.
    pub ffn: usize,
    /// Longest sequence.
    pub context: usize,
    /// Base of the rotary embedding.
    pub rope_base: f64,
    /// Epsilon of every RMSNorm.
    pub norm_eps: f64,
    /// RMSNorm of each head's queries and keys.
    pub qk_norm: bool,
    /// Standard deviation of the initial weights.
    pub init_std: f64,
    /// Numerics of attention; `None` leaves attention out.
    pub scheme: Option<Scheme>,
    /// Attention to selected blocks alone, in those numerics.
    pub sla2: Option<Sla2Config>,
    /// Factor of the z-loss in training.
    pub z_loss: f64,
    /// What the backward makes again instead of keeping it.
    pub recompute: Recompute,
    /// Whether attention's gradients repeat to the bit on a GPU.
    pub deterministic: bool,
}

/// What the backward makes again, to save memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Nothing
    None,
    /// QK-norm, rotary embedding, attention, and the product inside SwiGLU
    Attention,
    /// Whole blocks, from their input
    Block,
}

/// A matrix with ones on its diagonal, or several.
fn identity(dims: &[usize]) -> Vec<f32> {
    let width = dims.last().copied().unwrap_or(1);
    let all: usize = dims.iter().product();
    (0..all).map(|n| f32::from(u8::from(n / width % width == n % width))).collect()
}

/// The values of a parameter before training.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Start {
    /// Normal, of this standard deviation.
    Normal(f64),
    /// All the same.
    Value(f32),
    /// Of square matrices: ones on the diagonal.
    Identity,
}

/// A parameter before it exists.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterSpec {
    /// Name in a Hugging Face checkpoint.
    pub name: String,
    /// Shape.
    pub dims: Vec<usize>,
    /// Its values before training.
    pub start: Start,
    /// Whether it lies right behind the one before it, so that both are multiplied at once.
    pub follows: bool,
}

impl ParameterSpec {
    /// Whether weight decay applies, and the model computes in its own type: to matrices, not to norms or routers.
    pub fn decays(&self) -> bool {
        self.dims.len() == 2
    }

    /// Its values before training, where they are not drawn.
    pub fn fixed_start(&self) -> Option<Vec<f32>> {
        match self.start {
            Start::Normal(_) => None,
            Start::Value(value) => Some(vec![value; self.len() as usize]),
            Start::Identity => Some(identity(&self.dims)),
        }
    }

    /// Number of elements.
    pub fn len(&self) -> u64 {
        self.dims.iter().map(|&d| d as u64).product()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl LlamaConfig {
    /// Checks sizes against each other.
    ///
    /// # Errors
    /// When a size is zero or two do not fit.
    pub fn validate(&self) -> Result<()> {
        for (name, value, low, high) in [
            ("layers", self.layers, 1, 1000),
            ("width", self.width, 1, 1 << 20),
            ("heads", self.heads, 1, 1 << 16),
            ("key-heads", self.key_heads, 1, self.heads),
            (
                "head-dim",
                self.head_dim,
                *candle_sage::shape::HEAD_DIM.start(),
                *candle_sage::shape::HEAD_DIM.end(),
            ),
            ("ffn", self.ffn, 1, 1 << 22),
            ("context", self.context, 2, 1 << 24),
            ("vocab-size", self.vocab, 258, 1 << 24),
        ] {
            if !(low..=high).contains(&value) {
                return Err(Error::new(format!("{name} is out of range"))
                    .got(value)
                    .allowed(format!("{low} to {high}"))
                    .hint(format!("--{name}")));
            }
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(Error::new("head-dim is odd")
                .got(self.head_dim)
                .allowed("an even number: the rotary embedding turns pairs of channels")
                .hint("--head-dim 64"));
        }
        if !self.heads.is_multiple_of(self.key_heads) {
            return Err(Error::new("query heads do not share key heads evenly")
                .got(format!("{} heads, {} key heads", self.heads, self.key_heads))
                .allowed("heads = n x key-heads")
                .hint("--key-heads 1 always fits"));
        }
        crate::checks::above_zero("init-std", self.init_std)?;
        crate::checks::above_zero("rope-base", self.rope_base)?;
        Ok(())
    }

    /// Every parameter, in the order in which it is initialised and updated.
    pub fn parameter_specs(&self) -> Vec<ParameterSpec> {
        let std = self.init_std;
        // As in GPT-2: what is added into the residual stream shrinks with the number of additions.
        let residual_std = std / (2.0 * self.layers as f64).sqrt();
        let matrix = |name: String, rows, columns, std| ParameterSpec {
            name,
            dims: vec![rows, columns],
            start: Start::Normal(std),
            follows: false,
        };
        let after = |spec| ParameterSpec { follows: true, ..spec };
        let norm = |name: String, width| ParameterSpec {
            name,
            dims: vec![width],
            start: Start::Value(1.0),
            follows: false,
        };
        let (width, ffn) = (self.width, self.ffn);
        let (queries, keys) = (self.heads * self.head_dim, self.key_heads * self.head_dim);
        let mut specs = vec![matrix("model.embed_tokens.weight".into(), self.vocab, width, std)];
        for layer in 0..self.layers {
            let at = |name: &str| format!("model.layers.{layer}.{name}.weight");
            if self.scheme.is_some() {
                specs.push(norm(at("input_layernorm"), width));
                specs.push(matrix(at("self_attn.q_proj"), queries, width, std));
                specs.push(after(matrix(at("self_attn.k_proj"), keys, width, std)));
                specs.push(after(matrix(at("self_attn.v_proj"), keys, width, std)));
                specs.push(matrix(at("self_attn.o_proj"), width, queries, residual_std));
                if self.qk_norm {
                    specs.push(norm(at("self_attn.q_norm"), self.head_dim));
                    specs.push(norm(at("self_attn.k_norm"), self.head_dim));
                }
                if let Some(sla2) = &self.sla2 {
                    specs.extend(sla2.parameter_specs(self, &format!("model.layers.{layer}.self_attn")));
                }
            }
            specs.push(norm(at("post_attention_layernorm"), width));
            specs.push(matrix(at("mlp.gate_proj"), ffn, width, std));
            specs.push(after(matrix(at("mlp.up_proj"), ffn, width, std)));
            specs.push(matrix(at("mlp.down_proj"), width, ffn, residual_std));
        }
        specs.push(norm("model.norm.weight".into(), width));
        specs
    }

    /// Number of parameters; the tied embedding counts once.
    pub fn parameters(&self) -> u64 {
        self.parameter_specs().iter().map(ParameterSpec::len).sum()
    }

    /// Parameters of the tied embedding.
    pub fn embedding_parameters(&self) -> u64 {
        (self.vocab * self.width) as u64
    }

    /// FLOPs of forward and backward for a token: 6 a parameter, and causal attention's
    /// `6 layers heads head_dim context`, or the part of it that SLA2 computes, with twice `12 layers heads head_dim^2` for
    /// its tail.
    pub fn flops_per_token(&self) -> u64 {
        self.flops(self.sla2.as_ref())
    }

    /// The same for a step of training, from 0: before SLA2's own stage attention is dense.
    pub fn flops_per_token_at(&self, step: u64) -> u64 {
        self.flops(self.sla2.as_ref().filter(|sla2| sla2.stage(step) == Stage::Sparse))
    }

    fn flops(&self, sla2: Option<&Sla2Config>) -> u64 {
        let channels = (self.layers * self.heads * self.head_dim) as f64;
        let attention = match (&self.scheme, sla2) {
            (None, _) => 0.0,
            (_, None) => channels * self.context as f64,
            (_, Some(sla2)) => {
                let tail = if sla2.tail.is_some() { 4.0 * self.head_dim as f64 } else { 0.0 };
                channels * (self.context as f64 * (1.0 - sla2.sparsity(self.context)) + tail)
            }
        };
        6 * (self.parameters() + attention as u64)
    }

    /// Estimated bytes at the peak of a backward, with a batch of sequences and elements of so many bytes.
    pub fn activation_bytes(&self, batch: usize, element: u64) -> u64 {
        let tokens = (batch * self.context) as u64;
        let (width, ffn) = (self.width as u64, self.ffn as u64);
        let (queries, keys) = ((self.heads * self.head_dim) as u64, (self.key_heads * self.head_dim) as u64);
        // The stream and that normalized, query, key and value as projected; then norm and rotation, the output, and
        // what the scheme keeps.
        let (projected, core) = match self.scheme {
            None => (0, 0),
            Some(scheme) => {
                // SLA2 keeps the outputs of both branches.
                let branches = if self.sla2.is_some() { 2 * queries * element } else { 0 };
                let kept = scheme.kept_bytes(queries, keys, element) + branches;
                (element * (2 * width + queries + 2 * keys), element * (2 * queries + keys) + kept)
            }
        };
        let mlp = element * (2 * width + 2 * ffn);
        let kept = match self.recompute {
            Recompute::None => projected + core + mlp + element * ffn,
            Recompute::Attention => projected + mlp,
            Recompute::Block => element * width,
        };
        // Of the block at hand: what was made again, and the gradients of the widest part.
        let again = match self.recompute {
            Recompute::None => 0,
            Recompute::Attention => core,
            Recompute::Block => projected + core + mlp,
        };
        let at_hand = again + element * (2 * width + 3 * ffn);
        // Chunks of logits: see `CrossEntropy::chunk_rows`.
        let logits = (self.vocab as u64).saturating_mul(tokens * element).min(if element == 4 {
            64 << 20
        } else {
            256 << 20
        });
        tokens * (self.layers as u64 * kept + at_hand) + logits
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;
    use crate::settings::{Preset, Settings};

    #[test]
    fn the_paper_preset_has_the_papers_size() {
        let config = Config::resolve(Settings { preset: Some(Preset::Paper325m), ..Settings::default() })
            .expect("a preset");
        // 324.1M in the paper's arithmetic; norms and the padded vocabulary add 0.1M.
        assert_eq!(config.model.parameters() / 100_000, 3241);
        assert_eq!(config.tokens_per_step(), 2_097_152);
        assert_eq!(config.steps, 37_500);
        assert_eq!(config.model.vocab, 50_304);
    }
}
