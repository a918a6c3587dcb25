//! Writes the shards of one part of the data: training or validation.

use std::path::Path;

use candle_sage::Result;
use serde::{Deserialize, Serialize};

use super::shard::{Begun, Format, ShardWriter};
use super::tokenizer::Tokenizer;

/// The contents of one part of the data.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Names of the shards.
    pub shards: Vec<String>,
    /// Tokens, including end-of-text tokens.
    pub tokens: u64,
    /// Documents.
    pub documents: u64,
    /// Bytes of text.
    pub text_bytes: u64,
}

/// The state of a part that is being written, from which writing can be resumed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Split {
    pub(super) part: Part,
    /// State of the last shard, if it is not complete.
    pub(super) open: Option<Begun>,
}

/// Writes the shards of one part, one after the other.
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
    /// Continues after the state of an earlier start; the default state begins the part.
    pub(super) fn new(
        folder: &'a Path,
        name: &'a str,
        (format, shard_tokens): (Format, u64),
        tokenizer: &'a Tokenizer,
        Split { part, open }: Split,
    ) -> Result<Self> {
        // nanoGPT reads one file for each part.
        let shard_tokens = if format == Format::NanoGpt { u64::MAX } else { shard_tokens };
        let at = part.shards.last().map(|name| folder.join(name));
        let open = at.zip(open).map(|(path, begun)| ShardWriter::reopen(&path, begun)).transpose()?;
        Ok(Self { folder, name, format, shard_tokens, tokenizer, open, part })
    }

    /// The state so far, once its tokens are on disk.
    pub(super) fn state(&mut self) -> Result<Split> {
        let open = self.open.as_mut().map(ShardWriter::begun).transpose()?;
        Ok(Split { part: self.part.clone(), open })
    }

    /// Number of complete shards.
    pub(super) fn complete(&self) -> usize {
        self.part.shards.len() - usize::from(self.open.is_some())
    }

    /// Tokens so far.
    pub(super) fn tokens(&self) -> u64 {
        self.part.tokens
    }

    /// Adds tokens of a document; `ends` says whether they are its last. A full shard ends anywhere in a
    /// document.
    pub(super) fn write(&mut self, mut tokens: &[u32], ends: bool) -> Result<()> {
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
            let text_bytes = now.iter().map(|&id| self.tokenizer.bytes(id)).sum();
            shard.write(now, text_bytes)?;
            self.part.tokens += now.len() as u64;
            self.part.text_bytes += text_bytes;
            tokens = later;
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
