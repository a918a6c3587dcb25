//! An earlier build wrote the run in `tests/golden/run`: four steps of a model with one layer. Its settings, metrics,
//! weights and checkpoint are read as before. If a file format changes, add a run in the new format next to this one.

use std::path::Path;

use crate::support::Scratch;

/// A copy of the folder as `runs/old`.
fn old_run() -> Scratch {
    fn copy(scratch: &Scratch, from: &Path, to: &str) {
        for entry in std::fs::read_dir(from).expect("a folder").flatten() {
            let to = format!("{to}/{}", entry.file_name().to_string_lossy());
            match entry.path().is_dir() {
                true => copy(scratch, &entry.path(), &to),
                false => drop(scratch.file(&to, std::fs::read(entry.path()).expect("a file"))),
            }
        }
    }
    let scratch = Scratch::new();
    copy(&scratch, &Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/run"), "runs/old");
    scratch
}

#[test]
fn a_run_of_an_earlier_build_is_read_and_resumes() {
    let scratch = old_run();
    // `eval` still prints the loss that the earlier build printed, so corpus, tokens and weights are unchanged.
    let eval = scratch.ok(&["eval", "runs/old"]);
    assert!(eval.contains("5.6880 nats a token"), "{eval}");
    let report = scratch.ok(&["report", "runs/old"]);
    assert!(report.contains("5.6939"), "{report}");
    scratch.ok(&["sample", "runs/old", "Once", "--tokens", "4"]);
    scratch.ok(&["probe", "runs/old"]);
    scratch.ok(&[
        "--init-from",
        "runs/old/checkpoints/step-00000004",
        "--init-moments",
        "on",
        "--corpus-mb",
        "1",
        "--context",
        "16",
        "--tokens-per-step",
        "64",
        "--micro-batch",
        "4",
        "--steps",
        "1",
        "--eval-tokens",
        "64",
        "--sample-tokens",
        "0",
        "--name",
        "new",
    ]);
    scratch.ok(&["--config", "runs/old/config.toml", "--name", "again", "--steps", "2"]);
    let resumed = scratch.ok(&["--resume", "runs/old", "--steps", "6"]);
    assert!(resumed.contains("runs/old"), "{resumed}");
    let metrics = std::fs::read_to_string(scratch.path().join("runs/old/metrics.jsonl")).expect("metrics");
    assert!(metrics.lines().count() > 4 && metrics.contains("\"step\":6"), "{metrics}");
}
