//! Tokenizers: any `tokenizer.json`, or a byte-level BPE that is trained on the data and cached. `pieces` splits long
//! texts, `parts` changes components of a tokenizer, `end_of_text` finds the token that ends a document.

mod end_of_text;
mod parts;
mod pieces;

use std::hash::Hasher;
use std::path::{Path, PathBuf};

use candle_sage::{Error, ErrorKind, Result};
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer as Inner};

pub use end_of_text::Boundaries;
pub(crate) use end_of_text::token_ids;

use super::hub::Hub;
use super::{DataConfig, TOKENIZER_CONFIG};
use crate::checks::in_range;
use crate::{AnyError, during, hex, partial, unpanicked, writing};
pub(super) use pieces::{PIECE, piece_end, pieces};

/// The end-of-text token of tokenizers that this program trains.
const END_OF_TEXT: &str = "<|endoftext|>";

/// Fewest entries of a byte-level BPE: the bytes, the end-of-text token, and one merge.
pub(crate) const LEAST_ENTRIES: usize = 258;
/// Bytes of text from which merges are learned; more text changes little.
pub(super) const TRAINING_BYTES: usize = 16 << 20;

/// Converts text to ids and back. Byte-level tokenizers have an id for every byte, so that they encode any text.
#[derive(Debug)]
pub struct Tokenizer {
    inner: Inner,
    /// The tokenizer for text that starts in the middle of a document: it adds no space in front. `None` if `inner`
    /// adds no space either.
    continuing: Option<Inner>,
    end_of_text: u32,
    /// The token for text that is not in the vocabulary, such as `<unk>`.
    unknown: Option<u32>,
    /// SHA-256 of the tokenizer's JSON.
    hash: String,
    /// Number of bytes of text that each id stands for.
    bytes: Vec<u64>,
    /// Where [`Tokenizer::cache`] saves the tokenizer; `None` if it was not newly trained.
    uncached: Option<PathBuf>,
}

impl Tokenizer {
    /// A tokenizer that is trained on the documents, or loaded from the cache if it was trained on the same text
    /// before.
    ///
    /// # Errors
    /// When the `tokenizers` library fails.
    pub fn trained_on(documents: &[&String], config: &DataConfig, say: &dyn Fn(&str)) -> Result<Self> {
        in_range("vocab-size", config.vocab_size, LEAST_ENTRIES, 1 << 24)?;
        let path = cached(documents, config);
        if path.exists() {
            match Self::load(&path) {
                Ok(tokenizer) if tokenizer.vocab_size() <= config.vocab_size => return Ok(tokenizer),
                Ok(_) => say("the cached tokenizer has too many entries and is trained again"),
                Err(error) => say(&format!("the cached tokenizer is damaged and is trained again: {error}")),
            }
        }
        say(&format!("training a tokenizer of {} entries", config.vocab_size));
        let tokenizer = Self {
            uncached: Some(path),
            ..Self::train(documents.iter().map(|d| d.as_str()), config.vocab_size)?
        };
        if tokenizer.vocab_size() < config.vocab_size {
            say(&format!(
                "the text is too short for more than {} entries; the other entries of --vocab-size are unused",
                tokenizer.vocab_size()
            ));
        }
        Ok(tokenizer)
    }

    /// Writes the tokenizer to the cache, if [`Self::trained_on`] has trained it instead of loading it.
    ///
    /// # Errors
    /// When the cache cannot be written.
    pub fn cache(&self) -> Result<()> {
        let Some(path) = &self.uncached else { return Ok(()) };
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(writing(folder))?;
        }
        partial::file(path, |partial| self.save(partial))
    }

    /// Trains a byte-level BPE on the first 16 MiB of the documents.
    ///
    /// # Errors
    /// When the `tokenizers` library fails.
    pub fn train<'a>(documents: impl Iterator<Item = &'a str> + Send, vocab_size: usize) -> Result<Self> {
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
        let sample = documents.flat_map(pieces).take_while(|piece| {
            held += piece.len();
            held <= TRAINING_BYTES + piece.len()
        });
        inner.train(&mut trainer, sample).map_err(during("cannot train a tokenizer"))?;
        Self::new(inner, Some(END_OF_TEXT)).map_err(during("cannot train a tokenizer"))
    }

    /// Loads a `tokenizer.json`. A `tokenizer_config.json` next to it can name the token that ends a document.
    ///
    /// # Errors
    /// When the file cannot be read, or no end-of-text token is found.
    pub fn load(path: &Path) -> Result<Self> {
        Self::load_with(path, None)
    }

    /// Like [`Tokenizer::load`], with the name of the token that ends a document (`--end-of-text`).
    ///
    /// # Errors
    /// When the file cannot be read, or has no such token.
    pub fn load_with(path: &Path, end_of_text: Option<&str>) -> Result<Self> {
        let what = || {
            let failed = during::<AnyError>(format!("cannot use the tokenizer {}", path.display()));
            move |error| failed(error).with_kind(ErrorKind::Invalid)
        };
        let hint = "a tokenizer is a tokenizer.json as written by `tokenizers`; `eos_token` in a tokenizer_config.json \
                    next to it, or --end-of-text in training, names the token that ends a document";
        let bytes = std::fs::read(path).map_err(|error| what()(error.into()).hint(hint))?;
        let load = || {
            let inner = Inner::from_bytes(&bytes).map_err(|error| error.to_string())?;
            let beside = end_of_text::from_neighbours(path, &inner)?;
            Self::new(inner, end_of_text.or(beside.as_deref()))
        };
        // The library panics on some files that are not tokenizers.
        unpanicked(load).map_err(|error| what()(error).hint(hint))
    }

    /// Loads a tokenizer by the path of its file or folder, or by the name of a model on the Hugging Face Hub.
    ///
    /// # Errors
    /// When no tokenizer is found.
    pub fn named(name: &str, end_of_text: Option<&str>) -> Result<Self> {
        let path = Path::new(name);
        if path.is_dir() {
            return Self::load_with(&path.join("tokenizer.json"), end_of_text);
        }
        if path.exists() {
            return Self::load_with(path, end_of_text);
        }
        if path.extension().is_some_and(|extension| extension == "json") {
            return Err(Error::new("the tokenizer does not exist")
                .got(name)
                .allowed("a tokenizer.json, its folder, or the name of a model on the Hugging Face Hub")
                .hint("--tokenizer gpt2 downloads GPT-2's tokenizer; without --tokenizer one is trained on the data"));
        }
        Self::load_with(&Hub::open()?.tokenizer(name)?, end_of_text)
    }

    fn new(mut inner: Inner, end_of_text: Option<&str>) -> std::result::Result<Self, String> {
        // Text that contains the spelling of the end-of-text token is encoded as text.
        inner.set_encode_special_tokens(true);
        // A `tokenizer.json` may truncate or pad texts to a fixed length.
        inner.with_truncation(None).map_err(|error| error.to_string())?;
        inner.with_padding(None);
        let entries = inner.get_vocab_size(true);
        let end_of_text = end_of_text::find(&inner, end_of_text)?;
        let most = inner.get_vocab(true).into_values().max().unwrap_or(0) as usize;
        if most >= entries {
            return Err(format!("{entries} entries, but an id {most}"));
        }
        let json = inner.to_string(false).map_err(|error| error.to_string())?;
        let byte_level = json.contains("\"ByteLevel\"");
        let special = inner.get_added_tokens_decoder();
        let bytes = |id| match (special.get(&id), inner.id_to_token(id)) {
            (Some(token), _) if token.special => 0,
            (Some(token), _) => token.content.len() as u64,
            (None, entry) => entry.map_or(0, |entry| text_bytes(&entry, byte_level)),
        };
        let mut bytes: Vec<u64> = (0..entries as u32).map(bytes).collect();
        bytes[end_of_text as usize] = 0;
        let hash = hex(&Sha256::digest(&json));
        let unknown = parts::unknown(&json).and_then(|unknown| unknown.id(&inner));
        let continuing = parts::without_prefix_space(&inner)?;
        Ok(Self { inner, continuing, end_of_text, unknown, hash, bytes, uncached: None })
    }

    /// SHA-256 of the tokenizer's contents; it does not depend on the layout of `tokenizer.json`.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Writes `tokenizer.json`.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        self.inner.save(path, false).map_err(writing(path))
    }

    /// Writes `tokenizer.json` to a folder, and next to it a file that names the token that ends a document.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn save_in(&self, folder: &Path) -> Result<()> {
        let config = serde_json::json!({ "eos_token": self.entry(self.end_of_text)? });
        let config = serde_json::to_string_pretty(&config).expect("plain values");
        partial::file(&folder.join(TOKENIZER_CONFIG), |to| std::fs::write(to, &config).map_err(writing(to)))?;
        partial::file(&folder.join("tokenizer.json"), |to| self.save(to))
    }

    /// Writes `tokenizer.json` without the post-processing steps that add tokens, because training adds no such tokens.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save_as_trained(&self, path: &Path) -> Result<()> {
        parts::without_added_tokens(&self.inner)?.save(path, false).map_err(writing(path))
    }

    /// Checks that a file contains this tokenizer.
    ///
    /// # Errors
    /// When the file contains another tokenizer, or cannot be read.
    pub fn check_same(&self, path: &Path) -> Result<()> {
        if Self::load(path)?.hash == self.hash {
            return Ok(());
        }
        Err(Error::new("the tokenizer of the data differs from the run's tokenizer")
            .got(format!("data whose tokenizer is not {}", path.display()))
            .allowed("the data and the tokenizer of the run")
            .hint("check whether files of the data, or the tokenizer, were changed"))
    }

    /// The ids of a text, without an end-of-text token.
    ///
    /// # Errors
    /// When the `tokenizers` library fails.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.encode_all(&[(text, false)])?.swap_remove(0))
    }

    /// The ids of several texts, encoded in pieces on all threads, so that several threads share a long text. The flag
    /// of each text tells whether the text starts in the middle of a document.
    ///
    /// # Errors
    /// When the `tokenizers` library fails.
    pub fn encode_all(&self, texts: &[(&str, bool)]) -> Result<Vec<Vec<u32>>> {
        let cut: Vec<(usize, &str, bool)> = texts
            .iter()
            .enumerate()
            .flat_map(|(n, (text, goes_on))| {
                pieces(text).enumerate().map(move |(at, piece)| (n, piece, *goes_on || at > 0))
            })
            .collect();
        let encode = |(_, piece, goes_on): &(usize, &str, bool)| {
            let inner = self.continuing.as_ref().filter(|_| *goes_on).unwrap_or(&self.inner);
            let encode = || inner.encode_fast(*piece, false);
            unpanicked(encode).map_err(during("cannot tokenize"))
        };
        let encoded = cut.par_iter().map(encode).collect::<Result<Vec<_>>>()?;
        let mut all = vec![Vec::new(); texts.len()];
        for ((n, ..), encoded) in cut.into_iter().zip(encoded) {
            all[n].extend(encoded.get_ids());
        }
        Ok(all)
    }

    /// The text of ids.
    ///
    /// # Errors
    /// When an id is not in the vocabulary.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        let decode = || self.inner.decode(ids, true);
        unpanicked(decode).map_err(during("cannot decode tokens"))
    }

    /// Bytes of text that an id stands for; 0 for special tokens, such as the end-of-text token.
    pub fn bytes(&self, id: u32) -> u64 {
        self.bytes[id as usize]
    }

    /// Bytes of text that ids stand for.
    pub fn bytes_of(&self, ids: &[u32]) -> u64 {
        ids.iter().map(|&id| self.bytes(id)).sum()
    }

    /// How many ids stand for text that is not in the vocabulary.
    pub fn unknown_in(&self, ids: &[u32]) -> u64 {
        ids.iter().filter(|&&id| Some(id) == self.unknown).count() as u64
    }

    /// Encodes and decodes a text. Returns a message about the changes, or `None` if the text is unchanged.
    ///
    /// # Errors
    /// When the `tokenizers` library fails.
    pub fn changes(&self, text: &str) -> Result<Option<String>> {
        let ids = self.encode(text)?;
        let unknown = match self.unknown_in(&ids) {
            0 => String::new(),
            n => format!(", {n} of {} tokens are `{}`", ids.len(), self.entry(self.unknown.unwrap_or(0))?),
        };
        let held = text.len() as f64 / 1e6;
        Ok((self.decode(&ids)? != text).then(|| {
            format!(
                "the tokenizer changes text (decoding does not reproduce the first {held:.1} MB{unknown}): bits per \
                 byte refer to the original text"
            )
        }))
    }

    /// Number of entries.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// The vocabulary's string for a token id, such as `Ġthe`.
    ///
    /// # Errors
    /// When the vocabulary has no such id.
    pub fn entry(&self, id: u32) -> Result<String> {
        self.inner.id_to_token(id).ok_or_else(|| Error::new("no token has this id").got(id))
    }

    /// The token that ends a document.
    pub fn end_of_text(&self) -> u32 {
        self.end_of_text
    }
}

/// Bytes of text that an entry stands for. In a byte-level vocabulary each character is one byte; in
/// SentencePiece's, `▁` is a space, and `<0xAB>` a byte.
fn text_bytes(entry: &str, byte_level: bool) -> u64 {
    if byte_level {
        entry.chars().count() as u64
    } else if entry.len() == 6 && entry.starts_with("<0x") && entry.ends_with('>') {
        1
    } else {
        entry.replace('▁', " ").len() as u64
    }
}

/// Part of the name of a cached tokenizer. Increase it if a change of the code makes [`Tokenizer::train`] produce
/// another tokenizer from the same documents.
const VERSION: u32 = 2;

/// Path in the cache for the tokenizer that is trained on the documents. The file's name contains their hash.
fn cached(documents: &[&String], config: &DataConfig) -> PathBuf {
    // SipHash with fixed keys: its values have not changed since Rust 1.13.
    #[allow(deprecated)]
    let mut hasher = std::hash::SipHasher::new();
    for document in documents {
        hasher.write(document.as_bytes());
        hasher.write_u8(0xff);
    }
    config.cache().join(format!("bpe-v{VERSION}-{}-{:016x}.json", config.vocab_size, hasher.finish()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::corpus::Corpus;

    #[test]
    fn encodes_any_text_and_back() -> Result<()> {
        let documents = Corpus::new(0).documents(200_000);
        let tokenizer = Tokenizer::train(documents.iter().map(String::as_str), 600)?;
        assert_eq!(tokenizer.vocab_size(), 600);
        for text in [
            "",
            " ",
            "Amara lived in Dunvale.\n",
            "a <|endoftext|> b",
            "日本語 \u{0} \t\r\n ünïcödé 🦀",
            documents[3].as_str(),
        ] {
            let ids = tokenizer.encode(text)?;
            assert_eq!(tokenizer.decode(&ids)?, text);
            assert!(!ids.contains(&tokenizer.end_of_text()));
            assert_eq!(ids.iter().map(|&id| tokenizer.bytes(id)).sum::<u64>(), text.len() as u64, "{text}");
        }
        let ids = tokenizer.encode(&documents[0])?;
        assert!(ids.len() * 2 < documents[0].len(), "{} tokens for {} bytes", ids.len(), documents[0].len());
        Ok(())
    }

    #[test]
    fn nothing_is_cut_off_or_filled_up() -> Result<()> {
        let documents = Corpus::new(0).documents(100_000);
        let tokenizer = Tokenizer::train(documents.iter().map(String::as_str), 300)?;
        let mut inner = tokenizer.inner.clone();
        let truncation = tokenizers::TruncationParams { max_length: 16, ..Default::default() };
        inner.with_truncation(Some(truncation)).expect("a length");
        let padding = tokenizers::PaddingStrategy::Fixed(5000);
        inner.with_padding(Some(tokenizers::PaddingParams { strategy: padding, ..Default::default() }));
        let cutting = Tokenizer::new(inner, None).expect("a tokenizer");
        assert_eq!(cutting.encode(&documents[0])?, tokenizer.encode(&documents[0])?);
        Ok(())
    }

    #[test]
    fn the_cache_is_used_and_survives_damage() -> Result<()> {
        let folder = tempfile::tempdir().expect("a folder");
        let documents = Corpus::new(2).documents(100_000);
        let documents: Vec<&String> = documents.iter().collect();
        let mut settings = crate::settings::Settings::default();
        settings.run.out = Some(folder.path().into());
        let config = DataConfig { vocab_size: 400, ..crate::config::Config::resolve(settings)?.data };
        let said = std::cell::RefCell::new(Vec::new());
        let say = |line: &str| said.borrow_mut().push(line.to_owned());
        let get = || Tokenizer::trained_on(&documents, &config, &say)?.encode(documents[0]);
        Tokenizer::trained_on(&documents, &config, &say)?.cache()?;
        let (first, told) = (get()?, said.borrow().len());
        assert_eq!((first.clone(), told), (get()?, 1), "{:?}", said.borrow());
        std::fs::write(cached(&documents, &config), "{").expect("a file");
        assert_eq!(first, get()?);
        assert!(said.borrow().iter().any(|line| line.contains("damaged")), "{:?}", said.borrow());
        Tokenizer::trained_on(&documents, &config, &say)?.cache()?;
        assert!(Tokenizer::load(&cached(&documents, &config)).is_ok());
        Ok(())
    }

    #[test]
    fn training_is_deterministic() -> Result<()> {
        let documents = Corpus::new(1).documents(300_000);
        let encode = || Tokenizer::train(documents.iter().map(String::as_str), 700)?.encode(&documents[0]);
        assert_eq!(encode()?, encode()?);
        Ok(())
    }
}
