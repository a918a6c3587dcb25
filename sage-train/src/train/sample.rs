//! Text from a trained model.

use candle_core::{DType, Device, Tensor};
use candle_sage::Result;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::config::Config;
use crate::data::Tokenizer;
use crate::during;
use crate::model::Llama;

/// Cooler than 1, so that a small model's mistakes do not pile up.
const TEMPERATURE: f64 = 0.8;

/// The start of a document, drawn token by token until it ends or is long enough.
pub(super) fn sample(
    model: &Llama,
    tokenizer: &Tokenizer,
    config: &Config,
    device: &Device,
) -> Result<String> {
    let mut rng = ChaCha8Rng::seed_from_u64(config.seed);
    let mut ids = vec![tokenizer.end_of_text()];
    for _ in 0..config.sample_tokens {
        let window = &ids[ids.len().saturating_sub(config.model.context)..];
        let logits = || -> candle_core::Result<Vec<f32>> {
            model
                .next_logits(&Tensor::new(window, device)?.unsqueeze(0)?)?
                .squeeze(0)?
                .to_dtype(DType::F32)?
                .to_vec1()
        };
        let mut logits = logits().map_err(during("sampling"))?;
        // The embedding may have more rows than the tokenizer has entries.
        logits.truncate(tokenizer.vocab_size());
        let next = draw(&logits, &mut rng);
        if next == tokenizer.end_of_text() {
            break;
        }
        ids.push(next);
    }
    tokenizer.decode(&ids[1..])
}

fn draw(logits: &[f32], rng: &mut ChaCha8Rng) -> u32 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> = logits.iter().map(|x| (f64::from(x - max) / TEMPERATURE).exp()).collect();
    let mut left = rng.random::<f64>() * weights.iter().sum::<f64>();
    for (id, weight) in weights.iter().enumerate() {
        left -= weight;
        if left <= 0.0 {
            return id as u32;
        }
    }
    (logits.len() - 1) as u32
}
