//! Arithmetic on rows of f32 that the compiler vectorizes.
//!
//! Every function is `inline(always)` and is called from functions marked `multiversion`, which are compiled
//! for AVX-512, AVX2, NEON and scalar code; one version is chosen at run time. Sums and maxima run in
//! [`LANES`] fixed lanes, so that a result does not depend on a row's position in memory.

const LANES: usize = 16;

/// `log2(127)`, where 127 is the largest INT8 value.
pub(crate) const LOG2_127: f32 = 6.988_684_7;

/// `2^x` with a relative error below `2^-22`; 0 below -126, infinity from 128 on, NaN for NaN.
#[inline(always)]
pub(crate) fn exp2(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to a whole number n, which is in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    let shifted = x + ROUND;
    let f = x - (shifted - ROUND);
    // The minimax polynomial of `2^f` on [-1/2, 1/2].
    let p = 1.534_581_2e-4_f32
        .mul_add(f, 1.339_993_1e-3)
        .mul_add(f, 9.618_489e-3)
        .mul_add(f, 5.550_328_8e-2)
        .mul_add(f, 2.402_264_7e-1)
        .mul_add(f, 6.931_472e-1)
        .mul_add(f, 1.0);
    let scaled = f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23));
    // Below -126 and from 128 on, n does not fit into the exponent. For NaN the result is `x + INFINITY`, a NaN.
    let in_range = if x < -126.0 { 0.0 } else { scaled };
    if x < 128.0 { in_range } else { x + f32::INFINITY }
}

/// `tanh(x)` with a relative error below `2^-20`.
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    // For |x| < 1: a minimax polynomial with a relative error of 5.9e-7 before rounding. For larger |x| the formula
    // 1 - 2 / (1 + e^2x) loses no bits.
    let (twice, square) = (2.0 * x, 4.0 * x * x);
    let small = (-1.497_588_1e-6_f32)
        .mul_add(square, 3.270_14e-5)
        .mul_add(square, -4.031_693_4e-4)
        .mul_add(square, 4.150_448e-3)
        .mul_add(square, -4.166_130_3e-2)
        .mul_add(square, 0.499_999_7);
    let large = 1.0 - 2.0 / (1.0 + exp2(twice * std::f32::consts::LOG2_E));
    if x.abs() < 1.0 { twice * small } else { large }
}

/// Folds a row lane by lane, then folds the lanes in a fixed order.
#[inline(always)]
fn fold<T: Copy>(row: &[f32], start: T, step: impl Fn(T, f32) -> T, join: impl Fn(T, T) -> T) -> T {
    let mut lanes = [start; LANES];
    let (chunks, tail) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for l in 0..LANES {
            lanes[l] = step(lanes[l], chunk[l]);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(tail) {
        *lane = step(*lane, x);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            lanes[l] = join(lanes[l], lanes[l + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// The largest value of a row, ignoring NaN; minus infinity for an empty row.
#[inline(always)]
pub(crate) fn max(row: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    fold(row, f32::NEG_INFINITY, larger, larger)
}

#[inline(always)]
pub(crate) fn sum(row: &[f32]) -> f32 {
    fold(row, 0.0, |a, x| a + x, |a, b| a + b)
}

#[inline(always)]
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let ((a_chunks, a_tail), (b_chunks, b_tail)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for l in 0..LANES {
            lanes[l] = a[l].mul_add(b[l], lanes[l]);
        }
    }
    for (l, (a, b)) in a_tail.iter().zip(b_tail).enumerate() {
        lanes[l] = a.mul_add(*b, lanes[l]);
    }
    sum(&lanes)
}

/// The bits of `|x|`. As integers they sort like the values, with NaN above everything, so that a maximum over bits
/// does not lose a NaN.
#[inline(always)]
pub(crate) fn abs_bits(x: f32) -> u32 {
    x.to_bits() & 0x7fff_ffff
}

#[inline(always)]
pub(crate) fn max_abs_bits(row: &[f32]) -> u32 {
    fold(row, 0, |a: u32, x| a.max(abs_bits(x)), |a, b| a.max(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tanh_is_within_its_bound() {
        let mut worst = 0.0f64;
        for x in (1..=1_000_000).flat_map(|i| [i as f32 * 1.2e-5, i as f32 * -1.2e-5]) {
            let exact = f64::from(x).tanh();
            worst = worst.max((f64::from(tanh(x)) / exact - 1.0).abs());
        }
        assert!(worst < 2f64.powi(-20), "{worst:e}");
        assert_eq!([0.0, f32::INFINITY, f32::NEG_INFINITY].map(tanh), [0.0, 1.0, -1.0]);
        assert!(tanh(f32::NAN).is_nan() && (tanh(1e-20) / 1e-20 - 1.0).abs() < 1e-6);
    }

    #[test]
    fn exp2_is_within_its_bound() {
        let mut worst = 0.0f64;
        for i in 0..=2_000_000 {
            let x = -126.0 + i as f32 * (253.5 / 2_000_000.0);
            let exact = f64::from(x).exp2();
            worst = worst.max((f64::from(exp2(x)) / exact - 1.0).abs());
        }
        assert!(worst < 2.0 * f64::from(f32::EPSILON), "{worst:e}");
        assert_eq!(exp2(0.0), 1.0);
        assert_eq!(exp2(-1.0), 0.5);
        assert_eq!(exp2(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp2(-127.0), 0.0);
        assert_eq!(exp2(129.0), f32::INFINITY);
        for bits in [0x7fc0_0000, 0x7fc0_0001, 0x7fff_ffff, 0x7f80_0001, 0xffc0_1234] {
            assert!(exp2(f32::from_bits(bits)).is_nan(), "{bits:x}");
        }
    }

    #[test]
    fn log2_127_is_the_constant() {
        assert_eq!(LOG2_127, 127f64.log2() as f32);
    }

    #[test]
    fn folds_see_every_element() {
        for n in 0..70 {
            let row: Vec<f32> = (0..n).map(|i| i as f32 - 20.0).collect();
            assert_eq!(sum(&row), row.iter().sum::<f32>());
            assert_eq!(max(&row), row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
            assert_eq!(dot(&row, &row), row.iter().map(|x| x * x).sum::<f32>());
            let bits = row.iter().map(|x| x.abs().to_bits()).max().unwrap_or(0);
            assert_eq!(max_abs_bits(&row), bits);
        }
        assert!(f32::from_bits(max_abs_bits(&[1.0, f32::NAN, f32::INFINITY])).is_nan());
    }
}
