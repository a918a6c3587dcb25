//! The provenance of a run: command, machine, time and data of each start.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use candle_sage::Result;
use serde::{Deserialize, Serialize};

use crate::config::{Branch, Config};
use crate::data::Dataset;
use crate::device::Hardware;
use crate::ranks::Mesh;
use crate::runs::{STARTS, optional};

/// One start of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Start {
    /// The command line.
    pub command: Vec<String>,
    /// Version of this program.
    pub version: String,
    /// The commit that this program was built from, if it is known.
    pub commit: Option<String>,
    /// Name of the machine.
    pub host: String,
    /// The device that computes, as text.
    pub hardware: String,
    /// Time of the start, seconds since 1970.
    pub time: u64,
    /// Steps that were done before this start.
    pub step: u64,
    /// The training data, as text.
    pub data: String,
    /// [`Dataset::fingerprint`].
    pub data_fingerprint: String,
    /// [`crate::data::Tokenizer::hash`].
    #[serde(default)]
    pub tokenizer: Option<String>,
    /// Unigram entropy of the data, nats per token.
    pub unigram_entropy: f64,
    /// Parameters of the model.
    pub parameters: u64,
    /// Number of ranks that train the model.
    #[serde(default = "one")]
    pub ranks: usize,
    /// Number of ranks that share each sequence.
    #[serde(default = "one")]
    pub context_parallel: usize,
    /// Number of sequences in a micro-batch; `None` if an earlier version did not record it.
    #[serde(default)]
    pub micro_batch: Option<usize>,
    /// The hash of the run's initial weights, if they are from another model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initial_weights: Option<String>,
    /// The run that this run was branched off, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub branch: Option<Branch>,
}

/// The point at which the run in `folder` was branched off another run; `None` if it was not branched off.
///
/// # Errors
/// When the run's `starts.json` cannot be read.
pub fn branch(folder: &Path) -> Result<Option<Branch>> {
    Ok(branch_of(&optional::<Vec<Start>>(&folder.join(STARTS))?.unwrap_or_default()))
}

/// The last branch in `starts`. A branched run's starts begin with a copy of the original run's starts, which may
/// contain earlier branches.
pub(super) fn branch_of(starts: &[Start]) -> Option<Branch> {
    starts.iter().rev().find_map(|start| start.branch.clone())
}

/// The hash of the run's initial weights, if they are from another model.
pub fn initial_weights(starts: &[Start]) -> Option<&String> {
    starts.first()?.initial_weights.as_ref()
}

fn one() -> usize {
    1
}

impl Start {
    /// The record of this process, whose training starts at step `step`.
    pub(crate) fn now(
        config: &Config,
        data: &Dataset,
        data_fingerprint: String,
        hardware: &Hardware,
        (step, mesh): (u64, Mesh),
    ) -> Self {
        let time = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            command: std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect(),
            version: env!("CARGO_PKG_VERSION").into(),
            commit: option_env!("SAGE_TRAIN_COMMIT").map(Into::into),
            host: gethostname::gethostname().to_string_lossy().into_owned(),
            hardware: hardware.to_string(),
            time: time.map_or(0, |time| time.as_secs()),
            step,
            data: data.summary.clone(),
            data_fingerprint,
            tokenizer: Some(data.tokenizer.hash().into()),
            unigram_entropy: data.unigram_entropy,
            parameters: config.model.parameters(),
            ranks: mesh.rank().of,
            context_parallel: mesh.context,
            micro_batch: Some(config.micro_batch),
            initial_weights: None,
            branch: config.branch.clone(),
        }
    }

    /// Returns a message if a resumed run now computes sums, such as gradients, in another order than after its earlier
    /// start `before`. The run continues with the same sequences, but its losses are not bit-identical to those of an
    /// uninterrupted run.
    pub(crate) fn sums_otherwise(&self, before: &Self) -> Option<String> {
        let numbers = |start: &Self| [start.ranks, start.context_parallel, start.micro_batch.unwrap_or(0)];
        let names = ["ranks", "--context-parallel", "--micro-batch"];
        let changed = names.iter().zip(numbers(before).into_iter().zip(numbers(self)));
        let changed: Vec<String> = changed
            .filter(|(_, (before, now))| before != now && *before > 0)
            .map(|(name, (before, now))| format!("{name} {now}, {before} before"))
            .collect();
        let differences = changed.join("; ");
        (!differences.is_empty())
            .then(|| format!("{differences}: the same sequences, but sums in another order from here on"))
    }
}
