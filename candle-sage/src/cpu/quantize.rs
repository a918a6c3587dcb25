//! Symmetric INT8 quantization: `code = round(x * quant_scale)`, `x ~ code * dequant_scale`.

use multiversion::multiversion;

use super::lanes;
use crate::scheme::{KeyMean, SageBwd};

/// A scale and its reciprocal.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scale {
    /// Factor from codes to values: `max|x| / 127`.
    pub(crate) dequant: f32,
    /// Factor from values to codes: `127 / max|x|`, 0 for a group of zeros. No epsilon is added to `max|x|`, since
    /// gradients can have magnitudes of 1e-7.
    pub(crate) quant: f32,
}

impl Scale {
    /// The scale of a group, from the largest [`lanes::abs_bits`] in it.
    ///
    /// An infinity or a NaN in the group makes the dequantized group non-finite, so that later results show the error.
    /// If `127 / max` would overflow (maxima below 3.73e-37), `quant` is `f32::MAX` and `dequant` is `1 / f32::MAX`.
    #[inline(always)]
    pub(crate) fn of(max_abs_bits: u32) -> Self {
        let max = f32::from_bits(max_abs_bits);
        let quant = 127.0 / max;
        if max == 0.0 {
            Self { dequant: 0.0, quant: 0.0 }
        } else if quant > f32::MAX {
            Self { dequant: 1.0 / f32::MAX, quant: f32::MAX }
        } else {
            Self { dequant: max / 127.0, quant }
        }
    }
}

/// The INT8 value of `x`, as f32: an integer from -127 to 127.
#[inline(always)]
pub(crate) fn code(x: f32, quant_scale: f32) -> f32 {
    (x * quant_scale).round_ties_even()
}

/// The rows of one head in INT8, with one scale per tile of rows.
#[derive(Debug)]
pub(crate) struct TileCodes {
    pub(crate) codes: Vec<i8>,
    pub(crate) dequant_scale: Vec<f32>,
}

impl TileCodes {
    /// Quantizes `rows` of width `d`, with one scale per `tile_rows` rows.
    pub(crate) fn new(rows: &[f32], d: usize, tile_rows: usize) -> Self {
        let size = tile_rows * d;
        let mut codes = vec![0; rows.len()];
        let tiles = rows.chunks(size).zip(codes.chunks_mut(size));
        let dequant_scale = tiles.map(|(tile, codes)| quantize(tile, codes)).collect();
        Self { codes, dequant_scale }
    }

    /// The INT8 values of a range of rows, as f32.
    pub(crate) fn rows_f32(&self, rows: std::ops::Range<usize>, d: usize) -> Vec<f32> {
        self.codes[rows.start * d..rows.end * d].iter().map(|&c| f32::from(c)).collect()
    }
}

/// Quantizes values that share one scale, and returns their dequantization scale.
#[multiversion(targets = "simd")]
fn quantize(values: &[f32], codes: &mut [i8]) -> f32 {
    let scale = Scale::of(lanes::max_abs_bits(values));
    for (code_of, &x) in codes.iter_mut().zip(values) {
        *code_of = code(x, scale.quant) as i8;
    }
    scale.dequant
}

/// The mean of each channel over all rows; zeros if there are no rows. Rows are summed in order inside each tile
/// of `tile_rows` rows, then the tiles' sums in order, as on the GPU.
pub(crate) fn channel_mean(rows: &[f32], d: usize, tile_rows: usize) -> Vec<f32> {
    let mut total = vec![0.0; d];
    for tile in rows.chunks(tile_rows * d) {
        let mut sum = vec![0.0; d];
        for row in tile.chunks_exact(d) {
            for (sum, x) in sum.iter_mut().zip(row) {
                *sum += x;
            }
        }
        for (total, x) in total.iter_mut().zip(&sum) {
            *total += x;
        }
    }
    let count = (rows.len() / d).max(1) as f32;
    total.iter().map(|x| x / count).collect()
}

/// The mean that smoothing subtracts from rows of K or V: over all rows (summed tile by tile), or over a sample (summed
/// in the order of the tokens).
pub(crate) fn token_mean(rows: &[f32], d: usize, settings: &SageBwd) -> Vec<f32> {
    let KeyMean::Sample(count) = settings.key_mean else { return channel_mean(rows, d, settings.tile_k) };
    let sample: Vec<f32> =
        settings.key_mean.tokens(rows.len() / d).flat_map(|token| &rows[token * d..][..d]).copied().collect();
    channel_mean(&sample, d, count)
}

pub(crate) fn subtract_mean(rows: &mut [f32], mean: &[f32]) {
    for row in rows.chunks_exact_mut(mean.len()) {
        for (x, mean) in row.iter_mut().zip(mean) {
            *x -= mean;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn codes(values: &[f32]) -> (Vec<i8>, Vec<f32>) {
        let q = TileCodes::new(values, 1, 4);
        (q.codes, q.dequant_scale)
    }

    #[test]
    fn extremes_ties_tails_and_zeros() {
        let (q, s) = codes(&[127.0, -127.0, 0.5, 1.5, 0.0, -0.0, 0.0, 0.0, -2.0]);
        assert_eq!(q, [127, -127, 0, 2, 0, 0, 0, 0, -127]);
        assert_eq!(s, [1.0, 0.0, 2.0 / 127.0]);
    }

    #[test]
    fn one_outlier_takes_the_range() {
        let (q, s) = codes(&[1e30, 1.0, -1.0, 1e28]);
        assert_eq!(q, [127, 0, 0, 1]);
        assert_eq!(s, [1e30 / 127.0]);
    }

    #[test]
    fn maxima_of_any_magnitude_reach_127() {
        let mut x = 4e-37f32;
        while x.is_finite() {
            for max in [x, -x, x * 1.234_567, x * 1.999_999] {
                if max.is_finite() {
                    let (q, _) = codes(&[max, max / 2.0]);
                    assert_eq!(i32::from(q[0]).abs(), 127, "{max:e}");
                }
            }
            x *= 7.3;
        }
    }

    #[test]
    fn the_smallest_groups_keep_their_size() {
        for max in [3e-37f32, 1e-37, 2e-38] {
            let (q, s) = codes(&[max, -max]);
            assert!((f32::from(q[0]) * s[0] / max - 1.0).abs() < 0.1, "{max:e}: {q:?} {s:?}");
        }
    }

    #[test]
    fn non_finite_values_are_passed_on() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let (q, s) = codes(&[1.0, bad, 2.0, 3.0]);
            assert!(q.iter().any(|&q| !(f32::from(q) * s[0]).is_finite()), "{bad}: {q:?} {s:?}");
        }
    }
}
