//! One process at a time works in a folder.

use std::fs::{File, TryLockError};
use std::path::Path;

use candle_sage::{Error, Result};

use crate::writing;

/// A file that is held; the system lets go of it when the process ends, however it ends.
#[derive(Debug)]
pub struct Lock(#[allow(dead_code, reason = "it is held, and nothing else")] File);

impl Lock {
    /// Takes a file, which is made if it is not there.
    ///
    /// # Errors
    /// When another process has it.
    pub fn take(path: &Path) -> Result<Self> {
        let file = File::create(path).map_err(writing(path))?;
        let folder = path.parent().unwrap_or(Path::new("."));
        match file.try_lock() {
            Ok(()) => Ok(Self(file)),
            Err(TryLockError::WouldBlock) => Err(Error::new(format!("{} is in use", folder.display()))
                .got("another process works in it")
                .allowed("one process at a time")
                .hint("wait for it, or stop it: a run saves a checkpoint when it is interrupted")),
            Err(TryLockError::Error(error)) => Err(writing(path)(error)),
        }
    }

    /// Takes the folder of a run.
    ///
    /// # Errors
    /// When another process has it.
    pub fn run(folder: &Path) -> Result<Self> {
        Self::take(&folder.join(".lock"))
    }
}
