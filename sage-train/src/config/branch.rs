//! A run that continues from another run's checkpoint with other settings.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::Identity;

/// The point at which a new run was branched off the original run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Branch {
    /// Folder of the original run.
    pub run: String,
    /// Steps of the original run before the branch.
    pub step: u64,
    /// The original run's values of the settings that the new run changed. Settings that only the new run has are
    /// omitted.
    pub before: BTreeMap<String, String>,
}

impl Branch {
    /// A branch from a run with identity `before` to a run with identity `after`.
    pub fn new(run: String, step: u64, before: &Identity, after: &Identity) -> Self {
        let changed = before.iter().filter(|(key, value)| after.get(*key) != Some(*value));
        Self { run, step, before: changed.map(|(key, value)| (key.clone(), value.clone())).collect() }
    }
}

/// The original run's folder is omitted, so that the text is the same for all seeds.
impl std::fmt::Display for Branch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let before: Vec<String> = self.before.iter().map(|(key, value)| format!("{key} {value}")).collect();
        match before.is_empty() {
            true => write!(f, "the same settings until step {}", self.step),
            false => write!(f, "{} until step {}", before.join(", "), self.step),
        }
    }
}
