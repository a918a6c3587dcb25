//! A byte-level BPE, trained on the data and cached.

use std::hash::Hasher;
use std::path::{Path, PathBuf};

use candle_sage::{Error, Result};
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer as Inner};

use crate::config::DataConfig;
use crate::during;

const END_OF_TEXT: &str = "<|endoftext|>";

/// Bytes that merges are learned from; more of the same text changes little.
const TRAINING_BYTES: usize = 16 << 20;

/// Text is encoded in pieces of about this size, cut at line ends.
const PIECE: usize = 64 << 10;

/// Text to ids and back. Every byte has an id of its own, so that any text can be encoded.
#[derive(Debug)]
pub struct Tokenizer {
    inner: Inner,
    end_of_text: u32,
}

impl Tokenizer {
    /// A tokenizer trained on the documents, from the cache if the same text was seen before.
    ///
    /// # Errors
    /// When the cache cannot be written.
    pub fn trained_on(documents: &[String], config: &DataConfig, say: &dyn Fn(&str)) -> Result<Self> {
        let path = cached(documents, config);
        if path.exists() {
            match Self::load(&path) {
                Ok(tokenizer) => return Ok(tokenizer),
                Err(error) => say(&format!("the cached tokenizer is damaged and is trained again: {error}")),
            }
        }
        say(&format!("training a tokenizer of {} entries", config.vocab_size));
        let tokenizer = Self::train(documents, config.vocab_size)?;
        std::fs::create_dir_all(&config.cache)
            .map_err(during::<std::io::Error>(format!("cannot write to {}", config.cache.display())))?;
        // Under another name first: a reader never sees half a file.
        let partial = path.with_extension(format!("{}.partial", std::process::id()));
        tokenizer.save(&partial)?;
        std::fs::rename(&partial, &path)
            .map_err(during::<std::io::Error>(format!("cannot write {}", path.display())))?;
        Ok(tokenizer)
    }

    fn train(documents: &[String], vocab_size: usize) -> Result<Self> {
        let mut inner = Inner::new(BPE::default());
        inner.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
        inner.with_decoder(Some(ByteLevel::default()));
        let mut trainer = TrainerWrapper::BpeTrainer(
            BpeTrainer::builder()
                .show_progress(false)
                .vocab_size(vocab_size)
                .min_frequency(2)
                .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
                .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
                .build(),
        );
        let mut held = 0;
        let sample = documents.iter().flat_map(|d| pieces(d)).take_while(|piece| {
            held += piece.len();
            held <= TRAINING_BYTES + piece.len()
        });
        inner.train(&mut trainer, sample).map_err(during("cannot train a tokenizer"))?;
        Self::new(inner)
    }

    fn load(path: &Path) -> Result<Self> {
        Self::new(Inner::from_file(path).map_err(during(format!("cannot read {}", path.display())))?)
    }

    fn new(inner: Inner) -> Result<Self> {
        let end_of_text = inner.token_to_id(END_OF_TEXT).ok_or_else(|| {
            Error::new("the tokenizer has no end-of-text token").allowed(format!("an entry {END_OF_TEXT}"))
        })?;
        Ok(Self { inner, end_of_text })
    }

    /// Writes `tokenizer.json`.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        self.inner.save(path, false).map_err(during(format!("cannot write {}", path.display())))
    }

    /// The ids of a text, without an end-of-text token.
    ///
    /// # Errors
    /// When the library fails.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        for piece in pieces(text) {
            ids.extend(self.inner.encode_fast(piece, false).map_err(during("cannot tokenize"))?.get_ids());
        }
        Ok(ids)
    }

    /// The text of ids.
    ///
    /// # Errors
    /// When an id is not in the vocabulary.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.inner.decode(ids, true).map_err(during("cannot turn tokens into text"))
    }

    /// Number of entries.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// The token between documents.
    pub fn end_of_text(&self) -> u32 {
        self.end_of_text
    }
}

/// Where the tokenizer of these documents is kept: its name is a hash of what it is made from.
fn cached(documents: &[String], config: &DataConfig) -> PathBuf {
    // SipHash with fixed keys; its values have not changed since Rust 1.13.
    #[allow(deprecated)]
    let mut hasher = std::hash::SipHasher::new();
    for document in documents {
        hasher.write(document.as_bytes());
        hasher.write_u8(0xff);
    }
    config.cache.join(format!("bpe-{}-{:016x}.json", config.vocab_size, hasher.finish()))
}

/// A text in pieces that end at line ends, or where a line is longer than a piece, at characters.
fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let mut end = rest.len().min(PIECE);
        while !rest.is_char_boundary(end) {
            end -= 1;
        }
        if end < rest.len() {
            end = rest[..end].rfind('\n').map_or(end, |line| line + 1);
        }
        let (piece, after) = rest.split_at(end);
        rest = after;
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::corpus::Corpus;

    #[test]
    fn pieces_make_up_the_text() {
        for text in ["", "a", &"line\n".repeat(40_000), &"é".repeat(70_000), &"x".repeat(200_000)] {
            assert_eq!(pieces(text).collect::<String>(), text);
            assert!(pieces(text).all(|piece| !piece.is_empty() && piece.len() <= PIECE));
        }
    }

    #[test]
    fn encodes_any_text_and_back() -> Result<()> {
        let documents = Corpus::new(0).documents(200_000);
        let tokenizer = Tokenizer::train(&documents, 600)?;
        assert_eq!(tokenizer.vocab_size(), 600);
        for text in
            ["", " ", "Amara lived in Dunvale.\n", "日本語 \u{0} \t\r\n ünïcödé 🦀", documents[3].as_str()]
        {
            assert_eq!(tokenizer.decode(&tokenizer.encode(text)?)?, text);
        }
        let ids = tokenizer.encode(&documents[0])?;
        assert!(ids.len() * 2 < documents[0].len(), "{} tokens for {} bytes", ids.len(), documents[0].len());
        Ok(())
    }

    #[test]
    fn training_is_deterministic() -> Result<()> {
        let documents = Corpus::new(1).documents(300_000);
        let encode = || Tokenizer::train(&documents, 700)?.encode(&documents[0]);
        assert_eq!(encode()?, encode()?);
        Ok(())
    }
}
