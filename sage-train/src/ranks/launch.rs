//! `--gpus N`: this process starts N ranks, each a process with the same command line and a separate GPU,
//! and waits for them.

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use candle_sage::{Error, Result};

use super::control::LOST;
use super::secret::{SECRET, random};
use super::world::LAUNCHED;
use crate::signals::{self, SecondSignal};
use crate::{during, notify};

/// How long ranks may take to exit by themselves after a rank has failed: they may still be writing a checkpoint.
const LEAVING: Duration = Duration::from_secs(20);

/// How long ranks may take to exit after a rank was killed by a signal or exited with [`LOST`]. Writing a report of the
/// failure may take them 4 s (`control::LAST_WORD`). A rank that has not yet connected to rank 0 does not notice the
/// failure, and is killed after this time.
const LEAVING_LOST: Duration = Duration::from_secs(6);

/// Environment variable: the number of hardware queues for the streams of a process. With one queue, a transfer that
/// waits for gradients does not slow the kernels launched before it; with more queues it slows each of these kernels by
/// about a microsecond (docs/several-gpus.md).
const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Launch {
    pub ranks: usize,
    /// How many times all ranks may be restarted because a rank was lost.
    pub restarts: u32,
}

/// Starts the ranks with this process' command line and waits for them. Returns the exit code: 0 if no rank fails, or
/// the code of the first rank that fails because of an error. If ranks were lost (killed, or exited with [`LOST`]) and
/// no rank had an error, the code is 128 plus the number of the signal that this process has received, or [`LOST`] if
/// it has received no signal.
///
/// # Errors
/// When no process can be started.
pub(super) fn launch(launch: Launch) -> Result<i32> {
    signals::watch(SecondSignal::IsNoted)?;
    signals::set_activity("the step of all ranks");
    let mut left = launch.restarts;
    loop {
        let code = round(launch.ranks)?;
        match signals::received() {
            // A signal asked this process to stop, so it does not restart lost ranks.
            Some(signal) if code == LOST => return Ok(128 + i32::from(signal)),
            _ if code != LOST || left == 0 => return Ok(code),
            _ => {}
        }
        left -= 1;
        notify(&format!("a rank was lost: restarting all ranks, {left} further restarts left"));
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
                        // The exit code of an error takes precedence over `LOST`.
                        first = Some(first.filter(|&first| first != LOST).unwrap_or(code));
                        ended.get_or_insert_with(Instant::now);
                    }
                }
            }
        }
        // A terminal signals its whole process group, other senders signal only this process. So this process always
        // passes the signal on to the ranks. A rank that gets it twice in quick succession counts it once.
        let asked = if signals::several_received() { 2 } else { usize::from(signals::received().is_some()) };
        if asked > told {
            told = asked;
            children.iter().for_each(|child| signal(child, asked));
        }
        let leaving = if first == Some(LOST) { LEAVING_LOST } else { LEAVING };
        if ended.is_some_and(|ended| ended.elapsed() > leaving) {
            children.iter_mut().for_each(|child| drop(child.kill()));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    // The last lines that the ranks wrote are printed before this function returns.
    readers.into_iter().for_each(|reader| drop(reader.join()));
    Ok(first.unwrap_or(0))
}

fn code(status: ExitStatus) -> i32 {
    // A rank that a signal killed has no exit code, and counts as lost.
    status.code().unwrap_or(LOST)
}

/// Passes the received signal on to a rank. `times`: 1 if this process has received one signal, 2 if more.
#[cfg(unix)]
fn signal(child: &Child, times: usize) {
    use rustix::process::{Pid, Signal, kill_process};
    use signal_hook::consts::{SIGINT, SIGUSR1};
    let signal = match i32::from(signals::received().unwrap_or_default()) {
        SIGINT => Signal::INT,
        // A second SIGUSR1 would not end the rank, so if `times` is 2, the rank gets a SIGTERM.
        SIGUSR1 if times == 1 => Signal::USR1,
        _ => Signal::TERM,
    };
    let _ = kill_process(Pid::from_child(child), signal);
}

#[cfg(not(unix))]
fn signal(_: &Child, _: usize) {}

fn start(ranks: usize) -> Result<(Vec<Child>, Vec<JoinHandle<()>>)> {
    let failed = "cannot start the ranks";
    let program = std::env::current_exe().map_err(during(failed))?;
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    let port = TcpListener::bind(("127.0.0.1", 0)).and_then(|free| free.local_addr());
    let port = port.map_err(during(failed))?.port();
    // Each start has a new secret, so that leftover ranks of an earlier start are refused.
    let secret = random()?;
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
            .env(SECRET, &secret)
            .env(LAUNCHED, "1")
            .env(signals::PARENT, std::process::id().to_string());
        if std::env::var_os(CONNECTIONS).is_none() {
            command.env(CONNECTIONS, "1");
        }
        if rank > 0 {
            // Only rank 0 writes to stdout. What other ranks write to stderr is printed with their rank.
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
        if let Some(stderr) = child.stderr.take() {
            readers.push(std::thread::spawn(move || {
                let lines = BufReader::new(stderr).split(b'\n').map_while(std::result::Result::ok);
                lines.for_each(|line| notify(&format!("[rank {rank}] {}", String::from_utf8_lossy(&line))));
            }));
        }
        children.push(child);
    }
    Ok((children, readers))
}

/// Checks the number of GPUs from the command line.
///
/// # Errors
/// When the number is 0 or implausibly large.
pub(super) fn check(gpus: usize) -> Result<()> {
    if (1..=1024).contains(&gpus) {
        return Ok(());
    }
    Err(Error::new("--gpus is out of range").got(gpus).allowed("1 to 1024").hint("--gpus 2"))
}
