//! Changes of the logits before the softmax: a soft cap and `ALiBi`.

use std::f32::consts::LOG2_E;

use multiversion::multiversion;

use super::lanes;
use super::tile::Tile;
use crate::shape::Segment;

#[derive(Debug, Default)]
pub(crate) struct ScoreMod {
    /// The cap of base-2 logits. 0 for no cap.
    cap: f32,
    /// The slope of each query head, for base-2 logits. Empty without `ALiBi`.
    slopes: Vec<f32>,
}

impl ScoreMod {
    pub(crate) fn new(softcap: f32, mut slopes: Vec<f32>) -> Self {
        slopes.iter_mut().for_each(|slope| *slope *= LOG2_E);
        Self { cap: softcap * LOG2_E, slopes }
    }

    pub(super) fn has_softcap(&self) -> bool {
        self.cap > 0.0
    }

    /// Applies the soft cap and `ALiBi` to the base-2 logits of a tile of a query head. Also writes the derivatives of
    /// the soft cap to `derivatives`, unless `derivatives` is empty.
    pub(super) fn apply(
        &self,
        head: usize,
        segment: &Segment,
        tile: Tile,
        logits: &mut [f32],
        derivatives: &mut [f32],
    ) {
        if self.has_softcap() {
            soft_cap(self.cap, logits);
            soft_cap_derivatives(self.cap, logits, derivatives);
        }
        if let Some(&slope) = self.slopes.get(head) {
            let ahead = segment.key.len() as f32 - segment.query.len() as f32;
            add_distances(slope, (tile.row as f32 + ahead) - tile.col as f32, tile.cols, logits);
        }
    }
}

/// `x = cap tanh(x / cap)`.
#[multiversion(targets = "simd")]
fn soft_cap(cap: f32, logits: &mut [f32]) {
    let inverse = 1.0 / cap;
    for x in logits {
        *x = cap * lanes::tanh(*x * inverse);
    }
}

/// The derivatives of [`soft_cap`], `1 - (capped / cap)^2`, from its results `capped`.
#[multiversion(targets = "simd")]
fn soft_cap_derivatives(cap: f32, capped: &[f32], derivatives: &mut [f32]) {
    let inverse = 1.0 / cap;
    for (derivative, x) in derivatives.iter_mut().zip(capped) {
        let tanh = x * inverse;
        *derivative = 1.0 - tanh * tanh;
    }
}

/// Subtracts `slope` times the distance of query and key from each logit. `first` is the position of the tile's first
/// query minus the position of its first key.
#[multiversion(targets = "simd")]
fn add_distances(slope: f32, first: f32, cols: usize, logits: &mut [f32]) {
    for (row, logits) in logits.chunks_exact_mut(cols).enumerate() {
        for (col, x) in logits.iter_mut().enumerate() {
            *x -= slope * (first + row as f32 - col as f32).abs();
        }
    }
}

/// Multiplies `dS` by the derivatives.
#[multiversion(targets = "simd")]
pub(super) fn chain(derivatives: &[f32], ds: &mut [f32]) {
    for (ds, derivative) in ds.iter_mut().zip(derivatives) {
        *ds *= derivative;
    }
}
