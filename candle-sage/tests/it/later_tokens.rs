//! How much later tokens change earlier outputs under a causal mask.

use candle_core::{DType, Result};
use candle_sage::{AttnQat, Int8Products, KeyMean, SageBwd, Scheme, Smoothing, ValueGroups, ValueScale};

use crate::support::Case;

/// Multiplies the keys (`tensor` 1) or values (`tensor` 2) at positions 200 to 255 by 50. Returns the largest change of
/// an output at positions 0 to 127, and at positions 192 to 199, both divided by the RMS of all outputs. Position 192
/// begins a tile of 64 tokens and a group of 16 tokens. The tile and the group contain changed tokens.
fn changes(scheme: Scheme, tensor: usize) -> Result<[f64; 2]> {
    let (d, len, from) = (64, 256, 200);
    let mut case = Case::new(1, (len, len), (1, 1), d, true);
    let before = case.run(scheme, DType::F32)?[0].clone();
    case.data[tensor][from * d..].iter_mut().for_each(|x| *x *= 50.0);
    let after = case.run(scheme, DType::F32)?[0].clone();
    let rms = (before.iter().map(|x| x * x).sum::<f64>() / before.len() as f64).sqrt();
    let most = |tokens: std::ops::Range<usize>| {
        let rows = tokens.start * d..tokens.end * d;
        before[rows.clone()].iter().zip(&after[rows]).map(|(a, b)| (a - b).abs() / rms).fold(0.0, f64::max)
    };
    Ok([most(0..128), most(192..200)])
}

/// Compares [`changes`] with the table under "What later tokens change" in docs/support.md. Other processors round sums
/// differently, which changes a few quantized values, so a fifth more or less is allowed. A zero must be exact.
#[test]
fn later_tokens_change_earlier_outputs_as_the_docs_say() -> Result<()> {
    let (sage, qat) = (SageBwd::default(), AttnQat::default());
    let scores = sage.products(Int8Products::SCORES);
    let all: [(Scheme, [f64; 4]); 13] = [
        (Scheme::Unquantized, [0.0; 4]),
        (sage.into(), [0.160, 0.147, 0.0, 0.121]),
        (sage.key_mean(KeyMean::Sample(64)).into(), [0.173, 0.303, 0.0, 0.121]),
        (sage.smoothing(Smoothing::Qk).into(), [0.152, 0.160, 0.0, 0.122]),
        (sage.smoothing(Smoothing::Kv).into(), [0.160, 0.146, 0.191, 0.121]),
        (sage.smoothing(Smoothing::None).into(), [0.0, 0.129, 0.0, 0.123]),
        (scores.into(), [0.139, 0.143, 0.0, 0.0]),
        (scores.smoothing(Smoothing::None).into(), [0.0, 0.126, 0.0, 0.0]),
        (qat.into(), [0.0, 0.0, 0.0, 0.374]),
        (qat.value_groups(ValueGroups::HeadDim).into(), [0.0; 4]),
        (qat.value_scale(ValueScale::Head).into(), [0.0, 0.0, 0.0, 0.374]),
        (qat.smoothing(Smoothing::K).into(), [1.560, 0.310, 0.0, 0.377]),
        (qat.smoothing(Smoothing::Kv).into(), [1.525, 0.313, 5.651, 0.850]),
    ];
    println!("far: before position 128; near: 192 to 199");
    println!("keys far, keys near, values far, values near");
    for (scheme, expected) in all {
        let got = [changes(scheme, 1)?, changes(scheme, 2)?].concat();
        let row: Vec<String> = got.iter().map(|x| format!("{x:.3}")).collect();
        println!("{}  {scheme}", row.join("  "));
        for (got, expected) in got.iter().zip(expected) {
            assert!((got - expected).abs() <= 0.2 * expected, "{scheme}: {got} instead of {expected}");
        }
    }
    Ok(())
}
