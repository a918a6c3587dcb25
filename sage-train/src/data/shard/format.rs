//! The formats of shards: headers, and the encoding of tokens as bytes.

use candle_sage::{Error, Result};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Bytes of llm.c's header: 256 numbers of 32 bits.
pub(super) const HEADER: u64 = 1024;

/// The format of a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// llm.c and modded-nanogpt: header (magic 20240520, version 1), then 16 bits per token
    #[value(name = "llmc-u16")]
    #[serde(rename = "llmc-u16")]
    LlmcU16,
    /// llm.c for large vocabularies: header (magic 20240801, version 7), then 32 bits per token
    #[value(name = "llmc-u32")]
    #[serde(rename = "llmc-u32")]
    LlmcU32,
    /// nanoGPT: no header, 16 bits per token
    #[value(name = "nanogpt")]
    NanoGpt,
}

impl std::fmt::Display for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.to_possible_value().expect("no variant is skipped").get_name())
    }
}

impl Format {
    /// The smallest format that has a header and can store every id of a vocabulary.
    pub fn for_vocab(vocab: usize) -> Self {
        if vocab <= 1 << 16 { Self::LlmcU16 } else { Self::LlmcU32 }
    }

    /// Checks that the format can store every id of a vocabulary.
    ///
    /// # Errors
    /// When the vocabulary is too large.
    pub fn check_vocab(self, vocab: usize) -> Result<()> {
        if self.width() == 4 || vocab <= 1 << 16 {
            return Ok(());
        }
        Err(Error::new("the vocabulary does not fit the format")
            .got(format!("{vocab} entries, 16 bits per token in {self}"))
            .allowed("up to 65536 entries")
            .hint("--format llmc-u32"))
    }

    /// Bytes of a token.
    pub(super) fn width(self) -> u64 {
        match self {
            Self::LlmcU16 | Self::NanoGpt => 2,
            Self::LlmcU32 => 4,
        }
    }

    /// Magic number and version; `None` for the format without a header.
    pub(super) fn magic(self) -> Option<(i32, i32)> {
        match self {
            Self::LlmcU16 => Some((20_240_520, 1)),
            Self::LlmcU32 => Some((20_240_801, 7)),
            Self::NanoGpt => None,
        }
    }

    pub(super) fn header(self) -> u64 {
        if self.magic().is_some() { HEADER } else { 0 }
    }

    /// The format that the first bytes of a file indicate. A file without a known magic number is assumed to be in
    /// nanoGPT's format.
    pub(super) fn of(start: &[u8]) -> Self {
        let magic = start.first_chunk().map(|&bytes| i32::from_le_bytes(bytes));
        let mut all = Self::value_variants().iter().copied();
        all.find(|format| format.magic().map(|(number, _)| number) == magic).unwrap_or(Self::NanoGpt)
    }

    /// Appends `tokens` to `bytes`. Each id must fit into [`Self::width`] bytes.
    pub(super) fn encode(self, tokens: &[u32], bytes: &mut Vec<u8>) {
        match self.width() {
            2 => bytes.extend(tokens.iter().flat_map(|&token| (token as u16).to_le_bytes())),
            _ => bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes())),
        }
    }

    pub(super) fn decode(self, bytes: &[u8], tokens: &mut Vec<u32>) {
        match self.width() {
            2 => tokens.extend(bytes.as_chunks().0.iter().map(|&b| u32::from(u16::from_le_bytes(b)))),
            _ => tokens.extend(bytes.as_chunks().0.iter().map(|&b| u32::from_le_bytes(b))),
        }
    }
}
