//! Runs the command in a scratch folder.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use tempfile::TempDir;

pub(crate) struct Scratch(TempDir);

impl Scratch {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary folder"))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    /// The loss that a command prints.
    pub(crate) fn loss(&self, args: &[&str]) -> f64 {
        let text = self.ok(args);
        let after = text.split_whitespace().skip_while(|word| *word != "loss").nth(1);
        let number = after.and_then(|word| word.parse().ok());
        number.unwrap_or_else(|| panic!("no loss in {text}"))
    }

    pub(crate) fn file(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path().join(name);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).expect("a folder");
        }
        std::fs::write(&path, contents).expect("a file");
        path
    }

    pub(crate) fn run(&self, args: &[&str]) -> Output {
        self.run_with(args, &[])
    }

    pub(crate) fn run_with(&self, args: &[&str], variables: &[(&str, &str)]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_sage-train"))
            .args(args)
            .current_dir(self.path())
            .env("RUST_BACKTRACE", "0")
            .envs(variables.iter().copied())
            .output()
            .expect("the command starts")
    }

    /// Starts the command in the folder without waiting for it.
    pub(crate) fn start(&self, args: &[&str]) -> Child {
        Command::new(env!("CARGO_BIN_EXE_sage-train"))
            .args(args)
            .current_dir(self.path())
            .env("RUST_BACKTRACE", "0")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the command starts")
    }

    /// Runs the command, which must succeed, and returns its standard output.
    pub(crate) fn ok(&self, args: &[&str]) -> String {
        let output = self.run(args);
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{args:?}:\n{out}\n{err}");
        out.into_owned()
    }

    /// Runs the command, which must fail without a panic, and returns its standard error.
    pub(crate) fn fails(&self, args: &[&str]) -> String {
        let output = self.run(args);
        let err = String::from_utf8_lossy(&output.stderr).into_owned();
        let code = output.status.code();
        assert!(matches!(code, Some(1 | 2)), "{args:?} ended with {code:?}:\n{err}");
        assert!(output.stdout.is_empty(), "standard output is for data");
        err
    }

    pub(crate) fn metrics(&self, run: &str) -> Vec<sage_train::metrics::Point> {
        let text = std::fs::read_to_string(self.path().join("runs").join(run).join("metrics.jsonl"))
            .expect("metrics");
        text.lines().map(|line| serde_json::from_str(line).expect("a point")).collect()
    }
}

/// Waits for a concurrent command until `done` returns true. The time limit only catches hangs: a busy machine may take
/// minutes.
pub(crate) fn wait_until(mut done: impl FnMut() -> bool) {
    let began = std::time::Instant::now();
    while !done() {
        assert!(began.elapsed().as_secs() < 300, "it never came");
        std::thread::sleep(std::time::Duration::from_micros(200));
    }
}

/// Waits until `done` returns true or the process has ended, and returns whether it has ended.
pub(crate) fn ends_before(child: &mut Child, mut done: impl FnMut() -> bool) -> bool {
    let mut ended = false;
    wait_until(|| {
        ended = child.try_wait().expect("a child").is_some();
        ended || done()
    });
    ended
}

/// Waits until this many changes of a folder have been observed, or until the process has ended, and returns whether it
/// has ended. Changes measure the progress of the process on fast and slow machines alike.
pub(crate) fn ends_before_changes(child: &mut Child, folder: &Path, mut changes: u32) -> bool {
    let mut seen = sizes(folder);
    ends_before(child, || {
        let now = sizes(folder);
        changes -= u32::from(changes > 0 && now != seen);
        seen = now;
        changes == 0
    })
}

/// Everything below a folder, with its size.
fn sizes(folder: &Path) -> Vec<(PathBuf, u64)> {
    let (mut all, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(folder) = folders.pop() {
        // Entries that are removed during the listing are skipped.
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let Ok(about) = entry.metadata() else { continue };
            if about.is_dir() {
                folders.push(entry.path());
            }
            all.push((entry.path(), about.len()));
        }
    }
    all.sort();
    all
}

/// Documents of the built-in corpus as JSON lines.
pub(crate) fn json_lines(bytes: u64) -> String {
    let documents = sage_train::data::corpus::Corpus::new(5).documents(bytes);
    documents.iter().map(|d| serde_json::json!({ "text": d }).to_string() + "\n").collect()
}

/// Flags of a model that trains in a second.
pub(crate) const SMALL: [&str; 18] = [
    "--layers",
    "1",
    "--width",
    "32",
    "--heads",
    "2",
    "--head-dim",
    "16",
    "--ffn",
    "48",
    "--context",
    "32",
    "--vocab-size",
    "300",
    "--micro-batch",
    "4",
    "--tokens-per-step",
    "256",
];

/// [`SMALL`] with more flags.
pub(crate) fn small<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let data = if more.contains(&"--data") { vec![] } else { vec!["--corpus-mb", "1"] };
    [&SMALL[..], &["--sample-tokens", "0"], data.as_slice(), more].concat()
}
