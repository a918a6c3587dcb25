//! FP8 on a GPU, compared with the CPU. Run `cargo test --features cuda -- --ignored` on a machine with a GPU of
//! compute capability 8.9 or later.

use candle_core::{DType, Device, Result, Tensor};
use candle_sage::fp8::Fp8Format::{self, E4M3, E5M2};
use candle_sage::ops::{
    self, CrossEntropy, Fp8Copies, Fp8Matrix, Fp8Scales, Fp8Sums, QkNormRopeGrad, RopeStyle,
};

use crate::fp8::{cross_entropy_fp8, quantize_in_parts};
use crate::support::{Normals, f64s, gpu, relative_l2};

/// Every finite FP8 value, and every midpoint of two adjacent FP8 values with the next f32 number on each side.
fn special(format: Fp8Format) -> Vec<f32> {
    let codes: Vec<f32> = (0..=255u8).map(|code| format.value(code)).filter(|x| x.is_finite()).collect();
    let middles = codes.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
    let mut all: Vec<f32> =
        middles.flat_map(|x| [x, x.next_up(), x.next_down()]).chain(codes.clone()).collect();
    all.resize(all.len().next_multiple_of(256), 0.0);
    all
}

/// The largest allowed relative error of products with `Fp8Sums::F32`: see `products_are_those_of_the_cpu`.
const PROMOTED: f64 = 1.0 / 2048.0;

fn codes(matrix: &Fp8Matrix) -> Result<Vec<Vec<u8>>> {
    let all =
        [matrix.clone(), matrix.t()].map(|matrix| matrix.codes().map(|codes| codes.flatten_all()?.to_vec1()));
    all.into_iter().flatten().collect()
}

fn same_codes(x: &Tensor, format: Fp8Format, copies: Fp8Copies) -> Result<()> {
    let on_cpu = Fp8Matrix::quantize(&x.to_dtype(DType::F32)?, format, copies)?;
    let on_gpu = Fp8Matrix::quantize(&x.to_device(&gpu())?, format, copies)?;
    assert_eq!(on_gpu.scale().to_vec1::<f32>()?, on_cpu.scale().to_vec1::<f32>()?);
    assert!(codes(&on_gpu)? == codes(&on_cpu)?, "{:?} {:?} {format:?} {copies:?}", x.dims(), x.dtype());
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn parts_have_the_codes_of_the_cpu() -> Result<()> {
    let dims = [(432, 1040), (128, 1008)];
    let len = dims[0].0 * dims[0].1 + dims[1].0 * dims[1].1;
    let x = Tensor::from_vec(Normals::new(4).vec(len, 3.0), len, &Device::Cpu)?;
    for format in [E4M3, E5M2] {
        let on_cpu = quantize_in_parts(&x, dims, format)?;
        let on_gpu = quantize_in_parts(&x.to_device(&gpu())?, dims, format)?;
        for (on_cpu, on_gpu) in on_cpu.iter().zip(&on_gpu) {
            assert_eq!(on_gpu.scale().to_vec1::<f32>()?, on_cpu.scale().to_vec1::<f32>()?);
            assert!(codes(on_gpu)? == codes(on_cpu)?, "{format:?}");
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn codes_are_those_of_the_cpu() -> Result<()> {
    for format in [E4M3, E5M2] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (rows, columns) in [(16, 16), (48, 80), (144, 208), (128, 64), (272, 1040), (2048, 16)] {
                let x = Normals::new(7).vec(rows * columns, 3.0);
                let x = Tensor::from_vec(x, (rows, columns), &Device::Cpu)?.to_dtype(dtype)?;
                for copies in [Fp8Copies::Rows, Fp8Copies::Columns, Fp8Copies::Both] {
                    same_codes(&x, format, copies)?;
                }
                same_codes(&x.t()?, format, Fp8Copies::Both)?;
            }
        }
        let all = special(format);
        for factor in [1.0, 2f32.powi(-120), 2f32.powi(100)] {
            let x: Vec<f32> = all.iter().map(|x| x * factor).collect();
            same_codes(&Tensor::from_vec(x, (all.len() / 16, 16), &Device::Cpu)?, format, Fp8Copies::Both)?;
        }
        for odd in [f32::NAN, f32::INFINITY, 0.0] {
            let x = Tensor::full(odd, (16, 16), &Device::Cpu)?;
            same_codes(&x, format, Fp8Copies::Both)?;
        }
    }
    Ok(())
}

/// Matmuls of the same FP8 values on GPU and CPU. Tensor cores accumulate with about 14 bits. With `Fp8Sums::F32`,
/// their partial sum is added to an f32 sum every 128 terms, which are four steps of 32 terms. Each step errs by up to
/// 2^-14 of the partial sum, so four steps by 2^-12. The allowed relative error is twice 2^-12. With `Fp8Sums::Fast`,
/// this is multiplied by sqrt(k / 128), as if the errors of every 128 terms were independent. One rounding to the
/// result's type is allowed in addition.
#[test]
#[ignore = "needs a GPU"]
fn products_are_those_of_the_cpu() -> Result<()> {
    for (m, n, k) in [(16, 16, 16), (144, 80, 208), (256, 1024, 4096), (48, 3072, 1024)] {
        for (a_format, b_format) in [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)] {
            let mut normals = Normals::new(11);
            let a = Tensor::from_vec(normals.vec(m * k, 1.0), (m, k), &Device::Cpu)?;
            let b = Tensor::from_vec(normals.vec(n * k, 1.0), (n, k), &Device::Cpu)?;
            let matrix = |x: &Tensor, format, device: &Device| {
                Fp8Matrix::quantize(&x.to_device(device)?, format, Fp8Copies::Both)
            };
            let on = |device: &Device| {
                Ok::<_, candle_core::Error>((matrix(&a, a_format, device)?, matrix(&b, b_format, device)?))
            };
            let ((a8, b8), (a_gpu, b_gpu)) = (on(&Device::Cpu)?, on(&gpu())?);
            let exact = f64s(&a8.product(&b8, DType::F32, Fp8Sums::F32)?.flatten_all()?.to_vec1()?);
            for (sums, error_of_sums) in
                [(Fp8Sums::F32, PROMOTED), (Fp8Sums::Fast, PROMOTED * (k as f64 / 128.0).max(1.0).sqrt())]
            {
                for (dtype, rounding) in
                    [(DType::F32, 0.0), (DType::BF16, 2f64.powi(-8)), (DType::F16, 2f64.powi(-11))]
                {
                    let got =
                        a_gpu.product(&b_gpu, dtype, sums)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
                    let error = relative_l2(&f64s(&got), &exact);
                    println!("{m} x {n} x {k} {a_format:?} {b_format:?} {sums:?} {dtype:?}: {error:.1e}");
                    assert!(error <= error_of_sums + rounding, "{error:.1e}");
                }
                let sum = Tensor::ones((m, n), DType::F32, &gpu())?;
                a_gpu.product_into(&sum, &b_gpu, true, sums)?;
                let expected: Vec<f64> = exact.iter().map(|x| x + 1.0).collect();
                let error = relative_l2(&f64s(&sum.flatten_all()?.to_vec1()?), &expected);
                assert!(error <= error_of_sums, "{error:.1e}");
                let again = Tensor::zeros((m, n), DType::F32, &gpu())?;
                a_gpu.product_into(&again, &b_gpu, false, sums)?;
                let twice = a_gpu.product(&b_gpu, DType::F32, sums)?;
                assert_eq!(again.to_vec2::<f32>()?, twice.to_vec2::<f32>()?, "the same bits");
            }
            // Products of transposes, as in the backward of a linear map. A diagonal element of B^T B is a sum of
            // squares. A partial sum adds 128 squares. Each addition truncates up to 2^-14 of the partial sum, and
            // 2^-15 on average. These errors have the same sign and add up to 2^-8.
            if b_format == E4M3 {
                let expected = b8.t().product(&b8.t(), DType::F32, Fp8Sums::F32)?.flatten_all()?.to_vec1()?;
                let got = b_gpu.t().product(&b_gpu.t(), DType::F32, Fp8Sums::F32)?;
                let error = relative_l2(&f64s(&got.flatten_all()?.to_vec1()?), &f64s(&expected));
                println!("{k} x {k} x {n}, positive sums: {error:.1e}");
                assert!(error <= 2f64.powi(-8), "{error:.1e}");
            }
        }
    }
    Ok(())
}

/// Quantizing the same matrices step after step gives the same FP8 values, scales and numbers of saturated values on
/// the GPU as on the CPU.
#[test]
#[ignore = "needs a GPU"]
fn scales_are_those_of_the_cpu() -> Result<()> {
    let formats = [E4M3, E5M2, E4M3];
    let (on_cpu, on_gpu) = (Fp8Scales::new(&formats, &Device::Cpu)?, Fp8Scales::new(&formats, &gpu())?);
    let (mut normals, mut seen) = (Normals::new(13), 0);
    for step in 0..6 {
        for index in 0..formats.len() {
            // From step to step, values change by large factors. Some matrices are zero, some have an infinity.
            let size = [1.0, 300.0, 0.0, 7e4, 1e-3, 1.0][(step + index) % 6];
            let mut x = normals.vec(48 * 80, size);
            if step == 4 {
                x[77] = f32::INFINITY;
            }
            let x = Tensor::from_vec(x, (48, 80), &Device::Cpu)?;
            let quantize = |x: &Tensor, scales: &std::sync::Arc<Fp8Scales>| {
                Fp8Matrix::quantize_with(x, Fp8Copies::Both, &scales.at(index))
            };
            let (a, b) = (quantize(&x, &on_cpu)?, quantize(&x.to_device(&gpu())?, &on_gpu)?);
            assert_eq!(a.scale().to_vec1::<f32>()?, b.scale().to_vec1::<f32>()?, "step {step}, {index}");
            assert!(codes(&a)? == codes(&b)?, "step {step}, {index}");
        }
        assert_eq!(
            on_cpu.largest()?.to_vec1::<f32>()?,
            on_gpu.largest()?.force_contiguous()?.to_vec1::<f32>()?
        );
        if step == 3 {
            let largest = Tensor::new(&[5f32, 1e5, 2.0], &Device::Cpu)?;
            on_cpu.set_largest(&largest)?;
            on_gpu.set_largest(&largest.to_device(&gpu())?)?;
        }
        on_cpu.rescale()?;
        on_gpu.rescale()?;
        assert_eq!(on_cpu.state()?, on_gpu.state()?, "step {step}");
        let saturated = on_cpu.take_saturated()?;
        assert_eq!(saturated, on_gpu.take_saturated()?, "step {step}");
        seen += saturated;
    }
    assert!(seen > 0, "nothing saturated");
    let again = Fp8Scales::new(&formats, &gpu())?;
    again.restore(&on_gpu.state()?)?;
    assert_eq!(again.state()?, on_gpu.state()?);
    Ok(())
}

/// A cross-entropy in FP8. The GPU's logits differ slightly from the CPU's: by errors of sums in f32, by rounding in
/// bf16. So a fraction f of the logits' gradients (up to .002 in f32, .016 in bf16) rounds to the next E5M2 value, a
/// fifth larger or smaller. The gradients' relative L2 error is then sqrt(f) / 5: .01 in f32, .025 in bf16.
#[test]
#[ignore = "needs a GPU"]
fn a_cross_entropy_is_that_of_the_cpu() -> Result<()> {
    for (rows, width, classes) in [(16, 16, 16), (144, 80, 272), (272, 256, 1040)] {
        let mut normals = Normals::new(19);
        let hidden = Tensor::from_vec(normals.vec(rows * width, 1.0), (rows, width), &Device::Cpu)?;
        let weight = Tensor::from_vec(normals.vec(classes * width, 0.1), (classes, width), &Device::Cpu)?;
        for settings in [CrossEntropy::default(), CrossEntropy::default().z_loss(1e-3).chunk_rows(70)] {
            for (gradient, dtype, limit) in [
                (E5M2, DType::F32, 0.02),
                (E4M3, DType::F32, 0.02),
                (E5M2, DType::BF16, 0.05),
                (E5M2, DType::F16, 0.02),
            ] {
                let exact = cross_entropy_fp8([&hidden, &weight], gradient, settings, DType::F32)?;
                let on_gpu = [hidden.to_device(&gpu())?, weight.to_device(&gpu())?];
                let got = cross_entropy_fp8(on_gpu.each_ref(), gradient, settings, dtype)?;
                assert!(
                    (got[0][0] / exact[0][0] - 1.0).abs() < 1e-3,
                    "{got:?} {exact:?}",
                    got = got[0],
                    exact = exact[0]
                );
                for n in [1, 2] {
                    let error = relative_l2(&got[n], &exact[n]);
                    println!("{rows} x {width} x {classes} {gradient:?} {dtype:?}: {error:.1e}");
                    assert!(error <= limit, "{error:.1e}");
                }
            }
        }
    }
    Ok(())
}

/// Compares the output of a fused kernel with the quantized output of the plain operator.
fn check(name: &str, dtype: DType, got: &Fp8Matrix, plain: &Fp8Matrix) -> Result<()> {
    assert_eq!(got.scale().to_vec1::<f32>()?, plain.scale().to_vec1::<f32>()?);
    for (got, plain) in codes(got)?.iter().zip(&codes(plain)?) {
        let other = got.iter().zip(plain).filter(|(a, b)| a != b).count() as f64 / got.len() as f64;
        // Before quantization, `plain` was rounded to `dtype`, and `got` was not. Rounding to bf16 changes one E4M3
        // code in 32, rounding to f16 one in 256.
        let limit = match dtype {
            DType::F32 => 1e-4,
            DType::BF16 => 0.05,
            _ => 0.01,
        };
        println!("{name} {:?} {dtype:?}: {other:.1e} of the codes differ", plain.len());
        // In a small matrix, the fraction of codes that differ may be larger by chance, so five more may differ.
        assert!(other <= limit + 5.0 / plain.len() as f64, "{name} {dtype:?}: {other}");
    }
    Ok(())
}

/// A fused kernel computes the plain operator's output in f32, and quantizes it. The compiler may fuse multiplications
/// and additions differently in the two kernels, so one code in ten thousand may differ. With 16-bit inputs, more codes
/// differ, because the plain operator rounds its output before quantization: see `check`.
#[test]
#[ignore = "needs a GPU"]
fn fused_operators_are_the_plain_ones_quantized() -> Result<()> {
    for (rows, columns) in [(16, 16), (144, 208), (272, 1024), (48, 2048), (512, 3072)] {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let mut normals = Normals::new(17);
            let mut draw = |rows: usize, columns: usize| {
                Tensor::from_vec(normals.vec(rows * columns, 1.0), (rows, columns), &gpu())?.to_dtype(dtype)
            };
            let (both, dy, x) = (draw(rows, 2 * columns)?, draw(rows, columns)?, draw(rows, columns)?);
            let weight = draw(1, columns)?.squeeze(0)?;
            let (gate, up) = (both.narrow(1, 0, columns)?, both.narrow(1, columns, columns)?);
            let scales = Fp8Scales::new(&[E4M3, E5M2, E4M3, E5M2], &gpu())?;
            let quantize = |x: &Tensor, copies, index| Fp8Matrix::quantize_with(x, copies, &scales.at(index));
            // The first iteration measures the largest values.
            for _ in 0..2 {
                let y = ops::swiglu_fp8(&gate, &up, Fp8Copies::Both, &scales.at(0))?;
                check("swiglu", dtype, &y, &quantize(&ops::swiglu(&gate, &up)?, Fp8Copies::Both, 0)?)?;
                let (plain, again) = ops::swiglu_backward(&gate, &up, &dy, true)?;
                let (dboth, y) =
                    ops::swiglu_backward_fp8(&gate, &up, &dy, &scales.at(1), Some(&scales.at(0)))?;
                check("swiglu backward", dtype, &dboth, &quantize(&plain, Fp8Copies::Both, 1)?)?;
                check(
                    "swiglu again",
                    dtype,
                    &y.expect("y"),
                    &quantize(&again.expect("y"), Fp8Copies::Columns, 0)?,
                )?;
                let (alone, none) = ops::swiglu_backward_fp8(&gate, &up, &dy, &scales.at(1), None)?;
                assert!(none.is_none() && codes(&alone)? == codes(&dboth)?);
                for residual in [Some(&dy), None] {
                    let normed = |copies| {
                        ops::residual_rms_norm_fp8(&x, residual, &weight, 1e-6, copies, &scales.at(2))
                    };
                    let (sum, got) = normed(Fp8Copies::Both)?;
                    let (plain_sum, plain) = match residual {
                        Some(residual) => ops::residual_rms_norm(&x, residual, &weight, 1e-6)?,
                        None => (x.clone(), ops::rms_norm(&x, &weight, 1e-6)?),
                    };
                    let f32s = |x: &Tensor| x.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
                    assert_eq!(f32s(&sum)?, f32s(&plain_sum)?);
                    check("norm", dtype, &got, &quantize(&plain, Fp8Copies::Both, 2)?)?;
                    let ([dx, dw], got) =
                        ops::rms_norm_backward_fp8(&x, &weight, &dy, residual, 1e-6, &scales.at(3))?;
                    let [plain_dx, plain_dw] = ops::rms_norm_backward(&x, &weight, &dy, residual, 1e-6)?;
                    check("norm backward", dtype, &got, &quantize(&plain_dx, Fp8Copies::Both, 3)?)?;
                    for (got, plain) in [(dx, plain_dx), (dw, plain_dw)] {
                        let error = relative_l2(&f64s(&f32s(&got)?), &f64s(&f32s(&plain)?));
                        assert!(error < 1e-3, "norm backward: {error:.1e}");
                    }
                }
            }
        }
    }
    Ok(())
}

/// `qk_norm_rope_backward_fp8` returns one matrix: the gradients of query, key and value are adjacent columns.
#[test]
#[ignore = "needs a GPU"]
fn gradients_of_query_and_key_are_the_plain_ones_quantized() -> Result<()> {
    for (batch, sequence, head_dim) in [(1, 16, 64), (3, 48, 64), (2, 272, 128), (2, 32, 32)] {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let mut normals = Normals::new(23);
            let mut draw = |dims: &[usize]| {
                Tensor::from_vec(normals.vec(dims.iter().product(), 1.0), dims, &gpu())?.to_dtype(dtype)
            };
            // Query, key and value side by side, as one projection writes them.
            let (heads, keys) = (5, 2);
            let all = draw(&[batch, sequence, heads + 2 * keys, head_dim])?;
            let (q, k) = (all.narrow(2, 0, heads)?, all.narrow(2, heads, keys)?);
            let (dq, dk) =
                (draw(&[batch, sequence, heads, head_dim])?, draw(&[batch, sequence, keys, head_dim])?);
            let dv = draw(&[batch, sequence, keys, head_dim])?;
            let (of_q, of_k) = (draw(&[head_dim])?, draw(&[head_dim])?);
            let (cos, sin) = ops::rope_tables(sequence, head_dim, 1e4, &gpu())?;
            let grads = [
                QkNormRopeGrad { x: &q, weight: &of_q, dout: &dq },
                QkNormRopeGrad { x: &k, weight: &of_k, dout: &dk },
            ];
            let scales = Fp8Scales::new(&[E5M2], &gpu())?;
            for style in [RopeStyle::Halves, RopeStyle::Interleaved] {
                for _ in 0..2 {
                    let tables = [&cos, &sin];
                    let (got, dws) = ops::qk_norm_rope_backward_fp8(
                        &grads,
                        Some(&dv),
                        tables,
                        1e-6,
                        style,
                        &scales.at(0),
                    )?;
                    let (plain, plain_dws) = ops::qk_norm_rope_backward(&grads, tables, 1e-6, style)?;
                    let plain = Tensor::cat(&[&plain, &dv], 2)?.reshape((batch * sequence, ()))?;
                    let quantized = Fp8Matrix::quantize_with(&plain, Fp8Copies::Both, &scales.at(0))?;
                    check("query and key", dtype, &got, &quantized)?;
                    for (got, plain) in dws.iter().zip(&plain_dws) {
                        let f32s = |x: &Tensor| x.to_dtype(DType::F32)?.to_vec1::<f32>();
                        let error = relative_l2(&f64s(&f32s(got)?), &f64s(&f32s(plain)?));
                        assert!(error < 2e-3, "the gradient of the weight: {error:.1e}");
                    }
                }
            }
        }
    }
    Ok(())
}
