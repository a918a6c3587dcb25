//! The measurements of one probe: errors of low-bit attention, and magnitudes of attention's tensors. Each line of
//! `probes.jsonl` has the measurements of one probe.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The quantities whose errors are measured.
pub const QUANTITIES: [&str; 8] = ["delta", "P", "dP", "dS", "O", "dQ", "dK", "dV"];

/// The [`QUANTITIES`] that are results of attention.
pub const RESULTS: [&str; 4] = ["O", "dQ", "dK", "dV"];

/// The errors of low-bit attention in a layer, or in one of its query heads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The layer, from 0.
    pub layer: usize,
    /// The query head, from 0; `None` for the whole layer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head: Option<usize>,
    /// Errors by the names of [`QUANTITIES`]. Query heads that share a key head also share dK and dV: only the row of
    /// the first of these query heads contains the errors of dK and dV.
    pub errors: BTreeMap<String, Distance>,
    /// Magnitudes of the tensors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sizes: Option<Sizes>,
    /// For each matmul or operand of the scheme: the relative L2 errors of the four [`RESULTS`] if only this matmul or
    /// operand is in low bits. `None` for dK and dV if `errors` has no dK and dV.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub products: Vec<(String, [Option<f64>; 4])>,
    /// For each operand, the fraction of its NVFP4 groups that become zeros; empty for a scheme without NVFP4.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vanished: Vec<(String, f64)>,
    /// For each operand, the fraction of its NVFP4 groups that contain a magnitude above 2688, the largest NVFP4 value.
    /// Empty for a scheme without NVFP4, and in files of earlier builds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub saturated: Vec<(String, f64)>,
}

/// A probe: its settings, and the errors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Probed {
    /// The numerics whose errors were measured.
    pub scheme: String,
    /// Steps that the model was trained for, if known.
    pub step: Option<u64>,
    /// Tokens in a sequence.
    pub context: usize,
    /// Number of validation sequences.
    pub sequences: usize,
    /// Factor by which queries and keys were multiplied.
    pub qk_scale: f64,
    /// Whether Q and K were quantized with a separate scale for each token.
    #[serde(default)]
    pub token_scales: bool,
    /// A row for each layer, followed by the rows of its heads if they were requested.
    pub rows: Vec<Row>,
}

/// The distance of a quantity from its value with unquantized attention.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Distance {
    /// Cosine of the angle between the low-bit and the exact value.
    pub cosine: f64,
    /// L2 norm of the difference over the L2 norm of the exact value.
    pub relative_l2: f64,
}

/// Magnitudes of the tensors of a layer or a head.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Sizes {
    /// Root mean square of P over the unmasked (query, key) pairs.
    pub rms_p: f64,
    /// Root mean square of dP over the unmasked (query, key) pairs.
    pub rms_dp: f64,
    /// Root mean square of dS over the unmasked (query, key) pairs.
    pub rms_ds: f64,
    /// `max |dP - delta| sqrt(2 / (N + 1))`, an upper bound of `rms_ds`: the squares in each of the N rows of P sum to
    /// at most 1, and N (N + 1) / 2 values are unmasked (section 4 of the SageBwd paper, applied to a causal mask).
    pub bound_ds: f64,
    /// Largest absolute value of the queries.
    pub largest_q: f64,
    /// Largest absolute value of the keys.
    pub largest_k: f64,
    /// Largest absolute scaled logit of the unmasked (query, key) pairs.
    pub largest_logit: f64,
    /// Fraction of outlying keys. A smoothed key is outlying if its largest absolute value is above ten times the
    /// median of the largest absolute values of its tile's keys. Such a key determines the tile's scale.
    pub outlying_keys: f64,
    /// Fraction of outlying queries.
    pub outlying_queries: f64,
}

impl Sizes {
    /// Each magnitude with its name.
    pub fn named(&self) -> [(&'static str, f64); 9] {
        [
            ("rms_p", self.rms_p),
            ("rms_dp", self.rms_dp),
            ("rms_ds", self.rms_ds),
            ("bound_ds", self.bound_ds),
            ("largest_q", self.largest_q),
            ("largest_k", self.largest_k),
            ("largest_logit", self.largest_logit),
            ("outlying_queries", self.outlying_queries),
            ("outlying_keys", self.outlying_keys),
        ]
    }

    /// Merges `other`, with the weight `weight`, into `self`. Averages the `outlying_*` fields and the squares of the
    /// `rms_*` fields. Keeps the larger value of `bound_ds` and of each `largest_*` field.
    pub fn join(&mut self, other: &Self, weight: f64) {
        let square = |a: f64, b: f64| ((1.0 - weight) * a * a + weight * b * b).sqrt();
        let mean = |a: f64, b: f64| (1.0 - weight) * a + weight * b;
        *self = Self {
            rms_p: square(self.rms_p, other.rms_p),
            rms_dp: square(self.rms_dp, other.rms_dp),
            rms_ds: square(self.rms_ds, other.rms_ds),
            bound_ds: self.bound_ds.max(other.bound_ds),
            largest_q: self.largest_q.max(other.largest_q),
            largest_k: self.largest_k.max(other.largest_k),
            largest_logit: self.largest_logit.max(other.largest_logit),
            outlying_keys: mean(self.outlying_keys, other.outlying_keys),
            outlying_queries: mean(self.outlying_queries, other.outlying_queries),
        };
    }
}
