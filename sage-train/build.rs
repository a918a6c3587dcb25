//! Sets two constants of the program: the folder of the built-in data, and the commit of its sources, which each run
//! records.

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // The path is relative to the manifest, because Cargo keeps this output even if the sources are moved.
    println!("cargo:rustc-env=SAGE_TRAIN_DATA={}", data().display());
    // A copy of the sources without Git history has no commit.
    let log = Path::new("../.git/logs/HEAD");
    if !log.exists() {
        return;
    }
    // This script runs again after a new commit, and after a change of the sources, which then differ from the commit.
    for path in ["../.git/logs/HEAD", "src", "../candle-sage/src", "../kernels"] {
        println!("cargo:rerun-if-changed={path}");
    }
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).output().ok().filter(|output| output.status.success())?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let changed =
        git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|text| !text.is_empty());
    if let Some(commit) = git(&["rev-parse", "--short=12", "HEAD"]) {
        println!("cargo:rustc-env=SAGE_TRAIN_COMMIT={commit}{}", if changed { ", changed" } else { "" });
    }
}

/// The folder of the built-in corpus and the recipes. In the repository `data` is a symbolic link. A checkout without
/// links (Git on Windows) has a file that contains the path instead; a package has the folder itself.
fn data() -> PathBuf {
    let path = PathBuf::from("data");
    let link = std::fs::read_to_string(&path).ok().filter(|_| path.is_file());
    link.map_or(path, |link| link.trim().into())
}
