//! NVFP4: 4-bit floating-point values (E2M1) in groups of 16 that share an 8-bit scale (E4M3).
//!
//! A group of 16 adjacent values `x` is quantized as
//!
//! ```text
//! scale = E4M3(max|x| / 6)      code = E2M1(x * (1 / scale))      x ~ value(code) * scale
//! ```
//!
//! The code is 0 if the scale is 0. There is no scale per tensor: a group with a maximum of at most `6 * 2^-10` =
//! 0.00586 becomes zeros, and values beyond `6 * 448` = 2688 saturate. A NaN or an infinity does not saturate: it makes
//! its whole group NaN.
//!
//! Both conversions round to nearest, ties to the even code, and saturate, as `cvt.rn.satfinite` does on GPUs that have
//! this instruction. Dequantized values are f32. The value of a code times its scale has at most six significant bits,
//! and is therefore also exact in f16 and bf16.
//!
//! # Packed format
//!
//! [`Packed`] contains the rows of one matrix. `codes` is row-major, with two codes per byte: the even channel is in
//! the low four bits. Each row is padded to a whole byte. A code is sign (bit 3), exponent (bits 2, 1) and mantissa
//! (bit 0). `scales` is row-major, with one byte per group: (rows, groups per row) with [`Axis::Channels`], (groups per
//! channel, channels) with [`Axis::Rows`]. The last group of a row or channel may be shorter than 16.

use std::ops::Range;

/// Number of values that share a scale.
pub const GROUP: usize = 16;

/// The largest E2M1 value.
pub const E2M1_MAX: f32 = 6.0;

/// The largest E4M3 value.
pub const E4M3_MAX: f32 = 448.0;

/// Rounds `|x|` to a floating-point format whose values near `|x|` are `step * power` apart. `power` is the largest
/// power of two that is at most `|x|`, but at least `smallest`, the format's smallest normal value. Ties round to the
/// even code. Near `magic`, f32 values are `step * power` apart, so adding `magic` in f32 does this rounding.
#[inline(always)]
pub(crate) fn round_magnitude(x: f32, step: f32, smallest: f32) -> f32 {
    let magnitude = x.abs();
    let power = f32::from_bits(magnitude.to_bits() & 0x7f80_0000);
    let power = if power < smallest { smallest } else { power };
    let magic = power * (1.5 * 8_388_608.0 * step);
    (magnitude + magic) - magic
}

/// The nearest E2M1 value: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; ties to the even code, saturating
/// at 6.
///
/// A NaN becomes 6, but the scale of its group is NaN, so the product of value and scale is NaN.
///
/// ```
/// use candle_sage::nvfp4::e2m1;
///
/// assert_eq!([0.3, 2.5, 3.5, -100.0].map(e2m1), [0.5, 2.0, 4.0, -6.0]);
/// ```
#[inline(always)]
pub fn e2m1(x: f32) -> f32 {
    let saturated = if x.abs() < E2M1_MAX { x.abs() } else { E2M1_MAX };
    round_magnitude(saturated, 0.5, 1.0).copysign(x)
}

/// The nearest E4M3 value, ties to the even code, saturating at 448. A NaN stays a NaN.
///
/// ```
/// use candle_sage::nvfp4::e4m3;
///
/// assert_eq!([0.3, 17.0, 19.0, 1e6].map(e4m3), [0.3125, 16.0, 20.0, 448.0]);
/// ```
#[inline(always)]
pub fn e4m3(x: f32) -> f32 {
    let saturated = if x.abs() > E4M3_MAX { E4M3_MAX } else { x.abs() };
    round_magnitude(saturated, 0.125, 1.0 / 64.0).copysign(x)
}

/// The code of an E2M1 value, 0 to 15.
///
/// ```
/// use candle_sage::nvfp4::{e2m1_code, e2m1_value};
///
/// assert_eq!([0.0, 1.5, 6.0, -6.0].map(e2m1_code), [0, 3, 7, 15]);
/// assert!((0..16).all(|code| e2m1_code(e2m1_value(code)) == code));
/// ```
///
/// # Panics
/// When `value` is not an E2M1 value.
pub fn e2m1_code(value: f32) -> u8 {
    const CODES: [u8; 13] = [0, 1, 2, 3, 4, 16, 5, 16, 6, 16, 16, 16, 7];
    let code = CODES[(value.abs() * 2.0) as usize];
    assert!(code < 16 && e2m1_value(code) == value.abs(), "{value} is not an E2M1 value");
    code | if value.is_sign_negative() { 8 } else { 0 }
}

/// The value of an E2M1 code; bits beyond the fourth are ignored.
///
/// ```
/// use candle_sage::nvfp4::e2m1_value;
///
/// assert_eq!([1, 5, 7, 8 | 7].map(e2m1_value), [0.5, 3.0, 6.0, -6.0]);
/// ```
#[inline(always)]
pub fn e2m1_value(code: u8) -> f32 {
    const VALUES: [f32; 16] =
        [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
    VALUES[usize::from(code & 15)]
}

/// The code of a non-negative E4M3 value; 0x7f for NaN.
///
/// ```
/// use candle_sage::nvfp4::e4m3_code;
///
/// assert_eq!([0.0, 1.0, 448.0, f32::NAN].map(e4m3_code), [0, 0x38, 0x7e, 0x7f]);
/// ```
///
/// # Panics
/// When `value` is neither a non-negative E4M3 value nor a NaN.
pub fn e4m3_code(value: f32) -> u8 {
    if value.is_nan() {
        return 0x7f;
    }
    let exponent = (value.to_bits() >> 23) as i32 - 127;
    let code = if exponent < -6 {
        (value * 512.0) as u8
    } else {
        (((exponent + 7) << 3) as u8) | (value.to_bits() >> 20 & 7) as u8
    };
    assert!(e4m3_value(code) == value, "{value} is not an E4M3 value");
    code
}

/// The value of an E4M3 code.
///
/// ```
/// use candle_sage::nvfp4::e4m3_value;
///
/// assert_eq!([0x01, 0x38, 0x7e].map(e4m3_value), [1.0 / 512.0, 1.0, 448.0]);
/// assert!(e4m3_value(0x7f).is_nan());
/// ```
#[inline(always)]
pub fn e4m3_value(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 512.0,
        _ => (1.0 + mantissa / 8.0) * f32::from_bits(((exponent - 7 + 127) as u32) << 23),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// A group's scale and its reciprocal.
///
/// ```
/// use candle_sage::nvfp4::Scale;
///
/// let scale = Scale::of(12.0);
/// assert_eq!((scale.dequant, scale.quant), (2.0, 0.5));
/// assert_eq!([12.0, 4.9, 0.4].map(|x| scale.fake_quantize(x)), [12.0, 4.0, 0.0]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scale {
    /// The factor that dequantizes an E2M1 value. The factor is an E4M3 value.
    pub dequant: f32,
    /// The factor by which a value is multiplied before rounding to E2M1: `1 / dequant`, or 0 if `dequant` is 0.
    pub quant: f32,
}

impl Scale {
    /// The scale of a group whose largest magnitude is `max`; NaN if `max` is not finite.
    #[inline(always)]
    pub fn of(max: f32) -> Self {
        let dequant = if max <= f32::MAX { e4m3(max / E2M1_MAX) } else { f32::NAN };
        Self { dequant, quant: if dequant == 0.0 { 0.0 } else { 1.0 / dequant } }
    }

    /// `x` quantized to E2M1 with the group's scale, and dequantized.
    #[inline(always)]
    pub fn fake_quantize(self, x: f32) -> f32 {
        e2m1(x * self.quant) * self.dequant
    }
}

/// The power of two that scales `max`, the largest magnitude of a head of V, into [512, 1024). Scaled values do
/// not saturate in NVFP4 (at 2688), even after smoothing of V. The factor is at most 2^100, so that its product with
/// [`Scale::quant`] is finite. The factor is 1 if `max` is 0 or not finite. See
/// [`ValueScale::Head`](crate::ValueScale::Head).
///
/// ```
/// use candle_sage::nvfp4::head_factor;
///
/// assert_eq!([1.0, 3e-3, 1e4].map(|max| max * head_factor(max)), [512.0, 786.432, 625.0]);
/// ```
pub fn head_factor(max: f32) -> f32 {
    const MOST: u32 = 100 + 127;
    match max.to_bits() >> 23 {
        _ if max == 0.0 => 1.0,
        255.. => 1.0,
        exponent => f32::from_bits((9 + 2 * 127 - exponent).min(MOST) << 23),
    }
}

/// The axis of a matrix along which 16 adjacent values share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Axis {
    /// Along a row: adjacent channels.
    Channels,
    /// Along a column: adjacent rows (tokens).
    Rows,
}

/// A matrix in NVFP4, in the "Packed format" of the [module](self).
///
/// ```
/// use candle_sage::nvfp4::{Axis, Packed};
///
/// let values: Vec<f32> = (0..32).map(|i| i as f32 / 8.0).collect();
/// let packed = Packed::new(&values, 16, Axis::Channels);
/// assert_eq!((packed.codes().len(), packed.scales().len()), (16, 2));
/// // 3.875 / 6 is rounded to the scale 0.625, so 3.875 saturates at 6 * 0.625.
/// assert_eq!(packed.rows(1..2)[15], 3.75);
/// assert_eq!(Packed::new(&values, 16, Axis::Rows).scales().len(), 16);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packed {
    channels: usize,
    axis: Axis,
    codes: Vec<u8>,
    scales: Vec<u8>,
}

impl Packed {
    /// Quantizes a row-major matrix with rows of `channels` values.
    ///
    /// # Panics
    /// When `channels` is 0, or `values` is not a whole number of rows.
    pub fn new(values: &[f32], channels: usize, axis: Axis) -> Self {
        let is_whole = channels > 0 && values.len().is_multiple_of(channels);
        assert!(is_whole, "{} values are not whole rows of {channels} channels", values.len());
        let rows = values.len() / channels;
        let row_bytes = channels.div_ceil(2);
        let mut codes = vec![0; rows * row_bytes];
        let scales = groups(rows, channels, axis).map(|group| {
            // The maximum is taken over the bits, because a NaN has larger bits than any number.
            let max = group.clone().map(|(r, c)| values[r * channels + c].to_bits() & 0x7fff_ffff).max();
            let scale = Scale::of(f32::from_bits(max.unwrap_or(0)));
            for (r, c) in group {
                let code = e2m1_code(e2m1(values[r * channels + c] * scale.quant));
                codes[r * row_bytes + c / 2] |= code << (4 * (c % 2));
            }
            e4m3_code(scale.dequant)
        });
        let scales = scales.collect();
        Self { channels, axis, codes, scales }
    }

    /// The dequantized values of some rows.
    pub fn rows(&self, rows: Range<usize>) -> Vec<f32> {
        let (channels, row_bytes) = (self.channels, self.channels.div_ceil(2));
        let groups = channels.div_ceil(GROUP);
        let mut values = Vec::with_capacity(rows.len() * channels);
        for r in rows {
            let codes = &self.codes[r * row_bytes..(r + 1) * row_bytes];
            let code = |c: usize| e2m1_value(codes[c / 2] >> (4 * (c % 2)));
            match self.axis {
                Axis::Channels => {
                    let scales = &self.scales[r * groups..(r + 1) * groups];
                    values.extend((0..channels).map(|c| code(c) * e4m3_value(scales[c / GROUP])));
                }
                Axis::Rows => {
                    let scales = &self.scales[r / GROUP * channels..][..channels];
                    values.extend((0..channels).map(|c| code(c) * e4m3_value(scales[c])));
                }
            }
        }
        values
    }

    /// The codes, two per byte.
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// The scales, one byte per group.
    pub fn scales(&self) -> &[u8] {
        &self.scales
    }
}

/// For each group, the (row, channel) of its values. The groups are in the same order as [`Packed::scales`].
fn groups(
    rows: usize,
    channels: usize,
    axis: Axis,
) -> impl Iterator<Item = impl Iterator<Item = (usize, usize)> + Clone> {
    let (outer, inner) = match axis {
        Axis::Channels => (rows, channels.div_ceil(GROUP)),
        Axis::Rows => (rows.div_ceil(GROUP), channels),
    };
    (0..outer * inner).map(move |n| {
        let (o, i) = (n / inner, n % inner);
        let (first, end) = match axis {
            Axis::Channels => (i * GROUP, channels.min((i + 1) * GROUP)),
            Axis::Rows => (o * GROUP, rows.min((o + 1) * GROUP)),
        };
        (first..end).map(move |member| match axis {
            Axis::Channels => (o, member),
            Axis::Rows => (member, i),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The non-negative E2M1 values, listed independently of the arithmetic above.
    const E2M1: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

    /// All non-negative E4M3 values, from the definition of the format.
    fn e4m3_table() -> Vec<f64> {
        let value = |code: u32| {
            let (exponent, mantissa) = (code >> 3, f64::from(code & 7));
            if exponent == 0 {
                2f64.powi(-6) * mantissa / 8.0
            } else {
                2f64.powi(exponent as i32 - 7) * (1.0 + mantissa / 8.0)
            }
        };
        (0..0x7f).map(value).collect()
    }

    /// The entry of a table nearest to `x`; ties go to the even index.
    fn nearest(table: &[f64], x: f64) -> f64 {
        let above = table.partition_point(|&value| value < x);
        if above == 0 {
            return table[0];
        }
        if above == table.len() {
            return table[above - 1];
        }
        let (low, high) = (table[above - 1], table[above]);
        match (x - low).total_cmp(&(high - x)) {
            std::cmp::Ordering::Less => low,
            std::cmp::Ordering::Greater => high,
            std::cmp::Ordering::Equal => table[if above % 2 == 0 { above } else { above - 1 }],
        }
    }

    /// Test inputs: the values of `table`, their midpoints, the f32 neighbours of each, and a sweep over all binades.
    fn probes(table: &[f64]) -> Vec<f32> {
        let mut probes = vec![0.0, f32::MIN_POSITIVE, 1e-42, f32::MAX, 1e30];
        for pair in table.windows(2) {
            for x in [pair[0], pair[1], (pair[0] + pair[1]) / 2.0] {
                let bits = (x as f32).to_bits();
                probes.extend([bits, bits + 1, bits.saturating_sub(1)].map(f32::from_bits));
            }
        }
        probes.extend((0..0x7f80_0000u32).step_by(9973).map(f32::from_bits));
        probes
    }

    #[test]
    fn conversions_are_those_of_the_table() {
        let e4m3_table = e4m3_table();
        for (table, convert) in [(&E2M1[..], e2m1 as fn(f32) -> f32), (&e4m3_table, e4m3)] {
            for x in probes(table) {
                let expected = nearest(table, f64::from(x)) as f32;
                assert_eq!(convert(x), expected, "{x:e}");
                assert_eq!(convert(-x).to_bits(), (-expected).to_bits(), "-{x:e}");
            }
        }
        assert_eq!((e2m1(f32::INFINITY), e4m3(f32::INFINITY)), (6.0, 448.0));
        assert!(e4m3(f32::NAN).is_nan());
    }

    #[test]
    fn codes_name_every_value_once() {
        for (code, value) in E2M1.iter().enumerate() {
            assert_eq!(e2m1_code(*value as f32), code as u8);
            assert_eq!(e2m1_code(-*value as f32), code as u8 | 8);
            assert_eq!(e2m1_value(code as u8 | 8).to_bits(), (-*value as f32).to_bits());
        }
        for (code, value) in e4m3_table().into_iter().enumerate() {
            assert_eq!(e4m3_code(value as f32), code as u8);
            assert_eq!(f64::from(e4m3_value(code as u8)), value);
            assert_eq!(f64::from(e4m3_value(code as u8 | 0x80)), -value);
        }
        assert!(e4m3_value(0x7f).is_nan() && e4m3_code(f32::NAN) == 0x7f);
    }

    /// A code's value times a scale has at most 6 significant bits. Types bf16 and f16 have 8 and 11.
    #[test]
    fn values_are_exact_in_sixteen_bits() {
        for scale in e4m3_table() {
            for code in E2M1 {
                let x = (scale * code) as f32;
                assert_eq!(f64::from(x), scale * code);
                assert_eq!(half::bf16::from_f32(x).to_f32(), x);
                assert_eq!(half::f16::from_f32(x).to_f32(), x);
            }
        }
    }

    #[test]
    fn groups_scale_flush_saturate_and_pass_on_what_is_not_finite() {
        assert_eq!(Scale::of(6.0), Scale { dequant: 1.0, quant: 1.0 });
        assert_eq!(Scale::of(6.0 * 2f32.powi(-10)), Scale { dequant: 0.0, quant: 0.0 });
        assert_eq!(Scale::of(6.1 * 2f32.powi(-10)).dequant, 2f32.powi(-9));
        assert_eq!(Scale::of(1e9).fake_quantize(1e9), 2688.0);
        // The scale 8.4 * 2^-9 / 6 = 1.4 * 2^-9 rounds down to 2^-9, so the E2M1 value saturates at 6.
        assert_eq!(Scale::of(8.4 * 2f32.powi(-9)).fake_quantize(8.4 * 2f32.powi(-9)), 6.0 * 2f32.powi(-9));
        for bad in [f32::NAN, f32::INFINITY] {
            assert!(Scale::of(bad).fake_quantize(1.0).is_nan());
        }
    }

    #[test]
    fn packing_keeps_the_values_of_both_axes() {
        for (rows, channels) in [(1, 8), (16, 16), (33, 40), (50, 33)] {
            let values: Vec<f32> = (0..rows * channels)
                .map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.07 * (1 + i % 5) as f32)
                .collect();
            for axis in [Axis::Channels, Axis::Rows] {
                let packed = Packed::new(&values, channels, axis);
                assert_eq!(packed.codes().len(), rows * channels.div_ceil(2));
                let got = packed.rows(0..rows);
                for r in 0..rows {
                    for c in 0..channels {
                        let member = |n: usize| match axis {
                            Axis::Channels => (c / GROUP * GROUP + n < channels)
                                .then(|| values[r * channels + c / GROUP * GROUP + n]),
                            Axis::Rows => (r / GROUP * GROUP + n < rows)
                                .then(|| values[(r / GROUP * GROUP + n) * channels + c]),
                        };
                        let max = (0..GROUP).filter_map(member).fold(0.0, |max: f32, x| max.max(x.abs()));
                        let expected = Scale::of(max).fake_quantize(values[r * channels + c]);
                        assert_eq!(
                            got[r * channels + c].to_bits(),
                            expected.to_bits(),
                            "({r}, {c}) {axis:?}"
                        );
                    }
                }
                assert_eq!(packed.rows(rows / 2..rows), got[rows / 2 * channels..]);
            }
        }
    }
}
