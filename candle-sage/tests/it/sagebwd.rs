//! The accuracy of SageBwd.

use candle_core::{DType, Result};
use candle_sage::{Granularity, Int8Products, KeyMean, SageBwd, Scheme, Smoothing};

use crate::support::{Case, PUBLISHED, relative_l2, sigma_errors};

const NAMES: [&str; 4] = ["O", "dQ", "dK", "dV"];

fn sage() -> SageBwd {
    SageBwd::default()
}

/// For sigma 1, 3 and 5, the errors of O, dQ, dK and dV are within 10 % of Table 1 of arXiv 2603.02170. Only the error
/// of dK at sigma 1 is about 15 % smaller than published. For it the test allows 20 %.
#[test]
fn errors_reproduce_the_published_table() -> Result<()> {
    const SEEDS: u64 = 6;
    for head_dim in [64, 128] {
        for (sigma, published) in &PUBLISHED[..3] {
            let mut mean = [0.0; 4];
            for seed in 0..SEEDS {
                let errors = sigma_errors(sage().into(), head_dim, *sigma, seed)?;
                mean.iter_mut().zip(errors).for_each(|(mean, e)| *mean += e / SEEDS as f64);
            }
            for ((name, error), published) in NAMES.iter().zip(mean).zip(published) {
                let ratio = error / published;
                let lowest = if *name == "dK" && *sigma == 1.0 { 0.80 } else { 0.90 };
                assert!(
                    (lowest..=1.10).contains(&ratio),
                    "{name} at sigma {sigma}, d {head_dim}: {error:.4} is {ratio:.2}x"
                );
            }
        }
    }
    Ok(())
}

/// At sigma 1, dQ, dK and dV have smaller errors if the matmuls that compute them are not in INT8. At sigma 5 the
/// errors are similar, because quantizing Q and K causes most of them.
///
/// The expected errors of dK and dV with `FORWARD_AND_S` are from a simulation. The simulation computes dQ from
/// quantized K, but the op does not. Therefore the expected error of dK is used for dQ too.
#[test]
fn matmuls_without_int8_are_more_accurate() -> Result<()> {
    const SEEDS: u64 = 6;
    let errors = |products: Int8Products, sigma: f32| -> Result<[f64; 4]> {
        let mut mean = [0.0; 4];
        for seed in 0..SEEDS {
            let errors = sigma_errors(sage().products(products).into(), 64, sigma, seed)?;
            mean.iter_mut().zip(errors).for_each(|(mean, e)| *mean += e / SEEDS as f64);
        }
        println!("{products}, sigma {sigma}: {mean:.4?}");
        Ok(mean)
    };
    let (paper, with_s) = (errors(Int8Products::PAPER, 1.0)?, errors(Int8Products::FORWARD_AND_S, 1.0)?);
    for (n, (error, simulated)) in with_s[1..].iter().zip([0.0119, 0.0119, 0.0108]).enumerate() {
        let ratio = error / simulated;
        assert!((0.9..1.1).contains(&ratio), "{}: {error:.4} is {ratio:.2}x", NAMES[n + 1]);
    }
    let steps = [
        Int8Products::FORWARD_AND_S,
        Int8Products::FORWARD_AND_S.dv(true),
        Int8Products::FORWARD_AND_S.dv(true).dk(true),
        Int8Products::PAPER,
    ];
    // Each step quantizes one more matmul, which changes only the gradient that this matmul computes.
    for (pair, changed) in steps.windows(2).zip([3, 2, 1]) {
        let (before, after) = (errors(pair[0], 1.0)?, errors(pair[1], 1.0)?);
        for n in 0..4 {
            let grew = after[n] > 1.1 * before[n];
            assert_eq!(
                grew,
                n == changed,
                "{} with {}: {:.4} after {:.4}",
                NAMES[n],
                pair[1],
                after[n],
                before[n]
            );
        }
    }
    assert_eq!(paper[0].to_bits(), errors(Int8Products::FORWARD, 1.0)?[0].to_bits(), "one forward");
    // `SCORES`, unlike `FORWARD_AND_S`, does not quantize P and V: O is more accurate, and so is delta, from which dQ
    // and dK are computed.
    let scores = errors(Int8Products::SCORES, 1.0)?;
    assert!(scores[0] < 0.8 * with_s[0], "{scores:.4?} and {with_s:.4?}");
    for n in 1..4 {
        assert!(scores[n] < 1.02 * with_s[n], "{}: {scores:.4?} and {with_s:.4?}", NAMES[n]);
    }
    let (paper, with_s) = (errors(Int8Products::PAPER, 5.0)?, errors(Int8Products::FORWARD_AND_S, 5.0)?);
    errors(Int8Products::FORWARD, 5.0)?;
    for n in 1..4 {
        assert!((0.9..1.02).contains(&(with_s[n] / paper[n])), "{}: {with_s:?} and {paper:?}", NAMES[n]);
    }
    Ok(())
}

/// At sigma 1, the errors of dQ, dK and dV with `Tile` are twice those with `Vector`. The errors with `Group` are in
/// between, and increase with the group's size.
#[test]
fn coarser_scales_are_less_accurate_at_sigma_one() -> Result<()> {
    let granularities =
        [Granularity::Vector, Granularity::Group(8), Granularity::Group(32), Granularity::Tile];
    let mut last = [0.0; 4];
    for granularity in granularities {
        let errors = sigma_errors(sage().granularity(granularity).into(), 128, 1.0, 0)?;
        for n in 1..4 {
            assert!(
                errors[n] > 1.02 * last[n],
                "{} with {granularity}: {:.4} after {:.4}",
                NAMES[n],
                errors[n],
                last[n]
            );
        }
        last = errors;
    }
    assert!(last[1..].iter().all(|e| (0.033..0.042).contains(e)), "{last:?}");
    Ok(())
}

/// A vector added to every key does not change softmax and gradients. With smoothing the errors do not change. Without
/// smoothing the vector takes most of the INT8 range.
#[test]
fn smoothing_takes_out_a_key_bias() -> Result<()> {
    let mut case = Case::new(1, (1024, 1024), (1, 1), 128, false);
    let plain = case.errors(sage().into(), DType::F32)?;
    let mut normals = crate::support::Normals::new(7);
    let bias = normals.vec(128, 10.0);
    case.add_to_keys(&bias, |_| 1.0);
    let smooth = case.errors(sage().into(), DType::F32)?;
    for n in 0..4 {
        assert!((smooth[n] / plain[n] - 1.0).abs() < 0.05, "{}: {plain:?} became {smooth:?}", NAMES[n]);
    }
    let rough = case.errors(sage().smoothing(Smoothing::None).into(), DType::F32)?;
    assert!(rough[1] > 5.0 * smooth[1] && rough[0] > 2.0 * smooth[0], "{rough:?} against {smooth:?}");
    Ok(())
}

/// Smoothing with the mean of 64 of 1024 keys has at most 3 % larger errors than with the mean of all keys: for keys
/// without a bias, with a bias of ten times their size, and with a bias that grows along the sequence. Where the bias
/// grows, the mean of 64 keys makes some errors smaller, because neither mean fits all keys.
#[test]
fn a_sample_tells_the_mean_of_keys() -> Result<()> {
    let bias = crate::support::Normals::new(7).vec(128, 10.0);
    let growing = |token: usize| 2.0 * token as f32 / 1024.0;
    let drifts: [&dyn Fn(usize) -> f32; 3] = [&|_| 0.0, &|_| 1.0, &growing];
    for (n, drift) in drifts.into_iter().enumerate() {
        let mut case = Case::new(1, (1024, 1024), (1, 1), 128, false);
        case.add_to_keys(&bias, drift);
        let all = case.errors(sage().into(), DType::F32)?;
        let sampled = case.errors(sage().key_mean(KeyMean::Sample(64)).into(), DType::F32)?;
        for i in 0..4 {
            let ratio = sampled[i] / all[i];
            assert!((0.9..1.03).contains(&ratio), "drift {n}, {}: {sampled:.4?} against {all:.4?}", NAMES[i]);
        }
        assert_ne!(all, sampled, "another mean gives other codes");
    }
    Ok(())
}

/// A vector added to every row of V is added to every row of O and changes no gradient. With V smoothing, the vector
/// changes the errors of O, dQ and dK by less than 10 %. Without V smoothing, the vector takes most of the INT8 range
/// of V, and in O = P V it is multiplied by the errors of P. Errors of O also reach dQ and dK, through
/// delta = rowsum(dO o O).
#[test]
fn smoothing_of_values_takes_out_their_mean() -> Result<()> {
    let mut case = Case::new(1, (1024, 1024), (1, 1), 128, false);
    case.round_to(DType::BF16)?;
    let plain = case.exact();
    let scaled = |got: &[Vec<f64>; 4], exact: &[Vec<f64>; 4], n: usize| {
        let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
        relative_l2(&got[n], &exact[n]) * norm(&exact[n]) / norm(&plain[n])
    };
    let errors = |case: &Case, smoothing: Smoothing| -> Result<[f64; 4]> {
        let (got, exact) = (case.run(sage().smoothing(smoothing).into(), DType::F32)?, case.exact());
        Ok([0, 1, 2, 3].map(|n| scaled(&got, &exact, n)))
    };
    let [before, rough_before] = [errors(&case, Smoothing::Kv)?, errors(&case, Smoothing::K)?];
    let bias = crate::support::Normals::new(7).vec(128, 4.0);
    case.add_to_values(&bias);
    case.round_to(DType::BF16)?;
    let [smooth, rough] = [errors(&case, Smoothing::Kv)?, errors(&case, Smoothing::K)?];
    println!("kv {before:.4?}, biased {smooth:.4?}; k {rough_before:.4?}, biased {rough:.4?}");
    for n in [0, 1, 2] {
        assert!((smooth[n] / before[n] - 1.0).abs() < 0.1, "{}: {before:.4?} became {smooth:.4?}", NAMES[n]);
    }
    assert!(rough[0] > 2.0 * smooth[0] && rough[1] > smooth[1], "{rough:.4?} against {smooth:.4?}");
    // dV does not depend on V.
    assert_eq!(smooth[3], before[3]);
    Ok(())
}

/// The keys of two cases have the same bias. Without smoothing, the mean of the second case's keys is subtracted from
/// the first case's keys before the call. Each error differs by at most 5 % from that with smoothing. (Errors averaged
/// over six seeds differ by at most 3 %: `benches/accuracy.rs`.)
#[test]
fn a_mean_known_beforehand_serves() -> Result<()> {
    let bias = crate::support::Normals::new(7).vec(128, 10.0);
    let mut case = Case::new(1, (1024, 1024), (1, 1), 128, true);
    let mut other = Case::new(1, (1024, 1024), (1, 1), 128, true);
    other.draw(1.0, 8);
    other.add_to_keys(&bias, |_| 1.0);
    let mean = other.mean_of_keys();
    case.add_to_keys(&bias, |_| 1.0);
    let own = case.errors(sage().into(), DType::F32)?;
    case.add_to_keys(&mean, |_| -1.0);
    let known = case.errors(sage().smoothing(Smoothing::None).into(), DType::F32)?;
    for n in 0..4 {
        assert!((known[n] / own[n] - 1.0).abs() < 0.05, "{}: {known:.4?} against {own:.4?}", NAMES[n]);
    }
    Ok(())
}

/// An epsilon added to a scale would be too large for gradients of 1e-6. Multiplying dO by a power of two changes no
/// mantissa, so every gradient must scale bit-exactly. Multiplying dO by 1e-6 changes roundings, but relative errors
/// stay about the same.
#[test]
fn tiny_output_gradients_keep_their_precision() -> Result<()> {
    let mut case = Case::new(1, (512, 512), (2, 1), 64, true);
    let (plain, errors) = (case.run(sage().into(), DType::F32)?, case.errors(sage().into(), DType::F32)?);
    let dout = case.data[3].clone();
    for power in [-20, -60] {
        case.data[3] = dout.iter().map(|x| x * 2f32.powi(power)).collect();
        let tiny = case.run(sage().into(), DType::F32)?;
        for n in 1..4 {
            let scaled: Vec<f64> = plain[n].iter().map(|x| x * 2f64.powi(power)).collect();
            assert_eq!(tiny[n], scaled, "{} times 2^{power}", NAMES[n]);
        }
    }
    case.data[3] = dout.iter().map(|x| x * 1e-6).collect();
    for ((name, tiny), plain) in NAMES.iter().zip(case.errors(sage().into(), DType::F32)?).zip(errors) {
        assert!((tiny / plain - 1.0).abs() < 0.05, "{name}: {plain} became {tiny}");
    }
    Ok(())
}

/// Rows of dS sum to zero. So a channel of dQ is zero if this channel of K is 1 everywhere, and the rows of dK sum to
/// zero. If each row of dK has an INT8 error of 2 % with a random sign, the norm of the sum of dK's rows is about 2 %
/// of dK's norm. If the rows of dK were independent, the norm of their sum would be about dK's norm.
#[test]
fn rows_of_ds_sum_to_about_zero() -> Result<()> {
    let (n, d) = (512, 64);
    let mut case = Case::new(1, (n, n), (1, 1), d, true);
    for key in case.data[1].chunks_exact_mut(d) {
        key[0] = 1.0;
    }
    for (scheme, tolerance) in [(Scheme::Unquantized, 1e-5), (sage().smoothing(Smoothing::None).into(), 0.05)]
    {
        let [_, dq, dk, _] = case.run(scheme, DType::F32)?;
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        let sums = norm(&mut dq.chunks_exact(d).map(|row| row[0]));
        let usual = norm(&mut dq.iter().copied()) / (d as f64).sqrt();
        assert!(sums < tolerance * usual, "{scheme:?}: row sums {:.1e} of a channel", sums / usual);
        let total = norm(&mut (0..d).map(|c| dk.iter().skip(c).step_by(d).sum::<f64>()));
        let spread = norm(&mut dk.iter().copied());
        assert!(total < tolerance * spread, "{scheme:?}: dK's token sum is {:.1e}", total / spread);
    }
    Ok(())
}

/// With Q smoothed, dK needs the rank-one term (dS^T 1) mean(Q). Queries with a large mean make this term as large as
/// dK itself, so that the test would detect its omission.
#[test]
fn q_smoothing_keeps_its_rank_one_term() -> Result<()> {
    let (n, d, tile) = (512, 64, 64);
    let mut case = Case::new(1, (n, n), (1, 1), d, true);
    let mut normals = crate::support::Normals::new(3);
    let bias = normals.vec(d, 3.0);
    for query in case.data[0].chunks_exact_mut(d) {
        query.iter_mut().zip(&bias).for_each(|(q, b)| *q += b);
    }
    let exact = case.exact();
    let smoothed = case.run(sage().smoothing(Smoothing::Qk).into(), DType::F32)?;
    let errors: Vec<f64> = smoothed.iter().zip(&exact).map(|(a, b)| relative_l2(a, b)).collect();
    let k_only = case.errors(sage().into(), DType::F32)?;
    for n in 0..4 {
        assert!(errors[n] < 1.1 * k_only[n], "{}: {errors:?}, K smoothing alone {k_only:?}", NAMES[n]);
    }

    // The test could not fail if dK hardly changed when the mean of each tile of Q is left out.
    let mut centred = case.data[0].clone();
    for rows in centred.chunks_mut(tile * d) {
        let count = (rows.len() / d) as f32;
        for c in 0..d {
            let mean = rows.iter().skip(c).step_by(d).sum::<f32>() / count;
            rows.iter_mut().skip(c).step_by(d).for_each(|x| *x -= mean);
        }
    }
    let without = dk_with_queries(&case, &centred);
    let missing = relative_l2(&without, &exact[2]);
    assert!(missing > 0.5, "the term is only {missing:.2} of dK: the test could not fail");
    Ok(())
}

/// `scale dS^T X` with the exact dS of a causal single-head case.
fn dk_with_queries(case: &Case, x: &[f32]) -> Vec<f64> {
    let (n, d) = (case.lens.0, case.head_dim);
    let scale = 1.0 / (d as f64).sqrt();
    let [q, k, v, g] = case.data.each_ref().map(|x| crate::support::f64s(x));
    let dot = |a: &[f64], i: usize, b: &[f64], j: usize| -> f64 {
        (0..d).map(|c| a[i * d + c] * b[j * d + c]).sum()
    };
    let mut dk = vec![0.0; n * d];
    for i in 0..n {
        let p: Vec<f64> = (0..=i).map(|j| (scale * dot(&q, i, &k, j)).exp()).collect();
        let total: f64 = p.iter().sum();
        let dp: Vec<f64> = (0..=i).map(|j| dot(&g, i, &v, j)).collect();
        let delta: f64 = p.iter().zip(&dp).map(|(p, dp)| p / total * dp).sum();
        for j in 0..=i {
            let ds = scale * p[j] / total * (dp[j] - delta);
            for c in 0..d {
                dk[j * d + c] += ds * f64::from(x[i * d + c]);
            }
        }
    }
    dk
}

/// The scales of a zero tensor are zero, and nothing may be divided by them.
#[test]
fn zero_tensors_give_zero_gradients() -> Result<()> {
    for smoothing in [Smoothing::None, Smoothing::K, Smoothing::Qk] {
        let mut case = Case::new(1, (70, 70), (2, 1), 16, true);
        case.data[3].fill(0.0);
        let [_, dq, dk, dv] = case.run(sage().smoothing(smoothing).into(), DType::F32)?;
        assert!(dq.iter().chain(&dk).chain(&dv).all(|&x| x == 0.0));
        case.data[0].fill(0.0);
        case.data[1].fill(0.0);
        let out = &case.run(sage().smoothing(smoothing).into(), DType::F32)?[0];
        assert!(out.iter().all(|x| x.is_finite()));
    }
    Ok(())
}

/// dQ, dK and dV of SageBwd with [`Int8Products::SCORES`], for a causal case of one head, without smoothing. They are
/// computed in f64: `P` from quantized Q and K, and `dP = dO V^T` from dO and V in bf16. Nothing else is rounded.
fn scores_alone(case: &Case) -> [Vec<f64>; 3] {
    let (n, d) = (case.lens.0, case.head_dim);
    let scale = 1.0 / (d as f64).sqrt();
    // A tile of 64 rows has one scale.
    let codes = |x: &[f32]| -> Vec<f64> {
        let tile = |tile: &[f32]| {
            let max = tile.iter().fold(0f32, |max, x| max.max(x.abs()));
            let code = |x: &f32| f64::from((x * (127.0 / max)).round_ties_even()) * f64::from(max / 127.0);
            tile.iter().map(code).collect::<Vec<_>>()
        };
        x.chunks(64 * d).flat_map(tile).collect()
    };
    let bf16 = |x: &[f32]| -> Vec<f64> { x.iter().map(|&x| half::bf16::from_f32(x).to_f64()).collect() };
    let (q, k) = (codes(&case.data[0]), codes(&case.data[1]));
    let (v16, dout16) = (bf16(&case.data[2]), bf16(&case.data[3]));
    let [q_rows, k_rows, v, dout] = case.data.each_ref().map(|x| crate::support::f64s(x));
    let dot = |a: &[f64], i: usize, b: &[f64], j: usize| -> f64 {
        (0..d).map(|c| a[i * d + c] * b[j * d + c]).sum()
    };
    let [mut dq, mut dk, mut dv] = [0; 3].map(|_| vec![0.0; n * d]);
    for i in 0..n {
        let weights: Vec<f64> = (0..=i).map(|j| (scale * dot(&q, i, &k, j)).exp()).collect();
        let total: f64 = weights.iter().sum();
        let p: Vec<f64> = weights.iter().map(|weight| weight / total).collect();
        let out: Vec<f64> = (0..d).map(|c| (0..=i).map(|j| p[j] * v[j * d + c]).sum()).collect();
        let delta = dot(&out, 0, &dout[i * d..], 0);
        for (j, p) in p.into_iter().enumerate() {
            let ds = scale * p * (dot(&dout16, i, &v16, j) - delta);
            for c in 0..d {
                dq[i * d + c] += ds * k_rows[j * d + c];
                dk[j * d + c] += ds * q_rows[i * d + c];
                dv[j * d + c] += p * dout[i * d + c];
            }
        }
    }
    [dq, dk, dv]
}

/// Checks that dP is computed from V and dO in bf16, and that delta is not rounded. Relative errors are below 4e-6, as
/// in unquantized attention. Rounding delta to bf16 would change dQ and dK by 8e-4; omitting the rounding of V or dO
/// would change them by 2e-3. With `scores.dv(true)` dV is computed in INT8, so it is not compared.
#[test]
fn the_backward_rounds_v_and_dout_and_nothing_else() -> Result<()> {
    for (n, d) in [(200, 32), (130, 64), (70, 16)] {
        let case = Case::new(1, (n, n), (1, 1), d, true);
        let expected = scores_alone(&case);
        let scores = Int8Products::SCORES;
        for (products, exact) in [(scores, 3), (scores.dv(true), 2)] {
            let settings = sage().smoothing(Smoothing::None).products(products);
            let got = case.run(settings.into(), DType::F32)?;
            for (which, expected) in expected.iter().enumerate().take(exact) {
                let error = relative_l2(&got[which + 1], expected);
                assert!(error < 4e-6, "{} with {products}: {error:e}", NAMES[which + 1]);
            }
        }
    }
    Ok(())
}
