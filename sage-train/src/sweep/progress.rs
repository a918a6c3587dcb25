//! Progress of a sweep on standard error: a bar for the sweep and a bar for each running run. If standard error is not
//! a terminal, lines of text are printed instead of bars.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use indicatif::{HumanDuration, MultiProgress, ProgressBar};

use super::Sweep;
use super::state::{RunFolder, State};
use crate::metrics::Point;
use crate::quantity::grouped;
use crate::runs::{LONGEST_LINE, METRICS, Status};
use crate::{bar, notify};

/// Interval between progress lines if standard error is not a terminal.
const QUIET: Duration = Duration::from_secs(15);

/// Progress of a sweep. It is read from the metrics files of the runs.
#[derive(Debug)]
pub struct Progress {
    all: MultiProgress,
    whole: ProgressBar,
    /// For each run, in the order of the plan: its tokens per step, its number of steps and its name.
    runs: Vec<(u64, u64, String)>,
    under_way: BTreeMap<usize, WatchedRun>,
    /// All tokens of the runs that ended or were left to other processes, and the tokens of the completed steps of
    /// interrupted runs.
    done: u64,
    began: Instant,
    /// Tokens of steps that other processes did, before this process began or while it runs. The displayed tok/s do not
    /// count them.
    before: u64,
    last_line: Instant,
    ended: usize,
    count: usize,
}

#[derive(Debug)]
struct WatchedRun {
    bar: ProgressBar,
    metrics: PathBuf,
    read: u64,
    step: u64,
}

impl Progress {
    pub(super) fn new(sweep: &Sweep, places: &[RunFolder], waiting: &VecDeque<usize>) -> Self {
        let runs: Vec<(u64, u64, String)> = sweep
            .runs
            .iter()
            .map(|run| (run.config.tokens_per_step(), run.config.steps, run.name.clone()))
            .collect();
        let total: u64 = waiting.iter().map(|&n| runs[n].0 * runs[n].1).sum();
        let before: u64 = waiting.iter().map(|&n| runs[n].0 * places[n].steps).sum();
        let all = MultiProgress::new();
        let whole = all.add(bar(total, "{bar:30.green/blue} {percent:>3}% {msg} [{elapsed}, ETA {eta}]"));
        whole.set_position(before);
        whole.reset_eta();
        let passed = places.len() - waiting.len();
        if passed > 0 {
            notify(&format!(
                "{passed} of {} runs are skipped: they have ended, other processes work on them, or --only omits \
                 them",
                places.len()
            ));
        }
        Self {
            all,
            whole,
            under_way: BTreeMap::new(),
            done: 0,
            began: Instant::now(),
            before,
            last_line: Instant::now(),
            ended: 0,
            count: waiting.len(),
            runs,
        }
    }

    fn print(&self, text: &str) {
        self.all.suspend(|| notify(text));
    }

    pub(super) fn started(&mut self, index: usize, folder: &Path) {
        let (_, steps, name) = &self.runs[index];
        let bar = self.all.add(bar(*steps, "{bar:30.cyan/blue} {pos}/{len} {prefix} {msg}"));
        bar.set_prefix(name.clone());
        let metrics = folder.join(METRICS);
        self.under_way.insert(index, WatchedRun { bar, metrics, read: 0, step: 0 });
    }

    /// Notes that another process runs, or has finished, a run that this sweep was about to start.
    pub(super) fn passed(&mut self, index: usize, folder: &RunFolder) {
        let (tokens, steps, name) = &self.runs[index];
        self.done += tokens * steps;
        self.before += tokens * (steps - folder.steps.min(*steps));
        self.print(&format!("{name}: {}, by another process", folder.state));
        self.ended += 1;
    }

    pub(super) fn ended(&mut self, sweep: &Sweep, folder: &RunFolder, index: usize, state: &State) {
        self.refresh();
        let Some(watched) = self.under_way.remove(&index) else { return };
        watched.bar.finish_and_clear();
        let (tokens, steps, name) = &self.runs[index];
        let over = matches!(state, State::Ended(_) | State::Crashed);
        self.done += tokens * if over { *steps } else { watched.step };
        self.ended += usize::from(over);
        let run = crate::runs::Run::read(&folder.folder).ok();
        let outcome = match state {
            State::Ended(Status::Finished) => {
                let loss = run.as_ref().and_then(crate::runs::Run::last_loss);
                loss.map_or("finished".into(), |loss| format!("validation loss {loss:.4}"))
            }
            State::Ended(status) => {
                let reason = run.and_then(|run| run.ending).and_then(|ending| ending.reason);
                format!("{status}: {}", in_a_line(reason.as_deref().unwrap_or_default()))
            }
            State::Crashed => {
                let reason = sweep.crash(&folder.name()).and_then(|ending| ending.reason).unwrap_or_default();
                format!("crashed: {}", in_a_line(&reason))
            }
            State::CutOff => format!("saved after step {} of {steps}", watched.step),
            State::Waiting => "stopped before its first checkpoint".into(),
            State::Elsewhere => "another process works on it".into(),
        };
        self.print(&format!("[{}/{}] {name}: {outcome}", self.ended, self.count));
    }

    /// Reads the metrics that the runs have written since the last call, and shows the progress.
    pub(super) fn refresh(&mut self) {
        for watched in self.under_way.values_mut() {
            if let Some(point) = watched.last_point() {
                watched.step = point.step;
                watched.bar.set_position(point.step);
                watched.bar.set_message(format!(
                    "loss {:.3} {} tok/s",
                    point.loss,
                    grouped(point.tokens_per_second as u64)
                ));
            }
        }
        let running: u64 = self.under_way.iter().map(|(&n, watched)| self.runs[n].0 * watched.step).sum();
        let done = (self.done + running).max(self.before);
        self.whole.set_position(done);
        let rate = (done - self.before) as f64 / self.began.elapsed().as_secs_f64().max(1e-3);
        let message = format!(
            "{}/{} runs, {} under way, {} tok/s",
            self.ended,
            self.count,
            self.under_way.len(),
            grouped(rate as u64)
        );
        self.whole.set_message(message.clone());
        if self.whole.is_hidden() && self.last_line.elapsed() > QUIET && !self.under_way.is_empty() {
            self.last_line = Instant::now();
            let total = self.whole.length().unwrap_or(done).max(1);
            let left = (total.saturating_sub(done)) as f64 / rate.max(1.0);
            let percent = 100 * u128::from(done) / u128::from(total);
            notify(&format!(
                "sweep {percent} %: {message}, ETA {}",
                HumanDuration(Duration::try_from_secs_f64(left).unwrap_or(Duration::MAX))
            ));
        }
    }

    pub(super) fn finish(&self) {
        self.whole.finish_and_clear();
    }
}

impl WatchedRun {
    /// Reads the complete lines that the run added to its metrics file since the previous call. Returns the last one.
    fn last_point(&mut self) -> Option<Point> {
        let mut file = File::open(&self.metrics).ok()?;
        file.seek(SeekFrom::Start(self.read)).ok()?;
        let (mut reader, mut line, mut last) = (BufReader::new(file), String::new(), None);
        while reader.by_ref().take(LONGEST_LINE).read_line(&mut line).ok()? > 0 && line.ends_with('\n') {
            self.read += line.len() as u64;
            last = serde_json::from_str(&line).ok().or(last);
            line.clear();
        }
        last
    }
}

/// The first line of an error, and its `got` line.
fn in_a_line(reason: &str) -> String {
    let mut lines = reason.lines().map(str::trim);
    let what = lines.next().filter(|what| !what.is_empty()).unwrap_or("?");
    match lines.next().and_then(|line| line.strip_prefix("got:")) {
        Some(got) => format!("{what}: {}", got.trim()),
        None => what.into(),
    }
}
