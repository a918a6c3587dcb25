//! Reads and changes components of a tokenizer, such as those that add a space or tokens to a text.

use candle_sage::Result;
use serde::Deserialize;
use serde_json::Value;
use tokenizers::{NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, Tokenizer as Inner};

use super::Tokenizer;
use crate::{during, unpanicked};

/// A part of Qwen2's regular expression that the expressions of GPT-2 and Llama 3 do not contain. It splits text at
/// each digit.
const QWEN2: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+";

impl Tokenizer {
    /// The ids of a text. The spelling of a special token, such as `<|im_start|>`, becomes the id of that token.
    ///
    /// # Errors
    /// When the `tokenizers` library fails.
    pub fn encode_with_special_tokens(&self, text: &str) -> Result<Vec<u32>> {
        let mut inner = self.inner.clone();
        inner.set_encode_special_tokens(false);
        let encoded = unpanicked(|| inner.encode_fast(text, false)).map_err(during("cannot tokenize"))?;
        Ok(encoded.get_ids().to_vec())
    }

    /// Whether a text contains the spelling of a special token.
    pub fn spells_special_token(&self, text: &str) -> bool {
        let added = self.inner.get_added_tokens_decoder();
        added.values().any(|token| token.special && text.contains(&token.content))
    }

    /// Whether the tokenizer splits text like Qwen2's pre-tokenizer.
    ///
    /// # Errors
    /// When the pre-tokenizer cannot be serialized.
    pub fn splits_as_qwen2(&self) -> Result<bool> {
        let splits = serde_json::to_string(&self.inner.get_pre_tokenizer());
        Ok(splits.map_err(during("cannot read the tokenizer"))?.contains(&QWEN2.replace('\\', r"\\")))
    }
}

/// How a tokenizer encodes text that is not in its vocabulary.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Unknown {
    unk_token: Option<String>,
    unk_id: Option<u32>,
}

impl Unknown {
    pub(super) fn id(self, inner: &Inner) -> Option<u32> {
        self.unk_id.or_else(|| inner.token_to_id(&self.unk_token?))
    }
}

/// Reads [`Unknown`] from the text of a `tokenizer.json`.
pub(super) fn unknown(json: &str) -> Option<Unknown> {
    #[derive(Deserialize)]
    struct Whole {
        model: Unknown,
    }
    serde_json::from_str(json).ok().map(|whole: Whole| whole.model)
}

/// The tokenizer without the space that it puts in front of every text; `None` if it does not add a space. Text that
/// starts in the middle of a document must not get such a space.
pub(super) fn without_prefix_space(inner: &Inner) -> std::result::Result<Option<Inner>, String> {
    let failed = |error: serde_json::Error| error.to_string();
    let normalizer = inner.get_normalizer().map(serde_json::to_value).transpose().map_err(failed)?;
    let pre_tokenizer = inner.get_pre_tokenizer().map(serde_json::to_value).transpose().map_err(failed)?;
    let (mut without, mut splits) = (normalizer.clone(), pre_tokenizer.clone());
    if without.as_mut().is_some_and(|part| !keep_without_prefix(part)) {
        without = None;
    }
    splits.as_mut().map(keep_without_prefix);
    if (&without, &splits) == (&normalizer, &pre_tokenizer) {
        return Ok(None);
    }
    let mut inner = inner.clone();
    let normalizer: Option<NormalizerWrapper> =
        without.map(serde_json::from_value).transpose().map_err(failed)?;
    inner.with_normalizer(normalizer).map_err(|error| error.to_string())?;
    let splits: Option<PreTokenizerWrapper> =
        splits.map(serde_json::from_value).transpose().map_err(failed)?;
    inner.with_pre_tokenizer(splits);
    Ok(Some(inner))
}

/// Disables the prefix space in a component of a tokenizer. Returns `false` if the component only adds this space,
/// and must be removed.
fn keep_without_prefix(part: &mut Value) -> bool {
    match part["type"].as_str() {
        Some("Prepend") => return false,
        Some("Metaspace") => {
            part["prepend_scheme"] = "never".into();
            part["add_prefix_space"] = false.into();
        }
        Some("ByteLevel") => part["add_prefix_space"] = false.into(),
        Some("Sequence") => {
            if let Some(parts) = part.get_mut("normalizers").and_then(Value::as_array_mut) {
                parts.retain_mut(keep_without_prefix);
            }
            // Only the first pre-tokenizer is changed. Later ones put a space before each word, and must keep it.
            if let Some(first) = part.get_mut("pretokenizers").and_then(|parts| parts.get_mut(0)) {
                keep_without_prefix(first);
            }
        }
        _ => {}
    }
    true
}

/// The tokenizer without the post-processing steps that add tokens, such as a token at the beginning of every text.
pub(super) fn without_added_tokens(inner: &Inner) -> Result<Inner> {
    let failed = || during::<serde_json::Error>("cannot write the tokenizer without its added tokens");
    let mut inner = inner.clone();
    if let Some(processor) = inner.get_post_processor() {
        let mut processor = serde_json::to_value(processor).map_err(failed())?;
        let kept = keep_without_tokens(&mut processor);
        let kept: Option<PostProcessorWrapper> =
            kept.then(|| serde_json::from_value(processor)).transpose().map_err(failed())?;
        inner.with_post_processor(kept);
    }
    Ok(inner)
}

/// Removes the steps of a post-processor that add tokens. Returns whether any step is left.
fn keep_without_tokens(processor: &mut Value) -> bool {
    match processor["type"].as_str() {
        Some("ByteLevel") => true,
        Some("Sequence") => processor["processors"].as_array_mut().is_some_and(|parts| {
            parts.retain_mut(keep_without_tokens);
            !parts.is_empty()
        }),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn tokenizer(pre_tokenizer: &Value) -> Inner {
        let vocab = json!({"\u{2581}a": 0, "a": 1, "b": 2, "<unk>": 3});
        let model = json!({"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"});
        json!({"version": "1.0", "added_tokens": [], "model": model, "pre_tokenizer": pre_tokenizer})
            .to_string()
            .parse()
            .expect("a tokenizer")
    }

    /// `words` is as in T5's tokenizer: it splits at spaces, then `Metaspace` adds a mark to each word.
    #[test]
    fn only_a_space_before_the_whole_text_is_removed() {
        let mark = json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true});
        let words = json!({"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, &mark]});
        assert!(without_prefix_space(&tokenizer(&words)).expect("components").is_none());
        let whole = json!({"type": "Sequence", "pretokenizers": [&mark, {"type": "Digits", "individual_digits": true}]});
        for with_prefix in [mark, whole] {
            let inner = tokenizer(&with_prefix);
            let without =
                without_prefix_space(&inner).expect("components").expect("a tokenizer without prefix");
            let tokens = |inner: &Inner| inner.encode("a", false).expect("tokens").get_tokens().to_vec();
            assert_eq!((tokens(&inner), tokens(&without)), (vec!["\u{2581}a".into()], vec!["a".to_owned()]));
        }
    }
}
