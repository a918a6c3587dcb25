//! The pages of `docs/`: each page is in the book's table of contents, and its links have targets.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn pages(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a folder").flatten().map(|entry| entry.path());
    let all = entries.flat_map(|path| if path.is_dir() { pages(&path) } else { vec![path] });
    all.filter(|path| path.extension().is_some_and(|ending| ending == "md")).collect()
}

/// The files that a page links to; anchors are removed.
fn links(text: &str) -> Vec<String> {
    // Brackets in code are not links.
    let prose = text.split("```").step_by(2).flat_map(|part| part.split('`').step_by(2));
    let targets = prose.flat_map(|part| part.split("](").skip(1)).filter_map(|rest| rest.split(')').next());
    let local = targets.filter(|target| !target.contains("://") && !target.starts_with('#'));
    local.filter_map(|target| target.split('#').next()).map(str::to_owned).collect()
}

#[test]
fn every_page_is_in_the_book_once() {
    let docs = root().join("docs");
    let summary = std::fs::read_to_string(docs.join("SUMMARY.md")).expect("a summary");
    let listed = links(&summary);
    let once: BTreeSet<&String> = listed.iter().collect();
    assert_eq!(once.len(), listed.len(), "a page is listed twice");
    let own =
        |path: &Path| path.strip_prefix(&docs).expect("in docs").display().to_string().replace('\\', "/");
    // Of the pages in `results/`, the book contains only the overview.
    let is_page = |name: &String| {
        name != "SUMMARY.md" && (!name.starts_with("results/") || name == "results/README.md")
    };
    let there: BTreeSet<String> = pages(&docs).iter().map(|path| own(path)).filter(is_page).collect();
    assert_eq!(once.into_iter().cloned().collect::<BTreeSet<_>>(), there);
}

#[test]
fn links_lead_somewhere() {
    let root = root();
    let top = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
        .map(|name| root.join(name));
    let mut broken = Vec::new();
    for page in pages(&root.join("docs")).into_iter().chain(top) {
        let text = std::fs::read_to_string(&page).expect("a page");
        let folder = page.parent().expect("a folder");
        let dead =
            links(&text).into_iter().filter(|target| !target.is_empty() && !folder.join(target).exists());
        broken.extend(dead.map(|target| format!("{}: {target}", page.display())));
    }
    assert!(broken.is_empty(), "{broken:#?}");
}
