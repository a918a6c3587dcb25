//! FP8 matrices, their matmuls and `fp8_linear`, compared with f64.

use std::ops::Range;

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_sage::fp8::Fp8Format::{self, E4M3, E5M2};
use candle_sage::nn;
use candle_sage::ops::{self, CrossEntropy, Fp8Copies, Fp8Linear, Fp8Matrix, Fp8Scales, Fp8Sums, fp8_linear};

use crate::support::{Normals, f64s, relative_l2};

/// The root mean square error of rounding x > 0, divided by the largest power of two that is at most x. With m bits of
/// mantissa the spacing near x is 2^-m times this power. The error is uniform within half a spacing.
pub(crate) fn rounding(format: Fp8Format) -> f64 {
    let spacing = if format == E4M3 { 2f64.powi(-3) } else { 2f64.powi(-2) };
    spacing / 12f64.sqrt()
}

/// The error of a matmul: the errors of its two operands are independent.
fn of_product(a: Fp8Format, b: Fp8Format) -> f64 {
    rounding(a).hypot(rounding(b))
}

fn values(x: &Tensor) -> Result<Vec<f64>> {
    Ok(f64s(&x.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?))
}

fn draw(normals: &mut Normals, dims: (usize, usize), device: &Device) -> Result<Tensor> {
    Tensor::from_vec(normals.vec(dims.0 * dims.1, 1.0), dims, device)
}

/// The errors of a linear map's output and gradients are at most the error that rounding both operands causes, and more
/// than half of that error.
#[test]
fn a_linear_map_has_the_error_of_its_roundings() -> Result<()> {
    let device = Device::Cpu;
    for gradient in [E4M3, E5M2] {
        let mut normals = Normals::new(1);
        let [x, w, dy] = [(144, 208), (80, 208), (144, 80)].map(|dims| draw(&mut normals, dims, &device));
        let (x, w, dy) = (Var::from_tensor(&x?)?, Var::from_tensor(&w?)?, dy?);
        let y = fp8_linear(&x, &w, Fp8Linear::default().gradient(gradient))?;
        let grads = (&y * &dy)?.sum_all()?.backward()?;
        let f64 = |x: &Tensor| x.to_dtype(DType::F64);
        let exact = [
            f64(&x)?.matmul(&f64(&w)?.t()?)?,
            f64(&dy)?.matmul(&f64(&w)?)?,
            f64(&dy)?.t()?.matmul(&f64(&x)?)?,
        ];
        let got = [&y, grads.get(&x).expect("dx"), grads.get(&w).expect("dW")];
        let limits = [of_product(E4M3, E4M3), of_product(gradient, E4M3), of_product(gradient, E4M3)];
        for ((got, exact), limit) in got.into_iter().zip(&exact).zip(limits) {
            let error = relative_l2(&values(got)?, &exact.flatten_all()?.to_vec1::<f64>()?);
            assert!(error <= limit && error > limit / 2.0, "{gradient:?}: {error:.4}, limit {limit:.4}");
        }
    }
    Ok(())
}

/// An FP8 matmul equals the f64 matmul of the dequantized values, except for rounding in the f32 sums:
/// sqrt(k) * 2^-24 for k terms.
#[test]
fn a_product_is_that_of_its_codes() -> Result<()> {
    let mut normals = Normals::new(2);
    let [a, b] = [(32, 304), (48, 304)].map(|dims| draw(&mut normals, dims, &Device::Cpu));
    let (a, b) =
        (Fp8Matrix::quantize(&a?, E4M3, Fp8Copies::Both)?, Fp8Matrix::quantize(&b?, E5M2, Fp8Copies::Both)?);
    let f64 = |x: &Fp8Matrix| x.dequantize()?.to_dtype(DType::F64);
    let exact = f64(&a)?.matmul(&f64(&b)?.t()?)?.flatten_all()?.to_vec1::<f64>()?;
    let limit = 304f64.sqrt() * 2f64.powi(-24);
    let product = a.product(&b, DType::F32, Fp8Sums::F32)?;
    assert!(relative_l2(&values(&product)?, &exact) <= limit);
    // The transposed copy of `a` has the same elements as the row copy.
    assert_eq!(values(&a.t().dequantize()?.t()?)?, values(&a.dequantize()?)?);
    assert_eq!(values(&a.clone().without_rows().dequantize()?)?, values(&a.dequantize()?)?);
    let sum = Tensor::ones((32, 48), DType::F32, &Device::Cpu)?;
    a.product_into(&sum, &b, true, Fp8Sums::Fast)?;
    let expected: Vec<f64> = exact.iter().map(|x| x + 1.0).collect();
    assert!(relative_l2(&values(&sum)?, &expected) <= limit + 2f64.powi(-24));
    a.product_into(&sum, &b, false, Fp8Sums::Fast)?;
    assert!(relative_l2(&values(&sum)?, &exact) <= limit);
    Ok(())
}

/// The loss, and the gradients of the hidden states and of the weight.
pub(crate) fn cross_entropy_fp8(
    [hidden, weight]: [&Tensor; 2],
    gradient: Fp8Format,
    settings: CrossEntropy,
    dtype: DType,
) -> Result<[Vec<f64>; 3]> {
    let [hidden, weight] = [hidden, weight].map(|x| Fp8Matrix::quantize(x, E4M3, Fp8Copies::Both));
    let (hidden, weight) = (hidden?, weight?);
    let ((rows, _), (classes, width)) = (hidden.dims(), weight.dims());
    let targets: Vec<u32> = (0..rows).map(|row| (row * 7 % classes) as u32).collect();
    let targets = Tensor::new(targets, hidden.scale().device())?;
    let dweight = Tensor::ones((classes, width), DType::F32, hidden.scale().device())?;
    let linear = Fp8Linear::default().gradient(gradient).sums([Fp8Sums::F32; 3]);
    let (loss, dhidden) = ops::linear_cross_entropy_into_fp8(
        &dweight, &hidden, &weight, &targets, settings, 3.0, linear, dtype,
    )?;
    Ok([values(&loss)?, values(&dhidden)?, values(&dweight)?.iter().map(|x| x - 1.0).collect()])
}

/// A cross-entropy in FP8 equals the f32 cross-entropy of the dequantized operands. The gradients differ by one
/// rounding, because the gradient of the logits is quantized.
#[test]
fn a_cross_entropy_has_the_error_of_its_roundings() -> Result<()> {
    let mut normals = Normals::new(5);
    let (hidden, weight) =
        (draw(&mut normals, (144, 64), &Device::Cpu)?, (draw(&mut normals, (80, 64), &Device::Cpu)? * 0.2)?);
    let of_codes = |x: &Tensor| Fp8Matrix::quantize(x, E4M3, Fp8Copies::Both)?.dequantize();
    let targets: Vec<u32> = (0..144).map(|row| row * 7 % 80).collect();
    let targets = Tensor::new(targets, &Device::Cpu)?;
    for settings in [CrossEntropy::default(), CrossEntropy::default().z_loss(0.01).chunk_rows(50)] {
        let dweight = Tensor::zeros((80, 64), DType::F32, &Device::Cpu)?;
        let (loss, dhidden) = ops::linear_cross_entropy_into(
            &dweight,
            &of_codes(&hidden)?,
            &of_codes(&weight)?,
            &targets,
            settings,
            3.0,
        )?;
        for gradient in [E4M3, E5M2] {
            let [of_fp8, dhidden8, dweight8] =
                cross_entropy_fp8([&hidden, &weight], gradient, settings, DType::F32)?;
            assert_eq!(of_fp8, values(&loss)?, "the loss");
            for (got, exact) in [(dhidden8, &dhidden), (dweight8, &dweight)] {
                let error = relative_l2(&got, &values(exact)?);
                let limit = rounding(gradient);
                println!("{gradient:?}: {error:.4}, limit {limit:.4}");
                assert!(error <= limit && error > limit / 10.0, "{gradient:?}: {error:.4}, limit {limit:.4}");
            }
        }
    }
    Ok(())
}

/// The module `nn::Fp8Linear` equals the op `fp8_linear`, for tensors of any rank.
#[test]
fn the_module_maps_the_last_dimension() -> Result<()> {
    let mut normals = Normals::new(3);
    let (x, w) = (draw(&mut normals, (32, 64), &Device::Cpu)?, draw(&mut normals, (16, 64), &Device::Cpu)?);
    let map = nn::Fp8Linear::new(w.clone(), Fp8Linear::default());
    let y = map.forward(&x.reshape((2, 4, 4, 64))?)?;
    assert_eq!(y.dims(), [2, 4, 4, 16]);
    assert_eq!(values(&y)?, values(&fp8_linear(&x, &w, Fp8Linear::default())?)?);
    let error = map.forward(&x.reshape((64, 32))?).expect_err("another width").to_string();
    assert!(error.contains("hint:"), "{error}");
    Ok(())
}

/// Quantizes two matrices that are stored in one vector. Each third of the vector is quantized separately, as by a
/// process that owns only this third.
pub(crate) fn quantize_in_parts(
    x: &Tensor,
    dims: [(usize, usize); 2],
    format: Fp8Format,
) -> Result<Vec<Fp8Matrix>> {
    let (len, third) = (x.elem_count(), x.elem_count() / 3);
    let first = dims[0].0 * dims[0].1;
    let (matrices, codes) = ([0..first, first..len], Tensor::zeros(len, DType::U8, x.device())?);
    let shard = |n: usize| n * third..(n + 1) * third;
    let parts = |n: usize| {
        let own = shard(n);
        let part = |all: &Range<usize>| {
            let (start, end) = (all.start.max(own.start), all.end.min(own.end));
            if start < end { start - own.start..end - own.start } else { 0..0 }
        };
        matrices.each_ref().map(part)
    };
    let of = |n: usize| x.narrow(0, shard(n).start, third);
    let largest = ops::fp8_largest(&of(0)?, &parts(0))?;
    let largest = (1..3).try_fold(largest, |all, n| all.maximum(&ops::fp8_largest(&of(n)?, &parts(n))?))?;
    let scales = ops::fp8_scales(&largest, format)?;
    for n in 0..3 {
        let codes = codes.narrow(0, shard(n).start, third)?;
        ops::fp8_quantize_parts(&codes, &of(n)?, &parts(n), &scales, format)?;
    }
    let matrix = |(n, range): (usize, &Range<usize>)| {
        let codes = codes.narrow(0, range.start, range.len())?.reshape(dims[n])?;
        Fp8Matrix::from_codes(&codes, &scales.narrow(0, n, 1)?, format)
    };
    matrices.iter().enumerate().map(matrix).collect()
}

/// Matrices quantized in parts have the same FP8 values and scales as matrices quantized whole, bit for bit.
#[test]
fn parts_have_the_codes_of_the_whole() -> Result<()> {
    let dims = [(32, 112), (16, 160)];
    let x = Tensor::from_vec(Normals::new(4).vec(6144, 3.0), 6144, &Device::Cpu)?;
    for format in [E4M3, E5M2] {
        let made = quantize_in_parts(&x, dims, format)?;
        for (n, (start, made)) in [0, 32 * 112].into_iter().zip(made).enumerate() {
            let whole = x.narrow(0, start, dims[n].0 * dims[n].1)?.reshape(dims[n])?;
            let whole = Fp8Matrix::quantize(&whole, format, Fp8Copies::Both)?;
            let bits = |matrix: &Fp8Matrix| matrix.codes().expect("a copy").flatten_all()?.to_vec1::<u8>();
            assert_eq!(made.scale().to_vec1::<f32>()?, whole.scale().to_vec1::<f32>()?);
            assert_eq!(bits(&made)?, bits(&whole)?);
            assert_eq!(bits(&made.t())?, bits(&whole.t())?);
        }
    }
    let scales = ops::fp8_scales(&Tensor::new(&[0f32, f32::NAN, 448.0], &Device::Cpu)?, E4M3)?;
    assert_eq!(scales.to_vec1::<f32>()?, [1.0; 3]);
    Ok(())
}

#[test]
fn what_does_not_fit_is_an_error() -> Result<()> {
    let zeros = |rows, columns| Tensor::zeros((rows, columns), DType::F32, &Device::Cpu);
    let quantize = |x: &Tensor, format, copies| Fp8Matrix::quantize(x, format, copies);
    let [a, b] = [
        quantize(&zeros(16, 32)?, E5M2, Fp8Copies::Rows)?,
        quantize(&zeros(16, 48)?, E4M3, Fp8Copies::Columns)?,
    ];
    let errors = [
        (quantize(&zeros(17, 32)?, E4M3, Fp8Copies::Both).map(drop), "multiples of 16"),
        (quantize(&zeros(16, 32)?.flatten_all()?, E4M3, Fp8Copies::Both).map(drop), "multiples of 16"),
        (a.product(&b, DType::F32, Fp8Sums::Fast).map(drop), "do not match"),
        (a.product(&a, DType::F32, Fp8Sums::Fast).map(drop), "at most one operand in E5M2"),
        (b.product(&b, DType::F32, Fp8Sums::Fast).map(drop), "has no row copy"),
        (
            fp8_linear(&zeros(16, 32)?, &zeros(16, 48)?, Fp8Linear::default()).map(drop),
            "does not fit the weight",
        ),
    ];
    let square = quantize(&zeros(16, 16)?, E4M3, Fp8Copies::Both)?;
    let head = |targets: usize, settings: CrossEntropy| {
        let targets = Tensor::zeros(targets, DType::U32, &Device::Cpu)?;
        let (linear, sum) = (Fp8Linear::default(), zeros(16, 16)?);
        ops::linear_cross_entropy_into_fp8(
            &sum,
            &square,
            &square,
            &targets,
            settings,
            1.0,
            linear,
            DType::F32,
        )
        .map(drop)
    };
    let of_head = [
        (head(15, CrossEntropy::default()), "the inputs do not match"),
        (head(16, CrossEntropy::default().ignore_id(0)), "does not support ignore_id"),
        (head(16, CrossEntropy::default().chunk_rows(0)), "chunk_rows is out of range"),
    ];
    let (vector, codes) = (zeros(2, 256)?.flatten_all()?, Tensor::zeros(512, DType::U8, &Device::Cpu)?);
    let one = Tensor::ones(1, DType::F32, &Device::Cpu)?;
    let of_parts = [
        (ops::fp8_largest(&zeros(2, 256)?, &[]).map(drop), "does not support this tensor"),
        (ops::fp8_largest(&vector, std::slice::from_ref(&(0..100))).map(drop), "a part does not fit"),
        (ops::fp8_largest(&vector, std::slice::from_ref(&(256..768))).map(drop), "a part does not fit"),
        (ops::fp8_quantize_parts(&codes, &vector, &[0..256, 256..512], &one, E4M3), "do not match"),
        (ops::fp8_quantize_parts(&vector, &vector, &[], &one, E4M3), "does not support this tensor"),
        (Fp8Matrix::from_codes(&codes, &one, E4M3).map(drop), "multiples of 16"),
        (Fp8Matrix::from_codes(&zeros(16, 16)?, &one, E4M3).map(drop), "wrong type, shape or layout"),
    ];
    for (result, expected) in errors.into_iter().chain(of_head).chain(of_parts) {
        let error = result.expect_err(expected).to_string();
        assert!(error.contains(expected) && error.contains("hint:"), "{error}");
    }
    Ok(())
}

/// A NaN reaches the output, and a zero matrix stays zero.
#[test]
fn a_nan_is_not_hidden() -> Result<()> {
    let mut x = vec![1.0; 16 * 16];
    x[5 * 16 + 3] = f32::NAN;
    let x = Tensor::from_vec(x, (16, 16), &Device::Cpu)?;
    let y = fp8_linear(&x, &Tensor::ones((16, 16), DType::F32, &Device::Cpu)?, Fp8Linear::default())?;
    let nans: Vec<usize> =
        values(&y)?.iter().enumerate().filter(|(_, y)| y.is_nan()).map(|(n, _)| n / 16).collect();
    assert_eq!(nans, [5; 16]);
    let zeros = Tensor::zeros((16, 16), DType::F32, &Device::Cpu)?;
    assert_eq!(values(&fp8_linear(&zeros, &zeros, Fp8Linear::default())?)?, [0.0; 256]);
    Ok(())
}

/// Delayed scaling: the scale leaves room for 4 times the running maximum. Values that are too large for the scale
/// saturate and are counted. A restored state continues with the same scales.
#[test]
fn scales_follow_the_largest_values() -> Result<()> {
    let scales = Fp8Scales::new(&[E4M3, E5M2], &Device::Cpu)?;
    let of = |scales: &std::sync::Arc<Fp8Scales>, index, size: f32| -> Result<f32> {
        let x = Tensor::full(size, (16, 16), &Device::Cpu)?;
        Fp8Matrix::quantize_with(&x, Fp8Copies::Rows, &scales.at(index))?
            .scale()
            .to_vec1::<f32>()
            .map(|scale| scale[0])
    };
    assert_eq!(scales.state()?, [[0.0, 0.0]; 2]);
    // 4 * 3 = 12 is below 448 / 32 = 14, and 4 * 3000 is below 57344 / 4 = 14336.
    assert_eq!([of(&scales, 0, 3.0)?, of(&scales, 1, 3000.0)?], [1.0 / 32.0, 0.25]);
    // 15 / (1 / 32) = 480 saturates.
    assert_eq!(of(&scales, 0, 15.0)?, 1.0 / 32.0);
    assert_eq!([scales.take_saturated()?, scales.take_saturated()?], [256, 0]);
    assert_eq!(scales.largest()?.to_vec1::<f32>()?, [15.0, 3000.0]);
    scales.rescale()?;
    assert_eq!(scales.state()?, [[0.25, 15.0], [0.25, 3000.0]]);
    // `set_largest` replaces the largest values since the last step. Non-finite values are ignored.
    of(&scales, 0, f32::NAN)?;
    scales.set_largest(&Tensor::new(&[100f32, f32::INFINITY], &Device::Cpu)?)?;
    scales.rescale()?;
    assert_eq!(scales.state()?, [[1.0, 100.0], [0.25, 3000.0 * 0.95]]);
    let again = Fp8Scales::new(&[E4M3, E5M2], &Device::Cpu)?;
    again.restore(&scales.state()?)?;
    assert_eq!([of(&again, 0, 1.0)?, of(&scales, 0, 1.0)?], [1.0, 1.0]);
    [&again, &scales].map(|scales| scales.rescale()).into_iter().collect::<Result<()>>()?;
    assert_eq!(again.state()?, scales.state()?);
    assert!(scales.restore(&[[1.0, 1.0]]).expect_err("of two matrices").to_string().contains("hint:"));
    assert!(scales.set_largest(&Tensor::new(&[1f32], &Device::Cpu)?).is_err());
    Ok(())
}

/// On the CPU a fused operator is the plain operator followed by quantization.
#[test]
fn fused_operators_are_the_plain_ones_quantized() -> Result<()> {
    let mut normals = Normals::new(4);
    let scales = Fp8Scales::new(&[E4M3; 3], &Device::Cpu)?;
    let (both, dy) =
        (draw(&mut normals, (32, 96), &Device::Cpu)?, draw(&mut normals, (32, 48), &Device::Cpu)?);
    let (gate, up) = (both.narrow(1, 0, 48)?, both.narrow(1, 48, 48)?);
    let codes = |matrix: &Fp8Matrix| matrix.codes().expect("rows").to_vec2::<u8>();
    let plain = |x: &Tensor, index| Fp8Matrix::quantize_with(x, Fp8Copies::Both, &scales.at(index));
    let (dboth, y) = ops::swiglu_backward_fp8(&gate, &up, &dy, &scales.at(0), Some(&scales.at(1)))?;
    let (expected, again) = ops::swiglu_backward(&gate, &up, &dy, true)?;
    assert_eq!(codes(&dboth)?, codes(&plain(&expected, 0)?)?);
    let (y, again) = (y.expect("y"), again.expect("y"));
    assert_eq!(codes(&y.t())?, codes(&plain(&again, 1)?.t())?);
    assert!(y.codes().is_none());
    let (x, weight) =
        (draw(&mut normals, (32, 48), &Device::Cpu)?, Tensor::ones(48, DType::F32, &Device::Cpu)?);
    for residual in [Some(&dy), None] {
        let (sum, normed) =
            ops::residual_rms_norm_fp8(&x, residual, &weight, 1e-6, Fp8Copies::Rows, &scales.at(2))?;
        let expected = residual.map_or_else(|| Ok(x.clone()), |residual| &x + residual)?;
        assert_eq!(values(&sum)?, values(&expected)?);
        assert_eq!(codes(&normed)?, codes(&plain(&ops::rms_norm(&expected, &weight, 1e-6)?, 2)?)?);
    }
    assert!(ops::swiglu_fp8(&gate, &both, Fp8Copies::Rows, &scales.at(0)).is_err());
    Ok(())
}
