//! The token that ends a document.

use std::path::Path;

use serde_json::Value;
use tokenizers::Tokenizer as Inner;

use super::{END_OF_TEXT, TOKENIZER_CONFIG};

/// End-of-text tokens of known tokenizers: GPT-2's and Qwen's, Llama 3's, Llama 2's, Gemma's, ChatML's.
const KNOWN: [&str; 5] = [END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>"];

/// The id of the token that was named, or of a known one: special tokens first, because some vocabularies have an entry of
/// such a name for another purpose (Gemma's `</s>` is a tag of HTML).
pub(super) fn find(inner: &Inner, named: Option<&str>) -> Result<u32, String> {
    let special = || {
        let added = inner.get_added_tokens_decoder();
        let mut special: Vec<(u32, String)> = added
            .into_iter()
            .filter(|(_, token)| token.special)
            .map(|(id, token)| (id, token.content))
            .collect();
        special.sort();
        special
    };
    if let Some(name) = named {
        return inner.token_to_id(name).ok_or_else(|| {
            let names: Vec<String> = special().into_iter().take(8).map(|(_, name)| name).collect();
            format!(
                "it has no token `{name}` to end a document with; its special tokens: {}",
                names.join(", ")
            )
        });
    }
    let special = special();
    let of_special = |end: &&str| special.iter().find(|(_, name)| name == end).map(|(id, _)| *id);
    let found =
        KNOWN.iter().find_map(of_special).or_else(|| KNOWN.iter().find_map(|end| inner.token_to_id(end)));
    found.ok_or_else(|| format!("no token that ends a text: {}", KNOWN.join(", ")))
}

/// The `eos_token` of the `tokenizer_config.json` beside a `tokenizer.json`.
pub(super) fn beside(tokenizer: &Path) -> Result<Option<String>, String> {
    let config = tokenizer.with_file_name(TOKENIZER_CONFIG);
    // The file belongs to a tokenizer of the usual name only.
    if tokenizer.file_name().is_none_or(|name| name != "tokenizer.json") || !config.exists() {
        return Ok(None);
    }
    let failed = |error: String| format!("{TOKENIZER_CONFIG} beside it: {error}");
    let text = std::fs::read(&config).map_err(|error| failed(error.to_string()))?;
    let config: Value = serde_json::from_slice(&text).map_err(|error| failed(error.to_string()))?;
    // Older versions of transformers write the token as an object.
    let token = &config["eos_token"];
    Ok(token.as_str().or_else(|| token["content"].as_str()).map(str::to_owned))
}
