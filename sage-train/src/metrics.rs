//! The measurements of a run: a point for each step, an outcome for the run, and the probes of its attention.

mod gradients;
mod probed;

use std::path::PathBuf;

pub use gradients::{BLOCKS, GradientErrors, Part, Squares, Sums};
pub use probed::{Distance, Probed, QUANTITIES, RESULTS, Row, Sizes};
use serde::{Deserialize, Serialize};

use crate::settings::Attn;

/// One optimizer step: a line of `metrics.jsonl` and of `metrics.csv`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Number of the step, from 1.
    pub step: u64,
    /// Tokens trained on, up to and including this step.
    pub tokens: u64,
    /// Mean training loss of the step, nats per token.
    pub loss: f64,
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Learning rate.
    pub lr: f64,
    /// Tokens per second of this step.
    pub tokens_per_second: f64,
    /// How many standard deviations the loss is above its mean over recent steps: see [`crate::train::guard`].
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub loss_z: Option<f64>,
    /// How many standard deviations the gradient norm is above its mean over recent steps.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub grad_norm_z: Option<f64>,
    /// Whether the update was skipped because of a spike of the loss or the gradient norm.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub skipped: bool,
    /// Model FLOP/s utilization: share of the peak FLOP/s of all ranks' devices, if the peak is known.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub mfu: Option<f64>,
    /// Power draw of the GPU after the step, watts.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub gpu_watts: Option<f64>,
    /// Clock of the GPU after the step, MHz.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub gpu_mhz: Option<f64>,
    /// Memory in use on the GPU after the step, GiB.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub gpu_gib: Option<f64>,
    /// Validation loss after the step, nats per token.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub val_loss: Option<f64>,
    /// Validation loss after the step, bits per byte of text.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub val_bits_per_byte: Option<f64>,
    /// Validation loss after the step, nats per token, computed with the attention scheme of `--eval-attn`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub eval_attn_loss: Option<f64>,
    /// With FP8 layers, recorded at each validation: the number of operand values that saturated since the previous
    /// validation.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub fp8_saturated: Option<u64>,
    /// Share of the step's time that is not spent on forward and backward: the update, and with several ranks also the
    /// reduction of gradients and the wait for the slowest rank.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub update_share: Option<f64>,
    /// The rank whose gradients took longest in the previous step.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub slowest_rank: Option<u64>,
    /// The time that `slowest_rank` took for forward and backward in the previous step, divided by the median over all
    /// ranks.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub slowest_ratio: Option<f64>,
    /// SLA2, after a validation: share of dense attention's (query, key) pairs that the selection skips.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub sla2_sparsity: Option<f64>,
    /// SLA2, after a validation: the mean weight of exact attention in its mixture with the tail.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub sla2_exact_weight: Option<f64>,
    /// SLA2, after a validation: of the probability mass that dense attention has on past blocks, the fraction on
    /// selected blocks.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub sla2_mass_caught: Option<f64>,
    /// SLA2, after a validation: the number of query blocks that select a key block, as the maximum over key blocks
    /// divided by the mean.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub sla2_users_ratio: Option<f64>,
    /// Seconds that the run has taken so far, including the time before it was resumed.
    pub seconds: f64,
}

impl Point {
    /// Every number with its name; `None` for a number that was not measured.
    pub fn numbers(&self) -> [(&'static str, Option<f64>); 25] {
        [
            ("step", Some(self.step as f64)),
            ("tokens", Some(self.tokens as f64)),
            ("loss", Some(self.loss)),
            ("grad_norm", Some(self.grad_norm)),
            ("lr", Some(self.lr)),
            ("tokens_per_second", Some(self.tokens_per_second)),
            ("loss_z", self.loss_z),
            ("grad_norm_z", self.grad_norm_z),
            ("skipped", Some(f64::from(u8::from(self.skipped)))),
            ("mfu", self.mfu),
            ("gpu_watts", self.gpu_watts),
            ("gpu_mhz", self.gpu_mhz),
            ("gpu_gib", self.gpu_gib),
            ("val_loss", self.val_loss),
            ("val_bits_per_byte", self.val_bits_per_byte),
            ("eval_attn_loss", self.eval_attn_loss),
            ("fp8_saturated", self.fp8_saturated.map(|count| count as f64)),
            ("update_share", self.update_share),
            ("slowest_rank", self.slowest_rank.map(|rank| rank as f64)),
            ("slowest_ratio", self.slowest_ratio),
            ("sla2_sparsity", self.sla2_sparsity),
            ("sla2_exact_weight", self.sla2_exact_weight),
            ("sla2_mass_caught", self.sla2_mass_caught),
            ("sla2_users_ratio", self.sla2_users_ratio),
            ("seconds", Some(self.seconds)),
        ]
    }

    /// The names of [`Point::numbers`], separated by commas.
    pub fn csv_head() -> String {
        Self::default().numbers().map(|(name, _)| name).join(",")
    }

    /// The numbers of [`Point::numbers`], separated by commas; a number that was not measured is an empty
    /// cell.
    pub fn csv(&self) -> String {
        self.numbers().map(|(_, number)| number.map_or(String::new(), |n| n.to_string())).join(",")
    }
}

impl Point {
    /// Parses a line that [`Point::csv`] wrote under the header `head`; `None` if the line does not match the header.
    pub fn from_csv(head: &str, line: &str) -> Option<Self> {
        let mut values = serde_json::Map::new();
        for (name, cell) in head.split(',').zip(line.split(',')).filter(|(_, cell)| !cell.is_empty()) {
            let number: f64 = cell.parse().ok()?;
            let value = match name {
                "step" | "tokens" | "slowest_rank" => (number as u64).into(),
                "skipped" => (number != 0.0).into(),
                _ => number.into(),
            };
            values.insert(name.into(), value);
        }
        (line.split(',').count() == head.split(',').count())
            .then(|| serde_json::from_value(values.into()).ok())
            .flatten()
    }
}

/// The result of a run.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The run's folder.
    pub folder: PathBuf,
    /// The attention that the run was trained with.
    pub attn: Attn,
    /// Validation loss at the end, nats per token.
    pub val_loss: f64,
    /// Validation loss at the end, bits per byte of text.
    pub val_bits_per_byte: f64,
    /// Unigram entropy of the data, nats per token.
    pub unigram_entropy: f64,
    /// Training speed, tokens per second. The time of validations is not counted.
    pub tokens_per_second: f64,
    /// Every step.
    pub points: Vec<Point>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_is_parsed_from_its_line() {
        let point = Point {
            step: 3,
            tokens: 12_345_678_901,
            loss: 1.0 / 3.0,
            skipped: true,
            val_loss: Some(2.5),
            seconds: 1e-3,
            ..Point::default()
        };
        let head = Point::csv_head();
        assert_eq!(Point::from_csv(&head, &point.csv()), Some(point.clone()));
        for broken in [&point.csv()[1..20], "", "x,y", &point.csv().replace("2.5", "2,5")] {
            assert_eq!(Point::from_csv(&head, broken), None, "{broken}");
        }
    }
}
