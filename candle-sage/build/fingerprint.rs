//! A hash of everything that a compiled kernel depends on. When the hash changes, the kernel is compiled again.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// All files under `folder` with the extension, in a fixed order.
pub(crate) fn files(folder: &Path, extension: &str) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(files(&path, extension)?);
        } else if path.extension().is_some_and(|e| e == extension) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// A source and all files under `root` that it includes with `#include <..>`, directly or indirectly, in a
/// fixed order.
pub(crate) fn with_headers(source: &Path, root: &Path) -> io::Result<Vec<PathBuf>> {
    let (mut found, mut next) = (BTreeSet::new(), vec![source.to_owned()]);
    while let Some(file) = next.pop() {
        let text = fs::read_to_string(&file)?;
        let named = text.lines().filter_map(|line| line.trim_start().strip_prefix("#include <"));
        let headers = named.filter_map(|rest| rest.split('>').next()).map(|name| root.join(name));
        next.extend(headers.filter(|header| header.is_file() && !found.contains(header)));
        found.insert(file);
    }
    Ok(found.into_iter().collect())
}

/// A line of a kernel without its comment. A `//` in a string does not start a comment.
fn code(line: &str) -> &str {
    let quotes = |before: &str| before.matches('"').count();
    let comment = line.match_indices("//").map(|(at, _)| at).find(|&at| quotes(&line[..at]) % 2 == 0);
    line[..comment.unwrap_or(line.len())].trim()
}

/// FNV-1a over the names and the code of `files`, and over `texts`. Comments and empty lines do not count: to compile
/// all kernels takes half an hour, and no kernel uses its line numbers.
pub(crate) fn of(files: &[PathBuf], texts: &[&str]) -> io::Result<u64> {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    let mut add = |bytes: &[u8]| {
        // The length is hashed too, so that moving a byte from one input to the next changes the hash.
        for byte in (bytes.len() as u64).to_le_bytes().iter().chain(bytes) {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    };
    for file in files {
        add(file.to_string_lossy().as_bytes());
        let text = fs::read_to_string(file)?;
        text.lines().map(code).filter(|line| !line.is_empty()).for_each(|line| add(line.as_bytes()));
    }
    for text in texts {
        add(text.as_bytes());
    }
    Ok(hash)
}
