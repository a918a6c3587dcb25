//! How far each run of a sweep is, as the folder says it.

use std::path::{Path, PathBuf};

use candle_sage::Result;

use super::{PLAN, Planned, Sweep, folders};
use crate::lock::Lock;
use crate::runs::{Ending, Run, Status};
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

impl Sweep {
    /// How far each run is, in the order of the plan.
    pub fn states(&self) -> Vec<State> {
        self.places().into_iter().map(|place| place.state).collect()
    }

    /// The folders of the runs that exist, in the order of the plan.
    pub fn run_folders(&self) -> Vec<PathBuf> {
        self.places().into_iter().map(|place| place.folder).filter(|folder| Run::is(folder)).collect()
    }

    pub(super) fn places(&self) -> Vec<Place> {
        let there = folders(&self.folder);
        let place = |run: &Planned| {
            // By what it computes: its name says what differed when it was begun.
            let known = there.iter().find(|(_, identity)| *identity == run.identity);
            let folder = known.map_or_else(|| self.folder.join(&run.name), |(folder, _)| folder.clone());
            // A folder of that name may be another's: of an earlier sweep with other differences.
            let taken = known.is_none() && there.iter().any(|(other, _)| *other == folder);
            let folder = if taken { self.free_folder(&run.name) } else { folder };
            let state = self.state(&run.name, &folder);
            let steps = match state {
                State::Waiting => 0,
                _ => Run::read(&folder).map_or(0, |run| run.steps()),
            };
            Place { folder, state, steps }
        };
        self.runs.iter().map(place).collect()
    }

    fn free_folder(&self, name: &str) -> PathBuf {
        let numbered = (2..).map(|n| self.folder.join(format!("{name}-{n}")));
        numbered.into_iter().find(|folder| !folder.exists()).expect("a number that is free")
    }

    fn state(&self, name: &str, folder: &Path) -> State {
        if !folder.is_dir() {
            return if self.crash_file(name).exists() { State::Crashed } else { State::Waiting };
        }
        if Lock::run(folder).is_err() {
            return State::Elsewhere;
        }
        let run = Run::read(folder);
        match run.as_ref().ok().and_then(Run::status) {
            Some(Status::Interrupted) | None => {}
            Some(status) => return State::Ended(status),
        }
        if self.crash_file(name).exists() {
            return State::Crashed;
        }
        if checkpoint::newest(folder).is_some() { State::CutOff } else { State::Waiting }
    }

    pub(super) fn crash_file(&self, name: &str) -> PathBuf {
        self.folder.join(PLAN).join(format!("{name}.crash.json"))
    }

    /// Why the process of a run ended without a word.
    pub fn crash(&self, name: &str) -> Option<Ending> {
        serde_json::from_slice(&std::fs::read(self.crash_file(name)).ok()?).ok()
    }
}

/// Removes what a run left that never came to a checkpoint: what it measured it will measure again.
pub(super) fn clear(folder: &Path) -> Result<()> {
    if !folder.exists() {
        return Ok(());
    }
    let lock = Lock::run(folder)?;
    std::fs::remove_dir_all(folder).map_err(writing(folder))?;
    drop(lock);
    Ok(())
}
