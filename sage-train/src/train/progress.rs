//! Progress output for the person who started the run: a progress bar on a terminal, otherwise occasional lines. The
//! log contains all messages and occasional steps; the metrics contain every step.

use std::cell::OnceCell;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;

use crate::metrics::Point;
use crate::ranks::Rank;
use crate::{bar, notify, open_own, printable};

/// Interval between progress lines on standard error if it is not a terminal. `QUIET_LOG`: the interval between step
/// lines in the log file, after the first `FIRST_STEPS` steps.
const QUIET: Duration = Duration::from_secs(5);
const QUIET_LOG: Duration = Duration::from_secs(10);
const FIRST_STEPS: u64 = 10;

/// The progress of one run, on standard error.
#[derive(Debug)]
pub(super) struct Progress {
    bar: ProgressBar,
    steps: u64,
    log: Option<(PathBuf, OnceCell<Option<File>>)>,
    /// True on rank 0. The other ranks print only warnings.
    speaks: bool,
    /// The number of steps done at `started`.
    first: u64,
    started: Instant,
    last_line: Instant,
    last_log: Instant,
    /// The last validation loss, which the bar shows until the next validation.
    validation: Option<f64>,
}

impl Progress {
    pub(super) fn new(steps: u64, rank: Rank) -> Self {
        let bar = match rank.is_first() {
            true => bar(steps, "{bar:30.cyan/blue} {pos}/{len} {msg} [{elapsed}, ETA {eta}]"),
            false => ProgressBar::hidden(),
        };
        let now = Instant::now();
        Self {
            bar,
            steps,
            log: None,
            speaks: rank.is_first(),
            first: 0,
            started: now,
            last_line: now,
            last_log: now,
            validation: None,
        }
    }

    /// Writes all messages to a file as well. The file is created with the first message.
    pub(super) fn log_to(&mut self, path: PathBuf) {
        self.log = Some((path, OnceCell::new()));
    }

    /// Prints a message above the bar.
    pub(super) fn print(&self, text: &str) {
        if !self.speaks && !text.starts_with("warning") {
            return;
        }
        self.bar.suspend(|| notify(text));
        self.note(text.trim_end());
    }

    pub(super) fn start(&mut self, first: u64) {
        (self.first, self.started) = (first, Instant::now());
        self.bar.set_position(first);
        self.bar.reset_eta();
    }

    pub(super) fn step(&mut self, point: &Point) {
        self.validation = point.val_loss.or(self.validation);
        let mfu = point.mfu.map_or(String::new(), |mfu| format!(" MFU {:.1}%", 100.0 * mfu));
        let text = |validation: Option<f64>| {
            let validation = validation.map_or(String::new(), |loss| format!(" val {loss:.3}"));
            let other = point.eval_attn_loss.map_or(String::new(), |loss| format!(" ({loss:.3})"));
            let (loss, norm, speed) = (point.loss, point.grad_norm, point.tokens_per_second);
            format!("loss {loss:.3}{validation}{other} norm {norm:.2} {speed:.0} tok/s{mfu}")
        };
        let gpu = match (point.gpu_watts, point.gpu_mhz, point.gpu_gib) {
            (Some(watts), Some(mhz), Some(gib)) => format!(" {watts:.0} W {mhz:.0} MHz {gib:.1} GiB"),
            _ => String::new(),
        };
        // The line shows only what this step measured. The progress bar always shows the last validation loss.
        let (step, steps, lr) = (point.step, self.steps, point.lr);
        let line = format!("step {step}/{steps}: {} lr {lr:.2e}{gpu}", text(point.val_loss));
        let (early, ends) = (step - self.first <= FIRST_STEPS, step == steps);
        let now = early || ends || point.val_loss.is_some() || self.last_log.elapsed() > QUIET_LOG;
        if self.speaks && now {
            self.last_log = Instant::now();
            self.note(&line);
        }
        self.bar.set_message(text(self.validation));
        self.bar.set_position(point.step);
        if self.speaks
            && self.bar.is_hidden()
            && (self.last_line.elapsed() > QUIET || point.val_loss.is_some())
        {
            self.last_line = Instant::now();
            let rate = self.started.elapsed().as_secs_f64() / (point.step - self.first) as f64;
            let left = rate * (self.steps - point.step) as f64;
            notify(&format!("{line}, ETA {left:.0}s"));
        }
    }

    pub(super) fn finish(&self) {
        self.bar.finish();
    }

    /// Writes only to the log, with the time in UTC. Failing to write the log does not stop a run; failing to write the
    /// metrics does.
    pub(super) fn note(&self, text: &str) {
        let Some((path, file)) = &self.log else { return };
        let open = || open_own(path, File::options().create(true).append(true)).ok();
        if let Some(mut file) = file.get_or_init(open).as_ref() {
            let time = chrono::Utc::now().format("%Y-%m-%d %H:%M:%SZ");
            // Writes all lines in one call, so that the lines of several processes do not interleave.
            let lines: String = printable(text).lines().map(|line| format!("{time} {line}\n")).collect();
            let _ = file.write_all(lines.as_bytes());
        }
    }
}
