//! Validation loss on text outside the training data, by position too; recall over distances; and HellaSwag.

mod position;
mod recall;
mod selected;

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_sage::ops::{self, CrossEntropy};
use candle_sage::{Error, Result};

use crate::data::{Batches, Cut, Mixture, Tokenizer};
use crate::model::{Input, Llama};
use crate::ranks::Ranks;
use crate::{during, on_device};

pub use position::{OfPositions, by_position};
pub use recall::{Recalled, recall};
pub use selected::selected;

/// The result of a validation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Evaluation {
    /// Mean loss, nats per token.
    pub loss: f64,
    /// Mean loss, bits per byte of text, which is comparable between tokenizers.
    pub bits_per_byte: f64,
    /// Number of tokens that were predicted.
    pub tokens: u64,
    /// Number of tokens in all sequences of the data.
    pub of: u64,
}

/// How much to evaluate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Lower bound of the number of tokens, which is rounded up to whole sequences, as far as the data has
    /// them.
    pub tokens: u64,
    /// Sequences per batch.
    pub batch: usize,
}

impl Extent {
    /// The number of sequences to evaluate.
    fn sequences(self, batches: &Batches<'_>, cut: Cut) -> u64 {
        self.tokens.div_ceil(cut.context as u64).min(batches.sequences())
    }

    /// The batches of so many sequences: the first sequence of each, and how many it has.
    fn batches(self, sequences: u64) -> impl Iterator<Item = (u64, u64)> {
        let batch = self.batch as u64;
        (0..sequences).step_by(self.batch).map(move |first| (first, batch.min(sequences - first)))
    }
}

/// Mean loss over the first sequences of the data, which are the same in every validation. The ranks divide
/// the batches among themselves. `seen` receives the number of tokens done, and of all tokens.
///
/// # Errors
/// When the data cannot be read, or the device fails.
pub fn evaluate(
    model: &Llama,
    data: &Mixture,
    cut: Cut,
    tokenizer: &Tokenizer,
    extent: Extent,
    (device, ranks): (&Device, &Ranks),
    seen: &mut dyn FnMut(u64, u64),
) -> Result<Evaluation> {
    let batches = Batches::new(data, cut);
    let wanted = extent.sequences(&batches, cut);
    let (mesh, data_rank) = (ranks.mesh(), ranks.mesh().data());
    // The sum of losses of each batch, 0 for batches of other ranks; and the number of bytes of the text.
    let (mut sums, mut bytes) = (Vec::new(), 0.0);
    for (first, count) in extent.batches(wanted) {
        if sums.len() % data_rank.of != data_rank.index {
            sums.push(0.0);
            continue;
        }
        let sequences = batches.in_order(first, count as usize)?.part(mesh.part());
        // The bytes of exactly the tokens that are predicted, as the original text had them.
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
        sums.push(f64::from(loss().map_err(on_device("validation"))?) * count as f64);
        ranks.words().tick();
        seen((first + count) * cut.context as u64, wanted * cut.context as u64);
    }
    let batches_done = sums.len();
    sums.push(bytes);
    let all = ranks.gather(&sums, device)?;
    // The sum runs in the order of the text, whichever rank computed a batch.
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

/// The loss of the same tokens in two computations: in whole sequences, as in training, and each token from
/// the tokens before it alone, as decoding in the same numerics computes it (`sample --attn`). The two differ
/// in numerics that use later tokens, through a mean over all keys or a scale of a tile.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenByToken {
    /// Nats per token in whole sequences.
    pub whole: f64,
    /// Nats per token from the tokens before it alone.
    pub alone: f64,
    /// Number of tokens that were predicted in each way.
    pub tokens: u64,
}

/// Measures [`TokenByToken`]. A sequence costs half the square of the context in tokens. `seen` receives the
/// number of tokens done, and of all tokens.
///
/// # Errors
/// When attention is confined to documents, when the data cannot be read, or when the device fails.
pub fn token_by_token(
    model: &Llama,
    data: &Mixture,
    cut: Cut,
    extent: Extent,
    device: &Device,
    seen: &mut dyn FnMut(u64, u64),
) -> Result<TokenByToken> {
    let batches = Batches::new(data, cut);
    let wanted = extent.sequences(&batches, cut);
    let all = wanted * cut.context as u64;
    let (mut whole, mut alone, mut done) = (0.0, 0.0, 0);
    for (first, count) in extent.batches(wanted) {
        let sequences =
            batches.in_order(first, count as usize)?.to_device(device).map_err(on_device("validation"))?;
        if sequences.documents.is_some() {
            return Err(Error::new("tokens cannot be predicted one by one inside documents")
                .got("document-mask on")
                .allowed("sequences without a mask")
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
        measure().map_err(on_device("validation"))?;
    }
    Ok(TokenByToken { whole: whole / wanted as f64, alone: alone / wanted as f64, tokens: all })
}

/// A multiple-choice example: a beginning, and endings to choose from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Example {
    /// Tokens of the beginning.
    pub context: Vec<u32>,
    /// Tokens of each ending.
    pub endings: Vec<Vec<u32>>,
    /// Index of the right ending.
    pub label: usize,
}

/// Magic number and version of llm.c's multiple-choice files (`dev/data/data_common.py`, `write_evalfile`).
const MAGIC: [i32; 2] = [20_240_522, 1];
const HEADER: usize = 1024;
const BEGIN: u16 = u16::MAX;

/// Reads HellaSwag in the format of llm.c's `hellaswag_val.bin`: a header of 256 numbers of 32 bits; then for
/// each example, in numbers of 16 bits, 65535, the example's length in bytes, its index, the label, the
/// number of endings, and the length and tokens of the context and of each ending.
///
/// # Errors
/// When the file cannot be read, or has another format.
pub fn read_examples(path: &Path) -> Result<Vec<Example>> {
    let failed = |got: String| {
        Error::new(format!("{} is not a file of examples", path.display()))
            .got(got)
            .allowed("llm.c's multiple-choice .bin: magic 20240522, version 1")
            .hint("llm.c's dev/data/hellaswag.py writes hellaswag_val.bin")
    };
    let bytes = std::fs::read(path).map_err(|error| failed(error.to_string()))?;
    let Some((header, rest)) = bytes.split_at_checked(HEADER) else {
        return Err(failed(format!("{} bytes", bytes.len())));
    };
    let number = |n: usize| header[4 * n..].first_chunk().map_or(0, |&b| i32::from_le_bytes(b));
    if [number(0), number(1)] != MAGIC {
        return Err(failed(format!("magic {}, version {}", number(0), number(1))));
    }
    let words: Vec<u16> = rest.as_chunks().0.iter().map(|&b| u16::from_le_bytes(b)).collect();
    let mut words = Words { rest: &words };
    let mut examples = Vec::new();
    while !words.rest.is_empty() {
        let example =
            words.example().ok_or_else(|| failed(format!("example {} is broken", examples.len())))?;
        examples.push(example);
    }
    if examples.is_empty() || examples.len() as i64 != i64::from(number(2)) {
        return Err(failed(format!("{} examples of {}", examples.len(), number(2))));
    }
    Ok(examples)
}

struct Words<'a> {
    rest: &'a [u16],
}

impl Words<'_> {
    fn one(&mut self) -> Option<u16> {
        let (&first, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(first)
    }

    fn list(&mut self) -> Option<Vec<u32>> {
        let len = usize::from(self.one()?);
        let (list, rest) = self.rest.split_at_checked(len)?;
        self.rest = rest;
        (len > 0).then(|| list.iter().map(|&token| u32::from(token)).collect())
    }

    fn example(&mut self) -> Option<Example> {
        let before = self.rest.len();
        let (begin, bytes, _index) = (self.one()?, self.one()?, self.one()?);
        let (label, endings) = (usize::from(self.one()?), usize::from(self.one()?));
        let context = self.list()?;
        let endings: Vec<Vec<u32>> = (0..endings).map(|_| self.list()).collect::<Option<_>>()?;
        let whole = 2 * (before - self.rest.len()) == usize::from(bytes);
        (begin == BEGIN && whole && label < endings.len()).then_some(Example { context, endings, label })
    }
}

/// The number of examples that the model gets right. It chooses the ending with the lowest mean loss per
/// token (`acc_norm` of llm.c and lm-eval).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choices {
    /// Number of right choices.
    pub right: usize,
    /// Number of examples.
    pub examples: usize,
}

/// Lets a model choose endings. A beginning that does not fit the context loses its first tokens.
///
/// # Errors
/// When an id is not in the vocabulary, or the device fails.
pub fn choose(
    model: &Llama,
    examples: &[Example],
    context: usize,
    device: &Device,
    each: &mut dyn FnMut(Choices),
) -> Result<Choices> {
    let mut choices = Choices { right: 0, examples: 0 };
    for example in examples {
        let losses = losses(model, example, context, device).map_err(during("choosing an ending"))?;
        let choice = (0..losses.len()).min_by(|&a, &b| losses[a].total_cmp(&losses[b]));
        choices.right += usize::from(choice == Some(example.label));
        choices.examples += 1;
        each(choices);
    }
    Ok(choices)
}

/// The mean loss of each ending.
fn losses(
    model: &Llama,
    example: &Example,
    context: usize,
    device: &Device,
) -> candle_core::Result<Vec<f32>> {
    let loss = |ending: &Vec<u32>| {
        let ending = &ending[..ending.len().min(context - 1)];
        let keep = example.context.len().min(context - ending.len());
        let start = example.context.len() - keep;
        let all = [&example.context[start..], ending].concat();
        let (ids, targets) = (&all[..all.len() - 1], &all[keep..]);
        let ids = Tensor::new(ids, device)?.unsqueeze(0)?;
        model.loss_of_last(&ids, &Tensor::new(targets, device)?)?.to_scalar::<f32>()
    };
    example.endings.iter().map(loss).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file as `write_evalfile` lays it out.
    fn file(examples: &[Example]) -> Vec<u8> {
        let mut out = Vec::new();
        let header = [20_240_522, 1, examples.len() as i32, 0];
        header.iter().for_each(|n| out.extend(n.to_le_bytes()));
        out.resize(HEADER, 0);
        for (index, example) in examples.iter().enumerate() {
            let mut words = vec![BEGIN, 0, index as u16, example.label as u16, example.endings.len() as u16];
            for list in std::iter::once(&example.context).chain(&example.endings) {
                words.push(list.len() as u16);
                words.extend(list.iter().map(|&token| token as u16));
            }
            words[1] = 2 * words.len() as u16;
            words.iter().for_each(|word| out.extend(word.to_le_bytes()));
        }
        out
    }

    #[test]
    fn examples_are_read_and_broken_ones_refused() -> Result<()> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("hellaswag.bin");
        let example = |n: u32| Example {
            context: vec![n, n + 1],
            endings: (0..4).map(|ending| (0..=ending).map(|token| n + token).collect()).collect(),
            label: n as usize % 4,
        };
        let examples: Vec<Example> = (0..9).map(example).collect();
        let whole = file(&examples);
        std::fs::write(&path, &whole).expect("a file");
        assert_eq!(read_examples(&path)?, examples);
        for at in 0..whole.len() {
            if (16..HEADER).contains(&at) {
                continue;
            }
            std::fs::write(&path, &whole[..at]).expect("a file");
            assert!(read_examples(&path).is_err(), "{at} bytes");
        }
        Ok(())
    }
}
