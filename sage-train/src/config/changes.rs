//! Settings that were changed when a run was resumed. A run's `config.toml` keeps the initial settings. Below them,
//! each `[[changes]]` entry has the step of a resume and the settings that it changed.

use std::path::Path;

use candle_sage::{Error, Result};
use serde::Deserialize;
use toml::{Table, Value};

use super::identity::tells_runs_apart;
use super::{Config, MOST_SETTINGS, as_text, short_message};
use crate::settings::{Role, Settings, keys_with, tables};
use crate::{during, read_small};

pub(super) const LIST: &str = "changes";

/// The key of an entry's step.
const STEP: &str = "step";

/// The settings that a start of a run changed.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    /// Steps that were done before this start.
    pub step: u64,
    /// The new values of the changed settings, by key.
    pub settings: Table,
}

impl Change {
    /// The changes that a `config.toml` lists, in the order of their steps; empty for a file with only settings.
    ///
    /// # Errors
    /// When the file cannot be read, or an entry is not a change.
    pub fn read(path: &Path) -> Result<Vec<Self>> {
        let mut table: Table =
            toml::from_str(&text(path)?).map_err(|error| unusable(path, short_message(&error)))?;
        match table.remove(LIST) {
            None => Ok(Vec::new()),
            Some(Value::Array(entries)) => {
                entries.into_iter().map(|entry| Self::parse(entry, path)).collect()
            }
            Some(other) => Err(unusable(path, format!("{LIST} = {other}"))),
        }
    }

    fn parse(entry: Value, path: &Path) -> Result<Self> {
        let mut settings = match entry {
            Value::Table(settings) => settings,
            other => return Err(unusable(path, other.to_string())),
        };
        let step =
            settings.remove(STEP).and_then(|step| step.as_integer()).and_then(|step| step.try_into().ok());
        let step = step.ok_or_else(|| unusable(path, format!("a change without `{STEP}`: {settings}")))?;
        let change = Self { step, settings };
        change.over(Settings::default(), path).map(|_| change)
    }

    /// The settings `before` with these changes.
    fn over(&self, before: Settings, path: &Path) -> Result<Settings> {
        let flat = tables::flat(self.settings.clone(), &path.display().to_string())?;
        let settings = Settings::deserialize(flat).map_err(|error| unusable(path, short_message(&error)))?;
        Ok(settings.over(before))
    }

    /// The text of a run's `config.toml` after a resume from step `step` with the settings of `config`. The
    /// `[[changes]]` entries of this and later steps are removed. If the resume changed settings, an entry is added.
    ///
    /// # Errors
    /// As [`Change::read`].
    pub fn listed(path: &Path, config: &Config, step: u64) -> Result<String> {
        let mut changes = Self::read(path)?;
        changes.retain(|change| change.step < step);
        let before = Config::resolve(applied(Config::read_settings(path)?, &changes, path)?)?.saved();
        let mut settings = config.saved();
        settings.retain(|key, value| before.get(key) != Some(&*value));
        if !settings.is_empty() {
            changes.push(Self { step, settings });
        }
        let text = text(path)?;
        let begun = text.split(&format!("\n[[{LIST}]]")).next().unwrap_or_default().to_owned();
        Ok(changes.iter().fold(begun, |text, change| format!("{text}\n[[{LIST}]]\n{}", change.to_toml())))
    }

    fn to_toml(&self) -> String {
        let mut table = self.settings.clone();
        table.insert(STEP.into(), Value::Integer(self.step as i64));
        toml::to_string(&table).expect("settings are plain values")
    }
}

impl std::fmt::Display for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let settings: Vec<String> =
            self.settings.iter().map(|(key, value)| format!("{key} {}", as_text(value))).collect();
        write!(f, "{} after step {}", settings.join(", "), self.step)
    }
}

impl Config {
    /// The settings in which this plan of a run differs from the run's `config.toml`, and which a resume may change
    /// without changing the run's results: for example, how often checkpoints are saved.
    ///
    /// # Errors
    /// As [`Config::read_last_settings`].
    pub fn changed_on_resume(&self, path: &Path) -> Result<Vec<(String, String)>> {
        let (planned, last) = (self.saved(), Self::resolve(Self::read_last_settings(path)?)?.saved());
        let may = keys_with(Role::Resumable).into_iter().filter(|key| !tells_runs_apart(key));
        let changed = may.filter(|key| key != "threads" && planned.get(key) != last.get(key));
        Ok(changed.filter_map(|key| planned.get(&key).map(|value| (key.clone(), as_text(value)))).collect())
    }
}

/// Applies `changes`, in order, to a run's initial settings `begun`.
pub(super) fn applied(begun: Settings, changes: &[Change], path: &Path) -> Result<Settings> {
    changes.iter().try_fold(begun, |before, change| change.over(before, path))
}

fn text(path: &Path) -> Result<String> {
    read_small(path, MOST_SETTINGS).map_err(during(format!("cannot read the settings in {}", path.display())))
}

fn unusable(path: &Path, got: String) -> Error {
    Error::new(format!("cannot use the changes in {}", path.display()))
        .got(got)
        .allowed("[[changes]] entries with `step` and settings, as --resume writes them")
        .hint("restore the entries from a copy of the file; they record which settings each step was trained with")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantity::Quantity;

    #[test]
    fn changes_are_listed_below_the_settings_and_those_that_are_undone_are_replaced() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("config.toml");
        let config = |steps, lr| {
            Config::resolve(Settings::with(|s| {
                s.batch.steps = Some(Quantity(steps));
                s.optimizer.lr = Some(lr);
            }))
            .expect("settings")
        };
        let begun = config(8, 0.004).to_toml();
        std::fs::write(&path, &begun).expect("a file");
        let start = |step, steps, lr| {
            let text = Change::listed(&path, &config(steps, lr), step).expect("settings");
            std::fs::write(&path, &text).expect("a file");
            let now = Config::read_last_settings(&path).and_then(Config::resolve).expect("settings");
            assert_eq!((now.steps, now.settings.optimizer.lr), (steps, Some(lr)));
            let list = text.strip_prefix(&begun).expect("the settings that it began with").to_owned();
            list.replace("\n[[changes]]\n", "|").replace('\n', " ")
        };
        assert_eq!(start(4, 8, 0.004), "");
        assert_eq!(start(8, 12, 0.001), "|lr = 0.001 step = 8 steps = 12 ");
        assert_eq!(start(8, 12, 0.001), "|lr = 0.001 step = 8 steps = 12 ");
        assert_eq!(start(12, 16, 0.001), "|lr = 0.001 step = 8 steps = 12 |step = 12 steps = 16 ");
        // A second resume from step 12 replaces the entry with `step = 12`. A resume from step 4 removes all entries.
        assert_eq!(start(12, 14, 0.001), "|lr = 0.001 step = 8 steps = 12 |step = 12 steps = 14 ");
        assert_eq!(start(4, 8, 0.004), "");
        let error = |text: &str| {
            std::fs::write(&path, format!("{begun}\n{text}")).expect("a file");
            Change::read(&path).expect_err("not a change").to_string()
        };
        for text in [
            "[[changes]]\nlr = 1.0",
            "[[changes]]\nstep = -1",
            "[[changes]]\nstep = 1\nsize = 2",
            "[changes]\nstep = 1",
        ] {
            assert!(error(text).contains("hint:"), "{text}");
        }
    }
}
