//! Finds the token that ends a document.

use std::path::Path;

use serde_json::Value;
use tokenizers::Tokenizer as Inner;

use super::{END_OF_TEXT, Tokenizer};
use crate::data::TOKENIZER_CONFIG;
use crate::read_small;

/// End-of-text tokens of known tokenizers: GPT-2's and Qwen's, Llama 3's, Llama 2's, Gemma's, ChatML's.
const KNOWN: [&str; 5] = [END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>"];

/// Largest allowed size of `tokenizer_config.json` and of `config.json`, in bytes. They may contain chat templates and
/// added tokens.
const MOST: u64 = 16 << 20;

/// The id of the token `named`, or else of the first known end-of-text token. Special tokens are searched first,
/// because an ordinary token may have a name from `KNOWN`: Gemma's `</s>` is an HTML tag.
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
            format!("it has no token `{name}`; its special tokens: {}", names.join(", "))
        });
    }
    let special = special();
    let of_special = |end: &&str| special.iter().find(|(_, name)| name == end).map(|(id, _)| *id);
    let found =
        KNOWN.iter().find_map(of_special).or_else(|| KNOWN.iter().find_map(|end| inner.token_to_id(end)));
    found.ok_or_else(|| format!("it has none of the known end-of-text tokens: {}", KNOWN.join(", ")))
}

/// The tokens around a document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Boundaries {
    /// The token in front of a document.
    pub begin: u32,
    /// Any one of these tokens ends a document.
    pub ends: Vec<u32>,
}

impl Tokenizer {
    /// The tokens around a document in training: the end-of-text token, before and after.
    pub fn boundaries(&self) -> Boundaries {
        Boundaries { begin: self.end_of_text(), ends: vec![self.end_of_text()] }
    }
}

/// The ids in the field `key` of a model's `config.json` or `generation_config.json`. The field is a number, a list or
/// null. A negative number means that no token is meant.
pub(crate) fn token_ids(config: &Value, key: &str) -> Result<Vec<u32>, String> {
    let field = &config[key];
    let id = |value: &Value| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| format!("`{key}`: {field}"))
    };
    let ids = match field {
        Value::Null => &[],
        Value::Array(ids) => ids.as_slice(),
        one => std::slice::from_ref(one),
    };
    ids.iter().filter(|value| value.as_i64().is_none_or(|id| id >= 0)).map(id).collect()
}

/// The end-of-text token from the files next to a `tokenizer.json`: `eos_token` in `tokenizer_config.json`, or else
/// `eos_token_id` in `config.json`.
pub(super) fn from_neighbours(tokenizer: &Path, inner: &Inner) -> Result<Option<String>, String> {
    // `tokenizer_config.json` and `config.json` describe only a file that is called `tokenizer.json`.
    if tokenizer.file_name().is_none_or(|name| name != "tokenizer.json") {
        return Ok(None);
    }
    let read = |name: &str| -> Result<Value, String> {
        let path = tokenizer.with_file_name(name);
        let failed = |error: String| format!("{name} next to it: {error}");
        match path.exists() {
            false => Ok(Value::Null),
            true => read_small(&path, MOST)
                .map_err(|error| failed(error.to_string()))
                .and_then(|text| serde_json::from_str(&text).map_err(|error| failed(error.to_string()))),
        }
    };
    let config = read(TOKENIZER_CONFIG)?;
    // Older versions of transformers write the token as an object.
    let token = &config["eos_token"];
    if let Some(name) = token.as_str().or_else(|| token["content"].as_str()) {
        return Ok(Some(name.to_owned()));
    }
    let ids = token_ids(&read("config.json")?, "eos_token_id")?;
    // For a Llama whose `eos_token_id` was not set, transformers writes 2 into `config.json`. Thus an id is used only
    // if its token is special.
    let added = inner.get_added_tokens_decoder();
    let special = ids.iter().filter_map(|id| added.get(id)).find(|token| token.special);
    Ok(special.map(|token| token.content.clone()))
}
