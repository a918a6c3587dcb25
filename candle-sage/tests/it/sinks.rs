//! Attention sinks. The oracle has an additional key in each head instead of a sink: its logit is the sink for every
//! query, and its value is zero.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_sage::{Attention, AttentionShape, AttnQat, SageBwd, Scheme, Selection, Smoothing, reference};

use crate::support::{Case, f64s, relative_l2};

const SINKS: [f32; 2] = [1.5, -0.5];

/// A case whose queries have 1 in their first channel, and whose keys have 0 there.
fn case(tokens: (usize, usize), window: Option<usize>) -> Case {
    let mut case = Case::new(1, tokens, (2, 2), 16, false);
    case.window = (window, None);
    for (tensor, value) in [(0, 1.0), (1, 0.0)] {
        case.data[tensor].iter_mut().step_by(16).for_each(|x| *x = value);
    }
    case
}

/// Output of a call, and gradients of query, key, value and sinks.
fn run(case: &Case, attention: &Attention, dtype: DType) -> Result<[Vec<f64>; 5]> {
    let var = |n: usize| {
        let x = Tensor::from_slice(&case.data[n], &case.dims(n == 0)[..], &Device::Cpu)?.to_dtype(dtype)?;
        Var::from_tensor(&x)
    };
    let (q, k, v, sinks) = (var(0)?, var(1)?, var(2)?, Var::new(&SINKS, &Device::Cpu)?);
    let out = attention.apply_with_sinks(&q, &k, &v, &sinks)?;
    let dout = Tensor::from_slice(&case.data[3], &case.dims(true)[..], &Device::Cpu)?;
    let grads = (out.to_dtype(DType::F32)? * dout)?.sum_all()?.backward()?;
    let values =
        |x: &Tensor| -> Result<Vec<f64>> { Ok(f64s(&x.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)) };
    let grad = |x: &Tensor| values(grads.get(x).expect("a gradient"));
    Ok([values(&out)?, grad(&q)?, grad(&k)?, grad(&v)?, grad(&sinks)?])
}

/// What `run` returns, computed by the oracle, [`reference`]. Key 0 is additional: its logit is the sink, and every
/// query sees it.
fn exact(case: &Case) -> [Vec<f64>; 5] {
    let scale = 0.25; // 1 / sqrt(16)
    let with_sink = |rows: &[f32], of_head: &dyn Fn(usize) -> f64| -> Vec<f64> {
        let first = (0..2).flat_map(|head| (0..16).map(move |c| if c == 0 { of_head(head) } else { 0.0 }));
        first.chain(rows.iter().map(|&x| f64::from(x))).collect()
    };
    let [q, k, v, dout] = &case.data;
    let k = with_sink(k, &|head| f64::from(SINKS[head]) / scale);
    let v = with_sink(v, &|_| 0.0);
    let (q, dout) = (f64s(q), f64s(dout));
    let (queries, keys) = (case.lens.0, case.lens.1 + 1);
    let shape = AttentionShape::new((1, queries, 2, 16), (1, keys, 2, 16), (1, keys, 2, 16), false, None);
    let shape = shape.expect("a shape");
    let own = case.shape().segments()[0].clone();
    let sees = |at: reference::Pair| {
        at.key == 0 || (own.first_key(at.query)..own.visible_keys(at.query)).contains(&(at.key - 1))
    };
    let out = reference::sparse_forward(&shape, &sees, scale, [&q, &k, &v]).out;
    let grads = reference::sparse_backward(&shape, &sees, scale, [&q, &k, &v], &dout);
    let row = 2 * 16;
    let sinks = (0..2).map(|head| grads.dk[head * 16] / scale).collect();
    [out, grads.dq, grads.dk[row..].to_vec(), grads.dv[row..].to_vec(), sinks]
}

/// Removes the first channel of dQ. In this channel the oracle's dQ also contains a term of the key that replaces the
/// sink. The op's dQ lacks this term.
fn without_first_channel(x: &[f64]) -> Vec<f64> {
    x.chunks_exact(16).flat_map(|row| row[1..].iter().copied()).collect()
}

/// In f32 the results are exact up to rounding. In bf16, O, dQ, dK and dV are each rounded by about 2^-9 of their norm.
/// Delta and the sinks' gradient are computed from the rounded O.
#[test]
fn sinks_are_a_key_without_a_value() -> Result<()> {
    for (tokens, window) in [((70, 70), None), ((60, 130), None), ((150, 150), Some(40))] {
        for (dtype, limit) in [(DType::F32, 1e-5), (DType::BF16, 3.0 * 2f64.powi(-8))] {
            let mut case = case(tokens, window);
            case.round_to(dtype)?;
            let (got, exact) = (run(&case, &case.attention(Scheme::Unquantized), dtype)?, exact(&case));
            for (n, name) in ["O", "dQ", "dK", "dV", "dsinks"].into_iter().enumerate() {
                let error = match n {
                    1 => relative_l2(&without_first_channel(&got[n]), &without_first_channel(&exact[n])),
                    _ => relative_l2(&got[n], &exact[n]),
                };
                assert!(error < limit, "{name}, {dtype:?}, {tokens:?}, {window:?}: {error:e}");
            }
        }
    }
    Ok(())
}

/// The limits are those of tests without sinks: `attention::sagebwd_follows_every_shape` and
/// `widths::values_have_heads_of_another_width`.
#[test]
fn sinks_in_low_bits() -> Result<()> {
    let case = case((128, 128), None);
    let exact = exact(&case);
    for (scheme, limit) in [
        (Scheme::from(SageBwd::default().smoothing(Smoothing::None)), 0.09),
        (AttnQat::default().into(), 0.25),
    ] {
        let got = run(&case, &case.attention(scheme), DType::F32)?;
        for n in [0, 2, 3] {
            let error = relative_l2(&got[n], &exact[n]);
            assert!(error < limit, "{scheme}, result {n}: {error}");
        }
    }
    Ok(())
}

/// A query that sees no key has a zero output, whatever the sink, and its gradients are not NaN.
#[test]
fn queries_without_keys() -> Result<()> {
    let mut case = Case::new(1, (50, 20), (2, 2), 16, true);
    case.draw(1.0, 3);
    let [out, dq, dk, dv, dsinks] = run(&case, &case.attention(Scheme::Unquantized), DType::F32)?;
    assert!(out[..30 * 32].iter().chain(&dq[..30 * 32]).all(|x| *x == 0.0));
    assert!(out.iter().chain(&dq).chain(&dk).chain(&dv).chain(&dsinks).all(|x| x.is_finite()));
    Ok(())
}

/// A sink far above all logits takes all probability, a sink far below takes none.
#[test]
fn sinks_far_from_the_logits() -> Result<()> {
    let case = Case::new(1, (50, 50), (2, 1), 16, true);
    let tensor = |n: usize| Tensor::from_slice(&case.data[n], &case.dims(n == 0)[..], &Device::Cpu);
    let (q, k, v) = (tensor(0)?, tensor(1)?, tensor(2)?);
    for scheme in [Scheme::Unquantized, AttnQat::default().into()] {
        let attention = case.attention(scheme);
        let plain: Vec<f32> = attention.apply(&q, &k, &v)?.flatten_all()?.to_vec1()?;
        let sinks = Var::new(&[1e4f32, -1e4], &Device::Cpu)?;
        let out = attention.apply_with_sinks(&q, &k, &v, &sinks)?;
        let values: Vec<f32> = out.flatten_all()?.to_vec1()?;
        for (row, (got, plain)) in values.chunks(16).zip(plain.chunks(16)).enumerate() {
            if row % 2 == 0 { assert!(got.iter().all(|x| *x == 0.0)) } else { assert_eq!(got, plain) }
        }
        let dsinks = out.sum_all()?.backward()?.get(&sinks).expect("a gradient").to_vec1::<f32>()?;
        assert_eq!(dsinks, [0.0, 0.0]);
    }
    Ok(())
}

/// With sinks, attention to a selection of all blocks is bit-identical to dense attention.
#[test]
fn sinks_of_selected_blocks() -> Result<()> {
    let case = case((128, 128), None);
    let attention = case.attention(Scheme::Unquantized);
    let all =
        Selection::from_lists(&case.shape(), (64, 64), &Device::Cpu, |at| (0..at.candidates).collect())?;
    assert!(run(&case, &attention.clone().select(&all), DType::F32)? == run(&case, &attention, DType::F32)?);
    Ok(())
}

/// Constant inputs give the same output as variables, and `vjp` the same gradients as autograd, bit for bit.
#[test]
fn sinks_outside_of_the_graph() -> Result<()> {
    let case = case((40, 60), None);
    let attention = case.attention(Scheme::Unquantized);
    let [out, dq, dk, dv, dsinks] = run(&case, &attention, DType::F32)?;
    let tensor = |n: usize| Tensor::from_slice(&case.data[n], &case.dims(n == 0 || n == 3)[..], &Device::Cpu);
    let (q, k, v) = (tensor(0)?, tensor(1)?, tensor(2)?);
    let attention = attention.sinks(&Tensor::new(&SINKS, &Device::Cpu)?);
    let values = |x: &Tensor| Ok::<_, candle_core::Error>(f64s(&x.flatten_all()?.to_vec1()?));
    assert_eq!(values(&attention.apply(&q, &k, &v)?)?, out);
    let (_, vjp) = attention.vjp(&q, &k, &v)?;
    assert!(vjp.sink_gradient().is_none());
    let got = vjp.apply(&tensor(3)?)?;
    for (got, expected) in got.iter().zip([dq, dk, dv]) {
        assert_eq!(values(got)?, expected);
    }
    assert_eq!(values(&vjp.sink_gradient().expect("sinks"))?, dsinks);
    let sinks = Var::new(&SINKS, &Device::Cpu)?;
    let tracked = Attention::default().sinks(&sinks).apply(&q, &k, &v);
    assert!(tracked.unwrap_err().to_string().contains("apply_with_sinks"));
    Ok(())
}

#[test]
fn what_does_not_fit_is_an_error() -> Result<()> {
    let x = Tensor::zeros((1, 4, 2, 16), DType::F32, &Device::Cpu)?;
    let says = |attention: Attention, sinks: Tensor, words: &str| {
        let message = attention.apply_with_sinks(&x, &x, &x, &sinks).unwrap_err().to_string();
        assert!(message.contains(words) && message.contains("hint:"), "{message}");
    };
    says(Attention::default(), Tensor::zeros(3, DType::F32, &Device::Cpu)?, "[2] in a float type");
    says(Attention::default(), Tensor::zeros(2, DType::U32, &Device::Cpu)?, "[2] in a float type");
    says(Attention::new(SageBwd::default()), Tensor::zeros(2, DType::F32, &Device::Cpu)?, "Smoothing::None");
    Ok(())
}
