//! Incremental decoding: a cache holds the keys and values of all earlier tokens, so that each token passes
//! through the model once.

use candle_core::{Result, Tensor};
use candle_sage::nn::KvCache;
use candle_sage::sla2::Sla2Cache;
use candle_sage::{Error, Scheme};

use super::attention::{Cached, LayerCache};
use super::block::Block;
use super::llama::Llama;
use super::operands::Operands;
use super::sla2_config::Stage;

/// The cached keys and values of the tokens that have passed through the model, one cache per layer.
#[derive(Debug)]
pub struct TokenCache {
    layers: Vec<LayerCache>,
    tokens: usize,
    following: Option<Scheme>,
}

impl TokenCache {
    /// Number of tokens that have passed through the model.
    pub fn tokens(&self) -> usize {
        self.tokens
    }
}

impl Llama {
    /// An empty cache for one sequence. Its memory grows in steps of `tokens` tokens. The tokens of the prompt attend
    /// in each layer's own numerics. Later tokens attend in the numerics of `following`, or, if it is `None`, like the
    /// prompt.
    ///
    /// Returns `None` if the model cannot continue a sequence from a cache. This happens only in SLA2's sparse stage:
    /// with `Choice::Window`, or if tokens after the prompt attend in INT8 or FP4. Without a cache, each new token
    /// needs a forward over the whole sequence.
    pub fn past(&self, tokens: usize, following: impl Into<Option<Scheme>>) -> Option<TokenCache> {
        let following = following.into();
        // The caches grow in steps of `tokens`, which must not be 0.
        let tokens = tokens.max(1);
        let layer = |block: &Block| match block.sla2().filter(|_| self.stage == Stage::Sparse) {
            None => Some(LayerCache::Dense(KvCache::new(1, tokens))),
            Some(sla2) => {
                sla2.can_follow(following).then(|| LayerCache::Sparse(Box::new(Sla2Cache::new(tokens))))
            }
        };
        let layers = self.blocks.iter().map(layer).collect::<Option<_>>()?;
        Some(TokenCache { layers, tokens: 0, following })
    }

    /// The logits, (1, vocab), of the token after `ids`, (1, tokens). `ids` follow the tokens of `past`; this call
    /// appends them to `past`.
    ///
    /// # Errors
    /// When an id is not in the vocabulary, when the sequence is longer than the context, or when an earlier call with
    /// this `past` failed: the caches of some layers may then contain tokens that other layers lack.
    pub fn next_logits_after(&self, past: &mut TokenCache, ids: &Tensor) -> Result<Tensor> {
        let TokenCache { layers, tokens, following } = past;
        let sequence = *tokens + ids.dim(1)?;
        if sequence > self.rotary.positions() {
            return Err(Error::new("the sequence is longer than the model's context")
                .got(format!("{sequence} tokens"))
                .allowed(format!("up to {}", self.rotary.positions()))
                .hint("begin a new cache with the last tokens")
                .into());
        }
        // Layers without attention cache nothing.
        let kept: Vec<usize> = layers.iter().map(|layer| layer.tokens()).collect();
        if kept.iter().any(|&len| len != kept[0] || len != 0 && len != *tokens) {
            return Err(Error::new("cannot continue from this cache: an earlier call with it failed")
                .got(format!("the layers cache {kept:?} tokens, the sequence has {tokens}"))
                .allowed("as many tokens in each layer with attention as in the sequence")
                .hint("begin a new cache")
                .into());
        }
        let (mut stream, rotary) = self.enter_at(ids.into(), *tokens)?;
        let operands = Operands::in_compute_type();
        for (block, cache) in self.blocks.iter().zip(layers) {
            let cached = Cached { cache, following: *following };
            stream = block.forward(stream, &rotary, &operands, Some(cached))?;
        }
        *tokens = sequence;
        let (_, hidden) = self.norm.enter(&stream)?;
        self.logits(&hidden.narrow(0, hidden.dim(0)? - 1, 1)?)
    }
}
