//! Tests of `mma` and `wgmma` with every layout of their operands.

use candle_core::Result;

use super::launch::{run, run_threads};
use super::{codes, numbers, token_of_slot};

/// Whole numbers from -8 to 8. They are exact in 16 bit, and sums of their products are exact in f32.
fn small(seed: u64, len: usize) -> Vec<half::bf16> {
    numbers(seed, len).into_iter().map(|n| half::bf16::from_f32((n % 17) as f32 - 8.0)).collect()
}

#[test]
#[ignore = "needs a GPU"]
fn products_of_codes_are_exact() -> Result<()> {
    for (kernel, width) in [("selftest_codes_64", 64), ("selftest_codes_128", 128)] {
        let mut extremes = (codes(1, 16 * width), codes(2, 16 * width));
        // The largest possible sums: 127^2 per term.
        extremes.0[..width].fill(127);
        extremes.1[..width].fill(127);
        extremes.1[width..2 * width].fill(-127);
        let (a, b) = extremes;
        let got: Vec<i32> = run(kernel, &a, &b, 256)?;
        for (i, row) in a.chunks(width).enumerate() {
            for (j, column) in b.chunks(width).enumerate() {
                let sum: i32 = row.iter().zip(column).map(|(&x, &y)| i32::from(x) * i32::from(y)).sum();
                assert_eq!(got[i * 16 + j], sum, "{kernel} ({i}, {j})");
            }
        }
    }
    Ok(())
}

/// `wgmma` on INT8 values, in every variant that the kernels use.
#[test]
#[ignore = "needs a Hopper GPU"]
fn products_of_codes_by_a_warpgroup_are_exact() -> Result<()> {
    for width in [64, 128] {
        for (form, columns) in [
            ("shared", 32),
            ("shared", 64),
            ("shared", 128),
            ("registers", 32),
            ("registers", 64),
            ("unsigned", 64),
            ("unsigned", 128),
        ] {
            let (mut a, mut b) = (codes(5, 64 * width), codes(6, columns * width));
            // As an unsigned value -1 is 255.
            let (most, value): (i8, fn(i8) -> i32) =
                if form == "unsigned" { (-1, |x| i32::from(x as u8)) } else { (127, i32::from) };
            a[..width].fill(most);
            b[..width].fill(127);
            b[width..2 * width].fill(-127);
            let kernel = format!("selftest_group_{width}_{form}_{columns}");
            let got: Vec<i32> = run_threads(128, &kernel, &a, &b, 64 * columns)?;
            for (i, row) in a.chunks(width).enumerate() {
                for (j, column) in b.chunks(width).enumerate() {
                    let sum: i32 = row.iter().zip(column).map(|(&x, &y)| value(x) * i32::from(y)).sum();
                    assert_eq!(got[i * columns + j], sum, "{kernel} ({i}, {j})");
                }
            }
        }
    }
    Ok(())
}

/// `wgmma` on 16-bit operands, in every variant that the kernels use.
#[test]
#[ignore = "needs a Hopper GPU"]
fn products_in_16_bit_by_a_warpgroup_are_exact() -> Result<()> {
    let (a, b) = (small(7, 64 * 64), small(8, 64 * 64));
    let halves = |m: &[half::bf16]| m.iter().map(|x| half::f16::from_f32(x.to_f32())).collect::<Vec<_>>();
    let at = |m: &[half::bf16], turned: bool, i: usize, k: usize| {
        m[if turned { k * 64 + i } else { i * 64 + k }].to_f32()
    };
    for (form, columns, a_turned, b_turned) in [
        ("nn", 64, false, false),
        ("nt", 64, false, true),
        ("tt", 32, true, true),
        ("registers", 64, false, true),
    ] {
        let name = |dtype: &str| format!("selftest_group_{dtype}_{form}_{columns}");
        let bf16: Vec<f32> = run_threads(128, &name("bf16"), &a, &b, 64 * columns)?;
        let f16: Vec<f32> = run_threads(128, &name("f16"), &halves(&a), &halves(&b), 64 * columns)?;
        for i in 0..64 {
            for j in 0..columns {
                let sum: f32 = (0..64).map(|k| at(&a, a_turned, i, k) * at(&b, b_turned, j, k)).sum();
                let got = (bf16[i * columns + j], f16[i * columns + j]);
                assert_eq!(got, (sum, sum), "{form} ({i}, {j})");
            }
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn products_in_16_bit_from_both_layouts() -> Result<()> {
    for (kernel, a_turned, b_turned) in [
        ("selftest_16_nn", false, false),
        ("selftest_16_nt", false, true),
        ("selftest_16_tn", true, false),
        ("selftest_16_tt", true, true),
    ] {
        let (a, b) = (small(3, 64 * 64), small(4, 64 * 64));
        let got: Vec<f32> = run(kernel, &a, &b, 256)?;
        let at = |m: &[half::bf16], turned: bool, i: usize, k: usize| {
            if turned { m[k * 64 + 16 + i] } else { m[i * 64 + k] }.to_f32()
        };
        for i in 0..16 {
            for j in 0..16 {
                let sum: f32 = (0..64).map(|k| at(&a, a_turned, i, k) * at(&b, b_turned, j, k)).sum();
                assert_eq!(got[i * 16 + j], sum, "{kernel} ({i}, {j})");
            }
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn packed_accumulators_match_permuted_tokens() -> Result<()> {
    let (s, v) = (codes(6, 16 * 32), codes(7, 32 * 16));
    // V^T: (16 channels, 64 bytes). The first 32 bytes of a channel are the values of 32 tokens. The others are unused.
    let mut turned = vec![0i8; 16 * 64];
    for channel in 0..16 {
        for slot in 0..32 {
            turned[channel * 64 + slot] = v[(slot / 16 * 16 + token_of_slot(slot % 16)) * 16 + channel];
        }
    }
    let got: Vec<i32> = run("selftest_permuted", &s, &turned, 256)?;
    for i in 0..16 {
        for c in 0..16 {
            let sum: i32 = (0..32).map(|t| i32::from(s[i * 32 + t]) * i32::from(v[t * 16 + c])).sum();
            assert_eq!(got[i * 16 + c], sum, "({i}, {c})");
        }
    }
    Ok(())
}
