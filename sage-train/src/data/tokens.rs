//! A list of tokens, in memory or in shards.

use std::ops::Range;
use std::sync::Arc;

use candle_sage::{Error, Result};
use sha2::{Digest, Sha256};

use super::shard::Shard;

/// A list of tokens. Tokens in shards stay in their files until they are read.
#[derive(Debug, Clone)]
pub struct Tokens {
    parts: Vec<Part>,
    len: u64,
    /// Bytes of original text per byte of decoded tokens: 1 unless the tokenizer changes text.
    text_ratio: f64,
}

impl Default for Tokens {
    fn default() -> Self {
        Self { parts: Vec::new(), len: 0, text_ratio: 1.0 }
    }
}

/// A range of a vector or of a shard. `at` is the index in [`Tokens`] of the range's first token.
#[derive(Debug, Clone)]
struct Part {
    storage: Storage,
    range: Range<u64>,
    at: u64,
}

#[derive(Debug, Clone)]
enum Storage {
    Memory(Arc<Vec<u32>>),
    Shard(Arc<Shard>),
}

impl From<Vec<u32>> for Tokens {
    fn from(tokens: Vec<u32>) -> Self {
        let len = tokens.len() as u64;
        Self {
            parts: vec![Part { storage: Storage::Memory(Arc::new(tokens)), range: 0..len, at: 0 }],
            len,
            text_ratio: 1.0,
        }
    }
}

impl From<Vec<Shard>> for Tokens {
    /// Concatenates the shards.
    fn from(shards: Vec<Shard>) -> Self {
        let mut all = Self::default();
        // Sums only over shards whose sidecar has `token_bytes`. Earlier versions did not write this field.
        let sidecars = shards.iter().filter_map(|shard| shard.sidecar.as_ref());
        let counted = sidecars.filter_map(|sidecar| Some((sidecar.text_bytes, sidecar.token_bytes?)));
        let (text, tokens) = counted.fold((0, 0), |(text, tokens), (t, n)| (text + t, tokens + n));
        for shard in shards {
            let range = 0..shard.len();
            all.parts.push(Part {
                storage: Storage::Shard(Arc::new(shard)),
                range: range.clone(),
                at: all.len,
            });
            all.len += range.end;
        }
        all.with_text(text, tokens)
    }
}

/// A warning if tokens stand for less than 99 % of the bytes of their text: a tokenizer may drop text that it has no
/// token for.
pub fn dropped_text(text_bytes: u64, token_bytes: u64) -> Option<String> {
    let kept = token_bytes as f64 / text_bytes.max(1) as f64;
    (text_bytes > 0 && kept < 0.99).then(|| {
        format!(
            "warning: the tokens stand for only {:.1} % of the text's bytes: the tokenizer drops spaces, or text that \
             is not in its vocabulary",
            100.0 * kept
        )
    })
}

impl Tokens {
    /// Records how many bytes of text were encoded, and how many bytes the tokens stand for: the two numbers differ if
    /// the tokenizer changes text.
    #[must_use]
    pub fn with_text(self, text_bytes: u64, token_bytes: u64) -> Self {
        let known = text_bytes > 0 && token_bytes > 0;
        Self { text_ratio: if known { text_bytes as f64 / token_bytes as f64 } else { 1.0 }, ..self }
    }

    /// Bytes of original text per byte of decoded tokens: 1 unless the tokenizer changes text.
    pub fn text_ratio(&self) -> f64 {
        self.text_ratio
    }

    /// Number of tokens.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The shards of the list.
    pub(super) fn shards(&self) -> impl Iterator<Item = &Shard> {
        self.parts.iter().filter_map(|part| match &part.storage {
            Storage::Memory(_) => None,
            Storage::Shard(shard) => Some(&**shard),
        })
    }

    /// Whether the list is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A range of the list.
    #[must_use]
    pub fn slice(&self, range: Range<u64>) -> Self {
        let mut all = Self { text_ratio: self.text_ratio, ..Self::default() };
        for part in &self.parts {
            let (first, last) = (range.start.max(part.at), range.end.min(part.at + span(&part.range)));
            if first < last {
                let start = part.range.start + first - part.at;
                all.parts.push(Part { range: start..start + last - first, at: all.len, ..part.clone() });
                all.len += last - first;
            }
        }
        all
    }

    /// Appends tokens `start..start + count` to `out`. The range must be inside the list.
    ///
    /// # Errors
    /// When a shard cannot be read.
    pub fn read(&self, start: u64, count: usize, out: &mut Vec<u32>) -> Result<()> {
        let (mut at, end) = (start, start + count as u64);
        assert!(end <= self.len, "tokens of the list");
        let first = self.parts.partition_point(|part| part.at + span(&part.range) <= start);
        for part in &self.parts[first..] {
            if at == end {
                break;
            }
            let from = part.range.start + at - part.at;
            let count = (end - at).min(part.range.end - from);
            match &part.storage {
                Storage::Memory(tokens) => {
                    out.extend_from_slice(&tokens[from as usize..(from + count) as usize])
                }
                Storage::Shard(shard) => shard.read(from, count as usize, out)?,
            }
            at += count;
        }
        Ok(())
    }

    /// Adds to a hash what identifies the list: for each part, the range, and either its tokens in memory or the
    /// [`Shard::fingerprint`] of its shard.
    ///
    /// # Errors
    /// As [`Tokens::read`].
    pub fn fingerprint(&self, hash: &mut Sha256) -> Result<()> {
        for part in &self.parts {
            hash.update(part.range.start.to_le_bytes());
            hash.update(part.range.end.to_le_bytes());
            match &part.storage {
                Storage::Memory(tokens) => {
                    let tokens = &tokens[part.range.start as usize..part.range.end as usize];
                    tokens.iter().for_each(|token| hash.update(token.to_le_bytes()));
                }
                Storage::Shard(shard) => shard.fingerprint(hash)?,
            }
        }
        Ok(())
    }

    /// Passes the first `count` tokens to `each` in chunks of 2^20, each with the index of its first token.
    ///
    /// # Errors
    /// As [`Tokens::read`], and the errors of `each`.
    pub fn each_chunk(&self, count: u64, each: &mut dyn FnMut(u64, &[u32]) -> Result<()>) -> Result<()> {
        let mut tokens = Vec::new();
        for start in (0..count).step_by(CHUNK) {
            tokens.clear();
            self.read(start, (count - start).min(CHUNK as u64) as usize, &mut tokens)?;
            each(start, &tokens)?;
        }
        Ok(())
    }
}

/// Tokens of a chunk.
const CHUNK: usize = 1 << 20;

/// Checks that ids are in the vocabulary. The error message says where the ids are from (`place`), and counts positions
/// from `start`.
pub(super) fn check_ids(ids: &[u32], vocab: usize, place: impl std::fmt::Display, start: u64) -> Result<()> {
    let Some(at) = ids.iter().position(|&id| id as usize >= vocab) else { return Ok(()) };
    Err(Error::new("a token is not in the vocabulary")
        .got(format!("id {} at position {} of {place}", ids[at], start + at as u64))
        .allowed(format!("ids below {vocab}"))
        .hint(
            "use the tokenizer that made the shards: name it with --tokenizer, or put its tokenizer.json next \
             to them",
        ))
}

fn span(range: &Range<u64>) -> u64 {
    range.end - range.start
}

#[cfg(test)]
mod tests {
    use super::super::shard::{Format, ShardWriter};
    use super::*;

    #[test]
    fn dropped_text_is_reported_from_one_percent() {
        assert_eq!((dropped_text(0, 0), dropped_text(100, 99), dropped_text(100, 120)), (None, None, None));
        assert!(dropped_text(100, 91).is_some_and(|warning| warning.contains("only 91.0 %")));
    }

    fn all_of(tokens: &Tokens) -> Result<Vec<u32>> {
        let mut all = Vec::new();
        tokens.each_chunk(tokens.len(), &mut |start, part| {
            assert_eq!(start, all.len() as u64);
            all.extend_from_slice(part);
            Ok(())
        })?;
        Ok(all)
    }

    #[test]
    fn any_part_of_memory_and_shards_is_what_it_should_be() -> Result<()> {
        let all: Vec<u32> = (0..1000).map(|n| n * 7).collect();
        let folder = tempfile::tempdir().expect("a folder");
        let mut shards = Vec::new();
        for (n, range) in [0..300, 300..300, 300..301, 301..1000].into_iter().enumerate() {
            let path = folder.path().join(format!("{n}.bin"));
            let mut writer = ShardWriter::create(&path, Format::LlmcU16, "t", 7000)?;
            writer.write(&all[range], 0, 0)?;
            writer.finish()?;
            shards.push(Shard::open(&path)?);
        }
        for tokens in [Tokens::from(all.clone()), Tokens::from(shards)] {
            assert_eq!(all_of(&tokens)?, all);
            for (start, end) in [(0, 1000), (0, 0), (299, 302), (300, 301), (999, 1000), (10, 290)] {
                let part = tokens.slice(start..end);
                assert_eq!(all_of(&part)?, all[start as usize..end as usize]);
                let inner = part.slice(part.len() / 3..part.len());
                let offset = start + (end - start) / 3;
                assert_eq!(all_of(&inner)?, all[offset as usize..end as usize]);
            }
        }
        Ok(())
    }
}
