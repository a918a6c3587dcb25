//! The op on a GPU against f64 and against the CPU. `cargo test --features cuda -- --ignored` on a machine with one.

use candle_core::{DType, Device, Result};
use candle_sage::{Granularity, Packing, SageBwd, Scheme, Smoothing};

use crate::support::{Case, Results, relative_l2};

const NAMES: [&str; 4] = ["O", "dQ", "dK", "dV"];

fn gpu() -> Device {
    Device::new_cuda(0).expect("a GPU")
}

fn sage() -> SageBwd {
    SageBwd::default()
}

/// The rule of FlashAttention-3's tests: the error against f64 is at most twice that of a plain run in low precision,
/// and a floor for results that are tiny. The plain run is the CPU's: for SageBwd the same codes; in full precision the
/// CPU computes in f32, so that what a 16-bit P and dS cost is added: each rounds by at most 2^-9 (bf16) or 2^-12 (f16),
/// and both meet in dQ and dK.
fn check(what: &str, case: &Case, scheme: Scheme, dtype: DType, got: &Results) -> Result<()> {
    let exact = case.exact();
    let plain = case.run(scheme, dtype)?;
    let rounding = if dtype == DType::BF16 { 2f64.powi(-9) } else { 2f64.powi(-12) };
    for n in 0..4 {
        let (error, plain) = (relative_l2(&got[n], &exact[n]), relative_l2(&plain[n], &exact[n]));
        let limit = match scheme {
            Scheme::FullPrecision => 2.0 * (plain + rounding),
            _ => 1.25 * plain + 2.0 * rounding,
        };
        assert!(error <= limit, "{what}, {}: {error:.2e}, limit {limit:.2e}, CPU {plain:.2e}", NAMES[n]);
    }
    Ok(())
}

fn run(what: &str, case: &mut Case, schemes: &[Scheme], seed: u64) -> Result<()> {
    let device = gpu();
    for dtype in [DType::BF16, DType::F16] {
        case.draw(1.0, seed);
        case.round_to(dtype)?;
        for &scheme in schemes {
            let got = case.run_on(&device, &case.attention(scheme), dtype)?;
            check(&format!("{what}, {scheme}, {dtype:?}"), case, scheme, dtype, &got)?;
        }
    }
    Ok(())
}

fn both() -> [Scheme; 2] {
    [Scheme::FullPrecision, sage().into()]
}

#[test]
#[ignore = "needs a GPU"]
fn lengths() -> Result<()> {
    let lengths = [
        (1, 1),
        (63, 63),
        (64, 64),
        (127, 127),
        (128, 128),
        (129, 129),
        (1000, 1000),
        (113, 203),
        (203, 113),
        (1023, 1024),
        (1, 300),
        (300, 1),
    ];
    for (seed, lens) in lengths.into_iter().enumerate() {
        for causal in [false, true] {
            for d in [64, 128] {
                let mut case = Case::new(1, lens, (2, 2), d, causal);
                run(&format!("{lens:?}, causal {causal}, d {d}"), &mut case, &both(), seed as u64)?;
            }
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn a_long_sequence() -> Result<()> {
    let mut case = Case::new(1, (4096, 4096), (1, 1), 64, true);
    run("4096", &mut case, &both(), 1)
}

#[test]
#[ignore = "needs a GPU"]
fn head_layouts() -> Result<()> {
    for (heads, batch) in [((4, 4), 2), ((4, 2), 2), ((6, 1), 1), ((8, 2), 3)] {
        for d in [64, 128] {
            let mut case = Case::new(batch, (150, 150), heads, d, true);
            run(&format!("heads {heads:?}, batch {batch}, d {d}"), &mut case, &both(), 2)?;
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn head_dims_are_padded_inside() -> Result<()> {
    for d in [8, 24, 33, 40, 63, 72, 80, 96, 97, 127] {
        for causal in [false, true] {
            let mut case = Case::new(2, (100, 130), (2, 1), d, causal);
            run(&format!("d {d}, causal {causal}"), &mut case, &both(), 3)?;
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn packed_documents() -> Result<()> {
    for d in [64, 128] {
        let mut case = Case::new(1, (500, 500), (2, 1), d, true);
        case.packing = Some(Packing::self_attention(vec![0, 1, 64, 64, 193, 450, 500]));
        run(&format!("packed, d {d}"), &mut case, &both(), 4)?;
        let mut case = Case::new(1, (300, 400), (2, 2), d, false);
        case.packing = Some(Packing {
            cu_seqlens_q: vec![0, 10, 10, 200, 300],
            cu_seqlens_k: vec![0, 100, 130, 130, 400],
        });
        run(&format!("packed with different lengths, d {d}"), &mut case, &both(), 5)?;
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn settings_of_sagebwd() -> Result<()> {
    let mut schemes: Vec<Scheme> = Vec::new();
    for smoothing in [Smoothing::None, Smoothing::K, Smoothing::Qk] {
        schemes.push(SageBwd { smoothing, ..sage() }.into());
    }
    for granularity in [2, 4, 8, 16, 32, 64].map(Granularity::Group).into_iter().chain([Granularity::Tile]) {
        schemes.push(SageBwd { granularity, ..sage() }.into());
    }
    for d in [64, 128] {
        for lens in [(300, 300), (130, 200)] {
            let mut case = Case::new(2, lens, (2, 1), d, true);
            run(&format!("d {d}, {lens:?}"), &mut case, &schemes, 6)?;
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
            for scheme in both() {
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
