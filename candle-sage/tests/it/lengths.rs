//! No file is longer than a reader takes in at once, in both crates, the kernels, the examples and the scripts. (Functions: clippy's
//! `too_many_lines`, with the number in `clippy.toml`.)

use std::path::{Path, PathBuf};

const FOLDERS: [&str; 5] = ["candle-sage", "sage-train", "kernels", "examples", "scripts"];
const EXTENSIONS: [&str; 6] = ["rs", "cu", "cuh", "cc", "h", "py"];

/// The most lines of a file.
const FILE: usize = 450;

/// Adds the sources below a folder, but for what builds have made.
fn sources(folder: &Path, all: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry")) {
        // A link, as candle-sage/kernels is one, leads to a folder that is read in its own place.
        let (path, kind) = (entry.path(), entry.file_type().expect("a type"));
        if kind.is_dir() && entry.file_name() != "target" {
            sources(&path, all);
        } else if kind.is_file() && EXTENSIONS.iter().any(|end| path.extension() == Some(end.as_ref())) {
            all.push(path);
        }
    }
}

#[test]
fn files_have_readable_lengths() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut all = Vec::new();
    for folder in FOLDERS {
        sources(&root.join(folder), &mut all);
    }
    assert!(all.len() > 200, "{} files", all.len());
    let lines = |path: &PathBuf| std::fs::read_to_string(path).expect("UTF-8").lines().count();
    let long: Vec<_> =
        all.iter().map(|path| (path.display(), lines(path))).filter(|(_, lines)| *lines > FILE).collect();
    assert!(long.is_empty(), "over {FILE} lines: {long:?}");
}
