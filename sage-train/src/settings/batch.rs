//! The settings of table `[batch]`.

use clap::Args;
use serde::{Deserialize, Serialize};

use super::layer::layer;
use crate::quantity::Quantity;

/// Table `[batch]`: tokens of a step and of the whole run.
#[derive(Debug, Clone, Default, PartialEq, Args, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct BatchSettings {
    /// Tokens of an optimizer step, e.g. 256k = 262,144
    #[arg(long, value_name = "N")]
    pub tokens_per_step: Option<Quantity>,
    /// Sequences in one forward and backward of a GPU
    #[arg(long, value_name = "N")]
    pub micro_batch: Option<usize>,
    /// Optimizer steps
    #[arg(long, value_name = "N", conflicts_with = "tokens")]
    pub steps: Option<Quantity>,
    /// Tokens of the whole run, instead of --steps
    #[arg(long, value_name = "N")]
    pub tokens: Option<Quantity>,
}

layer! {
    BatchSettings:
    tokens_per_step,
    micro_batch [Resumable],
    steps [Resumable],
    // A run's identity contains the number of steps instead of `tokens`.
    tokens [NotIdentity Resumable],
}
