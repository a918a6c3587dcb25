//! The settings of the data, resolved and checked.

use std::path::PathBuf;

use candle_sage::{Error, Result};

use super::source::canonical;
use super::{SequenceSplit, Tokenizer};
use crate::checks::{self, in_range, need};
use crate::settings::{Settings, SourceSetting, Switch};

/// The resolved settings of table `[data]`.
#[derive(Debug, Clone, PartialEq)]
pub struct DataConfig {
    /// Files, folders and patterns, with weights; if empty, the built-in corpus is used.
    pub sources: Vec<SourceSetting>,
    /// Files, folders and patterns that are only for validation; if empty, a fraction of `sources` is kept for
    /// validation.
    pub val_sources: Vec<SourceSetting>,
    /// The JSON key, or the CSV or parquet column, that contains the text.
    pub text_field: String,
    /// A tokenizer's file or name. If `None`: the tokenizer next to the shards; without shards, one is trained.
    pub tokenizer: Option<String>,
    /// The token that ends a document; found automatically if `None`.
    pub end_of_text: Option<String>,
    /// Whether attention stays inside documents.
    pub document_mask: bool,
    /// Bytes of the built-in corpus.
    pub corpus_bytes: u64,
    /// Fraction kept for validation.
    pub val_fraction: f64,
    /// Largest number of entries of the vocabulary.
    pub vocab_size: usize,
    /// Tokens in a sequence.
    pub context: usize,
    /// Folder of runs, which is never read as data.
    pub out: PathBuf,
    /// Seed of the order of the training sequences.
    pub order_seed: u64,
    /// Seed of the built-in corpus.
    pub corpus_seed: u64,
}

impl DataConfig {
    /// Resolves the settings of table `[data]`. `out` is the folder of runs.
    ///
    /// # Errors
    /// When a setting is out of range.
    pub fn resolve(s: &Settings, out: PathBuf, seed: u64) -> Result<Self> {
        let corpus_mb = in_range("corpus-mb", need(s.data.corpus_mb), 0, 1 << 40)?;
        Ok(Self {
            sources: sources("data", s.data.sources.as_ref())?,
            val_sources: sources("val-data", s.data.val_data.as_ref())?,
            text_field: need(s.data.text_field.clone()),
            tokenizer: s.data.tokenizer.clone(),
            end_of_text: s.data.end_of_text.clone(),
            document_mask: need(s.data.document_mask) == Switch::On,
            corpus_bytes: corpus_mb.saturating_mul(1_000_000),
            val_fraction: in_range("val-fraction", need(s.data.val_fraction), 0.0001, 0.9)?,
            vocab_size: need(s.data.vocab_size).0 as usize,
            context: need(s.data.context).0 as usize,
            out,
            order_seed: checks::seed("order-seed", s.run.order_seed.unwrap_or(seed))?,
            corpus_seed: checks::seed("corpus-seed", s.run.corpus_seed.unwrap_or(seed))?,
        })
    }

    /// All sources, for training and validation.
    pub fn all_sources(&self) -> impl Iterator<Item = &SourceSetting> {
        self.sources.iter().chain(&self.val_sources)
    }

    /// Warns if the validation data is also training data.
    pub fn warn_of_trained_on(&self, say: &dyn Fn(&str)) {
        for source in &self.val_sources {
            let path = canonical(&source.path);
            if self.sources.iter().any(|trained| canonical(&trained.path) == path) {
                say(&format!(
                    "warning: the run was trained on {}; leave --data out to evaluate on the run's validation data",
                    source.path.display()
                ));
            }
        }
    }

    /// How tokens become sequences.
    pub fn cut(&self, tokenizer: &Tokenizer) -> SequenceSplit {
        SequenceSplit {
            context: self.context,
            seed: self.order_seed,
            vocab: tokenizer.vocab_size(),
            end_of_document: self.document_mask.then_some(tokenizer.end_of_text()),
        }
    }

    /// The folder of trained tokenizers.
    pub fn cache(&self) -> PathBuf {
        self.out.join("cache")
    }
}

/// The sources that were passed to a flag. Checks that either all or none of the sources have a weight.
fn sources(flag: &str, sources: Option<&Vec<SourceSetting>>) -> Result<Vec<SourceSetting>> {
    let sources = sources.cloned().unwrap_or_default();
    let weighted = sources.iter().filter(|source| source.weight.is_some()).count();
    if weighted != 0 && weighted != sources.len() {
        return Err(Error::new(format!("some sources of --{flag} have weights, and others do not"))
            .got(sources.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))
            .allowed("a weight for every source, or for none")
            .hint(format!(
                "--{flag} web.bin=0.7 --{flag} books.txt=0.3; sources without weights are mixed by their sizes"
            )));
    }
    Ok(sources)
}
