//! The log-sum-exps of attention and their gradient, compared with candle's operators in f64.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_sage::{Attention, AttnQat, Packing, SageBwd, Scheme, Smoothing};

use crate::support::{Normals, f64s, relative_l2};

#[derive(Debug, Clone)]
struct Case {
    batch: usize,
    tokens: usize,
    /// Numbers of query heads and key heads.
    heads: [usize; 2],
    head_dim: usize,
    causal: bool,
    documents: Vec<usize>,
}

impl Case {
    fn attention(&self, scheme: Scheme) -> Attention {
        let attention = Attention::new(scheme).causal(self.causal);
        match self.documents.is_empty() {
            true => attention,
            false => attention.packing(Packing::self_attention(self.documents.clone())),
        }
    }

    /// A mask with minus infinity where a query does not see a key, (tokens, tokens).
    fn mask(&self) -> Result<Tensor> {
        let document = |token: usize| self.documents.iter().filter(|start| **start <= token).count();
        let sees = |i: usize, j: usize| document(i) == document(j) && (!self.causal || j <= i);
        let all = (0..self.tokens).flat_map(|i| (0..self.tokens).map(move |j| (i, j)));
        let all: Vec<f64> = all.map(|(i, j)| if sees(i, j) { 0.0 } else { f64::NEG_INFINITY }).collect();
        Tensor::from_vec(all, (self.tokens, self.tokens), &Device::Cpu)
    }

    /// Output (batch, tokens, heads, head_dim) and log-sum-exps (batch, heads, tokens) in f64.
    fn exact(&self, [q, k, v]: [&Tensor; 3]) -> Result<[Tensor; 2]> {
        let group = self.heads[0] / self.heads[1];
        let first = |x: &Tensor| x.transpose(1, 2)?.contiguous();
        let shared = |x: &Tensor| -> Result<Tensor> {
            let x = first(x)?.unsqueeze(2)?;
            let (batch, heads, _, tokens, head_dim) = x.dims5()?;
            x.broadcast_as((batch, heads, group, tokens, head_dim))?.reshape((
                batch,
                heads * group,
                tokens,
                head_dim,
            ))
        };
        let (q, k, v) = (first(q)?, shared(k)?.contiguous()?, shared(v)?.contiguous()?);
        let logits = (q.matmul(&k.t()?)? / (self.head_dim as f64).sqrt())?.broadcast_add(&self.mask()?)?;
        let lse = logits.log_sum_exp(D::Minus1)?;
        let p = logits.broadcast_sub(&lse.unsqueeze(3)?)?.exp()?;
        Ok([p.matmul(&v)?.transpose(1, 2)?, lse])
    }
}

fn flat(x: &Tensor) -> Result<Vec<f64>> {
    x.to_dtype(DType::F64)?.to_device(&Device::Cpu)?.flatten_all()?.to_vec1()
}

/// Checks that the log-sum-exps are within `limits[0]` of [`Case::exact`]. Also checks the gradients of
/// `sum(out * a) + sum(lse * b)`, for random a and b: their relative errors ([`relative_l2`]) are below `limits[1]`.
fn check(case: &Case, scheme: Scheme, (device, dtype): (&Device, DType), limits: [f64; 2]) -> Result<()> {
    let mut normals = Normals::new(61);
    let mut draw = |dims: &[usize], dtype| {
        Tensor::from_vec(normals.vec(dims.iter().product(), 1.0), dims, &Device::Cpu)?.to_dtype(dtype)
    };
    let dims = |heads| [case.batch, case.tokens, heads, case.head_dim];
    let [queries, keys] = case.heads;
    // `apply_with_lse` and `exact` get the same inputs, rounded to the element type.
    let inputs = [draw(&dims(queries), dtype)?, draw(&dims(keys), dtype)?, draw(&dims(keys), dtype)?];
    let of_out = draw(&dims(queries), dtype)?;
    let of_lse = draw(&[case.batch, queries, case.tokens], DType::F32)?;

    let vars = inputs.each_ref().map(|x| x.to_device(device).and_then(|x| Var::from_tensor(&x)));
    let [q, k, v] = vars;
    let (q, k, v) = (q?, k?, v?);
    let (out, lse) = case.attention(scheme).apply_with_lse(&q, &k, &v)?;
    assert_eq!((lse.dtype(), lse.dims()), (DType::F32, [case.batch, queries, case.tokens].as_slice()));
    let loss = (&out * of_out.to_device(device)?)?.to_dtype(DType::F32)?.sum_all()?;
    let gradients = (loss + (&lse * of_lse.to_device(device)?)?.sum_all()?)?.backward()?;

    let wide = inputs.each_ref().map(|x| x.to_dtype(DType::F64).and_then(|x| Var::from_tensor(&x)));
    let [wide_q, wide_k, wide_v] = wide;
    let (wide_q, wide_k, wide_v) = (wide_q?, wide_k?, wide_v?);
    let [exact_out, exact_lse] = case.exact([&wide_q, &wide_k, &wide_v])?;
    let loss = (&exact_out * of_out.to_dtype(DType::F64)?)?.sum_all()?;
    let exact = (loss + (&exact_lse * of_lse.to_dtype(DType::F64)?)?.sum_all()?)?.backward()?;

    let name = format!("{scheme}, {dtype:?}, {case:?}");
    let apart = flat(&lse)?.iter().zip(flat(&exact_lse)?).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(apart < limits[0], "{name}: the log-sum-exps are off by {apart:e}");
    for (n, (var, wide)) in [(&q, &wide_q), (&k, &wide_k), (&v, &wide_v)].into_iter().enumerate() {
        let of = |gradients: &candle_core::backprop::GradStore, var: &Var| {
            flat(gradients.get(var).expect("a gradient"))
        };
        let error = relative_l2(&of(&gradients, var)?, &of(&exact, wide)?);
        assert!(error < limits[1], "{name}: gradient {n} is off by {error:e}");
    }
    // Output and log-sum-exps are bit-identical with and without autograd. With a zero gradient of the log-sum-exps,
    // `apply_with_lse` equals `apply`.
    let (again, vjp) = case.attention(scheme).deterministic(true).vjp(&q, &k, &v)?;
    assert_eq!((flat(&again)?, flat(&vjp.lse()?)?), (flat(&out)?, flat(&lse)?), "{name}");
    let (of_out, of_lse) = (of_out.to_device(device)?, of_lse.to_device(device)?);
    let both = vjp.apply_with_lse(&of_out, &of_lse)?;
    for (got, var) in both.iter().zip([&q, &k, &v]) {
        let error = relative_l2(&flat(got)?, &flat(gradients.get(var).expect("a gradient"))?);
        // On a GPU, `vjp` and autograd sum in different orders and round to the element type.
        assert!(error < if device.is_cpu() { 1e-7 } else { 1e-2 }, "{name}: {error:e}");
    }
    let plain = [vjp.apply(&of_out)?, vjp.apply_with_lse(&of_out, &of_lse.zeros_like()?)?];
    assert_eq!(flat(&plain[0][0])?, flat(&plain[1][0])?, "{name}");
    assert!(relative_l2(&flat(&plain[0][0])?, &flat(&both[0])?) > 0.1, "{name}: dlse counts");
    Ok(())
}

fn cases(head_dim: usize) -> [Case; 4] {
    let case = Case { batch: 2, tokens: 70, heads: [2, 2], head_dim, causal: false, documents: vec![] };
    [
        case.clone(),
        Case { causal: true, tokens: 150, ..case.clone() },
        Case { causal: true, heads: [4, 2], batch: 1, ..case.clone() },
        Case { causal: true, batch: 1, tokens: 140, documents: vec![0, 3, 90, 140], ..case },
    ]
}

/// Unquantized results in f32 have errors below 1e-5. Quantizing Q and K to INT8 changes the logits by about 1 %, FP4
/// changes them more.
#[test]
fn log_sum_exps_and_their_gradients() -> Result<()> {
    let cpu = (&Device::Cpu, DType::F32);
    for case in cases(16) {
        check(&case, Scheme::Unquantized, cpu, [1e-5, 1e-5])?;
        check(&case, SageBwd::default().smoothing(Smoothing::None).into(), cpu, [0.05, 0.06])?;
        check(&case, AttnQat::default().into(), cpu, [0.5, 0.4])?;
    }
    Ok(())
}

#[test]
#[cfg(feature = "cuda")]
#[ignore = "needs a GPU"]
fn cuda_log_sum_exps_and_their_gradients() -> Result<()> {
    let gpu = crate::support::gpu();
    for head_dim in [64, 128] {
        for case in cases(head_dim) {
            for (dtype, limit) in [(DType::F16, 4e-3), (DType::BF16, 2e-2)] {
                let here = (&gpu, dtype);
                check(&case, Scheme::Unquantized, here, [1e-4, limit])?;
                check(&case, SageBwd::default().smoothing(Smoothing::None).into(), here, [0.05, 0.08])?;
                check(&case, AttnQat::default().into(), here, [0.5, 0.5])?;
            }
        }
    }
    Ok(())
}

/// The outputs for two halves of the keys, weighted by their log-sum-exps, combine to the output for all keys, and so
/// do the gradients. A query that sees no key of a half has a log-sum-exp of minus infinity there.
#[test]
fn parts_make_the_whole() -> Result<()> {
    let mut normals = Normals::new(63);
    let mut var =
        || Var::from_tensor(&Tensor::from_vec(normals.vec(24 * 2 * 8, 1.0), (1, 24, 2, 8), &Device::Cpu)?);
    let (q, k, v) = (var()?, var()?, var()?);
    let attention = Attention::default();
    let part = |start| attention.apply_with_lse(&q, &k.narrow(1, start, 12)?, &v.narrow(1, start, 12)?);
    let [(left, left_lse), (right, right_lse)] = [part(0)?, part(12)?];
    let share = candle_nn::ops::sigmoid(&(left_lse - right_lse)?)?.transpose(1, 2)?.unsqueeze(3)?;
    let merged = (left.broadcast_mul(&share)? + right.broadcast_mul(&(1.0 - share)?)?)?;
    let whole = attention.apply(&q, &k, &v)?;
    assert!(relative_l2(&flat(&merged)?, &flat(&whole)?) < 1e-6);
    let [got, expected] = [merged, whole].map(|out| out.sqr()?.sum_all()?.backward());
    let (got, expected) = (got?, expected?);
    for var in [&q, &k, &v] {
        let of = |gradients: &candle_core::backprop::GradStore| flat(gradients.get(var).expect("a gradient"));
        assert!(relative_l2(&of(&got)?, &of(&expected)?) < 1e-5);
    }
    // Of 24 queries and 12 keys, aligned at the end, the first 12 queries see no key.
    let (_, lse) = attention.causal(true).apply_with_lse(&q, &k.narrow(1, 0, 12)?, &v.narrow(1, 0, 12)?)?;
    let lse = f64s(&lse.flatten_all()?.to_vec1::<f32>()?);
    assert!(lse.iter().enumerate().all(|(n, x)| (n % 24 < 12) == (*x == f64::NEG_INFINITY)));
    Ok(())
}

#[test]
fn smoothed_keys_have_other_log_sum_exps() -> Result<()> {
    let x = Tensor::zeros((1, 4, 1, 8), DType::F32, &Device::Cpu)?;
    let error =
        Attention::new(SageBwd::default()).apply_with_lse(&x, &x, &x).expect_err("smoothed").to_string();
    assert!(error.contains("not supported with smoothed keys") && error.contains("hint:"), "{error}");
    let (_, vjp) = Attention::new(SageBwd::default()).vjp(&x, &x, &x)?;
    assert!(vjp.lse().is_err());
    let (out, vjp) = Attention::default().vjp(&x, &x, &x)?;
    let error = vjp.apply_with_lse(&out, &Tensor::zeros((1, 4, 1), DType::F32, &Device::Cpu)?);
    assert!(error.expect_err("another shape").to_string().contains("another shape or type"));
    Ok(())
}
