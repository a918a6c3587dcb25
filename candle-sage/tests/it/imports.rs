//! Who imports whom is what ARCHITECTURE.md says, without circles.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

type Imports = BTreeMap<String, BTreeSet<String>>;

/// The list in ARCHITECTURE.md: `module  imports a, b; ..`.
fn allowed(text: &str) -> Imports {
    let list = text.split("candle-sage:  each module").nth(1).and_then(|rest| rest.split("```").next());
    let lines = list.expect("a list of modules").lines().skip(1);
    let mut all = Imports::new();
    for line in lines.filter(|line| !line.trim().is_empty()) {
        let (module, imports) = line.split_once(" imports ").expect("MODULE imports ..");
        let imports = imports.split(';').next().unwrap_or("").split(", ").map(str::trim);
        let imports = imports.filter(|name| *name != "nothing").map(String::from).collect();
        all.insert(module.trim().to_string(), imports);
    }
    all
}

/// The modules of this crate that a source names after `crate::`, without comments and its tests.
fn imports(source: &str) -> BTreeSet<String> {
    let code = source.split("#[cfg(test)]\nmod tests").next().unwrap_or("");
    let lines = code.lines().map(str::trim_start).filter(|line| !line.starts_with("//"));
    let names = lines.flat_map(|line| line.split("crate::").skip(1));
    names.map(|rest| rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()).collect()
}

/// Adds what the files of a module import, but for those that are tests as a whole.
fn read(folder: &Path, module: Option<&str>, all: &mut Imports) {
    for entry in std::fs::read_dir(folder).expect("sources").map(|entry| entry.expect("an entry").path()) {
        let name = entry.file_stem().and_then(|name| name.to_str()).expect("a name").to_string();
        let module = module.unwrap_or(&name);
        if ["lib", "selftest", "guard"].contains(&name.as_str()) {
            continue;
        }
        if entry.is_dir() {
            read(&entry, Some(module), all);
        } else {
            let source = std::fs::read_to_string(&entry).expect("a source");
            let own = all.entry(module.to_string()).or_default();
            own.extend(imports(&source).into_iter().filter(|name| name != module));
        }
    }
}

/// Whether a module can be reached from itself.
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
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text =
        std::fs::read_to_string(root.join("../ARCHITECTURE.md")).expect("the repository's ARCHITECTURE.md");
    let allowed = allowed(&text);
    let mut found = Imports::new();
    read(&root.join("src"), None, &mut found);
    assert_eq!(circle(&allowed), None, "the list goes round in a circle");
    let named = |all: &Imports| all.keys().cloned().collect::<Vec<_>>();
    assert_eq!(named(&found), named(&allowed), "modules of src, and of ARCHITECTURE.md");
    for (module, imports) in &found {
        let more: Vec<_> = imports.difference(&allowed[module]).collect();
        assert!(more.is_empty(), "{module} imports {more:?}, which ARCHITECTURE.md does not say");
    }
}

#[test]
fn a_circle_is_seen() {
    let text = "candle-sage:  each module\n  a  imports b; kernels/\n  b  imports nothing\n```";
    let mut list = allowed(text);
    assert_eq!(circle(&list), None);
    list.get_mut("b").expect("a module").insert("a".into());
    assert_eq!(circle(&list), Some("a".into()));
    assert_eq!(
        imports("use crate::cpu::x;\n// crate::ops\nuse crate::shape;"),
        ["cpu", "shape"].map(String::from).into()
    );
}
