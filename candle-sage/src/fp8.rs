//! FP8: 8-bit floating-point values with one scale per matrix.
//!
//! ```text
//! scale = the least power of two with max|x| <= largest * scale      (largest: the format's largest finite value)
//! code  = FP8(x / scale)                  x ~ value(code) * scale
//! ```
//!
//! Conversions round to nearest, ties to the even code, and saturate, as `cvt.rn.satfinite` does on NVIDIA GPUs. A NaN
//! stays a NaN. Multiplying by a power of two is exact, so the CPU and every GPU compute the same codes. The relative
//! precision of a floating-point format does not depend on the size of the value, so a scale between two powers of two
//! would not be more accurate.
//!
//! Formats: Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433, table 1 (E4M3 without infinities).

use crate::nvfp4::round_magnitude;

/// An 8-bit floating-point format: sign, exponent and mantissa.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Fp8Format {
    /// 4 bits of exponent, 3 of mantissa. Largest value 448, relative precision 2^-4, smallest normal value 2^-6.
    #[default]
    E4M3,
    /// 5 bits of exponent, 2 of mantissa. Largest value 57344, relative precision 2^-3, smallest normal value 2^-14.
    E5M2,
}

/// The code of a NaN in both formats.
const NAN: u8 = 0x7f;

impl Fp8Format {
    /// The largest finite value: `1.75 * 2^8` for E4M3, `1.75 * 2^15` for E5M2.
    pub const fn largest(self) -> f32 {
        match self {
            Self::E4M3 => 448.0,
            Self::E5M2 => 57344.0,
        }
    }

    const fn mantissa_bits(self) -> u32 {
        match self {
            Self::E4M3 => 3,
            Self::E5M2 => 2,
        }
    }

    /// The exponent of the largest value.
    const fn top_exponent(self) -> i32 {
        match self {
            Self::E4M3 => 8,
            Self::E5M2 => 15,
        }
    }

    /// The exponent of the smallest normal value.
    const fn least_exponent(self) -> i32 {
        match self {
            Self::E4M3 => -6,
            Self::E5M2 => -14,
        }
    }

    /// The nearest value of the format; ties go to the even code. Magnitudes above [`largest`](Self::largest) become
    /// `largest`. A NaN stays a NaN.
    ///
    /// ```
    /// use candle_sage::fp8::Fp8Format::{E4M3, E5M2};
    ///
    /// assert_eq!([0.3, 17.0, 19.0, -1e6].map(|x| E4M3.round(x)), [0.3125, 16.0, 20.0, -448.0]);
    /// assert_eq!([0.3, 17.0, 19.0, -1e6].map(|x| E5M2.round(x)), [0.3125, 16.0, 20.0, -57344.0]);
    /// ```
    #[inline(always)]
    pub fn round(self, x: f32) -> f32 {
        let largest = self.largest();
        let saturated = if x.abs() > largest { largest } else { x.abs() };
        let step = power_of_two(-(self.mantissa_bits() as i32));
        round_magnitude(saturated, step, power_of_two(self.least_exponent())).copysign(x)
    }

    /// The code of the nearest value: sign in bit 7, then exponent, then mantissa. 0x7f for NaN.
    ///
    /// ```
    /// use candle_sage::fp8::Fp8Format::E4M3;
    ///
    /// assert_eq!([1.0, -448.0, 2f32.powi(-9), f32::NAN].map(|x| E4M3.code(x)), [0x38, 0xfe, 0x01, 0x7f]);
    /// ```
    #[inline(always)]
    pub fn code(self, x: f32) -> u8 {
        if x.is_nan() {
            return NAN;
        }
        let bits = self.round(x).to_bits();
        let (mantissa, least) = (self.mantissa_bits(), self.least_exponent());
        let exponent = (bits >> 23 & 0xff) as i32 - 127;
        let magnitude = if exponent < least {
            // Subnormal: the magnitude in units of the smallest subnormal value.
            (f32::from_bits(bits & 0x7fff_ffff) * power_of_two(mantissa as i32 - least)) as u32
        } else {
            ((exponent - least + 1) as u32) << mantissa | bits >> (23 - mantissa) & ((1 << mantissa) - 1)
        };
        (bits >> 24 & 0x80) as u8 | magnitude as u8
    }

    /// The value of a code. E5M2 has infinities (0x7c, 0xfc), which [`code`](Self::code) never returns.
    ///
    /// ```
    /// use candle_sage::fp8::Fp8Format::{E4M3, E5M2};
    ///
    /// assert_eq!([E4M3.value(0x7e), E5M2.value(0x7b), E5M2.value(0x7c)], [448.0, 57344.0, f32::INFINITY]);
    /// assert!(E4M3.value(0x7f).is_nan());
    /// ```
    #[inline(always)]
    pub fn value(self, code: u8) -> f32 {
        let (mantissa, least) = (self.mantissa_bits(), self.least_exponent());
        let (magnitude, low) = (u32::from(code & 0x7f), u32::from(code) & ((1 << mantissa) - 1));
        let exponent = magnitude >> mantissa;
        let value = match self {
            Self::E4M3 if magnitude == 0x7f => f32::NAN,
            Self::E5M2 if exponent == 31 => {
                if low == 0 {
                    f32::INFINITY
                } else {
                    f32::NAN
                }
            }
            _ if exponent == 0 => low as f32 * power_of_two(least - mantissa as i32),
            _ => f32::from_bits(((exponent as i32 - 1 + least + 127) as u32) << 23 | low << (23 - mantissa)),
        };
        if code & 0x80 == 0 { value } else { -value }
    }

    /// The scale of a matrix whose largest absolute value is `largest`: the least power of two, from 2^-126 to 2^126,
    /// such that `largest / scale` does not saturate. The scale is 1 if `largest` is zero, infinite or NaN.
    ///
    /// ```
    /// use candle_sage::fp8::Fp8Format::E4M3;
    ///
    /// assert_eq!([448.0, 449.0, 7.0, 0.0].map(|largest| E4M3.scale(largest)), [1.0, 2.0, 1.0 / 64.0, 1.0]);
    /// ```
    pub fn scale(self, largest: f32) -> f32 {
        if !(largest > 0.0 && largest.is_finite()) {
            return 1.0;
        }
        let bits = largest.to_bits();
        let exponent = (bits >> 23) as i32 - 127 - self.top_exponent();
        // The largest E4M3 value and the largest E5M2 value have the mantissa 1.75.
        let is_above = bits & 0x7f_ffff > 0x60_0000;
        power_of_two((exponent + i32::from(is_above)).clamp(-126, 126))
    }
}

#[inline(always)]
fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

/// The largest absolute value, or NaN if a value is NaN.
pub(crate) fn largest_of(values: &[f32]) -> f32 {
    // The bits of positive floats sort like the floats, with NaN above infinity.
    f32::from_bits(values.iter().map(|x| x.to_bits() & 0x7fff_ffff).max().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::Fp8Format::{self, E4M3, E5M2};
    use super::*;

    /// The codes of the finite non-negative values, in ascending order.
    fn finite(format: Fp8Format) -> impl Iterator<Item = u8> {
        (0..=if format == E4M3 { 0x7eu8 } else { 0x7b }).filter(move |&code| format.value(code).is_finite())
    }

    #[test]
    fn every_code_is_its_own() {
        for format in [E4M3, E5M2] {
            for code in 0..=255u8 {
                let value = format.value(code);
                let expected = match value {
                    value if value.is_nan() => NAN,
                    value if value.is_infinite() => format.code(format.largest().copysign(value)),
                    _ => code,
                };
                assert_eq!(format.code(value), expected, "{format:?} {code:#x}");
            }
            assert_eq!(finite(format).map(|code| format.value(code)).last(), Some(format.largest()));
        }
    }

    /// candle's conversion is independent of this file: it uses the crate `float8`.
    #[test]
    fn values_are_those_of_candle() {
        use candle_core::{DType, Device, Tensor};
        let codes: Vec<f32> = finite(E4M3).map(|code| E4M3.value(code)).collect();
        let tensor = Tensor::new(codes.as_slice(), &Device::Cpu).expect("a tensor");
        let back = tensor.to_dtype(DType::F8E4M3).and_then(|x| x.to_dtype(DType::F32)).expect("a conversion");
        assert_eq!(back.to_vec1::<f32>().expect("values"), codes);
    }

    /// The midpoint of two adjacent values rounds to the even code, and the f32 values next to the midpoint round to
    /// the nearer code.
    #[test]
    fn every_midpoint_is_rounded_to_the_even_value() {
        for format in [E4M3, E5M2] {
            let codes: Vec<u8> = finite(format).collect();
            for pair in codes.windows(2) {
                let [low, high] = [pair[0], pair[1]].map(|code| format.value(code));
                let middle = (f64::from(low) + f64::from(high)) as f32 / 2.0;
                let even = if pair[0] % 2 == 0 { pair[0] } else { pair[1] };
                for (x, code) in [(middle, even), (middle.next_down(), pair[0]), (middle.next_up(), pair[1])]
                {
                    assert_eq!(format.code(x), code, "{format:?} {x:e}");
                    assert_eq!(format.code(-x), code | 0x80, "{format:?} {:e}", -x);
                }
            }
            let top = *codes.last().expect("codes");
            assert_eq!([format.largest() * 1.01, f32::INFINITY].map(|x| format.code(x)), [top; 2]);
            assert_eq!(format.code(-0.0), 0x80);
            assert_eq!(format.code(f32::from_bits(1)), 0);
        }
    }

    #[test]
    fn a_scale_just_avoids_saturation() {
        for format in [E4M3, E5M2] {
            let mut largest = f32::MIN_POSITIVE * 1e-3;
            while largest.is_finite() {
                let scale = format.scale(largest);
                assert_eq!(scale.to_bits() & 0x7f_ffff, 0, "a power of two");
                assert!(largest / scale <= format.largest(), "{format:?} {largest:e}");
                // With half the scale, `largest` would saturate, unless the scale is 2^-126.
                assert!(largest / scale * 2.0 > format.largest() || scale == 2f32.powi(-126), "{largest:e}");
                largest *= 1.37;
            }
            assert_eq!([0.0, f32::NAN, f32::INFINITY].map(|largest| format.scale(largest)), [1.0; 3]);
        }
        assert!(largest_of(&[1.0, f32::NAN, f32::INFINITY]).is_nan());
        assert_eq!(largest_of(&[1.0, -3.0, 2.0]), 3.0);
        assert_eq!(largest_of(&[]), 0.0);
    }
}
