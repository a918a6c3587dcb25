//! SIGINT, SIGTERM, SIGUSR1 (Slurm's warning before a time limit) and, on Linux, SIGHUP: the first signal asks the
//! program to stop, the second signal ends the program. A run of a sweep is also asked to stop when the sweep's process
//! has exited.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
#[cfg(unix)]
use std::time::{Duration, Instant};

use candle_sage::Result;
#[cfg(unix)]
use signal_hook::consts::SIGUSR1;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::during;
#[cfg(unix)]
use crate::notify;

/// What a second signal does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SecondSignal {
    /// The program ends at once.
    Ends,
    /// [`several_received`] reports the second signal: the program ends its child processes, then exits.
    IsNoted,
    /// The second signal has no effect, because the first signal already ends the current work without saving it.
    IsNotNeeded,
}

/// The environment variable in which a sweep or a launcher passes its process id to its children.
pub const PARENT: &str = "SAGE_TRAIN_SWEEP_PROCESS";

/// Time within which several signals count as one. If a terminal sends a stop signal to the whole process group, a rank
/// receives it twice: from the terminal, and from the launcher of the ranks (`--gpus`).
#[cfg(unix)]
const TOGETHER: Duration = Duration::from_millis(250);

#[derive(Debug, Default)]
struct Received {
    first: Arc<AtomicUsize>,
    times: AtomicUsize,
}

static SEEN: OnceLock<Arc<Received>> = OnceLock::new();

/// Starts to record signals for [`received`]. Only the first call has an effect.
///
/// # Errors
/// When the system does not accept a handler.
pub fn watch(second: SecondSignal) -> Result<()> {
    let seen = Arc::new(Received::default());
    if SEEN.set(seen.clone()).is_err() {
        return Ok(());
    }
    listen(seen, second).map_err(during("cannot watch for signals"))
}

#[cfg(unix)]
fn listen(seen: Arc<Received>, second: SecondSignal) -> std::io::Result<()> {
    let watched = [SIGINT, SIGTERM, SIGUSR1].into_iter().chain(hangup_signal());
    let mut signals = signal_hook::iterator::Signals::new(watched)?;
    let note = move || {
        let mut began: Option<Instant> = None;
        for signal in signals.forever() {
            let first = *began.get_or_insert_with(Instant::now);
            let again = seen.times.load(Ordering::Relaxed) > 0;
            // Slurm may send its warning twice, so a repeated SIGUSR1 does not end a run.
            if again && (signal == SIGUSR1 || first.elapsed() < TOGETHER) {
                continue;
            }
            let _ = seen.first.compare_exchange(0, signal as usize, Ordering::Relaxed, Ordering::Relaxed);
            if seen.times.fetch_add(1, Ordering::Relaxed) == 0 {
                if second == SecondSignal::IsNotNeeded {
                    continue;
                }
                notify(&format!("stopping: {}; a second signal stops at once", current_work()));
            } else if second == SecondSignal::Ends {
                signal_hook::low_level::exit(128 + signal);
            }
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(note).map(drop)
}

/// Outside of Unix no thread counts signals, so a second SIGINT or SIGTERM ends the program for every value of
/// `SecondSignal`.
#[cfg(not(unix))]
fn listen(seen: Arc<Received>, _: SecondSignal) -> std::io::Result<()> {
    use signal_hook::flag;
    let once = Arc::new(std::sync::atomic::AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        flag::register_conditional_shutdown(signal, 128 + signal, once.clone())?;
        flag::register(signal, once.clone())?;
        flag::register_usize(signal, seen.first.clone(), signal as usize)?;
    }
    Ok(())
}

/// SIGHUP, which a closing terminal sends; `None` if the process ignores it, as under `nohup`.
#[cfg(target_os = "linux")]
fn hangup_signal() -> Option<i32> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"))?;
    let ignored = u64::from_str_radix(ignored.trim(), 16).ok()?;
    let signal = signal_hook::consts::SIGHUP;
    (ignored >> (signal - 1) & 1 == 0).then_some(signal)
}

#[cfg(all(unix, not(target_os = "linux")))]
fn hangup_signal() -> Option<i32> {
    None
}

static DOING: Mutex<String> = Mutex::new(String::new());

/// Sets the name of the current work, e.g. `step 3 of 300`. The message about a signal contains it.
pub fn set_activity(what: &str) {
    let mut doing = DOING.lock().unwrap_or_else(PoisonError::into_inner);
    doing.clear();
    doing.push_str(what);
}

#[cfg(unix)]
fn current_work() -> String {
    let doing = DOING.lock().unwrap_or_else(PoisonError::into_inner);
    if doing.is_empty() {
        "finishing the current work".into()
    } else {
        format!("finishing {doing}, then saving the run")
    }
}

/// The signal that asked this process to stop, or SIGTERM if the parent process has exited.
pub fn received() -> Option<u8> {
    let signal = SEEN.get()?.first.load(Ordering::Relaxed);
    if signal == 0 && is_orphan() { Some(SIGTERM as u8) } else { (signal != 0).then_some(signal as u8) }
}

/// Records a signal that another rank of the run received.
pub fn record_remote(signal: u8) {
    if let Some(seen) = SEEN.get() {
        let _ = seen.first.compare_exchange(0, usize::from(signal), Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// Whether more than one signal was received.
pub fn several_received() -> bool {
    SEEN.get().is_some_and(|seen| seen.times.load(Ordering::Relaxed) > 1)
}

/// Whether a sweep or a launcher started this process and has exited.
#[cfg(unix)]
pub fn is_orphan() -> bool {
    static SWEEP: OnceLock<Option<i32>> = OnceLock::new();
    let sweep = SWEEP.get_or_init(|| std::env::var(PARENT).ok()?.parse().ok());
    let parent = rustix::process::Pid::as_raw(rustix::process::getppid());
    sweep.is_some_and(|sweep| parent != sweep)
}

/// Always false: the parent's process id cannot be read here.
#[cfg(not(unix))]
pub fn is_orphan() -> bool {
    false
}
