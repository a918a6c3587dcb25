//! What a folder of prepared shards says of itself.

use std::path::{Path, PathBuf};

use candle_sage::Result;
use serde::{Deserialize, Serialize};

use super::shard::Format;
use super::split::Part;
use crate::during;

/// What was prepared, next to the shards: a [`Prepared`].
pub(super) const LIST: &str = "dataset.json";

/// What was prepared: also `dataset.json` next to the shards.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Prepared {
    /// What was typed.
    pub inputs: Vec<String>,
    /// [`Tokenizer::hash`](crate::data::Tokenizer::hash).
    pub tokenizer: String,
    /// Its entries.
    pub vocab_size: usize,
    /// The token behind each document.
    pub end_of_text: u32,
    /// Of the shards.
    pub format: Format,
    /// To train on.
    pub train: Part,
    /// To validate on.
    pub validation: Part,
    /// Tokens that stand for text that the vocabulary does not have.
    #[serde(default)]
    pub unknown_tokens: u64,
    /// Every file that was read, in order. Empty in folders of older versions.
    #[serde(default)]
    pub files: Vec<FileRead>,
}

/// A file that was read.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRead {
    /// Where it was.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
    /// Documents with text.
    pub documents: u64,
    /// Bytes of their text.
    pub text_bytes: u64,
    /// Documents that could not be read and were left out.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub skipped: u64,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

impl Prepared {
    /// Reads `dataset.json`.
    ///
    /// # Errors
    /// When it is something else.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(LIST);
        let what = || format!("cannot read {}", path.display());
        serde_json::from_slice(&std::fs::read(&path).map_err(during(what()))?).map_err(during(what()))
    }
}
