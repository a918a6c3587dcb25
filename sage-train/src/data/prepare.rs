//! Prepares shards from text: one thread reads, all threads tokenize.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use candle_sage::{Error, Result};

pub use super::inputs::train_tokenizer;
use super::inputs::{TextFile, is_blank, no_text, read_file, text_files, trained};
use super::prepared::LIST;
pub use super::prepared::{FileRead, Prepared};
use super::progress::{Done, Journal, Work};
use super::reader::Piece;
use super::shard::Format;
use super::source::{self, canonical};
pub use super::split::Part;
use super::split::SplitWriter;
use super::tokenizer::Tokenizer;
use super::{SAMPLE, head};
use crate::partial::Folder;
use crate::quantity::counted;
use crate::{bar, notify, writing};

/// Bytes of a chunk: text that is tokenized together.
const CHUNK: usize = 4 << 20;
/// The most chunks that wait to be tokenized.
const WAITING: usize = 2;

/// Time between two lines of progress if there is no terminal.
const QUIET: Duration = Duration::from_secs(10);

/// Arguments of [`prepare`].
#[derive(Debug, Clone)]
pub struct Plan {
    /// Files, folders, patterns, `hf:OWNER/NAME[:PATTERN]`, or short names of public data sets, such as `tinystories`.
    pub inputs: Vec<String>,
    /// Data that is only for validation, given like `inputs`. If it is not empty, no document of `inputs` is used for
    /// validation.
    pub val_inputs: Vec<String>,
    /// The folder to create.
    pub out: PathBuf,
    /// A `tokenizer.json` or a model's name. If `None`, a tokenizer is trained.
    pub tokenizer: Option<String>,
    /// The token that ends a document; found automatically if `None`.
    pub end_of_text: Option<String>,
    /// Vocabulary size of the tokenizer, if one is trained.
    pub vocab_size: usize,
    /// Format of the shards. `None` selects the smallest format for the vocabulary.
    pub format: Option<Format>,
    /// Largest number of tokens in a shard.
    pub shard_tokens: u64,
    /// Fraction of the documents for validation.
    pub val_fraction: f64,
    /// Seed for the choice of the validation documents.
    pub seed: u64,
    /// Key or column of the text; if `None`, the column that a [`Recipe`](super::hub::Recipe) names, or else `text`.
    pub text_field: Option<String>,
    /// Whether documents that cannot be read are left out.
    pub skip_bad: bool,
}

/// Creates a folder of shards, or continues the work of an interrupted or failed earlier call with the same plan. The
/// folder has a temporary name until it is complete.
///
/// # Errors
/// When `plan.out` exists, an input cannot be read or contains no text, or a file cannot be written.
pub fn prepare(plan: &Plan) -> Result<Prepared> {
    let folder = Folder::take_up(&plan.out)?;
    let prepared = prepare_in(plan, folder.path())?;
    folder.finish()?;
    Ok(prepared)
}

fn prepare_in(plan: &Plan, folder: &Path) -> Result<Prepared> {
    let named = |name: &str| Tokenizer::named(name, plan.end_of_text.as_deref());
    let named = plan.tokenizer.as_deref().map(named).transpose()?;
    let files = all_files(plan)?;
    if let Some(file) = files.iter().find(|file| file.path.to_str().is_none()) {
        return Err(Error::new("the name of a file is not UTF-8")
            .got(file.path.display())
            .allowed("UTF-8 names of files and folders: they are saved in dataset.json")
            .hint("rename it; if only a folder's name is not UTF-8, you can pass its files one by one from inside the folder"));
    }
    let work = Work {
        files,
        tokenizer: named.as_ref().map(|named| named.hash().into()),
        end_of_text: plan.end_of_text.clone(),
        vocab_size: named.as_ref().map_or(plan.vocab_size, Tokenizer::vocab_size),
        format: plan.format,
        shard_tokens: plan.shard_tokens,
        val_fraction: plan.val_fraction,
        seed: plan.seed,
    };
    let mut journal = Journal::new(folder, work.clone());
    let before = journal.before()?;
    let saved = folder.join("tokenizer.json");
    let tokenizer = match (named, &before) {
        (Some(tokenizer), _) => tokenizer,
        (None, Some(_)) => Tokenizer::load(&saved)?,
        (None, None) => {
            let train: Vec<TextFile> = work.files.iter().filter(|file| !file.validation).cloned().collect();
            trained(&train, plan.vocab_size, plan.skip_bad)?
        }
    };
    let done = before.unwrap_or_else(|| Done::new(&tokenizer));
    if done.tokenizer != tokenizer.hash() {
        return Err(Error::new("the tokenizer of an interrupted preparation has changed")
            .got(format!("{} with SHA-256 {:.12}", saved.display(), tokenizer.hash()))
            .allowed(format!("SHA-256 {:.12}", done.tokenizer))
            .hint(format!("to start again: rm -r {}", folder.display())));
    }
    let format = plan.format.unwrap_or(Format::for_vocab(tokenizer.vocab_size()));
    format.check_vocab(tokenizer.vocab_size())?;
    if tokenizer.check_same(&saved).is_err() {
        tokenizer.save_in(folder)?;
    }
    let written = write(plan, &work.files, &tokenizer, format, (folder, journal, done));
    written.inspect_err(|_| {
        if Journal::is_there(folder) {
            notify("completed work is kept: the same command continues from there");
        }
    })
}

/// All files, with files for validation last. A file of `--val-data` is not trained on, even if it is in a folder of
/// training data.
fn all_files(plan: &Plan) -> Result<Vec<TextFile>> {
    let field = plan.text_field.as_deref();
    let mut validation = text_files(&plan.val_inputs, field)?;
    validation.iter_mut().for_each(|file| file.validation = true);
    let held_out: BTreeSet<PathBuf> = validation.iter().map(|file| canonical(&file.path)).collect();
    let mut files = text_files(&plan.inputs, field)?;
    files.retain(|file| !held_out.contains(&canonical(&file.path)));
    let names = files.iter().map(|file| file.path.as_path());
    if validation.is_empty()
        && let Some(warning) = source::called_validation(names)
    {
        notify(&warning);
    }
    files.extend(validation);
    Ok(files)
}

fn write(
    plan: &Plan,
    files: &[TextFile],
    tokenizer: &Tokenizer,
    format: Format,
    (folder, journal, before): (&Path, Journal<'_>, Done),
) -> Result<Prepared> {
    let bar = bar(
        files.iter().map(TextFile::bytes).sum(),
        "{bar:30.cyan/blue} {bytes}/{total_bytes} {bytes_per_sec} {msg}, ETA {eta}",
    );
    if before != Done::new(tokenizer) {
        notify(&format!(
            "continues an interrupted preparation: {} and {} are complete",
            counted(before.documents, "document"),
            counted(before.files.len() as u64, "file")
        ));
    }
    let done = AtomicU64::new(before.files.iter().map(|file| file.bytes).sum());
    let writer = |name, split| SplitWriter::new(folder, name, (format, plan.shard_tokens), tokenizer, split);
    let (first, past) = (before.files.len(), before.pieces);
    let Done { train, validation, .. } = before.clone();
    let mut writing_down = TokenWriter {
        tokenizer,
        parts: [writer("train", train)?, writer("val", validation)?],
        journal,
        done: before,
    };
    let (sender, receiver) = sync_channel(WAITING);
    let ended = std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let mut chunks = Chunks { sender, chunk: Chunk::default(), held: 0, number: 0 };
            for (n, file) in files.iter().enumerate().skip(first) {
                let past = if n == first { past } else { 0 };
                chunks.number = 0;
                let read = read_file(file, plan.skip_bad, &done, &mut |piece| {
                    chunks.push((piece, file.validation), past).map(ControlFlow::Continue)
                })?;
                chunks.chunk.files.push(read);
                chunks.chunk.pieces_of_next = 0;
            }
            chunks.send()
        });
        let mut shown = Instant::now();
        let tokenized = writing_down.tokenize(plan, receiver, &mut |held| {
            bar.set_position(done.load(Ordering::Relaxed));
            // Without a bar, print a line from time to time.
            if bar.is_hidden() && shown.elapsed() > QUIET {
                shown = Instant::now();
                notify(&held);
            }
            bar.set_message(held);
        });
        // If reading and tokenizing both fail, report the error of tokenizing: when tokenizing fails, the reader's send
        // fails too. When reading fails, tokenizing gets fewer chunks but does not fail.
        let read = reading.join().unwrap_or_else(|_| Err(Error::new("the reading thread panicked")));
        tokenized.and(read)
    });
    bar.finish_and_clear();
    ended?;
    let TokenWriter { parts: [train, validation], done, .. } = writing_down;
    let (train, validation) = (train.finish()?, validation.finish()?);
    if train.tokens == 0 {
        return Err(no_text());
    }
    let prepared = Prepared {
        inputs: plan.inputs.clone(),
        tokenizer: tokenizer.hash().into(),
        vocab_size: tokenizer.vocab_size(),
        end_of_text: tokenizer.end_of_text(),
        format,
        train,
        validation,
        unknown_tokens: done.unknown,
        files: done.files,
    };
    let path = folder.join(LIST);
    std::fs::write(&path, serde_json::to_string_pretty(&prepared).expect("plain values"))
        .map_err(writing(&path))?;
    Ok(prepared)
}

/// Consecutive pieces of documents. `files` and `pieces_of_next` say how far the files have been read.
#[derive(Default)]
struct Chunk {
    /// The pieces, and for each piece whether its file is for validation.
    pieces: Vec<(Piece, bool)>,
    /// Files that were completely read since the previous chunk.
    files: Vec<FileRead>,
    /// Number of pieces read so far from the file after the last completely read file.
    pieces_of_next: u64,
}

/// Collects pieces of documents into chunks, and sends the chunks to be tokenized.
struct Chunks {
    sender: SyncSender<Chunk>,
    chunk: Chunk,
    held: usize,
    /// Number of pieces of the current file so far.
    number: u64,
}

impl Chunks {
    /// Adds a piece, unless it is one of the first `past` pieces of its file, which are already written.
    fn push(&mut self, piece: (Piece, bool), past: u64) -> Result<()> {
        self.number += 1;
        self.chunk.pieces_of_next = self.number;
        if self.number <= past {
            return Ok(());
        }
        self.held += piece.0.text.len();
        self.chunk.pieces.push(piece);
        if self.held >= CHUNK { self.send() } else { Ok(()) }
    }

    fn send(&mut self) -> Result<()> {
        self.held = 0;
        let next = Chunk { pieces_of_next: self.chunk.pieces_of_next, ..Chunk::default() };
        let chunk = std::mem::replace(&mut self.chunk, next);
        self.sender.send(chunk).map_err(|_| Error::new("the tokenizing thread has ended"))
    }
}

/// Writes tokens and progress.
struct TokenWriter<'a> {
    tokenizer: &'a Tokenizer,
    parts: [SplitWriter<'a>; 2],
    journal: Journal<'a>,
    done: Done,
}

impl TokenWriter<'_> {
    /// Tokenizes all chunks, and writes their tokens.
    fn tokenize(&mut self, plan: &Plan, chunks: Receiver<Chunk>, show: &mut dyn FnMut(String)) -> Result<()> {
        let Self { tokenizer, parts: [train, validation], journal, done } = self;
        for Chunk { pieces, files, pieces_of_next } in chunks {
            if let Some(changes) = sample(&pieces).filter(|_| done.documents == 0 && !done.continued) {
                tokenizer.changes(changes)?.iter().for_each(|changes| notify(changes));
            }
            let mut continued = done.continued;
            let begins = |(piece, _): &'_ (Piece, bool)| std::mem::replace(&mut continued, !piece.ends);
            let goes_on: Vec<bool> = pieces.iter().map(begins).collect();
            let texts = pieces.iter().map(|(piece, _)| piece.text.as_str());
            let ids = tokenizer.encode_all(&texts.zip(goes_on).collect::<Vec<_>>())?;
            for ((piece, of_validation), mut ids) in pieces.into_iter().zip(ids) {
                if !done.continued && piece.ends && is_blank(&piece) {
                    continue;
                }
                if piece.ends {
                    ids.push(tokenizer.end_of_text());
                }
                let drawn = || for_validation(plan.seed, done.documents, plan.val_fraction);
                let kept = if plan.val_inputs.is_empty() { drawn() } else { of_validation };
                let part = if kept { &mut *validation } else { &mut *train };
                done.unknown += tokenizer.unknown_in(&ids);
                part.write(&ids, piece.text.len() as u64, piece.ends)?;
                done.documents += u64::from(piece.ends);
                done.continued = !piece.ends;
            }
            done.files.extend(files);
            done.pieces = pieces_of_next;
            journal.keep(train.complete() + validation.complete(), || {
                (done.train, done.validation) = (train.state()?, validation.state()?);
                Ok(done.clone())
            })?;
            let tokens = train.tokens() + validation.tokens();
            show(format!("{}, {}", counted(done.documents, "document"), counted(tokens, "token")));
        }
        Ok(())
    }
}

/// The beginning of the first text.
fn sample(pieces: &[(Piece, bool)]) -> Option<&str> {
    pieces.first().map(|(piece, _)| head(&[&piece.text], SAMPLE))
}

/// Whether document number `document` is kept for validation. The choice does not depend on how many documents the
/// data has. The first document is never kept.
fn for_validation(seed: u64, document: u64, fraction: f64) -> bool {
    // SplitMix64.
    let mut bits = seed ^ document.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for factor in [0xbf58_476d_1ce4_e5b9_u64, 0x94d0_49bb_1331_11eb] {
        bits = (bits ^ (bits >> 30)).wrapping_mul(factor);
    }
    document > 0 && ((bits ^ (bits >> 31)) as f64) < fraction * 2f64.powi(64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_asked_part_is_for_validation() {
        for fraction in [0.0, 0.005, 0.3] {
            let kept = (0..100_000).filter(|&n| for_validation(7, n, fraction)).count() as f64;
            let spread = (100_000.0 * fraction * (1.0 - fraction)).sqrt();
            assert!((kept - 100_000.0 * fraction).abs() <= 4.0 * spread, "{kept} at {fraction}");
        }
        assert!(!for_validation(0, 0, 0.9));
    }
}
