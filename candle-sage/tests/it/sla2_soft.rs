//! Tests of [`Sla2::apply_soft`], [`Sla2::output_loss`] and [`Sla2::softmax_scale`].

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW};
use candle_sage::ops::{Alpha, Tail};
use candle_sage::{Packing, Router, Scheme, Sla2};

use crate::support::{f64s, relative_l2};

fn values(x: &Tensor) -> Result<Vec<f64>> {
    Ok(f64s(&x.flatten_all()?.to_vec1::<f32>()?))
}

/// Query, key and value: a batch of two, two query heads for one key head.
fn inputs(seed: u64, tokens: usize) -> Result<[Tensor; 3]> {
    let wave = |heads: usize, salt: u64| -> Result<Tensor> {
        let count = 2 * tokens * heads * 16;
        let values = (0..count as u64).map(|n| {
            let bits = (n + 1 + 7919 * (seed + salt)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            ((bits >> 40) as f32 / (1u64 << 24) as f32 - 0.5) * 3.0
        });
        Tensor::from_iter(values, &Device::Cpu)?.reshape((2, tokens, heads, 16))
    };
    Ok([wave(2, 1)?, wave(1, 2)?, wave(1, 3)?])
}

fn forms() -> Vec<Sla2> {
    let mut all = Vec::new();
    for causal in [true, false] {
        let sla2 = Sla2::new(Scheme::Unquantized).blocks(2).block((16, 16)).causal(causal);
        for tail in [None, Some(Tail::Past), Some(Tail::Complement)] {
            for alpha in [Alpha::Count, Alpha::Constant] {
                all.push(sla2.clone().tail(tail).alpha(alpha));
            }
        }
    }
    all
}

/// With a small tau, `apply_soft` weights blocks by 0 or 1. Its output equals that of `apply` with the router's
/// selection.
#[test]
fn a_small_tau_is_the_hard_choice() -> Result<()> {
    let device = Device::Cpu;
    let router = Router::new(1, 16, &device)?;
    let theta = Tensor::new(&[1.5f32, -0.5], &device)?;
    for sla2 in forms() {
        // The last block is not full.
        let [q, k, v] = inputs(1, 90)?;
        let selection = sla2.select(&router, &q, &k)?;
        let hard = sla2.apply(&q, &k, &v, &selection, &theta)?;
        let error = |tau| -> Result<f64> {
            let soft = sla2.apply_soft(&router, [&q, &k, &v], &theta, tau)?;
            Ok(relative_l2(&values(&soft)?, &values(&hard)?))
        };
        let (small, large) = (error(1e-5)?, error(0.3)?);
        assert!(small < 1e-5 && large > 1e-3, "{sla2:?}: {small}, {large} at tau .3");
    }
    Ok(())
}

/// If all blocks are selected, `apply_soft` is dense attention, so `output_loss` is 0 up to rounding.
#[test]
fn with_enough_blocks_it_is_dense_attention() -> Result<()> {
    let device = Device::Cpu;
    let theta = Tensor::new(&[-3f32, 2.0], &device)?;
    for sla2 in forms().into_iter().flat_map(|sla2| [sla2.clone(), sla2.softmax_scale(0.5)]) {
        let [q, k, v] = inputs(2, 64)?;
        let loss = sla2.blocks(9).output_loss(&Router::new(1, 16, &device)?, [&q, &k, &v], &theta, 0.1)?;
        assert!(loss.to_scalar::<f32>()? < 1e-12, "{loss}");
    }
    Ok(())
}

/// The gradients of the router's matrices and of theta, compared with central differences of the loss `sum(c o O)`,
/// where `c` is a fixed tensor. The roundings of 4096 f32 outputs, 6e-8 each, are independent, so their sum is about
/// 64 * 6e-8 = 4e-6. Divided by `2 h` = 2^-5, this sum is 1e-4. The third-derivative term of the differences is a few
/// times 1e-4.
#[test]
fn gradients_are_those_of_differences() -> Result<()> {
    let device = Device::Cpu;
    let sla2 =
        Sla2::new(Scheme::Unquantized).blocks(1).block((16, 16)).causal(true).tail(Some(Tail::Complement));
    let [q, k, v] = inputs(3, 64)?;
    let c = inputs(4, 64)?[0].clone();
    let eye = (Tensor::eye(16, DType::F32, &device)?.unsqueeze(0)? * 0.8)?;
    let start = [eye.clone(), (eye + 0.05)?, Tensor::new(&[0.5f32, -0.5], &device)?];
    let loss = |x: [&Tensor; 3]| -> Result<Tensor> {
        let router = Router::from_tensors(x[0].clone(), x[1].clone())?;
        let out = sla2.apply_soft(&router, [&q, &k, &v], x[2], 0.5)?;
        (out * &c)?.to_dtype(DType::F64)?.sum_all()
    };
    let vars = start.each_ref().map(|x| Var::from_tensor(x).expect("a variable"));
    let gradients = loss([&vars[0], &vars[1], &vars[2]])?.backward()?;
    let h = 2f64.powi(-6);
    for (n, places) in [(0, vec![0, 17, 100]), (1, vec![5, 34, 255]), (2, vec![0, 1])] {
        let gradient = values(gradients.get(&vars[n]).expect("a gradient"))?;
        for place in places {
            let moved = |by: f64| -> Result<f64> {
                let mut values = start[n].flatten_all()?.to_vec1::<f32>()?;
                values[place] += by as f32;
                let mut all = start.clone();
                all[n] = Tensor::from_vec(values, start[n].shape(), &device)?;
                loss([&all[0], &all[1], &all[2]])?.to_scalar::<f64>()
            };
            let expected = (moved(h)? - moved(-h)?) / (2.0 * h);
            let error = (gradient[place] - expected).abs();
            assert!(error < 2e-3 + 2e-3 * expected.abs(), "{n} {place}: {} {expected}", gradient[place]);
        }
    }
    Ok(())
}

/// Training a router with `Sla2::output_loss` reduces this loss by at least 10 %.
#[test]
fn the_published_loss_trains_a_router() -> Result<()> {
    let device = Device::Cpu;
    let sla2 =
        Sla2::new(Scheme::Unquantized).blocks(1).block((16, 16)).causal(true).tail(Some(Tail::Complement));
    let [q, k, v] = inputs(5, 128)?;
    // Only the last 8 channels of the keys matter, because the queries are small in the first 8 channels.
    let matters = Tensor::from_iter((0..16).map(|n| if n < 8 { 0.1f32 } else { 2.0 }), &device)?;
    let (q, noise) = (q.broadcast_mul(&matters)?, Tensor::randn(0f32, 1.0, (16, 16), &device)?);
    let vars: Vec<Var> =
        (0..2).map(|_| Var::from_tensor(&(&noise * 0.5)?.unsqueeze(0)?)).collect::<Result<_>>()?;
    let theta = Var::new(&[0f32, 0.0], &device)?;
    let router = Router::from_tensors(vars[0].as_tensor().clone(), vars[1].as_tensor().clone())?;
    let loss = || sla2.output_loss(&router, [&q, &k, &v], &theta, 0.1);
    let before = loss()?.to_scalar::<f32>()?;
    let all = vars.iter().cloned().chain([theta.clone()]).collect();
    let mut optimizer = AdamW::new(all, ParamsAdamW { lr: 0.02, weight_decay: 0.0, ..Default::default() })?;
    for _ in 0..60 {
        optimizer.backward_step(&loss()?)?;
    }
    let after = loss()?.to_scalar::<f32>()?;
    assert!(after < 0.9 * before, "{before} to {after}");
    Ok(())
}

#[test]
fn what_it_cannot_do_is_an_error() -> Result<()> {
    let device = Device::Cpu;
    let router = Router::new(1, 16, &device)?;
    let theta = Tensor::new(&[0f32, 0.0], &device)?;
    let [q, k, v] = inputs(6, 64)?;
    let sla2 = Sla2::new(Scheme::Unquantized).blocks(1).block((16, 16)).causal(true);
    let failed = |sla2: &Sla2, q: &Tensor, k: &Tensor, v: &Tensor, tau| {
        sla2.apply_soft(&router, [q, k, v], &theta, tau).expect_err("refused").to_string()
    };
    assert!(failed(&sla2, &q, &k, &v, 0.0).contains("tau is out of range"));
    let one = |x: &Tensor| x.narrow(0, 0, 1)?.contiguous();
    let packed = sla2.clone().packing(Packing::self_attention(vec![0, 30, 64]));
    assert!(
        failed(&packed, &one(&q)?, &one(&k)?, &one(&v)?, 0.1).contains("does not support packed documents")
    );
    Ok(())
}

/// A doubled softmax scale gives the same bits as doubled queries, in the output without a tail and in `mass_caught`.
#[test]
fn the_scale_of_logits_can_be_set() -> Result<()> {
    let [q, k, v] = inputs(3, 64)?;
    let theta = Tensor::zeros(2, DType::F32, &Device::Cpu)?;
    let router = Router::new(1, 16, &Device::Cpu)?;
    let usual = Sla2::new(Scheme::Unquantized).block((16, 16)).blocks(1).causal(true).tail(None);
    let twice = usual.clone().softmax_scale(0.5);
    let selection = usual.select(&router, &q, &k)?;
    let double = (&q * 2.0)?;
    let got = values(&twice.apply(&q, &k, &v, &selection, &theta)?)?;
    assert_eq!(got, values(&usual.apply(&double, &k, &v, &selection, &theta)?)?);
    assert_ne!(got, values(&usual.apply(&q, &k, &v, &selection, &theta)?)?);
    assert_eq!(twice.mass_caught(&selection, &q, &k)?, usual.mass_caught(&selection, &double, &k)?);
    let soft = values(&twice.apply_soft(&router, [&q, &k, &v], &theta, 0.1)?)?;
    assert_ne!(soft, values(&usual.apply_soft(&router, [&q, &k, &v], &theta, 0.1)?)?);
    Ok(())
}
