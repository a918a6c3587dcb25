//! One process at a time works in a folder.

use std::fs::{File, TryLockError};
use std::path::Path;
use std::time::{Duration, Instant};

use candle_sage::{Error, Result};

use crate::writing;

const LOCK: &str = ".lock";

/// Longer than a look takes.
const LOOK: Duration = Duration::from_millis(100);

/// A file that is held; the system lets go of it when the process ends, however it ends.
#[derive(Debug)]
pub struct Lock(#[allow(dead_code, reason = "it is held, and nothing else")] File);

impl Lock {
    /// Takes a file, which is made if it is not there.
    ///
    /// # Errors
    /// When another process has it.
    pub fn take(path: &Path) -> Result<Self> {
        Self::hold(File::create(path).map_err(writing(path))?, path)
    }

    /// Takes a file that was left. One that is gone by now is in somebody's hands.
    ///
    /// # Errors
    /// When another process has it.
    pub fn take_existing(path: &Path) -> Result<Self> {
        let file = File::options().write(true).open(path).map_err(|_| in_use(path))?;
        Self::hold(file, path)
    }

    fn hold(file: File, path: &Path) -> Result<Self> {
        let began = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self(file)),
                // Who merely looks whether it is held holds it for a moment.
                Err(TryLockError::WouldBlock) if began.elapsed() < LOOK => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(TryLockError::WouldBlock) => return Err(in_use(path)),
                Err(TryLockError::Error(error)) => return Err(writing(path)(error)),
            }
        }
    }

    /// Whether a process works in the folder of a run. It leaves nothing there, and those who look do not see each other.
    pub fn is_held(folder: &Path) -> bool {
        let file = File::options().write(true).open(folder.join(LOCK));
        file.is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
    }

    /// Whether a process of this program ever worked in a folder, or made it and no more.
    pub fn marks(folder: &Path) -> bool {
        let empty = || std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none());
        folder.join(LOCK).exists() || empty()
    }

    /// Takes the folder of a run.
    ///
    /// # Errors
    /// When another process has it.
    pub fn run(folder: &Path) -> Result<Self> {
        Self::take(&folder.join(LOCK))
    }
}

fn in_use(path: &Path) -> Error {
    let folder = path.parent().unwrap_or(Path::new("."));
    Error::new(format!("{} is in use", folder.display()))
        .got("another process works in it")
        .allowed("one process at a time")
        .hint("wait for it, or stop it: a run saves a checkpoint when it is interrupted")
}
