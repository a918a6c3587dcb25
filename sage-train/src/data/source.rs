//! Resolves the path of a source to files of text or shards of tokens.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use candle_sage::{Error, Result};

use super::TOKENIZER_CONFIG;
use super::hub;
use super::prepared::{LIST, Prepared};
use super::reader;
use super::tokenizer::Tokenizer;
use crate::quantity::counted;
use crate::{during, partial};

/// The files of one source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// Files of text, which are tokenized.
    Text(Vec<PathBuf>),
    /// Shards of tokens.
    Shards(ShardFiles),
}

/// The shards of one source, in the order of their names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShardFiles {
    /// Shards to train on.
    pub train: Vec<PathBuf>,
    /// Shards to validate on: the name, split at `_`, `-` and `.`, has a part `val` or `validation`.
    pub validation: Vec<PathBuf>,
    /// The `tokenizer.json` in the folder of the shards.
    pub tokenizer: Option<PathBuf>,
}

impl Source {
    /// All files, for training and validation.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        let (text, shards) = match self {
            Self::Text(files) => (files.as_slice(), [].as_slice()),
            Self::Shards(files) => (files.train.as_slice(), files.validation.as_slice()),
        };
        text.iter().chain(shards).map(PathBuf::as_path)
    }

    /// Removes the files of `--val-data` from this source. `validation` contains their canonical paths; `path` is for
    /// the error message.
    ///
    /// # Errors
    /// When no file is left.
    pub(super) fn hold_out(&mut self, validation: &BTreeSet<PathBuf>, path: &Path) -> Result<()> {
        let kept = |file: &PathBuf| !validation.contains(&canonical(file));
        match self {
            Self::Text(files) => files.retain(kept),
            Self::Shards(files) => {
                files.train.retain(kept);
                files.validation.retain(kept);
            }
        }
        match self.files().next() {
            Some(_) => Ok(()),
            None => Err(Error::new("every file of the data is kept for validation")
                .got(format!("--data {} and --val-data", path.display()))
                .allowed("--data with at least one file that is not in --val-data")
                .hint("without --val-data the end of each source is used for validation")),
        }
    }
}

impl ShardFiles {
    /// Returns an error if a `dataset.json` next to the shards has another end-of-text token than the tokenizer.
    pub(super) fn check_end_of_text(&self, tokenizer: &Tokenizer) -> Result<()> {
        let Some(folder) = self.first().parent().filter(|folder| folder.join(LIST).exists()) else {
            return Ok(());
        };
        let prepared = Prepared::read(folder)?;
        if prepared.end_of_text == tokenizer.end_of_text() {
            return Ok(());
        }
        let entry = |id: u32| tokenizer.entry(id).map_or(id.to_string(), |entry| format!("{id}, `{entry}`"));
        Err(Error::new("the documents in the shards do not end with the tokenizer's end-of-text token")
            .got(format!("{} in {}", entry(prepared.end_of_text), folder.display()))
            .allowed(format!("{}, the tokenizer's end-of-text token", entry(tokenizer.end_of_text())))
            .hint("use --end-of-text to name the token that ends a document, or prepare the data again"))
    }

    /// The first shard.
    pub fn first(&self) -> &Path {
        self.train.first().or(self.validation.first()).map_or(Path::new(""), PathBuf::as_path)
    }
}

/// The kinds of files, for messages.
fn allowed() -> String {
    format!("{}; .bin for shards of tokens; folders and patterns (*) of them", reader::extensions())
}

/// Finds the files of a path: the file itself, the files below a folder, or the files that match a pattern.
/// Files in the folder of runs, `out`, are ignored because logs and samples are not data. Hidden files in folders are
/// ignored too.
///
/// # Errors
/// When no file exists, text and shards are mixed, or a folder cannot be listed.
pub fn find(path: &Path, out: &Path) -> Result<Source> {
    find_and_pass_over(path, out, &mut SkippedFiles::default())
}

/// Files in a folder that are not data, counted by file extension.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct SkippedFiles {
    kinds: BTreeMap<String, usize>,
    /// Named pipes, sockets and devices, which cannot be read as files, and links to folders.
    special: Vec<PathBuf>,
}

impl SkippedFiles {
    fn add(&mut self, path: &Path) {
        let kind = path.extension().map_or_else(
            || "without an extension".into(),
            |extension| format!(".{}", extension.to_string_lossy().to_ascii_lowercase()),
        );
        *self.kinds.entry(kind).or_default() += 1;
    }

    /// The number of files and their most frequent kinds, as text; `None` without files.
    pub(super) fn as_text(&self) -> Option<String> {
        let all: usize = self.kinds.values().sum();
        let mut kinds: Vec<(&String, &usize)> = self.kinds.iter().collect();
        kinds.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
        let named: Vec<String> =
            kinds.iter().take(5).map(|(kind, count)| format!("{count} {kind}")).collect();
        let more = if kinds.len() > 5 { ", .." } else { "" };
        let mut words = Vec::new();
        if all > 0 {
            let files = counted(all as u64, "file");
            words.push(format!("{files} of other kinds ignored: {}{more}", named.join(", ")));
        }
        if let Some(first) = self.special.first() {
            let n = counted(self.special.len() as u64, "item");
            words.push(format!(
                "{n} ignored (pipe, socket, device or folder link), such as {}",
                first.display()
            ));
        }
        (!words.is_empty()).then(|| words.join("; "))
    }
}

/// Like [`find`]. Files that are not data are added to `passed_over`.
pub(super) fn find_and_pass_over(path: &Path, out: &Path, passed_over: &mut SkippedFiles) -> Result<Source> {
    let files = files(path, out, passed_over)?;
    let (shards, text): (Vec<PathBuf>, Vec<PathBuf>) = files.into_iter().partition(|file| is_shard(file));
    match (text.is_empty(), shards.is_empty()) {
        (false, true) => Ok(Source::Text(text)),
        (true, false) => Ok(Source::Shards(shard_files(shards))),
        (false, false) => Err(Error::new("the data is both text and shards of tokens")
            .got(format!("{} and {}", text[0].display(), shards[0].display()))
            .allowed("one kind per source")
            .hint("give them as two --data, each with its weight: --data A=1 --data B=2")),
        (true, true) => {
            Err(Error::new("the folder has no file to train on").got(path.display()).allowed(allowed()).hint(
                "of a folder's files, .md, .csv and .json are read only with a pattern: --data 'FOLDER/**/*.md'",
            ))
        }
    }
}

fn is_shard(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("bin"))
}

/// Whether a file that the user names, or that a pattern matches, can be data.
fn is_data(path: &Path) -> bool {
    reader::is_known(path) || is_shard(path)
}

/// Whether a file in a folder is data, if the user names only the folder.
fn is_data_in_folder(path: &Path) -> bool {
    reader::is_always_text(path) || is_shard(path)
}

/// Whether a path is a regular file: reading a pipe, socket or device may never end. A path that does not exist counts
/// as a file, so that reading it is an error.
fn is_regular(path: &Path) -> bool {
    path.metadata().is_ok_and(|about| about.is_file()) || !path.exists()
}

/// Whether a file describes data: a sidecar, a list of shards, a tokenizer.
fn is_description(path: &Path) -> bool {
    let name = path.file_name().map(|name| name.to_string_lossy().to_ascii_lowercase()).unwrap_or_default();
    name.ends_with(".bin.json") || [LIST, "tokenizer.json", TOKENIZER_CONFIG].contains(&name.as_str())
}

/// Splits a file's name at `_`, `-` and `.`. Returns whether any part is one of `words`.
fn is_named(path: &Path, words: &[&str]) -> bool {
    let name = path.file_name().map(|name| name.to_string_lossy().to_ascii_lowercase());
    name.is_some_and(|name| name.split(['_', '-', '.']).any(|part| words.contains(&part)))
}

/// A warning if the name of a training file suggests validation data, such as `val.txt` or
/// `test-00000-of-00001.parquet`.
pub(super) fn called_validation<'f>(mut files: impl Iterator<Item = &'f Path>) -> Option<String> {
    let file = files.find(|file| is_named(file, &["val", "valid", "validation", "dev", "test"]))?;
    Some(format!(
        "warning: {} is trained on despite its name; --val-data {0} keeps it for validation",
        file.display()
    ))
}

fn shard_files(files: Vec<PathBuf>) -> ShardFiles {
    let of_validation = |path: &PathBuf| is_named(path, &["val", "validation"]);
    let beside = files.first().map(|file| file.with_file_name("tokenizer.json"));
    let (validation, train) = files.into_iter().partition(of_validation);
    ShardFiles { train, validation, tokenizer: beside.filter(|path| path.exists()) }
}

/// All files of known kinds.
fn files(path: &Path, out: &Path, passed_over: &mut SkippedFiles) -> Result<Vec<PathBuf>> {
    let folder = if path.is_dir() { Some(path) } else { path.parent() };
    if path.exists() && folder.is_some_and(partial::is_unfinished) {
        return Err(Error::new("the data is not finished")
            .got(path.display())
            .allowed("data that `data prepare` has completed")
            .hint("wait until it is complete, or prepare it again"));
    }
    if path.is_dir() {
        return below(path, out, passed_over);
    }
    if path.exists() {
        if !is_regular(path) {
            return Err(Error::new("the data is not a file")
                .got(format!("{}, a pipe, socket or device", path.display()))
                .allowed("files, which can be read more than once")
                .hint("write the text to a file first"));
        }
        return if is_data(path) { Ok(vec![path.to_owned()]) } else { Err(reader::unknown_kind(path)) };
    }
    let missing =
        || Error::new("cannot find the data").got(path.display()).allowed(allowed()).hint(how_to_get(path));
    let pattern = path.to_str().filter(|text| text.contains(['*', '?', '['])).ok_or_else(missing)?;
    // As in folders, hidden files are not data.
    let options = glob::MatchOptions { require_literal_leading_dot: true, ..glob::MatchOptions::new() };
    let matches = glob::glob_with(pattern, options).map_err(during(format!("not a pattern: {pattern}")))?;
    let matches =
        matches.collect::<std::result::Result<Vec<_>, _>>().map_err(during("cannot list the data"))?;
    // Ignores a file in `out` or an unfinished folder, unless the pattern names that folder before its first wildcard.
    let literal = pattern.split(['*', '?', '[']).next().and_then(|text| text.rsplit_once('/'));
    let depth = literal.map_or(0, |(folder, _)| Path::new(folder).components().count());
    let inside = |path: &PathBuf| {
        let mut found = path.ancestors().skip(1).take_while(|folder| folder.components().count() > depth);
        found.any(|folder| same(folder, out) || partial::is_unfinished(folder))
    };
    let (folders, matches): (Vec<_>, Vec<_>) =
        matches.into_iter().filter(|path| !inside(path)).partition(|path| path.is_dir());
    let (known, others): (Vec<_>, Vec<_>) = matches.into_iter().partition(|path| is_data(path));
    others.iter().filter(|path| !is_description(path)).for_each(|path| passed_over.add(path));
    let (regular, special): (Vec<_>, Vec<_>) = known.into_iter().partition(|path| is_regular(path));
    passed_over.special.extend(special);
    let mut found: Vec<PathBuf> = regular.into_iter().filter(|path| !is_description(path)).collect();
    if found.is_empty() {
        // The pattern names folders, such as partitions: `data/year=*`.
        for folder in
            folders.into_iter().filter(|folder| !same(folder, out) && !partial::is_unfinished(folder))
        {
            found.extend(files(&folder, out, passed_over)?);
        }
    }
    found.sort();
    if found.is_empty() { Err(missing()) } else { Ok(found) }
}

/// A hint that tells how to create data of this name.
fn how_to_get(path: &Path) -> String {
    let name = path.to_string_lossy();
    let prepare = |from: &str, to: &str| {
        format!(
            "sage-train data prepare {from} --tokenizer gpt2 --to {to} downloads and tokenizes it; then --data {to}"
        )
    };
    if let Some(rest) = name.strip_prefix("hf:") {
        let to = rest.split(':').next().and_then(|dataset| dataset.rsplit('/').next()).unwrap_or("data");
        return prepare(&name, to);
    }
    if partial::is_unfinished(&partial::of(path)) {
        return format!(
            "{} is not finished: repeat the same `data prepare` to continue \
             it",
            partial::of(path).display()
        );
    }
    match hub::nearest(&name) {
        Some(recipe) => prepare(recipe, recipe),
        None => "paths are relative to the current folder; the built-in corpus needs no --data".into(),
    }
}

fn below(path: &Path, out: &Path, passed_over: &mut SkippedFiles) -> Result<Vec<PathBuf>> {
    if same(path, out) {
        return Err(Error::new("--data and --out are the same folder")
            .got(path.display())
            .allowed("different folders for the data and the runs")
            .hint("choose another folder of runs with --out; logs and samples of runs are not data"));
    }
    let mut found = Vec::new();
    let mut folders = vec![path.to_owned()];
    while let Some(folder) = folders.pop() {
        let failed = || {
            let error = during::<std::io::Error>(format!("cannot list {}", folder.display()));
            move |cause| error(cause).hint("check the permissions of the folder")
        };
        for entry in std::fs::read_dir(&folder).map_err(failed())? {
            let entry = entry.map_err(failed())?;
            // Hidden files are not data: editors and version control create them.
            if entry.file_name().to_string_lossy().starts_with('.') {
                continue;
            }
            // Links to folders are not followed, because they may form a cycle.
            if entry.file_type().map_err(failed())?.is_dir() {
                if !same(&entry.path(), out) && !partial::is_unfinished(&entry.path()) {
                    folders.push(entry.path());
                }
            } else if !is_regular(&entry.path()) {
                passed_over.special.push(entry.path());
            } else if is_data_in_folder(&entry.path()) {
                found.push(entry.path());
            } else if !is_description(&entry.path()) {
                passed_over.add(&entry.path());
            }
        }
    }
    found.sort();
    Ok(found)
}

pub(super) fn canonical(file: &Path) -> PathBuf {
    file.canonicalize().unwrap_or_else(|_| file.to_owned())
}

/// Whether two paths refer to the same folder.
fn same(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// Checks that no file is given twice, even by different names. `seen` contains the files of earlier calls.
pub(super) fn check_once<'f>(
    files: impl IntoIterator<Item = &'f Path>,
    seen: &mut BTreeSet<PathBuf>,
) -> Result<()> {
    for file in files {
        if !seen.insert(canonical(file)) {
            return Err(Error::new("a file is given twice")
                .got(file.display())
                .allowed("each file once; two paths to one file count as one file")
                .hint("to train more often on a source, give it a weight: --data FILE=2"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_passed_over_is_counted_by_kind() {
        let folder = tempfile::tempdir().expect("a folder");
        for name in ["a.txt", "b.md", "c.MD", "d.csv", "README", ".hidden"] {
            std::fs::write(folder.path().join(name), "x").expect("a file");
        }
        let mut passed_over = SkippedFiles::default();
        find_and_pass_over(folder.path(), Path::new("runs"), &mut passed_over).expect("a source");
        #[cfg(unix)]
        {
            let _socket =
                std::os::unix::net::UnixListener::bind(folder.path().join("s.txt")).expect("a socket");
            let mut passed_over = SkippedFiles::default();
            find_and_pass_over(folder.path(), Path::new("runs"), &mut passed_over).expect("a source");
            let words = passed_over.as_text().expect("some");
            assert!(
                words.contains("1 item ignored (pipe, socket, device or folder link), such as")
                    && words.contains("s.txt"),
                "{words}"
            );
            assert!(find(&folder.path().join("s.txt"), Path::new("runs")).is_err());
            std::fs::remove_file(folder.path().join("s.txt")).expect("removed");
        }
        let words = passed_over.as_text().expect("some");
        assert_eq!(words, "4 files of other kinds ignored: 2 .md, 1 .csv, 1 without an extension");
        assert_eq!(SkippedFiles::default().as_text(), None);
    }

    #[test]
    fn validation_data_is_recognized_by_name() {
        let warning = |name| called_validation([Path::new("a.txt"), Path::new(name)].into_iter());
        assert!(
            warning("test-00000-of-00001.parquet").is_some_and(|text| text.contains("--val-data test-00000"))
        );
        assert!(warning("wiki.valid.tokens").is_some());
        assert_eq!((warning("latest.txt"), warning("devices.txt")), (None, None));
    }

    #[test]
    fn shards_are_sorted_into_training_and_validation_by_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        for name in
            ["fw_train_000002.bin", "fw_train_000001.bin", "fw_val_000000.bin", "tokenizer.json", "x.md"]
        {
            std::fs::write(at(name), "").expect("a file");
        }
        let found = Source::Shards(ShardFiles {
            train: vec![at("fw_train_000001.bin"), at("fw_train_000002.bin")],
            validation: vec![at("fw_val_000000.bin")],
            tokenizer: Some(at("tokenizer.json")),
        });
        let out = Path::new("runs");
        assert_eq!(find(folder.path(), out), Ok(found.clone()));
        assert_eq!(find(&at("*.bin"), out), Ok(found));
        assert!(
            matches!(find(&at("fw_train_*.bin"), out), Ok(Source::Shards(files)) if files.validation.is_empty())
        );
        // Wildcards do not match the folder of runs. A pattern that names this folder matches its files.
        std::fs::create_dir(at("runs")).expect("a folder");
        std::fs::write(at("runs/log.txt"), "").expect("a file");
        assert!(find(&at("*/*.txt"), &at("runs")).is_err());
        assert_eq!(find(&at("runs/*.txt"), &at("runs")), Ok(Source::Text(vec![at("runs/log.txt")])));
        assert!(find(&at("*_val_*.bin"), folder.path()).is_ok());
        std::fs::remove_dir_all(at("runs")).expect("gone");
        std::fs::write(at("a.txt"), "").expect("a file");
        assert!(find(folder.path(), out).is_err());
        assert!(find(&at("*.doc"), out).is_err());
        // `*` does not match the dot of a hidden file. A pattern that matches only folders stands for their files.
        std::fs::create_dir_all(at("of/year=1")).expect("a folder");
        for name in ["of/year=1/a.txt", "of/year=1/.b.txt", "of/year=1/c.xz"] {
            std::fs::write(at(name), "").expect("a file");
        }
        let only = Ok(Source::Text(vec![at("of/year=1/a.txt")]));
        assert_eq!((find(&at("of/year=*"), out), find(&at("of/year=1/*.txt"), out)), (only.clone(), only));
        let mut passed_over = SkippedFiles::default();
        find_and_pass_over(&at("of/year=1/*"), out, &mut passed_over).expect("a source");
        assert_eq!(passed_over.as_text().as_deref(), Some("1 file of other kinds ignored: 1 .xz"));
        std::fs::remove_dir_all(at("of")).expect("gone");
        // Files such as .md are read from a folder only if a pattern names them.
        std::fs::write(at("b.md"), "").expect("a file");
        assert_eq!(find(&at("*.md"), out), Ok(Source::Text(vec![at("b.md"), at("x.md")])));
        std::fs::write(at("train.bin.json"), "").expect("a file");
        assert_eq!(find(&at("a.*"), out), Ok(Source::Text(vec![at("a.txt")])));
    }
}
