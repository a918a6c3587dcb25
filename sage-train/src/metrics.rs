//! What is measured: a point for each step (one JSON object a line), an outcome for each run.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::settings::Attn;

/// One optimizer step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// The step, from 1.
    pub step: u64,
    /// Tokens trained on so far.
    pub tokens: u64,
    /// Mean training loss of the step, nats a token.
    pub loss: f64,
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Learning rate.
    pub lr: f64,
    /// Speed of this step.
    pub tokens_per_second: f64,
    /// Share of the machine's peak FLOP/s, where the peak is known.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub mfu: Option<f64>,
    /// Validation loss after the step, nats a token.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub val_loss: Option<f64>,
    /// The same in bits a byte of text.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub val_bits_per_byte: Option<f64>,
    /// Seconds since the start.
    pub seconds: f64,
}

/// What a run came to.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The run's folder.
    pub folder: PathBuf,
    /// How it attended.
    pub attn: Attn,
    /// Validation loss at the end, nats a token.
    pub val_loss: f64,
    /// The same in bits per byte of text.
    pub val_bits_per_byte: f64,
    /// What frequencies of single tokens reach, nats a token.
    pub unigram_entropy: f64,
    /// Training speed without validation.
    pub tokens_per_second: f64,
    /// Every step.
    pub points: Vec<Point>,
}
