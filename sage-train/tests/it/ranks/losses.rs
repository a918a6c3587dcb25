//! Ranks that die, stall or receive a signal: no process survives the loss of a rank, and the run can be resumed from
//! its checkpoint.
#![cfg(target_os = "linux")]

use std::process::Command;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rustix::process::{Pid, Signal, kill_process};
use sage_train::metrics::Point;

use super::{SUMS, difference, ended, flags, run_of, steps_of, train};
use crate::support::{Scratch, ends_before, ends_before_changes, wait_until};

/// The processes of the ranks: the children of the launcher.
fn ranks_of(launcher: u32) -> Vec<Pid> {
    let output = Command::new("pgrep").args(["-P", &launcher.to_string()]).output().expect("pgrep");
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().filter_map(|line| Pid::from_raw(line.trim().parse().ok()?)).collect()
}

fn alive(pid: Pid) -> bool {
    // A zombie process has no memory.
    let status =
        std::fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).unwrap_or_default();
    status.contains("VmRSS")
}

const LONG: [&str; 6] = ["--steps", "100000", "--eval-every", "100000", "--checkpoint-every", "20"];

/// If any rank dies, rank 0 included, all processes exit and report the dead rank, and the run can be resumed from its
/// checkpoint.
#[test]
fn a_rank_that_dies_ends_all() {
    let scratch = Scratch::new();
    for victim in 0..3 {
        let name = format!("victim-{victim}");
        let launcher = scratch.start(&flags(&[&["--gpus", "3", "--name", &name], &LONG[..]].concat()));
        wait_until(|| steps_of(&scratch, &name) > 30);
        let ranks = ranks_of(launcher.id());
        assert_eq!(ranks.len(), 3);
        kill_process(ranks[victim], Signal::KILL).expect("it lives");
        let (code, said) = ended(launcher);
        assert_eq!(code, Some(75), "{said}");
        assert!(!said.contains("no heartbeat"), "the loss is noticed at once: {said}");
        assert!(
            said.contains("has disconnected") && said.contains("step ") && said.contains("hint:"),
            "{said}"
        );
        assert!(victim == 0 || said.contains(&format!("error: rank {victim} on ")), "{said}");
        assert!(ranks.iter().all(|rank| !alive(*rank)));
        if victim > 0 {
            let ending =
                std::fs::read_to_string(run_of(&scratch, &name).join("ending.json")).expect("an ending");
            assert!(ending.contains("failed") && ending.contains(&format!("rank {victim} on ")), "{ending}");
        }
        let done = steps_of(&scratch, &name) + 20;
        let (run, steps) = (format!("runs/{name}"), done.to_string());
        scratch.ok(&["--resume", &run, "--steps", &steps, "--gpus", ["1", "2", "3"][victim]]);
    }
}

/// A rank dies before the ranks have connected.
#[test]
fn a_rank_that_dies_at_the_start_ends_all() {
    let scratch = Scratch::new();
    for victim in 0..2 {
        let launcher = scratch.start(&flags(&[&["--gpus", "3", "--name", "r"], &LONG[..]].concat()));
        wait_until(|| ranks_of(launcher.id()).len() == 3);
        let ranks = ranks_of(launcher.id());
        kill_process(ranks[victim], Signal::KILL).expect("it lives");
        let (code, said) = ended(launcher);
        assert_eq!(code, Some(75), "{said}");
        assert!(ranks.iter().all(|rank| !alive(*rank)));
    }
}

/// With `--restarts` the launcher restarts the run, which continues from its checkpoint.
#[test]
fn a_rank_that_dies_may_begin_again() {
    let scratch = Scratch::new();
    let own = ["--gpus", "2", "--name", "again", "--resume", "auto", "--restarts", "1", "--steps", "300"];
    let launcher =
        scratch.start(&flags(&[&own[..], &["--eval-every", "300", "--checkpoint-every", "5"]].concat()));
    wait_until(|| steps_of(&scratch, "again") > 12);
    kill_process(ranks_of(launcher.id())[1], Signal::KILL).expect("it lives");
    let (code, said) = ended(launcher);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("restarting all ranks") && said.contains("resumed after step"), "{said}");
    assert_eq!(steps_of(&scratch, "again"), 300);
}

/// The process of a rank is alive, but makes no progress.
#[test]
fn a_rank_that_stands_still_is_named() {
    let scratch = Scratch::new();
    let more = [&["--gpus", "2", "--name", "still", "--stall-timeout", "8"], &LONG[..]].concat();
    let launcher = scratch.start(&flags(&more));
    wait_until(|| steps_of(&scratch, "still") > 5);
    let ranks = ranks_of(launcher.id());
    kill_process(ranks[1], Signal::STOP).expect("it lives");
    let (code, said) = ended(launcher);
    assert_eq!(code, Some(75), "{said}");
    assert!(said.contains("rank 1 on ") && said.contains("no heartbeat"), "{said}");
    wait_until(|| ranks.iter().all(|rank| !alive(*rank)));
}

/// A signal to one rank reaches all ranks, which stop after the same step.
#[test]
fn a_signal_to_one_rank_stops_and_saves_all() {
    let scratch = Scratch::new();
    for (victim, name, sent, exit) in [
        (None, "launcher", Signal::TERM, 143),
        (Some(0), "first", Signal::TERM, 143),
        (Some(2), "last", Signal::TERM, 143),
        (None, "warned", Signal::USR1, 138),
    ] {
        let launcher = scratch.start(&flags(&[&["--gpus", "3", "--name", name], &LONG[..]].concat()));
        wait_until(|| steps_of(&scratch, name) > 5);
        let target = victim.map_or(Pid::from_child(&launcher), |rank| ranks_of(launcher.id())[rank]);
        kill_process(target, sent).expect("it lives");
        let (code, said) = ended(launcher);
        assert_eq!(code, Some(exit), "{said}");
        let steps = steps_of(&scratch, name);
        assert!(said.contains(&format!("interrupted, and saved after step {steps} of")), "{said}");
        assert_eq!(said.matches("error:").count(), 1, "{said}");
        assert!(run_of(&scratch, name).join(format!("checkpoints/step-{steps:08}/COMPLETE")).exists());
    }
}

/// When the launcher dies, no rank survives.
#[test]
fn a_launcher_that_dies_takes_its_ranks_along() {
    let scratch = Scratch::new();
    let mut launcher = scratch.start(&flags(&[&["--gpus", "2", "--name", "r"], &LONG[..]].concat()));
    wait_until(|| steps_of(&scratch, "r") > 5);
    let ranks = ranks_of(launcher.id());
    launcher.kill().expect("it lives");
    launcher.wait().expect("an end");
    wait_until(|| ranks.iter().all(|rank| !alive(*rank)));
    // The ranks received a request to stop, and saved a checkpoint.
    let steps = steps_of(&scratch, "r");
    assert!(run_of(&scratch, "r").join(format!("checkpoints/step-{steps:08}/COMPLETE")).exists());
    // The launcher dies while the ranks start.
    let mut launcher = scratch.start(&flags(&[&["--gpus", "2", "--name", "s"], &LONG[..]].concat()));
    wait_until(|| ranks_of(launcher.id()).len() == 2);
    let ranks = ranks_of(launcher.id());
    launcher.kill().expect("it lives");
    launcher.wait().expect("an end");
    wait_until(|| ranks.iter().all(|rank| !alive(*rank)));
}

/// Ranks are killed at random moments and leave partial files. The run is resumed with any number of ranks.
#[test]
fn kills_at_random_cost_steps_and_nothing_else() {
    let scratch = Scratch::new();
    let common =
        ["--schedule", "constant", "--warmup-steps", "2", "--eval-every", "1000", "--checkpoint-every", "3"];
    let whole = train(&scratch, "1", "whole", &[&["--steps", "60"], &common[..]].concat());
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    let (mut kills, mut ranks) = (0, 3);
    loop {
        let count = ranks.to_string();
        let own = ["--steps", "60", "--gpus", &count, "--name", "killed", "--resume", "auto"];
        let mut launcher = scratch.start(&flags(&[&own[..], &common[..]].concat()));
        if kills == 12 {
            let (code, said) = ended(launcher);
            assert_eq!(code, Some(0), "{said}");
            break;
        }
        // The first wait may be for 0 changes, and then returns before any rank exists. The second wait is for a rank.
        let (id, folder) = (launcher.id(), run_of(&scratch, "killed"));
        let ended_before = ends_before_changes(&mut launcher, &folder, rng.random_range(0..60))
            || ends_before(&mut launcher, || !ranks_of(id).is_empty());
        let children = if ended_before { Vec::new() } else { ranks_of(id) };
        if !children.is_empty() {
            let _ = kill_process(children[rng.random_range(0..children.len())], Signal::KILL);
        }
        let (code, said) = ended(launcher);
        assert!(matches!(code, Some(0 | 75)), "{code:?}: {said}");
        (kills, ranks) = (kills + 1, rng.random_range(1..=4));
    }
    let killed = scratch.metrics("killed");
    let loss = difference(
        &whole.iter().map(|point| Point { val_loss: None, ..point.clone() }).collect::<Vec<_>>(),
        &killed.iter().map(|point| Point { val_loss: None, ..point.clone() }).collect::<Vec<_>>(),
    );
    assert!(loss < SUMS, "losses are off by {loss:e}");
}
