//! One process at a time works in a run's folder.

use std::fs::{File, TryLockError};
use std::path::Path;

use candle_sage::{Error, Result};

use crate::writing;

/// Held as long as a run goes on; the system lets go of it when the process ends, however it ends.
#[derive(Debug)]
pub struct Lock(#[allow(dead_code, reason = "it is held, and nothing else")] File);

impl Lock {
    /// Takes the folder of a run.
    ///
    /// # Errors
    /// When another process has it.
    pub fn take(run: &Path) -> Result<Self> {
        let path = run.join(".lock");
        let file = File::create(&path).map_err(writing(&path))?;
        match file.try_lock() {
            Ok(()) => Ok(Self(file)),
            Err(TryLockError::WouldBlock) => Err(Error::new("the run is under way")
                .got(format!("another process works in {}", run.display()))
                .allowed("one process for each run")
                .hint("wait for it, or stop it: it saves a checkpoint when it is interrupted")),
            Err(TryLockError::Error(error)) => Err(writing(&path)(error)),
        }
    }
}
