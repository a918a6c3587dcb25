//! Generates text, token by token.

use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use candle_sage::{Error, Result, Scheme};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::data::Tokenizer;
use crate::during;
use crate::model::{Llama, TokenCache};

/// How the next token is sampled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Temperature, by which logits are divided; 0 always chooses the most likely token.
    pub temperature: f64,
    /// Samples from this many of the most likely tokens; 0 means all tokens.
    pub top_k: usize,
    /// Samples from the most likely tokens with this cumulative probability; 1 means all tokens.
    pub top_p: f64,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl Default for Sampling {
    /// A temperature below 1, because a small model's mistakes accumulate.
    fn default() -> Self {
        Self { temperature: 0.8, top_k: 0, top_p: 1.0, seed: 0 }
    }
}

/// A generated text.
#[derive(Debug, Clone, PartialEq)]
pub struct GeneratedText {
    /// The text after the prompt.
    pub text: String,
    /// Number of tokens.
    pub tokens: usize,
    /// Seconds from the first token to the last, which is the time of `tokens - 1` tokens.
    pub seconds: f64,
}

impl GeneratedText {
    /// Tokens per second; `None` for fewer than two tokens.
    pub fn tokens_per_second(&self) -> Option<f64> {
        (self.tokens > 1).then(|| (self.tokens - 1) as f64 / self.seconds)
    }
}

/// A model that generates text.
#[derive(Debug, Clone, Copy)]
pub struct Writer<'a> {
    /// The model.
    pub model: &'a Llama,
    /// The attention scheme of tokens after the prompt. With `None`, they attend like the prompt.
    pub following: Option<Scheme>,
    /// The tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// The token to put in front of the prompt, if any.
    pub begin: Option<u32>,
    /// Whether the spelling of a special token in the prompt stands for the token.
    pub special_tokens: bool,
    /// The tokens that end a document.
    pub ends: &'a [u32],
    /// The largest number of tokens that the model attends to. When the KV cache has this many tokens, it is computed
    /// again from the newer half of them.
    pub context: usize,
    /// The device.
    pub device: &'a Device,
}

impl Writer<'_> {
    /// Continues `prompt` until the document ends, by at most `tokens` tokens.
    ///
    /// # Errors
    /// When the prompt is empty and `begin` is `None`, or when the model or the tokenizer fails.
    pub fn write(&self, prompt: &str, tokens: usize, sampling: &Sampling) -> Result<GeneratedText> {
        let mut rng = ChaCha8Rng::seed_from_u64(sampling.seed);
        let mut ids: Vec<u32> = self.begin.into_iter().collect();
        let before = ids.len();
        ids.extend(match self.special_tokens {
            true => self.tokenizer.encode_with_special_tokens(prompt)?,
            false => self.tokenizer.encode(prompt)?,
        });
        if ids.is_empty() {
            return Err(Error::new("a text needs a first token")
                .got("an empty prompt, and no token that begins a document")
                .allowed("a prompt, or the token that begins a document")
                .hint("leave --no-bos out, or give a prompt"));
        }
        let begun = ids.len();
        let mut past = None;
        let mut start = Instant::now();
        while ids.len() < begun + tokens {
            let mut logits = self.logits(&ids, &mut past).map_err(during("cannot generate text"))?;
            // The embedding may have more rows than the tokenizer has entries.
            logits.truncate(self.tokenizer.vocab_size());
            let next = sampling.draw(&logits, &mut rng);
            if ids.len() == begun {
                start = Instant::now();
            }
            if self.ends.contains(&next) {
                break;
            }
            ids.push(next);
        }
        let seconds = start.elapsed().as_secs_f64();
        // Some decoders remove a leading space. The generated text must keep it, and is therefore decoded together with
        // the prompt.
        let (prompt, all) =
            (self.tokenizer.decode(&ids[before..begun])?, self.tokenizer.decode(&ids[before..])?);
        let text = match all.strip_prefix(&prompt) {
            Some(text) => text.to_owned(),
            None => self.tokenizer.decode(&ids[begun..])?,
        };
        Ok(GeneratedText { text, tokens: ids.len() - begun, seconds })
    }

    /// Logits of the token after `ids`. `past` is the cache of the tokens before the last token of `ids`. It is `None`
    /// before the first call, and for a model without a cache.
    fn logits(&self, ids: &[u32], past: &mut Option<TokenCache>) -> candle_core::Result<Vec<f32>> {
        let tensor = |ids: &[u32]| Tensor::new(ids, self.device)?.unsqueeze(0);
        let full = past.as_ref().is_none_or(|past| past.tokens() == self.context);
        let new = if !full {
            1
        } else if past.is_some() {
            self.context.div_ceil(2)
        } else {
            self.context
        };
        let new = tensor(&ids[ids.len().saturating_sub(new)..])?;
        if full {
            *past = self.model.past(self.context, self.following);
        }
        let logits = match past {
            Some(past) => self.model.next_logits_after(past, &new),
            None => self.model.next_logits(&new),
        };
        logits?.squeeze(0)?.to_dtype(DType::F32)?.to_vec1()
    }
}

impl Sampling {
    fn draw(&self, logits: &[f32], rng: &mut ChaCha8Rng) -> u32 {
        // Most likely tokens first. The sort is stable, so that the order is also deterministic for equal logits.
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
        if self.temperature == 0.0 {
            return order[0];
        }
        if self.top_k > 0 {
            order.truncate(self.top_k);
        }
        let max = f64::from(logits[order[0] as usize]);
        let weight = |&id: &u32| ((f64::from(logits[id as usize]) - max) / self.temperature).exp();
        let mut weights: Vec<f64> = order.iter().map(weight).collect();
        let enough = self.top_p * weights.iter().sum::<f64>();
        let mut sum = 0.0;
        let kept = weights.iter().take_while(|&&weight| {
            let before = sum;
            sum += weight;
            before < enough
        });
        let kept = kept.count().max(1);
        weights.truncate(kept);
        let mut left = rng.random::<f64>() * weights.iter().sum::<f64>();
        for (id, weight) in order.iter().zip(&weights) {
            left -= weight;
            if left <= 0.0 {
                return *id;
            }
        }
        order[kept - 1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Frequencies of 20,000 draws.
    fn frequencies(sampling: Sampling, logits: &[f32]) -> Vec<f64> {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut counts = vec![0.0; logits.len()];
        for _ in 0..20_000 {
            counts[sampling.draw(logits, &mut rng) as usize] += 1.0 / 20_000.0;
        }
        counts
    }

    #[test]
    fn draws_follow_temperature_top_k_and_top_p() {
        // Probabilities 1/2, 1/4, 1/8, 1/8 in another order.
        let logits = [0.25f32, 0.125, 0.5, 0.125].map(f32::ln);
        let near = |got: &[f64], wanted: [f64; 4]| {
            // Four standard deviations of a frequency among 20,000 draws are below 0.015.
            assert!(got.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 0.015), "{got:?} {wanted:?}");
        };
        let plain = Sampling { temperature: 1.0, ..Sampling::default() };
        near(&frequencies(plain, &logits), [0.25, 0.125, 0.5, 0.125]);
        near(&frequencies(Sampling { temperature: 0.0, ..plain }, &logits), [0.0, 0.0, 1.0, 0.0]);
        near(
            &frequencies(Sampling { temperature: 0.5, ..plain }, &logits),
            [2.0 / 11.0, 0.5 / 11.0, 8.0 / 11.0, 0.5 / 11.0],
        );
        near(&frequencies(Sampling { top_k: 2, ..plain }, &logits), [1.0 / 3.0, 0.0, 2.0 / 3.0, 0.0]);
        near(&frequencies(Sampling { top_p: 0.75, ..plain }, &logits), [1.0 / 3.0, 0.0, 2.0 / 3.0, 0.0]);
        near(
            &frequencies(Sampling { top_p: 0.76, ..plain }, &logits),
            [2.0 / 7.0, 1.0 / 7.0, 4.0 / 7.0, 0.0],
        );
        near(&frequencies(Sampling { top_p: 1e-9, ..plain }, &logits), [0.0, 0.0, 1.0, 0.0]);
    }
}
