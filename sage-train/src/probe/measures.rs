//! Distances to the exact results, and sizes of tensors; both are accumulated over heads and sequences.

use serde::{Deserialize, Serialize};

/// The distance of a quantity to its full-precision value.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Distance {
    /// Cosine of the angle between the two.
    pub cosine: f64,
    /// L2 norm of the difference over the L2 norm of the exact value.
    pub relative_l2: f64,
}

/// Sums from which a distance over several heads is computed.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Sums {
    products: f64,
    got: f64,
    exact: f64,
    differences: f64,
}

impl Sums {
    /// The sums over one pair of tensors.
    pub(super) fn of(got: &[f64], exact: &[f64]) -> Self {
        let mut sums = Self::default();
        for (a, b) in got.iter().zip(exact) {
            sums.products += a * b;
            sums.got += a * a;
            sums.exact += b * b;
            sums.differences += (a - b) * (a - b);
        }
        sums
    }

    /// Adds the sums over other values.
    pub(super) fn add(&mut self, other: Self) {
        self.products += other.products;
        self.got += other.got;
        self.exact += other.exact;
        self.differences += other.differences;
    }

    /// The distance. Two tensors of zeros are equal: cosine 1, relative L2 0.
    pub(super) fn distance(&self) -> Distance {
        let ratio = |a: f64, b: f64, nothing: f64| if b == 0.0 { nothing } else { a / b };
        Distance {
            cosine: ratio(self.products, (self.got * self.exact).sqrt(), 1.0),
            relative_l2: ratio(self.differences, self.exact, 0.0).sqrt(),
        }
    }
}

/// Sizes of the tensors of a layer or a head.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Sizes {
    /// Root mean square of P, where a query sees the key.
    pub rms_p: f64,
    /// Root mean square of dP, where a query sees the key.
    pub rms_dp: f64,
    /// Root mean square of dS, where a query sees the key.
    pub rms_ds: f64,
    /// `max |dP - delta| sqrt(2 / (N + 1))`, an upper bound of `rms_ds`: the squares of each of the N rows of
    /// P sum to at most 1, and N (N + 1) / 2 values are seen (SageBwd, section 4, for the causal half).
    pub bound_ds: f64,
    /// Largest absolute value of the queries.
    pub largest_q: f64,
    /// Largest absolute value of the keys.
    pub largest_k: f64,
    /// Largest absolute scaled logit, where a query sees the key.
    pub largest_logit: f64,
    /// Fraction of outlying keys: tokens whose smoothed key has a largest absolute value above ten times the
    /// median of its tile. They determine the tile's scale.
    pub outlying_keys: f64,
    /// Fraction of outlying queries.
    pub outlying_queries: f64,
}

impl Sizes {
    /// Each size with its name.
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

    /// Merges other sizes: means of squares and of fractions are averaged with weight `weight` for `other`,
    /// and the largest values are maxima.
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

/// Fraction of the tokens whose largest absolute value is above ten times the median of their tile.
pub(super) fn outlying(rows: &[f64], d: usize, tile: usize) -> f64 {
    let mut count = 0;
    for tile in rows.chunks(tile * d) {
        let norms: Vec<f64> =
            tile.chunks(d).map(|row| row.iter().fold(0.0, |most: f64, x| most.max(x.abs()))).collect();
        let mut sorted = norms.clone();
        sorted.sort_by(f64::total_cmp);
        let median = sorted[sorted.len() / 2];
        count += norms.iter().filter(|norm| **norm > 10.0 * median).count();
    }
    count as f64 / (rows.len() / d) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_add_up() {
        let (a, b) = ([1.0, 2.0, 3.0, 4.0], [1.1, 2.0, 2.9, 4.0]);
        let whole = Sums::of(&a, &b);
        let mut parts = Sums::of(&a[..2], &b[..2]);
        parts.add(Sums::of(&a[2..], &b[2..]));
        assert_eq!(whole.distance(), parts.distance());
        assert_eq!(Sums::of(&[0.0], &[0.0]).distance(), Distance { cosine: 1.0, relative_l2: 0.0 });
    }

    #[test]
    fn an_outlier_is_one_of_its_tile() {
        let mut rows = vec![1.0; 8 * 2];
        rows[6] = -11.0;
        assert_eq!(outlying(&rows, 2, 4), 1.0 / 8.0);
        assert_eq!(outlying(&[3.0; 10], 2, 4), 0.0);
    }
}
