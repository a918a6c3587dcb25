//! Checkpoints: everything that a run needs to continue bit-identically.
//!
//! `RUN/checkpoints/step-00000250/` holds `state.safetensors` (weights and the optimizer's state, f32),
//! `checkpoint.json` (step, data and settings of the run, and the hash of the state) and the marker `COMPLETE`. All
//! files are synced in a temporary folder, which is then renamed. So a folder with a checkpoint's name is complete.
//!
//! With several ranks, each rank writes its part of the weights and of the optimizer's state to
//! `state-00001-of-00004.safetensors` and so on. For each file, `checkpoint.json` lists the parameters that are only
//! partly in it. Together the files are one checkpoint, from which any number of ranks can continue.

mod verified;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use candle_core::Device;
use candle_sage::{Error, Result};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use verified::verified;

use crate::config::{BRANCHED_FROM, CheckpointConfig, Config, Identity};
use crate::lock::Lock;
use crate::model::{Parameters, Parts, Snapshot, State};
use crate::partial::{PARTIAL, sync};
use crate::ranks::{ControlChannel, Rank, Ranks};
use crate::settings::{Role, has_role};
use crate::{during, hex, writing};

const FOLDER: &str = "checkpoints";
/// Weights and moments in a single file.
const STATE: &str = "state.safetensors";
const MANIFEST: &str = "checkpoint.json";
const MARKER: &str = "COMPLETE";
/// Versions of the format: 1 has a single file of weights and moments, and 2 has a file for each rank.
const VERSIONS: [u32; 2] = [1, 2];

/// The contents of `checkpoint.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    version: u32,
    /// Number of steps taken.
    pub step: u64,
    /// [`crate::data::Dataset::fingerprint`] of the data that the run was trained on.
    pub data: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    state_bytes: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    state_sha256: Option<String>,
    /// The file of each rank, if several ranks wrote the checkpoint. `state_bytes` and `state_sha256` are then `None`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    files: Vec<RankFile>,
    /// The scale and the running maximum of each FP8 operand, in the order in which the model lists its operands.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    scales: Vec<[f32; 2]>,
    /// The settings of the run, [`Config::identity`]; `None` if an early version of sage-train wrote the checkpoint.
    #[serde(default)]
    pub settings: Option<Identity>,
}

/// The file of weights and moments of one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RankFile {
    name: String,
    bytes: u64,
    sha256: String,
    /// The parameters of which the file contains only a part.
    #[serde(default, skip_serializing_if = "Parts::is_empty")]
    parts: Parts,
}

impl Manifest {
    fn new(step: u64, owner: Owner, mut files: Vec<RankFile>, scales: Vec<[f32; 2]>) -> Self {
        let Owner { data, settings } = owner;
        let one = if files.len() == 1 { files.pop() } else { None };
        let version = VERSIONS[usize::from(one.is_none())];
        let (state_bytes, state_sha256) = one.map(|file| (file.bytes, file.sha256)).unzip();
        Self { version, step, data, state_bytes, state_sha256, files, scales, settings: Some(settings) }
    }

    /// The files of weights and moments; `None` if the fields contradict each other.
    fn files(&self) -> Option<Vec<RankFile>> {
        match (self.state_bytes, &self.state_sha256, self.version) {
            (Some(bytes), Some(sha256), 1) if self.files.is_empty() => Some(vec![RankFile {
                name: STATE.into(),
                bytes,
                sha256: sha256.clone(),
                parts: Parts::new(),
            }]),
            (None, None, 2) => {
                let of = self.files.len();
                let named = |(index, file): (usize, &RankFile)| file.name == state_name(Rank { index, of });
                (of > 1 && self.files.iter().enumerate().all(named)).then(|| self.files.clone())
            }
            _ => None,
        }
    }

    /// Checks that `now`, the settings in `config.toml`, equal the settings that the checkpoint was written with.
    ///
    /// # Errors
    /// When a setting differs that must stay the same on resume.
    pub fn check_settings(&self, run: &Path, now: &Config) -> Result<()> {
        let Some(then) = &self.settings else { return Ok(()) };
        // The checkpoint may lack a setting. If the preset has a value for it, an older version of the program wrote
        // the checkpoint, and the setting is ignored. If not, the setting was added to `config.toml`, and counts as a
        // difference. `BRANCHED_FROM` is ignored, because `config.toml` never contains it.
        let (now, added) = (&now.identity(), now.keys_of_some_runs());
        let added = added.iter().filter(|key| now.contains_key(*key));
        let keys = then.keys().filter(|key| *key != BRANCHED_FROM).chain(added);
        // `tokenizer` and `text-field` are not compared here: if they change the data, its fingerprint differs.
        let free = |key: &str| has_role(key, Role::Resumable) || ["tokenizer", "text-field"].contains(&key);
        let Some(key) = keys.clone().find(|key| !free(key) && then.get(*key) != now.get(*key)) else {
            return Ok(());
        };
        let show = |all: &Identity| all.get(key).map_or("not set".into(), Clone::clone);
        Err(Error::new("the run's settings were changed since the checkpoint was written")
            .got(format!("{key} = {} in {}", show(now), run.join("config.toml").display()))
            .allowed(format!("{key} = {}", show(then)))
            .hint("restore the setting, or begin a new run from the changed file with --config"))
    }
}

fn state_name(rank: Rank) -> String {
    match rank {
        Rank::ALONE => STATE.into(),
        Rank { index, of } => format!("state-{:05}-of-{of:05}.safetensors", index + 1),
    }
}

/// The run that a checkpoint belongs to.
#[derive(Debug, Clone)]
pub(crate) struct Owner {
    /// [`crate::data::Dataset::fingerprint`] of the run's data.
    pub(crate) data: String,
    pub(crate) settings: Identity,
}

/// Writes a run's checkpoints on a separate thread during training, one at a time.
#[derive(Debug)]
pub(crate) struct Checkpoints {
    folder: PathBuf,
    owner: Owner,
    config: CheckpointConfig,
    channel: ControlChannel,
    writing: Option<JoinHandle<Result<()>>>,
}

impl Checkpoints {
    /// Creates the folder of checkpoints, and removes incomplete checkpoints from it.
    pub(crate) fn new(
        run: &Path,
        owner: Owner,
        config: CheckpointConfig,
        channel: ControlChannel,
    ) -> Result<Self> {
        let folder = run.join(FOLDER);
        if channel.rank().is_first() {
            std::fs::create_dir_all(&folder).map_err(writing(&folder))?;
            for entry in std::fs::read_dir(&folder).map_err(writing(&folder))?.flatten() {
                if entry.file_name().to_string_lossy().ends_with(PARTIAL) {
                    std::fs::remove_dir_all(entry.path()).map_err(writing(&entry.path()))?;
                }
            }
        }
        Ok(Self { folder, owner, config, channel, writing: None })
    }

    /// Starts to write a checkpoint. The caller must have waited for the previous checkpoint.
    pub(crate) fn save(&mut self, step: u64, snapshot: Result<Snapshot>) {
        let (folder, owner, config) = (self.folder.clone(), self.owner.clone(), self.config);
        let channel = self.channel.clone();
        self.writing = Some(std::thread::spawn(move || {
            write(&folder, step, owner, snapshot, &channel)?;
            if channel.rank().is_first() { prune(&folder, config) } else { Ok(()) }
        }));
    }

    /// Waits until the checkpoint that was started is on the disk.
    pub(crate) fn wait(&mut self) -> Result<()> {
        let Some(writing) = self.writing.take() else { return Ok(()) };
        writing.join().unwrap_or_else(|_| Err(Error::failed("the thread that writes checkpoints panicked")))
    }
}

impl Drop for Checkpoints {
    /// A run that ends early still completes the checkpoint that it has started to write.
    fn drop(&mut self) {
        let _ = self.wait();
    }
}

fn name(step: u64) -> String {
    format!("step-{step:08}")
}

/// Writes this rank's file. Rank 0 receives the outcome of all ranks and completes the checkpoint.
fn write(
    folder: &Path,
    step: u64,
    owner: Owner,
    snapshot: Result<Snapshot>,
    channel: &ControlChannel,
) -> Result<()> {
    let partial = folder.join(name(step) + PARTIAL);
    let scales = snapshot.as_ref().map_or(Vec::new(), |snapshot| snapshot.scales.clone());
    // A panic becomes an error too, so that the other ranks always receive the outcome of this rank.
    let work = || snapshot.and_then(|snapshot| write_state(&partial, &snapshot, channel.rank()));
    let own = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(Error::failed("the thread that writes checkpoints panicked")));
    let report = match &own {
        Ok(file) => Ok(file.clone()),
        Err(error) => Err(error.to_string()),
    };
    let report = channel.share("checkpoint", &serde_json::to_string(&report).expect("plain values"));
    let files = report.iter().enumerate().map(|(rank, report)| {
        let file: std::result::Result<RankFile, String> = serde_json::from_str(report)
            .map_err(during("a rank sent an invalid report on its part of the checkpoint"))?;
        file.map_err(|error| match channel.rank().of {
            1 => Error::new(error),
            _ => Error::new(format!("rank {rank}: {error}")),
        })
    });
    let files: Result<Vec<RankFile>> = files.collect();
    let written = files.and_then(|files| match channel.rank().is_first() {
        true => finish(folder, &partial, (step, scales), owner, files),
        false => Ok(()),
    });
    // Until rank 0 has renamed the checkpoint, no rank exits or counts the checkpoint as written.
    let failed = written.as_ref().err().map_or(String::new(), Error::to_string);
    let of_first = channel.from_first("checkpoint is named", &failed);
    let written = match of_first.is_empty() {
        true => written,
        false => written.and(Err(Error::new(of_first))),
    };
    if written.is_err() && channel.rank().is_first() {
        // The next checkpoint may need the disk space.
        let _ = std::fs::remove_dir_all(&partial);
    }
    written.map_err(|error| {
        Error::failed(format!("cannot write the checkpoint of step {step}"))
            .got(error.to_string().replace('\n', "; "))
            .hint("if the disk is full, free disk space or lower --keep-last; earlier checkpoints are intact")
    })
}

fn write_state(partial: &Path, snapshot: &Snapshot, rank: Rank) -> Result<RankFile> {
    // The ranks do not wait for each other here, so each rank creates `partial`. If the run's folder was
    // removed, `create_dir` fails on rank 0, unless another rank has already created the run's folder again.
    let made = match rank.is_first() {
        true => std::fs::create_dir(partial),
        false => std::fs::create_dir_all(partial),
    };
    match made {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            return Err(writing(partial)(error));
        }
        _ => {}
    }
    let name = state_name(rank);
    let state = partial.join(&name);
    let parts = snapshot.save(&state).map_err(writing(&state))?;
    sync(&state)?;
    let (bytes, sha256) = digest(&state).map_err(writing(&state))?;
    Ok(RankFile { name, bytes, sha256, parts })
}

fn finish(
    folder: &Path,
    partial: &Path,
    (step, scales): (u64, Vec<[f32; 2]>),
    owner: Owner,
    files: Vec<RankFile>,
) -> Result<()> {
    // Machines may have folders of the same name on separate disks.
    let there = |file: &&RankFile| {
        std::fs::metadata(partial.join(&file.name)).is_ok_and(|about| about.len() == file.bytes)
    };
    if let Some(missing) = files.iter().find(|file| !there(file)) {
        return Err(Error::failed("another rank's file is not on rank 0's disk")
            .got(format!("no {} of {} bytes in {}", missing.name, missing.bytes, partial.display()))
            .allowed("the files of all ranks in one folder")
            .hint("set --out to a folder that all machines share"));
    }
    let manifest =
        serde_json::to_string_pretty(&Manifest::new(step, owner, files, scales)).expect("plain values");
    for (name, text) in [(MANIFEST, manifest.as_str()), (MARKER, &hex(&Sha256::digest(&manifest)))] {
        let path = partial.join(name);
        std::fs::write(&path, text).map_err(writing(&path))?;
        sync(&path)?;
    }
    sync(partial)?;
    let path = folder.join(name(step));
    std::fs::rename(partial, &path).map_err(writing(&path))?;
    sync(folder)
}

/// Length and SHA-256 of a file.
fn digest(path: &Path) -> std::io::Result<(u64, String)> {
    let mut hash = Sha256::new();
    let bytes = std::io::copy(&mut File::open(path)?, &mut hash)?;
    Ok((bytes, hex(&hash.finalize())))
}

/// The steps of the complete checkpoints, in ascending order.
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

/// The step of a checkpoint, from the name of its folder.
pub fn step_of(checkpoint: &Path) -> Option<u64> {
    checkpoint.components().next_back()?.as_os_str().to_str()?.strip_prefix("step-")?.parse().ok()
}

/// The step of a run's newest checkpoint, if there is one.
pub fn newest(run: &Path) -> Option<u64> {
    steps(&run.join(FOLDER)).pop()
}

/// Removes the checkpoints that need not be kept. Each folder is renamed before its files are removed, so that a folder
/// with a checkpoint's name is always complete.
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
pub struct FoundCheckpoint {
    /// The folder of the checkpoint's run.
    pub run: PathBuf,
    /// The contents of the checkpoint's `checkpoint.json`.
    pub manifest: Manifest,
    path: PathBuf,
    files: Vec<RankFile>,
    /// Rank 0 holds the run's lock for all ranks, so no other process continues the run or removes this checkpoint.
    _lock: Option<Lock>,
}

impl FoundCheckpoint {
    /// Finds and checks the checkpoint at `path`, or the newest one if `path` is a run's folder. Each rank checks its
    /// share of the files. On rank 0 the result holds the run's lock for all ranks.
    ///
    /// # Errors
    /// When no checkpoint exists, or the checkpoint is damaged or from a later version, or the run is locked.
    pub fn at(path: &Path, rank: Rank) -> Result<Self> {
        let take = |run: &Path| rank.is_first().then(|| Lock::run(run)).transpose();
        crate::check_there(path)?;
        if path.join(MANIFEST).exists() || path.join(STATE).exists() {
            let run = path.parent().and_then(Path::parent);
            let run = run.filter(|run| run.join("config.toml").exists()).ok_or_else(|| {
                Error::new("the checkpoint is not in the folder of a run")
                    .got(path.display())
                    .allowed(format!("RUN/{FOLDER}/{}", name(250)))
                    .hint("a checkpoint needs RUN/config.toml: copy the run as a whole")
            })?;
            return Self::checked(take(run)?, run.to_owned(), path.to_owned(), rank);
        }
        let folder = path.join(FOLDER);
        let lock = if folder.is_dir() { Some(take(path)?) } else { None };
        let found = lock.and_then(|lock| Some((lock, steps(&folder).pop()?)));
        let (lock, step) = found.ok_or_else(|| {
            Error::new("no checkpoint to resume from")
                .got(path.display())
                .allowed(format!("a run's folder that contains `{FOLDER}`, or one checkpoint folder"))
                .hint(
                    "a run writes checkpoints every --checkpoint-every steps, at its end, and when it is interrupted; \
                     without a checkpoint, repeat the run's command with --name NAME --resume auto",
                )
        })?;
        Self::checked(lock, path.to_owned(), folder.join(name(step)), rank)
    }

    fn checked(lock: Option<Lock>, run: PathBuf, path: PathBuf, rank: Rank) -> Result<Self> {
        let (manifest, files) = verified(&run, &path, rank)?;
        Ok(Self { run, manifest, path, files, _lock: lock })
    }

    /// Checks that the run has no checkpoints newer than this one. A resumed run would have to overwrite them.
    ///
    /// # Errors
    /// When there are newer checkpoints.
    pub fn check_newest(&self) -> Result<()> {
        let newer: Vec<u64> =
            steps(&self.run.join(FOLDER)).into_iter().filter(|&step| step > self.manifest.step).collect();
        let Some(first) = newer.first() else { return Ok(()) };
        Err(Error::new("the run has newer checkpoints than the one to resume")
            .got(format!("{} newer in {}, beginning with {}", newer.len(), self.run.display(), name(*first)))
            .allowed("the newest checkpoint: no checkpoint is ever overwritten")
            .hint("move newer checkpoints away, or begin a new run from this checkpoint: --new-name NAME"))
    }

    /// The parameters, with this rank's shard of the moments.
    ///
    /// # Errors
    /// When the checkpoint belongs to another model.
    pub fn restore(&self, config: &Config, device: &Device, ranks: &Ranks) -> Result<Parameters> {
        let state = State::open(paths(&self.path, self.files.clone()))?;
        let parameters = Parameters::restore(
            config.model.parameter_specs(),
            &state,
            device,
            config.device.dtype(),
            Some(config.training(ranks)),
        )?;
        let scales = parameters.restore_scales(&config.model, &self.manifest.scales);
        scales.map_err(during("cannot restore the scales of FP8"))?;
        Ok(parameters)
    }
}

fn paths(checkpoint: &Path, files: Vec<RankFile>) -> Vec<(PathBuf, Parts)> {
    files.into_iter().map(|file| (checkpoint.join(&file.name), file.parts)).collect()
}

/// Whether a folder is a checkpoint.
pub fn is_one(folder: &Path) -> bool {
    folder.join(MANIFEST).is_file() || folder.join(STATE).is_file()
}

/// Checks a checkpoint, and reads its description and state. Does not resume its run.
///
/// # Errors
/// When the folder is not a complete checkpoint.
pub fn open(checkpoint: &Path) -> Result<(Manifest, State)> {
    let run = checkpoint.parent().and_then(Path::parent).unwrap_or(checkpoint);
    let (manifest, files) = verified(run, checkpoint, Rank::ALONE)?;
    Ok((manifest, State::open(paths(checkpoint, files))?))
}
