//! Compares the bits of attention's results on a GPU with the recorded bits in `bits/`: a refactoring of the kernels
//! must not change them.
//!
//! `CANDLE_SAGE_BITS=FILE` writes the bits of this build. After an intended change, commit that file as
//! `bits/sm_90.txt`.

use std::fmt::Write as _;

use candle_core::{DType, Result};
use candle_sage::{
    AttnQat, Int8Products, Packing, SageBwd, Scheme, Selection, Smoothing, ValueGroups, ValueScale,
};

use crate::support::{Case, Results, gpu, schemes};

/// Results of an H100 or an H200.
const HOPPER: &str = include_str!("bits/sm_90.txt");

fn cases() -> Vec<(String, Case)> {
    let mut cases = Vec::new();
    for d in [40, 64, 128, 192, 256] {
        let mut add = |name: &str, lens, heads, causal, packing: Option<Packing>| {
            let mut case = Case::new(1, lens, heads, d, causal);
            case.packing = packing;
            cases.push((format!("{name} d{d}"), case));
        };
        for lens in [(1, 1), (64, 64), (129, 129), (203, 113), (113, 203), (1023, 1024)] {
            for causal in [false, true] {
                let name = format!("{}x{}{}", lens.0, lens.1, if causal { " causal" } else { "" });
                add(&name, lens, (2, 1), causal, None);
            }
        }
        add("many", (1200, 1200), (24, 8), true, None);
        let documents = Packing::self_attention(vec![0, 1, 64, 64, 193, 450, 500]);
        add("packed", (500, 500), (4, 2), true, Some(documents));
    }
    cases
}

/// Fills the inputs with numbers in (-2, 2] that are equal on every machine: multiples of 2^-5, exact in bf16 and f16.
fn fill(case: &mut Case) {
    let mut state = 1u64;
    for values in &mut case.data {
        for x in values {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            *x = ((state >> 57) as i32 - 63) as f32 / 32.0;
        }
    }
}

/// FNV-1a hashes of the bits of the output and of each gradient.
fn hashes(results: &Results) -> String {
    let of = |values: &Vec<f64>| {
        let bytes = values.iter().flat_map(|x| x.to_bits().to_le_bytes());
        let hash =
            bytes.fold(0x811c_9dc5u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        format!("{hash:08x}")
    };
    results.iter().map(of).collect::<Vec<_>>().join(" ")
}

/// Lines of hashes for each case, scheme and element type: one for dense attention, and one for selected blocks if
/// there are as many queries as keys. Above 128 channels only two schemes have kernels.
fn lines() -> Result<String> {
    let (device, mut lines) = (gpu(), String::new());
    for (name, mut case) in cases() {
        fill(&mut case);
        let square = case.lens.0 == case.lens.1;
        let window =
            square.then(|| Selection::window(&case.shape(), (128, 128), 2, 1, &device)).transpose()?;
        let wide = |scheme: &Scheme| {
            [Scheme::Unquantized, SageBwd::default().products(Int8Products::SCORES).into()].contains(scheme)
        };
        // Attn-QAT's settings that change how operands are rounded.
        let rounded = AttnQat::default().smoothing(Smoothing::Kv).value_groups(ValueGroups::HeadDim);
        let all = schemes().into_iter().chain([rounded.value_scale(ValueScale::Head).into()]);
        for scheme in all.filter(|scheme| case.head_dim <= 128 || wide(scheme)) {
            for dtype in [DType::BF16, DType::F16] {
                let dense = case.attention(scheme).deterministic(true);
                let lists = window.as_ref().map(|window| ("lists", dense.clone().select(window)));
                for (what, attention) in [("dense", dense)].into_iter().chain(lists) {
                    let hashes = hashes(&case.run_on(&device, &attention, dtype)?);
                    writeln!(lines, "{hashes} {name} {what} {dtype:?} {scheme}").expect("a string");
                }
            }
        }
    }
    Ok(lines)
}

/// On Hopper, results must have the bits recorded in `bits/sm_90.txt`. On other GPUs, two runs must be bit-identical.
#[test]
#[ignore = "needs a GPU"]
fn results_have_the_bits_they_had() -> Result<()> {
    let now = lines()?;
    if let Some(path) = std::env::var_os("CANDLE_SAGE_BITS") {
        std::fs::write(path, &now)?;
        return Ok(());
    }
    let stream = gpu().as_cuda_device()?.cuda_stream();
    let capability = stream.context().compute_capability().expect("a compute capability");
    let then = if capability == (9, 0) { HOPPER.to_owned() } else { lines()? };
    let other: Vec<_> = now.lines().zip(then.lines()).filter(|(now, then)| now != then).collect();
    assert!(other.is_empty(), "{} lines differ, first (now, then): {:?}", other.len(), other[0]);
    assert_eq!(now.len(), then.len());
    Ok(())
}
