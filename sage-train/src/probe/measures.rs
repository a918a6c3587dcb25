//! Distances to exact results, and the fraction of tokens whose norm is an outlier.

use crate::metrics::Distance;

/// Sums of products and squares, from which the distance of results to the exact results is computed.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Sums {
    products: f64,
    got: f64,
    exact: f64,
    differences: f64,
}

impl Sums {
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

    pub(super) fn add(&mut self, other: Self) {
        self.products += other.products;
        self.got += other.got;
        self.exact += other.exact;
        self.differences += other.differences;
    }

    /// The distance to the exact results. If the exact results are all zero: cosine 1, relative L2 0.
    pub(super) fn distance(&self) -> Distance {
        let ratio = |a: f64, b: f64, nothing: f64| if b == 0.0 { nothing } else { a / b };
        Distance {
            cosine: ratio(self.products, (self.got * self.exact).sqrt(), 1.0),
            relative_l2: ratio(self.differences, self.exact, 0.0).sqrt(),
        }
    }
}

/// Fraction of the tokens whose norm (largest absolute value) is above ten times the median norm in the token's tile.
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
