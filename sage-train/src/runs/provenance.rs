//! Where and when a run ran, and on what.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::data::Dataset;
use crate::device::Hardware;
use crate::ranks::Rank;

/// One start of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Start {
    /// What was typed.
    pub command: Vec<String>,
    /// Version of this program.
    pub version: String,
    /// The commit that it was built from, where that was known.
    pub commit: Option<String>,
    /// Name of the machine.
    pub host: String,
    /// What computes.
    pub hardware: String,
    /// Seconds since 1970.
    pub time: u64,
    /// Steps that were done before.
    pub step: u64,
    /// What it learns from, for people.
    pub data: String,
    /// [`Dataset::fingerprint`].
    pub data_fingerprint: String,
    /// [`crate::data::Tokenizer::hash`].
    #[serde(default)]
    pub tokenizer: Option<String>,
    /// Entropy of single tokens of the data, nats.
    pub unigram_entropy: f64,
    /// Parameters of the model.
    pub parameters: u64,
    /// Processes that trained it together.
    #[serde(default = "one")]
    pub ranks: usize,
}

fn one() -> usize {
    1
}

impl Start {
    /// This process, about to train from `step` on.
    pub(crate) fn now(
        config: &Config,
        data: &Dataset,
        data_fingerprint: String,
        hardware: &Hardware,
        (step, rank): (u64, Rank),
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
            ranks: rank.of,
        }
    }
}
