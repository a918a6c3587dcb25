//! The saved progress of `sage-train data prepare`, from which an interrupted command continues.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use candle_sage::{Error, Result};
use serde::{Deserialize, Serialize};

use super::TOKENIZER_CONFIG;
use super::inputs::TextFile;
use super::prepared::FileRead;
use super::shard::{Format, Shard, Sidecar};
use super::split::Split;
use super::tokenizer::Tokenizer;
use crate::partial::{JOURNAL, PARTIAL};
use crate::{during, partial, writing};

/// Shortest time between two saves of the progress, if no shard is completed between them.
const BETWEEN: Duration = Duration::from_secs(1);

/// The inputs and settings that must not change when a preparation continues. `--skip-bad` may change: documents that
/// were skipped before the interruption stay skipped.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Work {
    pub(super) files: Vec<TextFile>,
    /// Hash of the tokenizer that `--tokenizer` names; `None` if a tokenizer is trained.
    pub(super) tokenizer: Option<String>,
    /// The end-of-text token that `--end-of-text` names.
    #[serde(default)]
    pub(super) end_of_text: Option<String>,
    /// Vocabulary size of the tokenizer.
    pub(super) vocab_size: usize,
    pub(super) format: Option<Format>,
    pub(super) shard_tokens: u64,
    pub(super) val_fraction: f64,
    pub(super) seed: u64,
}

impl Work {
    /// The differences from other work, as text.
    fn difference(&self, other: &Self) -> String {
        let others = self.files.iter().map(|file| &file.path).ne(other.files.iter().map(|file| &file.path));
        let fields = self.files.iter().map(|file| &file.field).ne(other.files.iter().map(|file| &file.field));
        let validation = self.files.iter().map(|f| f.validation).ne(other.files.iter().map(|f| f.validation));
        let pairs = || self.files.iter().zip(&other.files);
        if let Some((file, _)) = pairs().find(|(a, b)| a.has_changed_since(b) && !others) {
            return format!("{} has changed: its size or modification time differs", file.path.display());
        }
        let numbers = [
            ("files of text", others),
            ("--val-data", !others && validation),
            ("--text-field", !others && fields),
            ("--tokenizer", self.tokenizer != other.tokenizer),
            ("--end-of-text", self.end_of_text != other.end_of_text),
            ("--vocab-size", self.vocab_size != other.vocab_size),
            ("--format", self.format != other.format),
            ("--shard-tokens", self.shard_tokens != other.shard_tokens),
            ("--val-fraction", self.val_fraction.to_bits() != other.val_fraction.to_bits()),
            ("--seed", self.seed != other.seed),
        ];
        let changed: Vec<&str> =
            numbers.iter().filter(|(_, changed)| *changed).map(|(name, _)| *name).collect();
        format!("these differ from the interrupted command: {}", changed.join(", "))
    }
}

/// What a preparation has read and written up to a position in the text.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Done {
    /// Files that were completely read.
    pub(super) files: Vec<FileRead>,
    /// Number of pieces of documents that were read from the file after those in `files`.
    pub(super) pieces: u64,
    /// Number of complete documents.
    pub(super) documents: u64,
    /// Whether the position is inside a document.
    pub(super) continued: bool,
    /// Number of unknown tokens, which replace text that the vocabulary cannot represent.
    #[serde(default)]
    pub(super) unknown: u64,
    /// Hash of the tokenizer.
    pub(super) tokenizer: String,
    pub(super) train: Split,
    pub(super) validation: Split,
}

impl Done {
    /// The state before any text is read.
    pub(super) fn new(tokenizer: &Tokenizer) -> Self {
        Self { tokenizer: tokenizer.hash().into(), ..Self::default() }
    }
}

#[derive(Serialize, Deserialize)]
struct Progress {
    work: Work,
    done: Done,
}

/// Saves the progress of a preparation.
#[derive(Debug)]
pub(super) struct Journal<'a> {
    folder: &'a Path,
    work: Work,
    written: Instant,
    /// How long the last save took.
    took: Duration,
    /// Number of complete shards at the last save.
    shards: usize,
}

impl<'a> Journal<'a> {
    pub(super) fn new(folder: &'a Path, work: Work) -> Self {
        Self { folder, work, written: Instant::now(), took: Duration::ZERO, shards: 0 }
    }

    /// The state that an interrupted preparation saved. Removes `.bin`, `.json` and partial files from the folder
    /// if they are not part of the state.
    ///
    /// # Errors
    /// When this work differs from the interrupted work, or the saved state cannot be read.
    pub(super) fn before(&mut self) -> Result<Option<Done>> {
        let path = self.folder.join(JOURNAL);
        let what = || format!("cannot continue {}", self.folder.display());
        let hint = || format!("to start again: rm -r {}", self.folder.display());
        let progress: Option<Progress> = match path.exists() {
            false => None,
            true => {
                let text = std::fs::read(&path).map_err(during(what()))?;
                let read = serde_json::from_slice(&text).map_err(during(what()));
                Some(read.map_err(|error| error.hint(hint()))?)
            }
        };
        if let Some(progress) = progress.as_ref().filter(|progress| progress.work != self.work) {
            return Err(Error::new("another preparation was interrupted here")
                .got(format!("{}: {}", self.folder.display(), self.work.difference(&progress.work)))
                .allowed("the same command as before, with the same text")
                .hint(hint()));
        }
        let done = progress.map(|progress| progress.done);
        let kept: BTreeSet<PathBuf> = done.iter().flat_map(|done| self.kept(done)).collect();
        for entry in std::fs::read_dir(self.folder).map_err(writing(self.folder))?.flatten() {
            let path = entry.path();
            let of_work = path.extension().is_some_and(|end| end == "bin" || end == "json")
                || path.to_string_lossy().ends_with(PARTIAL);
            if of_work && !kept.contains(&path) {
                std::fs::remove_file(&path).map_err(writing(&path))?;
            }
        }
        // Checks that each complete shard opens and has its sidecar (`.bin.json`) before more shards are added.
        for shard in kept.iter().filter(|path| kept.contains(&Sidecar::path(path))) {
            if Shard::open(shard).map_err(|error| error.hint(hint()))?.hashed().is_none() {
                return Err(Error::new("a complete shard has lost its .bin.json file")
                    .got(shard.display())
                    .allowed("a shard with its .bin.json file")
                    .hint(hint()));
            }
        }
        self.shards = done.as_ref().map_or(0, |done| {
            [&done.train, &done.validation].map(|split| split.part.shards.len()).iter().sum()
        });
        Ok(done)
    }

    /// The files that belong to the state `done`: the journal, the tokenizer, all shards, and the sidecars of complete
    /// shards.
    fn kept(&self, done: &Done) -> Vec<PathBuf> {
        let mut kept: Vec<_> =
            [JOURNAL, "tokenizer.json", TOKENIZER_CONFIG].iter().map(|name| self.folder.join(name)).collect();
        for split in [&done.train, &done.validation] {
            let complete = split.part.shards.len() - usize::from(split.open.is_some());
            for (n, name) in split.part.shards.iter().enumerate() {
                let shard = self.folder.join(name);
                kept.extend((n < complete).then(|| Sidecar::path(&shard)));
                kept.push(shard);
            }
        }
        kept
    }

    /// Saves the state at intervals, and sooner if the number of complete shards, `shards`, has changed.
    pub(super) fn keep(&mut self, shards: usize, done: impl FnOnce() -> Result<Done>) -> Result<()> {
        let since = self.written.elapsed();
        // A save can be slow, so the pause after a save is at least 20 times as long as the save.
        if shards == self.shards && since < BETWEEN || since < 20 * self.took {
            return Ok(());
        }
        let began = Instant::now();
        let progress = Progress { work: self.work.clone(), done: done()? };
        let path = self.folder.join(JOURNAL);
        let text = serde_json::to_vec(&progress).map_err(during("cannot save the progress"))?;
        partial::file(&path, |to| std::fs::write(to, &text).map_err(writing(to)))?;
        (self.shards, self.written, self.took) = (shards, Instant::now(), began.elapsed());
        Ok(())
    }

    /// Whether there is a saved state.
    pub(super) fn is_there(folder: &Path) -> bool {
        folder.join(JOURNAL).exists()
    }
}
