//! Child processes that run a sweep: one for each run, so that whatever ends one ends no other.

use std::collections::VecDeque;
use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use candle_sage::{Error, Result};

use super::mps::{Mps, Sharing};
use super::progress::Progress;
use super::state::Place;
use super::{State, Sweep};
use crate::device::{Place as Device, gpus};
use crate::lock::Lock;
use crate::runs::{Ending, Run, Status};
use crate::signals::Second;
use crate::train::checkpoint;
use crate::{during, ranks, signals, tell, writing};

/// What a process exits with that SIGHUP, SIGINT or SIGTERM asked to stop.
const ASKED_TO_STOP: [i32; 3] = [129, 130, 143];

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
    place: Place,
    /// The device's number among those of the sweep.
    slot: usize,
    /// Whether it was asked to stop.
    stopping: bool,
}

/// Runs what is open. What ends a run is a result, and no error of the sweep's.
///
/// # Errors
/// When the folder cannot be written, or no child be started.
pub fn run(sweep: &Sweep, limits: &Limits) -> Result<Tally> {
    signals::watch(Second::IsNoted)?;
    signals::doing("every run's step");
    let plan = sweep.plan_folder();
    std::fs::create_dir_all(&plan).map_err(writing(&plan))?;
    let places = sweep.places();
    let chosen = |index: usize| limits.only.is_none_or(|only| only == index);
    let open = |(index, place): &(usize, &Place)| chosen(*index) && place.state.is_open(limits.retry);
    let waiting: VecDeque<usize> = places.iter().enumerate().filter(open).map(|(index, _)| index).collect();
    let shares = on_gpu(sweep) && limits.jobs > 1 && limits.sharing == Sharing::Auto && waiting.len() > 1;
    let mps = if shares { Mps::start() } else { None };
    match (shares, mps.is_some()) {
        (true, true) => tell("runs share GPUs through MPS"),
        (true, false) => {
            tell("no MPS server was started for this sweep: runs use one that is there, or take turns")
        }
        _ => {}
    }
    let mut work = Work {
        sweep,
        limits,
        mps: mps.as_ref(),
        progress: Progress::new(sweep, &places, &waiting),
        folders: places.into_iter().map(|place| place.folder).collect(),
        waiting,
        slots: slots(sweep, limits.jobs),
        jobs: Vec::new(),
        stopping: false,
    };
    let began = Instant::now();
    let mut lost = None;
    loop {
        lost = lost.or(work.collect().err());
        let late = limits.time.is_some_and(|limit| began.elapsed() >= limit);
        if signals::received().is_some() || late || lost.is_some() {
            work.stop();
        } else {
            lost = work.fill().err();
        }
        work.progress.look();
        if work.jobs.is_empty() && (work.stopping || work.waiting.is_empty()) {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    work.progress.finish();
    match lost {
        Some(error) => Err(error),
        None => {
            let states = work.folders.iter().zip(&sweep.runs).enumerate().filter(|(n, _)| chosen(*n));
            Ok(tally(states.map(|(_, (folder, run))| sweep.place(run, folder.clone()).state)))
        }
    }
}

/// A sweep under way.
struct Work<'a> {
    sweep: &'a Sweep,
    limits: &'a Limits,
    mps: Option<&'a Mps>,
    progress: Progress,
    /// Of every run.
    folders: Vec<PathBuf>,
    waiting: VecDeque<usize>,
    /// Places on devices that are free.
    slots: Vec<usize>,
    jobs: Vec<Job>,
    stopping: bool,
}

impl Work<'_> {
    /// Takes note of the runs that have ended.
    fn collect(&mut self) -> Result<()> {
        for (job, status) in take_ended(&mut self.jobs)? {
            self.slots.push(job.slot);
            let state = self.sweep.after(&job, status)?;
            self.progress.ended(self.sweep, &job.place, job.index, &state);
        }
        Ok(())
    }

    /// Asks what runs to save itself; who asks twice does not want to wait.
    fn stop(&mut self) {
        let now = signals::asked_again();
        for job in &mut self.jobs {
            if now {
                let _ = job.child.kill();
            } else if !std::mem::replace(&mut job.stopping, true) {
                ask_to_stop(&job.child);
            }
        }
        self.stopping = true;
    }

    /// Starts runs where there is room.
    fn fill(&mut self) -> Result<()> {
        while let (Some(&slot), Some(&index)) = (self.slots.last(), self.waiting.front()) {
            let run = &self.sweep.runs[index];
            self.waiting.pop_front();
            // Another sweep may have come to it meanwhile.
            let place = self.sweep.place(run, self.folders[index].clone());
            if !place.state.is_open(self.limits.retry) {
                self.progress.passed(index, &place);
                continue;
            }
            let Some(child) = self.sweep.start(index, &place, slot, self.limits, self.mps)? else {
                self.progress.passed(index, &Place { state: State::Elsewhere, ..place });
                continue;
            };
            self.slots.pop();
            self.progress.started(index, &place.folder);
            self.jobs.push(Job { child, index, place, slot, stopping: false });
        }
        Ok(())
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

/// By SIGTERM, before it had a handler.
fn terminated(status: ExitStatus) -> bool {
    #[cfg(unix)]
    return std::os::unix::process::ExitStatusExt::signal(&status) == Some(signal_hook::consts::SIGTERM);
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
    /// A child for a run; nothing where another process has taken its folder.
    fn start(
        &self,
        index: usize,
        place: &Place,
        slot: usize,
        limits: &Limits,
        mps: Option<&Mps>,
    ) -> Result<Option<Child>> {
        let config = &self.runs[index].config;
        let program = std::env::current_exe().map_err(during("cannot find the program that runs"))?;
        let mut command = Command::new(program);
        let name = place.name();
        let asked = self.asked_file(&name);
        if checkpoint::newest(&place.folder).is_some() {
            command.arg("--resume").arg(&place.folder);
        } else if self.set_aside(place)? {
            command.arg("--config").arg(&asked).arg("--name").arg(&name);
        } else {
            return Ok(None);
        }
        let jobs = limits.jobs.max(1);
        match config.device {
            Device::Cpu => {
                let cores = std::thread::available_parallelism().map_or(1, usize::from);
                let threads = config.threads.unwrap_or((cores / jobs).max(1));
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
        // A signal to the terminal's processes is passed on by the sweep alone; a sweep that is gone stops its runs.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        command.env(signals::PARENT, std::process::id().to_string());
        // A launcher may have started this sweep as one of several; its runs are alone all the same.
        for name in ranks::variables() {
            command.env_remove(name);
        }
        std::fs::write(&asked, config.to_toml()).map_err(writing(&asked))?;
        let path = self.stderr_file(&name);
        let stderr = File::create(&path).map_err(writing(&path))?;
        let _ = std::fs::remove_file(self.crash_file(&name));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
        command.spawn().map(Some).map_err(during("cannot start a run"))
    }

    fn stderr_file(&self, name: &str) -> PathBuf {
        self.plan_folder().join(format!("{name}.stderr"))
    }

    /// The state of a run whose child has ended. One that left no word of how is given one.
    fn after(&self, job: &Job, status: ExitStatus) -> Result<State> {
        let (folder, name) = (&job.place.folder, job.place.name());
        let now = || self.place(&self.runs[job.index], folder.clone()).state;
        let ending = Run::read(folder).ok().and_then(|run| run.ending);
        if ending.is_some_and(|ending| ending.status != Status::Interrupted) {
            return Ok(now());
        }
        // Two sweeps may reach for one run.
        if Lock::is_held(folder) {
            return Ok(State::Elsewhere);
        }
        // It was saved, or asked to stop before there was anything to save: it goes on with the next start.
        let asked = status.code().is_some_and(|code| ASKED_TO_STOP.contains(&code)) || terminated(status);
        if asked || job.stopping {
            return Ok(now());
        }
        let stderr = std::fs::read_to_string(self.stderr_file(&name)).unwrap_or_default();
        let lines: Vec<&str> = stderr.lines().collect();
        let said = lines[lines.len().saturating_sub(12)..].join("\n");
        let ending = Ending { status: Status::Failed, reason: Some(format!("{status}\n{said}")) };
        let path = self.crash_file(&name);
        let text = serde_json::to_string_pretty(&ending).expect("plain values");
        std::fs::write(&path, text).map_err(writing(&path))?;
        Ok(State::Crashed)
    }
}

impl Tally {
    /// What is left, as an error: a script that waits for a sweep should know.
    ///
    /// # Errors
    /// When a signal ended the sweep, and runs are left that another start would go on with.
    pub fn check(&self, again: &str) -> Result<()> {
        match self.signal.filter(|_| self.open > 0) {
            Some(signal) => Err(Error::new(format!("interrupted with {} runs to go", self.open))
                .got(format!("signal {signal}"))
                .hint(format!("what ran is saved; go on: {again}"))),
            None => Ok(()),
        }
    }
}
