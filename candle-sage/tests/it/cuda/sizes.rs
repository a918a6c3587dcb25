//! Values, gradients and logits of any size.

use candle_core::{DType, Result};
use candle_sage::{Packing, Scheme};

use super::{all, check, sage};
use crate::support::{Case, gpu, relative_l2};

/// Attn-QAT is omitted. Its errors are too large for these tests: even if a query sees only one key, the probability is
/// off by about 3 %, because the probability's scale is rounded to E4M3.
fn both() -> [Scheme; 2] {
    [Scheme::Unquantized, sage().into()]
}

/// As [`check`], for only a part of a bf16 result: values that are all of about the same size.
fn check_part(what: &str, [got, exact, plain]: [&[f64]; 3]) {
    let error = relative_l2(got, exact);
    let limit = 1.25 * relative_l2(plain, exact) + 2f64.powi(-7);
    assert!(error <= limit, "{what}: {error:.2e}, limit {limit:.2e}");
}

fn resize(data: &mut [f32], width: usize, size: impl Fn(usize) -> f32) {
    for (token, values) in data.chunks_mut(width).enumerate() {
        values.iter_mut().for_each(|x| *x *= size(token));
    }
}
/// Gradients are accurate if dO is of size 1e-18 or 1e12, and if dO of one query is 2^9 times smaller than dO of the
/// next query. See `DsUnit` in `attention/numerics/score_codes_sm90.cuh`.
#[test]
#[ignore = "needs a GPU"]
fn gradients_of_any_size() -> Result<()> {
    let device = gpu();
    for d in [64, 128] {
        for scheme in all() {
            let mut packed = Case::new(1, (300, 300), (2, 1), d, true);
            packed.packing = Some(Packing::self_attention(vec![0, 20, 90, 91, 300]));
            // Lengths that leave some warps without keys.
            let lengths = [20, 70, 400].map(|n| Case::new(1, (n, n), (2, 2), d, true));
            for mut case in lengths.into_iter().chain([packed]) {
                for (name, size) in [("1e-18", 2f32.powi(-60)), ("1e12", 2f32.powi(40))] {
                    case.draw(1.0, 7);
                    case.data[3].iter_mut().for_each(|x| *x *= size);
                    case.round_to(DType::BF16)?;
                    let got = case.run_on(&device, &case.attention(scheme), DType::BF16)?;
                    let what = format!("dO of {name}, {:?}, d {d}, {scheme}", case.lens);
                    check(&what, &case, scheme, DType::BF16, &got)?;
                }
            }
            let mut case = Case::new(1, (400, 400), (2, 2), d, true);
            // The size of dO changes from query to query, and from tile to tile.
            case.draw(1.0, 8);
            let row = 2 * d;
            let size = |token: usize| 2f32.powi(-((token % 10) as i32) - 7 * (token / 64) as i32);
            resize(&mut case.data[3], row, size);
            case.round_to(DType::BF16)?;
            let got = case.run_on(&device, &case.attention(scheme), DType::BF16)?;
            let (exact, plain) = (case.exact(), case.run(scheme, DType::BF16)?);
            let smallest = |dq: &[f64]| {
                let rows = dq.chunks(row).enumerate().filter(|(token, _)| token % 10 == 9);
                rows.flat_map(|(token, values)| values.iter().map(move |x| x / f64::from(size(token))))
                    .collect::<Vec<_>>()
            };
            let parts = [&got, &exact, &plain].map(|results| smallest(&results[1]));
            check_part(&format!("dQ of small dO, d {d}, {scheme}"), parts.each_ref().map(|part| &part[..]));
        }
    }
    Ok(())
}

/// On Hopper, P V of two tiles of keys is one integer sum (`attention/numerics/sagebwd_forward_sm90.cuh`). V may be up
/// to 2^20 times smaller in one tile than in the other: outputs of queries that see only the smaller V stay accurate.
/// For even smaller V, these outputs lose bits and finally become zero, but never grow.
#[test]
#[ignore = "needs a GPU"]
fn values_of_any_size() -> Result<()> {
    const ZERO: i32 = -1000;
    let (device, tokens, heads) = (gpu(), 5 * 64, 2);
    let sizes = [
        [0, -14, -3, -21, 0],
        [-18, 0, 9, 12, -7],
        [-20, 0, 0, -20, -30],
        [-60, 0, 0, -40, -30],
        [-22, 0, 0, -24, 3],
        [ZERO, 0, ZERO, ZERO, 1],
    ];
    for d in [64, 128] {
        let row = heads * d;
        for (scheme, causal) in both().into_iter().flat_map(|scheme| [(scheme, false), (scheme, true)]) {
            for powers in sizes {
                let size = |token: usize| 2f32.powi(powers[token / 64]);
                let mut case = Case::new(1, (tokens, tokens), (heads, heads), d, causal);
                case.draw(1.0, 9);
                // A query's logits for keys in the same tile exceed its other logits by about 35 or more.
                for n in [0, 1] {
                    for (i, x) in case.data[n].chunks_mut(d).enumerate() {
                        x[i / heads / 64] += 20.0;
                    }
                }
                resize(&mut case.data[2], row, size);
                case.round_to(DType::BF16)?;
                let got = case.run_on(&device, &case.attention(scheme), DType::BF16)?;
                let (exact, plain) = (case.exact(), case.run(scheme, DType::BF16)?);
                for (tile, power) in powers.into_iter().enumerate() {
                    let what = format!("O of V 2^{power} in {powers:?}, d {d}, causal {causal}, {scheme}");
                    let rows = tile * 64 * row..(tile + 1) * 64 * row;
                    let parts = [&got, &exact, &plain].map(|results| &results[0][rows.clone()]);
                    // P V of key tiles 2n and 2n + 1 is one integer sum. A causal query in tile 2n does not see tile
                    // 2n + 1, so the size of V in tile 2n + 1 must not affect this query's output.
                    let unseen = causal && tile % 2 == 0;
                    let neighbour = powers.get(tile ^ 1).filter(|_| !unseen).map_or(power, |&other| other);
                    let lost = neighbour - 20 - power;
                    if power != ZERO && (1..=5).contains(&lost) {
                        // Quantized P loses `lost` bits, or one more because V is random. So it has steps of at most
                        // 2 * 2^lost / 254 of the query's largest P. For each of the tile's 64 keys, P is off by up to
                        // half a step. The norm of these 64 errors is at most 8 half steps, the second term of `limit`.
                        let error = relative_l2(parts[0], parts[1]);
                        let limit = 0.05 + 8.0 * 2f64.powi(lost) / 254.0;
                        assert!(error <= limit, "{what}: {error:.2e}, limit {limit:.2e}");
                    } else if power == ZERO || lost > 0 {
                        let largest = parts[0].iter().fold(0.0, |most: f64, x| most.max(x.abs()));
                        let all = powers.into_iter().max().expect("five");
                        let limit = 8.0 * (2f64.powi(power) + 2f64.powi(all - 29));
                        assert!(largest <= limit, "{what}: {largest:.2e}, limit {limit:.2e}");
                    } else {
                        check_part(&what, parts);
                    }
                }
            }
        }
    }
    Ok(())
}
/// If all elements of V are 1, all outputs must be 1, however large the logits are.
#[test]
#[ignore = "needs a GPU"]
fn large_logits() -> Result<()> {
    for d in [64, 128] {
        for scheme in both() {
            for size in [100.0, 3e3, 1e5] {
                let mut case = Case::new(1, (300, 300), (2, 2), d, true);
                case.draw(1.0, 13);
                case.data[0].iter_mut().for_each(|x| *x *= size);
                case.data[2].fill(1.0);
                case.round_to(DType::BF16)?;
                let got = case.run_on(&gpu(), &case.attention(scheme), DType::BF16)?;
                let worst = got[0].iter().fold(0.0, |most: f64, x| most.max((x - 1.0).abs()));
                // Probabilities under half a quantization step become 0. The sum of these probabilities is small,
                // because the logits are far apart.
                assert!(worst <= 2f64.powi(-5), "queries times {size}, d {d}, {scheme}: {worst}");
            }
        }
    }
    Ok(())
}
