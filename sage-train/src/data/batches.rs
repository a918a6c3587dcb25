//! The sequences of each step: a pure function of (seed, step).

use std::collections::BTreeSet;
use std::path::Path;

use candle_core::{Device, Tensor};
use candle_sage::shape::Packing;
use candle_sage::{Error, Result};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use crate::ranks::Rank;

use super::shard::{Format, ShardWriter};
use super::tokens::check_ids;
use super::{Mixture, Tokenizer};

/// Input ids, and target ids one position later; both have the shape (sequences, context).
#[derive(Debug)]
pub struct Batch {
    /// Input of the model.
    pub ids: Tensor,
    /// The token after each input token.
    pub targets: Tensor,
    /// The documents, if attention stays inside documents.
    pub documents: Option<Packing>,
}

/// A [`Batch`] in host memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sequences {
    ids: Vec<u32>,
    targets: Vec<u32>,
    context: usize,
    documents: Option<Packing>,
}

impl Sequences {
    /// Copies the sequences to a device.
    ///
    /// # Errors
    /// When tensors cannot be allocated.
    pub fn to_device(&self, device: &Device) -> candle_core::Result<Batch> {
        let dims = (self.ids.len() / self.context, self.context);
        let tensor = |ids: &[u32]| Tensor::from_slice(ids, dims, device);
        Ok(Batch {
            ids: tensor(&self.ids)?,
            targets: tensor(&self.targets)?,
            documents: self.documents.clone(),
        })
    }

    /// The part of every sequence that one rank computes: consecutive tokens, equally many for each rank. `documents`
    /// is not cut: it describes the whole sequences.
    pub fn part(self, part: Rank) -> Self {
        if part.of == 1 {
            return self;
        }
        let range = part.part_of(self.context);
        let cut =
            |ids: &[u32]| ids.chunks(self.context).flat_map(|ids| &ids[range.clone()]).copied().collect();
        Self {
            ids: cut(&self.ids),
            targets: cut(&self.targets),
            context: range.len(),
            documents: self.documents,
        }
    }

    /// Input ids.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Target ids.
    pub fn targets(&self) -> &[u32] {
        &self.targets
    }

    /// The documents, if attention stays inside documents.
    pub fn documents(&self) -> Option<&Packing> {
        self.documents.as_ref()
    }
}

/// How tokens are split into sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceSplit {
    /// Tokens in a sequence.
    pub context: usize,
    /// Seed of the order.
    pub seed: u64,
    /// Size of the vocabulary: every id is smaller.
    pub vocab: usize,
    /// The token that ends a document, if attention stays inside documents.
    pub end_of_document: Option<u32>,
}

/// Batches of a mixture. Each source is split into consecutive sequences of `context` tokens, and each epoch of a
/// source visits every sequence once, in a different order.
#[derive(Debug)]
pub struct Batches<'a> {
    mixture: &'a Mixture,
    cut: SequenceSplit,
    /// The current epoch of each source, and the order of the sequences in this epoch.
    orders: Vec<Option<(u64, Vec<u32>)>>,
}

impl<'a> Batches<'a> {
    /// Sequences of a mixture. Each source must be longer than the context.
    pub fn new(mixture: &'a Mixture, cut: SequenceSplit) -> Self {
        Self { mixture, cut, orders: mixture.sources().map(|_| None).collect() }
    }

    /// Number of sequences in all sources.
    pub fn sequences(&self) -> u64 {
        (0..self.orders.len()).map(|source| self.sequences_of(source)).sum()
    }

    fn sequences_of(&self, source: usize) -> u64 {
        self.mixture.source(source).len().saturating_sub(1) / self.cut.context as u64
    }

    /// Sequences `first..first + count` in the order of training.
    ///
    /// # Errors
    /// When a shard cannot be read, or an id is not in the vocabulary.
    pub fn shuffled(&mut self, first: u64, count: usize) -> Result<Sequences> {
        let places: Vec<_> = (first..first + count as u64).map(|n| self.place(n)).collect();
        self.sequences_at(&places)
    }

    /// The number of distinct sequences among `first..first + count` in the order of training: across the end of an
    /// epoch, sequences may repeat.
    pub fn different(&mut self, first: u64, count: usize) -> usize {
        (first..first + count as u64).map(|n| self.place(n)).collect::<BTreeSet<_>>().len()
    }

    /// Sequences `first..first + count` without shuffling: each source is read in the order of its text.
    ///
    /// # Errors
    /// When a shard cannot be read, or an id is not in the vocabulary.
    pub fn in_order(&self, first: u64, count: usize) -> Result<Sequences> {
        let place = |n| {
            let (source, index) = self.mixture.draw(n);
            (source, index % self.sequences_of(source) * self.cut.context as u64)
        };
        self.sequences_at(&(first..first + count as u64).map(place).collect::<Vec<_>>())
    }

    /// For the whole source of sequence `n`: bytes of original text per byte of decoded tokens. It is 1 unless the
    /// tokenizer changes text.
    pub fn text_ratio(&self, n: u64) -> f64 {
        self.mixture.source(self.mixture.draw(n).0).text_ratio()
    }

    /// Writes a shard of the first `count` sequences of training, so that another program can train on the same
    /// sequences. Each sequence, with the token after it, is a document.
    ///
    /// # Errors
    /// When a source cannot be read, the file cannot be written, or `count` sequences are too many for one shard.
    pub fn write(&mut self, count: u64, tokenizer: &Tokenizer, path: &Path) -> Result<()> {
        let tokens = count.saturating_mul(self.cut.context as u64 + 1);
        if tokens > u64::from(u32::MAX) {
            return Err(Error::new("too many sequences for one shard")
                .got(format!("{tokens} tokens"))
                .allowed(format!("up to {}", u32::MAX))
                .hint("fewer --steps"));
        }
        let format = Format::for_vocab(tokenizer.vocab_size());
        let mut writer = ShardWriter::create(path, format, tokenizer.hash(), tokenizer.vocab_size())?;
        for n in 0..count {
            let Sequences { mut ids, targets, .. } = self.shuffled(n, 1)?;
            ids.extend(targets.last());
            let bytes = tokenizer.bytes_of(&ids);
            writer.write(&ids, bytes, bytes)?;
            writer.end_document();
        }
        writer.finish().map(|_| ())
    }

    /// The source of sequence `n`, and the index of its first token in the source.
    fn place(&mut self, n: u64) -> (usize, u64) {
        let (source, index) = self.mixture.draw(n);
        let sequences = self.sequences_of(source);
        let (epoch, at) = (index / sequences, index % sequences);
        let order = &mut self.orders[source];
        if order.as_ref().is_none_or(|(of, _)| *of != epoch) {
            let mut rng = ChaCha8Rng::seed_from_u64(self.cut.seed);
            rng.set_stream(epoch | (source as u64) << 48);
            let mut fresh: Vec<u32> = (0..sequences as u32).collect();
            fresh.shuffle(&mut rng);
            *order = Some((epoch, fresh));
        }
        let order = &order.as_ref().expect("just made").1;
        (source, u64::from(order[at as usize]) * self.cut.context as u64)
    }

    fn sequences_at(&self, places: &[(usize, u64)]) -> Result<Sequences> {
        let context = self.cut.context;
        let (mut ids, mut targets) = (Vec::new(), Vec::new());
        let mut window = Vec::new();
        for &(source, start) in places {
            window.clear();
            self.mixture.source(source).read(start, context + 1, &mut window)?;
            check_ids(&window, self.cut.vocab, format_args!("source {}", source + 1), start)?;
            ids.extend_from_slice(&window[..context]);
            targets.extend_from_slice(&window[1..]);
        }
        let documents = self.cut.end_of_document.map(|end| documents(&ids, context, end));
        Ok(Sequences { ids, targets, context, documents })
    }
}

/// The bounds of documents: a document starts at the beginning of a sequence, and after an end-of-document token.
fn documents(ids: &[u32], context: usize, end: u32) -> Packing {
    let begins = |&at: &usize| at.is_multiple_of(context) || ids[at - 1] == end;
    let bounds = (0..ids.len()).filter(begins).chain([ids.len()]);
    Packing::self_attention(bounds.collect())
}

/// Largest number of sequences in a source. The shuffled indices of the sequences have 32 bits.
const MOST_SEQUENCES: u64 = u32::MAX as u64;

/// Checks that a list of tokens can be split into sequences.
///
/// # Errors
/// When the list is shorter than one sequence and the token after it, or has too many sequences.
pub(super) fn check(what: &str, tokens: u64, context: usize) -> Result<()> {
    if tokens <= context as u64 {
        return Err(Error::new(format!("the {what} text is shorter than one sequence"))
            .got(format!("{tokens} tokens of {what} text"))
            .allowed(format!("at least {} (context {context} and the token after it)", context + 1))
            .hint(
                "give more text (--corpus-mb for the built-in corpus), a shorter --context, or another \
                 --val-fraction if the data has no validation split",
            ));
    }
    if tokens / context as u64 > MOST_SEQUENCES {
        return Err(Error::new(format!("the {what} text has too many sequences"))
            .got(tokens / context as u64)
            .allowed(format!("up to {MOST_SEQUENCES} in each source"))
            .hint("split it into several --data, or use a longer --context"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::Tokens;
    use super::*;

    fn cut(seed: u64) -> SequenceSplit {
        SequenceSplit { context: 10, seed, vocab: 2000, end_of_document: None }
    }

    fn first_sequences(batches: &mut Batches<'_>, range: std::ops::Range<u64>) -> Vec<u32> {
        range.map(|n| batches.shuffled(n, 1).expect("in memory").ids[0]).collect()
    }

    #[test]
    fn an_epoch_visits_every_sequence_once_and_order_depends_on_seed_and_place_alone() -> Result<()> {
        let tokens = Mixture::new(vec![(Tokens::from((0..103).collect::<Vec<u32>>()), 1.0)]);
        let mut batches = Batches::new(&tokens, cut(4));
        assert_eq!(batches.sequences(), 10);
        let first = first_sequences(&mut batches, 0..10);
        let second = first_sequences(&mut batches, 10..20);
        let mut sorted = first.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..10).map(|n| n * 10).collect::<Vec<_>>());
        assert_ne!(first, second);
        // Earlier sequences can be read again.
        assert_eq!(first_sequences(&mut batches, 3..7), first[3..7]);
        assert_ne!(first_sequences(&mut Batches::new(&tokens, cut(5)), 0..10), first);
        let batch = batches.shuffled(8, 4)?.to_device(&Device::Cpu).expect("tensors");
        assert_eq!(batch.ids.dims(), [4, 10]);
        let next = batch.ids.affine(1., 1.).and_then(|ids| ids.to_vec2::<u32>()).expect("numbers");
        assert_eq!(next, batch.targets.to_vec2::<u32>().expect("numbers"));
        Ok(())
    }

    /// A sequence of 10 tokens is written with the token after it, so as 11 tokens.
    #[test]
    fn a_shard_has_room_for_every_sequence() -> Result<()> {
        let tokens = Mixture::new(vec![(Tokens::from((0..103).collect::<Vec<u32>>()), 1.0)]);
        let text = "some text for a tokenizer ".repeat(100);
        let tokenizer = Tokenizer::train(std::iter::once(text.as_str()), 300)?;
        let count = u64::from(u32::MAX) / 10;
        let written = Batches::new(&tokens, cut(0)).write(count, &tokenizer, Path::new("/nowhere/a.bin"));
        let error = written.expect_err("too many").to_string();
        assert!(error.contains("too many sequences") && error.contains(&(count * 11).to_string()), "{error}");
        Ok(())
    }

    #[test]
    fn every_source_is_visited_by_its_weight_and_whole() {
        let source = |from: u32| Tokens::from((from..from + 101).collect::<Vec<u32>>());
        let mixture = Mixture::new(vec![(source(0), 3.0), (source(1000), 1.0)]);
        let mut batches = Batches::new(&mixture, cut(0));
        let mut seen = first_sequences(&mut batches, 0..40);
        // Three epochs of the first source, one of the second.
        seen.sort_unstable();
        let first = (0..30).map(|n| n / 3 * 10);
        assert_eq!(seen, first.chain((0..10).map(|n| 1000 + n * 10)).collect::<Vec<_>>());
    }

    /// The order of the sequences: sources of equal weights alternate. Draw `k` from a source of `s` sequences is
    /// sequence `k mod s` of epoch `k / s`. ChaCha8 with [`SequenceSplit::seed`] and stream number
    /// `epoch + 2^48 source` shuffles each epoch. The expected lists are from another implementation of ChaCha8 and of
    /// the shuffle. An update of crates must not change the order, because resumed runs continue in the same order.
    #[test]
    fn the_order_is_that_of_its_definition() {
        const ORDERS: [[&[u32]; 3]; 2] = [
            [
                &[7, 4, 9, 6, 1, 0, 5, 2, 8, 3],
                &[6, 4, 1, 0, 8, 3, 2, 7, 9, 5],
                &[4, 0, 2, 5, 1, 3, 8, 9, 6, 7],
            ],
            [&[6, 3, 0, 1, 4, 5, 2], &[5, 4, 0, 3, 2, 6, 1], &[0, 4, 3, 1, 2, 6, 5]],
        ];
        let source = |from: u32, len: u32| Tokens::from((from..from + len).collect::<Vec<u32>>());
        // 10 and 7 sequences of 10 tokens.
        let mixture = Mixture::new(vec![(source(0, 103), 1.0), (source(1000, 73), 1.0)]);
        let expected = (0..42usize).map(|n| {
            let (source, k) = ((n + 1) % 2, n / 2);
            let sequences = ORDERS[source][0].len();
            1000 * source as u32 + 10 * ORDERS[source][k / sequences][k % sequences]
        });
        assert_eq!(first_sequences(&mut Batches::new(&mixture, cut(4)), 0..42), expected.collect::<Vec<_>>());
    }

    /// Every sequence of a batch starts a new document, regardless of its index in the batch.
    #[test]
    fn documents_never_join_two_sequences() -> Result<()> {
        let tokens = Mixture::new(vec![(Tokens::from((0..61).collect::<Vec<u32>>()), 1.0)]);
        let cut = SequenceSplit { end_of_document: Some(25), ..cut(0) };
        let batch = Batches::new(&tokens, cut).in_order(0, 6)?;
        let bounds = vec![0, 10, 20, 26, 30, 40, 50, 60];
        assert_eq!(batch.documents(), Some(&Packing::self_attention(bounds)));
        Ok(())
    }

    #[test]
    fn documents_begin_with_sequences_and_behind_ends() {
        let ids = [1, 2, 9, 3, 4, 9, 9, 5];
        assert_eq!(documents(&ids, 4, 9), Packing::self_attention(vec![0, 3, 4, 6, 7, 8]));
        assert_eq!(documents(&ids, 8, 7), Packing::self_attention(vec![0, 8]));
    }
}
