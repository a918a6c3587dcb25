//! The imports between modules match ARCHITECTURE.md and have no cycles.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

type Imports = BTreeMap<String, BTreeSet<String>>;

/// The allowed imports of a crate's modules, from ARCHITECTURE.md. A line there is `module  imports a, b`; text after a
/// semicolon is ignored.
fn allowed(text: &str, crate_name: &str) -> Imports {
    let list = text.split(&format!("{crate_name}:  ")).nth(1).expect("a list of modules");
    // The list ends at the list of the next crate, or at the end of the code block.
    let lines = list.lines().skip(1).take_while(|line| line.starts_with("  "));
    let mut all = Imports::new();
    for line in lines {
        let (module, imports) = line.split_once(" imports ").expect("MODULE imports ..");
        let imports = imports.split(';').next().unwrap_or("").split(", ").map(str::trim);
        let imports = imports.filter(|name| *name != "nothing").map(String::from).collect();
        all.insert(module.trim().to_string(), imports);
    }
    all
}

/// The names after `crate::` in a source, single or in braces, except in comments and tests.
fn imports(source: &str) -> BTreeSet<String> {
    let code = source.split("#[cfg(test)]\nmod tests").next().unwrap_or("");
    let lines: Vec<&str> = code.lines().map(str::trim_start).filter(|line| !line.starts_with("//")).collect();
    let code = lines.join(" ");
    let mut names = BTreeSet::new();
    for rest in code.split("crate::").skip(1) {
        let list = match rest.strip_prefix('{') {
            Some(list) => list.split('}').next().unwrap_or(""),
            None => rest.split(',').next().unwrap_or(""),
        };
        for name in list.split(',').map(str::trim) {
            names.insert(name.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect());
        }
    }
    names
}

/// Whether a source or folder is only for tests.
fn is_test(path: &Path) -> bool {
    ["cuda/selftest", "cuda/selftest.rs", "cuda/guard.rs"].iter().any(|end| path.ends_with(end))
}

/// Adds the imports of a module's files to `all`, except of test files and crate roots.
fn read(folder: &Path, module: Option<&str>, all: &mut Imports) {
    for entry in std::fs::read_dir(folder).expect("sources").map(|entry| entry.expect("an entry").path()) {
        let name = entry.file_stem().and_then(|name| name.to_str()).expect("a name").to_string();
        if is_test(&entry) || module.is_none() && ["lib", "main"].contains(&name.as_str()) {
            continue;
        }
        let module = module.unwrap_or(&name);
        if entry.is_dir() {
            read(&entry, Some(module), all);
        } else {
            let source = std::fs::read_to_string(&entry).expect("a source");
            let own = all.entry(module.to_string()).or_default();
            own.extend(imports(&source).into_iter().filter(|name| name != module));
        }
    }
}

/// A module that can be reached from itself.
fn circle(all: &Imports) -> Option<String> {
    all.keys()
        .find(|start| {
            let mut reached = BTreeSet::new();
            let mut next: Vec<&String> = all[*start].iter().collect();
            while let Some(module) = next.pop() {
                if reached.insert(module) {
                    next.extend(all.get(module).into_iter().flatten());
                }
            }
            reached.contains(start)
        })
        .cloned()
}

#[test]
fn modules_import_what_the_architecture_says() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let text =
        std::fs::read_to_string(root.join("ARCHITECTURE.md")).expect("the repository's ARCHITECTURE.md");
    for crate_name in ["candle-sage", "sage-train"] {
        let allowed = allowed(&text, crate_name);
        let mut found = Imports::new();
        read(&root.join(crate_name).join("src"), None, &mut found);
        assert_eq!(circle(&allowed), None, "the list of {crate_name} goes round in a circle");
        let named = |all: &Imports| all.keys().cloned().collect::<BTreeSet<_>>();
        let modules = named(&found);
        assert_eq!(modules, named(&allowed), "modules of {crate_name}/src, and of ARCHITECTURE.md");
        for (module, imports) in &found {
            let of_modules: BTreeSet<_> = imports.intersection(&modules).cloned().collect();
            let more: Vec<_> = of_modules.difference(&allowed[module]).collect();
            assert!(more.is_empty(), "{module} imports {more:?}, which ARCHITECTURE.md does not say");
            let fewer: Vec<_> = allowed[module].difference(&of_modules).collect();
            assert!(fewer.is_empty(), "{module} does not import {fewer:?}, which ARCHITECTURE.md says");
        }
    }
}

/// The imports between the files of a folder. In `folder/a.rs`, `super::x` is a file of `folder`; in `folder/b/c.rs` it
/// is a file of `b`.
fn read_inside(folder: &Path, module: Option<&str>, all: &mut Imports) {
    for entry in std::fs::read_dir(folder).expect("sources").map(|entry| entry.expect("an entry").path()) {
        let name = entry.file_stem().and_then(|name| name.to_str()).expect("a name").to_string();
        if is_test(&entry) {
            continue;
        }
        if entry.is_dir() {
            read_inside(&entry, Some(&name), all);
        } else {
            let source = std::fs::read_to_string(&entry).expect("a source");
            let within = if module.is_some() { "super::super::" } else { "super::" };
            // Replaces absolute paths such as `crate::cuda::x` by relative paths.
            let source =
                source.replace("crate::cuda::", "super::super::").replace("crate::model::", "super::super::");
            let (module, plain) = (module.unwrap_or(&name), source.replace("crate::", "elsewhere::"));
            let found = imports(&plain.replace(within, "crate::"));
            all.entry(module.to_string())
                .or_default()
                .extend(found.into_iter().filter(|name| name != module));
        }
    }
}

#[test]
fn files_of_a_folder_import_each_other_without_circles() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for folder in ["candle-sage/src/cuda", "sage-train/src/cli", "sage-train/src/model"] {
        let mut found = Imports::new();
        read_inside(&root.join(folder), None, &mut found);
        assert!(found.values().any(|imports| !imports.is_empty()), "{folder}: nothing was read");
        assert_eq!(circle(&found), None, "{folder} goes round in a circle: {found:?}");
    }
}

#[test]
fn a_circle_is_seen() {
    let text = "candle-sage:  each module\n  a  imports b; kernels/\n  b  imports nothing\n```";
    let mut list = allowed(text, "candle-sage");
    assert_eq!(circle(&list), None);
    list.get_mut("b").expect("a module").insert("a".into());
    assert_eq!(circle(&list), Some("a".into()));
    let names = imports("use crate::cpu::x;\n// crate::ops\nuse crate::{shape, ops::{y}};");
    assert_eq!(names, ["cpu", "ops", "shape"].map(String::from).into());
}
