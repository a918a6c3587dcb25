//! Child processes that run a sweep: one for each run, so that whatever ends one ends no other.

use std::collections::VecDeque;
use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use candle_sage::{Error, Result};

use super::mps::{Mps, Sharing};
use super::progress::Progress;
use super::state::{Place, clear};
use super::{PLAN, Planned, State, Sweep};
use crate::device::{Place as Device, gpus};
use crate::lock::Lock;
use crate::runs::{Ending, Run, Status};
use crate::{during, signals, tell, writing};

/// What a process exits with that SIGINT, or SIGTERM, asked to stop.
const INTERRUPTED: i32 = 130;
const TERMINATED: i32 = 143;

/// How a sweep runs.
#[derive(Debug, Clone, Default)]
pub struct Limits {
    /// Runs at once on each device.
    pub jobs: usize,
    /// How long; then what runs is saved.
    pub time: Option<Duration>,
    /// This one alone, from 0.
    pub only: Option<usize>,
    /// Also what failed or crashed before.
    pub retry: bool,
    /// How runs side by side share a GPU.
    pub sharing: Sharing,
}

/// What became of the runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// All steps are done.
    pub finished: usize,
    /// Stopped by a loss or a gradient.
    pub diverged: usize,
    /// Failed, or crashed.
    pub failed: usize,
    /// Still to do.
    pub open: usize,
    /// In the hands of another process.
    pub elsewhere: usize,
    /// The signal that ended the sweep early.
    pub signal: Option<u8>,
}

/// A run that a child works on.
struct Job {
    child: Child,
    index: usize,
    folder: PathBuf,
    /// The device's number among those of the sweep.
    slot: usize,
}

/// Runs what is open. What ends a run is a result, and no error of the sweep's.
///
/// # Errors
/// When the folder cannot be written, or no child be started.
pub fn run(sweep: &Sweep, limits: &Limits) -> Result<Tally> {
    signals::watch()?;
    let plan = sweep.plan_folder();
    std::fs::create_dir_all(&plan).map_err(writing(&plan))?;
    let mut places = sweep.places();
    let chosen = |index: usize| limits.only.is_none_or(|only| only == index);
    let open = |(index, place): &(usize, &Place)| chosen(*index) && place.state.is_open(limits.retry);
    let mut waiting: VecDeque<usize> =
        places.iter().enumerate().filter(open).map(|(index, _)| index).collect();
    let mut progress = Progress::new(sweep, &places, &waiting);
    let shares = on_gpu(sweep) && limits.jobs > 1 && limits.sharing == Sharing::Auto && waiting.len() > 1;
    let mps = if shares { Mps::start() } else { None };
    if mps.is_some() {
        tell("runs share GPUs through MPS");
    }
    let mut slots = slots(sweep, limits.jobs);
    let mut jobs: Vec<Job> = Vec::new();
    let (began, mut stopping) = (Instant::now(), false);
    let mut lost = None;
    loop {
        for ended in take_ended(&mut jobs)? {
            let (job, status) = ended;
            let state = sweep.after(&job, status)?;
            progress.ended(sweep, &job.folder, job.index, &state);
            places[job.index].state = state;
            slots.push(job.slot);
        }
        let late = limits.time.is_some_and(|limit| began.elapsed() >= limit);
        if (signals::received().is_some() || late || lost.is_some()) && !stopping {
            stopping = true;
            jobs.iter().for_each(|job| ask_to_stop(&job.child));
        }
        while !stopping && !slots.is_empty() && !waiting.is_empty() {
            let (slot, index) = (slots.pop().expect("a device"), waiting.pop_front().expect("a run"));
            match sweep.start(index, &places[index], slot, limits, mps.as_ref()) {
                Ok(child) => {
                    let folder = places[index].folder.clone();
                    progress.started(index, &folder);
                    jobs.push(Job { child, index, folder, slot });
                }
                Err(error) => {
                    // What runs is saved first.
                    lost = Some(error);
                    break;
                }
            }
        }
        progress.look();
        if jobs.is_empty() && (stopping || waiting.is_empty()) {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    progress.finish();
    match lost {
        Some(error) => Err(error),
        None => Ok(tally(sweep.states().into_iter().enumerate().filter(|(n, _)| chosen(*n)).map(|(_, s)| s))),
    }
}

fn tally(states: impl Iterator<Item = State>) -> Tally {
    let mut tally = Tally { signal: signals::received(), ..Tally::default() };
    for state in states {
        *match state {
            State::Ended(Status::Finished) => &mut tally.finished,
            State::Ended(Status::Diverged) => &mut tally.diverged,
            State::Ended(Status::Failed) | State::Crashed => &mut tally.failed,
            State::Elsewhere => &mut tally.elsewhere,
            State::Waiting | State::CutOff | State::Ended(Status::Interrupted) => &mut tally.open,
        } += 1;
    }
    tally
}

/// A number for every run that can be under way at once; runs in turn get devices in turn.
fn slots(sweep: &Sweep, jobs: usize) -> Vec<usize> {
    let devices = if on_gpu(sweep) { gpus().len().max(1) } else { 1 };
    (0..devices * jobs.max(1)).rev().collect()
}

fn on_gpu(sweep: &Sweep) -> bool {
    sweep.runs.first().is_some_and(|run| run.config.device == Device::Cuda)
}

/// Jobs whose child has ended.
fn take_ended(jobs: &mut Vec<Job>) -> Result<Vec<(Job, ExitStatus)>> {
    let mut ended = Vec::new();
    let mut n = 0;
    while n < jobs.len() {
        match jobs[n].child.try_wait().map_err(during("cannot watch a run"))? {
            Some(status) => ended.push((jobs.swap_remove(n), status)),
            None => n += 1,
        }
    }
    Ok(ended)
}

/// By somebody else: no program does that to itself.
fn killed(status: ExitStatus) -> bool {
    #[cfg(unix)]
    return std::os::unix::process::ExitStatusExt::signal(&status)
        .is_some_and(|signal| [signal_hook::consts::SIGTERM, 9].contains(&signal));
    #[cfg(not(unix))]
    false
}

/// SIGTERM: the run saves a checkpoint.
fn ask_to_stop(child: &Child) {
    #[cfg(unix)]
    if let Some(pid) = rustix::process::Pid::from_raw(child.id() as i32) {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
    }
    #[cfg(not(unix))]
    let _ = child;
}

impl Sweep {
    /// A child for a run.
    fn start(
        &self,
        index: usize,
        place: &Place,
        slot: usize,
        limits: &Limits,
        mps: Option<&Mps>,
    ) -> Result<Child> {
        let run = &self.runs[index];
        let mut command = self.command(run, place)?;
        let jobs = limits.jobs.max(1);
        match run.config.device {
            Device::Cpu => {
                let cores = std::thread::available_parallelism().map_or(1, usize::from);
                let threads = run.config.threads.unwrap_or((cores / jobs).max(1));
                command.arg("--threads").arg(threads.to_string());
            }
            Device::Cuda => {
                if let Some(gpu) = gpus().get(slot / jobs) {
                    command.env("CUDA_VISIBLE_DEVICES", gpu);
                }
                if let Some(mps) = mps {
                    mps.set(&mut command);
                }
            }
        }
        // A signal that is meant for the sweep is passed on once; from the terminal it would come twice, and end the run.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let path = self.stderr_file(run);
        let stderr = File::create(&path).map_err(writing(&path))?;
        let _ = std::fs::remove_file(self.crash_file(&run.name));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
        command.spawn().map_err(during("cannot start a run"))
    }

    fn command(&self, run: &Planned, place: &Place) -> Result<Command> {
        let program = std::env::current_exe().map_err(during("cannot find the program that runs"))?;
        let mut command = Command::new(program);
        if place.state == State::CutOff || crate::train::checkpoint::newest(&place.folder).is_some() {
            command.arg("--resume").arg(&place.folder);
            return Ok(command);
        }
        clear(&place.folder)?;
        let settings = self.plan_folder().join(format!("{}.toml", run.name));
        std::fs::write(&settings, run.config.to_toml()).map_err(writing(&settings))?;
        let name = place.folder.file_name().unwrap_or_default();
        command.arg("--config").arg(settings).arg("--name").arg(name);
        Ok(command)
    }

    fn stderr_file(&self, run: &Planned) -> PathBuf {
        self.folder.join(PLAN).join(format!("{}.stderr", run.name))
    }

    /// The state of a run whose child has ended. One that left no word of how is given one.
    fn after(&self, job: &Job, status: ExitStatus) -> Result<State> {
        let run = &self.runs[job.index];
        let ending = Run::read(&job.folder).ok().and_then(|run| run.ending);
        if let Some(ending) = ending {
            return Ok(match ending.status {
                Status::Interrupted => State::CutOff,
                status => State::Ended(status),
            });
        }
        // Asked to stop before there was anything to save, or killed from outside: it goes on with the next start. And two
        // sweeps may reach for one run.
        if Lock::run(&job.folder).is_err() && job.folder.is_dir() {
            return Ok(State::Elsewhere);
        }
        if matches!(status.code(), Some(INTERRUPTED | TERMINATED)) || killed(status) {
            return Ok(State::Waiting);
        }
        let stderr = std::fs::read_to_string(self.stderr_file(run)).unwrap_or_default();
        let lines: Vec<&str> = stderr.lines().collect();
        let said = lines[lines.len().saturating_sub(12)..].join("\n");
        let ending = Ending { status: Status::Failed, reason: Some(format!("{status}\n{said}")) };
        let path = self.crash_file(&run.name);
        let text = serde_json::to_string_pretty(&ending).expect("plain values");
        std::fs::write(&path, text).map_err(writing(&path))?;
        Ok(State::Crashed)
    }
}

impl Tally {
    /// What is left, as an error: a script that waits for a sweep should know.
    ///
    /// # Errors
    /// When runs are left that another start would go on with, and a signal ended this one.
    pub fn check(&self, again: &str) -> Result<()> {
        match self.signal {
            Some(signal) => Err(Error::new(format!("interrupted with {} runs to go", self.open))
                .got(format!("signal {signal}"))
                .hint(format!("what ran is saved; go on: {again}"))),
            None => Ok(()),
        }
    }
}
