//! Signals: a run saves a checkpoint, leaves, and continues with the same bits.
#![cfg(unix)]

use std::time::{Duration, Instant};

use super::{assert_same, checkpoints, flags, prepared, run_of, signal};
use crate::support::wait_until;

#[test]
fn a_signal_saves_and_leaves_and_the_run_goes_on() {
    let scratch = prepared();
    let run = ["--steps", "150", "--checkpoint-every", "0", "--eval-every", "0"];
    scratch.ok(&flags(&[&run[..], &["--name", "whole"]].concat()));
    for (flag, code) in [("-TERM", 143), ("-INT", 130), ("-USR1", 128 + signal_hook::consts::SIGUSR1)] {
        let name = format!("run{flag}");
        let mut child = scratch.start(&flags(&[&run[..], &["--name", &name]].concat()));
        let metrics = run_of(&scratch, &name).join("metrics.jsonl");
        wait_until(|| metrics.metadata().map_or(0, |m| m.len()) > 0);
        signal(&child, flag);
        let mut text = String::new();
        std::io::Read::read_to_string(&mut child.stderr.take().expect("piped"), &mut text).expect("text");
        assert_eq!(child.wait().expect("an end").code(), Some(code), "{text}");
        assert!(
            text.contains("interrupted, and saved after step") && text.contains("--resume runs/run-"),
            "{text}"
        );
        assert_eq!(checkpoints(&run_of(&scratch, &name)).len(), 1);
        scratch.ok(&["--resume", &format!("runs/{name}")]);
        assert_same(&scratch, &name, "whole", 150);
    }
}

#[test]
fn a_second_signal_leaves_at_once() {
    let scratch = prepared();
    // One micro-batch takes seconds.
    let slow = ["--tokens-per-step", "256k", "--micro-batch", "8192", "--steps", "3", "--name", "slow"];
    let mut child = scratch.start(&flags(&slow));
    let log = run_of(&scratch, "slow").join("log.txt");
    wait_until(|| log.exists());
    signal(&child, "-INT");
    std::thread::sleep(Duration::from_millis(500));
    assert!(child.try_wait().expect("a child").is_none(), "the first waits for the step");
    signal(&child, "-INT");
    let sent = Instant::now();
    assert_eq!(child.wait().expect("an end").code(), Some(130));
    assert!(sent.elapsed() < Duration::from_millis(500), "{:?}", sent.elapsed());
    assert!(checkpoints(&run_of(&scratch, "slow")).is_empty());
}

/// A signal interrupts a step between its micro-batches: the steps before are saved, and the run continues
/// with the same bits.
#[test]
fn a_long_step_is_left_in_its_middle() {
    let scratch = prepared();
    // A step takes some seconds, for 200 micro-batches.
    let long = [
        "--tokens-per-step",
        "102400",
        "--micro-batch",
        "16",
        "--checkpoint-every",
        "100",
        "--eval-every",
        "100",
    ];
    let with = |steps, name| {
        flags(
            &[
                &long[..],
                &["--schedule", "constant", "--warmup-steps", "1", "--steps", steps, "--name", name],
            ]
            .concat(),
        )
    };
    scratch.ok(&with("2", "whole"));
    let mut child = scratch.start(&with("2", "left"));
    let metrics = run_of(&scratch, "left").join("metrics.jsonl");
    wait_until(|| std::fs::read_to_string(&metrics).is_ok_and(|text| text.lines().count() == 1));
    std::thread::sleep(Duration::from_millis(50));
    signal(&child, "-TERM");
    assert_eq!(child.wait().expect("an end").code(), Some(143));
    assert_eq!(checkpoints(&run_of(&scratch, "left")), ["step-00000001"]);
    scratch.ok(&["--resume", &run_of(&scratch, "left").display().to_string()]);
    assert_same(&scratch, "left", "whole", 2);
    // In the first step there is nothing to save.
    let mut child = scratch.start(&with("2", "first"));
    let log = run_of(&scratch, "first").join("log.txt");
    wait_until(|| std::fs::read_to_string(&log).is_ok_and(|text| text.contains("epochs")));
    std::thread::sleep(Duration::from_millis(300));
    signal(&child, "-TERM");
    assert_eq!(child.wait().expect("an end").code(), Some(143));
    assert!(checkpoints(&run_of(&scratch, "first")).is_empty());
}

/// Slurm's warning may come twice: the second one does not end the run before it is saved.
#[test]
fn a_repeated_warning_of_slurm_saves_too() {
    let scratch = prepared();
    let run = ["--steps", "100000", "--checkpoint-every", "0", "--eval-every", "0", "--name", "warned"];
    let mut child = scratch.start(&flags(&run));
    let metrics = run_of(&scratch, "warned").join("metrics.jsonl");
    wait_until(|| metrics.metadata().map_or(0, |m| m.len()) > 0);
    // The run leaves after the step at hand; a signal that arrives later finds no process.
    for _ in 0..50 {
        signal(&child, "-USR1");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(child.wait().expect("an end").code(), Some(128 + signal_hook::consts::SIGUSR1));
    assert_eq!(checkpoints(&run_of(&scratch, "warned")).len(), 1);
}
