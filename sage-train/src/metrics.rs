//! What is measured: a point for each step, an outcome for each run.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::settings::Attn;

/// One optimizer step: a line of `metrics.jsonl` and of `metrics.csv`.
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
    /// Standard deviations of the loss above its mean over the steps before: see [`crate::train::guard`].
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub loss_z: Option<f64>,
    /// The same of the gradient's norm.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub grad_norm_z: Option<f64>,
    /// Whether the update was left out because of a spike.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub skipped: bool,
    /// Share of the machine's peak FLOP/s, where the peak is known.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub mfu: Option<f64>,
    /// What the GPU drew when the step was done, watts.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub gpu_watts: Option<f64>,
    /// Its clock then, MHz.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub gpu_mhz: Option<f64>,
    /// Its memory in use then, GiB.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub gpu_gib: Option<f64>,
    /// Validation loss after the step, nats a token.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub val_loss: Option<f64>,
    /// The same in bits a byte of text.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub val_bits_per_byte: Option<f64>,
    /// The validation loss under the attention of `--eval-attn`, with the same weights.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub eval_attn_loss: Option<f64>,
    /// The part of the step that is not gradients: the update, and with several ranks to wait for the slowest and to reduce.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub update_share: Option<f64>,
    /// The rank whose gradients took longest, in the step before.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub slowest_rank: Option<u64>,
    /// Its time over the median of all ranks.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub slowest_ratio: Option<f64>,
    /// Seconds since the start.
    pub seconds: f64,
}

impl Point {
    /// Every number by its name, those that are not there as `None`.
    pub fn numbers(&self) -> [(&'static str, Option<f64>); 20] {
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
            ("update_share", self.update_share),
            ("slowest_rank", self.slowest_rank.map(|rank| rank as f64)),
            ("slowest_ratio", self.slowest_ratio),
            ("seconds", Some(self.seconds)),
        ]
    }

    /// The names of [`Point::numbers`], separated by commas.
    pub fn csv_head() -> String {
        Self::default().numbers().map(|(name, _)| name).join(",")
    }

    /// A line of such numbers; what is not there stays empty.
    pub fn csv(&self) -> String {
        self.numbers().map(|(_, number)| number.map_or(String::new(), |n| n.to_string())).join(",")
    }
}

impl Point {
    /// A line of a file with this head, as [`Point::csv`] wrote it; nothing of another.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_comes_back_from_its_line() {
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
