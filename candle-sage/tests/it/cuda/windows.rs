//! Sliding windows, which have separately compiled kernels.

use candle_core::{DType, Result};
use candle_sage::{Int8Products, Packing, Scheme};

use super::{all, repeats, run, sage};
use crate::support::{Case, gpu, relative_l2};

/// Windows whose edges are inside a tile, at the end of a tile, or beyond the sequence.
fn cases(d: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    for (lens, heads, window) in [
        ((300, 300), (2, 1), (Some(3), Some(0))),
        ((450, 450), (2, 2), (Some(127), Some(0))),
        ((511, 511), (4, 2), (Some(128), None)),
        ((600, 400), (2, 1), (Some(200), Some(0))),
        ((113, 603), (2, 2), (Some(300), Some(70))),
        ((500, 500), (1, 1), (Some(64), Some(64))),
        ((333, 333), (2, 1), (None, Some(100))),
        ((1, 900), (2, 1), (Some(255), Some(0))),
    ] {
        let mut case = Case::new(2, lens, heads, d, window.1 == Some(0));
        case.window = window;
        cases.push(case);
    }
    for (causal, window) in [(true, (Some(90), None)), (false, (Some(20), Some(40)))] {
        let mut case = Case::new(1, (500, 500), (2, 1), d, causal);
        case.packing = Some(Packing::self_attention(vec![0, 1, 64, 64, 193, 450, 500]));
        case.window = window;
        cases.push(case);
    }
    cases
}

fn name(case: &Case) -> String {
    format!("{:?}, window {:?}, d {}", case.lens, case.window, case.head_dim)
}

#[test]
#[ignore = "needs a GPU"]
fn windows() -> Result<()> {
    for d in [40, 64, 128] {
        for (seed, case) in cases(d).iter_mut().enumerate() {
            run(&name(case), case, &all(), seed as u64)?;
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn windows_of_large_heads() -> Result<()> {
    let scores: Scheme = sage().products(Int8Products::SCORES).into();
    for d in [192, 256] {
        for (seed, case) in cases(d).iter_mut().enumerate() {
            run(&name(case), case, &[Scheme::Unquantized, scores], seed as u64)?;
        }
    }
    Ok(())
}

/// With a window, `deterministic` gradients are bit-identical in a second run.
#[test]
#[ignore = "needs a GPU"]
fn gradients_of_windows_repeat() -> Result<()> {
    for d in [64, 128, 256] {
        let schemes = if d > 128 { vec![Scheme::Unquantized] } else { all() };
        for mut case in cases(d).into_iter().step_by(2) {
            repeats(&name(&case), &mut case, &schemes)?;
        }
    }
    Ok(())
}

/// Many heads: on a GPU with few multiprocessors, a thread block processes several tiles.
#[test]
#[ignore = "needs a GPU"]
fn windows_of_many_heads() -> Result<()> {
    for d in [64, 128] {
        let mut case = Case::new(2, (640, 640), (12, 4), d, true);
        case.window = (Some(250), Some(0));
        run(&name(&case), &mut case, &all(), 3)?;
    }
    Ok(())
}

/// A window as wide as the sequence is bit-identical to dense attention.
#[test]
#[ignore = "needs a GPU"]
fn a_window_that_holds_everything() -> Result<()> {
    for (scheme, causal) in all().into_iter().flat_map(|scheme| [(scheme, false), (scheme, true)]) {
        let mut case = Case::new(1, (300, 200), (2, 1), 64, causal);
        case.round_to(DType::BF16)?;
        let results =
            |case: &Case| case.run_on(&gpu(), &case.attention(scheme).deterministic(true), DType::BF16);
        let dense = results(&case)?;
        case.window = (Some(199), Some(usize::MAX));
        assert!(results(&case)? == dense, "{scheme}, causal {causal}");
        // This window uses the kernels for windows. It hides one key from only the last query, so the outputs of all
        // other queries must be almost equal.
        case.window = (Some(198), Some(usize::MAX));
        let rows = (case.lens.0 - 1) * 2 * 64;
        let difference = relative_l2(&results(&case)?[0][..rows], &dense[0][..rows]);
        assert!(difference < 1e-2, "{scheme}, causal {causal}: {difference:.1e}");
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn what_lies_before_the_window_changes_nothing() -> Result<()> {
    let smooths = |scheme: &Scheme| match scheme {
        Scheme::SageBwd(settings) => settings.smoothing != candle_sage::Smoothing::None,
        Scheme::AttnQat(settings) => settings.smoothing != candle_sage::Smoothing::None,
        _ => false,
    };
    let schemes = all().into_iter().chain([sage().smoothing(candle_sage::Smoothing::None).into()]);
    for (d, scheme) in
        schemes.filter(|scheme| !smooths(scheme)).flat_map(|scheme| [(64, scheme), (128, scheme)])
    {
        let mut case = Case::new(1, (512, 512), (1, 1), d, true);
        case.window = (Some(100), Some(0));
        case.round_to(DType::BF16)?;
        for tensor in [1, 2] {
            case.data[tensor][70 * d] = f32::NAN;
        }
        let [out, ..] = case.run_on(&gpu(), &case.attention(scheme), DType::BF16)?;
        // Query 355 sees keys from 255 on. Kernels read keys from a multiple of 128 on, here 128, and thus not key 70.
        assert!(out[355 * d..].iter().all(|x| x.is_finite()), "{scheme}, d {d}");
        assert!(out[100 * d].is_nan(), "{scheme}, d {d}");
    }
    Ok(())
}
