//! Files that a command writes its results to.

use std::path::Path;

use candle_sage::{Error, Result};

use super::{CONFIG, ENDING, GRADIENTS, METRICS, PROBES, Run, STARTS};
use crate::writing;

/// Checks, before a command computes its results, that they may be written to a file: that its folder exists, and that it replaces no file
/// that a run or a checkpoint has written, and none of another kind than its own, by its `ending`. Devices take what they get.
///
/// # Errors
/// When it does.
pub fn check_beside(path: &Path, ending: &str) -> Result<()> {
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
            .allowed("a file in a folder that exists")
            .hint(format!("mkdir -p {}", folder.display())));
    }
    // A link is what it leads to.
    let file = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    if ["/dev", "/proc"].iter().any(|devices| path.starts_with(devices)) || !file.is_file() {
        return Ok(());
    }
    let folder = file.parent().unwrap_or(Path::new(""));
    let name = file.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    // Logs have the number of their rank, and weights that of their part.
    let own = OWN.contains(&name.as_str())
        || name.ends_with(".safetensors")
        || ["log.", "events."].iter().any(|start| name.starts_with(start));
    if own && (Run::is(folder) || folder.join("checkpoint.json").exists()) {
        return Err(Error::new("this file is a run's own, and is not overwritten")
            .got(path.display())
            .allowed("another name, or a folder without a run")
            .hint(format!("e.g. results.{ending}")));
    }
    if file.extension().is_some_and(|found| found.eq_ignore_ascii_case(ending)) {
        return Ok(());
    }
    Err(Error::new("a file of another kind is not overwritten")
        .got(path.display())
        .allowed(format!("a new file, or one that ends in .{ending}"))
        .hint("remove it first if nothing in it is needed"))
}

/// Writes the results of a command, to a device or pipe too, but never over a file of a run, or of another kind.
///
/// # Errors
/// When it would be one, or cannot be written.
pub fn write_beside(path: &Path, ending: &str, text: &str) -> Result<()> {
    check_beside(path, ending)?;
    std::fs::write(path, text).map_err(writing(path))
}
