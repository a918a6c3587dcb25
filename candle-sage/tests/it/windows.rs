//! Sliding windows: the keys that they exclude, unsupported combinations, and `flash_attn_windowed`.
//! `attention.rs` compares windowed attention with `candle_sage::reference`.

use candle_core::{DType, Device, Result, Tensor};
use candle_sage::{
    Attention, AttnQat, Packing, SageBwd, Scheme, Selection, Smoothing, flash_attn_varlen_windowed,
    flash_attn_windowed,
};

use crate::support::Case;

fn tensors(case: &Case) -> Result<[Tensor; 3]> {
    let tensor = |n: usize| Tensor::from_slice(&case.data[n], &case.dims(n == 0)[..], &Device::Cpu);
    Ok([tensor(0)?, tensor(1)?, tensor(2)?])
}

fn values(x: &Tensor) -> Result<Vec<f32>> {
    x.flatten_all()?.to_vec1()
}

/// If tokens share no quantization scales, keys outside of a query's window do not change a bit of its output and dQ.
#[test]
fn keys_outside_of_the_window_change_nothing() -> Result<()> {
    let unshared =
        AttnQat::drop_in().smoothing(Smoothing::None).value_groups(candle_sage::ValueGroups::HeadDim);
    for scheme in [Scheme::Unquantized, unshared.into()] {
        let mut case = Case::new(1, (300, 300), (2, 1), 32, false);
        case.window = (Some(90), Some(20));
        let before = case.run(scheme, DType::F32)?;
        // Keys and values of tokens 0 to 99: the queries from 190 on do not see them.
        for tensor in [1, 2] {
            case.data[tensor][..100 * 32].iter_mut().for_each(|x| *x = 3.0 - *x);
        }
        let after = case.run(scheme, DType::F32)?;
        let row = 2 * 32;
        for n in [0, 1] {
            assert_eq!(before[n][190 * row..], after[n][190 * row..], "{scheme}, result {n}");
            assert_ne!(before[n][..190 * row], after[n][..190 * row], "{scheme}, result {n}");
        }
    }
    Ok(())
}

#[test]
fn a_window_of_one_token_gives_its_value() -> Result<()> {
    let mut case = Case::new(1, (130, 130), (1, 1), 16, false);
    case.window = (Some(0), Some(0));
    let [out, dq, dk, dv] = case.run(Scheme::Unquantized, DType::F32)?;
    let close = |a: &[f64], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - f64::from(*b)).abs() < 1e-6);
    assert!(close(&out, &case.data[2]) && close(&dv, &case.data[3]));
    // The probability is 1 whatever the logit, so dS = dP - delta is zero up to rounding: both are sums of the same 16
    // products, in different order.
    assert!(dq.iter().chain(&dk).all(|x| x.abs() < 1e-5));
    Ok(())
}

/// A window as wide as the sequence is bit-identical to no window, in every scheme.
#[test]
fn a_window_that_holds_everything_is_dense_attention() -> Result<()> {
    for scheme in crate::support::schemes() {
        for causal in [false, true] {
            let mut case = Case::new(1, (200, 150), (2, 1), 16, causal);
            let dense = case.run(scheme, DType::F32)?;
            for window in [(Some(149), Some(199)), (Some(usize::MAX), Some(usize::MAX)), (None, Some(250))] {
                case.window = window;
                assert!(case.run(scheme, DType::F32)? == dense, "{scheme}, causal {causal}, {window:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn the_functions_of_candle_flash_attn() -> Result<()> {
    let mut case = Case::new(1, (100, 100), (2, 2), 16, false);
    case.window = (Some(20), Some(5));
    let [q, k, v] = tensors(&case)?;
    let op = |attention: Attention| attention.softmax_scale(0.3).apply(&q, &k, &v);
    let got = flash_attn_windowed(&q, &k, &v, 0.3, Some(20), Some(5))?;
    assert_eq!(values(&got)?, values(&op(case.attention(Scheme::Unquantized))?)?);

    let packed = case.attention(Scheme::Unquantized).packing(Packing::self_attention(vec![0, 40, 100]));
    let lengths = Tensor::new(&[0u32, 40, 100], &Device::Cpu)?;
    let [q3, k3, v3] = [q.squeeze(0)?, k.squeeze(0)?, v.squeeze(0)?];
    let got = flash_attn_varlen_windowed(&q3, &k3, &v3, &lengths, &lengths, 60, 60, 0.3, Some(20), Some(5))?;
    assert_eq!(values(&got)?, values(&op(packed)?)?);
    Ok(())
}

#[test]
fn a_selection_has_no_window() -> Result<()> {
    let case = Case::new(1, (64, 64), (1, 1), 16, true);
    let [q, k, v] = tensors(&case)?;
    let selection = Selection::window(&case.shape(), (64, 64), 1, 0, &Device::Cpu)?;
    let both = case.attention(SageBwd::default().into()).window(10, None).select(&selection);
    let message = both.apply(&q, &k, &v).unwrap_err().to_string();
    assert!(
        message.contains("a selection cannot be combined with a window")
            && message.contains("10 tokens before"),
        "{message}"
    );
    let of_window = Selection::window(&case.shape().with_window(Some(3), None), (64, 64), 1, 0, &Device::Cpu);
    assert!(of_window.unwrap_err().to_string().contains("window of tokens"));
    Ok(())
}

/// The log-sum-exps are over the keys in the window.
#[test]
fn log_sum_exps_of_windows() -> Result<()> {
    for (lens, window) in
        [((100, 100), (Some(30), Some(0))), ((90, 40), (Some(5), Some(60))), ((30, 70), (None, Some(2)))]
    {
        let mut case = Case::new(1, lens, (2, 1), 16, false);
        case.window = window;
        let [q, k, v] = tensors(&case)?;
        let (_, lse) = case.attention(Scheme::Unquantized).apply_with_lse(&q, &k, &v)?;
        let [q, k, v, _] = case.data.each_ref().map(|x| crate::support::f64s(x));
        let exact = candle_sage::reference::forward(&case.shape(), 0.25, &q, &k, &v).lse;
        let close = |(a, b): (&f32, &f64)| f64::from(*a) == *b || (f64::from(*a) - b).abs() < 1e-5;
        assert!(values(&lse)?.iter().zip(&exact).all(close), "{lens:?}, {window:?}");
    }
    Ok(())
}
