//! No file and no function is longer than a reader takes in at once, in both crates, the kernels, the examples and the scripts.

use std::path::{Path, PathBuf};

const FOLDERS: [&str; 5] = ["candle-sage", "sage-train", "kernels", "examples", "scripts"];
const EXTENSIONS: [&str; 4] = ["rs", "cu", "cuh", "py"];

/// The most lines of a file, and of a function of Rust from its name to its closing brace.
const FILE: usize = 450;
const FUNCTION: usize = 80;

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

/// The name of the function whose declaration begins on a line.
fn function(line: &str) -> Option<&str> {
    let (modifiers, rest) = line.trim_start().split_once("fn ")?;
    // `pub(in crate::cpu)` has two words.
    let known = |word: &str| {
        ["pub", "const", "async", "unsafe", "extern", "\"C\""].contains(&word)
            || word.starts_with("pub(")
            || word.ends_with(')')
    };
    let name = rest.split(|c: char| !c.is_alphanumeric() && c != '_').next()?;
    modifiers.split_whitespace().all(known).then_some(name).filter(|name| !name.is_empty())
}

/// Each function of a source, with the number of its lines. It ends with the first brace that is as far from the margin as its
/// beginning, where rustfmt puts it.
fn functions(source: &str) -> Vec<(&str, usize)> {
    let lines: Vec<&str> = source.lines().collect();
    let margin = |line: &str| line.len() - line.trim_start().len();
    let mut found = Vec::new();
    for (first, line) in lines.iter().enumerate() {
        let Some(name) = function(line) else { continue };
        // A line that ends the function itself is one without a body, or with all of it.
        let ends = |later: &&str| {
            margin(later) == margin(line)
                && (later.trim_start().starts_with('}') || later.ends_with(['}', ';']))
        };
        if let Some(rest) = lines[first..].iter().position(ends) {
            found.push((name, rest + 1));
        }
    }
    found
}

#[test]
fn files_and_functions_are_short() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut paths = Vec::new();
    for folder in FOLDERS {
        sources(&root.join(folder), &mut paths);
    }
    assert!(paths.len() > 200, "{} sources", paths.len());
    paths.sort();
    let mut long = Vec::new();
    for path in paths {
        let source = std::fs::read_to_string(&path).expect("a source");
        let name = path.strip_prefix(&root).expect("a path below the root").display();
        let lines = source.lines().count();
        if lines > FILE {
            long.push(format!("{name}: {lines} lines, at most {FILE}"));
        }
        if path.extension() == Some("rs".as_ref()) {
            let functions = functions(&source).into_iter().filter(|(_, lines)| *lines > FUNCTION);
            long.extend(
                functions.map(|(of, lines)| format!("{name}: {of} has {lines} lines, at most {FUNCTION}")),
            );
        }
    }
    assert!(long.is_empty(), "too long:\n{}", long.join("\n"));
}

#[test]
fn functions_end_where_they_end() {
    let source = "
impl A {
    pub(in crate::a) const fn one(
        x: u8,
    ) -> u8 {
        match x {
            _ => 1,
        }
    }
    fn two() {}
    fn declared(
        x: u8,
    );
}
// A comment: fn none() {
pub extern \"C\" fn three<T>()
where
    T: Copy,
{
    let fn_is_no_word = || 3;
}
";
    assert_eq!(functions(source), [("one", 7), ("two", 1), ("declared", 3), ("three", 6)]);
}
