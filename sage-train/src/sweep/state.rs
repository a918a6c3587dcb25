//! How far each run of a sweep is, as the folder says it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use candle_sage::Result;

use super::{Planned, Sweep};
use crate::config::{Config, Identity, PLAN};
use crate::lock::Lock;
use crate::runs::{CONFIG, Ending, METRICS, Run, Status, ended_since};
use crate::train::checkpoint;
use crate::writing;

/// How far a run is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// It has not begun, or left nothing that could be resumed.
    Waiting,
    /// Its folder has a checkpoint to go on from.
    CutOff,
    /// Another process works in its folder.
    Elsewhere,
    /// It has ended by itself.
    Ended(Status),
    /// Its process ended without a word.
    Crashed,
}

impl State {
    /// Whether it would run now.
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
            Self::CutOff => f.write_str("cut off"),
            Self::Elsewhere => f.write_str("running"),
            Self::Ended(status) => status.fmt(f),
            Self::Crashed => f.write_str("crashed"),
        }
    }
}

/// The folder and the state of a run.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub(super) folder: PathBuf,
    pub(super) state: State,
    /// Steps that are done.
    pub(super) steps: u64,
}

impl Place {
    /// The name of its folder, and of what is said about it in the plan.
    pub(super) fn name(&self) -> String {
        self.folder.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }
}

/// A folder in a sweep's, with what it computes, where that can be known.
type Taken = (PathBuf, Option<Identity>);

impl Sweep {
    /// How far each run is, in the order of the plan.
    pub fn states(&self) -> Vec<State> {
        self.places().into_iter().map(|place| place.state).collect()
    }

    /// The folders of the runs that exist, in the order of the plan.
    pub fn run_folders(&self) -> Vec<PathBuf> {
        self.folders().into_iter().filter(|folder| Run::is(folder)).collect()
    }

    pub(super) fn places(&self) -> Vec<Place> {
        let folders = self.folders();
        self.runs.iter().zip(folders).map(|(run, folder)| self.place(run, folder)).collect()
    }

    /// How far a run in its folder is, now.
    pub(super) fn place(&self, run: &Planned, folder: PathBuf) -> Place {
        let read = Run::read(&folder).ok();
        let steps = read.as_ref().map_or(0, Run::steps);
        let state = self.state(run, &folder, read);
        Place { steps: if state == State::Waiting { 0 } else { steps }, folder, state }
    }

    /// The folder of each run: the one that computes the same, whatever it is called, for its name says what differed when
    /// it was begun; or else one that nobody has.
    fn folders(&self) -> Vec<PathBuf> {
        let there = self.taken();
        let of = |run: &Planned| there.iter().find(|(_, identity)| identity.as_ref() == Some(&run.identity));
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

    /// Every folder in the sweep's. One that a run was about to begin in, and left with nothing measured, is that run's.
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

    fn state(&self, run: &Planned, folder: &Path, read: Option<Run>) -> State {
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        let ended = |status: Option<Status>| status.filter(|status| *status != Status::Interrupted);
        let said = read.as_ref().and_then(|run| run.ending.as_ref()).map(|ending| ending.status);
        if let Some(status) = ended(said) {
            return State::Ended(status);
        }
        if Lock::is_held(folder) {
            return State::Elsewhere;
        }
        // A crash that left nothing else may be that of an earlier plan, with other settings under this name.
        let asked = || identity_in(&self.asked_file(&name)).as_ref() == Some(&run.identity);
        if self.crash_file(&name).exists() && !ended_since(&self.folder, &name) && asked() {
            return State::Crashed;
        }
        // Of an earlier version, which did not say how it ended.
        if let Some(status) = ended(read.as_ref().and_then(Run::status)) {
            return State::Ended(status);
        }
        if checkpoint::newest(folder).is_some() { State::CutOff } else { State::Waiting }
    }

    /// What the run in the folder of this name was asked to be.
    pub(super) fn asked_file(&self, name: &str) -> PathBuf {
        self.folder.join(PLAN).join(format!("{name}.toml"))
    }

    pub(super) fn crash_file(&self, name: &str) -> PathBuf {
        self.folder.join(PLAN).join(format!("{name}.crash.json"))
    }

    /// Why the process of the run in the folder of this name ended without a word.
    pub fn crash(&self, name: &str) -> Option<Ending> {
        serde_json::from_slice(&std::fs::read(self.crash_file(name)).ok()?).ok()
    }

    /// Makes room for a run that begins again: what an earlier start left, which cannot be resumed, goes beside the plan.
    /// Not where another process works there: whether there is room.
    pub(super) fn set_aside(&self, place: &Place) -> Result<bool> {
        let folder = &place.folder;
        if !folder.exists() {
            return Ok(true);
        }
        let Ok(lock) = Lock::run(folder) else { return Ok(false) };
        let numbered = (1..).map(|n| self.folder.join(PLAN).join(format!("{}.attempt-{n}", place.name())));
        let aside = numbered.into_iter().find(|path| !path.exists()).expect("a number that is free");
        // Windows moves no folder in which a file is open.
        let lock = (!cfg!(windows)).then_some(lock);
        std::fs::rename(folder, &aside).map_err(writing(folder))?;
        drop(lock);
        Ok(true)
    }
}

/// What the settings in a file compute.
fn identity_in(path: &Path) -> Option<Identity> {
    Config::read_settings(path).and_then(Config::resolve).ok().map(|config| config.identity())
}
