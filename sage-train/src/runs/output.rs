//! Checks and writes the result files of commands.

use std::path::Path;

use candle_sage::{Error, Result};

use super::{CONFIG, ENDING, GRADIENTS, METRICS, PROBES, Run, STARTS};
use crate::writing;

/// Checks that a command may write its results to a file, before it computes them. The folder must exist. An existing
/// file must have the extension `ending`, and must not be part of a run or a checkpoint. Device files are always
/// accepted.
///
/// # Errors
/// When the file may not be written.
pub fn check_output(path: &Path, ending: &str) -> Result<()> {
    const OWN: [&str; 12] = [
        METRICS,
        PROBES,
        GRADIENTS,
        CONFIG,
        ENDING,
        STARTS,
        "metrics.csv",
        "loss.svg",
        "sample.txt",
        "tokenizer.json",
        "tokenizer_config.json",
        "checkpoint.json",
    ];
    let parent = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Some(folder) = parent.filter(|folder| !folder.is_dir()) {
        return Err(Error::new("the folder of a file to write does not exist")
            .got(path.display())
            .allowed("a file in an existing folder")
            .hint(format!("mkdir -p {}", folder.display())));
    }
    // A link counts as its target.
    let file = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    if ["/dev", "/proc"].iter().any(|devices| path.starts_with(devices)) || !file.is_file() {
        return Ok(());
    }
    let folder = file.parent().unwrap_or(Path::new(""));
    let name = file.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    // Names of logs and of weight files can contain numbers, so `OWN` does not list them.
    let own = OWN.contains(&name.as_str())
        || name.ends_with(".safetensors")
        || ["log.", "events."].iter().any(|start| name.starts_with(start));
    if own && (Run::is(folder) || folder.join("checkpoint.json").exists()) {
        return Err(Error::new("the output would overwrite a file of a run")
            .got(path.display())
            .allowed("another name, or a folder without a run")
            .hint(format!("e.g. results.{ending}")));
    }
    if file.extension().is_some_and(|found| found.eq_ignore_ascii_case(ending)) {
        return Ok(());
    }
    Err(Error::new("the existing file does not have the extension of the output")
        .got(path.display())
        .allowed(format!("a new file, or one that ends in .{ending}"))
        .hint("remove the file first if it is not needed"))
}

/// Writes the results of a command to a file, device or pipe.
///
/// # Errors
/// When [`check_output`] does not accept the file, or the file cannot be written.
pub fn write_output(path: &Path, ending: &str, text: &str) -> Result<()> {
    check_output(path, ending)?;
    std::fs::write(path, text).map_err(writing(path))
}
