//! Checkpoints: everything that a run needs to go on to the bit.
//!
//! `RUN/checkpoints/step-00000250/` holds `state.safetensors` (weights and both moments, f32), `checkpoint.json`
//! (what it belongs to, and the hash of the state) and the marker `COMPLETE`. All of it is written and synced under
//! another name, which is then changed: a folder of this name is whole, whatever happened.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use candle_core::{DType, Device};
use candle_sage::{Error, Result};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::config::{CheckpointConfig, Config, Identity};
use crate::lock::Lock;
use crate::model::{Parameters, Snapshot};
use crate::partial::{PARTIAL, sync};
use crate::{hex, writing};

const FOLDER: &str = "checkpoints";
/// Weights and moments.
pub const STATE: &str = "state.safetensors";
const ABOUT: &str = "checkpoint.json";
const MARKER: &str = "COMPLETE";
const VERSION: u32 = 1;

/// What a checkpoint is of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct About {
    version: u32,
    /// Steps taken.
    pub step: u64,
    /// [`crate::data::Dataset::fingerprint`] of what it was trained on.
    pub data: String,
    state_bytes: u64,
    state_sha256: String,
    /// What the run is: [`Config::identity`]. Earlier versions did not say it.
    #[serde(default)]
    pub settings: Option<Identity>,
}

/// What a checkpoint belongs to.
#[derive(Debug, Clone)]
pub(super) struct Belongs {
    /// [`crate::data::Dataset::fingerprint`].
    pub(super) data: String,
    pub(super) settings: Identity,
}

/// Writes a run's checkpoints, one at a time, beside the training.
#[derive(Debug)]
pub(super) struct Checkpoints {
    folder: PathBuf,
    belongs: Belongs,
    config: CheckpointConfig,
    writing: Option<JoinHandle<Result<()>>>,
}

impl Checkpoints {
    /// For a run that was trained on this data. What an interrupted writer left is removed.
    pub(super) fn new(run: &Path, belongs: Belongs, config: CheckpointConfig) -> Result<Self> {
        let folder = run.join(FOLDER);
        std::fs::create_dir_all(&folder).map_err(writing(&folder))?;
        for entry in std::fs::read_dir(&folder).map_err(writing(&folder))?.flatten() {
            if entry.file_name().to_string_lossy().ends_with(PARTIAL) {
                std::fs::remove_dir_all(entry.path()).map_err(writing(&entry.path()))?;
            }
        }
        Ok(Self { folder, belongs, config, writing: None })
    }

    /// Starts to write a checkpoint. The one before must have been waited for.
    pub(super) fn save(&mut self, step: u64, snapshot: impl FnOnce() -> Result<Snapshot>) -> Result<()> {
        let snapshot = snapshot()?;
        let (folder, belongs, config) = (self.folder.clone(), self.belongs.clone(), self.config);
        self.writing = Some(std::thread::spawn(move || {
            write(&folder, step, belongs, &snapshot)?;
            prune(&folder, config)
        }));
        Ok(())
    }

    /// Waits until what was started is on the disk.
    pub(super) fn wait(&mut self) -> Result<()> {
        let Some(writing) = self.writing.take() else { return Ok(()) };
        writing.join().unwrap_or_else(|_| Err(Error::new("the thread that writes checkpoints died")))
    }
}

impl Drop for Checkpoints {
    /// A run that ends early still finishes what it began to write.
    fn drop(&mut self) {
        let _ = self.wait();
    }
}

fn name(step: u64) -> String {
    format!("step-{step:08}")
}

fn write(folder: &Path, step: u64, belongs: Belongs, snapshot: &Snapshot) -> Result<()> {
    let partial = folder.join(name(step) + PARTIAL);
    let written = write_into(&partial, step, belongs, snapshot).and_then(|()| {
        let path = folder.join(name(step));
        std::fs::rename(&partial, &path).map_err(writing(&path))?;
        sync(folder)
    });
    if written.is_err() {
        // Its room may be what the next one needs.
        let _ = std::fs::remove_dir_all(&partial);
    }
    written.map_err(|error| {
        Error::new(format!("cannot write the checkpoint of step {step}"))
            .got(error.to_string().replace('\n', "; "))
            .hint("earlier checkpoints are untouched; make room, or lower --keep-last")
    })
}

fn write_into(partial: &Path, step: u64, belongs: Belongs, snapshot: &Snapshot) -> Result<()> {
    std::fs::create_dir(partial).map_err(writing(partial))?;
    let state = partial.join(STATE);
    snapshot.save(&state).map_err(writing(&state))?;
    sync(&state)?;
    let (state_bytes, state_sha256) = digest(&state).map_err(writing(&state))?;
    let Belongs { data, settings } = belongs;
    let about = About { version: VERSION, step, data, state_bytes, state_sha256, settings: Some(settings) };
    let about = serde_json::to_string_pretty(&about).expect("plain values");
    for (name, text) in [(ABOUT, about.as_str()), (MARKER, &hex(&Sha256::digest(&about)))] {
        let path = partial.join(name);
        std::fs::write(&path, text).map_err(writing(&path))?;
        sync(&path)?;
    }
    sync(partial)
}

/// Length and SHA-256 of a file.
fn digest(path: &Path) -> std::io::Result<(u64, String)> {
    let mut hash = Sha256::new();
    let bytes = std::io::copy(&mut File::open(path)?, &mut hash)?;
    Ok((bytes, hex(&hash.finalize())))
}

/// Steps of the whole checkpoints, from the first on.
fn steps(folder: &Path) -> Vec<u64> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let step = |entry: std::fs::DirEntry| {
        let step = entry.file_name().to_str()?.strip_prefix("step-")?.parse().ok()?;
        (entry.file_name() == name(step).as_str()).then_some(step)
    };
    let mut steps: Vec<u64> = entries.flatten().filter_map(step).collect();
    steps.sort_unstable();
    steps
}

/// The step that a checkpoint's folder is of, by its name.
pub fn step_of(checkpoint: &Path) -> Option<u64> {
    checkpoint.components().next_back()?.as_os_str().to_str()?.strip_prefix("step-")?.parse().ok()
}

/// The steps of a run's newest checkpoint, if it has one.
pub fn newest(run: &Path) -> Option<u64> {
    steps(&run.join(FOLDER)).pop()
}

/// Removes what is not to be kept. Each goes under another name first: what has its name is whole.
fn prune(folder: &Path, config: CheckpointConfig) -> Result<()> {
    let steps = steps(folder);
    let old = &steps[..steps.len().saturating_sub(config.keep_last)];
    for &step in old.iter().filter(|step| config.keep_every == 0 || !step.is_multiple_of(config.keep_every)) {
        let (path, gone) = (folder.join(name(step)), folder.join(name(step) + PARTIAL));
        std::fs::rename(&path, &gone).map_err(writing(&path))?;
        std::fs::remove_dir_all(&gone).map_err(writing(&gone))?;
    }
    Ok(())
}

/// A checkpoint that was found and checked.
#[derive(Debug)]
pub struct Found {
    /// The folder of its run.
    pub run: PathBuf,
    /// What it says of itself.
    pub about: About,
    path: PathBuf,
    /// Nobody else adds to the run, or prunes what was found.
    _lock: Lock,
}

impl Found {
    /// The newest checkpoint of a run's folder, or the one that is named. The run is taken as long as this lives.
    ///
    /// # Errors
    /// When there is none, or it is damaged, cut off, or from a later version, and when another process has the run.
    pub fn at(path: &Path) -> Result<Self> {
        if path.join(ABOUT).exists() || path.join(STATE).exists() {
            let run = path.parent().and_then(Path::parent);
            let run = run.filter(|run| run.join("config.toml").exists()).ok_or_else(|| {
                Error::new("the checkpoint is not in the folder of a run")
                    .got(path.display())
                    .allowed(format!("RUN/{FOLDER}/{}", name(250)))
                    .hint("its settings are in RUN/config.toml: copy the run as a whole")
            })?;
            return Self::checked(Lock::run(run)?, run.to_owned(), path.to_owned());
        }
        let folder = path.join(FOLDER);
        let lock = if folder.is_dir() { Some(Lock::run(path)?) } else { None };
        let found = lock.and_then(|lock| Some((lock, steps(&folder).pop()?)));
        let (lock, step) = found.ok_or_else(|| {
            Error::new("there is no checkpoint to resume from")
                .got(path.display())
                .allowed(format!("the folder of a run with {FOLDER} in it, or one of these"))
                .hint("a run writes them every --checkpoint-every steps, at its end, and when it is interrupted")
        })?;
        Self::checked(lock, path.to_owned(), folder.join(name(step)))
    }

    fn checked(lock: Lock, run: PathBuf, path: PathBuf) -> Result<Self> {
        let refuse = |file: &str, got: String, allowed: &str| {
            let others: Vec<String> = steps(&run.join(FOLDER))
                .into_iter()
                .map(name)
                .filter(|other| !path.ends_with(other))
                .collect();
            let hint = match others.last() {
                Some(other) => format!("move it away: then --resume {} goes on from {other}", run.display()),
                None => "no other checkpoint is left in this run".into(),
            };
            Err(Error::new(format!("the checkpoint {} cannot be used", path.display()))
                .got(format!("{file}: {got}"))
                .allowed(allowed)
                .hint(hint))
        };
        let read = |file: &str| std::fs::read(path.join(file)).map_err(|error| error.to_string());
        let text = match read(ABOUT) {
            Ok(text) => text,
            Err(error) => return refuse(ABOUT, error, "a whole checkpoint"),
        };
        match read(MARKER) {
            Err(error) => return refuse(MARKER, error, "the marker that is written last"),
            Ok(marker) if marker != hex(&Sha256::digest(&text)).as_bytes() => {
                return refuse(
                    ABOUT,
                    "changed since it was written".into(),
                    "the file that the marker was made for",
                );
            }
            Ok(_) => {}
        }
        let about: About = match serde_json::from_slice(&text) {
            Ok(about) => about,
            Err(error) => return refuse(ABOUT, error.to_string(), "what this version writes"),
        };
        if about.version != VERSION {
            return refuse(ABOUT, format!("version {}", about.version), &format!("version {VERSION}"));
        }
        if !path.ends_with(name(about.step)) {
            return refuse(ABOUT, format!("of {}", name(about.step)), "the folder that it was written to");
        }
        let (bytes, sha256) = match digest(&path.join(STATE)) {
            Ok(digest) => digest,
            Err(error) => return refuse(STATE, error.to_string(), "a whole checkpoint"),
        };
        if (bytes, &sha256) != (about.state_bytes, &about.state_sha256) {
            let got = format!("{bytes} bytes with SHA-256 {sha256:.12}");
            let allowed = format!("{} bytes with SHA-256 {:.12}", about.state_bytes, about.state_sha256);
            return refuse(STATE, got, &allowed);
        }
        Ok(Self { run, about, path, _lock: lock })
    }

    /// Checks that nothing newer would be in the way.
    ///
    /// # Errors
    /// When there are newer checkpoints.
    pub fn check_newest(&self) -> Result<()> {
        let newer: Vec<u64> =
            steps(&self.run.join(FOLDER)).into_iter().filter(|&step| step > self.about.step).collect();
        let Some(first) = newer.first() else { return Ok(()) };
        Err(Error::new("there are newer checkpoints than this")
            .got(format!("{} of {} newer, from {}", newer.len(), self.run.display(), name(*first)))
            .allowed("the newest one: no checkpoint is ever overwritten")
            .hint("move the newer ones away, or copy the run's folder"))
    }

    /// The parameters and moments.
    ///
    /// # Errors
    /// When they are of another model.
    pub fn restore(&self, config: &Config, device: &Device, dtype: DType) -> Result<Parameters> {
        Parameters::restore(&config.model, &self.path.join(STATE), device, dtype)
    }
}
