//! The description of a folder of prepared shards, `dataset.json`.

use std::path::{Path, PathBuf};

use candle_sage::Result;
use serde::{Deserialize, Serialize};

use super::shard::Format;
use super::split::Part;
use crate::during;

/// The name of the file, in the folder of the shards, that contains a [`Prepared`].
pub(super) const LIST: &str = "dataset.json";

/// The contents of `dataset.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Prepared {
    /// The inputs as typed.
    pub inputs: Vec<String>,
    /// [`Tokenizer::hash`](crate::data::Tokenizer::hash).
    pub tokenizer: String,
    /// Entries of the tokenizer.
    pub vocab_size: usize,
    /// The token after each document.
    pub end_of_text: u32,
    /// The format of the shards.
    pub format: Format,
    /// The training data.
    pub train: Part,
    /// The validation data.
    pub validation: Part,
    /// Number of unknown tokens, which replace text that the vocabulary cannot represent.
    #[serde(default)]
    pub unknown_tokens: u64,
    /// Every file that was read, in order. Empty if an older sage-train wrote `dataset.json`.
    #[serde(default)]
    pub files: Vec<FileRead>,
}

/// A file that was read.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRead {
    /// The path of the file.
    pub path: PathBuf,
    /// The size of the file.
    pub bytes: u64,
    /// Documents with text.
    pub documents: u64,
    /// Bytes of text of these documents.
    pub text_bytes: u64,
    /// Number of documents that could not be read and were left out.
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
    /// When the file cannot be read, or is not a valid description.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(LIST);
        let what = || format!("cannot read {}", path.display());
        serde_json::from_slice(&std::fs::read(&path).map_err(during(what()))?).map_err(during(what()))
    }
}
