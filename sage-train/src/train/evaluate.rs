//! Loss on text that is not trained on.

use candle_core::Device;
use candle_sage::Result;

use crate::config::Config;
use crate::data::{Batches, Dataset};
use crate::during;
use crate::model::Llama;

/// The result of a validation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Evaluation {
    /// Nats a token.
    pub(super) loss: f64,
    /// Bits a byte of text: comparable between tokenizers.
    pub(super) bits_per_byte: f64,
}

/// Mean loss over the first `eval_tokens` validation tokens, always the same ones.
pub(super) fn evaluate(
    model: &Llama,
    data: &Dataset,
    config: &Config,
    device: &Device,
) -> Result<Evaluation> {
    let batches = Batches::new(&data.validation, config.model.context, config.seed);
    let wanted = config.eval_tokens.div_ceil(config.model.context as u64).min(batches.sequences());
    let mut sum = 0.0;
    let mut first = 0;
    while first < wanted {
        let count = (config.micro_batch as u64).min(wanted - first);
        let loss = || -> candle_core::Result<f32> {
            let batch = batches.in_order(first, count as usize).to_device(device)?;
            model.loss(&batch.ids, &batch.targets)?.to_scalar::<f32>()
        };
        sum += f64::from(loss().map_err(during("validation"))?) * count as f64;
        first += count;
    }
    let loss = sum / wanted as f64;
    // The bytes of exactly the tokens that were predicted.
    let targets = &data.validation[1..=wanted as usize * config.model.context];
    let bytes: u64 = targets.iter().map(|&id| data.tokenizer.bytes(id)).sum();
    let bits = loss * targets.len() as f64 / std::f64::consts::LN_2;
    Ok(Evaluation { loss, bits_per_byte: bits / bytes as f64 })
}
