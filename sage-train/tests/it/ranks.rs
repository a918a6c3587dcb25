//! Several processes that train one model: the results are the same for any number of ranks, and no process
//! survives the loss of a rank.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rustix::process::{Pid, Signal, kill_process};
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

/// The computed values: everything but times.
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

/// Sums of f32 in another order: 1e-6 of the gradient, and its effect over 30 steps.
#[test]
fn any_number_of_ranks_trains_the_same() {
    let scratch = Scratch::new();
    let steps = ["--steps", "30", "--eval-every", "15"];
    let one = train(&scratch, "1", "one", &steps);
    for ranks in ["2", "3", "4"] {
        let several = train(&scratch, ranks, ranks, &steps);
        let norm = (several[0].grad_norm / one[0].grad_norm - 1.0).abs();
        assert!(norm < 1e-6, "{ranks} ranks: the first gradient's norm is off by {norm:e}");
        let loss = difference(&one, &several);
        assert!(loss < 1e-4, "{ranks} ranks: losses are off by {loss:e}");
    }
    // The folder has whole weights, as after a run with one process.
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
    assert!(loss < 1e-4, "losses are off by {loss:e}");
    // A changed file of a rank is named, whichever rank checks it.
    let file = run_of(&scratch, "parts").join("checkpoints/step-00000030/state-00003-of-00004.safetensors");
    let mut bytes = std::fs::read(&file).expect("a checkpoint");
    *bytes.last_mut().expect("bytes") ^= 1;
    std::fs::write(&file, bytes).expect("a file");
    for ranks in ["1", "2"] {
        let error = scratch.fails(&["--resume", "runs/parts", "--steps", "40", "--gpus", ranks]);
        assert!(error.contains("state-00003-of-00004.safetensors: ") && error.contains("hint:"), "{error}");
    }
}

/// The processes of the ranks: the children of the launcher.
fn ranks_of(launcher: &Child) -> Vec<Pid> {
    let output = Command::new("pgrep").args(["-P", &launcher.id().to_string()]).output().expect("pgrep");
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().filter_map(|line| Pid::from_raw(line.trim().parse().ok()?)).collect()
}

fn ended(mut child: Child) -> (Option<i32>, String) {
    let mut said = String::new();
    child.stderr.take().expect("a pipe").read_to_string(&mut said).expect("text");
    (child.wait().expect("an end").code(), said)
}

fn alive(pid: Pid) -> bool {
    // A process that has ended but was not waited for has no memory.
    let status =
        std::fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).unwrap_or_default();
    status.contains("VmRSS")
}

fn steps_of(scratch: &Scratch, name: &str) -> usize {
    std::fs::read_to_string(run_of(scratch, name).join("metrics.jsonl"))
        .map_or(0, |text| text.lines().count())
}

const LONG: [&str; 6] = ["--steps", "100000", "--eval-every", "100000", "--checkpoint-every", "20"];

/// If any rank dies, rank 0 included, all processes end within seconds and name the dead rank, and the run
/// can be resumed from its checkpoint.
#[test]
#[cfg(target_os = "linux")]
fn a_rank_that_dies_ends_all() {
    let scratch = Scratch::new();
    for victim in 0..3 {
        let name = format!("victim-{victim}");
        let launcher = scratch.start(&flags(&[&["--gpus", "3", "--name", &name], &LONG[..]].concat()));
        wait_until(|| steps_of(&scratch, &name) > 30);
        let ranks = ranks_of(&launcher);
        assert_eq!(ranks.len(), 3);
        kill_process(ranks[victim], Signal::KILL).expect("it lives");
        let killed = Instant::now();
        let (code, said) = ended(launcher);
        assert!(killed.elapsed() < Duration::from_secs(5), "it took {:?}", killed.elapsed());
        assert_eq!(code, Some(75), "{said}");
        assert!(said.contains("is gone") && said.contains("step ") && said.contains("hint:"), "{said}");
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

/// The rank dies before the others have connected to it.
#[test]
#[cfg(target_os = "linux")]
fn a_rank_that_dies_at_the_start_ends_all() {
    let scratch = Scratch::new();
    for victim in 0..2 {
        let launcher = scratch.start(&flags(&[&["--gpus", "3", "--name", "r"], &LONG[..]].concat()));
        wait_until(|| ranks_of(&launcher).len() == 3);
        let ranks = ranks_of(&launcher);
        kill_process(ranks[victim], Signal::KILL).expect("it lives");
        let killed = Instant::now();
        let (code, said) = ended(launcher);
        assert!(killed.elapsed() < Duration::from_secs(5), "it took {:?}", killed.elapsed());
        assert_eq!(code, Some(75), "{said}");
        assert!(ranks.iter().all(|rank| !alive(*rank)));
    }
}

/// With `--restarts` the launcher starts the run again, which continues from its checkpoint.
#[test]
#[cfg(target_os = "linux")]
fn a_rank_that_dies_may_begin_again() {
    let scratch = Scratch::new();
    let own = ["--gpus", "2", "--name", "again", "--resume", "auto", "--restarts", "1", "--steps", "60"];
    let launcher =
        scratch.start(&flags(&[&own[..], &["--eval-every", "60", "--checkpoint-every", "5"]].concat()));
    wait_until(|| steps_of(&scratch, "again") > 12);
    kill_process(ranks_of(&launcher)[1], Signal::KILL).expect("it lives");
    let (code, said) = ended(launcher);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("begins again") && said.contains("resumed after step"), "{said}");
    assert_eq!(steps_of(&scratch, "again"), 60);
}

/// The process lives, but makes no progress.
#[test]
#[cfg(target_os = "linux")]
fn a_rank_that_stands_still_is_named() {
    let scratch = Scratch::new();
    let more = [&["--gpus", "2", "--name", "still", "--stall-timeout", "3"], &LONG[..]].concat();
    let launcher = scratch.start(&flags(&more));
    wait_until(|| steps_of(&scratch, "still") > 5);
    let ranks = ranks_of(&launcher);
    kill_process(ranks[1], Signal::STOP).expect("it lives");
    let (code, said) = ended(launcher);
    assert_eq!(code, Some(75), "{said}");
    assert!(said.contains("rank 1 on ") && said.contains("no sign of life"), "{said}");
    wait_until(|| ranks.iter().all(|rank| !alive(*rank)));
}

/// A signal to one rank reaches all, which stop after the same step.
#[test]
#[cfg(target_os = "linux")]
fn a_signal_to_one_rank_stops_and_saves_all() {
    let scratch = Scratch::new();
    for (victim, name) in [(None, "launcher"), (Some(0), "first"), (Some(2), "last")] {
        let launcher = scratch.start(&flags(&[&["--gpus", "3", "--name", name], &LONG[..]].concat()));
        wait_until(|| steps_of(&scratch, name) > 5);
        let target = victim.map_or(Pid::from_child(&launcher), |rank| ranks_of(&launcher)[rank]);
        kill_process(target, Signal::TERM).expect("it lives");
        let (code, said) = ended(launcher);
        assert_eq!(code, Some(143), "{said}");
        let steps = steps_of(&scratch, name);
        assert!(said.contains(&format!("interrupted, and saved after step {steps} of")), "{said}");
        assert_eq!(said.matches("error:").count(), 1, "{said}");
        assert!(run_of(&scratch, name).join(format!("checkpoints/step-{steps:08}/COMPLETE")).exists());
    }
}

/// When the launcher dies, no rank survives.
#[test]
#[cfg(target_os = "linux")]
fn a_launcher_that_dies_takes_its_ranks_along() {
    let scratch = Scratch::new();
    let mut launcher = scratch.start(&flags(&[&["--gpus", "2", "--name", "r"], &LONG[..]].concat()));
    wait_until(|| steps_of(&scratch, "r") > 5);
    let ranks = ranks_of(&launcher);
    launcher.kill().expect("it lives");
    launcher.wait().expect("an end");
    wait_until(|| ranks.iter().all(|rank| !alive(*rank)));
    // The ranks received a request to stop, and saved a checkpoint.
    let steps = steps_of(&scratch, "r");
    assert!(run_of(&scratch, "r").join(format!("checkpoints/step-{steps:08}/COMPLETE")).exists());
    // The same while the ranks start.
    let mut launcher = scratch.start(&flags(&[&["--gpus", "2", "--name", "s"], &LONG[..]].concat()));
    wait_until(|| ranks_of(&launcher).len() == 2);
    let ranks = ranks_of(&launcher);
    launcher.kill().expect("it lives");
    launcher.wait().expect("an end");
    wait_until(|| ranks.iter().all(|rank| !alive(*rank)));
}

/// Ranks are killed at random moments, leave partial files, and runs are resumed with any number of ranks.
#[test]
#[cfg(target_os = "linux")]
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
        let launcher = scratch.start(&flags(&[&own[..], &common[..]].concat()));
        if kills == 12 {
            let (code, said) = ended(launcher);
            assert_eq!(code, Some(0), "{said}");
            break;
        }
        std::thread::sleep(Duration::from_millis(rng.random_range(0..700)));
        let children = ranks_of(&launcher);
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
    assert!(loss < 1e-3, "losses are off by {loss:e}");
}

#[test]
fn a_plan_says_what_ranks_would_do() {
    let plan =
        Scratch::new().ok(&["--dry-run", "--preset", "325m", "--tokens-per-step", "2m", "--gpus", "6"]);
    assert!(
        plan.contains(
            "6 on a node of 6, with 11 for 4 of them, 10 for 2 of 64 micro-batches of a step: 3 % idle"
        ),
        "{plan}"
    );
    let lines = ["memory of each about ", "sent in a step gradients 1.01 GiB", "step           about "];
    assert!(lines.iter().all(|line| plan.contains(line)), "{plan}");
    let large = ["--tokens-per-step", "8m", "--micro-batch", "2", "--ranks", "1024", "--gpu-rate", "176k"];
    let plan = Scratch::new().ok(&[&["--dry-run", "--preset", "325m"], &large[..]].concat());
    let expected =
        ["1024 on 128 nodes of 8, with 1 each of 1024 micro-batches", "between nodes  0.30 GiB each way"];
    assert!(expected.iter().all(|line| plan.contains(line)), "{plan}");
}

fn free_port() -> String {
    let port = TcpListener::bind(("127.0.0.1", 0)).and_then(|free| free.local_addr()).expect("a port").port();
    port.to_string()
}

/// Starts rank `rank` of `of` as torchrun would, with `on_node` ranks per node and its own command line.
fn by_hand(
    scratch: &Scratch,
    port: &str,
    rank: usize,
    (of, on_node): (usize, usize),
    args: &[&str],
) -> Child {
    let [rank, local, of, on_node] = [rank, rank % on_node, of, on_node].map(|n| n.to_string());
    Command::new(env!("CARGO_BIN_EXE_sage-train"))
        .args(args)
        .current_dir(scratch.path())
        .envs([("RANK", rank), ("LOCAL_RANK", local), ("WORLD_SIZE", of), ("LOCAL_WORLD_SIZE", on_node)])
        .envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port), ("RUST_BACKTRACE", "0")])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts")
}

/// A run of four ranks, with `on_node` ranks per node.
fn train_on_nodes(scratch: &Scratch, on_node: usize, name: &str, more: &[&str]) -> Vec<Point> {
    let (port, args) = (free_port(), flags(&[&["--name", name], more].concat()));
    let ranks: Vec<Child> = (0..4).map(|rank| by_hand(scratch, &port, rank, (4, on_node), &args)).collect();
    for (code, said) in ranks.into_iter().map(ended) {
        assert_eq!(code, Some(0), "{said}");
    }
    scratch.metrics(name)
}

/// The first gradient's norm agrees within 1e-6, and losses within 1e-4 over 30 steps.
fn assert_same_course(what: &str, one: &[Point], other: &[Point]) {
    let norm = (other[0].grad_norm / one[0].grad_norm - 1.0).abs();
    assert!(norm < 1e-6, "{what}: the first gradient's norm is off by {norm:e}");
    let loss = difference(one, other);
    assert!(loss < 1e-4, "{what}: losses are off by {loss:e}");
}

/// Settings with parameters in several pieces, which are reduced one after the other.
const PIECES: [&str; 4] = ["--layers", "3", "--piece-mb", "0.02"];

/// Every node holds all of the optimizer state. The files of all ranks are one checkpoint, which any number
/// of ranks can resume.
#[test]
fn nodes_of_any_size_train_the_same() {
    let scratch = Scratch::new();
    let steps = ["--steps", "30", "--eval-every", "15", "--schedule", "constant", "--warmup-steps", "2"];
    let one = train(&scratch, "1", "one", &[&PIECES[..], &steps].concat());
    for (on_node, overlap) in [(4, "after"), (4, "beside"), (2, "after"), (2, "beside"), (1, "auto")] {
        let name = format!("{on_node}-{overlap}");
        let several = train_on_nodes(
            &scratch,
            on_node,
            &name,
            &[&PIECES[..], &steps, &["--overlap", overlap]].concat(),
        );
        assert_same_course(&name, &one, &several);
    }
    // Sums do not depend on when gradients are transferred.
    assert_eq!(numbers(&scratch.metrics("4-after")), numbers(&scratch.metrics("4-beside")));
    assert_eq!(numbers(&scratch.metrics("2-after")), numbers(&scratch.metrics("2-beside")));
    for (name, ranks) in [("2-after", "1"), ("1-auto", "3")] {
        let state = run_of(&scratch, name).join("checkpoints/step-00000030/state-00004-of-00004.safetensors");
        assert!(state.exists(), "every rank saves a part");
        scratch.ok(&["--resume", &format!("runs/{name}"), "--steps", "40", "--gpus", ranks]);
    }
    let longer = train(&scratch, "1", "longer", &[&PIECES[..], &steps, &["--steps", "40"]].concat());
    for name in ["2-after", "1-auto"] {
        let bare = |point: &Point| Point { val_loss: None, ..point.clone() };
        let [a, b] =
            [&longer, &scratch.metrics(name)].map(|points| points.iter().map(bare).collect::<Vec<_>>());
        assert_same_course(name, &a, &b);
    }
}

/// Each rank holds one part of every sequence, and attends with some of the heads of whole sequences. Cases
/// with key heads for each rank, and with a key head that two ranks share.
#[test]
fn ranks_share_sequences() {
    let scratch = Scratch::new();
    scratch.file("texts.jsonl", crate::support::json_lines(1 << 20));
    let base = ["--heads", "4", "--data", "texts.jsonl", "--steps", "30", "--eval-every", "15"];
    for (name, more) in [
        ("fpa", &["--attn", "fpa", "--key-heads", "2", "--document-mask", "on"][..]),
        ("int8", &["--attn", "sagebwd", "--smoothing", "qk", "--recompute", "attention"]),
        ("fp4", &["--attn", "attn-qat", "--key-heads", "2", "--qk-norm", "off", "--recompute", "block"]),
    ] {
        let with = |name: &str, ranks: &str, context: &str| {
            train(&scratch, ranks, name, &[&base, more, &["--context-parallel", context]].concat())
        };
        let one = with(name, "1", "1");
        for (ranks, context) in [("2", "2"), ("4", "4"), ("4", "2")] {
            let several = with(&format!("{name}-{ranks}-{context}"), ranks, context);
            assert_same_course(&format!("{name}, {context} of {ranks}"), &one, &several);
        }
    }
    // A run without context parallelism is resumed with it, and the other way round.
    scratch.ok(&["--resume", "runs/fpa", "--steps", "34", "--gpus", "2", "--context-parallel", "2"]);
    scratch.ok(&["--resume", "runs/fpa-4-4", "--steps", "34"]);
    let [a, b] = ["fpa", "fpa-4-4"].map(|name| scratch.metrics(name));
    assert!(difference(&a, &b) < 1e-4);
}

#[test]
fn ranks_of_another_run_are_refused() {
    let scratch = Scratch::new();
    scratch.file("a.txt", "one text and no other. ".repeat(4000));
    scratch.file("b.txt", "one text and another. ".repeat(4000));
    let with = |more: &[&'static str]| flags(&[&["--steps", "2"], more].concat());
    for (other, expected) in [
        (with(&["--data", "a.txt", "--lr", "0.5"]), "lr = 0.5 at rank 1"),
        (with(&["--data", "b.txt"]), "its data is another"),
        // The recompute setting determines which transfers happen.
        (with(&["--data", "a.txt", "--recompute", "block"]), "recompute = Block at rank 1"),
        (with(&["--data", "a.txt", "--resume", "auto", "--name", "r"]), "--resume auto at rank 1"),
    ] {
        let port = free_port();
        let second = by_hand(&scratch, &port, 1, (2, 2), &other);
        // A client that is not a rank connects first.
        let first = by_hand(&scratch, &port, 0, (2, 2), &with(&["--data", "a.txt"]));
        wait_until(|| match TcpStream::connect(("127.0.0.1", port.parse().expect("a port"))) {
            Ok(mut stranger) => stranger.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").is_ok(),
            Err(_) => true,
        });
        let (said, others) = (ended(first), ended(second));
        for (code, said) in [&said, &others] {
            assert_eq!(*code, Some(1), "{said}");
        }
        assert!(said.1.contains(expected) || others.1.contains(expected), "{}\n{}", said.1, others.1);
    }
}

/// A rank may connect later than the limits for stalls and heartbeats would allow a rank to be silent.
#[test]
fn ranks_that_come_late_are_waited_for() {
    let scratch = Scratch::new();
    let (port, args) = (free_port(), flags(&["--steps", "2", "--name", "r", "--stall-timeout", "2"]));
    let mut ranks = Vec::new();
    for (rank, pause) in [(1, 0), (0, 3), (2, 0)] {
        ranks.push(by_hand(&scratch, &port, rank, (3, 3), &args));
        std::thread::sleep(Duration::from_secs(pause));
    }
    for rank in ranks {
        let (code, said) = ended(rank);
        assert_eq!(code, Some(0), "{said}");
    }
}

/// The error is not that of a lost rank, since a restart would not help.
#[test]
fn another_server_in_the_place_of_rank_0_is_named() {
    let scratch = Scratch::new();
    let server = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let port = server.local_addr().expect("an address").port().to_string();
    let rank = by_hand(&scratch, &port, 1, (2, 2), &flags(&["--steps", "2"]));
    let (mut stream, _) = server.accept().expect("a rank");
    stream.write_all(b"SSH-2.0-OpenSSH_9.6\r\n").expect("it listens");
    let (code, said) = ended(rank);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("something that is not this program") && said.contains("MASTER_PORT"), "{said}");
}

/// The runs of a sweep are not ranks of one run, even if a launcher started the sweep.
#[test]
fn a_sweep_under_a_launcher_has_runs_of_their_own() {
    let scratch = Scratch::new();
    let args = flags(&["--steps", "2", "--seed", "1,2", "--name", "s", "--sample-tokens", "0"]);
    let sweep = by_hand(&scratch, &free_port(), 1, (2, 2), &args);
    let (code, said) = ended(sweep);
    assert_eq!(code, Some(0), "{said}");
}

#[test]
fn mistakes_are_told() {
    let scratch = Scratch::new();
    for (args, expected) in [
        (flags(&["--gpus", "7"]), "there are more ranks than micro-batches in a step"),
        (flags(&["--gpus", "0"]), "no such number of GPUs"),
        (flags(&["--gpus", "10000000000000000000", "--dry-run"]), "gpus is out of range"),
        (flags(&["--gpus", "1", "--restarts", "2", "--resume", "auto", "--name", "r"]), "no rank to lose"),
        (flags(&["--gpus", "2", "--seed", "1,2"]), "a list of values is many runs"),
        (flags(&["--context-parallel", "2", "--seed", "1,2"]), "--context-parallel, and a list for seed"),
        (flags(&["--context-parallel", "0"]), "--context-parallel 0"),
        (flags(&["--piece-mb", "0"]), "piece-mb"),
        (flags(&["--gpus", "2", "--restarts", "2"]), "cannot begin again by itself"),
        (flags(&["--resume", "auto"]), "does not know which run"),
        (flags(&["--dry-run", "--ranks", "12"]), "ranks do not divide into nodes"),
        (flags(&["--context-parallel", "2"]), "cannot be cut into so many parts"),
        (flags(&["--gpus", "4", "--context-parallel", "4"]), "2 heads"),
        (
            flags(&["--gpus", "6", "--heads", "6", "--key-heads", "2", "--context-parallel", "3"]),
            "context 32\n",
        ),
        (
            flags(&["--gpus", "2", "--attn", "sla2", "--context-parallel", "2"]),
            "SLA2 does not share sequences",
        ),
    ] {
        let error = scratch.fails(&args);
        assert!(error.contains(expected) && error.contains("hint:"), "{error}");
    }
    // `--resume auto` refuses a finished run, even without its checkpoints, and a folder that is not a run.
    scratch.ok(&flags(&["--steps", "2", "--name", "done"]));
    std::fs::remove_dir_all(run_of(&scratch, "done").join("checkpoints")).expect("checkpoints");
    scratch.file("runs/theirs/a.txt", "a");
    for name in ["done", "theirs"] {
        let error = scratch.fails(&flags(&["--steps", "4", "--resume", "auto", "--name", name]));
        assert!(error.contains("exists already") && error.contains("hint:"), "{error}");
    }
    let half = scratch.run_with(&flags(&[]), &[("RANK", "0"), ("WORLD_SIZE", "2")]);
    let error = String::from_utf8_lossy(&half.stderr);
    assert!(!half.status.success() && error.contains("half of who this rank is"), "{error}");
}

/// The disk of one rank is full: the files of the other ranks do not make a checkpoint, and training
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
        "40",
        "--checkpoint-every",
        "5",
        "--eval-every",
        "100",
    ]));
    wait_until(|| steps_of(&scratch, "r") > 0);
    // A folder at the path of the file that rank 1 will write makes the write fail.
    let in_the_way = |step: usize| {
        let partial = format!("checkpoints/step-{step:08}.partial/state-00002-of-00002.safetensors");
        run_of(&scratch, "r").join(partial)
    };
    for step in (5..=35).step_by(5) {
        let _ = std::fs::create_dir_all(in_the_way(step));
    }
    let (code, said) = ended(launcher);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("cannot write the checkpoint of step") && said.contains("rank 1: "), "{said}");
    let log = std::fs::read_to_string(run_of(&scratch, "r").join("log.rank-1.txt"))
        .expect("it has something to say");
    assert!(log.contains("cannot write") && !log.contains("loss"), "{log}");
    assert!(run_of(&scratch, "r").join("checkpoints/step-00000040/COMPLETE").exists());
    assert_eq!(steps_of(&scratch, "r"), 40);
}
