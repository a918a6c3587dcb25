//! Several processes that train one model: the results are the same for any number of ranks, and no process
//! survives the loss of a rank.

mod launched;
mod losses;

use std::io::Read;
use std::path::PathBuf;
use std::process::Child;

use sage_train::metrics::Point;

use crate::support::{Scratch, small, wait_until};

/// Six micro-batches per step, which only 1, 2, 3 and 6 ranks share evenly.
fn flags<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let own = ["--attn", "fpa", "--tokens-per-step", "768", "--eval-tokens", "512", "--device", "cpu"];
    small(&[&own[..], more].concat())
}

fn train(scratch: &Scratch, ranks: &str, name: &str, more: &[&str]) -> Vec<Point> {
    let more = [&["--gpus", ranks, "--name", name], more].concat();
    scratch.ok(&flags(&more));
    scratch.metrics(name)
}

/// The computed values: everything except times.
fn numbers(points: &[Point]) -> Vec<Point> {
    let bare = |point: &Point| Point {
        seconds: 0.0,
        tokens_per_second: 0.0,
        update_share: None,
        slowest_rank: None,
        slowest_ratio: None,
        ..point.clone()
    };
    points.iter().map(bare).collect()
}

fn run_of(scratch: &Scratch, name: &str) -> PathBuf {
    scratch.path().join("runs").join(name)
}

/// The largest difference of losses and of validation losses.
fn difference(a: &[Point], b: &[Point]) -> f64 {
    assert_eq!(a.len(), b.len());
    let of = |a: Option<f64>, b: Option<f64>| (a.unwrap_or(0.0) - b.unwrap_or(0.0)).abs();
    let losses = a.iter().zip(b).map(|(a, b)| (a.loss - b.loss).abs().max(of(a.val_loss, b.val_loss)));
    losses.fold(0.0, f64::max)
}

#[test]
fn any_number_of_ranks_trains_the_same() {
    let scratch = Scratch::new();
    let steps = ["--steps", "30", "--eval-every", "15"];
    let one = train(&scratch, "1", "one", &steps);
    for ranks in ["2", "3", "4"] {
        let several = train(&scratch, ranks, ranks, &steps);
        assert_same_course(ranks, &one, &several, SUMS);
    }
    // The folder has complete weights, as after a run with one process.
    scratch.ok(&["eval", "runs/3", "--device", "cpu"]);
    scratch.ok(&["eval", "runs/3/checkpoints/step-00000030", "--device", "cpu"]);
}

/// The bits do not depend on how often the run is started, interrupted and resumed.
#[test]
fn the_same_ranks_give_the_same_bits() {
    let scratch = Scratch::new();
    let more = ["--attn", "sagebwd", "--eval-every", "10"];
    let with = |steps| [&["--steps", steps], &more[..]].concat();
    let whole = train(&scratch, "3", "whole", &with("30"));
    assert_eq!(numbers(&whole), numbers(&train(&scratch, "3", "again", &with("30"))));
    // A schedule that does not depend on the number of steps.
    let constant =
        |steps| [&["--steps", steps, "--schedule", "constant", "--warmup-steps", "2"], &more[..]].concat();
    let whole = train(&scratch, "3", "whole-constant", &constant("30"));
    train(&scratch, "3", "parts", &constant("17"));
    scratch.ok(&["--resume", "runs/parts", "--steps", "30", "--gpus", "3"]);
    let without_validation = |points: &[Point]| -> Vec<Point> {
        let bare = |point: &Point| Point { val_loss: None, val_bits_per_byte: None, ..point.clone() };
        numbers(&points.iter().map(bare).collect::<Vec<_>>())
    };
    let parts = scratch.metrics("parts");
    assert_eq!(without_validation(&whole), without_validation(&parts));
    let state = |name: &str, rank: u32| {
        let file = format!("checkpoints/step-00000030/state-0000{rank}-of-00003.safetensors");
        std::fs::read(run_of(&scratch, name).join(file)).expect("a checkpoint")
    };
    (1..=3).for_each(|rank| assert!(state("whole-constant", rank) == state("parts", rank)));
}

/// A checkpoint can be resumed with any number of ranks and any micro-batch.
#[test]
fn other_ranks_go_on() {
    let scratch = Scratch::new();
    let constant =
        ["--schedule", "constant", "--warmup-steps", "2", "--eval-every", "100", "--checkpoint-every", "6"];
    let with = |steps| [&["--steps", steps], &constant[..]].concat();
    let whole = train(&scratch, "1", "whole", &with("30"));
    train(&scratch, "4", "parts", &with("6"));
    for (ranks, steps, micro_batch) in
        [("3", "12", "4"), ("1", "18", "4"), ("2", "24", "8"), ("4", "30", "2")]
    {
        let more = ["--gpus", ranks, "--micro-batch", micro_batch];
        scratch.ok(&[&["--resume", "runs/parts", "--steps", steps], &more[..]].concat());
    }
    let parts = scratch.metrics("parts");
    let log = std::fs::read_to_string(run_of(&scratch, "parts").join("log.txt")).expect("a log");
    for change in
        ["ranks 3, 4 before:", "ranks 1, 3 before:", "ranks 2, 1 before; --micro-batch 8, 4 before:"]
    {
        assert!(
            log.contains(change) && log.contains("sums in another order from here on"),
            "{change}: {log}"
        );
    }
    let loss = whole.iter().zip(&parts).map(|(a, b)| (a.loss - b.loss).abs()).fold(0.0, f64::max);
    assert!(loss < SUMS, "losses are off by {loss:e}");
    // A changed file of a rank is reported, whichever rank checks it.
    let file = run_of(&scratch, "parts").join("checkpoints/step-00000030/state-00003-of-00004.safetensors");
    let mut bytes = std::fs::read(&file).expect("a checkpoint");
    *bytes.last_mut().expect("bytes") ^= 1;
    std::fs::write(&file, bytes).expect("a file");
    for ranks in ["1", "2"] {
        let error = scratch.fails(&["--resume", "runs/parts", "--steps", "40", "--gpus", ranks]);
        assert!(error.contains("state-00003-of-00004.safetensors: ") && error.contains("hint:"), "{error}");
    }
}

/// Waits for a process and for all ranks that it started, and returns its exit code and standard error. The ranks write
/// to the same stream, which ends when all of them have exited.
fn ended(mut child: Child) -> (Option<i32>, String) {
    let mut stderr = child.stderr.take().expect("a pipe");
    let reading = std::thread::spawn(move || {
        let mut said = String::new();
        stderr.read_to_string(&mut said).expect("text");
        said
    });
    wait_until(|| reading.is_finished());
    (child.wait().expect("an end").code(), reading.join().expect("text"))
}

fn steps_of(scratch: &Scratch, name: &str) -> usize {
    std::fs::read_to_string(run_of(scratch, name).join("metrics.jsonl"))
        .map_or(0, |text| text.lines().count())
}

#[test]
fn a_plan_says_what_ranks_would_do() {
    let plan =
        Scratch::new().ok(&["--dry-run", "--preset", "325m", "--tokens-per-step", "2m", "--gpus", "6"]);
    assert!(
        plan.contains(
            "6 on one node; a step's 64 micro-batches: 11 each for 4 ranks, 10 each for 2 ranks; ranks idle 3 % of the time"
        ),
        "{plan}"
    );
    let lines = ["memory of each about ", "sent in a step gradients 1.01 GiB", "step           about "];
    assert!(lines.iter().all(|line| plan.contains(line)), "{plan}");
    let large = ["--tokens-per-step", "8m", "--micro-batch", "2", "--ranks", "1024", "--gpu-rate", "176k"];
    let plan = Scratch::new().ok(&[&["--dry-run", "--preset", "325m"], &large[..]].concat());
    let expected = [
        "1024 on 128 nodes of 8; each rank computes 1 of a step's 1024 micro-batches",
        "between nodes  0.30 GiB per rank and direction",
    ];
    assert!(expected.iter().all(|line| plan.contains(line)), "{plan}");
}

/// Limit for the difference of losses if f32 sums have another order. The largest difference that we measured over 30
/// steps is 2.4e-7. A micro-batch's loss is about 5, where an f32 ulp is 4.8e-7. A step's loss is the mean over several
/// micro-batches.
const SUMS: f64 = 5e-6;

/// The same limit with quantized values: a value changes when a sum rounds to the other side of a midpoint. We measured
/// 8.9e-5 with INT8 and 2e-5 with FP4.
const CODES: f64 = 2e-4;

/// Asserts that the first gradient's norm agrees within 1e-7 (measured: 1.2e-8, f32 sums of some 10,000 elements), and
/// losses within `limit`.
fn assert_same_course(what: &str, one: &[Point], other: &[Point], limit: f64) {
    let norm = (other[0].grad_norm / one[0].grad_norm - 1.0).abs();
    assert!(norm < 1e-7, "{what}: the first gradient's norm is off by {norm:e}");
    let loss = difference(one, other);
    assert!(loss < limit, "{what}: losses are off by {loss:e}");
}

/// SLA2 with a router that learns from the first step on. The norm of the first gradient would differ if the gradients
/// of the router or of `theta` (SLA2's mixture weights) were wrongly multiplied by the number of ranks that share a
/// sequence. Attention is unquantized: with quantized values, another order of f32 sums changes losses by 1e-4, even on
/// one rank.
const SLA2: [&str; 14] = [
    "--context",
    "128",
    "--micro-batch",
    "2",
    "--sla2-block",
    "16",
    "--sla2-blocks",
    "2",
    "--sla2-dense-steps",
    "8",
    "--sla2-router-steps",
    "8",
    "--sla2-numerics",
    "fpa",
];

/// Each rank has one part of every sequence, and computes attention for some heads of whole sequences. The cases
/// include separate key heads for each rank, and a key head that two ranks share.
#[test]
fn ranks_share_sequences() {
    let scratch = Scratch::new();
    scratch.file("texts.jsonl", crate::support::json_lines(1 << 20));
    let base = ["--heads", "4", "--data", "texts.jsonl", "--steps", "30", "--eval-every", "15"];
    for (name, more) in [
        ("fpa", &["--attn", "fpa", "--key-heads", "2", "--document-mask", "on"][..]),
        ("int8", &["--attn", "sagebwd", "--smoothing", "qk", "--recompute", "attention"]),
        ("qwen2", &["--attn", "fpa", "--qk-norm", "off", "--qkv-bias", "on", "--untied", "on"]),
        ("sinks", &["--attn", "fpa", "--key-heads", "2", "--sinks", "on", "--softcap", "20"]),
        ("fp4", &["--attn", "attn-qat", "--key-heads", "2", "--qk-norm", "off", "--recompute", "block"]),
        ("sla2", &[&SLA2[..], &["--attn", "sla2", "--document-mask", "on"]].concat()),
        ("window", &[&SLA2[..], &["--attn", "sla2-window"]].concat()),
        // The four query heads have only two selections. Four ranks cannot divide these, so the loop skips this case.
        ("grouped", &[&SLA2[..], &["--attn", "sla2", "--key-heads", "2"]].concat()),
    ] {
        let with = |name: &str, ranks: &str, context: &str| {
            train(&scratch, ranks, name, &[&base, more, &["--context-parallel", context]].concat())
        };
        let one = with(name, "1", "1");
        for (ranks, context) in [("2", "2"), ("4", "4"), ("4", "2")] {
            if (name, context) == ("grouped", "4") {
                continue;
            }
            let several = with(&format!("{name}-{ranks}-{context}"), ranks, context);
            let limit = if ["int8", "fp4"].contains(&name) { CODES } else { SUMS };
            assert_same_course(&format!("{name}, {context} of {ranks}"), &one, &several, limit);
        }
    }
    // A run without context parallelism is resumed with context parallelism, and the other way round.
    scratch.ok(&["--resume", "runs/fpa", "--steps", "34", "--gpus", "2", "--context-parallel", "2"]);
    scratch.ok(&["--resume", "runs/fpa-4-4", "--steps", "34"]);
    let [a, b] = ["fpa", "fpa-4-4"].map(|name| scratch.metrics(name));
    assert!(difference(&a, &b) < SUMS);
}

#[test]
fn mistakes_are_errors() {
    let scratch = Scratch::new();
    for (args, expected) in [
        (flags(&["--gpus", "7"]), "there are more ranks than micro-batches in a step"),
        (flags(&["--gpus", "0"]), "--gpus is out of range"),
        (flags(&["--gpus", "10000000000000000000", "--dry-run"]), "gpus is out of range"),
        (
            flags(&["--gpus", "1", "--restarts", "2", "--resume", "auto", "--name", "r"]),
            "no ranks to restart",
        ),
        (flags(&["--gpus", "2", "--seed", "1,2"]), "a list of values makes several runs"),
        (
            flags(&["--context-parallel", "2", "--seed", "1,2"]),
            "--context-parallel is for one run, but a list of values makes several runs\n  got:     a list for seed",
        ),
        (flags(&["--context-parallel", "0"]), "--context-parallel 0"),
        (flags(&["--piece-mb", "0"]), "piece-mb"),
        (flags(&["--gpus", "2", "--copy-engines", "on"]), "CPUs have no copy engines"),
        (flags(&["--gpus", "2", "--restarts", "2"]), "--restarts needs --resume auto"),
        (flags(&["--resume", "auto"]), "--resume auto needs the name of the run"),
        (flags(&["--dry-run", "--ranks", "12"]), "the ranks cannot be divided into equal nodes"),
        (flags(&["--context-parallel", "2"]), "cannot be split into this many parts"),
        (flags(&["--gpus", "4", "--context-parallel", "4"]), "2 heads"),
        (
            flags(&["--gpus", "6", "--heads", "6", "--key-heads", "2", "--context-parallel", "3"]),
            "context 32\n",
        ),
        (
            flags(&["--gpus=2", "--attn=sla2", "--sla2-blocks=1", "--key-heads=1", "--context-parallel=2"]),
            "with SLA2 a divisor of the key heads",
        ),
    ] {
        let error = scratch.fails(&args);
        assert!(error.contains(expected) && error.contains("hint:"), "{error}");
    }
    // `--resume auto` refuses a finished run whose checkpoints are deleted, and a folder that is not a run.
    scratch.ok(&flags(&["--steps", "2", "--name", "done"]));
    std::fs::remove_dir_all(run_of(&scratch, "done").join("checkpoints")).expect("checkpoints");
    scratch.file("runs/theirs/a.txt", "a");
    for name in ["done", "theirs"] {
        let error = scratch.fails(&flags(&["--steps", "4", "--resume", "auto", "--name", name]));
        assert!(error.contains("exists already") && error.contains("hint:"), "{error}");
    }
    let half = scratch.run_with(&flags(&[]), &[("RANK", "0"), ("WORLD_SIZE", "2")]);
    let error = String::from_utf8_lossy(&half.stderr);
    assert!(
        !half.status.success() && error.contains("environment variables of the ranks are missing"),
        "{error}"
    );
}

/// If one rank cannot write its file, for example on a full disk, the step has no checkpoint, and training
/// continues.
#[test]
#[cfg(target_os = "linux")]
fn a_checkpoint_that_one_rank_cannot_write_is_none() {
    let scratch = Scratch::new();
    let launcher = scratch.start(&flags(&[
        "--gpus",
        "2",
        "--name",
        "r",
        "--steps",
        "200",
        "--checkpoint-every",
        "5",
        "--eval-every",
        "1000",
    ]));
    wait_until(|| steps_of(&scratch, "r") > 0);
    // A folder at the path of the file that rank 1 will write makes the write fail.
    let in_the_way = |step: usize| {
        let partial = format!("checkpoints/step-{step:08}.partial/state-00002-of-00002.safetensors");
        run_of(&scratch, "r").join(partial)
    };
    for step in (5..=195).step_by(5) {
        let _ = std::fs::create_dir_all(in_the_way(step));
    }
    let (code, said) = ended(launcher);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("cannot write the checkpoint of step") && said.contains("rank 1: "), "{said}");
    let log = std::fs::read_to_string(run_of(&scratch, "r").join("log.rank-1.txt"))
        .expect("it has something to say");
    assert!(log.contains("cannot write") && !log.contains("loss"), "{log}");
    assert!(run_of(&scratch, "r").join("checkpoints/step-00000200/COMPLETE").exists());
    assert_eq!(steps_of(&scratch, "r"), 200);
}
