//! Text a token at a time: keys and values of all tokens before are kept, so that each goes through the model once.

use candle_core::{Result, Tensor};
use candle_sage::nn::KvCache;
use candle_sage::{Error, Scheme};

use super::attention::Cached;
use super::block::Block;
use super::llama::Llama;
use super::sla2::Stage;

/// The tokens that went through a model, as its layers keep them.
#[derive(Debug)]
pub struct Past {
    layers: Vec<KvCache>,
    tokens: usize,
    following: Scheme,
}

impl Past {
    /// So many went through.
    pub fn tokens(&self) -> usize {
        self.tokens
    }
}

impl Llama {
    /// Whether attention is to selected blocks alone, now.
    pub fn selects_blocks(&self) -> bool {
        self.stage == Stage::Sparse && self.blocks.iter().any(Block::has_sla2)
    }

    /// An empty past of one sequence, with memory for so many tokens; it grows as far as the context. Of a prompt all tokens attend
    /// in the model's own numerics, what follows in those of `following`.
    ///
    /// `None` where attention is to selected blocks: which they are is not settled before their last query is there.
    pub fn past(&self, tokens: usize, following: Scheme) -> Option<Past> {
        // Memory grows by as much each time, which must not be nothing.
        let layers = self.blocks.iter().map(|_| KvCache::new(1, tokens.max(1))).collect();
        (!self.selects_blocks()).then_some(Past { layers, tokens: 0, following })
    }

    /// Logits of the token after `ids`, (1, tokens), which follow those of `past` and join them: (1, vocab).
    ///
    /// # Errors
    /// When an id is not in the vocabulary, the sequence is longer than the context, or an earlier call with this past failed:
    /// some of its layers may then have kept tokens that others have not.
    pub fn next_logits_after(&self, past: &mut Past, ids: &Tensor) -> Result<Tensor> {
        let Past { layers, tokens, following } = past;
        let sequence = *tokens + ids.dim(1)?;
        if sequence > self.rotary.positions() {
            return Err(Error::new("the sequence is longer than the model's context")
                .got(format!("{sequence} tokens"))
                .allowed(format!("up to {}", self.rotary.positions()))
                .hint("begin a new past with the last tokens")
                .into());
        }
        // Layers without attention keep nothing.
        let kept: Vec<usize> = layers.iter().map(|layer| layer.k_cache().current_seq_len()).collect();
        if kept.iter().any(|&len| len != kept[0] || len != 0 && len != *tokens) {
            return Err(Error::new("the past of a call that failed cannot go on")
                .got(format!("{kept:?} tokens in the layers, after {tokens}"))
                .allowed("as many in all layers")
                .hint("begin a new past")
                .into());
        }
        let (mut stream, rotary) = self.enter_at(ids.into(), *tokens)?;
        for (block, cache) in self.blocks.iter().zip(layers) {
            stream = block.forward(stream, &rotary, Some(Cached { cache, following: *following }))?;
        }
        *tokens = sequence;
        let (_, hidden) = self.norm.enter(&stream)?;
        hidden.narrow(0, hidden.dim(0)? - 1, 1)?.matmul(&self.embedding.value.t()?)
    }
}
