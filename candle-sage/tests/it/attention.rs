//! Tests of every scheme. Unquantized attention is compared with the oracle (`candle_sage::reference`).

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_sage::{
    Attention, AttnQat, Granularity, Int8Products, KeyMean, PReference, Packing, SageBwd, Scheme, Smoothing,
    ValueGroups, ValueScale,
};

use crate::support::{Case, relative_l2};

fn schemes() -> Vec<Scheme> {
    let sage = SageBwd::default();
    let all = vec![
        Scheme::Unquantized,
        sage.into(),
        sage.smoothing(Smoothing::None).granularity(Granularity::Tile).into(),
        sage.smoothing(Smoothing::Qk).granularity(Granularity::Group(8)).tile_q(16).tile_k(48).into(),
        sage.products(Int8Products::FORWARD_AND_S).smoothing(Smoothing::Qk).into(),
        sage.products(Int8Products::FORWARD).into(),
        sage.products(Int8Products::SCORES).into(),
        sage.products(Int8Products::SCORES.dv(true)).smoothing(Smoothing::Qk).into(),
        sage.key_mean(KeyMean::Sample(7)).into(),
        sage.smoothing(Smoothing::Kv).into(),
        sage.smoothing(Smoothing::Kv)
            .products(Int8Products::FORWARD_AND_S)
            .key_mean(KeyMean::Sample(7))
            .into(),
        sage.products(Int8Products::FORWARD.dk(true).dv(true)).into(),
        AttnQat::default().into(),
        AttnQat::default()
            .smoothing(Smoothing::K)
            .value_groups(ValueGroups::HeadDim)
            .value_scale(ValueScale::Head)
            .p_reference(PReference::Literal)
            .high_precision_output(false)
            .into(),
        AttnQat::drop_in().into(),
        AttnQat::default().smoothing(Smoothing::Kv).into(),
    ];
    let is_there = |scheme: &Scheme| all.iter().any(|one: &Scheme| one.name() == scheme.name());
    assert!(Scheme::all().iter().all(is_there), "a scheme is not tested");
    all
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (lens, heads, d) in [
        ((1, 1), (1, 1), 8),
        ((63, 63), (2, 2), 64),
        ((64, 64), (2, 1), 32),
        ((65, 65), (4, 2), 40),
        ((127, 127), (1, 1), 128),
        ((128, 129), (3, 1), 16),
        ((113, 203), (2, 2), 64),
        ((203, 113), (6, 2), 24),
        ((1, 300), (8, 8), 8),
        ((300, 1), (1, 1), 256),
        ((600, 600), (2, 1), 33),
    ] {
        for causal in [false, true] {
            cases.push(Case::new(2, lens, heads, d, causal));
        }
    }
    for causal in [false, true] {
        let mut packed = Case::new(1, (200, 210), (4, 2), 32, causal);
        packed.packing = Some(Packing::new(vec![0, 1, 71, 71, 80, 200], vec![0, 3, 73, 75, 75, 210]));
        cases.push(packed);
    }
    for (window, lens, heads, d) in [
        ((Some(2), Some(0)), (65, 65), (2, 1), 16),
        ((Some(70), Some(0)), (300, 300), (2, 1), 33),
        ((Some(64), None), (203, 113), (2, 2), 24),
        ((Some(100), Some(3)), (113, 203), (2, 1), 64),
        ((None, Some(70)), (200, 200), (1, 1), 8),
        ((Some(9), Some(600)), (130, 600), (1, 1), 16),
    ] {
        let mut case = Case::new(2, lens, heads, d, window.1 == Some(0));
        case.window = window;
        cases.push(case);
    }
    for (window, causal) in [((Some(60), Some(0)), true), ((Some(5), Some(20)), false)] {
        let mut packed = Case::new(1, (200, 210), (4, 2), 32, causal);
        packed.packing = Some(Packing::new(vec![0, 1, 71, 71, 80, 200], vec![0, 3, 73, 75, 75, 210]));
        packed.window = window;
        cases.push(packed);
    }
    let mut scaled = Case::new(1, (100, 100), (1, 1), 64, true);
    scaled.softmax_scale = Some(-0.3);
    cases.push(scaled);
    cases
}

fn describe(case: &Case) -> String {
    format!("{:?} packed {} scale {:?}", case.shape(), case.packing.is_some(), case.softmax_scale)
}

/// The longest sums have 600 terms, one for each token. Each term is rounded to 2^-24, so these sums err by about
/// sqrt(600) * 2^-24 = 1.5e-6; the exponential adds 2 ulp. The limit of 4e-6 leaves a factor of two.
#[test]
fn unquantized_is_exact_up_to_f32_rounding() -> Result<()> {
    for case in cases() {
        for (name, error) in ["O", "dQ", "dK", "dV"].iter().zip(case.errors(Scheme::Unquantized, DType::F32)?)
        {
            assert!(error < 4e-6, "{name} of {}: {error:e}", describe(&case));
        }
    }
    Ok(())
}

/// The inputs are exact in 16 bit and the matmuls are in f32, so that the output and each gradient are rounded once.
/// This changes them by up to about 2^-9 (bf16) or 2^-12 (f16) of their norm. The backward's delta = rowsum(dO o O) is
/// computed from the rounded output: this can add an error of the same size to the gradients. Gradients below f16's
/// smallest number, 6e-8, do not occur here.
#[test]
fn sixteen_bit_tensors_are_rounded_once() -> Result<()> {
    for (dtype, tolerance) in [(DType::BF16, 2f64.powi(-8)), (DType::F16, 2f64.powi(-11))] {
        for mut case in cases() {
            case.round_to(dtype)?;
            for (name, error) in ["O", "dQ", "dK", "dV"].iter().zip(case.errors(Scheme::Unquantized, dtype)?)
            {
                assert!(error < tolerance, "{name} {dtype:?} of {}: {error:e}", describe(&case));
            }
        }
    }
    Ok(())
}

/// In a simulation of INT8 at sigma 1 with one scale per tile, the errors of whole tensors (O, dQ, dK, dV) are under
/// 0.05. Queries with few keys have larger errors, so the limit is 0.09. This limit would not detect one wrong row in
/// hundreds. Therefore the error of every row is also checked, relative to the larger of its norm and the average norm.
/// The worst row of all cases has 0.185, so the limit is 0.25. A row of average norm with a wrong index, mask, head or
/// scale is off by about 1.
#[test]
fn sagebwd_follows_every_shape() -> Result<()> {
    // Over a single key the exact dQ and dK are zero, so relative errors are undefined.
    for case in cases().into_iter().filter(|case| case.lens.1 > 1) {
        let exact = case.exact();
        for scheme in schemes().into_iter().filter(|scheme| matches!(scheme, Scheme::SageBwd(_))) {
            for dtype in [DType::F32, DType::BF16] {
                let got = case.run(scheme, dtype)?;
                for ((name, got), exact) in ["O", "dQ", "dK", "dV"].iter().zip(&got).zip(&exact) {
                    let what = || format!("{name} {scheme:?} {dtype:?} of {}", describe(&case));
                    let error = relative_l2(got, exact);
                    assert!(error < 0.09, "{}: {error:e}", what());
                    let (row, error) = worst_row(got, exact, case.head_dim);
                    assert!(error < 0.25, "row {row} of {}: {error:e}", what());
                }
            }
        }
    }
    Ok(())
}

/// The row with the largest error, and this error. A row's error is relative to its norm, or to the root mean square of
/// all rows' norms if that is larger.
fn worst_row(got: &[f64], exact: &[f64], d: usize) -> (usize, f64) {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let average = norm(&mut exact.iter().copied()) / (exact.len() as f64 / d as f64).sqrt();
    let errors = got.chunks_exact(d).zip(exact.chunks_exact(d)).map(|(a, b)| {
        norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied()).max(average)
    });
    errors.enumerate().max_by(|a, b| a.1.total_cmp(&b.1)).expect("at least one row")
}

#[test]
fn strides_do_not_matter() -> Result<()> {
    let case = Case::new(2, (70, 70), (4, 2), 32, true);
    for scheme in schemes() {
        let plain = case.run(scheme, DType::F32)?;
        // Query from a (batch, heads, head_dim, sequence) tensor, key from a wider tensor, value with an offset.
        let tensor =
            |n: usize, query| Tensor::from_slice(&case.data[n], case.dims(query).as_slice(), &Device::Cpu);
        let q = Var::from_tensor(&tensor(0, true)?.permute((0, 2, 3, 1))?.contiguous()?)?;
        let k = tensor(1, false)?;
        let k = Var::from_tensor(&Tensor::stack(&[&k, &k.neg()?], 4)?.contiguous()?)?;
        let v = tensor(2, false)?;
        let v = Var::from_tensor(&Tensor::cat(&[&v.neg()?, &v], 1)?)?;
        let out = case.attention(scheme).apply(
            &q.permute((0, 3, 1, 2))?,
            &k.narrow(4, 0, 1)?.squeeze(4)?,
            &v.narrow(1, 70, 70)?,
        )?;
        let grads = (&out * tensor(3, true)?)?.sum_all()?.backward()?;
        let values = |t: &Tensor| -> Result<Vec<f64>> { t.to_dtype(DType::F64)?.flatten_all()?.to_vec1() };
        let grad = |t: &Var| grads.get(t).expect("a gradient").clone();
        assert_eq!(values(&out)?, plain[0]);
        assert_eq!(values(&grad(&q).permute((0, 3, 1, 2))?)?, plain[1]);
        assert_eq!(values(&grad(&k).narrow(4, 0, 1)?.squeeze(4)?)?, plain[2]);
        assert_eq!(values(&grad(&v).narrow(1, 70, 70)?)?, plain[3]);
    }
    Ok(())
}

/// `flash_attn`, `flash_attn_varlen` and `apply_heads_first` return the same bits as `apply`, in outputs and gradients.
/// Invalid lengths are errors.
#[test]
fn other_signatures_are_the_same_attention() -> Result<()> {
    let var = |dims: &[usize]| Var::randn(0f32, 1., dims, &Device::Cpu);
    let (q, k, v) = (var(&[1, 90, 4, 16])?, var(&[1, 100, 2, 16])?, var(&[1, 100, 2, 16])?);
    let values = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
    let gradients = |out: &Tensor| -> Result<Vec<Vec<f32>>> {
        let all = out.sqr()?.sum_all()?.backward()?;
        [&q, &k, &v].iter().map(|var| values(all.get(var).expect("a gradient"))).collect()
    };
    let plain = Attention::default().causal(true).softmax_scale(f64::from(0.2f32));
    let out = plain.apply(&q, &k, &v)?;
    let flash = candle_sage::flash_attn(&q, &k, &v, 0.2, true)?;
    assert!(values(&out)? == values(&flash)? && gradients(&out)? == gradients(&flash)?);
    let swapped = [q.transpose(1, 2)?, k.transpose(1, 2)?.contiguous()?, v.transpose(1, 2)?];
    let first = plain.apply_heads_first(&swapped[0], &swapped[1], &swapped[2])?;
    assert_eq!(first.dims(), [1, 4, 90, 16]);
    assert!(values(&out)? == values(&first.transpose(1, 2)?)? && gradients(&out)? == gradients(&first)?);

    let packing = Packing::new(vec![0, 30, 30, 90], vec![0, 40, 41, 100]);
    let out = plain.packing(packing).apply(&q, &k, &v)?.squeeze(0)?;
    let flat = [q.squeeze(0)?, k.squeeze(0)?, v.squeeze(0)?];
    let varlen = |of_q: &Tensor, of_k: &Tensor, most: usize| {
        candle_sage::flash_attn_varlen(&flat[0], &flat[1], &flat[2], of_q, of_k, most, 60, 0.2, true)
    };
    let of_q = Tensor::new(&[0u32, 30, 30, 90], &Device::Cpu)?;
    let of_k = Tensor::new(&[0i64, 40, 41, 100], &Device::Cpu)?;
    let got = varlen(&of_q, &of_k, 60)?;
    assert!(values(&out)? == values(&got)? && gradients(&out)? == gradients(&got)?);
    for (wrong, most) in [
        (of_q.clone(), 59),
        (Tensor::new(&[0f32, 90.], &Device::Cpu)?, 90),
        (Tensor::new(&[30u32, 30, 90], &Device::Cpu)?, 90),
        (Tensor::new(&[0i64, -1, 90], &Device::Cpu)?, 100),
        (Tensor::new(&[[0u32, 90]], &Device::Cpu)?, 90),
    ] {
        let error = varlen(&wrong, &of_k, most).expect_err("no lengths").to_string();
        assert!(error.contains("seqlens_q") && error.contains("hint:"), "{error}");
    }
    Ok(())
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() -> Result<()> {
    let cases = [Case::new(1, (700, 700), (2, 1), 32, true), Case::new(3, (65, 130), (4, 4), 16, false)];
    for case in cases {
        for scheme in schemes() {
            let run = |threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
                pool.install(|| case.run(scheme, DType::F32))
            };
            let one = run(1)?;
            for threads in [2, 3, 7] {
                assert_eq!(one, run(threads)?, "{scheme:?} with {threads} threads");
            }
        }
    }
    Ok(())
}

#[test]
fn packed_documents_are_separate_problems() -> Result<()> {
    let mut packed = Case::new(1, (150, 150), (2, 2), 16, true);
    packed.packing = Some(Packing::self_attention(vec![0, 60, 150]));
    let span = 2 * 16;
    for scheme in schemes() {
        let together = packed.run(scheme, DType::F32)?;
        for (start, len) in [(0, 60), (60, 90)] {
            let mut alone = Case::new(1, (len, len), (2, 2), 16, true);
            let range = start * span..(start + len) * span;
            alone.data = packed.data.each_ref().map(|x| x[range.clone()].to_vec());
            for (all, part) in together.iter().zip(alone.run(scheme, DType::F32)?) {
                // With fewer documents, keys may be split into more tasks, so dQ may be summed in another order.
                let error = relative_l2(&all[range.clone()], &part);
                assert!(error < 1e-6, "{scheme:?}: {error:e}");
            }
        }
    }
    Ok(())
}

#[test]
fn a_query_that_sees_nothing_gives_zeros_and_no_gradient() -> Result<()> {
    let case = Case::new(1, (5, 2), (1, 1), 8, true);
    for scheme in schemes() {
        let [out, dq, dk, dv] = case.run(scheme, DType::F32)?;
        assert!(out[..3 * 8].iter().chain(&dq[..3 * 8]).all(|&x| x == 0.0));
        assert!(out.iter().chain(&dq).chain(&dk).chain(&dv).all(|x| x.is_finite()));
    }
    Ok(())
}

#[test]
fn a_nan_is_not_hidden() -> Result<()> {
    // The bad value is in token 0: query 0 sees key 0 with and without a causal mask.
    let bad = [f32::NAN, f32::from_bits(0x7fc0_0001), f32::from_bits(0xffff_ffff), f32::INFINITY];
    for scheme in schemes() {
        for (input, name) in ["query", "key", "value", "output gradient"].iter().enumerate() {
            for bad in bad {
                for causal in [false, true] {
                    let mut case = Case::new(1, (80, 80), (1, 1), 16, causal);
                    case.data[input][3] = bad;
                    let results = case.run(scheme, DType::F32)?;
                    // An output gradient affects only gradients, such as dV of key 0, which query 0 sees.
                    let seen = if input == 3 { &results[3] } else { &results[0] };
                    // Infinity in key 0 gives each query a logit of plus or minus infinity. Minus infinity correctly
                    // hides the key, and the query's output may stay finite. So any query may have the bad output.
                    let rows = if input == 1 && bad == f32::INFINITY { seen.len() } else { 16 };
                    let row_is_bad = seen[..rows].iter().any(|x| !x.is_finite());
                    assert!(row_is_bad, "{scheme:?}, causal {causal}: {bad} in the {name} vanished");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn extreme_logits_stay_finite() -> Result<()> {
    let mut case = Case::new(1, (100, 100), (1, 1), 64, true);
    case.draw(300.0, 1);
    // Excludes schemes whose backward computes other logits than the forward.
    let matched = |scheme: &Scheme| match scheme {
        Scheme::SageBwd(settings) => settings.products.s,
        other => *other != AttnQat::drop_in().into(),
    };
    for scheme in schemes().into_iter().filter(matched) {
        for values in case.run(scheme, DType::F32)? {
            assert!(values.iter().all(|x| x.is_finite()), "{scheme:?}");
        }
    }
    Ok(())
}

#[test]
fn backward_can_run_twice_and_untracked_inputs_need_none() -> Result<()> {
    let var = || Var::randn(0f32, 1., (1, 40, 2, 16), &Device::Cpu);
    let (q, k, v) = (var()?, var()?, var()?);
    for scheme in schemes() {
        let loss = Attention::new(scheme).apply(&q, &k, &v)?.sqr()?.sum_all()?;
        let gradient =
            || -> Result<Vec<f32>> { loss.backward()?.get(&k).expect("a gradient").flatten_all()?.to_vec1() };
        assert_eq!(gradient()?, gradient()?);
        let fixed = |x: &Var| x.as_tensor().detach();
        let out = Attention::new(scheme).apply(&fixed(&q), &fixed(&k), &fixed(&v))?;
        assert!(!out.track_op());
    }
    Ok(())
}
