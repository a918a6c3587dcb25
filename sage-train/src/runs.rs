//! Reads the folders of runs: the settings of a run, where it ran, its measurements and how it ended.

mod divergence;
mod gradients;
mod lines;
mod output;
mod provenance;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use candle_sage::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::config::{Change, Config, PLAN};
use crate::during;
use crate::metrics::{GradientErrors, Point, Probed};

pub use divergence::divergence;
use gradients::GRADIENTS;
pub use gradients::add_gradients;
pub(crate) use lines::{LONGEST_LINE, Lines, to_line};
pub use output::{check_output, write_output};
use provenance::branch_of;
pub use provenance::{Start, branch, initial_weights};

/// File with a [`Point`] for each step, one per line.
pub const METRICS: &str = "metrics.jsonl";
/// File with a [`Probed`] for each probe of attention's errors (`--probe-every`), one per line.
pub const PROBES: &str = "probes.jsonl";
/// File with the settings.
pub const CONFIG: &str = "config.toml";
/// File with a [`RunEnd`]. It does not exist while the run is running.
pub const ENDING: &str = "ending.json";
/// File with a [`Start`] for each time that the run was started.
pub const STARTS: &str = "starts.json";

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// All steps are done.
    Finished,
    /// A loss or a gradient was not finite, too many updates were skipped as spikes, or [`divergence`] found a
    /// divergence. This is a result, not a failure.
    Diverged,
    /// A signal asked the run to stop, and it saved a checkpoint.
    Interrupted,
    /// An error, such as a full disk, too little memory, or a bug.
    Failed,
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Finished => "finished",
            Self::Diverged => "diverged",
            Self::Interrupted => "interrupted",
            Self::Failed => "failed",
        })
    }
}

/// The recorded end of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunEnd {
    /// How the run ended.
    pub status: Status,
    /// Why the run ended, unless it finished.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// The contents of a run's folder.
#[derive(Debug, Clone)]
pub struct Run {
    /// The folder.
    pub folder: PathBuf,
    /// The resolved settings.
    pub config: Config,
    /// Every measured step.
    pub points: Vec<Point>,
    /// Every probe of attention's errors.
    pub probes: Vec<Probed>,
    /// The errors of the gradient under quantization schemes, if they were measured.
    pub gradients: Vec<GradientErrors>,
    /// Every start of the run.
    pub starts: Vec<Start>,
    /// How the run ended; `None` if it is still running or its process was killed.
    pub ending: Option<RunEnd>,
}

impl Run {
    /// Whether a folder is the folder of a run.
    pub fn is(folder: &Path) -> bool {
        folder.join(CONFIG).is_file() && folder.join(METRICS).is_file()
    }

    /// Reads the folder of a run. The run may be unfinished, and may be from another machine.
    ///
    /// # Errors
    /// When the folder is not the folder of a run, or cannot be read.
    pub fn read(folder: &Path) -> Result<Self> {
        let config = Config::resolve(Config::read_last_settings(&folder.join(CONFIG))?)?;
        let starts: Vec<Start> = optional(&folder.join(STARTS))?.unwrap_or_default();
        let run = Self {
            config: Config { branch: branch_of(&starts), ..config },
            points: points(folder)?,
            probes: probes(folder)?,
            gradients: gradients::of(folder)?,
            starts,
            ending: ending(folder)?,
            folder: folder.to_owned(),
        };
        // Truncated metrics are normal for an interrupted run, but not for a finished run.
        if run.status() == Some(Status::Finished) && run.steps() != run.config.steps {
            return Err(Error::new("the metrics of a finished run are incomplete")
                .got(format!(
                    "{} of {} steps in {}",
                    run.steps(),
                    run.config.steps,
                    folder.join(METRICS).display()
                ))
                .allowed("every step")
                .hint(restart_hint(folder)));
        }
        Ok(run.judged())
    }

    /// Marks the run as diverged if it has diverged: earlier versions recorded such runs as finished.
    fn judged(self) -> Self {
        let done = self.status() == Some(Status::Finished);
        match divergence(&self.points, self.config.model.vocab).filter(|_| done) {
            None => self,
            reason => Self { ending: Some(RunEnd { status: Status::Diverged, reason }), ..self },
        }
    }

    /// Finds the runs in `folders`. Each folder is the folder of a run, or contains folders of runs, like the folder of
    /// a sweep. Runs are in the order of `folders` and, inside a folder, in the order of their names; each run occurs
    /// once.
    ///
    /// # Errors
    /// When a folder contains no run.
    pub fn find(folders: &[PathBuf]) -> Result<FoundRuns> {
        let (mut found, mut warnings): (Vec<PathBuf>, Vec<String>) = (Vec::new(), Vec::new());
        for folder in folders {
            crate::check_there(folder)?;
            let before = found.len();
            if Self::is(folder) {
                found.push(folder.clone());
            } else {
                let inside = entries_of(folder)
                    .map_err(during(format!("cannot read the runs in {}", folder.display())))?;
                found.extend(inside.into_iter().filter(|path| Self::is(path)));
                warnings.extend(crashed(folder));
                if found.len() > before {
                    warnings.extend(Self::subfolders_with_runs(folder).iter().map(|inner| {
                        let inner = inner.display();
                        format!("the runs in {inner} are left out; `report {inner}` compares them")
                    }));
                }
            }
            if found.len() == before {
                return Err(Error::new("no runs to report")
                    .got(folder.display())
                    .allowed("the folder of a run, or a folder that contains runs")
                    .hint(Self::hint_where_runs_are(folder)));
            }
        }
        let mut seen = BTreeSet::new();
        found.retain(|folder| seen.insert(folder.canonicalize().unwrap_or_else(|_| folder.clone())));
        let (mut runs, mut unread) = (Vec::new(), None);
        for folder in found {
            match Self::read(&folder) {
                Ok(run) => {
                    warnings.extend(run.changed_under_way());
                    runs.push(run);
                }
                Err(error) => {
                    warnings.push(format!("{} is left out: {error}", folder.display()));
                    unread = Some(error);
                }
            }
        }
        match unread.filter(|_| runs.is_empty()) {
            Some(error) => Err(error),
            None => Ok(FoundRuns { runs, warnings }),
        }
    }

    /// A warning if the run was resumed with other settings: its last settings then do not apply to all of its steps.
    fn changed_under_way(&self) -> Option<String> {
        let identity = self.config.identity();
        let of_results = |change: &Change| {
            // `tokens` is not in the identity, but it changes the number of steps.
            let keys = change.settings.keys().filter(|key| identity.contains_key(*key) || *key == "tokens");
            let keys: Vec<&str> = keys.map(String::as_str).collect();
            (!keys.is_empty()).then(|| format!("{} after step {}", keys.join(", "), change.step))
        };
        let changes = Change::read(&self.folder.join(CONFIG)).ok()?;
        let changes: Vec<String> = changes.iter().filter_map(of_results).collect();
        (!changes.is_empty()).then(|| {
            format!(
                "{}: settings changed when the run was resumed: {}",
                self.folder.display(),
                changes.join("; ")
            )
        })
    }

    /// The hint for the error that `folder` contains no runs.
    fn hint_where_runs_are(folder: &Path) -> String {
        let named: Vec<String> =
            Self::subfolders_with_runs(folder).iter().map(|path| path.display().to_string()).collect();
        match named.is_empty() {
            true => "the folder of a run contains config.toml and metrics.jsonl, e.g. runs/tiny-sagebwd-001"
                .into(),
            false => format!("report the folders in it that contain runs: {}", named.join(" ")),
        }
    }

    /// The subfolders of `folder` that contain runs, such as the folders of sweeps in `runs`.
    fn subfolders_with_runs(folder: &Path) -> Vec<PathBuf> {
        let has_runs = |inner: &PathBuf| {
            let runs = entries_of(inner).is_ok_and(|inside| inside.iter().any(|path| Self::is(path)));
            runs && !Self::is(inner)
        };
        entries_of(folder).unwrap_or_default().into_iter().filter(has_runs).collect()
    }

    /// The run, with the validation losses under its training attention. With `--eval-attn`, also a copy of the run,
    /// with the validation losses under the attention of that flag.
    pub fn seen(self) -> Vec<Self> {
        if self.config.eval_scheme.is_none() {
            return vec![self];
        }
        let second =
            self.points.iter().map(|point| Point { val_loss: point.eval_attn_loss, ..point.clone() });
        let mut second = Self { points: second.collect(), probes: Vec::new(), ..self.clone() };
        // Metrics omit an `eval_attn_loss` that is not finite.
        let last = self.points.last();
        if last.is_some_and(|point| point.val_loss.is_some() && point.eval_attn_loss.is_none()) {
            let reason = Some("the validation loss with --eval-attn is not finite".into());
            second.ending = Some(RunEnd { status: Status::Diverged, reason });
        }
        vec![Self { config: Config { eval_scheme: None, ..self.config }, ..self }, second.judged()]
    }

    /// The name of the folder.
    pub fn name(&self) -> String {
        let name = self.folder.file_name().unwrap_or(self.folder.as_os_str());
        name.to_string_lossy().into_owned()
    }

    /// How the run ended, if it is known. Older versions of this program recorded no endings: a run without a recorded
    /// ending is finished if it has all steps and a validation loss.
    pub fn status(&self) -> Option<Status> {
        match &self.ending {
            Some(ending) => Some(ending.status),
            None => self.last_loss().filter(|_| self.steps() == self.config.steps).map(|_| Status::Finished),
        }
    }

    /// Number of measured steps.
    pub fn steps(&self) -> u64 {
        self.points.last().map_or(0, |point| point.step)
    }

    /// The last validation loss.
    pub fn last_loss(&self) -> Option<f64> {
        self.points.iter().rev().find_map(|point| point.val_loss)
    }

    /// The validation loss after the last step of a finished run.
    pub fn final_loss(&self) -> Option<f64> {
        let last = self.points.last().filter(|point| point.step == self.config.steps)?;
        last.val_loss.filter(|_| self.status() == Some(Status::Finished))
    }

    /// Hash of the run's training data, recorded when the run was last started.
    pub fn data_fingerprint(&self) -> Option<&str> {
        self.starts.last().map(|start| start.data_fingerprint.as_str())
    }

    /// [`usual_speed`] of the run's steps.
    pub fn usual_speed(&self) -> Option<f64> {
        usual_speed(&self.config, &self.points)
    }
}

/// The steps among `points` that this run trained, without the steps of the run that it was branched off.
pub fn own_steps<'a>(config: &Config, points: &'a [Point]) -> impl Iterator<Item = &'a Point> {
    let before = config.branch.as_ref().map_or(0, |branch| branch.step);
    points.iter().filter(move |point| point.step > before)
}

/// Median tokens per second over a run's [`own_steps`]. The median is hardly affected by a few slow steps, such as the
/// first step, or steps during which another process uses the device.
pub fn usual_speed(config: &Config, points: &[Point]) -> Option<f64> {
    median(own_steps(config, points).map(|point| point.tokens_per_second))
}

fn points(folder: &Path) -> Result<Vec<Point>> {
    let path = folder.join(METRICS);
    let points: Vec<Point> = Lines::read(&path)?.whole(&path, &restart_hint(folder))?;
    match (1..).zip(&points).find(|(step, point)| point.step != *step) {
        None => Ok(points),
        Some((line, point)) => Err(Error::new(format!("{} is damaged", path.display()))
            .got(format!("step {} in line {line}", point.step))
            .allowed("a line for each step, in order")
            .hint(restart_hint(folder))),
    }
}

fn restart_hint(folder: &Path) -> String {
    format!(
        "`sage-train --resume {}` restores the file from metrics.csv, which has the same numbers",
        folder.display()
    )
}

/// The probes of a run; empty if it was not probed during training.
pub(crate) fn probes(folder: &Path) -> Result<Vec<Probed>> {
    let path = folder.join(PROBES);
    match path.exists() {
        true => Lines::read(&path)?.whole(&path, "remove this line: the run continues without it"),
        false => Ok(Vec::new()),
    }
}

/// The recorded end of the run in a folder; `None` if there is no record.
///
/// # Errors
/// When the file cannot be read.
pub fn ending(folder: &Path) -> Result<Option<RunEnd>> {
    optional(&folder.join(ENDING))
}

/// The hash of the tokenizer that a run used at its last start; `None` if it is not recorded.
///
/// # Errors
/// When the run's `starts.json` is damaged.
pub fn tokenizer_hash(run: &Path) -> Result<Option<String>> {
    let starts: Option<Vec<Start>> = optional(&run.join(STARTS))?;
    Ok(starts.and_then(|mut starts| starts.pop()).and_then(|start| start.tokenizer))
}

/// The result of [`Run::find`].
#[derive(Debug, Clone)]
pub struct FoundRuns {
    /// Runs that can be read.
    pub runs: Vec<Run>,
    /// Messages about runs that crashed, cannot be read, or changed settings when resumed, and about subfolders whose
    /// runs are omitted.
    pub warnings: Vec<String>,
}

/// The entries of a folder, sorted by name.
fn entries_of(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut inside: Vec<PathBuf> = std::fs::read_dir(folder)?.flatten().map(|entry| entry.path()).collect();
    inside.sort();
    Ok(inside)
}

/// One message for each run of a sweep that crashed and has no `ending.json` from after the crash.
pub fn crashed(sweep: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(sweep.join(PLAN)) else { return Vec::new() };
    let mut warnings: Vec<String> = entries
        .flatten()
        .filter_map(|entry| {
            let file = entry.file_name().to_string_lossy().into_owned();
            let name = file.strip_suffix(".crash.json").filter(|name| !ended_since(sweep, name))?;
            let ending = optional::<RunEnd>(&entry.path()).ok().flatten();
            let reason = ending.and_then(|ending| ending.reason).unwrap_or_default();
            Some(format!("{name} crashed: {}", reason.lines().last().unwrap_or("?")))
        })
        .collect();
    warnings.sort();
    warnings
}

/// Whether a run's `ending.json` is newer than its `.crash.json`; false if one of the files is missing.
pub fn ended_since(sweep: &Path, name: &str) -> bool {
    let changed = |path: PathBuf| std::fs::metadata(path).and_then(|about| about.modified()).ok();
    let crash = changed(sweep.join(PLAN).join(format!("{name}.crash.json")));
    crash.zip(changed(sweep.join(name).join(ENDING))).is_some_and(|(crash, ending)| ending > crash)
}

/// The median of some numbers; for an even count the mean of the two middle numbers. `None` without numbers.
pub fn median(numbers: impl Iterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = numbers.collect();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    let upper = *sorted.get(middle)?;
    Some(if sorted.len() % 2 == 1 { upper } else { (sorted[middle - 1] + upper) / 2.0 })
}

/// The value in a JSON file; `None` if the file does not exist.
pub(crate) fn optional<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    let text = match std::fs::read(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        text => text.map_err(during(format!("cannot read {}", path.display())))?,
    };
    serde_json::from_slice(&text).map(Some).map_err(|error| {
        Error::new(format!("cannot read {}", path.display()))
            .got(error)
            .allowed("a file written by this version")
            .hint("remove the file: the run does not need it")
    })
}
