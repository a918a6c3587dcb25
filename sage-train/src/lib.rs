//! Pre-training of small Llamas with low-bit attention, and fair comparison with unquantized attention.
//!
//! - `cli`: the command line; `settings`: every setting of a run; `config`: the resolved, checked configuration of a
//!   run.
//! - `data`: from text to batches; `model`: the Llama; `optim`: optimizers and learning-rate schedules.
//! - `train`: the training loop; `checkpoint`: the state that a run resumes from; `ranks`: several processes
//!   that train one model; `device`: the GPU or CPU of a process; `signals`: signals that stop a run.
//! - `evaluate` and `sample`: validation and generated text; `probe`: errors of attention in a trained model;
//!   `bench`: speed of attention.
//! - `trained`: a trained model, from a run or, through `hf`, in Hugging Face's format.
//! - `metrics`: measurements of runs; `runs`: the folders of runs; `report`: tables and plots of runs; `sweep`: many runs.
//! - `partial`: files that are complete or absent; `lock`: folders with one writer; `checks`: ranges of numbers;
//!   `quantity`: notation of numbers.

use std::borrow::Cow;
use std::cell::Cell;
use std::fs::{File, OpenOptions};
use std::path::Path;
use std::sync::Once;

pub mod bench;
pub mod checkpoint;
pub mod checks;
pub mod cli;
pub mod config;
pub mod data;
pub mod device;
pub mod evaluate;
pub mod hf;
pub mod initial;
pub mod lock;
pub mod metrics;
pub mod model;
pub mod optim;
pub mod partial;
pub mod probe;
pub mod quantity;
pub mod ranks;
pub mod report;
pub mod runs;
pub mod sample;
pub mod settings;
pub mod signals;
pub mod sweep;
pub mod train;
pub mod trained;

pub use candle_sage::{Error, ErrorKind, Result};

/// An error of any library.
pub(crate) type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// Turns an error of a library into an [`Error`] that names the attempted operation.
pub(crate) fn during<E: Into<AnyError>>(what: impl Into<String>) -> impl FnOnce(E) -> Error {
    let what = what.into();
    move |error| Error::failed(what).caused_by(error)
}

/// Turns a candle error into an [`Error`] that names the attempted operation. If the GPU ran out of memory, the error
/// has a hint.
pub(crate) fn on_device(what: &str) -> impl FnOnce(candle_core::Error) -> Error {
    move |error| {
        let kind = ErrorKind::of(&error);
        let error = Error::new(what).caused_by(error).with_kind(kind);
        match kind {
            ErrorKind::OutOfMemory => error.hint(
                "the GPU's memory is full: halve --micro-batch; training also has --recompute attention or \
                 block, and --dry-run, which estimates the memory",
            ),
            _ => error,
        }
    }
}

/// Checks that the folder of a run, a checkpoint or a model is there.
pub(crate) fn check_there(folder: &Path) -> Result<()> {
    if folder.exists() {
        return Ok(());
    }
    Err(Error::new("there is no such folder")
        .got(folder.display())
        .allowed("the folder of a run, of runs, of a checkpoint, or of a model")
        .hint("a run prints its folder when it begins: runs/NAME, or OUT/NAME with --out OUT"))
}

/// Turns an error of writing a file into an [`Error`].
pub(crate) fn writing<E: Into<AnyError>>(path: &Path) -> impl FnOnce(E) -> Error {
    let what = format!("cannot write {}", path.display());
    move |error| {
        Error::failed(what)
            .caused_by(error)
            .hint("check the free space and the permissions of the folder, or name another folder")
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A progress bar on standard error, hidden if standard error is not a terminal.
pub(crate) fn bar(len: u64, template: &str) -> indicatif::ProgressBar {
    let style = indicatif::ProgressStyle::with_template(template);
    indicatif::ProgressBar::new(len)
        .with_style(style.unwrap_or_else(|_| indicatif::ProgressStyle::default_bar()))
}

/// Whether a character acts on a terminal instead of being shown: control characters except line ends and tabs, and
/// marks that change the text direction.
pub(crate) fn acts_on_terminals(c: char) -> bool {
    (c.is_control() && c != '\n' && c != '\t')
        || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Text for a terminal or a log: characters that act on a terminal are escaped, such as `\u{1b}`. File names, samples,
/// and messages of other ranks may contain such characters.
pub(crate) fn printable(text: &str) -> Cow<'_, str> {
    if !text.contains(acts_on_terminals) {
        return text.into();
    }
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match acts_on_terminals(c) {
            true => out.extend(c.escape_default()),
            false => out.push(c),
        }
    }
    out.into()
}

/// Prints a line to standard error. A write error is ignored: a run must not stop because nobody reads its output.
pub fn notify(text: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "{}", printable(text.trim_end()));
}

/// Opens a file for writing, without following a symbolic link. Otherwise anybody who may write in the folder could,
/// with a link, make this program overwrite any file of the user who runs it.
pub(crate) fn open_own(path: &Path, options: &mut OpenOptions) -> Result<File> {
    #[cfg(unix)]
    {
        use rustix::fs::OFlags;
        use std::os::unix::fs::OpenOptionsExt;
        // NONBLOCK: opening a named pipe without a reader fails instead of blocking forever.
        options.custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32);
    }
    options.open(path).map_err(|error| match path.is_symlink() {
        true => Error::new("a file of a run is a symbolic link")
            .got(path.display())
            .allowed("a regular file")
            .hint("remove the link, or choose another folder for runs with --out")
            .with_kind(ErrorKind::Failed),
        false => writing(path)(error),
    })
}

/// Reads a text file that is expected to be small. Returns an error for a file of more than `most` bytes, because a
/// large file could fill the memory.
pub(crate) fn read_small(path: &Path, most: u64) -> std::io::Result<String> {
    use std::io::{Error, ErrorKind, Read};
    let mut bytes = Vec::new();
    File::open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        return Err(Error::new(ErrorKind::FileTooLarge, format!("larger than {} KiB", most >> 10)));
    }
    String::from_utf8(bytes).map_err(|error| Error::new(ErrorKind::InvalidData, error.utf8_error()))
}

/// Reads bytes at a position of a file. Several threads may read the file at once, because no shared file position is
/// moved.
#[cfg(unix)]
pub(crate) fn read_exact_at(file: &File, bytes: &mut [u8], at: u64) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, at)
}

/// Reads bytes at a position of a file, like the function for Unix above.
#[cfg(windows)]
pub(crate) fn read_exact_at(file: &File, mut bytes: &mut [u8], mut at: u64) -> std::io::Result<()> {
    while !bytes.is_empty() {
        let read = std::os::windows::fs::FileExt::seek_read(file, bytes, at)?;
        if read == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        (bytes, at) = (&mut bytes[read..], at + read as u64);
    }
    Ok(())
}

thread_local! {
    /// Whether a panic of this thread is turned into an error instead of being printed.
    static CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Runs code of a library that may panic on a damaged file. A panic becomes an error.
pub(crate) fn unpanicked<T, E: Into<AnyError>>(
    work: impl FnOnce() -> std::result::Result<T, E>,
) -> std::result::Result<T, AnyError> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let print = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !CAUGHT.get() {
                print(panic);
            }
        }));
    });
    let outer = CAUGHT.replace(true);
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    CAUGHT.set(outer);
    done.map_or_else(|_| Err("the file is damaged".into()), |done| done.map_err(Into::into))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_acts_on_a_terminal_is_escaped() {
        assert!(matches!(printable("plain\n\ttext, 日本語 🦀"), Cow::Borrowed(_)));
        assert_eq!(
            printable("a\u{1b}[31m\r\u{7}\u{9b}\u{202e}b\n"),
            r"a\u{1b}[31m\r\u{7}\u{9b}\u{202e}b".to_owned() + "\n"
        );
    }
}
