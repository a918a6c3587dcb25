//! `--gpus N`: this process starts N of itself, one for each GPU, and waits for them.

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use candle_sage::{Error, Result};

use super::meeting::LOST;
use super::world::LAUNCHED;
use crate::signals::{self, Second};
use crate::{during, tell};

/// How long ranks may take to leave by themselves when one has ended: what they agreed on may still be written.
const LEAVING: Duration = Duration::from_secs(20);

/// When one was lost, nobody has anything left to do. Those that have not met yet would not notice.
const LEAVING_LOST: Duration = Duration::from_secs(3);

/// How many queues the GPU has for a process' streams. With one, transfers that wait for the gradients cost the kernels before
/// them nothing; with more, a microsecond or so each (docs/several-gpus.md).
const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

/// How many GPUs, and how often to begin again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Launch {
    /// Processes.
    pub ranks: usize,
    /// How often to begin again when a rank was lost.
    pub restarts: u32,
}

/// Starts the ranks with this process' own command line and waits for them. Returns what to exit with: 0, or what the first
/// rank that failed said, which has told why.
///
/// # Errors
/// When no process can be started.
pub(super) fn launch(launch: Launch) -> Result<i32> {
    signals::watch(Second::IsNoted)?;
    signals::doing("the step of all ranks");
    let mut left = launch.restarts;
    loop {
        let code = round(launch.ranks)?;
        match signals::received() {
            // It ended them before they could save.
            Some(signal) if code == LOST => return Ok(128 + i32::from(signal)),
            _ if code != LOST || left == 0 => return Ok(code),
            _ => {}
        }
        left -= 1;
        tell(&format!("a rank was lost: begins again, and {left} times more after that"));
    }
}

fn round(ranks: usize) -> Result<i32> {
    let (mut children, readers) = start(ranks)?;
    let (mut first, mut ended): (Option<i32>, Option<Instant>) = (None, None);
    let mut told = 0;
    while !children.is_empty() {
        let mut at = 0;
        while at < children.len() {
            match children[at].try_wait().map_err(during("cannot wait for the ranks"))? {
                None => at += 1,
                Some(status) => {
                    drop(children.remove(at));
                    let code = code(status);
                    if code != 0 {
                        // An error of the run's own says more than that others lost it.
                        first = Some(first.filter(|&first| first != LOST).unwrap_or(code));
                        ended.get_or_insert_with(Instant::now);
                    }
                }
            }
        }
        // The terminal tells a whole group of processes; others only this one. Ranks take two in a row as one.
        let asked = if signals::asked_again() { 2 } else { usize::from(signals::received().is_some()) };
        if asked > told {
            told = asked;
            children.iter().for_each(signal);
        }
        let leaving = if first == Some(LOST) { LEAVING_LOST } else { LEAVING };
        if ended.is_some_and(|ended| ended.elapsed() > leaving) {
            children.iter_mut().for_each(|child| drop(child.kill()));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    // What they said last is told before this ends.
    readers.into_iter().for_each(|reader| drop(reader.join()));
    Ok(first.unwrap_or(0))
}

/// As a shell says it.
fn code(status: ExitStatus) -> i32 {
    // One that was killed by force is lost, whoever did it.
    status.code().unwrap_or(LOST)
}

#[cfg(unix)]
fn signal(child: &Child) {
    use rustix::process::{Pid, Signal, kill_process};
    let number = signals::received().unwrap_or_default();
    let signal = if number == signal_hook::consts::SIGINT as u8 { Signal::INT } else { Signal::TERM };
    let _ = kill_process(Pid::from_child(child), signal);
}

#[cfg(not(unix))]
fn signal(_: &Child) {}

fn start(ranks: usize) -> Result<(Vec<Child>, Vec<JoinHandle<()>>)> {
    let failed = "cannot start the ranks";
    let program = std::env::current_exe().map_err(during(failed))?;
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    let port = TcpListener::bind(("127.0.0.1", 0)).and_then(|free| free.local_addr());
    let port = port.map_err(during(failed))?.port();
    let (mut children, mut readers): (Vec<Child>, Vec<_>) = (Vec::with_capacity(ranks), Vec::new());
    for rank in 0..ranks {
        let number = rank.to_string();
        let count = ranks.to_string();
        let mut command = Command::new(&program);
        command
            .args(&words)
            .env("RANK", &number)
            .env("WORLD_SIZE", &count)
            .env("LOCAL_RANK", &number)
            .env("LOCAL_WORLD_SIZE", &count)
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env(LAUNCHED, "1")
            .env(signals::PARENT, std::process::id().to_string());
        if std::env::var_os(CONNECTIONS).is_none() {
            command.env(CONNECTIONS, "1");
        }
        if rank > 0 {
            // Rank 0 speaks for all; what others have to say is told who says it.
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        }
        let started = command.spawn();
        let mut child = match started {
            Ok(child) => child,
            Err(error) => {
                children.iter_mut().for_each(|child| drop(child.kill()));
                return Err(during(failed)(error));
            }
        };
        if let Some(said) = child.stderr.take() {
            readers.push(std::thread::spawn(move || {
                let lines = BufReader::new(said).split(b'\n').map_while(std::result::Result::ok);
                lines.for_each(|line| tell(&format!("[rank {rank}] {}", String::from_utf8_lossy(&line))));
            }));
        }
        children.push(child);
    }
    Ok((children, readers))
}

/// Checks a number of GPUs that was typed.
///
/// # Errors
/// When there is none, or too many to be meant.
pub(super) fn check(gpus: usize) -> Result<()> {
    if (1..=1024).contains(&gpus) {
        return Ok(());
    }
    Err(Error::new("no such number of GPUs").got(gpus).allowed("1 to 1024").hint("--gpus 2"))
}
