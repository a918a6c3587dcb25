//! `cargo run -p xtask -- figures` generates the tables of figures in README.md and docs/ from the data files in
//! docs/figures/, and reports tables of figures without a data file. With `--check` it writes nothing, and lists the
//! lines that differ from the generated text.
//! `cargo run -p xtask -- words` lists wording that makes readers stop.
#![forbid(unsafe_code)]

mod data;
mod page;
mod table;
mod template;
mod words;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};

use data::Data;

const USAGE: &str = "usage: cargo run -p xtask -- figures [--check] | words";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let problems = match arguments[..] {
        ["figures"] => figures(&root, false),
        ["figures", "--check"] => figures(&root, true),
        ["words"] => words::problems(&root),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match problems {
        Ok(problems) if problems.is_empty() => ExitCode::SUCCESS,
        Ok(problems) => {
            eprintln!("{}\n{} problems", problems.join("\n"), problems.len());
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Checks the pages below `root`, or writes them. Returns the problems that remain.
fn figures(root: &Path, is_check: bool) -> Result<Vec<String>> {
    let (mut problems, mut used) = (Vec::new(), BTreeSet::new());
    let load = |name: &str| {
        let path = root.join("docs/figures").join(name).with_extension("csv");
        let shown = format!("docs/figures/{name}.csv");
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {shown}"))?;
        Data::parse(&text).context(shown)
    };
    for path in pages(root)? {
        let shown = path.strip_prefix(root)?.display().to_string().replace('\\', "/");
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {shown}"))?;
        let link = |name: &str| match shown.matches('/').count() {
            0 => format!("docs/figures/{name}.csv"),
            depth => format!("{}figures/{name}.csv", "../".repeat(depth - 1)),
        };
        let page = page::generate(&text, load, link);
        if is_check {
            problems.extend(page.differences.iter().map(|(line, text)| format!("{shown}:{line}: {text}")));
        } else if page.text != text {
            std::fs::write(&path, &page.text).with_context(|| format!("cannot write {shown}"))?;
            println!("{shown}: {} lines differed", page.differences.len());
        }
        problems.extend(page.errors.iter().map(|(line, text)| format!("{shown}:{line}: {text}")));
        used.extend(page.used);
    }
    for entry in std::fs::read_dir(root.join("docs/figures")).context("cannot read docs/figures")? {
        let path = entry?.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if !used.contains(&name) {
            problems.push(format!(
                "docs/figures/{name}.csv: no page shows it\n  hint:    {}{name} -->",
                page::BEGIN
            ));
        }
    }
    Ok(problems)
}

/// The pages that other commands generate and check: `sage-train report`, and a test of sage-train.
const OTHERS: [&str; 2] = ["docs/results", "docs/settings.md"];

/// README.md and the pages of docs/.
fn pages(root: &Path) -> Result<Vec<PathBuf>> {
    let (mut pages, mut folders) = (vec![root.join("README.md")], vec![root.join("docs")]);
    while let Some(folder) = folders.pop() {
        for entry in
            std::fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?
        {
            let path = entry?.path();
            if OTHERS.iter().any(|other| path.ends_with(other)) {
                continue;
            } else if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|ending| ending == "md") {
                pages.push(path);
            }
        }
    }
    pages.sort();
    Ok(pages)
}
