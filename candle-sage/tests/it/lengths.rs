//! Limits the lengths of source files, and of functions in CUDA C++ and Python. Clippy limits the lengths of Rust
//! functions (`clippy.toml`).

use std::path::{Path, PathBuf};

const FOLDERS: [&str; 7] = ["candle-sage", "sage-train", "kernels", "python", "examples", "scripts", "xtask"];
const EXTENSIONS: [&str; 6] = ["rs", "cu", "cuh", "cc", "h", "py"];

/// Largest number of lines of a file.
const FILE: usize = 450;

/// Largest number of lines of a function in CUDA C++ or Python.
const FUNCTION: usize = 80;

/// Adds the sources below a folder, except build outputs.
fn sources(folder: &Path, all: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry")) {
        // A link, such as candle-sage/kernels, is skipped: its target is read at its own path.
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

fn indentation(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// The first line and the length of each function in a formatted source. The other lines of a function are blank or
/// indented more than its first line, except the closing brace in CUDA C++.
fn functions(text: &str, is_python: bool) -> Vec<(String, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let begins = |line: &str| {
        let code = line.trim_start();
        let other = [
            "if ",
            "for ",
            "while ",
            "switch ",
            "else",
            "do ",
            "namespace",
            "struct",
            "enum",
            ":",
            "//",
            "#",
        ];
        match is_python {
            true => code.starts_with("def "),
            // Excludes constructors with initializer lists, and lambdas, which belong to the function around them.
            false => {
                code.ends_with('{')
                    && code.contains(')')
                    && !code.contains("[&")
                    && !code.contains(" : ")
                    && !other.iter().any(|word| code.starts_with(word))
            }
        }
    };
    let length = |first: usize| {
        let own = indentation(lines[first]);
        let inside = lines[first + 1..].iter();
        let rest = inside.take_while(|line| line.trim().is_empty() || indentation(line) > own).count();
        rest + if is_python { 1 } else { 2 }
    };
    let firsts = (0..lines.len()).filter(|&n| begins(lines[n]));
    firsts.map(|n| (lines[n].trim().to_owned(), length(n))).collect()
}

#[test]
fn functions_of_cuda_and_python_have_readable_lengths() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut all = Vec::new();
    for folder in ["kernels", "scripts"] {
        sources(&root.join(folder), &mut all);
    }
    let mut found = Vec::new();
    for path in all {
        let text = std::fs::read_to_string(&path).expect("UTF-8");
        let of_file = functions(&text, path.extension() == Some("py".as_ref()));
        found.extend(of_file.into_iter().map(|(first, lines)| (path.display().to_string(), first, lines)));
    }
    assert!(found.len() > 500, "{} functions", found.len());
    let long: Vec<_> = found.iter().filter(|(.., lines)| *lines > FUNCTION).collect();
    assert!(long.is_empty(), "over {FUNCTION} lines: {long:#?}");
}

#[test]
fn a_function_is_measured_to_its_end() {
    let cuda = "template <class T>\n__device__ int f(int a) {\n  if (a) {\n    return 1;\n  }\n\n  return 2;\n}\nint b;\n";
    assert_eq!(functions(cuda, false), [("__device__ int f(int a) {".to_owned(), 7)]);
    let python = "def f(a):\n    return a\n\n\nclass A:\n    def g(self):\n        pass\n";
    let lengths: Vec<usize> = functions(python, true).into_iter().map(|(_, lines)| lines).collect();
    assert_eq!(lengths, [4, 2]);
}
