//! Atomic files and folders: each file or folder is written under a temporary name, synced to disk, and then renamed.

use std::fs::File;
use std::path::{Path, PathBuf};

use candle_sage::{Error, Result};

use crate::lock::Lock;
use crate::writing;

/// Suffix of the temporary name.
pub const PARTIAL: &str = ".partial";

/// The file that marks a folder that this program has not finished. The lock on this file tells whether a process
/// works in the folder.
const MARK: &str = "unfinished-by-sage-train";

/// The journal: the file that records how much of an unfinished folder is complete, so that a later process can resume.
/// This module never removes a folder that contains a journal.
pub const JOURNAL: &str = "progress.json";

/// The temporary path at which a file or folder is written.
pub fn of(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(PARTIAL);
    path.with_file_name(name)
}

/// Waits until a file, or the entries of a folder, are on disk.
pub fn sync(path: &Path) -> Result<()> {
    if cfg!(windows) && path.is_dir() {
        return Ok(());
    }
    File::open(path).and_then(|file| file.sync_all()).map_err(writing(path))
}

/// Creates or replaces a file atomically: `write` gets the temporary name, which contains the id of this
/// process. After a failure the temporary file is removed.
///
/// # Errors
/// The errors of `write`, and when the file cannot be synced or renamed.
pub fn file(path: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let mut own = path.as_os_str().to_owned();
    own.push(format!(".{}", std::process::id()));
    let partial = of(Path::new(&own));
    // A link at the temporary name is removed, so that `write` does not follow the link.
    let _ = std::fs::remove_file(&partial);
    let written = write(&partial)
        .and_then(|()| sync(&partial))
        .and_then(|()| std::fs::rename(&partial, path).map_err(writing(path)));
    if written.is_err() {
        let _ = std::fs::remove_file(&partial);
    }
    written
}

/// Checks that nothing exists at `path`. The error contains `what`, such as "folder", and `flag`, which sets the path.
///
/// # Errors
/// When something exists there.
pub fn check_free(path: &Path, what: &str, flag: &str) -> Result<()> {
    if !path.exists() {
        return Ok(());
    }
    Err(Error::new(format!("the {what} exists already"))
        .got(path.display())
        .allowed(format!("a new {}", if what == "folder" { "folder" } else { "file" }))
        .hint(format!("{flag} sets another path; this command overwrites nothing")))
}

/// Whether a folder is an unfinished [`Folder`].
pub fn is_unfinished(folder: &Path) -> bool {
    folder.join(MARK).exists()
}

/// A folder that is being written. The folder is removed if this value is dropped before [`Folder::finish`], unless the
/// folder contains a [`JOURNAL`].
#[derive(Debug)]
pub struct Folder {
    target: PathBuf,
    partial: PathBuf,
    lock: Option<Lock>,
}

impl Folder {
    /// Begins a new folder. Removes the unfinished folder of an earlier attempt, unless it contains a [`JOURNAL`].
    ///
    /// # Errors
    /// When the folder exists, something else has its temporary name, another process is making it, or the unfinished
    /// folder of an earlier attempt contains a journal.
    pub fn begin(target: &Path) -> Result<Self> {
        Self::open(target, false)
    }

    /// As [`Folder::begin`], but continues an unfinished folder that contains a [`JOURNAL`].
    ///
    /// # Errors
    /// When the folder exists, something else has its temporary name, or another process is making it.
    pub fn take_up(target: &Path) -> Result<Self> {
        Self::open(target, true)
    }

    fn open(target: &Path, goes_on: bool) -> Result<Self> {
        // Removes a trailing slash.
        let target: PathBuf = target.components().collect();
        check_free(&target, "folder", "--to")?;
        let partial = of(&target);
        let (is_marked, has_journal) = (is_unfinished(&partial), partial.join(JOURNAL).exists());
        // A process can end after it removed the mark and before it renamed the folder. Only the journal then shows
        // that the folder is unfinished.
        if is_marked || has_journal {
            let abandoned = match is_marked {
                true => Lock::take_existing(&partial.join(MARK))?,
                false => Lock::take(&partial.join(MARK))?,
            };
            if has_journal {
                if goes_on {
                    return Ok(Self { target, partial, lock: Some(abandoned) });
                }
                return Err(Error::new("an interrupted `data prepare` is in the way")
                    .got(partial.display())
                    .allowed("no folder with this name")
                    .hint(format!(
                        "repeat that `data prepare` to resume it, name another folder with --to, or rm -r {}",
                        partial.display()
                    )));
            }
            std::fs::remove_dir_all(&partial).map_err(writing(&partial))?;
            drop(abandoned);
        } else if partial.exists() {
            return Err(Error::new("the name of the temporary folder is taken")
                .got(partial.display())
                .allowed("no folder with this name, or one that an interrupted command left")
                .hint("it was not left by an interrupted command: rename or remove it"));
        }
        if let Some(parent) = partial.parent() {
            std::fs::create_dir_all(parent).map_err(writing(parent))?;
        }
        std::fs::create_dir(&partial).map_err(writing(&partial))?;
        let lock = Some(Lock::take(&partial.join(MARK))?);
        Ok(Self { target, partial, lock })
    }

    /// The folder to write into.
    pub fn path(&self) -> &Path {
        &self.partial
    }

    /// Gives the folder its final name.
    ///
    /// # Errors
    /// When the folder cannot be synced or renamed.
    pub fn finish(mut self) -> Result<()> {
        // Without a lock in `self`, `drop` keeps the folder, even if a call below fails.
        let lock = self.lock.take();
        for entry in std::fs::read_dir(&self.partial).map_err(writing(&self.partial))? {
            sync(&entry.map_err(writing(&self.partial))?.path())?;
        }
        let mark = self.partial.join(MARK);
        std::fs::remove_file(&mark).map_err(writing(&mark))?;
        sync(&self.partial)?;
        std::fs::rename(&self.partial, &self.target).map_err(writing(&self.target))?;
        drop(lock);
        // The journal is removed after the rename: if the process ends before the rename, the next attempt needs the
        // journal to resume. A journal in a renamed folder is harmless.
        let _ = std::fs::remove_file(self.target.join(JOURNAL));
        match self.target.parent() {
            Some(parent) if parent != Path::new("") => sync(parent),
            _ => sync(Path::new(".")),
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if self.lock.is_some() && !self.partial.join(JOURNAL).exists() {
            let _ = std::fs::remove_dir_all(&self.partial);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_with_a_journal_is_kept_until_it_is_whole() {
        let scratch = tempfile::tempdir().expect("a folder");
        let target = scratch.path().join("new");
        let folder = Folder::take_up(&target).expect("a beginning");
        let journal = folder.path().join(JOURNAL);
        std::fs::write(&journal, "so far").expect("a file");
        drop(folder);
        assert!(journal.exists());
        let error = Folder::begin(&target).expect_err("in the way").to_string();
        assert!(error.contains("an interrupted `data prepare` is in the way"), "{error}");
        Folder::take_up(&target).expect("it continues").finish().expect("an end");
        assert_eq!(std::fs::read_dir(&target).expect("a folder").count(), 0);
        // Without a journal nothing can be continued: the unfinished folder is removed.
        let other = scratch.path().join("other");
        std::fs::create_dir(scratch.path().join("other.partial")).expect("a folder");
        for name in [MARK, "weights"] {
            std::fs::write(scratch.path().join("other.partial").join(name), "").expect("a file");
        }
        Folder::take_up(&other).expect("a beginning").finish().expect("an end");
        assert_eq!(std::fs::read_dir(&other).expect("a folder").count(), 0);
    }

    #[test]
    fn a_folder_is_there_whole_or_not_at_all() {
        let scratch = tempfile::tempdir().expect("a folder");
        let target = scratch.path().join("new/");
        let folder = Folder::begin(&target).expect("a beginning");
        std::fs::write(folder.path().join("a"), "1").expect("a file");
        assert!(Folder::begin(&target).is_err_and(|error| error.to_string().contains("in use")));
        drop(folder);
        assert_eq!(std::fs::read_dir(scratch.path()).expect("a folder").count(), 0);
        let folder = Folder::begin(&target).expect("a beginning");
        std::fs::write(folder.path().join("a"), "1").expect("a file");
        folder.finish().expect("an end");
        assert_eq!(std::fs::read_dir(&target).expect("a folder").count(), 1);
        assert!(Folder::begin(&target).is_err());
        // A folder that this program did not make is not touched.
        std::fs::create_dir(scratch.path().join("b.partial")).expect("a folder");
        assert!(Folder::begin(&scratch.path().join("b")).is_err());
        assert!(scratch.path().join("b.partial").exists());
    }

    #[test]
    fn a_file_that_fails_leaves_the_one_before() {
        let scratch = tempfile::tempdir().expect("a folder");
        let path = scratch.path().join("a.txt");
        let write = |text: &'static str| move |to: &Path| std::fs::write(to, text).map_err(writing(to));
        file(&path, write("one")).expect("written");
        let failed = file(&path, |to| write("two")(to).and(Err(Error::new("no"))));
        assert!(failed.is_err());
        assert_eq!(std::fs::read_to_string(&path).expect("a file"), "one");
        assert_eq!(std::fs::read_dir(scratch.path()).expect("a folder").count(), 1);
    }
}
