//! Attention on a GPU: hidden keys change nothing, gradients are reproducible, memory is freed, errors have messages.

use candle_core::{DType, Result, Tensor};
use candle_sage::{Granularity, Scheme};

use super::{NAMES, all, sage};
use crate::support::{Case, gpu, relative_l2};

fn smooths_values(scheme: Scheme) -> bool {
    match scheme {
        Scheme::SageBwd(settings) => settings.smoothing.of_values(),
        Scheme::AttnQat(settings) => settings.smoothing.of_values(),
        _ => false,
    }
}

/// With a causal mask, a NaN in V does not affect the queries of earlier tiles (of 64 tokens). If V's mean is
/// subtracted, the NaN affects all queries.
#[test]
#[ignore = "needs a GPU"]
fn what_is_hidden_changes_nothing() -> Result<()> {
    for d in [64, 128] {
        for scheme in all() {
            let mut case = Case::new(1, (128, 128), (1, 1), d, true);
            case.draw(1.0, 10);
            case.round_to(DType::BF16)?;
            let attention = case.attention(scheme);
            let before = case.run_on(&gpu(), &attention, DType::BF16)?;
            case.data[2][100 * d] = f32::NAN;
            let after = case.run_on(&gpu(), &attention, DType::BF16)?;
            let first = 64 * d;
            if smooths_values(scheme) {
                assert!(after[0].iter().step_by(d).all(|x| x.is_nan()), "d {d}, {scheme}");
                continue;
            }
            assert!(after[0][..first].iter().all(|x| x.is_finite()), "d {d}, {scheme}");
            assert!(relative_l2(&after[0][..first], &before[0][..first]) <= 2f64.powi(-6), "d {d}, {scheme}");
            assert!(after[0][127 * d].is_nan(), "d {d}, {scheme}");
        }
    }
    Ok(())
}
#[test]
#[ignore = "needs a GPU"]
fn gradients_repeat_to_the_bit_when_asked_to() -> Result<()> {
    let device = gpu();
    for d in [64, 128] {
        for (lens, causal) in [((1500, 1500), true), ((700, 900), false)] {
            let mut case = Case::new(2, lens, (4, 2), d, causal);
            case.round_to(DType::BF16)?;
            for scheme in all() {
                let attention = case.attention(scheme).deterministic(true);
                let first = case.run_on(&device, &attention, DType::BF16)?;
                for _ in 0..5 {
                    assert!(case.run_on(&device, &attention, DType::BF16)? == first, "{scheme}, d {d}");
                }
                let any_order = case.run_on(&device, &case.attention(scheme), DType::BF16)?;
                for n in 0..4 {
                    let difference = relative_l2(&any_order[n], &first[n]);
                    assert!(difference < 1e-3, "{scheme}, d {d}, {}: {difference:.1e}", NAMES[n]);
                }
            }
        }
    }
    Ok(())
}
/// Memory that is in use on the device, in bytes, once all work is done.
fn used() -> Result<usize> {
    gpu().synchronize()?;
    let (free, total) = cudarc::driver::result::mem_get_info().expect("memory info");
    Ok(total - free)
}

#[test]
#[ignore = "needs a GPU"]
fn a_thousand_steps_leak_nothing() -> Result<()> {
    let device = gpu();
    for scheme in all() {
        let new = || Tensor::randn(0f32, 1., (2, 512, 4, 64), &device)?.to_dtype(DType::BF16);
        let (q, k, v, g) = (new()?, new()?, new()?, new()?);
        let attention = candle_sage::Attention::new(scheme).causal(true);
        let step = || attention.vjp(&q, &k, &v)?.1.apply(&g);
        for _ in 0..20 {
            step()?;
        }
        // One growth of memory below 1 MiB in up to 40 tries is enough, because other tests allocate memory
        // concurrently. A leak of a step's smallest buffer (16 KiB) would add 4 MB to every growth.
        let mut growths = Vec::new();
        while growths.len() < 40 && !growths.iter().any(|&grown| grown < 1 << 20) {
            let before = used()?;
            for _ in 0..250 {
                step()?;
            }
            growths.push(used()?.saturating_sub(before));
        }
        assert!(growths.iter().any(|&grown| grown < 1 << 20), "{scheme}: {growths:?} bytes more");
    }
    Ok(())
}

/// Calls that the kernels do not support are errors.
#[test]
#[ignore = "needs a GPU"]
fn messages() -> Result<()> {
    let device = gpu();
    let new = |d: usize, dtype| Tensor::zeros((1, 4, 1, d), dtype, &device);
    let says = |attention: candle_sage::Attention, x: Tensor, words: &str| {
        let message = attention.apply(&x, &x, &x).expect_err("an error").to_string();
        assert!(message.contains(words) && message.contains("hint:"), "{message}");
    };
    says(candle_sage::Attention::default(), new(64, DType::F32)?, "f16, bf16");
    says(candle_sage::Attention::new(sage()), new(136, DType::BF16)?, "8 to 128");
    says(candle_sage::Attention::default().softmax_scale(-1.0), new(64, DType::BF16)?, "above 0");
    for settings in [sage().tile_q(128), sage().granularity(Granularity::Group(3))] {
        says(candle_sage::Attention::new(settings), new(64, DType::BF16)?, "CPU");
    }
    Ok(())
}
