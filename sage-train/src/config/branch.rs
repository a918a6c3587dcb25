//! A run that continues from another run's checkpoint with other settings.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::Identity;

/// Where a run was branched off another one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Branch {
    /// Folder of the other run.
    pub run: String,
    /// Steps that the other run had taken.
    pub step: u64,
    /// The settings that changed, as the other run had them. A setting that it did not have is not in it.
    pub before: BTreeMap<String, String>,
}

impl Branch {
    /// The branch of a run with settings `before`, to settings `after`.
    pub fn new(run: String, step: u64, before: &Identity, after: &Identity) -> Self {
        let changed = before.iter().filter(|(key, value)| after.get(*key) != Some(*value));
        Self { run, step, before: changed.map(|(key, value)| (key.clone(), value.clone())).collect() }
    }
}

/// Without the folder: runs of several seeds are branched in the same way.
impl std::fmt::Display for Branch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let before: Vec<String> = self.before.iter().map(|(key, value)| format!("{key} {value}")).collect();
        write!(f, "{} until step {}", before.join(", "), self.step)
    }
}
