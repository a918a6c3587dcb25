//! From text to batches. `source` finds files, `reader` reads documents from files, `tokenizer` turns text into ids,
//! and `shard` stores ids in files. `opened` opens the sources of a run, `tokens` is a list of ids, `mixture` combines
//! lists, `batches` defines the order of sequences, and `feed` prefetches batches. `prepare` turns text into shards
//! (`inputs`: the files of text; `split`: the shards of the training or validation data; `progress`: the state from
//! which an interrupted command continues), and `hub` downloads files. `check` compares shards with the hashes in
//! their sidecars (`NAME.bin.json`), and `verify` does so during a run.

/// The text of a file of the folder `data/`. The build script finds the folder, in the package or at the top of the
/// repository.
macro_rules! built_in {
    ($path:literal) => {
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/", env!("SAGE_TRAIN_DATA"), "/", $path))
    };
}

mod batches;
pub mod check;
mod config;
pub mod corpus;
mod feed;
pub mod hub;
mod inputs;
mod mixture;
mod opened;
pub mod prepare;
mod prepared;
mod progress;
pub mod reader;
pub mod recall;
pub mod shard;
mod shares;
pub mod source;
mod split;
mod tokenizer;
mod tokens;
mod verify;

pub use batches::{Batch, Batches, SequenceSplit, Sequences};
pub use config::DataConfig;
pub use feed::Feed;
pub use mixture::Mixture;
pub use shares::Shares;
pub use tokenizer::{Boundaries, Tokenizer};
pub(crate) use tokenizer::{LEAST_ENTRIES, token_ids};
pub use tokens::{Tokens, dropped_text};
pub use verify::Verification;

use candle_sage::{Error, Result};
use sha2::{Digest, Sha256};

use crate::hex;
use crate::settings::{Settings, SourceSetting};
use opened::{Opened, Sources};
use shard::Shard;
use source::{ShardFiles, Source};
use tokens::check_ids;

/// Everything a run reads: tokens to train on, tokens to validate on, and their tokenizer.
#[derive(Debug)]
pub struct Dataset {
    /// Tokens to train on.
    pub train: Mixture,
    /// Tokens to validate on.
    pub validation: Mixture,
    /// Unigram entropy in nats per token, computed from the first [`COUNTED`] tokens of each source.
    pub unigram_entropy: f64,
    /// A description of the data.
    pub summary: String,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
}

/// [`Dataset::unigram_entropy`] is computed from at most this many tokens of each source.
pub const COUNTED: u64 = 1 << 24;

impl Dataset {
    /// Finds and splits the data. Text is read and tokenized. Shards, which already contain tokens, are opened and
    /// checked.
    ///
    /// # Errors
    /// When the data cannot be read, or is too short for the context.
    pub fn load(config: &DataConfig, say: &dyn Fn(&str)) -> Result<Self> {
        let data = Self::unchecked(config, false, say)?;
        let check = |tokens: &Tokens| batches::check("training", tokens.len(), config.context);
        data.train.sources().try_for_each(check)?;
        data.for_validation(config)
    }

    /// Like [`Dataset::load`], but without the training data if `--val-data` is given.
    ///
    /// # Errors
    /// As [`Dataset::load`].
    pub fn load_to_validate(config: &DataConfig, say: &dyn Fn(&str)) -> Result<Self> {
        Self::unchecked(config, true, say)?.for_validation(config)
    }

    fn for_validation(self, config: &DataConfig) -> Result<Self> {
        let check = |tokens: &Tokens| batches::check("validation", tokens.len(), config.context);
        self.validation.sources().try_for_each(check)?;
        self.tokenizer.cache()?;
        Ok(self)
    }

    fn unchecked(config: &DataConfig, validate_only: bool, say: &dyn Fn(&str)) -> Result<Self> {
        let sources = Sources::open(config, validate_only, say)?;
        let tokenizer = sources.tokenizer(config, say)?;
        if tokenizer.vocab_size() > config.vocab_size {
            return Err(Error::new("the tokenizer has more entries than the model")
                .got(format!("{} entries", tokenizer.vocab_size()))
                .allowed(format!("up to {}", config.vocab_size))
                .hint(format!(
                    "for a new model, --vocab-size {}; a trained model needs a larger embedding: transformers' \
                     resize_token_embeddings",
                    tokenizer.vocab_size()
                )));
        }
        let (found, rows) = (tokenizer.vocab_size(), config.vocab_size);
        if rows > 2 * found {
            say(&format!(
                "the tokenizer has {found} entries, the model's embedding {rows}: --vocab-size {found} is enough"
            ));
        }
        let (mut train, mut validation) = (Vec::new(), Vec::new());
        let mut tokenizing = Tokenizing { tokenizer: &tokenizer, bytes: 0, documents: 0, say };
        let apart = !sources.validation.is_empty();
        for source in &sources.train {
            let fraction = if apart { 0.0 } else { config.val_fraction };
            let (of_train, of_validation) = tokenizing.tokens(source, fraction)?;
            train.push(of_train);
            if apart && !of_validation.is_empty() {
                say(
                    "validation shards next to the training shards are not used, because --val-data is given",
                );
            } else if !apart {
                validation.push(of_validation);
            }
        }
        for source in &sources.validation {
            // The validation shards of a source if it has any, otherwise all its tokens.
            let (all, shards) = tokenizing.tokens(source, 0.0)?;
            validation.push(if shards.is_empty() { all } else { shards });
        }
        let Tokenizing { bytes, documents, .. } = tokenizing;
        let mix = |lists: Vec<Tokens>, sources| match weights(sources) {
            Some(weights) => Mixture::new(lists.into_iter().zip(weights).collect()),
            None => Mixture::by_size(lists, config.context),
        };
        let validated = if apart { &config.val_sources } else { &config.sources };
        let (train, validation) = (mix(train, &config.sources), mix(validation, validated));
        let known = |n: u64, what: String| if n > 0 { what } else { String::new() };
        Ok(Self {
            unigram_entropy: entropy(train.sources().chain(validation.sources()), &tokenizer)?,
            summary: format!(
                "{}{}{} training and {} validation tokens",
                known(documents, format!("{}, ", crate::quantity::counted(documents, "document"))),
                known(bytes, format!("{:.1} MB, ", bytes as f64 / 1e6)),
                crate::quantity::grouped(train.len()),
                crate::quantity::grouped(validation.len()),
            ),
            train,
            validation,
            tokenizer,
        })
    }

    /// A hash that identifies the data. It covers the tokenizer, [`Shard::fingerprint`] of each shard, and all tokens
    /// that are not in shards.
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

/// The tokenizer that the settings name, or the tokenizer next to the shards that the settings name. No data is read.
/// `None` if a tokenizer would be trained.
///
/// # Errors
/// When a named tokenizer cannot be used.
pub fn known_tokenizer(settings: &Settings) -> Result<Option<Tokenizer>> {
    let end = settings.data.end_of_text.as_deref();
    if let Some(name) = &settings.data.tokenizer {
        return Tokenizer::named(name, end).map(Some);
    }
    let out = settings.run.out.as_deref().unwrap_or(std::path::Path::new("runs"));
    for source in settings.data.sources.iter().chain(&settings.data.val_data).flatten() {
        // A path that does not exist is reported when the data is opened.
        if let Ok(Source::Shards(ShardFiles { tokenizer: Some(path), .. })) = source::find(&source.path, out)
        {
            return Tokenizer::load_with(&path, end).map(Some);
        }
    }
    Ok(None)
}

/// The weights of the sources in a mixture; `None` if a source has no weight.
fn weights(sources: &[SourceSetting]) -> Option<Vec<f64>> {
    // Without sources, the only data is the built-in corpus, which has no weight.
    sources.iter().map(|source| source.weight).collect::<Option<Vec<f64>>>().filter(|all| !all.is_empty())
}

/// Turns opened sources into tokens, and counts documents and bytes.
struct Tokenizing<'a> {
    tokenizer: &'a Tokenizer,
    bytes: u64,
    documents: u64,
    say: &'a dyn Fn(&str),
}

impl Tokenizing<'_> {
    /// The training and validation tokens of a source. Validation tokens are the source's validation shards, or else a
    /// fraction of the source.
    fn tokens(&mut self, source: &Opened, fraction: f64) -> Result<(Tokens, Tokens)> {
        match source {
            Opened::Documents(text) => {
                let held = text.iter().map(|d| d.len() as u64).sum::<u64>();
                (self.say)(&format!("tokenizing {:.1} MB", held as f64 / 1e6));
                (self.bytes, self.documents) = (self.bytes + held, self.documents + text.len() as u64);
                let (train, validation) = split(text, fraction);
                let mut sum = (0, 0);
                let mut encoded = |documents: &[&str]| {
                    let tokens = encode(self.tokenizer, documents)?;
                    let text_bytes: u64 = documents.iter().map(|document| document.len() as u64).sum();
                    let token_bytes = self.tokenizer.bytes_of(&tokens);
                    sum = (sum.0 + text_bytes, sum.1 + token_bytes);
                    Ok::<_, Error>(Tokens::from(tokens).with_text(text_bytes, token_bytes))
                };
                let sample = head(&train, SAMPLE);
                self.tokenizer.changes(sample)?.iter().for_each(|changes| (self.say)(changes));
                let tokens = (encoded(&train)?, encoded(&validation)?);
                dropped_text(sum.0, sum.1).iter().for_each(|dropped| (self.say)(dropped));
                Ok(tokens)
            }
            Opened::Shards(files) => {
                let mut train = shards(&files.train, self.tokenizer)?;
                let mut validation = shards(&files.validation, self.tokenizer)?;
                for sidecar in train.iter_mut().chain(&mut validation).filter_map(|s| s.sidecar.as_mut()) {
                    let ended = sidecar.document_tokens.len() as u64 - u64::from(sidecar.continues);
                    self.bytes = self.bytes.saturating_add(sidecar.text_bytes);
                    self.documents = self.documents.saturating_add(ended);
                    // Frees this list, which may be long and is not used any more.
                    sidecar.document_tokens = Vec::new();
                }
                files.check_end_of_text(self.tokenizer)?;
                Ok(split_tokens(train.into(), validation.into(), fraction))
            }
        }
    }
}

/// Opens shards, and checks that they were made with this tokenizer.
fn shards(files: &[std::path::PathBuf], tokenizer: &Tokenizer) -> Result<Vec<Shard>> {
    let open = |path: &std::path::PathBuf| {
        let shard = Shard::open(path)?;
        shard.check_tokenizer(tokenizer)?;
        Ok(shard)
    };
    files.iter().map(open).collect()
}

/// Splits the end of the training shards off for validation if there are no validation shards.
fn split_tokens(train: Tokens, validation: Tokens, fraction: f64) -> (Tokens, Tokens) {
    if !validation.is_empty() {
        return (train, validation);
    }
    let cut = train.len() - (train.len() as f64 * fraction) as u64;
    (train.slice(0..cut), train.slice(cut..train.len()))
}

/// Splits the text into training and validation text. About the last `fraction` of the text is for validation. At most
/// one document is split between the two.
fn split(documents: &[String], fraction: f64) -> (Vec<&str>, Vec<&str>) {
    if fraction == 0.0 {
        return (documents.iter().map(String::as_str).collect(), Vec::new());
    }
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
        // Exceeding the wanted size of `validation` by up to a tenth is better than splitting a document.
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

/// The index where about the last `room` bytes of a document begin: the start of a line if one is among the first
/// tenth of these bytes, else a character boundary.
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

/// The file that transformers writes next to a `tokenizer.json`, and that names the end-of-text token.
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// Bytes of text for which the tokenizer's round trip is checked.
const SAMPLE: usize = 1 << 20;

/// At most the first `bytes` bytes of the first document, cut at a character boundary.
fn head<'a>(documents: &[&'a str], bytes: usize) -> &'a str {
    let first = documents.first().copied().unwrap_or_default();
    let end = (0..=bytes.min(first.len())).rev().find(|&end| first.is_char_boundary(end));
    &first[..end.unwrap_or(0)]
}

/// The tokens of all documents, each followed by the end-of-text token.
fn encode(tokenizer: &Tokenizer, documents: &[&str]) -> Result<Vec<u32>> {
    let parts = tokenizer.encode_all(&documents.iter().map(|text| (*text, false)).collect::<Vec<_>>())?;
    let mut tokens = Vec::with_capacity(parts.iter().map(|p| p.len() + 1).sum());
    for part in parts {
        tokens.extend(part);
        tokens.push(tokenizer.end_of_text());
    }
    Ok(tokens)
}

/// One unigram entropy for all lists, from the first [`COUNTED`] tokens of each. Checks that these tokens are in the
/// vocabulary.
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
