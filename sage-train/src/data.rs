//! Text to batches. `source` finds files, `reader` makes documents of them, `tokenizer` ids, `shard` keeps ids in
//! files, `tokens` are a list of them, `mixture` several lists, `batches` the order, `feed` has them ready. `prepare`
//! is the way from text to shards (`inputs` the files of text, `split` the shards of a part, `progress` how far it came),
//! `hub` from a name to files; `check` and `verify` compare shards with what is written of them, before a run and
//! beside it.

mod batches;
pub mod check;
mod config;
pub mod corpus;
mod feed;
pub mod hub;
mod inputs;
mod mixture;
pub mod prepare;
mod progress;
pub mod reader;
pub mod recall;
pub mod shard;
pub mod source;
mod split;
mod tokenizer;
mod tokens;
mod verify;

pub use batches::{Batch, Batches, Cut, Sequences};
pub use config::DataConfig;
pub use feed::Feed;
pub use mixture::Mixture;
pub use tokenizer::Tokenizer;
pub use tokens::Tokens;
pub use verify::Verification;

use std::collections::BTreeSet;
use std::path::Path;

use candle_sage::{Error, Result};
use sha2::{Digest, Sha256};

use crate::hex;
use crate::settings::{Settings, SourceSetting};
use corpus::Corpus;
use shard::Shard;
use source::{PassedOver, ShardFiles, Source};
use tokens::check_ids;

/// Everything a run reads: tokens to train on, tokens to validate on, and their tokenizer.
#[derive(Debug)]
pub struct Dataset {
    /// Tokens to train on.
    pub train: Mixture,
    /// Tokens to validate on.
    pub validation: Mixture,
    /// Entropy of single tokens over the data, in nats: what a model that knows frequencies only reaches. Of long data
    /// the first [`COUNTED`] tokens of each source count.
    pub unigram_entropy: f64,
    /// What it was made of, for people.
    pub summary: String,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
}

/// Tokens of a source that are counted.
pub const COUNTED: u64 = 1 << 24;

/// The documents of a source, or its shards.
enum Opened {
    Documents(Vec<String>),
    Shards(ShardFiles),
}

impl Dataset {
    /// Finds, reads, splits and tokenizes the data; shards are opened and checked.
    ///
    /// # Errors
    /// When the data cannot be read, or is too short for the context.
    pub fn load(config: &DataConfig, say: &dyn Fn(&str)) -> Result<Self> {
        let data = Self::unchecked(config, say)?;
        let check = |tokens: &Tokens| batches::check("training", tokens.len(), config.context);
        data.train.sources().try_for_each(check)?;
        data.for_validation(config)
    }

    /// As [`Dataset::load`]; there may be nothing to train on.
    ///
    /// # Errors
    /// As [`Dataset::load`].
    pub fn load_to_validate(config: &DataConfig, say: &dyn Fn(&str)) -> Result<Self> {
        Self::unchecked(config, say)?.for_validation(config)
    }

    fn for_validation(self, config: &DataConfig) -> Result<Self> {
        let check = |tokens: &Tokens| batches::check("validation", tokens.len(), config.context);
        self.validation.sources().try_for_each(check)?;
        self.tokenizer.cache()?;
        Ok(self)
    }

    fn unchecked(config: &DataConfig, say: &dyn Fn(&str)) -> Result<Self> {
        let opened = open(config, say)?;
        let tokenizer = tokenizer(&opened, config, say)?;
        if tokenizer.vocab_size() > config.vocab_size {
            return Err(Error::new("the tokenizer has more entries than the model")
                .got(format!("{} entries", tokenizer.vocab_size()))
                .allowed(format!("up to {}", config.vocab_size))
                .hint(format!("--vocab-size {}", tokenizer.vocab_size())));
        }
        let (found, rows) = (tokenizer.vocab_size(), config.vocab_size);
        if rows > 2 * found {
            say(&format!(
                "the tokenizer has {found} entries, the model's embedding {rows}: --vocab-size {found} is enough"
            ));
        }
        let (mut train, mut validation) = (Vec::new(), Vec::new());
        let (mut bytes, mut documents) = (0, 0);
        for (source, weight) in opened.iter().zip(config.weights()) {
            let (of_train, of_validation) = match source {
                Opened::Documents(text) => {
                    let held = text.iter().map(|d| d.len() as u64).sum::<u64>();
                    say(&format!("tokenizing {:.1} MB", held as f64 / 1e6));
                    (bytes, documents) = (bytes + held, documents + text.len() as u64);
                    let (train, validation) = split(text, config.val_fraction);
                    (encode(&tokenizer, &train)?.into(), encode(&tokenizer, &validation)?.into())
                }
                Opened::Shards(files) => {
                    let mut train = shards(&files.train, &tokenizer)?;
                    let mut validation = shards(&files.validation, &tokenizer)?;
                    for sidecar in train.iter_mut().chain(&mut validation).filter_map(|s| s.sidecar.as_mut())
                    {
                        let ended = sidecar.document_tokens.len() as u64 - u64::from(sidecar.continues);
                        bytes = bytes.saturating_add(sidecar.text_bytes);
                        documents = documents.saturating_add(ended);
                        // It was checked and counted, and may be long.
                        sidecar.document_tokens = Vec::new();
                    }
                    split_tokens(train.into(), validation.into(), config.val_fraction)
                }
            };
            train.push((of_train, weight));
            validation.push((of_validation, weight));
        }
        let (train, validation) = (Mixture::new(train), Mixture::new(validation));
        let known = |n: u64, what: String| if n > 0 { what } else { String::new() };
        Ok(Self {
            unigram_entropy: entropy(train.sources().chain(validation.sources()), &tokenizer)?,
            summary: format!(
                "{}{}{} training and {} validation tokens",
                known(documents, format!("{documents} documents, ")),
                known(bytes, format!("{:.1} MB, ", bytes as f64 / 1e6)),
                crate::quantity::grouped(train.len()),
                crate::quantity::grouped(validation.len()),
            ),
            train,
            validation,
            tokenizer,
        })
    }

    /// A hash by which other data is told from this: of the tokenizer, of all tokens in memory, and of each shard what
    /// [`Shard::fingerprint`] gives.
    ///
    /// # Errors
    /// When a shard cannot be read.
    pub fn fingerprint(&self) -> Result<String> {
        let mut hash = Sha256::new();
        hash.update(self.tokenizer.hash());
        for tokens in self.train.sources().chain(self.validation.sources()) {
            hash.update(tokens.len().to_le_bytes());
            tokens.fingerprint(&mut hash)?;
        }
        Ok(hex(&hash.finalize()))
    }
}

/// Finds what each source is, and reads what is text.
fn open(config: &DataConfig, say: &dyn Fn(&str)) -> Result<Vec<Opened>> {
    if config.sources.is_empty() {
        if config.corpus_bytes == 0 {
            return Err(Error::new("an empty corpus")
                .got("--corpus-mb 0")
                .allowed("1 and up")
                .hint("--corpus-mb 8"));
        }
        return Ok(vec![Opened::Documents(Corpus::new(config.corpus_seed).documents(config.corpus_bytes))]);
    }
    let mut seen = BTreeSet::new();
    let mut open = |source: &SourceSetting| {
        let mut passed_over = PassedOver::default();
        let found = source::find_and_pass_over(&source.path, &config.out, &mut passed_over)?;
        if let Some(others) = passed_over.in_words() {
            say(&others);
        }
        source::check_once(found.files(), &mut seen)?;
        let files = match found {
            Source::Shards(files) => {
                check::check_listed(&source.path)?;
                return Ok(Opened::Shards(files));
            }
            Source::Text(files) => files,
        };
        if let Some(file) = files.iter().find(|file| is_called_validation(file)) {
            say(&format!(
                "warning: {} is trained on like the rest: of text --val-fraction is for validation, whatever its files are called",
                file.display()
            ));
        }
        let (mut documents, mut open) = (Vec::new(), String::new());
        for file in files {
            reader::read(&file, &config.text_field, &mut |piece| {
                open.push_str(&piece.text);
                if piece.ends {
                    documents.push(std::mem::take(&mut open));
                }
                Ok(())
            })?;
        }
        documents.retain(|document| !document.trim().is_empty());
        if documents.is_empty() {
            return Err(Error::new("there is no text to train on")
                .got(format!("{} holds no text", source.path.display()))
                .allowed(format!("text in {}", reader::KINDS))
                .hint("leave --data out to train on the built-in corpus"));
        }
        Ok(Opened::Documents(documents))
    };
    config.sources.iter().map(&mut open).collect()
}

/// Whether a text file's name says that it is for validation, as a shard's may.
fn is_called_validation(file: &Path) -> bool {
    let stem = file.file_stem().map(|stem| stem.to_string_lossy().to_ascii_lowercase());
    stem.is_some_and(|stem| ["val", "valid", "validation", "dev", "test"].contains(&stem.as_str()))
}

/// The tokenizer that was named, or that stands beside the shards, or one trained on the documents.
fn tokenizer(opened: &[Opened], config: &DataConfig, say: &dyn Fn(&str)) -> Result<Tokenizer> {
    if let Some(name) = &config.tokenizer {
        return Tokenizer::named(name);
    }
    let mut beside = opened.iter().filter_map(|source| match source {
        Opened::Shards(files) => Some(files),
        Opened::Documents(_) => None,
    });
    if let Some(files) = beside.next() {
        let path = files.tokenizer.as_ref().ok_or_else(|| {
            Error::new("shards of tokens without their tokenizer")
                .got(files.first().display())
                .allowed("a tokenizer.json beside them")
                .hint("--tokenizer FILE; llm.c's and nanoGPT's are GPT-2's: --tokenizer gpt2")
        })?;
        return Tokenizer::load(path);
    }
    let documents: Vec<&String> = opened
        .iter()
        .flat_map(|source| match source {
            Opened::Documents(documents) => documents.as_slice(),
            Opened::Shards(_) => &[],
        })
        .collect();
    Tokenizer::trained_on(&documents, config, say)
}

/// The tokenizer that settings name, or that stands beside their shards, before anything is read; `None` where one would
/// be trained.
///
/// # Errors
/// When it is named and cannot be used.
pub fn known_tokenizer(settings: &Settings) -> Result<Option<Tokenizer>> {
    if let Some(name) = &settings.data.tokenizer {
        return Tokenizer::named(name).map(Some);
    }
    let out = settings.run.out.as_deref().unwrap_or(std::path::Path::new("runs"));
    for source in settings.data.sources.iter().flatten() {
        // A path that leads nowhere is reported when the data is opened.
        if let Ok(Source::Shards(ShardFiles { tokenizer: Some(path), .. })) = source::find(&source.path, out)
        {
            return Tokenizer::load(&path).map(Some);
        }
    }
    Ok(None)
}

/// Opens shards that a tokenizer made.
fn shards(files: &[std::path::PathBuf], tokenizer: &Tokenizer) -> Result<Vec<Shard>> {
    let open = |path: &std::path::PathBuf| {
        let shard = Shard::open(path)?;
        shard.check_tokenizer(tokenizer)?;
        Ok(shard)
    };
    files.iter().map(open).collect()
}

/// Where no shard is for validation, the end of the others is.
fn split_tokens(train: Tokens, validation: Tokens, fraction: f64) -> (Tokens, Tokens) {
    if !validation.is_empty() {
        return (train, validation);
    }
    let cut = train.len() - (train.len() as f64 * fraction) as u64;
    (train.slice(0..cut), train.slice(cut..train.len()))
}

/// Cuts the last part of the text off for validation: whole documents where they fit, and where one
/// is too long, its end.
fn split(documents: &[String], fraction: f64) -> (Vec<&str>, Vec<&str>) {
    let bytes: usize = documents.iter().map(String::len).sum();
    let wanted = ((bytes as f64 * fraction) as usize).max(1);
    let mut train: Vec<&str> = documents.iter().map(String::as_str).collect();
    let mut validation = Vec::new();
    let mut held = 0;
    while let Some(document) = train.pop() {
        let room = wanted.saturating_sub(held);
        if room == 0 {
            train.push(document);
            break;
        }
        // A tenth too much is better than half a document.
        if train.is_empty() || document.len() > room + wanted / 10 {
            let (before, after) = document.split_at(cut(document, room));
            train.push(before);
            validation.push(after);
            break;
        }
        held += document.len();
        validation.push(document);
    }
    validation.reverse();
    (train, validation)
}

/// Where to cut the last `room` bytes off: behind a line end close by, or else at a character.
fn cut(document: &str, room: usize) -> usize {
    let mut at = document.len().saturating_sub(room);
    while !document.is_char_boundary(at) {
        at -= 1;
    }
    match document[at..].find('\n') {
        Some(line) if line < room / 10 => at + line + 1,
        _ => at,
    }
}

/// The tokens of all documents, each followed by the end-of-text token.
fn encode(tokenizer: &Tokenizer, documents: &[&str]) -> Result<Vec<u32>> {
    let parts = tokenizer.encode_all(documents.to_vec())?;
    let mut tokens = Vec::with_capacity(parts.iter().map(|p| p.len() + 1).sum());
    for part in parts {
        tokens.extend(part);
        tokens.push(tokenizer.end_of_text());
    }
    Ok(tokens)
}

/// Of the first tokens of each list; and the check that every one of them is in the vocabulary.
fn entropy<'a>(lists: impl Iterator<Item = &'a Tokens>, tokenizer: &Tokenizer) -> Result<f64> {
    let vocab = tokenizer.vocab_size();
    let mut counts = vec![0u64; vocab];
    for list in lists {
        list.each_chunk(list.len().min(COUNTED), &mut |start, tokens| {
            check_ids(tokens, vocab, "a source", start)?;
            tokens.iter().for_each(|&token| counts[token as usize] += 1);
            Ok(())
        })?;
    }
    Ok(entropy_of(&counts))
}

fn entropy_of(counts: &[u64]) -> f64 {
    let total = counts.iter().sum::<u64>() as f64;
    counts.iter().filter(|&&c| c > 0).map(|&c| c as f64 / total).map(|p| -p * p.ln()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_asked_part_is_kept_for_validation() {
        let line = "a line of text\n".repeat(100);
        let cases: Vec<Vec<String>> = vec![
            vec![line.clone()],
            vec!["é".repeat(700)],
            vec!["title\n".into(), "x".repeat(5000)],
            vec!["title\n".to_string() + &"x".repeat(5000)],
            vec!["x".repeat(100), "y".repeat(10_000)],
            vec!["x".repeat(10_000), "y".repeat(100)],
            (0..200).map(|n| n.to_string().repeat(10)).collect(),
        ];
        for documents in cases {
            for fraction in [0.05, 0.3] {
                let (train, validation) = split(&documents, fraction);
                assert_eq!(train.concat() + &validation.concat(), documents.concat());
                let (all, kept) = (documents.concat().len() as f64, validation.concat().len() as f64);
                assert!((0.85..1.15).contains(&(kept / (all * fraction))), "{kept} of {all} at {fraction}");
            }
        }
        let lines = [line];
        let (train, _) = split(&lines, 0.1);
        assert!(train[0].ends_with('\n'));
    }

    #[test]
    fn entropy_of_a_fair_coin() {
        assert!((entropy_of(&[2, 2, 0]) - 2f64.ln()).abs() < 1e-12);
    }
}
