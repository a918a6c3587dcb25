//! The folders that runs leave: what a run was, where it ran, what it measured, how it ended.

mod provenance;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use candle_sage::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::config::{Config, PLAN};
use crate::during;
use crate::metrics::Point;
use crate::probe::Probed;

pub use provenance::Start;

/// A line for each step.
pub const METRICS: &str = "metrics.jsonl";
/// A line for each probe of attention's errors, where `--probe-every` asked for them: a [`Probed`].
pub const PROBES: &str = "probes.jsonl";
/// The settings.
pub const CONFIG: &str = "config.toml";
/// How it ended: an [`Ending`]. It is not there while a run is under way.
pub const ENDING: &str = "ending.json";
/// Where and when it ran: a [`Start`] for each time that it was started.
pub const STARTS: &str = "starts.json";

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// All steps are done.
    Finished,
    /// A loss or a gradient was not finite, or too many updates were skipped as spikes: a result.
    Diverged,
    /// It was asked to stop, and was saved.
    Interrupted,
    /// Something else went wrong: no room, no memory, a bug.
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

/// The end of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ending {
    /// How.
    pub status: Status,
    /// Why, where it is not finished.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// What the folder of a run says.
#[derive(Debug, Clone)]
pub struct Run {
    /// The folder.
    pub folder: PathBuf,
    /// What was asked for.
    pub config: Config,
    /// Every step that was measured.
    pub points: Vec<Point>,
    /// Every probe of attention's errors.
    pub probes: Vec<Probed>,
    /// Every time that it was started.
    pub starts: Vec<Start>,
    /// How it ended; nothing of a run that is under way, or that was cut off.
    pub ending: Option<Ending>,
}

impl Run {
    /// Whether a folder is that of a run.
    pub fn is(folder: &Path) -> bool {
        folder.join(CONFIG).is_file() && folder.join(METRICS).is_file()
    }

    /// Reads the folder of a run, finished or not, of this machine or another.
    ///
    /// # Errors
    /// When it is none, or cannot be read.
    pub fn read(folder: &Path) -> Result<Self> {
        let config = Config::resolve(Config::read_settings(&folder.join(CONFIG))?)?;
        Ok(Self {
            config,
            points: json_lines(&folder.join(METRICS))?,
            probes: if folder.join(PROBES).exists() { json_lines(&folder.join(PROBES))? } else { Vec::new() },
            starts: optional(&folder.join(STARTS))?.unwrap_or_default(),
            ending: optional(&folder.join(ENDING))?,
            folder: folder.to_owned(),
        })
    }

    /// The runs in these folders: each is the folder of a run, or one that has such folders in it, as a sweep's has. In the
    /// order of their names, each once.
    ///
    /// # Errors
    /// When a folder has none.
    pub fn find(folders: &[PathBuf]) -> Result<Found> {
        let (mut found, mut warnings): (Vec<PathBuf>, Vec<String>) = (Vec::new(), Vec::new());
        for folder in folders {
            let before = found.len();
            if Self::is(folder) {
                found.push(folder.clone());
            } else {
                let entries = std::fs::read_dir(folder)
                    .map_err(during(format!("cannot read the runs in {}", folder.display())))?;
                let mut inside: Vec<PathBuf> =
                    entries.flatten().map(|entry| entry.path()).filter(|path| Self::is(path)).collect();
                inside.sort();
                found.extend(inside);
                warnings.extend(crashed(folder));
            }
            if found.len() == before {
                return Err(Error::new("there are no runs to report")
                    .got(folder.display())
                    .allowed("the folder of a run, or one with such folders in it")
                    .hint("a run leaves config.toml and metrics.jsonl, e.g. in runs/tiny-sagebwd-001"));
            }
        }
        let mut seen = BTreeSet::new();
        found.retain(|folder| seen.insert(folder.canonicalize().unwrap_or_else(|_| folder.clone())));
        let mut runs = Vec::new();
        for folder in found {
            match Self::read(&folder) {
                Ok(run) => runs.push(run),
                Err(error) => warnings.push(format!("{} is left out: {error}", folder.display())),
            }
        }
        Ok(Found { runs, warnings })
    }

    /// The run as its own validations saw it and, where there was a second one of each, as that did.
    pub fn seen(self) -> Vec<Self> {
        if self.config.eval_scheme.is_none() {
            return vec![self];
        }
        let again = self.points.iter().map(|point| Point { val_loss: point.eval_attn_loss, ..point.clone() });
        let mut again = Self { points: again.collect(), probes: Vec::new(), ..self.clone() };
        // A second loss that is not finite is not written down, and ends a run as the first one would.
        let last = self.points.last();
        if last.is_some_and(|point| point.val_loss.is_some() && point.eval_attn_loss.is_none()) {
            let reason = Some("the second validation loss is not finite".into());
            again.ending = Some(Ending { status: Status::Diverged, reason });
        }
        vec![Self { config: Config { eval_scheme: None, ..self.config }, ..self }, again]
    }

    /// The last part of the folder's name.
    pub fn name(&self) -> String {
        let name = self.folder.file_name().unwrap_or(self.folder.as_os_str());
        name.to_string_lossy().into_owned()
    }

    /// How it ended, as far as the folder says: one that was left by an earlier version says it by its last step.
    pub fn status(&self) -> Option<Status> {
        match &self.ending {
            Some(ending) => Some(ending.status),
            None => self.last_loss().filter(|_| self.steps() == self.config.steps).map(|_| Status::Finished),
        }
    }

    /// Steps that were measured.
    pub fn steps(&self) -> u64 {
        self.points.last().map_or(0, |point| point.step)
    }

    /// The last validation loss.
    pub fn last_loss(&self) -> Option<f64> {
        self.points.iter().rev().find_map(|point| point.val_loss)
    }

    /// The validation loss after the last step of a run that is finished.
    pub fn final_loss(&self) -> Option<f64> {
        let last = self.points.last().filter(|point| point.step == self.config.steps)?;
        last.val_loss.filter(|_| self.status() == Some(Status::Finished))
    }

    /// What it learned from, as far as it said it.
    pub fn data_fingerprint(&self) -> Option<&str> {
        self.starts.last().map(|start| start.data_fingerprint.as_str())
    }

    /// Tokens a second of a usual step: the median, which a first step, a validation or a neighbour does not move.
    pub fn usual_speed(&self) -> Option<f64> {
        median(self.points.iter().map(|point| point.tokens_per_second))
    }
}

/// The hash of the tokenizer that a run has, as far as it said it.
pub fn tokenizer_hash(run: &Path) -> Option<String> {
    optional::<Vec<Start>>(&run.join(STARTS)).ok()??.pop()?.tokenizer
}

/// Runs that were found.
#[derive(Debug, Clone)]
pub struct Found {
    /// Those that can be read.
    pub runs: Vec<Run>,
    /// What cannot, and runs that left nothing to read.
    pub warnings: Vec<String>,
}

/// Runs of a sweep whose process ended without a word, and that did not go on since.
pub fn crashed(sweep: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(sweep.join(PLAN)) else { return Vec::new() };
    let mut warnings: Vec<String> = entries
        .flatten()
        .filter_map(|entry| {
            let file = entry.file_name().to_string_lossy().into_owned();
            let name = file.strip_suffix(".crash.json").filter(|name| !ended_since(sweep, name))?;
            let ending = optional::<Ending>(&entry.path()).ok().flatten();
            let reason = ending.and_then(|ending| ending.reason).unwrap_or_default();
            Some(format!("{name} crashed: {}", reason.lines().last().unwrap_or("?")))
        })
        .collect();
    warnings.sort();
    warnings
}

/// Whether the run in a folder of a sweep's said how it ended after its process had crashed.
pub fn ended_since(sweep: &Path, name: &str) -> bool {
    let changed = |path: PathBuf| std::fs::metadata(path).and_then(|about| about.modified()).ok();
    let crash = changed(sweep.join(PLAN).join(format!("{name}.crash.json")));
    crash.zip(changed(sweep.join(name).join(ENDING))).is_some_and(|(crash, ending)| ending > crash)
}

/// The middle of some numbers; of an even count of them the mean of the two in the middle.
pub fn median(numbers: impl Iterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = numbers.collect();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    let upper = *sorted.get(middle)?;
    Some(if sorted.len() % 2 == 1 { upper } else { (sorted[middle - 1] + upper) / 2.0 })
}

/// The values in a file of JSON lines; a line that was cut off ends them.
pub(crate) fn json_lines<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Vec<T>> {
    let text = std::fs::read_to_string(path).map_err(during(format!("cannot read {}", path.display())))?;
    Ok(text.lines().map_while(|line| serde_json::from_str(line).ok()).collect())
}

/// What a JSON file says, where there is one.
fn optional<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    let text = match std::fs::read(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        text => text.map_err(during(format!("cannot read {}", path.display())))?,
    };
    serde_json::from_slice(&text).map(Some).map_err(|error| {
        Error::new(format!("cannot read {}", path.display()))
            .got(error)
            .allowed("what this version writes")
            .hint("remove the file: it is about the run, not of it")
    })
}
