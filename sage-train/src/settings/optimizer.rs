//! The settings of table `[optimizer]`, and the schedules of the learning rate.

use candle_sage::ops::{MuonScale, Orthogonalization};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use super::Switch;
use super::layer::{Layer, layer};
use crate::quantity::Quantity;

/// How the learning rate moves after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    /// Half a cosine down to `min-lr`
    Cosine,
    /// Warm-up, stable, decay: constant, then straight down to `min-lr` over `decay-fraction`
    Wsd,
    /// Constant
    Constant,
}

impl Schedule {
    /// Its name in `--schedule`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cosine => "cosine",
            Self::Wsd => "wsd",
            Self::Constant => "constant",
        }
    }

    /// The keys of the settings that are its own.
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
    /// Polar Express: the best five polynomials
    #[default]
    PolarExpress,
    /// The quintic of the first Muon, five times
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

/// The length of Muon's steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MuonScaleSetting {
    /// 0.2 sqrt(max(rows, columns)): the size of AdamW's steps, so that its learning rates carry over
    #[default]
    #[value(name = "adamw")]
    AdamW,
    /// sqrt(max(1, rows / columns)), as in the first Muon
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

/// What Muon takes for the matrices of query, key and value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MuonHeadsSetting {
    /// Each head is a matrix
    #[default]
    Apart,
    /// All heads of a layer's queries are one matrix, and so for keys and values
    Together,
}

/// Table `[optimizer]`: the optimizer, the learning rate, and the loss.
#[derive(Debug, Clone, Default, PartialEq, Args, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct OptimizerSettings {
    /// Optimizer [default: adamw]
    #[arg(long, value_enum)]
    pub optimizer: Option<OptimizerSetting>,
    /// Peak learning rate
    #[arg(long, value_name = "LR")]
    pub lr: Option<f64>,
    /// Learning rate at the end, as a fraction of the peak [default: 0.1, ours: the paper does not say]
    #[arg(long, value_name = "PART")]
    pub min_lr: Option<f64>,
    /// Steps of linear warm-up, at most a tenth of the steps unless it is set
    #[arg(long, value_name = "N")]
    pub warmup_steps: Option<Quantity>,
    /// Schedule of the learning rate after the warm-up [default: cosine]
    #[arg(long, value_enum)]
    pub schedule: Option<Schedule>,
    /// Fraction of the run in which `wsd` decays [default: 0.2]
    #[arg(long, value_name = "PART")]
    pub decay_fraction: Option<f64>,
    /// AdamW beta1 [default: 0.9, ours]
    #[arg(long, value_name = "BETA")]
    pub beta1: Option<f64>,
    /// AdamW beta2 [default: 0.95, ours]
    #[arg(long, value_name = "BETA")]
    pub beta2: Option<f64>,
    /// AdamW epsilon [default: 1e-8, ours]
    #[arg(long, value_name = "EPS")]
    pub adam_eps: Option<f64>,
    /// Muon: peak learning rate of the matrices of hidden layers [default: that of --lr]
    #[arg(long, value_name = "LR")]
    pub muon_lr: Option<f64>,
    /// Muon: steps of linear warm-up of the matrices of hidden layers [default: those of --warmup-steps]
    #[arg(long, value_name = "N")]
    pub muon_warmup_steps: Option<Quantity>,
    /// Muon: weight decay of the matrices of hidden layers [default: that of --weight-decay]
    #[arg(long, value_name = "DECAY")]
    pub muon_weight_decay: Option<f64>,
    /// Muon: decay of the momentum, with Nesterov [default: 0.95]
    #[arg(long, value_name = "BETA")]
    pub muon_momentum: Option<f64>,
    /// Muon: divide each row of the orthogonalized step by the root of the row's running mean square. BETA is the decay of this mean (NorMuon has 0.95)
    /// [default: rows stay as they are]
    #[arg(long, value_name = "BETA")]
    pub muon_beta2: Option<f64>,
    /// Muon: polynomials of the orthogonalization [default: polar-express]
    #[arg(long, value_enum)]
    pub muon_orthogonalization: Option<OrthogonalizationSetting>,
    /// Muon: length of a matrix's step [default: adamw]
    #[arg(long, value_enum)]
    pub muon_scale: Option<MuonScaleSetting>,
    /// Muon: the matrices of query, key and value [default: apart]
    #[arg(long, value_enum)]
    pub muon_heads: Option<MuonHeadsSetting>,
    /// Begin with the optimizer's moments of the checkpoint that --init-from names, corrected for the bias that they had from zero
    /// [default: off]
    #[arg(long, value_enum)]
    pub init_moments: Option<Switch>,
    /// Weight decay, of matrices only [default: 0.1, ours]
    #[arg(long, value_name = "DECAY")]
    pub weight_decay: Option<f64>,
    /// Largest norm of the gradient; 0 does not clip [default: 1, ours]
    #[arg(long, value_name = "NORM")]
    pub clip: Option<f64>,
    /// Factor of the z-loss, which keeps logits from drifting (PaLM: 1e-4); part of the training loss, not of the
    /// validation's [default: 0]
    #[arg(long, value_name = "Z")]
    pub z_loss: Option<f64>,
    /// Skip updates whose loss or gradient norm is more than Z standard deviations above the mean of the last 128 steps; 0 skips none
    /// [default: 0]
    #[arg(long, value_name = "Z")]
    pub skip_spikes: Option<f64>,
}

impl OptimizerSettings {
    /// The first setting that has an effect with Muon alone.
    pub fn first_of_muon(&self) -> Option<String> {
        self.first_of("muon_")
    }
}

layer! {
    OptimizerSettings:
    optimizer, muon_warmup_steps, muon_momentum, muon_beta2, muon_orthogonalization, muon_scale, muon_heads,
    muon_lr [Changes],
    muon_weight_decay [Changes],
    lr [Changes],
    // Each schedule has its own settings: `Config::identity` adds those that count.
    min_lr [Beside Changes],
    warmup_steps [Beside Changes],
    schedule [Beside Changes],
    decay_fraction [Beside Changes],
    beta1, beta2, adam_eps, init_moments,
    weight_decay [Changes],
    clip [Changes],
    z_loss [Changes],
    skip_spikes [Changes],
}
