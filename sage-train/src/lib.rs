//! Pre-training of small Llamas with low-bit attention, and fair comparison with full precision.
//!
//! `settings` is what may be said, `config` what will run, `device` where, `data` text to batches, `model` the Llama,
//! `optim` the update, `ranks` several processes that train one model, `train` the loop over them and its checkpoints, `evaluate` and `sample` what a model can, `hf` the
//! way to Hugging Face's format and back, `probe` the errors of a trained model, `bench` the speed of attention, `report`
//! the pictures, `partial` and `lock` what keeps files whole, `signals` how a run is asked to stop, `cli` the command.

pub mod bench;
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

/// Turns an error of a library into one of ours, saying what was being done.
pub(crate) fn during<E: std::fmt::Display>(what: impl Into<String>) -> impl FnOnce(E) -> Error {
    let what = what.into();
    move |error| Error::new(what).got(error).with_kind(ErrorKind::Failed)
}

/// Turns an error of writing a file into one of ours.
pub(crate) fn writing<E: std::fmt::Display>(path: &std::path::Path) -> impl FnOnce(E) -> Error {
    let what = format!("cannot write {}", path.display());
    move |error| {
        Error::new(what)
            .got(error)
            .hint("is there room, and may the folder be written? --out names another")
            .with_kind(ErrorKind::Failed)
    }
}

/// Bytes as hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A progress bar on standard error; hidden where that is no terminal.
pub(crate) fn bar(len: u64, template: &str) -> indicatif::ProgressBar {
    let style = indicatif::ProgressStyle::with_template(template);
    indicatif::ProgressBar::new(len)
        .with_style(style.unwrap_or_else(|_| indicatif::ProgressStyle::default_bar()))
}

/// A line on standard error. Nobody reading it is no reason to stop.
pub(crate) fn tell(text: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "{}", text.trim_end());
}

/// Runs code of a library that may panic over a broken file: a panic becomes an error.
pub(crate) fn unpanicked<T>(
    work: impl FnOnce() -> std::result::Result<T, String>,
) -> std::result::Result<T, String> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err("the file is damaged".into()))
}
