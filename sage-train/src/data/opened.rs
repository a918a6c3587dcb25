//! Opens the sources of a run: reads text, finds shards, and chooses the tokenizer.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use candle_sage::{Error, Result};

use super::corpus::Corpus;
use super::source::{self, ShardFiles, SkippedFiles, Source};
use super::{DataConfig, Tokenizer, check, reader};
use crate::settings::SourceSetting;

/// The documents of a source, or its shards.
pub(super) enum Opened {
    Documents(Vec<String>),
    Shards(ShardFiles),
}

/// The sources of a run.
#[derive(Default)]
pub(super) struct Sources {
    /// Sources to train on. If [`Sources::validation`] is empty, a part of each source is for validation.
    pub(super) train: Vec<Opened>,
    /// Sources that are only for validation (`--val-data`).
    pub(super) validation: Vec<Opened>,
}

impl Sources {
    /// Opens all sources. With `validate_only` and `--val-data`, opens only the sources of `--val-data`.
    pub(super) fn open(config: &DataConfig, validate_only: bool, say: &dyn Fn(&str)) -> Result<Self> {
        let mut opening = Opening { config, say, seen: BTreeSet::new(), held_out: BTreeSet::new() };
        let validation = opening.open_all(&config.val_sources)?;
        if validate_only && !validation.is_empty() {
            return Ok(Self { validation, ..Self::default() });
        }
        opening.held_out = std::mem::take(&mut opening.seen);
        let train = match config.sources.as_slice() {
            [] => vec![Opened::Documents(built_in(config)?)],
            sources => opening.open_all(sources)?,
        };
        Ok(Self { train, validation })
    }

    /// The named tokenizer, or the tokenizer next to the shards, or a tokenizer trained on the documents.
    pub(super) fn tokenizer(&self, config: &DataConfig, say: &dyn Fn(&str)) -> Result<Tokenizer> {
        let end = config.end_of_text.as_deref();
        if let Some(name) = &config.tokenizer {
            return Tokenizer::named(name, end);
        }
        let opened = || self.train.iter().chain(&self.validation);
        let mut beside = opened().filter_map(|source| match source {
            Opened::Shards(files) => Some(files),
            Opened::Documents(_) => None,
        });
        if let Some(files) = beside.next() {
            let path = files.tokenizer.as_ref().ok_or_else(|| {
                Error::new("shards of tokens without their tokenizer")
                    .got(files.first().display())
                    .allowed("a tokenizer.json next to them")
                    .hint("name it with --tokenizer FILE; shards with GPT-2's tokens need --tokenizer gpt2")
            })?;
            return Tokenizer::load_with(path, end);
        }
        if let Some(end) = end {
            return Err(Error::new("the tokenizer that this run trains already has an end-of-text token")
                .got(format!("--end-of-text {end} without --tokenizer"))
                .allowed("--end-of-text with --tokenizer, or with shards")
                .hint("leave --end-of-text out, or name a tokenizer with --tokenizer"));
        }
        let documents: Vec<&String> = self
            .train
            .iter()
            .flat_map(|source| match source {
                Opened::Documents(documents) => documents.as_slice(),
                Opened::Shards(_) => &[],
            })
            .collect();
        Tokenizer::trained_on(&documents, config, say)
    }
}

fn built_in(config: &DataConfig) -> Result<Vec<String>> {
    if config.corpus_bytes == 0 {
        return Err(Error::new("an empty corpus")
            .got("--corpus-mb 0")
            .allowed("at least 1")
            .hint("--corpus-mb 8"));
    }
    Ok(Corpus::new(config.corpus_seed).documents(config.corpus_bytes))
}

/// The state while the sources are opened.
struct Opening<'a> {
    config: &'a DataConfig,
    say: &'a dyn Fn(&str),
    /// Files of the sources opened so far. No file may be given twice.
    seen: BTreeSet<PathBuf>,
    /// Files of `--val-data`, which are not trained on, even if they are in a folder of training data.
    held_out: BTreeSet<PathBuf>,
}

impl Opening<'_> {
    fn open_all(&mut self, sources: &[SourceSetting]) -> Result<Vec<Opened>> {
        sources.iter().map(|source| self.open(&source.path)).collect()
    }

    fn open(&mut self, path: &Path) -> Result<Opened> {
        let Self { config, say, seen, held_out } = self;
        let mut passed_over = SkippedFiles::default();
        let mut found = source::find_and_pass_over(path, &config.out, &mut passed_over)?;
        if let Some(others) = passed_over.as_text() {
            say(&others);
        }
        found.hold_out(held_out, path)?;
        source::check_once(found.files(), seen)?;
        let files = match found {
            Source::Shards(files) => {
                check::check_listed(path)?;
                return Ok(Opened::Shards(files));
            }
            Source::Text(files) => files,
        };
        let names = files.iter().map(PathBuf::as_path);
        if config.val_sources.is_empty()
            && let Some(warning) = source::called_validation(names)
        {
            say(&warning);
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
            return Err(Error::new("every document of the data is empty")
                .got(format!("{} contains no text", path.display()))
                .allowed(format!("text in {}", reader::extensions()))
                .hint(
                    "check the files; in JSON lines, CSV and Parquet, --text-field names the key or column of the \
                     text",
                ));
        }
        Ok(Opened::Documents(documents))
    }
}
