//! The errors of a scheme's gradient, as `probe --gradient` measures them.

use serde::{Deserialize, Serialize};

/// Number of blocks into which the micro-batches are divided. A confidence interval is computed from one estimate per
/// block.
pub const BLOCKS: usize = 8;

/// Squared norms of a gradient, computed with unquantized attention and under a scheme.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Squares {
    /// Squared norm with unquantized attention.
    pub exact: f64,
    /// Squared norm under the scheme.
    pub low: f64,
    /// Squared norm of the difference between the two gradients.
    pub error: f64,
}

impl Squares {
    pub(crate) fn add(&mut self, other: &Self) {
        self.exact += other.exact;
        self.low += other.low;
        self.error += other.error;
    }

    pub(crate) fn times(self, factor: f64) -> Self {
        Self { exact: self.exact * factor, low: self.low * factor, error: self.error * factor }
    }
}

/// Squared norms over a number of micro-batches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Sums {
    /// Number of micro-batches.
    pub count: usize,
    /// The [`Squares`] of the sum of the micro-batches' gradients.
    pub of_sum: Squares,
    /// Sum of the squared norms of the micro-batches' gradients.
    pub of_each: Squares,
}

impl Sums {
    /// Unbiased estimates of `|G|^2`, `|G + B|^2` and `|B|^2` from all pairs of micro-batches. `G` is the expected
    /// gradient of a micro-batch with unquantized attention, and `G + B` the one under the scheme. An estimate can be
    /// below zero.
    pub fn mean_squares(&self) -> Squares {
        let pairs = (self.count * (self.count - 1)) as f64;
        let Self { of_sum, of_each, .. } = self;
        Squares {
            exact: (of_sum.exact - of_each.exact) / pairs,
            low: (of_sum.low - of_each.low) / pairs,
            error: (of_sum.error - of_each.error) / pairs,
        }
    }

    /// Variances over micro-batches, summed over all elements: of the exact gradient, of the scheme's gradient, and of
    /// their difference. The variance of a mean over `n` micro-batches is `1 / n` of these variances.
    pub fn variances(&self) -> Squares {
        let (each, mean_squares) = (self.of_each.times(1.0 / self.count as f64), self.mean_squares());
        Squares {
            exact: each.exact - mean_squares.exact,
            low: each.low - mean_squares.low,
            error: each.error - mean_squares.error,
        }
    }
}

/// The measurements of a part of the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// `all`, `embedding`, `layer N` or `norm`.
    pub name: String,
    /// For groups of 1, 2, 4, ... micro-batches: the size of a group, and the [`Squares`] of its mean gradient. These
    /// squares are averaged over all groups of this size.
    pub curve: Vec<(usize, Squares)>,
    /// The part's [`Sums`] over all micro-batches.
    pub whole: Sums,
    /// The part's [`Sums`] over each of [`BLOCKS`] disjoint sets of micro-batches.
    pub blocks: Vec<Sums>,
}

/// The errors of a scheme's gradient.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GradientErrors {
    /// The scheme.
    pub scheme: String,
    /// Steps that the model was trained for, if that is known.
    pub step: Option<u64>,
    /// Tokens of a micro-batch.
    pub tokens: u64,
    /// The model as a whole, and its parts.
    pub parts: Vec<Part>,
}
