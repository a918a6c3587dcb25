//! Each op on a GPU, compared with the CPU. Run `cargo test --features cuda -- --ignored` on a machine with a GPU.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_sage::ops::{self, CrossEntropy, RopeStyle};

use crate::support::{Normals, f64s, gpu, relative_l2};

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Half a unit in the last place: the largest relative error of one rounding to the type.
fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2f64.powi(-11),
        DType::BF16 => 2f64.powi(-8),
        _ => 2f64.powi(-24),
    }
}

/// Limit of the relative difference between the CPU's and the GPU's f32 sums, which have different orders. The longest
/// sums here have 4096 terms, with an error of sqrt(4096) * 2^-24 on each device.
const SUMS: f64 = 8e-6;

type Op<'a> = &'a dyn Fn(&[Tensor]) -> Result<Tensor>;

fn values(t: &Tensor) -> Result<Vec<f64>> {
    Ok(f64s(&t.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?))
}

/// The output of `op`, and the gradients of its inputs for a random output gradient. The inputs and the output
/// gradient are rounded to type `exact` first.
fn run(
    device: &Device,
    dtype: DType,
    exact: DType,
    inputs: &[(Vec<f32>, Vec<usize>)],
    op: Op<'_>,
) -> Result<Vec<Vec<f64>>> {
    let tensor = |values: &[f32], dims: &[usize], dtype: DType| -> Result<Tensor> {
        Tensor::from_slice(values, dims, &Device::Cpu)?.to_dtype(exact)?.to_dtype(dtype)?.to_device(device)
    };
    let vars = inputs
        .iter()
        .map(|(values, dims)| Var::from_tensor(&tensor(values, dims, dtype)?))
        .collect::<Result<Vec<_>>>()?;
    let leaves: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let out = op(&leaves)?;
    let direction = tensor(&Normals::new(99).vec(out.elem_count(), 1.0), out.dims(), out.dtype())?;
    let grads = (&out * direction)?.to_dtype(DType::F32)?.sum_all()?.backward()?;
    let mut all = vec![values(&out)?];
    for var in &vars {
        let grad = grads.get(var).expect("a gradient");
        assert_eq!((grad.dims(), grad.dtype()), (var.dims(), var.dtype()));
        all.push(values(grad)?);
    }
    Ok(all)
}

/// Compares the GPU in each type with the CPU in f32 on the same numbers. Two runs on the GPU must be bit-identical.
/// GPU and CPU may differ by `roundings` times [`rounding`], plus [`SUMS`].
fn check(name: &str, inputs: &[(Vec<f32>, Vec<usize>)], roundings: f64, op: Op<'_>) -> Result<()> {
    for dtype in DTYPES {
        let got = run(&gpu(), dtype, dtype, inputs, op)?;
        assert!(got == run(&gpu(), dtype, dtype, inputs, op)?, "{name}, {dtype:?}: other bits");
        let expected = run(&Device::Cpu, DType::F32, dtype, inputs, op)?;
        for (n, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let error = relative_l2(got, expected);
            let limit = roundings * rounding(dtype) + SUMS;
            assert!(
                error <= limit,
                "{name}, {dtype:?}, {n} (0 is the output): {error:.1e}, limit {limit:.1e}"
            );
        }
    }
    Ok(())
}

fn draw(normals: &mut Normals, dims: &[usize]) -> (Vec<f32>, Vec<usize>) {
    (normals.vec(dims.iter().product(), 1.0), dims.to_vec())
}

/// (rows, width). A row is processed by one thread, by up to one warp, or by a thread block. Some rows do not fit in a
/// thread block's registers, which hold 8192 elements in f32, 16384 in 16 bit, or 2048 without vector loads (half of
/// each in layer_norm's backward). The backward has at most 528 thread blocks, and some inputs have more rows than
/// these process at once.
const NORM_SIZES: [(usize, usize); 12] = [
    (5, 1),
    (3, 7),
    (1, 8),
    (300, 63),
    (40, 64),
    (9, 200),
    (2000, 1024),
    (7, 4096),
    (3, 4099),
    (3, 20000),
    (20000, 8),
    (6000, 7),
];

#[test]
#[ignore = "needs a GPU"]
fn layer_norm() -> Result<()> {
    let mut normals = Normals::new(4);
    let mut inputs_of = |dims: &[usize], width: usize| {
        [draw(&mut normals, dims), draw(&mut normals, &[width]), draw(&mut normals, &[width])]
    };
    for (rows, width) in NORM_SIZES {
        let inputs = inputs_of(&[rows, width], width);
        // A large eps: otherwise the gradients of rows with few elements are only rounding errors.
        check(&format!("layer_norm {rows} x {width}"), &inputs, 1.0, &|x| {
            ops::layer_norm(&x[0], &x[1], &x[2], 0.5)
        })?;
    }
    check("layer_norm turned", &inputs_of(&[64, 3, 5], 64), 1.0, &|x| {
        ops::layer_norm(&x[0].permute((2, 1, 0))?, &x[1], &x[2], 1e-6)
    })?;
    // An offset of one element: rows that are not aligned to 16 bytes.
    check("layer_norm off by one", &inputs_of(&[1 + 64 * 5], 65), 1.0, &|x| {
        let [weight, bias] = [x[1].narrow(0, 1, 64)?, x[2].narrow(0, 1, 64)?];
        ops::layer_norm(&x[0].narrow(0, 1, 320)?.reshape((5, 64))?, &weight, &bias, 1e-6)
    })
}

#[test]
#[ignore = "needs a GPU"]
fn rms_norm() -> Result<()> {
    let mut normals = Normals::new(1);
    for (rows, width) in NORM_SIZES {
        let inputs = [draw(&mut normals, &[rows, width]), draw(&mut normals, &[width])];
        check(&format!("rms_norm {rows} x {width}"), &inputs, 1.0, &|x| ops::rms_norm(&x[0], &x[1], 0.5))?;
    }
    let inputs = [draw(&mut normals, &[64, 3, 5]), draw(&mut normals, &[64])];
    check("rms_norm turned", &inputs, 1.0, &|x| ops::rms_norm(&x[0].permute((2, 1, 0))?, &x[1], 1e-6))?;
    // An offset of one element: rows that are not aligned to 16 bytes.
    let inputs = [draw(&mut normals, &[1 + 64 * 5]), draw(&mut normals, &[65])];
    check("rms_norm off by one", &inputs, 1.0, &|x| {
        ops::rms_norm(&x[0].narrow(0, 1, 320)?.reshape((5, 64))?, &x[1].narrow(0, 1, 64)?, 1e-6)
    })
}

#[test]
#[ignore = "needs a GPU"]
fn rms_norm_takes_a_weight_of_another_type() -> Result<()> {
    let mut normals = Normals::new(2);
    let (x, weight) = (draw(&mut normals, &[30, 128]).0, draw(&mut normals, &[128]).0);
    for (of_x, of_weight) in [(DType::BF16, DType::F32), (DType::F32, DType::BF16), (DType::F16, DType::BF16)]
    {
        let results = |device: &Device| -> Result<Vec<Vec<f64>>> {
            let x = Var::from_tensor(&Tensor::from_slice(&x, (30, 128), device)?.to_dtype(of_x)?)?;
            let weight = Var::from_tensor(&Tensor::from_slice(&weight, 128, device)?.to_dtype(of_weight)?)?;
            let out = ops::rms_norm(&x, &weight, 1e-6)?;
            let grads = out.to_dtype(DType::F32)?.sqr()?.sum_all()?.backward()?;
            let grad = |var: &Var| values(grads.get(var).expect("a gradient"));
            Ok(vec![values(&out)?, grad(&x)?, grad(&weight)?])
        };
        for (got, expected) in results(&gpu())?.iter().zip(&results(&Device::Cpu)?) {
            // The outputs are rounded, and so are the gradients, which depend on the rounded outputs. If a value is
            // near the midpoint of two representable values, the GPU and the CPU may round it differently.
            let limit = 4.0 * rounding(of_x).max(rounding(of_weight));
            let error = relative_l2(got, expected);
            assert!(error <= limit, "{of_x:?}, {of_weight:?}: {error:.1e}");
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn rms_norm_of_huge_elements_does_not_overflow() -> Result<()> {
    let weight = Tensor::ones(2, DType::F32, &gpu())?;
    let x = Tensor::new(&[[3e30f32, 4e30], [3.0, 4.0]], &gpu())?;
    let out = ops::rms_norm(&x, &weight, 1e-6)?.to_vec2::<f32>()?;
    for (a, b) in out[0].iter().zip(&out[1]) {
        assert!((a - b).abs() < 1e-6, "{out:?}");
    }
    for bad in [f32::INFINITY, f32::NAN] {
        let out = ops::rms_norm(&Tensor::new(&[[bad, 1.0]], &gpu())?, &weight, 1e-6)?.to_vec2::<f32>()?;
        assert!(out[0].iter().all(|y| y.is_nan()), "{out:?}");
    }
    Ok(())
}

/// (batch, sequence, heads, head_dim). Depending on head_dim, the kernels use from one to more than 32 threads a head.
const HEADS: [(usize, usize, usize, usize); 9] = [
    (1, 1, 1, 2),
    (2, 5, 3, 6),
    (2, 3, 1, 16),
    (1, 70, 16, 64),
    (2, 9, 5, 80),
    (3, 4, 2, 128),
    (1, 3, 2, 130),
    (1, 2, 2, 1024),
    (2, 3000, 3, 64),
];

fn tables(x: &Tensor, sequence: usize, d: usize) -> Result<(Tensor, Tensor)> {
    ops::rope_tables(sequence, d, 100.0, x.device())
}

#[test]
#[ignore = "needs a GPU"]
fn rope() -> Result<()> {
    let mut normals = Normals::new(3);
    for style in [RopeStyle::Halves, RopeStyle::Interleaved] {
        for (batch, sequence, heads, d) in HEADS {
            let name = format!("rope {style:?} of {batch} x {sequence} x {heads} x {d}");
            let inputs = [draw(&mut normals, &[batch, sequence, heads, d])];
            check(&name, &inputs, 1.0, &|x| {
                let (cos, sin) = tables(&x[0], sequence, d)?;
                ops::rope(&x[0], &cos, &sin, style)
            })?;
            // A tensor with heads first, as in other libraries, is read in place; with channels first it is copied.
            for (dims, order) in
                [([batch, heads, sequence, d], [0, 2, 1, 3]), ([batch, d, heads, sequence], [0, 3, 2, 1])]
            {
                let inputs = [draw(&mut normals, &dims)];
                check(&format!("{name}, turned"), &inputs, 1.0, &|x| {
                    let (cos, sin) = tables(&x[0], sequence, d)?;
                    ops::rope(&x[0].permute(order)?, &cos, &sin, style)
                })?;
            }
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn qk_norm_rope() -> Result<()> {
    let mut normals = Normals::new(4);
    for style in [RopeStyle::Halves, RopeStyle::Interleaved] {
        for (batch, sequence, heads, d) in HEADS {
            let name = format!("qk_norm_rope {style:?} of {batch} x {sequence} x {heads} x {d}");
            let inputs = [draw(&mut normals, &[batch, sequence, heads, d]), draw(&mut normals, &[d])];
            check(&name, &inputs, 1.0, &|x| {
                let (cos, sin) = tables(&x[0], sequence, d)?;
                ops::qk_norm_rope(&x[0], &x[1], &cos, &sin, 1e-6, style)
            })?;
            let inputs = [draw(&mut normals, &[batch, heads, sequence, d]), draw(&mut normals, &[d])];
            check(&format!("{name}, turned"), &inputs, 1.0, &|x| {
                let (cos, sin) = tables(&x[0], sequence + 2, d)?;
                let (cos, sin) = (cos.narrow(0, 2, sequence)?, sin.narrow(0, 2, sequence)?);
                ops::qk_norm_rope(&x[0].transpose(1, 2)?, &x[1], &cos, &sin, 1e-6, style)
            })?;
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn swiglu() -> Result<()> {
    let mut normals = Normals::new(5);
    for len in [1, 7, 8, 63, 1024, 100_003] {
        let inputs = [draw(&mut normals, &[len]), draw(&mut normals, &[len])];
        check(&format!("swiglu of {len}"), &inputs, 1.0, &|x| ops::swiglu(&x[0], &x[1]))?;
    }
    let inputs = [draw(&mut normals, &[40, 9]), draw(&mut normals, &[9, 40])];
    check("swiglu turned", &inputs, 1.0, &|x| ops::swiglu(&x[0].t()?, &x[1]))?;
    let inputs = [draw(&mut normals, &[65]), draw(&mut normals, &[64])];
    check("swiglu off by one", &inputs, 1.0, &|x| ops::swiglu(&x[0].narrow(0, 1, 64)?, &x[1]))?;

    let gate = Var::from_slice(&[-1e30f32, -200.0, 200.0, 1e30, f32::MIN], 5, &gpu())?;
    let up = Tensor::ones(5, DType::F32, &gpu())?;
    let out = ops::swiglu(&gate, &up)?;
    assert_eq!(out.to_vec1::<f32>()?, [0.0, 0.0, 200.0, 1e30, 0.0]);
    let grads = out.sum_all()?.backward()?;
    assert_eq!(grads.get(&gate).expect("a gradient").to_vec1::<f32>()?, [0.0, 0.0, 1.0, 1.0, 0.0]);
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn embedding() -> Result<()> {
    let mut normals = Normals::new(6);
    // Ids that are all equal, all rare, or partly frequent. After sorting, a run of equal ids lies in a chunk of
    // 32 ids, or spans many chunks, or spans several tiles of 2048 ids.
    let one = |_: usize, _: usize| 0;
    let spread = |n: usize, rows: usize| n * 7919 % rows;
    let skewed = |n: usize, rows: usize| if n.is_multiple_of(3) { rows / 2 } else { n * n % rows };
    type Pattern<'a> = (&'a str, &'a dyn Fn(usize, usize) -> usize);
    let patterns: [Pattern<'_>; 3] = [("one", &one), ("spread", &spread), ("skewed", &skewed)];
    for (rows, width) in [(1, 8), (3, 1), (200, 7), (300, 64), (70_000, 16), (500, 1024), (40, 4100)] {
        for (pattern, id) in patterns {
            for len in [1, 33, 5000] {
                let inputs = [draw(&mut normals, &[rows, width])];
                let ids: Vec<i64> = (0..len).map(|n| id(n, rows) as i64).collect();
                let types: &[DType] = if rows <= 200 {
                    &[DType::U8, DType::U32, DType::I64]
                } else {
                    &[DType::U32, DType::I64]
                };
                for &of_ids in types {
                    let name = format!("embedding {rows} x {width}, {len} ids {of_ids:?}, {pattern}");
                    check(&name, &inputs, 1.0, &|x| {
                        let ids = Tensor::new(ids.as_slice(), &Device::Cpu)?
                            .to_dtype(of_ids)?
                            .to_device(x[0].device())?;
                        ops::embedding(&x[0], &ids)
                    })?;
                }
            }
        }
    }
    let inputs = [draw(&mut normals, &[24, 50])];
    check("embedding of a turned table by turned ids", &inputs, 1.0, &|x| {
        let ids = Tensor::new(&[[1u32, 49, 3], [7, 0, 1]], x[0].device())?.t()?;
        ops::embedding(&x[0].t()?, &ids)
    })
}

#[test]
#[ignore = "needs a GPU"]
fn cross_entropy() -> Result<()> {
    let mut normals = Normals::new(7);
    for (rows, classes) in [(3, 1), (50, 7), (1, 8), (9, 63), (300, 100), (20, 1024), (4, 4099), (3, 50304)] {
        for ignore_id in [None, Some(0), Some(-100)] {
            let targets: Vec<i64> = (0..rows)
                .map(|n| match ignore_id {
                    Some(ignored) if n % 3 == 1 => ignored,
                    _ => ((n * 7919 + 1) % classes) as i64,
                })
                .collect();
            let ignored = targets.iter().filter(|&&t| Some(t) == ignore_id).count();
            if ignored == rows {
                continue;
            }
            let z_loss = if ignore_id == Some(0) { 0.01 } else { 0.0 };
            let settings = CrossEntropy::default().ignore_id(ignore_id).z_loss(z_loss);
            let inputs = [draw(&mut normals, &[rows, classes])];
            check(&format!("cross_entropy {rows} x {classes}, {ignore_id:?}"), &inputs, 1.0, &|x| {
                let targets = Tensor::new(targets.as_slice(), x[0].device())?;
                ops::cross_entropy(&x[0], &targets, settings)
            })?;
        }
    }
    let inputs = [draw(&mut normals, &[40, 9])];
    check("cross_entropy turned", &inputs, 1.0, &|x| {
        let targets = Tensor::new(&[3u8, 39, 0, 1, 2, 3, 4, 5, 6], x[0].device())?;
        ops::cross_entropy(&x[0].t()?, &targets, CrossEntropy::default())
    })?;

    // Masked classes do not contribute to the loss.
    let mut row = vec![f32::NEG_INFINITY; 4096];
    (row[5], row[4000]) = (0.5, 0.5);
    let logits = Tensor::from_vec(row, (1, 4096), &gpu())?;
    let targets = Tensor::new(&[5u32], &gpu())?;
    let loss = ops::cross_entropy(&logits, &targets, CrossEntropy::default())?.to_scalar::<f32>()?;
    assert!((loss - std::f32::consts::LN_2).abs() < 1e-6, "{loss}");
    Ok(())
}

/// Limit of the relative error, in multiples of [`rounding`]. Rounding a logit x changes exp(x) by up to `|x|`
/// multiples, and `|x|` is mostly below 3. Three more values are rounded, which adds one multiple each: the logits'
/// gradient, the result of its matmul with the weight, and this result times the loss's gradient.
const LINEAR_ROUNDINGS: f64 = 6.0;

#[test]
#[ignore = "needs a GPU"]
fn linear_cross_entropy() -> Result<()> {
    let mut normals = Normals::new(8);
    for (rows, width, classes) in [(1, 8, 8), (7, 6, 11), (100, 64, 1000), (37, 33, 63), (12, 64, 50304)] {
        for (chunk_rows, ignore_id) in
            [(None, None), (Some(1), None), (Some(5), Some(2)), (Some(1000), Some(-1))]
        {
            let targets: Vec<i64> =
                (0..rows)
                    .map(|n| {
                        if n % 4 == 2 { ignore_id.unwrap_or(1) } else { (n * 31 + 3) as i64 % classes as i64 }
                    })
                    .collect();
            let z_loss = if ignore_id == Some(2) { 0.01 } else { 0.0 };
            let settings = CrossEntropy::default().ignore_id(ignore_id).chunk_rows(chunk_rows).z_loss(z_loss);
            let (hidden, mut weight) =
                (draw(&mut normals, &[rows, width]), draw(&mut normals, &[classes, width]));
            weight.0.iter_mut().for_each(|w| *w /= (width as f32).sqrt());
            let name = format!("linear_cross_entropy {rows} x {width} x {classes}, {settings:?}");
            let op = |x: &[Tensor]| {
                let targets = Tensor::new(targets.as_slice(), x[0].device())?;
                ops::linear_cross_entropy(&x[0], &x[1], &targets, settings)
            };
            check(&name, &[hidden, weight], LINEAR_ROUNDINGS, &op)?;
        }
    }
    let inputs = [draw(&mut normals, &[16, 9]), draw(&mut normals, &[16, 40])];
    check("linear_cross_entropy turned", &inputs, LINEAR_ROUNDINGS, &|x| {
        let targets = Tensor::new(&[3u32, 39, 0, 1, 2, 3, 4, 5, 6], x[0].device())?;
        let weight = (&x[1] * 0.25)?;
        ops::linear_cross_entropy(&x[0].t()?, &weight.t()?, &targets, CrossEntropy::default())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn linear_cross_entropy_leaves_a_frozen_side_alone() -> Result<()> {
    let device = gpu();
    let hidden = Var::randn(0f32, 1.0, (20, 8), &device)?;
    let weight = Var::randn(0f32, 1.0, (30, 8), &device)?;
    let targets = Tensor::arange(0u32, 20, &device)?;
    let run = |hidden: &Tensor, weight: &Tensor| {
        ops::linear_cross_entropy(hidden, weight, &targets, CrossEntropy::default())?.backward()
    };
    let both = run(&hidden, &weight)?;
    let frozen_weight = run(&hidden, &weight.detach())?;
    let frozen_hidden = run(&hidden.detach(), &weight)?;
    let grad =
        |grads: &candle_core::backprop::GradStore, var: &Var| values(grads.get(var).expect("a gradient"));
    assert_eq!(grad(&both, &hidden)?, grad(&frozen_weight, &hidden)?);
    assert_eq!(grad(&both, &weight)?, grad(&frozen_hidden, &weight)?);
    assert!(frozen_weight.get(&weight).is_none() && frozen_hidden.get(&hidden).is_none());
    let neither =
        ops::linear_cross_entropy(&hidden.detach(), &weight.detach(), &targets, Default::default())?;
    assert!(neither.to_scalar::<f32>()?.is_finite());
    Ok(())
}

/// Error messages are the same on the GPU and on the CPU.
#[test]
#[ignore = "needs a GPU"]
fn messages() -> Result<()> {
    let run = |device: &Device| -> Result<Vec<String>> {
        let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, device);
        let ids = |ids: &[i64]| Tensor::new(ids, device);
        let (logits, targets) = (zeros(&[4, 7])?, ids(&[1, 7, -2, 0])?);
        let ignoring = |id| CrossEntropy::default().ignore_id(Some(id));
        let failures = [
            ops::cross_entropy(&logits, &targets, CrossEntropy::default()),
            ops::cross_entropy(&logits, &targets, ignoring(7)),
            ops::cross_entropy(&logits, &ids(&[3; 4])?, ignoring(3)),
            ops::linear_cross_entropy(&zeros(&[4, 2])?, &zeros(&[7, 2])?, &targets, CrossEntropy::default()),
            ops::cross_entropy(&logits, &zeros(&[4])?, CrossEntropy::default()),
            ops::embedding(&logits, &ids(&[0, 3, 4, -1])?),
            ops::embedding(&logits, &zeros(&[2])?),
            ops::swiglu(&logits.to_dtype(DType::F64)?, &logits.to_dtype(DType::F64)?),
        ];
        Ok(failures.map(|result| result.expect_err("a failure").to_string()).to_vec())
    };
    assert_eq!(run(&gpu())?, run(&Device::Cpu)?);
    let mixed =
        ops::swiglu(&Tensor::zeros(2, DType::F32, &gpu())?, &Tensor::zeros(2, DType::F32, &Device::Cpu)?);
    assert!(mixed.expect_err("two devices").to_string().contains("different devices"));
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn rotary_positions_by_batch() -> Result<()> {
    crate::modules::check_positions_by_batch(&gpu())
}
