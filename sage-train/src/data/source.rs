//! Documents from text files, JSON lines and folders, also compressed, or from the built-in corpus.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use candle_sage::{Error, Result};
use serde::Deserialize;

use super::corpus::Corpus;
use crate::config::DataConfig;
use crate::during;

const KINDS: [&str; 4] = [".txt", ".jsonl", ".txt.zst", ".jsonl.zst"];

/// The documents of a run: at least one, none empty.
///
/// # Errors
/// When a file cannot be read or is not what its name says, or there is no text.
pub(super) fn documents(config: &DataConfig) -> Result<Vec<String>> {
    let Some(path) = &config.path else {
        if config.corpus_bytes == 0 {
            return Err(Error::new("an empty corpus")
                .got("--corpus-mb 0")
                .allowed("1 and up")
                .hint("--corpus-mb 8"));
        }
        return Ok(Corpus::new(config.seed).documents(config.corpus_bytes));
    };
    let mut documents = Vec::new();
    for file in files(path, &config.out)? {
        read(&file, &mut documents)?;
    }
    documents.retain(|document| !document.trim().is_empty());
    if documents.is_empty() {
        return Err(Error::new("there is no text to train on")
            .got(format!("{} holds no text", path.display()))
            .allowed(format!("text in {}", KINDS.join(", ")))
            .hint("leave --data out to train on the built-in corpus"));
    }
    Ok(documents)
}

/// The file itself, or all files of a known kind below a folder, in the order of their names. The
/// folder of runs is left out: its logs and samples are not data.
///
/// # Errors
/// When there is none, or it cannot be listed.
pub fn files(path: &Path, out: &Path) -> Result<Vec<PathBuf>> {
    if !path.exists() {
        return Err(Error::new("the data does not exist")
            .got(path.display())
            .allowed(format!("a file or folder: {}", KINDS.join(", ")))
            .hint("leave --data out to train on the built-in corpus"));
    }
    if !path.is_dir() {
        return if kind(path).is_some() { Ok(vec![path.to_owned()]) } else { Err(unknown_kind(path)) };
    }
    if same(path, out) {
        return Err(Error::new("the data is the folder that runs go to")
            .got(path.display())
            .allowed("another folder for one of them")
            .hint("--out names the folder of runs; their logs and samples are not data"));
    }
    let mut found = Vec::new();
    let mut folders = vec![path.to_owned()];
    while let Some(folder) = folders.pop() {
        let failed = || {
            let error = during::<std::io::Error>(format!("cannot list {}", folder.display()));
            move |cause| error(cause).hint("is the folder readable?")
        };
        for entry in std::fs::read_dir(&folder).map_err(failed())? {
            let entry = entry.map_err(failed())?;
            // Links to folders are not followed: they may lead round in circles.
            if entry.file_type().map_err(failed())?.is_dir() {
                if !same(&entry.path(), out) {
                    folders.push(entry.path());
                }
            } else if kind(&entry.path()).is_some() {
                found.push(entry.path());
            }
        }
    }
    if found.is_empty() {
        return Err(Error::new("the folder has no file to train on")
            .got(path.display())
            .allowed(KINDS.join(", "))
            .hint("files of other kinds are passed over"));
    }
    found.sort();
    Ok(found)
}

/// Whether two paths are one folder.
fn same(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

fn unknown_kind(path: &Path) -> Error {
    Error::new("the data is of an unknown kind")
        .got(path.display())
        .allowed(KINDS.join(", "))
        .hint("the name's ending says what a file is")
}

fn kind(path: &Path) -> Option<&'static str> {
    let name = path.file_name()?.to_str()?.to_ascii_lowercase();
    KINDS.into_iter().find(|ending| name.ends_with(ending))
}

fn read(path: &Path, documents: &mut Vec<String>) -> Result<()> {
    let kind = kind(path).ok_or_else(|| unknown_kind(path))?;
    let failed = || {
        let error = during::<std::io::Error>(format!("cannot read {}", path.display()));
        move |cause| error(cause).hint("is the file whole, readable, and what its name says?")
    };
    let file = File::open(path).map_err(failed())?;
    let reader: Box<dyn Read> = if kind.ends_with(".zst") {
        Box::new(zstd::Decoder::new(file).map_err(failed())?)
    } else {
        Box::new(file)
    };
    let mut reader = BufReader::with_capacity(1 << 20, reader);
    if kind.contains(".txt") {
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes).map_err(failed())?;
        documents.push(
            String::from_utf8(bytes)
                .map_err(|error| not_utf8(path, format!("byte {}", error.utf8_error().valid_up_to())))?,
        );
        return Ok(());
    }
    for (number, line) in reader.split(b'\n').enumerate() {
        let line = line.map_err(failed())?;
        let line = std::str::from_utf8(&line)
            .map_err(|error| not_utf8(path, format!("line {}, byte {}", number + 1, error.valid_up_to())))?;
        let line = line.trim().trim_start_matches('\u{feff}');
        if !line.is_empty() {
            documents.push(json_text(path, number + 1, line)?);
        }
    }
    Ok(())
}

fn not_utf8(path: &Path, at: String) -> Error {
    Error::new("the data is not UTF-8 text")
        .got(format!("{}, {at}", path.display()))
        .allowed("UTF-8")
        .hint("convert it, e.g. with `iconv -f latin1 -t utf-8`")
}

fn json_text(path: &Path, number: usize, line: &str) -> Result<String> {
    #[derive(Deserialize)]
    struct Line {
        text: String,
    }
    serde_json::from_str::<Line>(line).map(|line| line.text).map_err(|error| {
        Error::new("a line is not a JSON object with text")
            .got(format!("{}, line {number}: {error}", path.display()))
            .allowed("{\"text\": \"...\"}; other fields are passed over")
            .hint("every line is one document")
    })
}
