//! The settings of table `[linear]`: the numerics of linear layers.

use candle_sage::fp8::Fp8Format;
use candle_sage::ops::{Fp8Linear, Fp8Sums};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use super::LayerList;
use super::layer::{Layer, layer};
use crate::model::{LinearPrecision, Scaling};

/// Precision of the matmuls of linear layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LinearSetting {
    /// bf16 on a GPU, f32 on a CPU
    Bf16,
    /// FP8 operands, sums in more bits; runs on CPUs and on NVIDIA GPUs of compute capability 8.9 or later
    Fp8,
}

/// A format of FP8.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FormatSetting {
    /// 3 bits of mantissa
    E4m3,
    /// 2 bits of mantissa, a wider range
    E5m2,
}

/// How the scale of an FP8 operand is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScalingSetting {
    /// Scale from the running maximum of the operand's magnitudes in earlier steps; values up to 4 times this maximum
    /// do not saturate. Quantizing takes one pass over the operand
    Delayed,
    /// Scale from the operand's largest magnitude in this step. Quantizing takes two passes over the operand
    Current,
}

/// Precision of the accumulators of FP8 matmuls on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SumsSetting {
    /// The tensor cores' accumulators: about 14 bits on Hopper
    Fast,
    /// f32
    F32,
}

/// Table `[linear]`: the matmuls of linear layers in training. Sampling and the command `eval` compute in bf16 (f32 on
/// a CPU), and so does validation by default.
#[derive(Debug, Clone, Default, PartialEq, Args, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct LinearSettings {
    /// Precision of the linear layers' matmuls in training [default: bf16]
    #[arg(long, value_enum)]
    pub linear: Option<LinearSetting>,
    /// FP8: format of the gradients of the layers' outputs [default: e4m3]
    #[arg(long, value_enum)]
    pub linear_gradient: Option<FormatSetting>,
    /// FP8: how an operand's scale is set [default: delayed]
    #[arg(long, value_enum)]
    pub linear_scaling: Option<ScalingSetting>,
    /// FP8: precision of the accumulators of matmuls on a GPU; the two gradient matmuls of the output matrix (LM head)
    /// always accumulate in f32 [default: fast]
    #[arg(long, value_enum)]
    pub linear_sums: Option<SumsSetting>,
    /// FP8: precision of the matmuls of the output matrix (LM head). With fp8 the gradient of the logits is in e5m2
    /// [default: bf16]
    #[arg(long, value_enum)]
    pub linear_head: Option<LinearSetting>,
    /// FP8: transformer blocks whose linear layers stay in bf16: `0,-1` for the first and the last [default: none]
    #[arg(long, value_name = "LAYERS", allow_hyphen_values = true)]
    pub linear_bf16_layers: Option<LayerList>,
    /// FP8: precision of the linear layers' matmuls in validation; the output matrix (LM head) stays in bf16. With fp8,
    /// each operand's scale is set from the operand's largest magnitude [default: bf16]
    #[arg(long, value_enum)]
    pub linear_eval: Option<LinearSetting>,
}

layer! {
    LinearSettings: linear, linear_gradient, linear_scaling, linear_sums, linear_head, linear_bf16_layers [NotList],
    linear_eval [Resumable]
}

impl LinearSettings {
    /// The precision of the linear layers.
    pub fn precision(&self) -> LinearPrecision {
        match self.linear.unwrap_or(LinearSetting::Bf16) {
            LinearSetting::Bf16 => return LinearPrecision::Compute,
            LinearSetting::Fp8 => {}
        }
        let gradient = match self.linear_gradient.unwrap_or(FormatSetting::E4m3) {
            FormatSetting::E4m3 => Fp8Format::E4M3,
            FormatSetting::E5m2 => Fp8Format::E5M2,
        };
        let sums = match self.linear_sums.unwrap_or(SumsSetting::Fast) {
            SumsSetting::Fast => Fp8Sums::Fast,
            SumsSetting::F32 => Fp8Sums::F32,
        };
        let scaling = match self.linear_scaling.unwrap_or(ScalingSetting::Delayed) {
            ScalingSetting::Delayed => Scaling::Delayed,
            ScalingSetting::Current => Scaling::Current,
        };
        LinearPrecision::Fp8(Fp8Linear::default().gradient(gradient).sums([sums; 3]), scaling)
    }

    /// The precision of the output matrix's matmuls. In FP8, the logits' gradient is in E5M2: most of its elements are
    /// small probabilities, which need a wider range than that of E4M3. The gradient matmuls sum in f32: accumulators
    /// of 14 bits would lose small elements that are added to the much larger element of a target token.
    pub fn head_precision(&self) -> LinearPrecision {
        match (self.precision(), self.linear_head.unwrap_or(LinearSetting::Bf16)) {
            (LinearPrecision::Fp8(settings, scaling), LinearSetting::Fp8) => {
                let sums = [settings.sums[0], Fp8Sums::F32, Fp8Sums::F32];
                LinearPrecision::Fp8(settings.gradient(Fp8Format::E5M2).sums(sums), scaling)
            }
            (LinearPrecision::Compute, _) | (_, LinearSetting::Bf16) => LinearPrecision::Compute,
        }
    }

    /// The precision of linear layers in validation. It is FP8 only if the layers also train in FP8.
    pub fn precision_in_evaluation(&self) -> LinearPrecision {
        match (self.precision(), self.linear_eval.unwrap_or(LinearSetting::Bf16)) {
            (LinearPrecision::Fp8(settings, _), LinearSetting::Fp8) => {
                LinearPrecision::Fp8(settings, Scaling::Current)
            }
            (LinearPrecision::Compute, _) | (_, LinearSetting::Bf16) => LinearPrecision::Compute,
        }
    }

    /// The first given setting whose name begins with `linear-`: these settings have an effect only with FP8.
    pub fn first_of_fp8(&self) -> Option<String> {
        self.first_of("linear_")
    }
}
