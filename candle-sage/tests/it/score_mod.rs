//! Soft caps and ALiBi: the accuracy of every scheme, messages for invalid settings, and the functions that have
//! candle-flash-attn's signatures.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_sage::{
    Attention, AttnQat, Int8Products, Packing, SageBwd, Scheme, Selection, Smoothing, flash_attn_alibi,
    flash_attn_alibi_windowed, flash_attn_alibi_windowed_softcap, flash_attn_varlen_alibi,
    flash_attn_varlen_alibi_windowed, flash_attn_varlen_alibi_windowed_softcap,
};

use crate::support::{Case, relative_l2};

const NAMES: [&str; 4] = ["O", "dQ", "dK", "dV"];

/// The first `heads` of the ALiBi paper's slopes for 8 heads: 2^-1, 2^-2 and so on.
pub(crate) fn slopes(heads: usize) -> Vec<f32> {
    (1..=heads).map(|head| 0.5f32.powi(head as i32)).collect()
}

/// Layouts, each in five variants: plain, a cap below the largest logits, a cap far above all logits, slopes, and both
/// a cap and slopes.
fn cases() -> Vec<[Case; 5]> {
    let mut layouts = Vec::new();
    for (lens, heads, d, causal) in [
        ((65, 65), (4, 2), 16, true),
        ((113, 203), (2, 1), 24, true),
        ((203, 113), (2, 2), 8, false),
        ((1, 150), (2, 2), 64, true),
        ((300, 300), (2, 1), 33, false),
    ] {
        layouts.push(Case::new(2, lens, heads, d, causal));
    }
    let mut window = Case::new(1, (200, 200), (2, 1), 16, true);
    window.window = (Some(50), Some(0));
    let mut packed = Case::new(1, (200, 210), (4, 2), 32, true);
    packed.packing = Some(Packing::new(vec![0, 1, 71, 71, 80, 200], vec![0, 3, 73, 75, 75, 210]));
    layouts.extend([window, packed]);
    layouts
        .into_iter()
        .map(|plain| {
            let capped = |cap| Case { softcap: Some(cap), ..plain.clone() };
            let alibi = Case { alibi_slopes: slopes(plain.heads.0), ..plain.clone() };
            let both = Case { softcap: Some(2.0), ..alibi.clone() };
            [plain.clone(), capped(1.5), capped(50.0), alibi, both]
        })
        .collect()
}

/// The limit without a cap or slopes is 4e-6 (`attention::unquantized_is_exact_up_to_f32_rounding`). Here 4e-6 more are
/// allowed for the cap's hyperbolic tangent: its relative error is 2^-20, and logits are at most 4.
#[test]
fn unquantized_is_exact_up_to_f32_rounding() -> Result<()> {
    for case in cases().iter().flatten() {
        for (name, error) in NAMES.iter().zip(case.errors(Scheme::Unquantized, DType::F32)?) {
            assert!(error < 8e-6, "{name} of {:?}, cap {:?}: {error:e}", case.shape(), case.softcap);
        }
    }
    Ok(())
}

/// A cap and slopes do not increase the errors of logits in a low-bit scheme: a cap only makes logits and their errors
/// smaller, and slopes are exact. But with slopes the output averages over fewer keys, so its error is up to 1.5 times
/// as large in these cases. The limit adds .01, because some results without cap and slopes are nearly exact.
#[test]
fn low_bits_are_as_exact_as_without() -> Result<()> {
    let sage = SageBwd::default().smoothing(Smoothing::None);
    let schemes: [Scheme; 4] = [
        sage.into(),
        sage.products(Int8Products::SCORES).into(),
        AttnQat::default().into(),
        AttnQat::default().requantized_p(false).into(),
    ];
    for [plain, modified @ ..] in cases().into_iter().step_by(2) {
        for scheme in schemes {
            let before = plain.errors(scheme, DType::F32)?;
            for case in &modified {
                for (n, error) in case.errors(scheme, DType::F32)?.into_iter().enumerate() {
                    let limit = 1.5 * before[n] + 0.01;
                    assert!(
                        error < limit,
                        "{} of {scheme}, {:?}, cap {:?}: {error:.4}, {limit:.4}",
                        NAMES[n],
                        case.shape(),
                        case.softcap
                    );
                }
            }
        }
    }
    Ok(())
}

#[test]
fn alibi_works_with_smoothed_keys() -> Result<()> {
    let mut case = Case::new(1, (150, 150), (2, 1), 32, true);
    case.add_to_keys(&[3.0; 32], |_| 1.0);
    let before = case.errors(SageBwd::default().into(), DType::F32)?;
    case.alibi_slopes = slopes(2);
    for (n, error) in case.errors(SageBwd::default().into(), DType::F32)?.into_iter().enumerate() {
        assert!(error < 1.5 * before[n] + 0.01, "{}: {error:.4}, {:.4}", NAMES[n], before[n]);
    }
    Ok(())
}

#[test]
fn no_cap_and_no_slope_change_nothing() -> Result<()> {
    let mut case = Case::new(1, (100, 100), (2, 1), 16, true);
    let plain = case.run(Scheme::Unquantized, DType::F32)?;
    case.softcap = Some(0.0);
    assert!(case.run(Scheme::Unquantized, DType::F32)? == plain);
    (case.softcap, case.alibi_slopes) = (None, vec![0.0; 2]);
    assert!(case.run(Scheme::Unquantized, DType::F32)? == plain);
    // The cap changes a logit x by x^3 / (3 cap^2): at most 4e-7 for logits up to 5.
    (case.softcap, case.alibi_slopes) = (Some(1e4), Vec::new());
    let far = case.run(Scheme::Unquantized, DType::F32)?;
    assert!((0..4).all(|n| relative_l2(&far[n], &plain[n]) < 1e-5));
    Ok(())
}

/// All logits are positive and far beyond the cap, so each becomes the cap itself. Then the output is the mean of the
/// values, and the gradients of Q and K are zero. Infinite logits also become the cap.
#[test]
fn logits_beyond_the_cap() -> Result<()> {
    let mut case = Case::new(1, (70, 70), (1, 1), 8, false);
    case.draw(3e3, 1);
    for tensor in [0, 1] {
        case.data[tensor].iter_mut().for_each(|x| *x = x.abs());
    }
    case.softcap = Some(0.5);
    let (got, exact) = (case.run(Scheme::Unquantized, DType::F32)?, case.exact());
    assert!(relative_l2(&got[0], &exact[0]) < 1e-5);
    assert!(got[1].iter().chain(&got[2]).all(|x| *x == 0.0));
    case.data[1][5] = f32::INFINITY;
    let [out, ..] = case.run(Scheme::Unquantized, DType::F32)?;
    assert!(relative_l2(&out, &exact[0]) < 1e-5);
    Ok(())
}

#[test]
fn messages() -> Result<()> {
    let x = Tensor::ones((1, 64, 2, 16), DType::F32, &Device::Cpu)?;
    let message = |attention: Attention| attention.apply(&x, &x, &x).unwrap_err().to_string();
    for (attention, parts) in [
        (Attention::default().softcap(-1.0), ["out of range", "-1"]),
        (Attention::default().softcap(1e-60), ["out of range", "1e30"]),
        (Attention::default().softcap(f64::NAN), ["out of range", "NaN"]),
        (Attention::new(SageBwd::default()).softcap(50.0), ["smoothed keys", "Smoothing::None"]),
    ] {
        let message = message(attention);
        assert!(parts.iter().all(|part| message.contains(part)) && message.contains("hint:"), "{message}");
    }
    let slopes = Var::new(&[0.5f32, 0.25], &Device::Cpu)?;
    assert!(message(Attention::default().alibi(&slopes)).contains("Tensor::detach"));
    for wrong in [slopes.narrow(0, 0, 1)?, slopes.to_dtype(DType::U32)?, slopes.unsqueeze(0)?] {
        assert!(message(Attention::default().alibi(&wrong.detach())).contains("[2] in a float type"));
    }
    let case = Case::new(1, (64, 64), (2, 2), 16, true);
    let selection = Selection::window(&case.shape(), (64, 64), 1, 0, &Device::Cpu)?;
    let both = Attention::default().causal(true).softcap(50.0).select(&selection);
    assert!(message(both).contains("a selection is not supported with a soft cap"));
    Ok(())
}

#[test]
fn the_functions_of_candle_flash_attn() -> Result<()> {
    let case = Case::new(1, (100, 100), (2, 2), 16, false);
    let tensor = |n: usize| Tensor::from_slice(&case.data[n], &case.dims(n == 0)[..], &Device::Cpu);
    let (q, k, v) = (tensor(0)?, tensor(1)?, tensor(2)?);
    let slopes = Tensor::new(&[0.5f32, 0.1], &Device::Cpu)?;
    let values = |x: Tensor| x.flatten_all()?.to_vec1::<f32>();
    let own = |attention: Attention| values(attention.softmax_scale(0.3).apply(&q, &k, &v)?);
    let (plain, causal) = (Attention::default(), Attention::default().causal(true));
    assert_eq!(
        values(flash_attn_alibi(&q, &k, &v, &slopes, 0.3, true)?)?,
        own(causal.clone().alibi(&slopes))?
    );
    let window = plain.window(9, 4);
    let got = flash_attn_alibi_windowed(&q, &k, &v, &slopes, 0.3, Some(9), Some(4))?;
    assert_eq!(values(got)?, own(window.clone().alibi(&slopes))?);
    let got = flash_attn_alibi_windowed_softcap(&q, &k, &v, None, 0.3, Some(9), Some(4), 1.5)?;
    assert_eq!(values(got)?, own(window.clone().softcap(1.5))?);

    let packing = Packing::self_attention(vec![0, 40, 100]);
    let (causal, window) = (causal.packing(packing.clone()), window.packing(packing));
    let lengths = Tensor::new(&[0u32, 40, 100], &Device::Cpu)?;
    let (q3, k3, v3) = (q.squeeze(0)?, k.squeeze(0)?, v.squeeze(0)?);
    let got = flash_attn_varlen_alibi(&q3, &k3, &v3, &slopes, &lengths, &lengths, 60, 60, 0.3, true)?;
    assert_eq!(values(got)?, own(causal.alibi(&slopes))?);
    let got = flash_attn_varlen_alibi_windowed(
        &q3,
        &k3,
        &v3,
        &slopes,
        &lengths,
        &lengths,
        60,
        60,
        0.3,
        Some(9),
        Some(4),
    )?;
    assert_eq!(values(got)?, own(window.clone().alibi(&slopes))?);
    let got = flash_attn_varlen_alibi_windowed_softcap(
        &q3,
        &k3,
        &v3,
        Some(&slopes),
        &lengths,
        &lengths,
        60,
        60,
        0.3,
        Some(9),
        Some(4),
        1.5,
    )?;
    assert_eq!(values(got)?, own(window.alibi(&slopes).softcap(1.5))?);
    Ok(())
}
