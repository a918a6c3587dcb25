//! The state of each run of a sweep, read from the sweep's folder.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use candle_sage::{Error, Result};

use super::{PlannedRun, Sweep};
use crate::config::{Config, Identity, PLAN};
use crate::lock::Lock;
use crate::runs::{
    CONFIG, METRICS, Run, RunEnd, STARTS, Start, Status, branch, ended_since, ending, initial_weights,
    optional,
};
use crate::{checkpoint, initial, writing};

/// The state of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// The run has not started, or has no checkpoint to resume from.
    Waiting,
    /// The run was interrupted, and its folder has a checkpoint to resume from.
    CutOff,
    /// Another process holds the lock of the run's folder.
    Elsewhere,
    /// The run recorded its end, with any status except interrupted.
    Ended(Status),
    /// The run's process ended without recording its end.
    Crashed,
}

impl State {
    /// Whether the sweep would start the run now. `retry` also starts runs that failed or crashed.
    pub fn is_open(&self, retry: bool) -> bool {
        match self {
            Self::Waiting | Self::CutOff => true,
            Self::Ended(Status::Failed) | Self::Crashed => retry,
            Self::Elsewhere | Self::Ended(_) => false,
        }
    }
}

impl std::fmt::Display for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Waiting => f.write_str("waiting"),
            Self::CutOff => f.write_str("interrupted"),
            Self::Elsewhere => f.write_str("running"),
            Self::Ended(status) => status.fmt(f),
            Self::Crashed => f.write_str("crashed"),
        }
    }
}

/// The folder and the state of a run.
#[derive(Debug, Clone)]
pub(super) struct RunFolder {
    pub(super) folder: PathBuf,
    pub(super) state: State,
    /// Number of steps in the metrics.
    pub(super) steps: u64,
}

impl RunFolder {
    /// The name of the folder.
    pub(super) fn name(&self) -> String {
        Self::name_of(&self.folder)
    }

    fn name_of(folder: &Path) -> String {
        folder.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }
}

/// A folder inside the sweep's folder, and the identity of its run, if the identity is known.
type Taken = (PathBuf, Option<Identity>);

impl Sweep {
    /// The state of each run, in the order of the plan.
    pub fn states(&self) -> Vec<State> {
        self.places().into_iter().map(|place| place.state).collect()
    }

    /// Checks that the weights of `--init-from` have not changed since runs of this sweep started from them, for
    /// example by further training.
    ///
    /// # Errors
    /// When the weights differ.
    pub fn check_weights(&self) -> Result<()> {
        let mut now: BTreeMap<PathBuf, String> = BTreeMap::new();
        for (run, folder) in self.runs.iter().zip(self.folders()) {
            let Some(from) = &run.config.init_from else { continue };
            let Ok(Some(starts)) = optional::<Vec<Start>>(&folder.join(STARTS)) else { continue };
            let Some(began) = initial_weights(&starts) else { continue };
            if !now.contains_key(from) {
                // If the weights in `from` cannot be read, that is not an error: a finished sweep does not need them.
                let Ok(hash) = initial::fingerprint(from) else { continue };
                now.insert(from.clone(), hash);
            }
            if began != &now[from] {
                return Err(Error::new("earlier runs of this sweep started from other weights")
                    .got(format!("{}: {} has changed", folder.display(), from.display()))
                    .allowed("the weights that the sweep started from")
                    .hint(
                        "restore the weights, or start a new sweep with --name; weights in \
                         RUN/checkpoints/step-N do not change",
                    ));
            }
        }
        Ok(())
    }

    /// The folders of the plan's runs that have started, in the order of the plan.
    pub fn run_folders(&self) -> Vec<PathBuf> {
        self.folders().into_iter().filter(|folder| Run::is(folder)).collect()
    }

    /// The names of the runs in the sweep's folder that its plan does not list, such as runs of an earlier plan.
    pub fn runs_of_other_plans(&self) -> Vec<String> {
        let planned = self.folders();
        let others = self.taken().into_iter().map(|(folder, _)| folder);
        let others = others.filter(|folder| Run::is(folder) && !planned.contains(folder));
        others.map(|folder| RunFolder::name_of(&folder)).collect()
    }

    pub(super) fn places(&self) -> Vec<RunFolder> {
        let folders = self.folders();
        self.runs.iter().zip(folders).map(|(run, folder)| self.place(run, folder)).collect()
    }

    /// Reads the state of a run in `folder`.
    pub(super) fn place(&self, run: &PlannedRun, folder: PathBuf) -> RunFolder {
        let read = Run::read(&folder).ok();
        let steps = read.as_ref().map_or(0, Run::steps);
        let state = self.state(run, &folder, read);
        RunFolder { steps: if state == State::Waiting { 0 } else { steps }, folder, state }
    }

    /// The folder of each planned run: an existing folder with a run of this identity, else an unused path. Two plans
    /// may give the same run different names, so a folder with another name counts too. If several folders have a run
    /// of this identity, such as copies of one run, a finished run is preferred, then the planned name.
    fn folders(&self) -> Vec<PathBuf> {
        let there = self.taken();
        let of = |run: &PlannedRun| {
            let those = there.iter().filter(|(_, identity)| identity.as_ref() == Some(&run.identity));
            those.min_by_key(|(folder, _)| {
                let end = ending(folder).ok().flatten();
                let is_finished = end.is_some_and(|end| end.status == Status::Finished);
                (!is_finished, RunFolder::name_of(folder) != run.name)
            })
        };
        let mut folders: Vec<Option<PathBuf>> =
            self.runs.iter().map(|run| of(run).map(|(folder, _)| folder.clone())).collect();
        let mut used: BTreeSet<PathBuf> = there.iter().map(|(folder, _)| folder.clone()).collect();
        for (run, folder) in self.runs.iter().zip(&mut folders).filter(|(_, folder)| folder.is_none()) {
            let numbered = (2..).map(|n| self.folder.join(format!("{}-{n}", run.name)));
            let mut candidates = std::iter::once(self.folder.join(&run.name)).chain(numbered);
            let free = candidates.find(|folder| !used.contains(folder)).expect("a number that is free");
            used.insert(free.clone());
            *folder = Some(free);
        }
        folders.into_iter().flatten().collect()
    }

    /// Every folder inside the sweep's folder. If a run ended before it wrote settings or metrics, its identity is read
    /// from `SWEEP/plan/NAME.toml`.
    fn taken(&self) -> Vec<Taken> {
        let Ok(entries) = std::fs::read_dir(&self.folder) else { return Vec::new() };
        let mut found: Vec<Taken> = entries
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| path.is_dir())
            .map(|path| {
                let config = path.join(CONFIG);
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                let empty = || std::fs::metadata(path.join(METRICS)).map_or(true, |about| about.len() == 0);
                let identity = match config.exists() {
                    true => identity_in(&config),
                    false => {
                        Some(self.asked_file(&name)).filter(|_| empty()).and_then(|path| identity_in(&path))
                    }
                };
                (path, identity)
            })
            .collect();
        found.sort();
        found
    }

    fn state(&self, run: &PlannedRun, folder: &Path, read: Option<Run>) -> State {
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        let ended = |status: Option<Status>| status.filter(|status| *status != Status::Interrupted);
        // `Run::read` changes the status `Finished` to `Diverged` if the run has diverged. For a run that cannot be
        // read, the status in `ending.json` is used unchanged.
        let ending_of_run =
            read.as_ref().map_or_else(|| ending(folder).ok().flatten(), |run| run.ending.clone());
        if let Some(status) = ended(ending_of_run.map(|ending| ending.status)) {
            return State::Ended(status);
        }
        if Lock::is_held(folder) {
            return State::Elsewhere;
        }
        // A crash record may belong to an earlier plan, in which this name meant other settings.
        let asked = || identity_in(&self.asked_file(&name)).as_ref() == Some(&run.identity);
        if self.crash_file(&name).exists() && !ended_since(&self.folder, &name) && asked() {
            return State::Crashed;
        }
        // Older versions of sage-train did not write `ending.json`.
        if let Some(status) = ended(read.as_ref().and_then(Run::status)) {
            return State::Ended(status);
        }
        if checkpoint::newest(folder).is_some() { State::CutOff } else { State::Waiting }
    }

    /// The file in the plan folder that holds the settings of the run in the folder `name`. It is written at each start
    /// of the run.
    pub(super) fn asked_file(&self, name: &str) -> PathBuf {
        self.folder.join(PLAN).join(format!("{name}.toml"))
    }

    pub(super) fn crash_file(&self, name: &str) -> PathBuf {
        self.folder.join(PLAN).join(format!("{name}.crash.json"))
    }

    /// The crash record of the run in the folder `name`: why its process ended without an `ending.json`.
    pub fn crash(&self, name: &str) -> Option<RunEnd> {
        serde_json::from_slice(&std::fs::read(self.crash_file(name)).ok()?).ok()
    }

    /// Moves the folder of a run without a checkpoint into the plan folder, before the run starts again. Returns false,
    /// and moves nothing, if another process has locked the run's folder.
    pub(super) fn set_aside(&self, place: &RunFolder) -> Result<bool> {
        let folder = &place.folder;
        if !folder.exists() {
            return Ok(true);
        }
        let Ok(lock) = Lock::run(folder) else { return Ok(false) };
        let numbered = (1..).map(|n| self.folder.join(PLAN).join(format!("{}.attempt-{n}", place.name())));
        let aside = numbered.into_iter().find(|path| !path.exists()).expect("a number that is free");
        // Windows does not rename a folder with an open file, so the lock is released first on Windows.
        let lock = (!cfg!(windows)).then_some(lock);
        std::fs::rename(folder, &aside).map_err(writing(folder))?;
        drop(lock);
        Ok(true)
    }
}

/// The identity of the run with the settings in `path`. `None` if a resume changed the identity, because no planned run
/// changes its settings during training.
fn identity_in(path: &Path) -> Option<Identity> {
    let of = |settings: Result<_>| -> Option<Identity> {
        let config = settings.and_then(Config::resolve).ok()?;
        let branch = branch(path.parent()?).ok()?;
        Some(Config { branch, ..config }.identity())
    };
    let last = of(Config::read_last_settings(path));
    last.filter(|last| of(Config::read_settings(path)).as_ref() == Some(last))
}
