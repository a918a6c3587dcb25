//! Evaluation: validation loss, in total and by position in the sequence; recall of facts by their distance from the
//! answer; and multiple-choice tasks.

mod choices;
mod position;
mod recall;
mod selected;
mod tasks;

use candle_core::{DType, Device};
use candle_sage::ops::{self, CrossEntropy};
use candle_sage::{Error, Result};

use crate::data::{Batches, Mixture, SequenceSplit, Tokenizer};
use crate::model::{Input, Llama};
use crate::on_device;
use crate::ranks::Ranks;

pub use choices::{Choices, Example, choose, read_examples};
pub use position::{PositionLoss, by_position};
pub use recall::{Recalled, recall};
pub use selected::selected;
pub use tasks::Task;

/// The result of a validation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Evaluation {
    /// Mean loss, nats per token.
    pub loss: f64,
    /// Mean loss in bits per byte of text. It is comparable between tokenizers.
    pub bits_per_byte: f64,
    /// Number of tokens that were predicted.
    pub tokens: u64,
    /// Number of tokens in all sequences of the data.
    pub of: u64,
}

/// How much to evaluate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Number of tokens to evaluate, before rounding up to whole sequences. If the data has fewer, all are evaluated.
    pub tokens: u64,
    /// Sequences per batch.
    pub batch: usize,
}

impl Extent {
    /// The number of sequences to evaluate.
    fn sequences(self, batches: &Batches<'_>, cut: SequenceSplit) -> u64 {
        self.tokens.div_ceil(cut.context as u64).min(batches.sequences())
    }

    /// Divides `sequences` sequences into batches. Returns each batch's first sequence and number of sequences.
    fn batches(self, sequences: u64) -> impl Iterator<Item = (u64, u64)> {
        let batch = self.batch as u64;
        (0..sequences).step_by(self.batch).map(move |first| (first, batch.min(sequences - first)))
    }
}

/// Mean loss over the first sequences of the data; `extent` sets their number. The batches are divided among the ranks.
/// `seen` receives the number of tokens processed so far, and the total number.
///
/// # Errors
/// When the data cannot be read, or the device fails.
pub fn evaluate(
    model: &Llama,
    data: &Mixture,
    cut: SequenceSplit,
    tokenizer: &Tokenizer,
    extent: Extent,
    (device, ranks): (&Device, &Ranks),
    seen: &mut dyn FnMut(u64, u64),
) -> Result<Evaluation> {
    let batches = Batches::new(data, cut);
    let wanted = extent.sequences(&batches, cut);
    let (mesh, data_rank) = (ranks.mesh(), ranks.mesh().data());
    // `sums`: each batch's mean loss times its number of sequences, 0 for the batches of other ranks. `bytes`: bytes of
    // text in this rank's targets.
    let (mut sums, mut bytes) = (Vec::new(), 0.0);
    for (first, count) in extent.batches(wanted) {
        if sums.len() % data_rank.of != data_rank.index {
            sums.push(0.0);
            continue;
        }
        let sequences = batches.in_order(first, count as usize)?.part(mesh.part());
        // `bytes_of` counts the bytes of decoded tokens. `text_ratio` corrects the count if the tokenizer changes text.
        for (n, targets) in
            (first..).zip(sequences.targets().chunks(sequences.targets().len() / count as usize))
        {
            bytes += tokenizer.bytes_of(targets) as f64 * batches.text_ratio(n);
        }
        let loss = || -> candle_core::Result<f32> {
            let batch = sequences.to_device(device)?;
            let input = Input { ids: &batch.ids, documents: batch.documents.as_ref() };
            model.loss(input, &batch.targets)?.to_scalar::<f32>()
        };
        sums.push(f64::from(loss().map_err(on_device("the validation failed"))?) * count as f64);
        ranks.channel().tick();
        seen((first + count) * cut.context as u64, wanted * cut.context as u64);
    }
    let batches_done = sums.len();
    sums.push(bytes);
    let all = ranks.gather(&sums, device)?;
    // Batches are summed in the order of the text, independently of the rank that computed them.
    let parts = |n: usize| n % data_rank.of * mesh.context..(n % data_rank.of + 1) * mesh.context;
    let mean = |n: usize| all[parts(n)].iter().map(|of_rank| of_rank[n]).sum::<f64>() / mesh.context as f64;
    let sum: f64 = (0..batches_done).map(mean).sum();
    let bytes: f64 = all.iter().map(|of_rank| of_rank[batches_done]).sum();
    let loss = sum / wanted as f64;
    let tokens = wanted * cut.context as u64;
    let bits = loss * tokens as f64 / std::f64::consts::LN_2;
    let of = batches.sequences() * cut.context as u64;
    Ok(Evaluation { loss, bits_per_byte: bits / bytes, tokens, of })
}

/// The loss of the same tokens in two computations: in whole sequences, as in training, and each token from only its
/// prefix, as in decoding with the same scheme (`sample --attn`). The losses differ for schemes in which a token's
/// result depends on later tokens, through a mean over all keys or the scale of a tile.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenByToken {
    /// Nats per token in whole sequences.
    pub whole: f64,
    /// Nats per token, each token predicted by a separate forward of only its prefix.
    pub alone: f64,
    /// Number of predicted tokens.
    pub tokens: u64,
}

/// Measures [`TokenByToken`]. The forward runs on every prefix, so a sequence of N tokens takes as long as a forward of
/// N^2 / 2 tokens. `seen` receives the number of processed tokens and of all tokens.
///
/// # Errors
/// When attention is restricted to documents, the data cannot be read, or the device fails.
pub fn token_by_token(
    model: &Llama,
    data: &Mixture,
    cut: SequenceSplit,
    extent: Extent,
    device: &Device,
    seen: &mut dyn FnMut(u64, u64),
) -> Result<TokenByToken> {
    let batches = Batches::new(data, cut);
    let wanted = extent.sequences(&batches, cut);
    let all = wanted * cut.context as u64;
    let (mut whole, mut alone, mut done) = (0.0, 0.0, 0);
    for (first, count) in extent.batches(wanted) {
        let sequences = batches
            .in_order(first, count as usize)?
            .to_device(device)
            .map_err(on_device("the validation failed"))?;
        if sequences.documents.is_some() {
            return Err(Error::new("--token-by-token does not support a document mask")
                .got("document-mask on")
                .allowed("document-mask off")
                .hint("evaluate a run that was trained without --document-mask"));
        }
        let mut measure = || -> candle_core::Result<()> {
            let (ids, targets) = (&sequences.ids, &sequences.targets);
            whole += f64::from(model.loss(ids, targets)?.to_scalar::<f32>()?) * count as f64;
            for len in 1..=cut.context {
                let logits =
                    model.next_logits(&ids.narrow(1, 0, len)?.contiguous()?)?.to_dtype(DType::F32)?;
                let next = targets.narrow(1, len - 1, 1)?.flatten_all()?;
                let loss = ops::cross_entropy(&logits, &next, CrossEntropy::default())?.to_scalar::<f32>()?;
                alone += f64::from(loss) * count as f64 / cut.context as f64;
                done += count;
                seen(done, all);
            }
            Ok(())
        };
        measure().map_err(on_device("the validation failed"))?;
    }
    Ok(TokenByToken { whole: whole / wanted as f64, alone: alone / wanted as f64, tokens: all })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::during;
    use crate::model::{Parameters, Training};

    /// The loss in bits is divided by the bytes of the predicted tokens or, if the tokenizer changes text, by the bytes
    /// of the original text.
    #[test]
    fn bits_a_byte_are_over_the_bytes_of_the_targets() -> Result<()> {
        let documents = crate::data::corpus::Corpus::new(0).documents(50_000);
        let tokenizer = Tokenizer::train(documents.iter().map(String::as_str), 300)?;
        let ids = 0..tokenizer.vocab_size() as u32;
        let long = ids.clone().max_by_key(|&id| tokenizer.bytes(id)).expect("an entry");
        let short = ids.clone().find(|&id| tokenizer.bytes(id) == 1).expect("a byte");
        assert!(tokenizer.bytes(long) > 1);
        // The only long token is the first token, which is not predicted: there are 16 targets of one byte each.
        let tokens = [&[long][..], &[short; 16]].concat();
        let model = crate::config::Config::resolve(crate::settings::Settings::default())?.model;
        let config = crate::model::LlamaConfig {
            layers: 1,
            vocab: 300,
            width: 32,
            heads: 2,
            key_heads: 2,
            head_dim: 16,
            ffn: 48,
            context: 8,
            ..model
        };
        let (device, ranks) = (Device::Cpu, Ranks::alone());
        let parameters = Parameters::init(
            config.parameter_specs(),
            7,
            Training::of_gradients(&ranks),
            &device,
            DType::F32,
        )?;
        let model = Llama::new(&config, &parameters, &device).map_err(during("the model"))?;
        let cut = SequenceSplit { context: 8, seed: 0, vocab: 300, end_of_document: None };
        // For each 10 bytes of decoded tokens, the original text has `text_bytes` bytes. The targets are 16 bytes of
        // decoded tokens, so they are `bytes` bytes of original text.
        for (text_bytes, bytes) in [(10, 16.0), (30, 48.0)] {
            let tokens = crate::data::Tokens::from(tokens.clone()).with_text(text_bytes, 10);
            let data = Mixture::new(vec![(tokens, 1.0)]);
            let extent = Extent { tokens: 16, batch: 1 };
            let got = evaluate(&model, &data, cut, &tokenizer, extent, (&device, &ranks), &mut |_, _| ())?;
            assert_eq!((got.tokens, got.of), (16, 16));
            let bits = got.loss * 16.0 / std::f64::consts::LN_2;
            assert!((got.bits_per_byte * bytes / bits - 1.0).abs() < 1e-12, "{got:?}");
            // With every batch size, the loss is the mean over the sequences.
            let batches = Batches::new(&data, cut);
            let of_sequence = |n| -> Result<f64> {
                let batch = batches.in_order(n, 1)?.to_device(&device).map_err(during("a batch"))?;
                let loss = model.loss(&batch.ids, &batch.targets).and_then(|loss| loss.to_scalar::<f32>());
                Ok(f64::from(loss.map_err(during("a loss"))?))
            };
            let mean = (of_sequence(0)? + of_sequence(1)?) / 2.0;
            for batch in [1, 2] {
                let extent = Extent { tokens: 16, batch };
                let got =
                    evaluate(&model, &data, cut, &tokenizer, extent, (&device, &ranks), &mut |_, _| ())?;
                assert!((got.loss / mean - 1.0).abs() < 1e-6, "{} for {mean}", got.loss);
            }
        }
        Ok(())
    }
}
