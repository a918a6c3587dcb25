//! Tests of conversions between numbers and INT8 or FP4 values, and of copies between registers and shared memory.

use candle_core::Result;

use super::launch::run;
use super::{codes, numbers};
use crate::nvfp4;

#[test]
#[ignore = "needs a GPU"]
fn fragments_go_to_shared_memory_and_back() -> Result<()> {
    let a = codes(5, 16 * 128);
    assert_eq!(run::<i8, i8>("selftest_round_trip", &a, &a, 16 * 128)?, a);
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn conversions_round_ties_to_even() -> Result<()> {
    let mut x: Vec<f32> = numbers(8, 96).into_iter().map(|n| (n % 254_000) as f32 / 1000.0).collect();
    x.extend((0..32).map(|i| i as f32 * 8.0 + 0.5));
    // `codes` computes the first 128 results, and `codes_of_positive` the next 128.
    let got: Vec<u8> = run("selftest_conversions", &x, &x, 256)?;
    for (i, x) in x.iter().enumerate() {
        assert_eq!(got[i], x.round_ties_even() as u8, "codes of {x}");
        // `codes_of_positive` first rounds x to f16. Because x is below 256, this changes it by at most 1/16: a value
        // within 1/16 of a tie may round either way.
        let distance = (f32::from(got[128 + i]) - x).abs();
        assert!(distance <= 0.5 + 1.0 / 16.0, "{} for {x}", got[128 + i]);
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn codes_over_powers_of_two_are_rounded() -> Result<()> {
    for start in [0, 128] {
        let x: Vec<u8> = (start..=start + 127).map(|code| if code == 255 { 254 } else { code }).collect();
        let got: Vec<u8> = run("selftest_smaller_codes", &x, &x, 10 * 128)?;
        for (i, got) in got.into_iter().enumerate() {
            let (power, code) = (i / 128, f64::from(x[i % 128]));
            let expected = if power > 8 { 0.0 } else { (code / 2f64.powi(power as i32) + 0.5).floor() };
            assert_eq!(f64::from(got), expected, "{code} over 2^{power}");
        }
    }
    Ok(())
}

/// The kernels convert to E2M1 and E4M3, and compute the scale of an NVFP4 group, with the same bits as `crate::nvfp4`.
/// If the GPU has an instruction that converts to E4M3, its result is tested too. Inputs are E4M3 values, the midpoints
/// between them, and numbers of all magnitudes.
#[test]
#[ignore = "needs a GPU"]
fn nvfp4_is_the_cpus_to_the_bit() -> Result<()> {
    const COUNT: usize = 1 << 16;
    let mut x: Vec<f32> = Vec::new();
    for code in 0..0x7e {
        let (low, high) = (nvfp4::e4m3_value(code), nvfp4::e4m3_value(code + 1));
        x.extend([low, high, (low + high) / 2.0].into_iter().flat_map(|x| [x, 6.0 * x]));
    }
    x.extend([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0]);
    let near = |x: &f32| [x.to_bits() + 1, x.to_bits().saturating_sub(1)].map(f32::from_bits);
    let neighbours: Vec<f32> = x.iter().flat_map(near).collect();
    x.extend(neighbours);
    x.extend(numbers(9, COUNT - x.len()).into_iter().map(|n| f32::from_bits(n as u32 % 0x7f80_0000)));
    // Only E2M1 is tested with negative values.
    for sign in [1.0, -1.0] {
        let x: Vec<f32> = x.iter().map(|x| sign * x).collect();
        let got: Vec<f32> = run("selftest_nvfp4", &x, &x, 5 * COUNT)?;
        let bits = |x: f32| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
        for (i, &x) in x.iter().enumerate() {
            let scale = nvfp4::Scale::of(x.abs());
            let expected =
                [nvfp4::e2m1(x), nvfp4::e4m3(x.abs()), scale.dequant, scale.quant, nvfp4::e4m3(x.abs())];
            for (n, expected) in expected.into_iter().enumerate() {
                let got = got[n * COUNT + i];
                assert_eq!(bits(got), bits(expected), "conversion {n} of {x:e}: {got:e}, {expected:e}");
            }
        }
    }
    Ok(())
}
