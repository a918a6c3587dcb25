//! Signals: a run saves a checkpoint, exits, and can be resumed bit-identically.
#![cfg(unix)]

use std::io::{BufRead, BufReader, Read};
use std::time::Duration;

use sage_train::checkpoint::newest;

use super::{assert_same_results, checkpoints, flags, prepared, run_of, signal};
use crate::support::wait_until;

/// With these settings, a step's results do not depend on `--steps`. So tests can compare a run that was interrupted
/// early with a run that has a smaller `--steps`.
const COURSE: [&str; 8] =
    ["--schedule", "constant", "--warmup-steps", "1", "--checkpoint-every", "0", "--eval-every", "0"];

#[test]
fn a_signal_saves_the_run_which_then_resumes() {
    let scratch = prepared();
    for (flag, code) in [("-TERM", 143), ("-INT", 130), ("-USR1", 128 + signal_hook::consts::SIGUSR1)] {
        let (name, whole) = (format!("run{flag}"), format!("whole{flag}"));
        let mut child =
            scratch.start(&flags(&[&COURSE[..], &["--steps", "100000", "--name", &name]].concat()));
        let folder = run_of(&scratch, &name);
        let metrics = folder.join("metrics.jsonl");
        wait_until(|| metrics.metadata().map_or(0, |m| m.len()) > 0);
        signal(&child, flag);
        let mut text = String::new();
        child.stderr.take().expect("piped").read_to_string(&mut text).expect("text");
        assert_eq!(child.wait().expect("an end").code(), Some(code), "{text}");
        assert!(
            text.contains("interrupted, and saved after step") && text.contains("--resume runs/run-"),
            "{text}"
        );
        assert_eq!(checkpoints(&folder).len(), 1);
        let steps = newest(&folder).expect("a checkpoint") + 20;
        let (path, count) = (format!("runs/{name}"), steps.to_string());
        scratch.ok(&["--resume", &path, "--steps", &count]);
        scratch.ok(&flags(&[&COURSE[..], &["--steps", &count, "--name", &whole]].concat()));
        assert_same_results(&scratch, &name, &whole, steps);
    }
}

#[test]
fn a_second_signal_leaves_at_once() {
    let scratch = prepared();
    // The only micro-batch of a step takes about a minute, and is not interrupted.
    let slow =
        ["--layers", "64", "--recompute", "block", "--micro-batch", "2048", "--tokens-per-step", "64k"];
    let mut child = scratch.start(&flags(&[&slow[..], &["--steps", "3", "--name", "slow"]].concat()));
    let log = run_of(&scratch, "slow").join("log.txt");
    wait_until(|| log.exists());
    signal(&child, "-INT");
    let mut lines =
        BufReader::new(child.stderr.take().expect("piped")).lines().map(|line| line.expect("text"));
    assert!(lines.any(|line| line.contains("a second signal stops at once")), "the first signal is noted");
    // Signals within 250 ms count as one.
    std::thread::sleep(Duration::from_millis(300));
    assert!(child.try_wait().expect("a child").is_none(), "the first waits for the step");
    signal(&child, "-INT");
    assert_eq!(child.wait().expect("an end").code(), Some(130));
    // A run that had waited for the end of its step would say that it was interrupted.
    let rest: Vec<String> = lines.collect();
    assert!(!rest.iter().any(|line| line.contains("interrupted")), "{rest:?}");
    assert!(checkpoints(&run_of(&scratch, "slow")).is_empty());
}

/// A signal interrupts a step between its micro-batches: the completed steps are saved, and the resumed run is
/// bit-identical to an uninterrupted run.
#[test]
fn a_long_step_is_left_in_its_middle() {
    let scratch = prepared();
    // A step has 200 micro-batches and takes some seconds.
    let long = [&COURSE[..], &["--tokens-per-step", "102400", "--micro-batch", "16"]].concat();
    let with = |more: &[&str]| scratch.start(&flags(&[&long[..], more].concat()));
    let mut child = with(&["--steps", "100000", "--name", "left"]);
    let folder = run_of(&scratch, "left");
    let metrics = folder.join("metrics.jsonl");
    wait_until(|| std::fs::read_to_string(&metrics).is_ok_and(|text| text.lines().count() > 0));
    signal(&child, "-TERM");
    assert_eq!(child.wait().expect("an end").code(), Some(143));
    assert_eq!(checkpoints(&folder).len(), 1);
    let steps = newest(&folder).expect("a checkpoint") + 1;
    let count = steps.to_string();
    scratch.ok(&["--resume", "runs/left", "--steps", &count]);
    scratch.ok(&flags(&[&long[..], &["--steps", &count, "--name", "whole"]].concat()));
    assert_same_results(&scratch, "left", "whole", steps);
    // In the first step there is nothing to save. It has 4096 micro-batches, which take half a minute: a run that
    // waited for them would have a checkpoint.
    let mut child = with(&["--tokens-per-step", "2m", "--steps", "2", "--name", "first"]);
    let log = run_of(&scratch, "first").join("log.txt");
    wait_until(|| std::fs::read_to_string(&log).is_ok_and(|text| text.contains("epochs")));
    signal(&child, "-TERM");
    assert_eq!(child.wait().expect("an end").code(), Some(143));
    assert!(checkpoints(&run_of(&scratch, "first")).is_empty());
}

/// Slurm's warning may arrive twice: the second warning does not end the run before the checkpoint is saved.
#[test]
fn a_repeated_warning_of_slurm_saves_too() {
    let scratch = prepared();
    let run = ["--steps", "100000", "--checkpoint-every", "0", "--eval-every", "0", "--name", "warned"];
    let mut child = scratch.start(&flags(&run));
    let metrics = run_of(&scratch, "warned").join("metrics.jsonl");
    wait_until(|| metrics.metadata().map_or(0, |m| m.len()) > 0);
    // The run exits after the current step; a later signal finds no process.
    for _ in 0..50 {
        signal(&child, "-USR1");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(child.wait().expect("an end").code(), Some(128 + signal_hook::consts::SIGUSR1));
    assert_eq!(checkpoints(&run_of(&scratch, "warned")).len(), 1);
}
