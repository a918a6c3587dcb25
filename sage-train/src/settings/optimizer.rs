//! The settings of table `[optimizer]`, and the schedules of the learning rate.

use candle_sage::ops::{MuonScale, Orthogonalization};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use super::Switch;
use super::layer::{Layer, layer};
use crate::quantity::Quantity;

/// The shape of the learning rate after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    /// Half a cosine, down to --min-lr
    Cosine,
    /// Warm-up, stable, decay: constant, then a linear decay to --min-lr in the last part of the run (--decay-fraction)
    Wsd,
    /// Constant
    Constant,
}

impl Schedule {
    /// The schedule's name in `--schedule`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cosine => "cosine",
            Self::Wsd => "wsd",
            Self::Constant => "constant",
        }
    }

    /// The keys of this schedule's settings.
    pub fn own_settings(self) -> &'static [&'static str] {
        match self {
            Self::Cosine => &["min-lr"],
            Self::Wsd => &["min-lr", "decay-fraction"],
            Self::Constant => &[],
        }
    }
}

/// An optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerSetting {
    /// AdamW
    #[value(name = "adamw")]
    AdamW,
    /// Muon for the matrices of hidden layers, AdamW for everything else
    Muon,
}

/// The polynomials of Muon's orthogonalization.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OrthogonalizationSetting {
    /// Polar Express (arXiv 2505.16932): five polynomials, a different one in each iteration
    #[default]
    PolarExpress,
    /// The quintic polynomial of the original Muon, the same in all five iterations
    Quintic,
}

impl From<OrthogonalizationSetting> for Orthogonalization {
    fn from(setting: OrthogonalizationSetting) -> Self {
        match setting {
            OrthogonalizationSetting::PolarExpress => Self::PolarExpress,
            OrthogonalizationSetting::Quintic => Self::Quintic,
        }
    }
}

/// The scale of Muon's steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MuonScaleSetting {
    /// 0.2 sqrt(max(rows, columns)): steps as large as AdamW's at the same learning rate
    #[default]
    #[value(name = "adamw")]
    AdamW,
    /// sqrt(max(1, rows / columns)), as in the original Muon
    Original,
}

impl From<MuonScaleSetting> for MuonScale {
    fn from(setting: MuonScaleSetting) -> Self {
        match setting {
            MuonScaleSetting::AdamW => Self::AdamW,
            MuonScaleSetting::Original => Self::Original,
        }
    }
}

/// How Muon splits the query, key and value projections into matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MuonHeadsSetting {
    /// Each head is a matrix
    #[default]
    Apart,
    /// All query heads of a layer are one matrix, likewise all key heads and all value heads
    Together,
}

/// Table `[optimizer]`: the optimizer, the learning rate, and the loss.
#[derive(Debug, Clone, Default, PartialEq, Args, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct OptimizerSettings {
    /// Optimizer [default: adamw]
    #[arg(long, value_enum)]
    pub optimizer: Option<OptimizerSetting>,
    /// Peak learning rate; the default of the preset 325m is from the SageBwd paper
    #[arg(long, value_name = "LR")]
    pub lr: Option<f64>,
    /// Learning rate at the end, as a fraction of the peak [default: 0.1, not stated in the SageBwd paper]
    #[arg(long, value_name = "FRACTION")]
    pub min_lr: Option<f64>,
    /// Steps of linear warm-up; the preset's default is limited to a tenth of the run's steps
    #[arg(long, value_name = "N")]
    pub warmup_steps: Option<Quantity>,
    /// Schedule of the learning rate after the warm-up [default: cosine]
    #[arg(long, value_enum)]
    pub schedule: Option<Schedule>,
    /// With --schedule wsd: fraction of the run, at its end, in which the learning rate decays [default: 0.2]
    #[arg(long, value_name = "FRACTION")]
    pub decay_fraction: Option<f64>,
    /// AdamW beta1 [default: 0.9, not stated in the SageBwd paper]
    #[arg(long, value_name = "BETA")]
    pub beta1: Option<f64>,
    /// AdamW beta2 [default: 0.95, not stated in the SageBwd paper]
    #[arg(long, value_name = "BETA")]
    pub beta2: Option<f64>,
    /// AdamW epsilon [default: 1e-8, not stated in the SageBwd paper]
    #[arg(long, value_name = "EPS")]
    pub adam_eps: Option<f64>,
    /// Muon: peak learning rate of the matrices of hidden layers [default: --lr]
    #[arg(long, value_name = "LR")]
    pub muon_lr: Option<f64>,
    /// Muon: steps of linear learning-rate warm-up for the matrices of hidden layers [default: --warmup-steps]
    #[arg(long, value_name = "N")]
    pub muon_warmup_steps: Option<Quantity>,
    /// Muon: weight decay of the matrices of hidden layers [default: --weight-decay]
    #[arg(long, value_name = "DECAY")]
    pub muon_weight_decay: Option<f64>,
    /// Muon: decay of the Nesterov momentum [default: 0.95]
    #[arg(long, value_name = "BETA")]
    pub muon_momentum: Option<f64>,
    /// Muon: decay of the running mean square of each row of the orthogonalized update (0.95 in NorMuon). Each row is
    /// divided by the root of this mean square [default: rows are not divided]
    #[arg(long, value_name = "BETA")]
    pub muon_beta2: Option<f64>,
    /// Muon: polynomials of the iterations that orthogonalize a matrix's update [default: polar-express]
    #[arg(long, value_enum)]
    pub muon_orthogonalization: Option<OrthogonalizationSetting>,
    /// Muon: factor that multiplies the orthogonalized update of a matrix [default: adamw]
    #[arg(long, value_enum)]
    pub muon_scale: Option<MuonScaleSetting>,
    /// Muon: how the query, key and value projections are split into matrices [default: apart]
    #[arg(long, value_enum)]
    pub muon_heads: Option<MuonHeadsSetting>,
    /// Start with the optimizer's moments from the checkpoint of --init-from instead of zeros. They are bias-corrected
    /// when loaded, so that the new run needs no bias correction [default: off]
    #[arg(long, value_enum)]
    pub init_moments: Option<Switch>,
    /// Weight decay, applied only to matrices [default: 0.1, not stated in the SageBwd paper]
    #[arg(long, value_name = "DECAY")]
    pub weight_decay: Option<f64>,
    /// Largest norm of the gradient: larger gradients are scaled down to it; 0 for no clipping [default: 1, not stated
    /// in the SageBwd paper]
    #[arg(long, value_name = "NORM")]
    pub clip: Option<f64>,
    /// Factor of the z-loss, which keeps logits from drifting (1e-4 in PaLM). It is part of the training loss, but not
    /// of the validation loss [default: 0]
    #[arg(long, value_name = "Z")]
    pub z_loss: Option<f64>,
    /// Skip updates whose loss or gradient norm is more than Z standard deviations above the mean of the last 128
    /// steps; 0 for no skipping [default: 0]
    #[arg(long, value_name = "Z")]
    pub skip_spikes: Option<f64>,
}

impl OptimizerSetting {
    /// The name that flags and files write.
    pub fn name(self) -> &'static str {
        match self {
            Self::AdamW => "adamw",
            Self::Muon => "muon",
        }
    }

    /// The prefix of the settings that have an effect only with this optimizer.
    fn own_prefix(self) -> Option<&'static str> {
        match self {
            Self::AdamW => None,
            Self::Muon => Some("muon_"),
        }
    }
}

impl OptimizerSettings {
    /// Removes the warm-ups, which may be too long after a caller has reduced the run's number of steps.
    pub fn forget_warmups(&mut self) {
        // All fields are listed, so a new field, such as another warm-up, does not compile until it is added here.
        let Self {
            warmup_steps,
            muon_warmup_steps,
            optimizer: _,
            lr: _,
            min_lr: _,
            schedule: _,
            decay_fraction: _,
            beta1: _,
            beta2: _,
            adam_eps: _,
            muon_lr: _,
            muon_weight_decay: _,
            muon_momentum: _,
            muon_beta2: _,
            muon_orthogonalization: _,
            muon_scale: _,
            muon_heads: _,
            init_moments: _,
            weight_decay: _,
            clip: _,
            z_loss: _,
            skip_spikes: _,
        } = self;
        (*warmup_steps, *muon_warmup_steps) = (None, None);
    }

    /// The first given setting that has no effect with the optimizer `own`, and the optimizer that the setting needs.
    pub fn first_of_another(&self, own: OptimizerSetting) -> Option<(String, OptimizerSetting)> {
        let others = OptimizerSetting::value_variants().iter().filter(|other| **other != own);
        others.copied().find_map(|other| Some((self.first_of(other.own_prefix()?)?, other)))
    }
}

layer! {
    OptimizerSettings:
    optimizer, muon_warmup_steps, muon_momentum, muon_beta2, muon_orthogonalization, muon_scale, muon_heads,
    muon_lr [Resumable],
    muon_weight_decay [Resumable],
    lr [Resumable],
    // The identity contains only those of the next four settings that the run's schedule uses: see `Config::identity`.
    min_lr [NotIdentity Resumable],
    warmup_steps [NotIdentity Resumable],
    schedule [NotIdentity Resumable],
    decay_fraction [NotIdentity Resumable],
    beta1, beta2, adam_eps, init_moments,
    weight_decay [Resumable],
    clip [Resumable],
    z_loss [Resumable],
    skip_spikes [Resumable],
}
