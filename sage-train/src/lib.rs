//! Pre-training of small Llamas with low-bit attention, and fair comparison with full precision.
//!
//! - `cli`: the command line; `settings`: every option of it; `config`: the resolved, checked configuration
//!   of a run.
//! - `data`: from text to batches; `model`: the Llama; `optim`: AdamW's settings and learning-rate schedules.
//! - `train`: the training loop; `checkpoint`: the state that a run resumes from; `ranks`: several processes
//!   that train one model; `device`: where a process computes; `signals`: how a run is asked to stop.
//! - `evaluate` and `sample`: validation and generated text; `probe`: errors of attention in a trained model;
//!   `bench`: speed of attention.
//! - `trained`: a trained model, from a run or, through `hf`, in Hugging Face's format.
//! - `metrics` and `runs`: what runs measured and how they ended; `report`: tables and plots of them;
//!   `sweep`: many runs.
//! - `partial` and `lock`: files that are whole, folders with one writer; `checks` and `quantity`: ranges and
//!   notation of numbers.

pub mod bench;
pub mod checkpoint;
pub mod checks;
pub mod cli;
pub mod config;
pub mod data;
pub mod device;
pub mod evaluate;
pub mod hf;
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

/// Turns an error of a library into an [`Error`] that tells what was attempted.
pub(crate) fn during<E: std::fmt::Display>(what: impl Into<String>) -> impl FnOnce(E) -> Error {
    let what = what.into();
    move |error| Error::new(what).got(error).with_kind(ErrorKind::Failed)
}

/// Turns an error of candle's into one of ours, saying what was being done: of a GPU without memory with what helps.
pub(crate) fn on_device(what: &str) -> impl FnOnce(candle_core::Error) -> Error {
    move |error| {
        let kind = ErrorKind::of(&error);
        let error = Error::new(what).got(error).with_kind(kind);
        match kind {
            ErrorKind::OutOfMemory => error.hint(
                "the GPU's memory is full: halve --micro-batch, or --recompute attention, or --recompute block; --dry-run \
                 estimates",
            ),
            _ => error,
        }
    }
}

/// Checks that the folder of a run, a checkpoint or a model is there.
pub(crate) fn check_there(folder: &std::path::Path) -> Result<()> {
    if folder.exists() {
        return Ok(());
    }
    Err(Error::new("there is no such folder")
        .got(folder.display())
        .allowed("the folder of a run, of one of its checkpoints, or of a model")
        .hint("a run says where its folder is when it begins: runs/NAME, or what --out says"))
}

/// Turns an error of writing a file into an [`Error`].
pub(crate) fn writing<E: std::fmt::Display>(path: &std::path::Path) -> impl FnOnce(E) -> Error {
    let what = format!("cannot write {}", path.display());
    move |error| {
        Error::new(what)
            .got(error)
            .hint("is there room, and may the folder be written? if not, name another")
            .with_kind(ErrorKind::Failed)
    }
}

/// Bytes as hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A progress bar on standard error, hidden if that is not a terminal.
pub(crate) fn bar(len: u64, template: &str) -> indicatif::ProgressBar {
    let style = indicatif::ProgressStyle::with_template(template);
    indicatif::ProgressBar::new(len)
        .with_style(style.unwrap_or_else(|_| indicatif::ProgressStyle::default_bar()))
}

/// Prints a line to standard error. A write error is ignored, because a run does not stop when nobody reads
/// its output.
pub(crate) fn tell(text: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "{}", text.trim_end());
}

/// Runs code of a library that may panic on a damaged file. A panic becomes an error.
pub(crate) fn unpanicked<T>(
    work: impl FnOnce() -> std::result::Result<T, String>,
) -> std::result::Result<T, String> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err("the file is damaged".into()))
}
