//! Writes the shards of the training or the validation data.

use std::path::Path;

use candle_sage::Result;
use serde::{Deserialize, Serialize};

use super::shard::{Format, PartialShard, ShardWriter};
use super::tokenizer::Tokenizer;

/// Shards and size of the training or the validation data.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Names of the shards.
    pub shards: Vec<String>,
    /// Tokens, including end-of-text tokens.
    pub tokens: u64,
    /// Documents.
    pub documents: u64,
    /// Bytes of the original text.
    pub text_bytes: u64,
    /// Bytes of text that the tokens stand for. Older versions did not write this number.
    #[serde(default)]
    pub token_bytes: u64,
}

/// What is needed to continue writing the training or the validation data.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Split {
    pub(super) part: Part,
    /// State of the last shard, if it is not complete.
    pub(super) open: Option<PartialShard>,
}

/// Writes the shards of one split: the training data or the validation data.
pub(super) struct SplitWriter<'a> {
    folder: &'a Path,
    name: &'a str,
    format: Format,
    shard_tokens: u64,
    tokenizer: &'a Tokenizer,
    open: Option<ShardWriter>,
    part: Part,
}

impl<'a> SplitWriter<'a> {
    /// A writer that continues from a saved [`Split`]. With the default `Split`, it starts with the first shard.
    pub(super) fn new(
        folder: &'a Path,
        name: &'a str,
        (format, shard_tokens): (Format, u64),
        tokenizer: &'a Tokenizer,
        Split { part, open }: Split,
    ) -> Result<Self> {
        // nanoGPT reads one file for training and one file for validation.
        let shard_tokens = if format == Format::NanoGpt { u64::MAX } else { shard_tokens };
        let at = part.shards.last().map(|name| folder.join(name));
        let open = at.zip(open).map(|(path, begun)| ShardWriter::reopen(&path, begun)).transpose()?;
        Ok(Self { folder, name, format, shard_tokens, tokenizer, open, part })
    }

    /// Syncs the tokens written so far to disk, and returns what [`SplitWriter::new`] needs to continue after them.
    pub(super) fn state(&mut self) -> Result<Split> {
        let open = self.open.as_mut().map(ShardWriter::begun).transpose()?;
        Ok(Split { part: self.part.clone(), open })
    }

    /// Number of complete shards.
    pub(super) fn complete(&self) -> usize {
        self.part.shards.len() - usize::from(self.open.is_some())
    }

    pub(super) fn tokens(&self) -> u64 {
        self.part.tokens
    }

    /// Adds tokens that were made from `text_bytes` bytes of a document; with `ends`, they are its last tokens. A shard
    /// may end inside a document.
    pub(super) fn write(&mut self, mut tokens: &[u32], mut text_bytes: u64, ends: bool) -> Result<()> {
        let mut left = self.tokenizer.bytes_of(tokens);
        while !tokens.is_empty() {
            let shard = match &mut self.open {
                Some(shard) => shard,
                None => {
                    let number = self.part.shards.len() + 1;
                    let name = match self.format {
                        Format::NanoGpt => format!("{}.bin", self.name),
                        _ => format!("{}_{number:06}.bin", self.name),
                    };
                    let path = self.folder.join(&name);
                    self.part.shards.push(name);
                    let (hash, entries) = (self.tokenizer.hash(), self.tokenizer.vocab_size());
                    self.open.insert(ShardWriter::create(&path, self.format, hash, entries)?)
                }
            };
            let room = (self.shard_tokens - shard.tokens()).min(tokens.len() as u64) as usize;
            let (now, later) = tokens.split_at(room);
            let token_bytes = self.tokenizer.bytes_of(now);
            // `text_bytes` is divided among the shards in proportion to the bytes of each shard's tokens.
            let share = match left > token_bytes {
                true => (u128::from(text_bytes) * u128::from(token_bytes) / u128::from(left)) as u64,
                false => text_bytes,
            };
            shard.write(now, share, token_bytes)?;
            self.part.tokens += now.len() as u64;
            self.part.text_bytes += share;
            self.part.token_bytes += token_bytes;
            (tokens, left, text_bytes) = (later, left - token_bytes, text_bytes - share);
            if tokens.is_empty() && ends {
                shard.end_document();
                self.part.documents += 1;
            }
            if shard.tokens() == self.shard_tokens {
                self.close()?;
            }
        }
        Ok(())
    }

    fn close(&mut self) -> Result<()> {
        self.open.take().map_or(Ok(()), |shard| shard.finish().map(|_| ()))
    }

    /// Completes the last shard.
    pub(super) fn finish(mut self) -> Result<Part> {
        self.close()?;
        Ok(self.part)
    }
}
