//! A bias of attention's logits, compared with other ways to compute the same attention.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_sage::{Attention, Packing, SageBwd};

use crate::score_mod::slopes;
use crate::support::{Case, f64s, relative_l2};

fn vars(case: &Case) -> Result<[Var; 3]> {
    let var = |n: usize| {
        Var::from_tensor(&Tensor::from_slice(&case.data[n], &case.dims(n == 0)[..], &Device::Cpu)?)
    };
    Ok([var(0)?, var(1)?, var(2)?])
}

/// The output and the gradients of query, key and value, then the gradient of the bias.
fn run(case: &Case, attention: &Attention, bias: &Var) -> Result<([Vec<f64>; 4], Vec<f64>)> {
    let [q, k, v] = vars(case)?;
    let out = attention.apply_with_bias(&q, &k, &v, bias)?;
    let dout = Tensor::from_slice(&case.data[3], &case.dims(true)[..], &Device::Cpu)?;
    let grads = (&out * dout)?.sum_all()?.backward()?;
    let values = |x: &Tensor| Ok::<_, candle_core::Error>(f64s(&x.flatten_all()?.to_vec1()?));
    let gradient = |x: &Tensor| values(grads.get(x).expect("a gradient"));
    Ok(([values(&out)?, gradient(&q)?, gradient(&k)?, gradient(&v)?], gradient(bias)?))
}

/// A bias of minus slope times distance equals ALiBi, except for f32 rounding.
#[test]
fn slopes_as_a_bias_are_alibi() -> Result<()> {
    let mut cases = vec![
        Case::new(2, (40, 60), (4, 2), 16, true),
        Case::new(1, (60, 40), (2, 2), 8, true),
        Case::new(2, (50, 50), (2, 1), 16, false),
    ];
    let mut window = Case::new(1, (70, 70), (2, 1), 16, true);
    (window.window, window.softcap) = ((Some(9), Some(0)), Some(1.5));
    let mut packed = Case::new(1, (60, 60), (2, 2), 16, true);
    packed.packing = Some(Packing::self_attention(vec![0, 1, 30, 30, 60]));
    cases.extend([window, packed]);
    for mut case in cases {
        case.alibi_slopes = slopes(case.heads.0);
        let exact = case.exact();
        let (queries, keys) = case.lens;
        // A packed document's queries and keys have the same indices, so `distance` can use indices of the whole
        // sequence.
        let distance = |i: usize, j: usize| (i as f32 + keys as f32 - queries as f32 - j as f32).abs();
        let of_head = |slope: &f32| {
            let slope = *slope;
            (0..queries)
                .flat_map(move |i| (0..keys).map(move |j| -slope * distance(i, j)))
                .collect::<Vec<_>>()
        };
        let bias: Vec<f32> = case.alibi_slopes.iter().flat_map(of_head).collect();
        let bias = Var::from_vec(bias, (1, case.heads.0, queries, keys), &Device::Cpu)?;
        let attention = case.attention(candle_sage::Scheme::Unquantized);
        let (got, _) = run(&case, &attention, &bias)?;
        for (n, (got, exact)) in got.iter().zip(&exact).enumerate() {
            let error = relative_l2(got, exact);
            assert!(error < 1e-5, "result {n}, {:?}: {error:e}", case.shape());
        }
    }
    Ok(())
}

/// The gradient of a bias equals central differences of the loss with a step of .01, up to roundings of f32 sums.
#[test]
fn a_bias_has_a_gradient() -> Result<()> {
    let case = Case::new(1, (6, 7), (2, 1), 8, true);
    let attention = case.attention(candle_sage::Scheme::Unquantized);
    let bias = Var::from_vec(crate::support::Normals::new(3).vec(42, 1.0), (1, 1, 6, 7), &Device::Cpu)?;
    let (_, gradient) = run(&case, &attention, &bias)?;
    let [q, k, v] = vars(&case)?;
    let values: Vec<f32> = bias.flatten_all()?.to_vec1()?;
    let loss = |n: usize, by: f32| -> Result<f64> {
        let mut moved = values.clone();
        moved[n] += by;
        let out =
            attention.apply_with_bias(&q, &k, &v, &Tensor::from_vec(moved, (1, 1, 6, 7), &Device::Cpu)?)?;
        let out = f64s(&out.flatten_all()?.to_vec1()?);
        Ok(out.iter().zip(&case.data[3]).map(|(out, dout)| out * f64::from(*dout)).sum())
    };
    for n in (0..42).step_by(5) {
        let expected = (loss(n, 0.01)? - loss(n, -0.01)?) / 0.02;
        assert!((gradient[n] - expected).abs() < 2e-3, "{n}: {}, {expected}", gradient[n]);
    }
    Ok(())
}

#[test]
fn a_query_that_sees_nothing_gives_zeros() -> Result<()> {
    let case = Case::new(1, (5, 3), (1, 1), 8, true);
    let mut bias = vec![0.0; 15];
    bias[12..].fill(f32::NEG_INFINITY);
    let bias = Var::from_vec(bias, (1, 1, 5, 3), &Device::Cpu)?;
    let ([out, dq, dk, dv], dbias) = run(&case, &Attention::default().causal(true), &bias)?;
    // The mask hides all keys from the first two queries, and the bias hides all keys from the last query.
    assert!(out[..16].iter().chain(&out[32..]).all(|x| *x == 0.0) && out[16..32].iter().all(|x| *x != 0.0));
    assert!(out.iter().chain(&dq).chain(&dk).chain(&dv).chain(&dbias).all(|x| x.is_finite()));
    Ok(())
}

#[test]
fn what_does_not_fit_is_an_error() -> Result<()> {
    let x = Tensor::zeros((2, 4, 2, 16), DType::F32, &Device::Cpu)?;
    let says = |attention: Attention, dims: &[usize], words: &str| {
        let bias = Tensor::zeros(dims, DType::F32, &Device::Cpu).expect("a bias");
        let message = attention.apply_with_bias(&x, &x, &x, &bias).unwrap_err().to_string();
        assert!(message.contains(words) && message.contains("hint:"), "{message}");
    };
    says(Attention::default(), &[2, 2, 4], "[2, 2, 4, 4], where the batch");
    says(Attention::default(), &[2, 3, 4, 4], "[2, 2, 4, 4], where the batch");
    says(Attention::default(), &[1, 1, 4, 1], "[2, 2, 4, 4], where the batch");
    says(Attention::new(SageBwd::default()), &[1, 1, 4, 4], "a low-bit scheme");
    let slopes = Tensor::new(&[0.5f32, 0.25], &Device::Cpu)?;
    says(Attention::default().alibi(&slopes), &[1, 1, 4, 4], "ALiBi");
    says(Attention::default().sinks(&slopes), &[1, 1, 4, 4], "sinks");
    Ok(())
}
