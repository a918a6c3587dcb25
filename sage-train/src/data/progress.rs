//! How far a preparation has come, on the disk: one that was interrupted continues from there.

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

/// Between two states on the disk, where no shard was completed.
const BETWEEN: Duration = Duration::from_secs(1);

/// What decides which tokens come out. (Whether broken documents are left out may change under way: of the files that were read
/// they stay left out, and counted.)
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Work {
    pub(super) files: Vec<TextFile>,
    /// The tokenizer that was named; none where one is trained.
    pub(super) tokenizer: Option<String>,
    /// The end-of-text token that was named (`--end-of-text`).
    #[serde(default)]
    pub(super) end_of_text: Option<String>,
    /// Entries of one that is trained.
    pub(super) vocab_size: usize,
    pub(super) format: Option<Format>,
    pub(super) shard_tokens: u64,
    pub(super) val_fraction: f64,
    pub(super) seed: u64,
}

impl Work {
    /// What of it is another, as text.
    fn difference(&self, other: &Self) -> String {
        let others = self.files.iter().map(|file| &file.path).ne(other.files.iter().map(|file| &file.path));
        let fields = self.files.iter().map(|file| &file.field).ne(other.files.iter().map(|file| &file.field));
        let validation = self.files.iter().map(|f| f.validation).ne(other.files.iter().map(|f| f.validation));
        let pairs = || self.files.iter().zip(&other.files);
        if let Some((file, _)) = pairs().find(|(a, b)| a.has_changed_since(b) && !others) {
            return format!("{} has another size or time", file.path.display());
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
        format!("other {}", changed.join(", "))
    }
}

/// Everything up to a place in the text.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Done {
    /// Files that were read to their end.
    pub(super) files: Vec<FileRead>,
    /// Pieces of the next one that were taken.
    pub(super) pieces: u64,
    /// Documents that have ended.
    pub(super) documents: u64,
    /// Whether one is in the middle.
    pub(super) continued: bool,
    /// Tokens of text that the vocabulary does not have.
    #[serde(default)]
    pub(super) unknown: u64,
    /// Of the tokenizer that all of it is in.
    pub(super) tokenizer: String,
    pub(super) train: Split,
    pub(super) validation: Split,
}

impl Done {
    /// Nothing yet, in this tokenizer's tokens.
    pub(super) fn new(tokenizer: &Tokenizer) -> Self {
        Self { tokenizer: tokenizer.hash().into(), ..Self::default() }
    }
}

#[derive(Serialize, Deserialize)]
struct Progress {
    work: Work,
    done: Done,
}

/// Writes down how far a preparation has come.
#[derive(Debug)]
pub(super) struct Journal<'a> {
    folder: &'a Path,
    work: Work,
    written: Instant,
    /// How long that took.
    took: Duration,
    /// Complete shards when that was.
    shards: usize,
}

impl<'a> Journal<'a> {
    pub(super) fn new(folder: &'a Path, work: Work) -> Self {
        Self { folder, work, written: Instant::now(), took: Duration::ZERO, shards: 0 }
    }

    /// What an earlier start of the same work did. Whatever else it left is removed.
    ///
    /// # Errors
    /// When it was other work, or what it left cannot be read.
    pub(super) fn before(&mut self) -> Result<Option<Done>> {
        let path = self.folder.join(JOURNAL);
        let what = || format!("cannot go on with {}", self.folder.display());
        let hint = || format!("rm -r {} begins anew", self.folder.display());
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
                .allowed("the command that began it, over the same text")
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
        // What is complete was written by an earlier start: it is opened once more before anything is added to it.
        for shard in kept.iter().filter(|path| kept.contains(&Sidecar::path(path))) {
            if Shard::open(shard).map_err(|error| error.hint(hint()))?.hashed().is_none() {
                return Err(Error::new("a complete shard has lost its sidecar")
                    .got(shard.display())
                    .allowed("a shard with the file that describes it")
                    .hint(hint()));
            }
        }
        self.shards = done.as_ref().map_or(0, |done| {
            [&done.train, &done.validation].map(|split| split.part.shards.len()).iter().sum()
        });
        Ok(done)
    }

    /// The files of a state: its shards, and sidecars of those that are complete.
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

    /// Writes a state down, if it is time: so many shards are complete.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(super) fn keep(&mut self, shards: usize, done: impl FnOnce() -> Result<Done>) -> Result<()> {
        let since = self.written.elapsed();
        // A twentieth of the time at most: what is known of a shard grows with it.
        if shards == self.shards && since < BETWEEN || since < 20 * self.took {
            return Ok(());
        }
        let began = Instant::now();
        let progress = Progress { work: self.work.clone(), done: done()? };
        let path = self.folder.join(JOURNAL);
        let text = serde_json::to_vec(&progress).map_err(during("cannot write down how far the work is"))?;
        partial::file(&path, |to| std::fs::write(to, &text).map_err(writing(to)))?;
        (self.shards, self.written, self.took) = (shards, Instant::now(), began.elapsed());
        Ok(())
    }

    /// Whether there is something to continue from.
    pub(super) fn is_there(folder: &Path) -> bool {
        folder.join(JOURNAL).exists()
    }
}
