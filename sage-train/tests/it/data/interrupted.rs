//! Preparations that are interrupted or fail are resumed where they stopped.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use sage_train::data::prepare::Prepared;

use crate::support::{Scratch, ends_before, ends_before_changes, json_lines};

fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry"));
    let read = |path: PathBuf| std::fs::read(path).expect("a file");
    entries.map(|entry| (entry.file_name().to_string_lossy().into_owned(), read(entry.path()))).collect()
}

/// A preparation that is killed at any moment is resumed where it stopped, and ends with the same bytes.
#[test]
#[cfg(unix)]
fn a_killed_preparation_resumes() {
    let scratch = Scratch::new();
    // Small files, a large file in which the preparation is killed, and a document that is read in many parts.
    scratch.file("text/a.jsonl", json_lines(300_000));
    scratch.file("text/b.jsonl", json_lines(12_000_000));
    scratch.file("text/c.txt", "One long story, and nothing but this story. ".repeat(100_000));
    for (format, kills) in [("llmc-u16", 3u32), ("nanogpt", 1)] {
        let with = |to: &'static str, seed: &'static str| {
            let own = ["data", "prepare", "text", "--to", to, "--seed", seed, "--format", format];
            [&own[..], &["--vocab-size", "600", "--shard-tokens", "70k", "--val-fraction", "0.1"]].concat()
        };
        scratch.ok(&with("whole", "3"));
        let journal = scratch.path().join("parts.partial/progress.json");
        let mut said = String::new();
        let (mut killed, mut starts, mut went_on) = (0, 0, false);
        while killed < kills {
            let before = std::fs::read(&journal).unwrap_or_default();
            let mut child = scratch.start(&with("parts", "3"));
            // The kill waits for one change of the journal, then for `2 * killed` changes of the folder.
            let moved = || std::fs::read(&journal).is_ok_and(|now| !now.is_empty() && now != before);
            let _ = ends_before(&mut child, moved)
                || ends_before_changes(&mut child, &scratch.path().join("parts.partial"), 2 * killed);
            let _ = child.kill();
            let output = child.wait_with_output().expect("an end");
            said = String::from_utf8_lossy(&output.stderr).into_owned();
            starts += 1;
            went_on |= said.contains("continues an interrupted preparation");
            assert!(starts < 20, "the preparation ends before it notes its progress: {said}");
            if output.status.success() {
                // The preparation finished before the kill, and starts again.
                std::fs::remove_dir_all(scratch.path().join("parts")).expect("removed");
            } else {
                killed += 1;
            }
        }
        assert!(kills == 1 || went_on, "{said}");
        // A preparation with another seed is refused, and does not change the interrupted one.
        let error = scratch.fails(&with("parts", "4"));
        assert!(
            error.contains("these differ from the interrupted command: --seed") && error.contains("rm -r"),
            "{error}"
        );
        let end = [&with("parts", "3")[..], &["--tokenizer", "whole/tokenizer.json", "--end-of-text", "the"]]
            .concat();
        assert!(scratch.fails(&end).contains("--end-of-text"));
        let output = scratch.run(&with("parts", "3"));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.contains("continues an interrupted preparation"), "{said}");
        assert!(contents(&scratch.path().join("whole")) == contents(&scratch.path().join("parts")));
        scratch.ok(&["data", "check", "parts"]);
        for folder in ["whole", "parts"] {
            std::fs::remove_dir_all(scratch.path().join(folder)).expect("removed");
        }
    }
}

#[test]
fn what_an_interrupted_preparation_left_is_in_nobodys_way() {
    let scratch = Scratch::new();
    scratch.file("a.jsonl", json_lines(200_000));
    scratch.file("new.partial/unfinished-by-sage-train", "");
    scratch.file("new.partial/train_000001.bin", "half a shard");
    scratch.ok(&["data", "prepare", "a.jsonl", "--to", "new", "--vocab-size", "400"]);
    // An interrupted preparation with an unreadable journal is not removed.
    scratch.file("going.partial/unfinished-by-sage-train", "");
    scratch.file("going.partial/progress.json", "not for export");
    let error = scratch.fails(&["data", "prepare", "a.jsonl", "--to", "going", "--vocab-size", "400"]);
    assert!(error.contains("cannot continue") && error.contains("rm -r"), "{error}");
    assert!(scratch.path().join("going.partial/progress.json").exists());
    // A file of it is not data either.
    scratch.file("going.partial/train.bin", vec![0; 4000]);
    let error = scratch.fails(&["--data", "going.partial/train.bin"]);
    assert!(error.contains("the data is not finished"), "{error}");
    // A folder that this program did not make is not touched.
    scratch.file("other.partial/precious", "mine");
    scratch.fails(&["data", "prepare", "a.jsonl", "--to", "other", "--vocab-size", "400"]);
    assert!(scratch.path().join("other.partial/precious").exists());
}

/// An unreadable document late in the text does not lose the work before it.
#[test]
fn a_preparation_that_fails_late_resumes_without_the_bad_document() {
    let scratch = Scratch::new();
    scratch.file("text/a.jsonl", json_lines(9_000_000));
    scratch.file("text/b.jsonl", "{\"text\": \"good\"}\n{\"text\": bad}\n{\"text\": \"again\"}\n");
    scratch.ok(&["data", "tokenizer", "text/a.jsonl", "--to", "t.json", "--vocab-size", "600"]);
    let args = ["data", "prepare", "text", "--to", "new", "--tokenizer", "t.json", "--shard-tokens", "70k"];
    let error = scratch.fails(&args);
    assert!(error.contains("the same command continues") && error.contains("b.jsonl, line 2"), "{error}");
    assert!(!scratch.path().join("new").exists());
    let output = scratch.run(&[&args[..], &["--skip-bad"]].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("continues an interrupted preparation"), "{said}");
    let prepared = Prepared::read(&scratch.path().join("new")).expect("a list");
    assert_eq!(prepared.files.len(), 2);
    assert_eq!((prepared.files[1].documents, prepared.files[1].skipped), (2, 1));
    // Text that changes during an interrupted preparation is detected.
    scratch.file("text/b.jsonl", "{\"text\": bad}\n");
    let other = [&args[..3], &["--to", "other"], &args[5..]].concat();
    scratch.fails(&other);
    scratch.file("text/a.jsonl", json_lines(8_000_000));
    let error = scratch.fails(&other);
    assert!(
        error.contains("a.jsonl has changed: its size or modification time differs")
            && error.contains("rm -r"),
        "{error}"
    );
}
