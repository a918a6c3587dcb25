//! Multiple-choice examples, and the number that a model answers correctly.

use std::path::Path;

use candle_core::{D, Device, Tensor};
use candle_sage::{Error, Result};

use crate::during;
use crate::model::Llama;

/// A context, and endings to choose from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Example {
    /// Tokens of the context.
    pub context: Vec<u32>,
    /// Tokens of each ending.
    pub endings: Vec<Vec<u32>>,
    /// The length of each ending, for the loss per length. [`read_examples`] counts it in tokens, other code in
    /// characters.
    pub lengths: Vec<usize>,
    /// Index of the correct ending.
    pub label: usize,
}

/// Magic number and version of llm.c's multiple-choice files (`dev/data/data_common.py`, `write_evalfile`).
const MAGIC: [i32; 2] = [20_240_522, 1];
const HEADER: usize = 1024;
const BEGIN: u16 = u16::MAX;

/// Reads HellaSwag in the format of llm.c's `hellaswag_val.bin`. The header is 256 32-bit numbers. An example is 16-bit
/// numbers: 65535, the example's length in bytes, its index, the label, the number of endings, the context's length
/// and tokens, and each ending's length and tokens.
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
        let lengths = endings.iter().map(Vec::len).collect();
        (begin == BEGIN && whole && label < endings.len()).then_some(Example {
            context,
            endings,
            lengths,
            label,
        })
    }
}

/// How many examples a model answers correctly, by three criteria.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Choices {
    /// Examples whose correct ending has the lowest loss (`acc` of lm-evaluation-harness).
    pub right: usize,
    /// Examples whose correct ending has the lowest loss per character, or per token if the text is not known
    /// (`acc_norm`).
    pub by_length: usize,
    /// Examples whose correct ending the model would generate: each token is the most likely token.
    pub written: usize,
    /// Sum of the losses of the correct endings, in nats.
    pub loss: f64,
    /// Examples whose first tokens the model did not read, because context and ending were too long for it.
    pub cut: usize,
    /// Number of examples.
    pub examples: usize,
}

/// The loss of an ending, in nats, and whether each of its tokens is the most likely token.
struct EndingLoss {
    loss: f32,
    written: bool,
}

/// Lets a model choose the endings of `examples`. The model reads at most `context` tokens. If an example has more, its
/// first tokens are left out.
///
/// # Errors
/// When an ending is longer than `context`, a token is not in the vocabulary, or the device fails.
pub fn choose(
    model: &Llama,
    examples: &[Example],
    context: usize,
    device: &Device,
    each: &mut dyn FnMut(Choices),
) -> Result<Choices> {
    let mut choices = Choices::default();
    for example in examples {
        let longest = example.endings.iter().map(Vec::len).max().unwrap_or(0);
        if longest > context {
            return Err(Error::new("an ending is longer than the model's context")
                .got(format!("{longest} tokens in example {}", choices.examples + 1))
                .allowed(format!("at most {context} tokens"))
                .hint("use a larger --context"));
        }
        let score = |ending: &Vec<u32>| score(model, &example.context, ending, context, device);
        let judged = example.endings.iter().map(score).collect::<candle_core::Result<Vec<_>>>();
        let judged = judged.map_err(during("cannot choose an ending"))?;
        let lowest = |of: &dyn Fn(usize) -> f32| {
            (0..judged.len()).min_by(|&a, &b| of(a).total_cmp(&of(b))) == Some(example.label)
        };
        choices.right += usize::from(lowest(&|n| judged[n].loss));
        choices.by_length += usize::from(lowest(&|n| judged[n].loss / example.lengths[n].max(1) as f32));
        choices.written += usize::from(judged[example.label].written);
        choices.cut += usize::from(example.context.len() > kept(context, longest));
        choices.loss += f64::from(judged[example.label].loss);
        choices.examples += 1;
        each(choices);
    }
    Ok(choices)
}

/// How many tokens the model can read before an ending of `ending` tokens, if it reads at most `context` tokens. The
/// ending's last token does not count, because it is not an input.
fn kept(context: usize, ending: usize) -> usize {
    context + 1 - ending
}

fn score(
    model: &Llama,
    before: &[u32],
    ending: &[u32],
    context: usize,
    device: &Device,
) -> candle_core::Result<EndingLoss> {
    let keep = before.len().min(kept(context, ending.len()));
    let all = [&before[before.len() - keep..], ending].concat();
    let (ids, count) = (Tensor::new(&all[..all.len() - 1], device)?.unsqueeze(0)?, ending.len());
    let hidden = model.hidden(&ids)?;
    let last = hidden.narrow(0, hidden.dim(0)? - count, count)?;
    let targets = Tensor::new(ending, device)?;
    let mean = model.loss_of(&last, &targets)?;
    let likeliest = model.logits(&last)?.argmax(D::Minus1)?.to_vec1::<u32>()?;
    Ok(EndingLoss { loss: mean.to_scalar::<f32>()? * count as f32, written: likeliest == ending })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file in the layout of `write_evalfile`.
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
            lengths: (1..=4).collect(),
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
