//! Ranks that a launcher such as torchrun starts, on one node or several: how they connect, and which connections are
//! refused.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use sage_train::metrics::Point;

use super::{SUMS, assert_same_course, ended, flags, numbers, run_of, train};
use crate::support::{Scratch, wait_until};

fn free_port() -> String {
    let port = TcpListener::bind(("127.0.0.1", 0)).and_then(|free| free.local_addr()).expect("a port").port();
    port.to_string()
}

/// The command that torchrun would start as rank `rank` of `of`, with `on_node` ranks per node. `args` may differ
/// between ranks.
fn command(
    scratch: &Scratch,
    port: &str,
    rank: usize,
    (of, on_node): (usize, usize),
    args: &[&str],
) -> Command {
    let [rank, local, of, on_node] = [rank, rank % on_node, of, on_node].map(|n| n.to_string());
    let mut command = Command::new(env!("CARGO_BIN_EXE_sage-train"));
    command
        .args(args)
        .current_dir(scratch.path())
        .envs([("RANK", rank), ("LOCAL_RANK", local), ("WORLD_SIZE", of), ("LOCAL_WORLD_SIZE", on_node)])
        .envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port), ("RUST_BACKTRACE", "0")])
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command
}

fn by_hand(scratch: &Scratch, port: &str, rank: usize, ranks: (usize, usize), args: &[&str]) -> Child {
    command(scratch, port, rank, ranks, args).spawn().expect("the command starts")
}

/// As [`by_hand`], with a secret.
fn with_secret(scratch: &Scratch, port: &str, rank: usize, secret: &str, args: &[&str]) -> Child {
    let mut command = command(scratch, port, rank, (2, 2), args);
    command.env("SAGE_TRAIN_SECRET", secret).spawn().expect("the command starts")
}

fn message(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat()
}

fn connected(port: &str) -> TcpStream {
    let port: u16 = port.parse().expect("a port");
    let connection = std::cell::RefCell::new(None);
    wait_until(|| {
        *connection.borrow_mut() = TcpStream::connect(("127.0.0.1", port)).ok();
        connection.borrow().is_some()
    });
    connection.into_inner().expect("a connection")
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

/// Settings that divide the parameters into several pieces. The ranks reduce the gradients piece by piece.
const PIECES: [&str; 4] = ["--layers", "3", "--piece-mb", "0.02"];

/// Every node has the whole optimizer state. Each rank writes one part of a checkpoint, and any number of ranks can
/// resume from the checkpoint.
#[test]
fn nodes_of_any_size_train_the_same() {
    let scratch = Scratch::new();
    let steps = ["--steps", "30", "--eval-every", "15", "--schedule", "constant", "--warmup-steps", "2"];
    let one = train(&scratch, "1", "one", &[&PIECES[..], &steps].concat());
    for (on_node, overlap) in [(4, "after"), (4, "during"), (2, "after"), (2, "during"), (1, "auto")] {
        let name = format!("{on_node}-{overlap}");
        let several = train_on_nodes(
            &scratch,
            on_node,
            &name,
            &[&PIECES[..], &steps, &["--overlap", overlap]].concat(),
        );
        assert_same_course(&name, &one, &several, SUMS);
    }
    // The ranks of a node divide Muon's matrices among them.
    let muon = [&PIECES[..], &steps, &["--optimizer", "muon"]].concat();
    let one = train(&scratch, "1", "muon", &muon);
    for on_node in [4, 2] {
        let name = format!("muon-{on_node}");
        assert_same_course(&name, &one, &train_on_nodes(&scratch, on_node, &name, &muon), SUMS);
    }
    // Sums do not depend on when gradients are transferred.
    assert_eq!(numbers(&scratch.metrics("4-after")), numbers(&scratch.metrics("4-during")));
    assert_eq!(numbers(&scratch.metrics("2-after")), numbers(&scratch.metrics("2-during")));
    // Losses do not depend on the number of nodes. The last bits of the gradient norm do, because it is an f64 sum over
    // shards.
    let losses = |name| scratch.metrics(name).iter().map(|p| [Some(p.loss), p.val_loss]).collect::<Vec<_>>();
    for nodes in ["2-after", "1-auto"] {
        assert_eq!(losses("4-after"), losses(nodes), "{nodes}");
    }
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
        assert_same_course(name, &a, &b, SUMS);
    }
}

#[test]
fn ranks_of_another_run_are_refused() {
    let scratch = Scratch::new();
    scratch.file("a.txt", "one text and no other. ".repeat(4000));
    scratch.file("b.txt", "one text and another. ".repeat(4000));
    let with = |more: &[&'static str]| flags(&[&["--steps", "2"], more].concat());
    for (other, expected) in [
        (with(&["--data", "a.txt", "--lr", "0.5"]), "lr = 0.5 on rank 1"),
        (with(&["--data", "b.txt"]), "differs from rank 0 in its data"),
        // Ranks must agree on this setting, because it determines which transfers between ranks the backward repeats.
        (with(&["--data", "a.txt", "--recompute", "block"]), "recompute = block on rank 1"),
        (with(&["--data", "a.txt", "--resume", "auto", "--name", "r"]), "--resume auto on rank 1"),
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

/// An error that all ranks would report is reported only by rank 0.
#[test]
fn an_error_of_all_ranks_is_printed_once() {
    let scratch = Scratch::new();
    for mistake in
        [&["--heads", "4", "--key-heads", "3"][..], &["--decay-fraction", "0.5", "--schedule", "cosine"]]
    {
        let (port, args) = (free_port(), flags(&[&["--steps", "2"], mistake].concat()));
        let ranks: Vec<Child> = (0..3).map(|rank| by_hand(&scratch, &port, rank, (3, 3), &args)).collect();
        let ends: Vec<_> = ranks.into_iter().map(ended).collect();
        for (rank, (code, said)) in ends.iter().enumerate() {
            assert_eq!((*code, said.contains("error: ")), (Some(2), rank == 0), "rank {rank}: {said}");
        }
    }
    assert!(!scratch.path().join("runs").exists(), "nothing was begun");
}

/// A rank may connect later than the limits for stalls and heartbeats.
#[test]
fn ranks_that_come_late_are_waited_for() {
    let scratch = Scratch::new();
    let (port, args) = (free_port(), flags(&["--steps", "2", "--name", "r", "--stall-timeout", "5"]));
    let mut ranks = Vec::new();
    for (rank, pause) in [(1, 0), (0, 6), (2, 0)] {
        ranks.push(by_hand(&scratch, &port, rank, (3, 3), &args));
        std::thread::sleep(Duration::from_secs(pause));
    }
    for rank in ranks {
        let (code, said) = ended(rank);
        assert_eq!(code, Some(0), "{said}");
    }
}

/// If another server listens at the address of rank 0, the exit code is not that of a lost rank, because a restart
/// would not help.
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

/// Silent connections, a greeting as rank 1 with a wrong proof of the secret, and a greeting of another version do not
/// affect the run of two ranks. If silent connections were read one after the other for 5 s each, 64 of them would take
/// longer than the 300 s that rank 0 waits for rank 1.
#[test]
fn strangers_neither_end_a_run_nor_take_a_place() {
    let scratch = Scratch::new();
    let (port, args) = (free_port(), flags(&["--steps", "2", "--name", "r"]));
    let first = with_secret(&scratch, &port, 0, "s", &args);
    let silent: Vec<TcpStream> = (0..64).map(|_| connected(&port)).collect();
    let proof = "0".repeat(64);
    for version in [env!("CARGO_PKG_VERSION"), "0.0.1"] {
        let mut stranger = connected(&port);
        let hello = format!(
            r#"{{"hello":{{"version":"{version}","rank":1,"of":2,"host":"\u001b[31mevil","nonce":"","proof":"{proof}"}}}}"#
        );
        stranger.write_all(&message(&hello)).expect("it listens");
        let mut answer = Vec::new();
        stranger.read_to_end(&mut answer).expect("an answer");
        let answer = String::from_utf8_lossy(&answer);
        assert!(answer.contains("challenge") && answer.contains("another secret"), "{answer}");
    }
    let second = with_secret(&scratch, &port, 1, "s", &args);
    let (ended_first, ended_second) = (ended(first), ended(second));
    for (code, said) in [&ended_first, &ended_second] {
        assert_eq!(*code, Some(0), "{said}");
        assert!(!said.contains('\u{1b}') && !said.contains("evil"), "{said}");
    }
    assert_eq!(ended_first.1.matches("does not have the run's secret").count(), 1, "{}", ended_first.1);
    drop(silent);
}

/// A rank with another secret ends with an error, and rank 0 continues to wait.
#[test]
fn a_rank_with_another_secret_is_refused() {
    let scratch = Scratch::new();
    let (port, args) = (free_port(), flags(&["--steps", "2", "--name", "r"]));
    let mut first = with_secret(&scratch, &port, 0, "s", &args);
    let (code, said) = ended(with_secret(&scratch, &port, 1, "t", &args));
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("SAGE_TRAIN_SECRET") && said.contains("hint:"), "{said}");
    assert_eq!(first.try_wait().expect("a child"), None);
    let (code, said) = ended(with_secret(&scratch, &port, 1, "s", &args));
    assert_eq!((code, ended(first).0), (Some(0), Some(0)), "{said}");
}

/// Rank 0 ends because its port is taken, and rank 1 because the program at the port does not answer.
#[test]
fn a_port_that_is_taken_ends_all_ranks() {
    let scratch = Scratch::new();
    let other = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let port = other.local_addr().expect("an address").port().to_string();
    let args = flags(&["--steps", "2", "--stall-timeout", "2"]);
    let ranks: Vec<Child> = (0..2).map(|rank| by_hand(&scratch, &port, rank, (2, 2), &args)).collect();
    for ((code, said), expected) in ranks.into_iter().map(ended).zip(["a free port", "no answer for 2 s"]) {
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains(expected) && said.contains("MASTER_PORT"), "{said}");
    }
}

/// On Linux all addresses in 127.0.0.0/8 are local.
#[cfg(target_os = "linux")]
#[test]
fn rank_0_listens_at_the_address_that_was_given() {
    let scratch = Scratch::new();
    let port = free_port();
    let mut command = command(&scratch, &port, 0, (2, 1), &flags(&["--steps", "2"]));
    let mut first = command.env("MASTER_ADDR", "127.0.0.2").spawn().expect("the command starts");
    let port: u16 = port.parse().expect("a port");
    wait_until(|| TcpStream::connect(("127.0.0.2", port)).is_ok());
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
    first.kill().expect("it lives");
    first.wait().expect("an end");
}
