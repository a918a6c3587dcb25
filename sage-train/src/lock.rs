//! A lock file for a folder: one process at a time works in it.

use std::fs::{File, TryLockError};
use std::path::Path;
use std::time::{Duration, Instant};

use candle_sage::{Error, Result};

use crate::{open_own, writing};

const LOCK: &str = ".lock";

/// How long a process keeps trying to take a lock. A check by [`Lock::is_held`] locks the file for a moment.
const LOOK: Duration = Duration::from_secs(1);

/// A locked file. The system releases the lock when the process ends, however it ends.
#[derive(Debug)]
pub struct Lock(#[allow(dead_code, reason = "it is held, and nothing else")] File);

impl Lock {
    /// Locks a file, and creates it if it does not exist.
    ///
    /// # Errors
    /// When another process holds the lock, or the file cannot be created.
    pub fn take(path: &Path) -> Result<Self> {
        Self::hold(open_own(path, File::options().write(true).create(true).truncate(false))?, path)
    }

    /// Locks a file that an ended process left behind.
    ///
    /// # Errors
    /// When another process holds the lock, or the file cannot be opened: another process may have just removed it.
    pub fn take_existing(path: &Path) -> Result<Self> {
        let file = open_own(path, File::options().write(true)).map_err(|_| in_use(path))?;
        Self::hold(file, path)
    }

    fn hold(file: File, path: &Path) -> Result<Self> {
        let began = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self(file)),
                Err(TryLockError::WouldBlock) if began.elapsed() < LOOK => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(TryLockError::WouldBlock) => return Err(in_use(path)),
                Err(TryLockError::Error(error)) => return Err(writing(path)(error)),
            }
        }
    }

    /// Whether a process holds the lock of a run's folder. The check creates no file, and takes a shared lock, so that
    /// concurrent checks do not mistake each other for the holder.
    pub fn is_held(folder: &Path) -> bool {
        let file = open_own(&folder.join(LOCK), File::options().write(true));
        file.is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
    }

    /// Whether this program has worked in a folder: the folder has a lock file, or is empty because the process that
    /// created the folder ended before creating the lock file.
    pub fn marks(folder: &Path) -> bool {
        let empty = || std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none());
        folder.join(LOCK).exists() || empty()
    }

    /// Locks the folder of a run.
    ///
    /// # Errors
    /// When another process holds the lock.
    pub fn run(folder: &Path) -> Result<Self> {
        Self::take(&folder.join(LOCK))
    }
}

fn in_use(path: &Path) -> Error {
    let folder = path.parent().unwrap_or(Path::new("."));
    Error::failed(format!("{} is in use", folder.display()))
        .got("another process works in it")
        .allowed("one process at a time")
        .hint("wait until that process ends, or interrupt it: a run then saves a checkpoint")
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_is_a_link_is_refused_and_its_target_kept() {
        let scratch = tempfile::tempdir().expect("a folder");
        let (victim, run) = (scratch.path().join("victim"), scratch.path().join("run"));
        std::fs::write(&victim, "dear").expect("a file");
        std::fs::create_dir(&run).expect("a folder");
        std::os::unix::fs::symlink(&victim, run.join(LOCK)).expect("a link");
        let error = Lock::run(&run).expect_err("a link").to_string();
        assert!(error.contains("symbolic link") && error.contains("hint:"), "{error}");
        assert!(!Lock::is_held(&run));
        assert_eq!(std::fs::read_to_string(&victim).expect("a file"), "dear");
        std::fs::remove_file(run.join(LOCK)).expect("a link");
        let held = Lock::run(&run).expect("a lock");
        assert!(
            Lock::run(&run).is_err_and(|error| error.to_string().contains("in use")) && Lock::is_held(&run)
        );
        drop(held);
    }
}
