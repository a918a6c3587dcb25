//! The sidecar of a shard, `NAME.bin.json`: the hashes of the shard and of its tokenizer, and the lengths of its
//! documents.

use std::path::{Path, PathBuf};

use candle_sage::{Error, Result};
use serde::{Deserialize, Serialize};

use super::Format;
use crate::during;

/// The contents of a sidecar.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sidecar {
    /// The format of the shard.
    pub format: Format,
    /// Tokens in the shard.
    pub tokens: u64,
    /// SHA-256 of the whole file.
    pub sha256: String,
    /// [`crate::data::Tokenizer::hash`] of the tokenizer that made the tokens.
    pub tokenizer: String,
    /// Entries of that tokenizer.
    pub vocab_size: usize,
    /// Bytes of the original text.
    pub text_bytes: u64,
    /// Bytes of text that the tokens stand for, which differ from `text_bytes` if the tokenizer changes text. `None` in
    /// sidecars of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_bytes: Option<u64>,
    /// Number of tokens of each document. The end-of-text token counts too. The sum is `tokens`.
    pub document_tokens: Vec<u64>,
    /// Whether the last document continues in the next shard.
    pub continues: bool,
}

impl Sidecar {
    /// The path of a shard's sidecar.
    pub fn path(shard: &Path) -> PathBuf {
        let mut name = shard.as_os_str().to_owned();
        name.push(".json");
        name.into()
    }

    /// Reads a shard's sidecar; `None` without one.
    ///
    /// # Errors
    /// When the sidecar cannot be read, or contradicts itself.
    pub fn read(shard: &Path) -> Result<Option<Self>> {
        let path = Self::path(shard);
        if !path.exists() {
            return Ok(None);
        }
        let failed = || format!("cannot use {}, which describes a shard", path.display());
        let hint = "copy the shard and its .bin.json file again, or delete the .bin.json file: a shard without it is \
                    not checked";
        let text = std::fs::read(&path).map_err(during(failed())).map_err(|error| error.hint(hint))?;
        let sidecar: Self =
            serde_json::from_slice(&text).map_err(during(failed())).map_err(|error| error.hint(hint))?;
        let sum = sidecar.document_tokens.iter().try_fold(0u64, |sum, &n| sum.checked_add(n));
        let wrong = |got: String, allowed| Err(Error::new(failed()).got(got).allowed(allowed).hint(hint));
        if sum != Some(sidecar.tokens) {
            let sum = sum.map_or_else(|| "too many".into(), |sum| sum.to_string());
            let got = format!("{} tokens, and documents with {sum} tokens together", sidecar.tokens);
            return wrong(got, "document lengths whose sum is the number of tokens");
        }
        if sidecar.continues && sidecar.document_tokens.is_empty() {
            return wrong(
                "a last document that continues in the next shard, but an empty list of documents".into(),
                "a list with at least one document",
            );
        }
        Ok(Some(sidecar))
    }
}
