//! A soft cap and ALiBi, which have separately compiled kernels.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_sage::{Attention, AttnQat, Int8Products, Packing, SageBwd, Scheme, Smoothing};

use super::{check_against, repeats, run, sage};
use crate::score_mod::slopes;
use crate::support::{Case, f64s, gpu, relative_l2};

/// The schemes that have kernels for ALiBi and a soft cap.
fn schemes() -> [Scheme; 4] {
    [
        Scheme::Unquantized,
        sage().products(Int8Products::SCORES).smoothing(Smoothing::None).into(),
        AttnQat::default().into(),
        AttnQat::default().requantized_p(false).into(),
    ]
}

/// Each layout twice, with different caps and slopes.
/// Many logits reach the cap 1.5. The cap 50 is far above all logits.
fn cases(d: usize) -> Vec<Case> {
    let mut layouts = Vec::new();
    for (lens, heads, causal, window) in [
        ((300, 300), (4, 2), true, (None, None)),
        ((450, 450), (2, 1), true, (Some(127), Some(0))),
        ((113, 603), (2, 2), false, (None, None)),
        ((600, 400), (3, 1), true, (None, None)),
        ((333, 333), (6, 2), false, (Some(64), Some(30))),
        ((1, 900), (8, 2), true, (None, None)),
    ] {
        let mut case = Case::new(2, lens, heads, d, causal);
        case.window = window;
        layouts.push(case);
    }
    let mut packed = Case::new(1, (500, 500), (4, 2), d, true);
    packed.packing = Some(Packing::self_attention(vec![0, 1, 64, 64, 193, 450, 500]));
    layouts.push(packed);
    let modified = |(n, case): (usize, Case)| {
        let slopes = slopes(case.heads.0);
        let (softcap, alibi_slopes) = match n % 4 {
            0 => (Some(1.5), Vec::new()),
            1 => (Some(50.0), slopes),
            2 => (None, slopes),
            _ => (Some(1.5), slopes),
        };
        Case { softcap, alibi_slopes, ..case }
    };
    let again = layouts.clone().into_iter().enumerate().map(|(n, case)| (n + 2, case));
    layouts.into_iter().enumerate().chain(again).map(modified).collect()
}

fn name(case: &Case) -> String {
    let Case { lens, window, head_dim, softcap, alibi_slopes, .. } = case;
    format!("{lens:?}, window {window:?}, d {head_dim}, cap {softcap:?}, {} slopes", alibi_slopes.len())
}

#[test]
#[ignore = "needs a GPU"]
fn soft_caps_and_slopes() -> Result<()> {
    for d in [40, 64, 128] {
        for (seed, case) in cases(d).iter_mut().enumerate() {
            run(&name(case), case, &schemes(), seed as u64)?;
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn of_large_heads() -> Result<()> {
    for d in [192, 256] {
        for (seed, case) in cases(d).iter_mut().enumerate() {
            run(&name(case), case, &schemes()[..2], seed as u64)?;
        }
    }
    Ok(())
}

/// Slopes also work with smoothed keys.
#[test]
#[ignore = "needs a GPU"]
fn slopes_with_smoothed_keys() -> Result<()> {
    for smoothing in [Smoothing::K, Smoothing::Kv] {
        for d in [64, 128] {
            let mut case = Case::new(2, (300, 300), (2, 1), d, true);
            case.alibi_slopes = slopes(2);
            let sage = sage().products(Int8Products::SCORES);
            let sage = if smoothing == Smoothing::K { sage.smoothing(smoothing) } else { sage };
            let schemes = [sage.into(), AttnQat::default().smoothing(smoothing).into()];
            run(&name(&case), &mut case, &schemes, 3)?;
            // The first document has one key. Smoothing makes this key and its quantization scale zero.
            let mut packed = Case::new(1, (300, 300), (2, 1), d, true);
            packed.packing = Some(Packing::self_attention(vec![0, 1, 64, 64, 193, 300]));
            packed.alibi_slopes = slopes(2);
            run(&name(&packed), &mut packed, &schemes, 4)?;
        }
    }
    Ok(())
}

/// Queries that are all zero have an INT8 scale of zero. Kernels divide the slopes of ALiBi by this scale, but must not
/// divide by zero.
#[test]
#[ignore = "needs a GPU"]
fn slopes_of_queries_of_zeros() -> Result<()> {
    for d in [64, 128] {
        let mut case = Case::new(1, (300, 300), (2, 1), d, true);
        case.draw(1.0, 1);
        case.alibi_slopes = slopes(2);
        case.data[0][64 * 2 * d..192 * 2 * d].fill(0.0);
        case.round_to(DType::BF16)?;
        for scheme in schemes() {
            let got = case.run_on(&gpu(), &case.attention(scheme), DType::BF16)?;
            let cpu = case.run(scheme, DType::BF16)?;
            check_against(&name(&case), scheme, DType::BF16, &got, [&case.exact(), &cpu], 300);
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn gradients_repeat() -> Result<()> {
    for d in [64, 128, 256] {
        let schemes = if d > 128 { schemes()[..2].to_vec() } else { schemes().to_vec() };
        for mut case in cases(d).into_iter().step_by(3) {
            repeats(&name(&case), &mut case, &schemes)?;
        }
    }
    Ok(())
}

/// Values with fewer channels than queries and keys.
#[test]
#[ignore = "needs a GPU"]
fn narrow_values() -> Result<()> {
    let tensor = |n: u64, d| -> Result<Tensor> {
        let values = crate::support::Normals::new(n).vec(200 * 2 * d, 1.0);
        Tensor::from_vec(values, (1, 200, 2, d), &Device::Cpu)?.to_dtype(DType::BF16)
    };
    let (q, k, v) = (tensor(0, 192)?, tensor(1, 192)?, tensor(2, 128)?);
    let attention = Attention::default().causal(true).softcap(1.5);
    let values =
        |x: Tensor| -> Result<Vec<f64>> { Ok(f64s(&x.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)) };
    let on = |device: &Device| -> Result<Vec<Vec<f64>>> {
        let (q, k, v) = (q.to_device(device)?, k.to_device(device)?, v.to_device(device)?);
        let (out, vjp) = attention.vjp(&q, &k, &v)?;
        let gradients = vjp.apply(&out)?;
        std::iter::once(out).chain(gradients).map(values).collect()
    };
    for (got, cpu) in on(&gpu())?.iter().zip(&on(&Device::Cpu)?) {
        assert!(relative_l2(got, cpu) < 2f64.powi(-7));
    }
    Ok(())
}

/// For logits beyond the soft cap, the kernels compute the cap's tanh by an exponential, not by a polynomial. With
/// infinite logits, outputs are finite.
#[test]
#[ignore = "needs a GPU"]
fn logits_beyond_the_cap() -> Result<()> {
    for d in [64, 128] {
        let mut case = Case::new(1, (300, 300), (2, 1), d, true);
        case.draw(4.0, 1);
        case.softcap = Some(3.0);
        case.round_to(DType::BF16)?;
        let got = case.run_on(&gpu(), &case.attention(Scheme::Unquantized), DType::BF16)?;
        let cpu = case.run(Scheme::Unquantized, DType::BF16)?;
        check_against(&name(&case), Scheme::Unquantized, DType::BF16, &got, [&case.exact(), &cpu], 300);
        case.data[1][0] = f32::INFINITY;
        let [out, ..] = case.run_on(&gpu(), &case.attention(Scheme::Unquantized), DType::BF16)?;
        assert!(out.iter().all(|x| x.is_finite()), "d {d}");
    }
    Ok(())
}

/// Sinks in every scheme, with windows, documents and grouped heads: GPU against CPU. K is not smoothed, so that both
/// devices quantize Q and K to the same values. In unquantized attention, results differ by roundings of 2^-9 (bf16).
/// In SageBwd, the keys that share a scale of P or dS are not the same on GPU and CPU. This adds a relative error of
/// .02 for P and of .02 for dS. In Attn-QAT, a probability near the midpoint of two FP4 values may round up on one
/// device and down on the other.
#[test]
#[ignore = "needs a GPU"]
fn sinks() -> Result<()> {
    let none = sage().smoothing(Smoothing::None);
    let schemes: [Scheme; 5] = [
        Scheme::Unquantized,
        none.into(),
        none.products(Int8Products::SCORES).into(),
        none.products(Int8Products::FORWARD_AND_S).into(),
        AttnQat::default().into(),
    ];
    for (d, few) in [(64, 5), (128, 5), (256, 1)] {
        let mut cases = cases(d);
        cases.iter_mut().for_each(|case| (case.softcap, case.alibi_slopes) = (None, Vec::new()));
        for (n, case) in cases[..7].iter_mut().enumerate() {
            case.round_to(DType::BF16)?;
            let sinks: Vec<f32> = (0..case.heads.0).map(|head| 2.0 - head as f32).collect();
            for scheme in &schemes[..few] {
                let on = |device: &Device| -> Result<Vec<Vec<f64>>> {
                    let var = |n: usize| {
                        let x = Tensor::from_slice(
                            &case.data[n],
                            &case.dims(n == 0 || n == 3)[..],
                            &Device::Cpu,
                        )?;
                        Var::from_tensor(&x.to_dtype(DType::BF16)?.to_device(device)?)
                    };
                    let (q, k, v, dout) = (var(0)?, var(1)?, var(2)?, var(3)?);
                    let sinks = Var::from_tensor(&Tensor::new(&sinks[..], device)?)?;
                    let out = case.attention(*scheme).apply_with_sinks(&q, &k, &v, &sinks)?;
                    let grads = (&out * dout.detach())?.to_dtype(DType::F32)?.sum_all()?.backward()?;
                    let values = |x: &Tensor| {
                        Ok::<Vec<f64>, candle_core::Error>(f64s(
                            &x.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?,
                        ))
                    };
                    let gradient = |x: &Tensor| values(grads.get(x).expect("a gradient"));
                    Ok(vec![values(&out)?, gradient(&q)?, gradient(&k)?, gradient(&v)?, gradient(&sinks)?])
                };
                let limit = match scheme {
                    Scheme::Unquantized => 2f64.powi(-7),
                    Scheme::AttnQat(_) => 0.03,
                    _ => 0.05,
                };
                for (result, (got, cpu)) in on(&gpu())?.iter().zip(&on(&Device::Cpu)?).enumerate() {
                    let error = relative_l2(got, cpu);
                    // A sink's gradient is a sum over queries of terms of both signs: the terms cancel, but their
                    // errors do not.
                    let limit = if result == 4 { 3.0 * limit } else { limit };
                    assert!(error < limit, "{scheme}, case {n}, d {d}, result {result}: {error:.1e}");
                }
            }
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn schemes_without_such_kernels() -> Result<()> {
    let x = Tensor::zeros((1, 64, 2, 64), DType::BF16, &gpu())?;
    let scheme = SageBwd::default().smoothing(Smoothing::None);
    let message = Attention::new(scheme).softcap(50.0).apply(&x, &x, &x).unwrap_err().to_string();
    assert!(message.contains("neither a soft cap") && message.contains("Int8Products::SCORES"), "{message}");
    Ok(())
}
