//! FP8 matrices, their products and the linear map, against f64.

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_sage::fp8::Fp8Format::{self, E4M3, E5M2};
use candle_sage::nn;
use candle_sage::ops::{Fp8Copies, Fp8Linear, Fp8Matrix, Fp8Sums, fp8_linear};

use crate::support::{Normals, f64s, relative_l2};

/// The root mean square of a rounding, relative to the value: a value's error is uniform within half a spacing, which is
/// 2^-mantissa of the power of two below it.
pub(crate) fn rounding(format: Fp8Format) -> f64 {
    let spacing = if format == E4M3 { 2f64.powi(-3) } else { 2f64.powi(-2) };
    spacing / 12f64.sqrt()
}

/// Errors of two operands are independent.
fn of_product(a: Fp8Format, b: Fp8Format) -> f64 {
    rounding(a).hypot(rounding(b))
}

fn values(x: &Tensor) -> Result<Vec<f64>> {
    Ok(f64s(&x.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?))
}

fn draw(normals: &mut Normals, dims: (usize, usize), device: &Device) -> Result<Tensor> {
    Tensor::from_vec(normals.vec(dims.0 * dims.1, 1.0), dims, device)
}

/// A linear map's output and gradients have the error of two roundings: not more, and not much less.
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

/// A product is that of the codes' values, with the error of sums in f32: sqrt(k) 2^-24 for k terms.
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
    // The transposes have the same elements.
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

/// The module reads the weights of a linear layer, and computes what the op does.
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
        (a.product(&b, DType::F32, Fp8Sums::Fast).map(drop), "do not fit together"),
        (a.product(&a, DType::F32, Fp8Sums::Fast).map(drop), "at most one operand in E5M2"),
        (b.product(&b, DType::F32, Fp8Sums::Fast).map(drop), "without its rows"),
        (
            fp8_linear(&zeros(16, 32)?, &zeros(16, 48)?, Fp8Linear::default()).map(drop),
            "does not fit the weight",
        ),
    ];
    for (result, expected) in errors {
        let error = result.expect_err(expected).to_string();
        assert!(error.contains(expected) && error.contains("hint:"), "{error}");
    }
    Ok(())
}

/// A NaN reaches the output, and a matrix of zeros has zeros.
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
