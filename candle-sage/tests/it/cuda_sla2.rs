//! Attention to selected blocks, SLA2, and SLA2's router on a GPU. Results are compared with f64 results or the CPU's.

use candle_core::{DType, Device, Result, Tensor};
use candle_sage::ops::{Alpha, Tail};
use candle_sage::{Packing, Router, SageBwd, Scheme, Selection, Sla2, Sla2Cache, Smoothing};

use crate::cuda::check_against;
use crate::sla2::Problem;
use crate::support::{Case, Normals, gpu, pattern, random_selection, relative_l2};

const BLOCKS: (usize, usize) = (128, 128);

fn schemes() -> Vec<Scheme> {
    let mut schemes = crate::support::schemes();
    schemes.push(SageBwd::default().smoothing(Smoothing::Qk).into());
    schemes
}

/// Lengths that are not whole blocks or tiles, grouped heads, batches, documents, with and without a causal mask.
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (batch, len, heads, d) in [
        (1, 1, (1, 1), 64),
        (2, 127, (2, 2), 64),
        (2, 130, (2, 1), 128),
        (1, 200, (4, 2), 40),
        (1, 700, (4, 2), 64),
        (2, 1100, (2, 1), 128),
        (1, 1024, (3, 3), 72),
    ] {
        cases.push(Case::new(batch, (len, len), heads, d, true));
        cases.push(Case::new(batch, (len, len), heads, d, false));
    }
    cases.push(Case::new(1, (113, 703), (2, 1), 64, false));
    cases.push(Case::new(1, (903, 70), (2, 1), 128, false));
    for d in [64, 128] {
        let mut packed = Case::new(1, (1113, 1113), (4, 2), d, true);
        packed.packing = Some(Packing::self_attention(vec![0, 1, 130, 130, 386, 1113]));
        cases.push(packed);
    }
    let mut packed = Case::new(1, (400, 500), (2, 2), 64, false);
    packed.packing = Some(Packing::new(vec![0, 129, 300, 400], vec![0, 300, 331, 500]));
    cases.push(packed);
    cases
}

#[test]
#[ignore = "needs a GPU"]
fn selected_blocks_of_every_scheme() -> Result<()> {
    let device = gpu();
    for (seed, mut case) in cases().into_iter().enumerate() {
        for dtype in [DType::BF16, DType::F16] {
            case.draw(1.0, seed as u64);
            case.round_to(dtype)?;
            let selection = random_selection(&case.shape(), BLOCKS, 3, seed as u64, &Device::Cpu)?;
            let exact = case.exact_over(&pattern(&selection));
            for scheme in schemes() {
                let what = format!("{scheme}, {dtype:?}, {:?}", case.shape());
                let cpu = case.run_on(&Device::Cpu, &case.attention(scheme).select(&selection), dtype)?;
                for deterministic in [false, true] {
                    let attention = case
                        .attention(scheme)
                        .select(&selection.to_device(&device)?)
                        .deterministic(deterministic);
                    let got = case.run_on(&device, &attention, dtype)?;
                    check_against(&what, scheme, dtype, &got, [&exact, &cpu], case.lens.1);
                }
            }
        }
    }
    Ok(())
}

/// Query blocks that select no key block, one key block, every fourth or all.
#[test]
#[ignore = "needs a GPU"]
fn lists_of_uneven_lengths() -> Result<()> {
    let device = gpu();
    for causal in [true, false] {
        let mut case = Case::new(1, (1500, 1500), (2, 1), 64, causal);
        case.round_to(DType::BF16)?;
        let selection = Selection::from_lists(&case.shape(), BLOCKS, &device, |at| match at.block % 3 {
            0 => (0..at.candidates).collect(),
            1 => (0..at.candidates.min(1)).collect(),
            _ => (0..at.candidates).step_by(4).collect(),
        })?;
        let host = selection.to_device(&Device::Cpu)?;
        let exact = case.exact_over(&pattern(&host));
        let scheme = Scheme::Unquantized;
        let cpu = case.run_on(&Device::Cpu, &case.attention(scheme).select(&host), DType::BF16)?;
        let got = case.run_on(&device, &case.attention(scheme).select(&selection), DType::BF16)?;
        check_against("uneven lists", scheme, DType::BF16, &got, [&exact, &cpu], 1500);
    }
    Ok(())
}

/// Many query blocks select the same key block. The backward divides these query blocks among several thread blocks,
/// unless `deterministic` is set.
#[test]
#[ignore = "needs a GPU"]
fn long_inverse_lists_are_split() -> Result<()> {
    let device = gpu();
    let mut cases: Vec<Case> =
        [64, 128].into_iter().map(|d| Case::new(1, (3301, 3301), (2, 1), d, true)).collect();
    cases.push(Case::new(2, (2500, 2500), (1, 1), 40, false));
    let mut packed = Case::new(1, (4000, 4000), (1, 1), 128, true);
    packed.packing = Some(Packing::self_attention(vec![0, 70, 3500, 4000]));
    cases.push(packed);
    for (seed, mut case) in cases.into_iter().enumerate() {
        case.draw(1.0, seed as u64);
        case.round_to(DType::BF16)?;
        let selection = Selection::from_lists(&case.shape(), BLOCKS, &Device::Cpu, |at| {
            let wanted =
                |block: usize| block + 1 == at.candidates || block == 5 || (block == 0 && at.block % 3 > 0);
            (0..at.candidates).filter(|&block| wanted(block)).collect()
        })?;
        let exact = case.exact_over(&pattern(&selection));
        let on_gpu = selection.to_device(&device)?;
        for scheme in schemes() {
            let cpu = case.run_on(&Device::Cpu, &case.attention(scheme).select(&selection), DType::BF16)?;
            let attention = case.attention(scheme).select(&on_gpu);
            let in_order = attention.clone().deterministic(true);
            let whole = case.run_on(&device, &in_order, DType::BF16)?;
            assert_eq!(case.run_on(&device, &in_order, DType::BF16)?, whole, "{scheme}: gradients repeat");
            let mut cut = false;
            for _ in 0..3 {
                let got = case.run_on(&device, &attention, DType::BF16)?;
                let what = format!("{scheme}, {:?}", case.shape());
                check_against(&what, scheme, DType::BF16, &got, [&exact, &cpu], case.lens.1);
                // The f32 terms of dK and dV are added in another order than with `deterministic`, so a few elements
                // round to a neighboring bf16 value. With SageBwd and smoothed Q, the kernel adds a large offset
                // (`quant::MAGIC`) to dK's f32 sums and later subtracts it. The offset makes the rounding errors of
                // the sums as large as the error of one rounding to bf16.
                for ((part, whole), name) in got.iter().zip(&whole).skip(2).zip(["dK", "dV"]) {
                    let error = relative_l2(part, whole);
                    assert!(error < 2f64.powi(-9), "{name} of {what}: {error:.2e}");
                    cut |= error > 0.0;
                }
            }
            assert!(cut, "no list was cut, or rounding did not show it: {scheme}, {:?}", case.shape());
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn gradients_over_lists_repeat_to_the_bit_when_asked_to() -> Result<()> {
    let device = gpu();
    for d in [64, 128] {
        let mut case = Case::new(1, (2000, 2000), (4, 2), d, true);
        case.round_to(DType::BF16)?;
        let selection = random_selection(&case.shape(), BLOCKS, 4, 1, &device)?;
        for scheme in crate::support::schemes() {
            let attention = case.attention(scheme).select(&selection).deterministic(true);
            let first = case.run_on(&device, &attention, DType::BF16)?;
            for _ in 0..3 {
                assert_eq!(case.run_on(&device, &attention, DType::BF16)?, first, "{scheme}, d {d}");
            }
        }
    }
    Ok(())
}

/// Checks the outputs and gradients of `Sla2::apply` (with autograd) and of `Sla2::vjp` on the GPU against f64 results.
/// Returns the case.
fn check_sla2(mut problem: Problem, (dtype, limit): (DType, f64)) -> Result<Case> {
    problem.case.round_to(dtype)?;
    let (ways, exact) = (problem.run_on(&gpu(), dtype)?, problem.exact());
    for (way, got) in ["in the graph", "outside"].into_iter().zip(&ways) {
        for (n, name) in ["O", "dQ", "dK", "dV", "dtheta"].iter().enumerate() {
            let (error, shape) = (relative_l2(&got[n], &exact[n]), problem.case.shape());
            let what = format!("{name} of {shape:?}, {:?}, in {dtype:?} {way}", problem.tail);
            assert!(error < limit, "{what}: {error:.2e}");
        }
    }
    Ok(problem.case)
}

fn random_problem(mut case: Case, seed: u64, tail: Tail, alpha: Alpha) -> Result<Problem> {
    case.draw(1.0, seed);
    let selection = random_selection(&case.shape(), BLOCKS, 1, seed, &Device::Cpu)?;
    let theta = Normals::new(7).vec(case.heads.0, 1.0);
    Ok(Problem { case, selection, theta, tail, alpha })
}

/// Limits of the relative L2 error: five times the typical error of one rounding, 2^-9 in bf16 and 2^-12 in f16. Up to
/// seven independent roundings affect a gradient; together, they err sqrt(7) times as much as one. The gradient
/// of theta may err twice as much, because it depends on two outputs: attention's and the tail's. Five is about
/// 2 sqrt(7).
fn limits() -> [(DType, f64); 2] {
    [(DType::BF16, 5.0 * 2f64.powi(-9)), (DType::F16, 5.0 * 2f64.powi(-12))]
}

#[test]
#[ignore = "needs a GPU"]
fn sla2_follows_f64() -> Result<()> {
    // A case in which each chunk of a sequence (`chunks` in `cuda/past_linear.rs`) has several blocks of tokens.
    // Its f64 results take half a minute on one core, so it is tested only in bf16 and with one `Alpha`.
    let many = Case::new(8, (800, 800), (8, 8), 128, true);
    for (seed, mut case) in cases().into_iter().chain([many]).enumerate() {
        if !case.causal {
            continue;
        }
        for limit in limits() {
            for alpha in [Alpha::Count, Alpha::Constant] {
                if case.batch == 8 && (limit.0, alpha) != (DType::BF16, Alpha::Count) {
                    continue;
                }
                case = check_sla2(random_problem(case, seed as u64, Tail::Past, alpha)?, limit)?;
            }
        }
    }
    Ok(())
}

/// Tails that candle's matmuls compute, because they have no kernel: [`Tail::Complement`], and [`Tail::Past`] without a
/// causal mask.
#[test]
#[ignore = "needs a GPU"]
fn sla2_with_other_tails_follows_f64() -> Result<()> {
    for (seed, mut case) in cases().into_iter().filter(|case| case.lens.0 * case.lens.1 < 250_000).enumerate()
    {
        for limit in limits() {
            for tail in [Tail::Past, Tail::Complement] {
                if tail == Tail::Complement || !case.causal {
                    case = check_sla2(random_problem(case, seed as u64, tail, Alpha::Count)?, limit)?;
                }
            }
        }
    }
    Ok(())
}

fn inputs(case: &Case, device: &Device) -> Result<[Tensor; 3]> {
    let tensor = |n: usize, query| -> Result<Tensor> {
        Tensor::from_slice(&case.data[n], case.dims(query).as_slice(), &Device::Cpu)?
            .to_dtype(DType::BF16)?
            .to_device(device)
    };
    Ok([tensor(0, true)?, tensor(1, false)?, tensor(2, false)?])
}

/// The router selects the same blocks as on the CPU. Its loss and `mass_caught` equal the CPU's up to rounding.
#[test]
#[ignore = "needs a GPU"]
fn the_router_is_that_of_the_cpu() -> Result<()> {
    let device = gpu();
    for (number, case) in cases().into_iter().enumerate() {
        let (_, _, key_heads, d) = case.shape().key_dims();
        let mut normals = Normals::new(5);
        let mut weight =
            || Tensor::from_vec(normals.vec(key_heads * d * d, 0.3), (key_heads, d, d), &Device::Cpu);
        let weights = [weight()?, weight()?];
        let nearest = if case.causal { number % 3 } else { 0 };
        let mut sla2 = Sla2::new(Scheme::Unquantized).blocks(2).nearest(nearest).causal(case.causal);
        if let Some(packing) = &case.packing {
            sla2 = sla2.packing(packing.clone());
        }
        let on = |device: &Device| -> Result<(Selection, f32, f64)> {
            let [query, key] = weights.each_ref().map(|weight| weight.to_device(device));
            let router = Router::from_tensors(query?, key?)?;
            let [q, k, _] = inputs(&case, device)?;
            let selection = sla2.select(&router, &q, &k)?;
            let loss = sla2.router_loss(&router, &q, &k)?.to_scalar::<f32>()?;
            let caught = sla2.mass_caught(&selection, &q, &k)?;
            Ok((selection.to_device(&Device::Cpu)?, loss, caught))
        };
        let (got, cpu) = (on(&device)?, on(&Device::Cpu)?);
        for (number, segment) in case.shape().segments().iter().enumerate() {
            for key_head in 0..key_heads {
                for block in 0..segment.query.len().div_ceil(128) {
                    let lists = [&got.0, &cpu.0].map(|selection| selection.list(number, key_head, block));
                    let [got, cpu] = lists;
                    assert_eq!(got?, cpu?, "{:?}, block {block}", case.shape());
                }
            }
        }
        assert!((got.1 - cpu.1).abs() < 1e-3 * (1.0 + cpu.1.abs()), "loss {} and {}", got.1, cpu.1);
        assert!((got.2 - cpu.2).abs() < 1e-3, "mass {} and {}", got.2, cpu.2);
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn scores_that_are_equal_or_no_numbers() -> Result<()> {
    let device = gpu();
    let shape = Case::new(1, (1280, 1280), (1, 1), 64, true).shape();
    let zeros = Tensor::zeros(shape.query_dims(), DType::BF16, &device)?;
    let sla2 = Sla2::new(Scheme::Unquantized).blocks(3).causal(true);
    let router = Router::new(1, 64, &device)?;
    let selection = sla2.select(&router, &zeros, &zeros)?;
    assert_eq!(selection.list(0, 0, 9)?, [0, 1, 2, 9]);
    assert_eq!(selection.list(0, 0, 2)?, [0, 1, 2]);
    // Key block 5 contains only NaN. Its score is therefore NaN, which counts as the largest score.
    let ones = Tensor::ones((1, 128, 1, 64), DType::BF16, &device)?;
    let parts = [zeros.narrow(1, 0, 640)?, (ones * f64::NAN)?, zeros.narrow(1, 768, 512)?];
    let key = Tensor::cat(&parts, 1)?;
    let selection = sla2.select(&router, &zeros, &key)?;
    assert_eq!(selection.list(0, 0, 9)?, [0, 1, 5, 9]);
    // The nearest blocks take precedence over key block 5, whose score is NaN.
    for (nearest, list) in [(1, [0, 5, 8, 9]), (2, [5, 7, 8, 9]), (3, [6, 7, 8, 9])] {
        let selection = sla2.clone().nearest(nearest).select(&router, &zeros, &key)?;
        assert_eq!(selection.list(0, 0, 9)?, list);
        assert_eq!(selection.list(0, 0, 2)?, [0, 1, 2]);
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn what_does_not_run_on_a_gpu_is_an_error() -> Result<()> {
    let device = gpu();
    let case = Case::new(1, (256, 256), (1, 1), 64, false);
    let [q, k, v] = inputs(&case, &device)?;
    let message = |result: Result<Tensor>| result.expect_err("an error").to_string();
    let small = Selection::all(&case.shape(), (64, 64), &device)?;
    let attention = case.attention(Scheme::Unquantized);
    assert!(message(attention.clone().select(&small).apply(&q, &k, &v)).contains("128 x 128"));
    let host = Selection::all(&case.shape(), BLOCKS, &Device::Cpu)?;
    assert!(message(attention.select(&host).apply(&q, &k, &v)).contains("another device"));
    Ok(())
}

/// Decoding with a cache (candle's operators) compared with the whole sequence (kernels), both on a GPU in f16.
/// Operators and kernels round P and the tail's states differently, and may select different blocks if scores are
/// nearly equal. So the test allows a tenth of the rows to differ by more than a few roundings of f16. (Values are
/// about 1, and a rounding changes a value by up to 5e-4.)
#[test]
#[ignore = "needs a GPU"]
fn a_cache_gives_the_rows_of_the_whole_sequence() -> Result<()> {
    let (device, d) = (gpu(), 64);
    let case = Case::new(2, (700, 700), (4, 2), d, true);
    let [q, k, v] = inputs(&case, &device)?.map(|x| x.to_dtype(DType::F16));
    let (q, k, v) = (q?, k?, v?);
    let weights = Tensor::from_vec(Normals::new(5).vec(2 * d * d, 0.3), (2, d, d), &device)?;
    let router = Router::from_tensors(weights.clone(), weights)?;
    let theta = Tensor::new(&[2f32, 1.0, 0.0, -1.0], &device)?;
    for tail in [Some(Tail::Past), Some(Tail::Complement), None] {
        let sla2 = Sla2::new(Scheme::Unquantized).causal(true).blocks(2).nearest(1).tail(tail);
        let whole = sla2.apply(&q, &k, &v, &sla2.select(&router, &q, &k)?, &theta)?;
        for steps in [&[500usize, 1, 1, 100, 98][..], &[128, 512, 60], &[700]] {
            let mut cache = Sla2Cache::new(64);
            let mut rows = Vec::new();
            for &len in steps {
                let at = cache.current_seq_len();
                let [q, k, v] = [&q, &k, &v].map(|x| x.narrow(1, at, len));
                let out = sla2.apply_cached(&router, [&q?, &k?, &v?], &theta, &mut cache)?;
                let apart = (out - whole.narrow(1, at, len)?)?.to_dtype(DType::F32)?.abs()?;
                rows.extend(apart.max(3)?.flatten_all()?.to_vec1::<f32>()?);
            }
            let far = rows.iter().filter(|apart| apart.is_nan() || **apart >= 4e-3).count();
            println!("{tail:?} {steps:?}: {far} of {} rows", rows.len());
            assert!(10 * far < rows.len(), "{tail:?} {steps:?}: {far} of {} rows differ", rows.len());
        }
    }
    Ok(())
}
