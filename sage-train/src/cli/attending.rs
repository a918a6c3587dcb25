//! Flags for the attention numerics with which a trained model is evaluated.

use candle_sage::{Granularity, Int8Products, KeyMean, PReference, Result, ValueGroups, ValueScale};

use crate::config::{Config, check_own};
use crate::settings::{AttentionSettings, Attn, LayerSettings, Settings, SmoothingSetting, Text};

/// Attention settings that override the run's settings.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct AttentionOverrides {
    /// Attention of the evaluation. A scheme other than the run's has its default settings, unless flags set them
    /// [default: the run's]
    #[arg(long, value_enum)]
    attn: Option<Attn>,
    /// Overrides --attn for single layers: `0,-1=fpa` leaves the first and the last layer unquantized; "" uses --attn
    /// in all layers [default: the run's; "" if --attn names another scheme than the run's]
    #[arg(long, value_name = "LAYERS=SCHEME", allow_hyphen_values = true)]
    attn_layers: Option<LayerSettings>,
    /// SageBwd and Attn-QAT: operands whose mean over tokens is subtracted before quantizing [default: the run's]
    #[arg(long, value_enum)]
    smoothing: Option<SmoothingSetting>,
    /// SageBwd: tokens from which --smoothing computes the means of K and V: `all`, or `sample-N` for N evenly spaced
    /// tokens [default: the run's]
    #[arg(long)]
    key_mean: Option<Text<KeyMean>>,
    /// SageBwd: which of attention's matmuls are in INT8: `paper`, `forward-and-s`, `scores`, `forward`, or a list such
    /// as `forward,s,dv` (`sage-train --help` explains them) [default: the run's]
    #[arg(long)]
    products: Option<Text<Int8Products>>,
    /// SageBwd: number of rows or columns of P, dS and dO that share a scale in the backward: one (`vector`), N
    /// (`group-N`), or all of a tile (`tile`). It does not change the evaluated loss [default: the run's]
    #[arg(long)]
    granularity: Option<Text<Granularity>>,
    /// Attn-QAT: axis along which 16 values of V share a scale: `tokens` or `head-dim` [default: the run's]
    #[arg(long)]
    value_groups: Option<Text<ValueGroups>>,
    /// Attn-QAT: factor that multiplies V before quantizing: `none` or `head` (`sage-train --help` explains them)
    /// [default: the run's]
    #[arg(long)]
    value_scale: Option<Text<ValueScale>>,
    /// Attn-QAT: number that divides each row of exp(logits) before the row is quantized: `row-max`, `two-level` or
    /// `literal` (`sage-train --help` explains them) [default: the run's]
    #[arg(long)]
    p_reference: Option<Text<PReference>>,
}

impl AttentionOverrides {
    /// The values of these flags as settings.
    pub(super) fn settings(&self) -> AttentionSettings {
        AttentionSettings {
            attn: self.attn,
            attn_layers: self.attn_layers.clone(),
            smoothing: self.smoothing,
            key_mean: self.key_mean,
            products: self.products,
            granularity: self.granularity,
            value_groups: self.value_groups,
            value_scale: self.value_scale,
            p_reference: self.p_reference,
            // An evaluation has no flags for these settings: they belong to the model or affect only the backward.
            qk_norm: None,
            high_precision_output: None,
            matched_recomputation: None,
            requantized_p: None,
        }
    }

    /// Checks that these flags apply to the attention of `config`.
    pub(super) fn check(&self, config: &Config) -> Result<()> {
        let typed = Settings::with(|s| s.attention = self.settings());
        check_own(&typed, config.attn, config.model.scheme, config.model.sla2.as_ref())
    }
}
