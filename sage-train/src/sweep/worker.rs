//! Runs a sweep: each run in a separate child process, so that a crashing run does not end other runs.

use std::collections::VecDeque;
use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use candle_sage::{Error, Result};

use super::mps::{Mps, MpsMode};
use super::progress::Progress;
use super::state::RunFolder;
use super::{State, Sweep};
use crate::checkpoint;
use crate::device::{DeviceKind, gpus};
use crate::lock::Lock;
use crate::runs::{CONFIG, RunEnd, Status, ending as recorded};
use crate::signals::SecondSignal;
use crate::{during, notify, open_own, ranks, signals, writing};

/// Exit codes of a process that a signal asked to stop: 128 plus the number of SIGHUP, SIGINT, SIGTERM or SIGUSR1.
#[cfg(unix)]
const ASKED_TO_STOP: [i32; 4] = [129, 130, 143, 128 + signal_hook::consts::SIGUSR1];
#[cfg(not(unix))]
const ASKED_TO_STOP: [i32; 3] = [129, 130, 143];

/// Options of a sweep's execution.
#[derive(Debug, Clone, Default)]
pub struct Limits {
    /// Concurrent runs on each device.
    pub jobs: usize,
    /// Time after which no more runs are started, and the running runs save a checkpoint and stop.
    pub time: Option<Duration>,
    /// Index of the only run to execute, from 0; all runs if `None`.
    pub only: Option<usize>,
    /// Whether runs that failed or crashed are started again.
    pub retry: bool,
    /// How several runs share a GPU.
    pub sharing: MpsMode,
}

/// How many runs are in each state when the sweep ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RunCounts {
    /// Runs that did all of their steps.
    pub finished: usize,
    /// Runs that diverged.
    pub diverged: usize,
    /// Runs that failed or crashed.
    pub failed: usize,
    /// Runs that remain to be done.
    pub open: usize,
    /// Runs whose folder another process has locked.
    pub elsewhere: usize,
    /// The signal that ended the sweep early.
    pub signal: Option<u8>,
}

/// A run that a child process works on.
struct Job {
    child: Child,
    index: usize,
    place: RunFolder,
    /// Index of the slot. With `n` slots per device, the run uses device `slot / n`.
    slot: usize,
    stopping: bool,
}

/// Executes the runs that remain to be done. A run that fails is counted in [`RunCounts::failed`], and is not an error
/// of the sweep.
///
/// # Errors
/// When the folder cannot be written, or a child cannot be started.
pub fn run(sweep: &Sweep, limits: &Limits) -> Result<RunCounts> {
    signals::watch(SecondSignal::IsNoted)?;
    signals::set_activity("every run's step");
    let plan = sweep.plan_folder();
    std::fs::create_dir_all(&plan).map_err(writing(&plan))?;
    let places = sweep.places();
    let chosen = |index: usize| limits.only.is_none_or(|only| only == index);
    let open = |(index, place): &(usize, &RunFolder)| chosen(*index) && place.state.is_open(limits.retry);
    let waiting: VecDeque<usize> = places.iter().enumerate().filter(open).map(|(index, _)| index).collect();
    let shares = on_gpu(sweep) && limits.jobs > 1 && limits.sharing == MpsMode::Auto && waiting.len() > 1;
    let mps = if shares { Mps::start() } else { None };
    match (shares, mps.is_some()) {
        (true, true) => notify("runs share GPUs through NVIDIA's MPS"),
        (true, false) => notify(
            "this sweep started no NVIDIA MPS server: its runs use a server that is already running, or take \
             turns on a GPU",
        ),
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
        work.progress.refresh();
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

/// The state of a sweep while it runs.
struct Work<'a> {
    sweep: &'a Sweep,
    limits: &'a Limits,
    mps: Option<&'a Mps>,
    progress: Progress,
    /// The folder of each run, in the order of the plan.
    folders: Vec<PathBuf>,
    waiting: VecDeque<usize>,
    slots: Vec<usize>,
    jobs: Vec<Job>,
    stopping: bool,
}

impl Work<'_> {
    fn collect(&mut self) -> Result<()> {
        for (job, status) in take_ended(&mut self.jobs)? {
            self.slots.push(job.slot);
            let state = self.sweep.after(&job, status)?;
            self.progress.ended(self.sweep, &job.place, job.index, &state);
        }
        Ok(())
    }

    /// Asks the running children to save and stop; kills them after a second signal.
    fn stop(&mut self) {
        let now = signals::several_received();
        for job in &mut self.jobs {
            if now {
                let _ = job.child.kill();
            } else if !std::mem::replace(&mut job.stopping, true) {
                ask_to_stop(&job.child);
            }
        }
        self.stopping = true;
    }

    /// Starts waiting runs while there are free slots.
    fn fill(&mut self) -> Result<()> {
        while let (Some(&slot), Some(&index)) = (self.slots.last(), self.waiting.front()) {
            let run = &self.sweep.runs[index];
            self.waiting.pop_front();
            // Another process on the same sweep may have taken or ended the run meanwhile.
            let place = self.sweep.place(run, self.folders[index].clone());
            if !place.state.is_open(self.limits.retry) {
                self.progress.passed(index, &place);
                continue;
            }
            let Some(child) = self.sweep.start(index, &place, slot, self.limits, self.mps)? else {
                self.progress.passed(index, &RunFolder { state: State::Elsewhere, ..place });
                continue;
            };
            self.slots.pop();
            self.progress.started(index, &place.folder);
            self.jobs.push(Job { child, index, place, slot, stopping: false });
        }
        Ok(())
    }
}

fn tally(states: impl Iterator<Item = State>) -> RunCounts {
    let mut tally = RunCounts { signal: signals::received(), ..RunCounts::default() };
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

/// Free slots, one for each run that can run concurrently. The slots of device `n` are `n * jobs..(n + 1) * jobs`.
/// Slots are taken from the end of the list. It is sorted so that every device gets a run before any gets a second run.
fn slots(sweep: &Sweep, jobs: usize) -> Vec<usize> {
    in_turn(if on_gpu(sweep) { gpus().len().max(1) } else { 1 }, jobs.max(1))
}

fn in_turn(devices: usize, jobs: usize) -> Vec<usize> {
    let of_job = |job| (0..devices).map(move |device| device * jobs + job);
    let mut slots: Vec<usize> = (0..jobs).flat_map(of_job).collect();
    slots.reverse();
    slots
}

fn on_gpu(sweep: &Sweep) -> bool {
    sweep.runs.first().is_some_and(|run| run.config.device == DeviceKind::Cuda)
}

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

/// Whether a stop signal killed the process. This happens only before the process installs its signal handler.
fn terminated(status: ExitStatus) -> bool {
    #[cfg(unix)]
    return std::os::unix::process::ExitStatusExt::signal(&status).is_some_and(|signal| {
        [signal_hook::consts::SIGTERM, signal_hook::consts::SIGUSR1].contains(&signal)
    });
    #[cfg(not(unix))]
    false
}

/// Sends SIGTERM, which makes a run save a checkpoint and end.
fn ask_to_stop(child: &Child) {
    #[cfg(unix)]
    if let Some(pid) = rustix::process::Pid::from_raw(child.id() as i32) {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
    }
    #[cfg(not(unix))]
    let _ = child;
}

impl Sweep {
    /// Starts a child for a run. Returns `None` if another process has locked the run's folder.
    fn start(
        &self,
        index: usize,
        place: &RunFolder,
        slot: usize,
        limits: &Limits,
        mps: Option<&Mps>,
    ) -> Result<Option<Child>> {
        let config = &self.runs[index].config;
        let program = std::env::current_exe().map_err(during("cannot find the path of this program"))?;
        let mut command = Command::new(program);
        let name = place.name();
        let asked = self.asked_file(&name);
        if checkpoint::newest(&place.folder).is_some() {
            command.arg("--resume").arg(&place.folder);
            for (key, value) in config.changed_on_resume(&place.folder.join(CONFIG))? {
                command.arg(format!("--{key}={value}"));
            }
        } else if self.set_aside(place)? {
            command.arg("--config").arg(&asked).arg("--name").arg(&name);
        } else {
            return Ok(None);
        }
        let jobs = limits.jobs.max(1);
        match config.device {
            DeviceKind::Cpu => {
                let cores = std::thread::available_parallelism().map_or(1, usize::from);
                let threads = config.threads.unwrap_or((cores / jobs).max(1));
                command.arg("--threads").arg(threads.to_string());
            }
            DeviceKind::Cuda => {
                if let Some(gpu) = gpus().get(slot / jobs) {
                    command.env("CUDA_VISIBLE_DEVICES", gpu);
                }
                if let Some(mps) = mps {
                    mps.set(&mut command);
                }
            }
        }
        // The child is in a separate process group: a signal from the terminal reaches only the sweep, which forwards
        // it. A run whose sweep has exited stops by itself ([`signals::is_orphan`]).
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        command.env(signals::PARENT, std::process::id().to_string());
        // A launcher (torchrun, srun) may have started this sweep as one of several ranks; its runs are single
        // processes nevertheless.
        for name in ranks::variables() {
            command.env_remove(name);
        }
        std::fs::write(&asked, config.to_toml()).map_err(writing(&asked))?;
        let path = self.stderr_file(&name);
        let stderr = open_own(&path, File::options().write(true).create(true).truncate(true))?;
        let _ = std::fs::remove_file(self.crash_file(&name));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
        command.spawn().map(Some).map_err(during("cannot start a run"))
    }

    fn stderr_file(&self, name: &str) -> PathBuf {
        self.plan_folder().join(format!("{name}.stderr"))
    }

    /// The state of a run whose process has ended. Writes a crash record if the state is [`State::Crashed`].
    fn after(&self, job: &Job, status: ExitStatus) -> Result<State> {
        let (folder, name) = (&job.place.folder, job.place.name());
        let now = || self.place(&self.runs[job.index], folder.clone()).state;
        let ending = recorded(folder).ok().flatten();
        if ending.is_some_and(|ending| ending.status != Status::Interrupted) {
            return Ok(now());
        }
        // Two sweeps may have started the same run; the other sweep has locked the run's folder.
        if Lock::is_held(folder) {
            return Ok(State::Elsewhere);
        }
        // If the run was asked to stop, it saved a checkpoint, or had nothing to save yet. The next start of the sweep
        // continues the run.
        let asked = status.code().is_some_and(|code| ASKED_TO_STOP.contains(&code)) || terminated(status);
        if asked || job.stopping {
            return Ok(now());
        }
        let stderr = std::fs::read_to_string(self.stderr_file(&name)).unwrap_or_default();
        let lines: Vec<&str> = stderr.lines().collect();
        let last_lines = lines[lines.len().saturating_sub(12)..].join("\n");
        let ending = RunEnd { status: Status::Failed, reason: Some(format!("{status}\n{last_lines}")) };
        let path = self.crash_file(&name);
        let text = serde_json::to_string_pretty(&ending).expect("plain values");
        std::fs::write(&path, text).map_err(writing(&path))?;
        Ok(State::Crashed)
    }
}

impl RunCounts {
    /// Makes an interrupted sweep an error, so that a waiting script gets a non-zero exit code.
    ///
    /// # Errors
    /// When a signal ended the sweep before all runs were done.
    pub fn check(&self, again: &str) -> Result<()> {
        match self.signal.filter(|_| self.open > 0) {
            Some(signal) => Err(Error::failed(format!("interrupted with {} runs left", self.open))
                .got(format!("signal {signal}"))
                .hint(format!("completed work is saved; to continue: {again}"))),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::in_turn;

    #[test]
    fn every_device_has_a_run_before_one_has_two() {
        let devices = |slots: Vec<usize>, jobs: usize| -> Vec<usize> {
            slots.into_iter().rev().map(|slot| slot / jobs).collect()
        };
        assert_eq!(devices(in_turn(2, 3), 3), [0, 1, 0, 1, 0, 1]);
        assert_eq!(devices(in_turn(1, 2), 2), [0, 0]);
    }
}
