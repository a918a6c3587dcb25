//! The settings of table `[run]`, and the presets.

use std::path::PathBuf;

use candle_sage::{Error, Result};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use super::layer::layer;
use super::{SchemeSetting, Switch};
use crate::device::DeviceKind;
use crate::model::Recompute;
use crate::quantity::Quantity;

/// A named set of defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Preset {
    /// 1M parameters, context 256: trains in a few minutes on two cores
    Tiny,
    /// 12M parameters, context 512: trains in minutes to hours on a CPU
    Mini,
    /// 43M parameters, context 1024: 12 layers, width 512, 8 heads of 64
    #[value(name = "40m")]
    #[serde(rename = "40m")]
    Small40m,
    /// 124M parameters as in GPT-2 small, context 1024: 12 layers, width 768, 12 heads of 64
    #[value(name = "124m")]
    #[serde(rename = "124m")]
    Small124m,
    /// The SageBwd paper's Llama: 20 layers, width 1024, 16 heads of 64, context 4096
    #[value(name = "325m")]
    #[serde(rename = "325m")]
    Paper325m,
    /// 1.3B parameters, context 4096: 24 layers, width 2048, 16 heads of 128
    #[value(name = "1.3b")]
    #[serde(rename = "1.3b")]
    Large1300m,
}

impl Preset {
    /// The name in flags and files.
    pub fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// Table `[run]`: the preset, the machine, seeds, folders, and what a run measures and saves.
#[derive(Debug, Clone, Default, PartialEq, Args, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct RunSettings {
    /// A named set of defaults [default: tiny]
    #[arg(long, value_enum)]
    pub preset: Option<Preset>,
    /// Where to train [default: cuda if this build has it]
    #[arg(long, value_enum)]
    pub device: Option<DeviceKind>,
    /// Activations that are not stored, but recomputed in the backward [default: none]
    #[arg(long, value_enum)]
    pub recompute: Option<Recompute>,
    /// Make results bitwise reproducible on a GPU (on a CPU they always are); attention's backward is then slower
    /// [default: off]
    #[arg(long, value_enum)]
    pub deterministic: Option<Switch>,
    /// Seed of the weights, the data order, the built-in corpus and the sample text. 1,2,3 or 1-3 starts a sweep: one
    /// run for each seed. `sage-train sweep FILE --seed 1-5` replaces the `seed` of FILE; without --seed, the seeds of
    /// FILE are used [default: 0]
    #[arg(long, value_name = "N", value_parser = seed)]
    pub seed: Option<u64>,
    /// Seed for the initial weights only [default: --seed]
    #[arg(long, value_name = "N", value_parser = seed)]
    pub weights_seed: Option<u64>,
    /// Seed for the data order only [default: --seed]
    #[arg(long, value_name = "N", value_parser = seed)]
    pub order_seed: Option<u64>,
    /// Seed for the built-in corpus only [default: --seed]
    #[arg(long, value_name = "N", value_parser = seed)]
    pub corpus_seed: Option<u64>,
    /// Folder in which the run's folder is created [default: runs]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Name of the run's or sweep's folder [default: preset, attention and a number, as in tiny-sagebwd-001; for a list
    /// of values, as in tiny-sweep-001; for `sweep FILE`, the file's name]
    #[arg(long)]
    pub name: Option<String>,
    /// Steps between validations; 0 validates only at the end. In a sweep, the default is a twentieth of the run's
    /// steps, not the preset's default
    #[arg(long, value_name = "N")]
    pub eval_every: Option<Quantity>,
    /// Tokens of each validation
    #[arg(long, value_name = "N")]
    pub eval_tokens: Option<Quantity>,
    /// In each validation, also compute the loss with this scheme (fpa, sagebwd or attn-qat): `--attn fpa --eval-attn
    /// attn-qat` shows the FP4 loss of a model that was not trained for FP4. A scheme's settings follow its name, as in
    /// `sagebwd:products=scores:key-mean=sample-64` [default: no other scheme]
    #[arg(long, value_name = "SCHEME")]
    pub eval_attn: Option<SchemeSetting>,
    /// Steps between probes, which measure the errors of low-bit attention; 0 for no probes. A probe runs on the CPU
    /// and takes some time [default: 0]
    #[arg(long, value_name = "N")]
    pub probe_every: Option<Quantity>,
    /// Steps between checkpoints, in addition to --checkpoint-minutes; 0 for no checkpoints by steps. The end of a run
    /// is always saved [default: --eval-every if it is given, otherwise the preset's eval-every]
    #[arg(long, value_name = "N")]
    pub checkpoint_every: Option<Quantity>,
    /// Minutes between checkpoints, in addition to --checkpoint-every; 0 for no checkpoints by time [default: 10]
    #[arg(long, value_name = "MINUTES")]
    pub checkpoint_minutes: Option<f64>,
    /// Number of newest checkpoints to keep [default: 2]
    #[arg(long, value_name = "N")]
    pub keep_last: Option<usize>,
    /// In addition to --keep-last, keep the checkpoints of steps N, 2N, ..; 0 for none [default: 0]
    #[arg(long, value_name = "N")]
    pub keep_every: Option<Quantity>,
    /// Tokens of sample text at the end of the run; 0 for none [default: 160; in a sweep 0]
    #[arg(long, value_name = "N")]
    pub sample_tokens: Option<usize>,
    /// Number of threads; results do not depend on it [default: all cores]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Peak speed of the device in TFLOP/s, to log the MFU [default: no MFU]
    #[arg(long, value_name = "TFLOPS")]
    pub peak_tflops: Option<f64>,
}

layer! {
    RunSettings:
    preset [NotIdentity],
    device [Resumable],
    recompute [NotIdentity Resumable Together],
    deterministic [Resumable],
    seed [NotIdentity],
    weights_seed [NotIdentity],
    order_seed [NotIdentity],
    corpus_seed [NotIdentity],
    out [NotIdentity NotList],
    name [NotIdentity NotList],
    eval_every [NotIdentity Resumable Together],
    eval_tokens [Resumable],
    eval_attn [Resumable],
    probe_every [NotIdentity Resumable Together],
    checkpoint_every [NotIdentity Resumable Together],
    checkpoint_minutes [NotIdentity Resumable],
    keep_last [NotIdentity Resumable],
    keep_every [NotIdentity Resumable],
    sample_tokens [NotIdentity Resumable],
    threads [NotIdentity Resumable],
    peak_tflops [NotIdentity Resumable],
}

/// Parses one seed. Lists and ranges are split earlier, in `cli/lists.rs`.
fn seed(text: &str) -> Result<u64> {
    text.parse().map_err(|_| {
        Error::new("not a seed")
            .got(format!("`{text}`"))
            .allowed(
                "a whole number below 2^63, a list such as 1,2,3, or a range of up to 1000 seeds such as 1-3",
            )
            .hint("a range starts with its smaller number")
    })
}
