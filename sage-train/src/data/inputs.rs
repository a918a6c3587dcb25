//! The text files that `data prepare` reads: finding and reading them, and training a tokenizer on the beginning of
//! their text.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::time::UNIX_EPOCH;

use candle_sage::{Error, Result};
use serde::{Deserialize, Serialize};

use super::hub::{Hub, Named};
use super::prepared::FileRead;
use super::reader::{self, BadDocuments, Piece, is_known};
use super::source::{self, SkippedFiles, Source};
use super::tokenizer::{TRAINING_BYTES, Tokenizer};
use crate::notify;

/// A file of text to be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TextFile {
    pub(super) path: PathBuf,
    bytes: u64,
    /// Nanoseconds since 1970.
    modified: u64,
    /// Key or column of the text.
    pub(super) field: String,
    /// Whether all documents of the file are for validation (`--val-data`).
    #[serde(default)]
    pub(super) validation: bool,
}

impl TextFile {
    pub(super) fn new(path: &Path, field: &str) -> Self {
        let about = path.metadata().ok();
        let modified =
            about.as_ref().and_then(|about| about.modified().ok()?.duration_since(UNIX_EPOCH).ok());
        Self {
            path: path.to_owned(),
            bytes: about.map_or(0, |about| about.len()),
            modified: modified.map_or(0, |time| time.as_nanos() as u64),
            field: field.into(),
            validation: false,
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether the file's size or modification time differs from `other`, an earlier record of the file.
    pub(super) fn has_changed_since(&self, other: &Self) -> bool {
        (self.bytes, self.modified) != (other.bytes, other.modified)
    }
}

/// Finds every named text file. Files on the hub are downloaded.
pub(super) fn text_files(names: &[String], field: Option<&str>) -> Result<Vec<TextFile>> {
    let mut found = Vec::new();
    for name in names {
        let (files, recipes_field) = match Named::parse(name)? {
            // An existing path is preferred to a name on the hub.
            Some(named) if !Path::new(name).exists() => {
                let hub = Hub::open()?;
                let files = hub.files(&named)?;
                if let Some(file) = files.iter().map(Path::new).find(|file| !is_known(file)) {
                    return Err(reader::unknown_kind(file));
                }
                notify(&format!(
                    "{}: {} file{}",
                    named.dataset,
                    files.len(),
                    if files.len() == 1 { "" } else { "s" }
                ));
                let fetch = |file: &String| hub.dataset_file(&named.dataset, file);
                (files.iter().map(fetch).collect::<Result<Vec<_>>>()?, named.text_field)
            }
            _ => match find_text(Path::new(name))? {
                Source::Text(files) => (files, None),
                Source::Shards(files) => {
                    return Err(Error::new("the data is already tokenized")
                        .got(files.first().display())
                        .allowed(reader::extensions())
                        .hint("train on it: sage-train --data PATH"));
                }
            },
        };
        let field = field.map(str::to_owned).or(recipes_field).unwrap_or_else(|| "text".into());
        found.extend(files.iter().map(|file| TextFile::new(file, &field)));
    }
    source::check_once(found.iter().map(|file| file.path.as_path()), &mut BTreeSet::new())?;
    Ok(found)
}

/// The text files or token shards at a path. Prints a message if other files are skipped.
fn find_text(path: &Path) -> Result<Source> {
    let mut passed_over = SkippedFiles::default();
    let found = source::find_and_pass_over(path, Path::new(""), &mut passed_over)?;
    if let Some(words) = passed_over.as_text() {
        notify(&format!("{}: {words}", path.display()));
    }
    Ok(found)
}

/// Passes each [`Piece`] of a file to `each`, in order, until `each` returns `Break`.
pub(super) fn read_file(
    file: &TextFile,
    skip_bad: bool,
    done: &AtomicU64,
    each: &mut reader::EachUntil<'_>,
) -> Result<FileRead> {
    let skipped = AtomicU64::new(0);
    let bad = if skip_bad { BadDocuments::Skipped(&skipped) } else { BadDocuments::Refused };
    let mut read = FileRead { path: file.path.clone(), bytes: file.bytes(), ..FileRead::default() };
    let mut continued = false;
    reader::read_counted(&file.path, &file.field, bad, done, &mut |piece| {
        let blank = !continued && piece.ends && is_blank(&piece);
        read.documents += u64::from(piece.ends && !blank);
        read.text_bytes += if blank { 0 } else { piece.text.len() as u64 };
        continued = !piece.ends;
        each(piece)
    })?;
    Ok(FileRead { skipped: skipped.into_inner(), ..read })
}

pub(super) fn is_blank(piece: &Piece) -> bool {
    piece.text.trim().is_empty()
}

/// A tokenizer trained on the text of the files, up to a total of `TRAINING_BYTES`.
///
/// # Errors
/// When the files cannot be read, or contain no text.
pub fn train_tokenizer(
    names: &[String],
    field: Option<&str>,
    vocab_size: usize,
    skip_bad: bool,
) -> Result<Tokenizer> {
    trained(&text_files(names, field)?, vocab_size, skip_bad)
}

pub(super) fn trained(files: &[TextFile], vocab_size: usize, skip_bad: bool) -> Result<Tokenizer> {
    let (mut documents, mut held) = (Vec::new(), 0);
    for file in files {
        read_file(file, skip_bad, &AtomicU64::new(0), &mut |piece| {
            held += piece.text.len();
            documents.push(piece.text);
            Ok(if held >= TRAINING_BYTES { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })?;
        if held >= TRAINING_BYTES {
            break;
        }
    }
    if documents.iter().all(|document| document.trim().is_empty()) {
        return Err(no_text());
    }
    notify(&format!("training a tokenizer of {vocab_size} entries on {:.1} MB", held as f64 / 1e6));
    Tokenizer::train(documents.iter().map(String::as_str), vocab_size)
}

pub(super) fn no_text() -> Error {
    Error::new("the data contains no text")
        .got("only empty documents")
        .allowed(format!("text in {}", reader::extensions()))
        .hint(
            "check the files; in JSON lines, CSV and Parquet, --text-field names the key or column of the text",
        )
}
