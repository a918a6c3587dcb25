//! Tests of the forward with FP4 matmuls.

use candle_core::{D, DType, Device, Result, Tensor};

use super::inputs::{Inputs, cases};
use crate::cuda::guard;
use crate::nvfp4;
use crate::ops::Attention;
use crate::scheme::{AttnQat, PReference, Products, Smoothing};
use crate::selection::Selection;

/// Relative L2 error.
fn error(got: &Tensor, expected: &Tensor) -> Result<f64> {
    let f64s = |t: &Tensor| t.to_device(&Device::Cpu)?.to_dtype(DType::F64);
    let (got, expected) = (f64s(got)?, f64s(expected)?);
    let norm = |t: &Tensor| -> Result<f64> { t.sqr()?.sum_all()?.to_scalar::<f64>().map(f64::sqrt) };
    Ok(norm(&(got - &expected)?)? / norm(&expected)?.max(1e-30))
}

/// FP4 matmuls and 16-bit matmuls of the same NVFP4 values give the same output, except for rounding errors. In rare
/// cases, rounding errors cause a probability to round to the next FP4 value.
#[test]
#[ignore = "needs a GPU of compute capability 9.0, 10.x or 12.x"]
fn fp4_products_give_what_sixteen_bit_products_give() -> Result<()> {
    let mut worst = [0.0f64; 2];
    for (lens, heads, d, packing) in cases() {
        for dtype in [DType::BF16, DType::F16] {
            let inputs = Inputs::new(lens, heads, d, packing.clone(), dtype)?;
            // Q is scaled down, so that attention is not concentrated on one key.
            let q = (&inputs.tensors[0] * 0.1)?;
            for settings in [
                AttnQat::default(),
                AttnQat::default().smoothing(Smoothing::K),
                AttnQat::default().p_reference(PReference::TwoLevel),
                AttnQat::default().p_reference(PReference::Literal),
            ] {
                for (causal, window) in [(true, None), (false, None), (true, Some(70)), (false, Some(20))] {
                    let attend = |settings: AttnQat, device: &Device, dtype: DType| -> Result<Tensor> {
                        let to = |t: &Tensor| t.to_device(device)?.to_dtype(dtype);
                        let op = Attention::new(settings)
                            .causal(causal)
                            .window(window, window)
                            .softmax_scale(0.125);
                        let op = if let Some(packing) = &packing { op.packing(packing.clone()) } else { op };
                        op.apply(&to(&q)?, &to(&inputs.tensors[1])?, &to(&inputs.tensors[2])?)
                    };
                    let got = attend(settings.products(Products::Nvfp4), &super::device(), dtype)?;
                    guard::check(&super::gpu())?;
                    let references = [
                        attend(settings, &super::device(), dtype)?,
                        attend(settings, &Device::Cpu, DType::F32)?,
                    ];
                    for (worst, reference) in worst.iter_mut().zip(&references) {
                        let error = error(&got, reference)?;
                        let bound = if dtype == DType::BF16 { 8e-3 } else { 6e-3 };
                        assert!(
                            error < bound,
                            "{error}: {lens:?}, {heads:?}, {d}, {dtype:?}, {settings}, {causal}, {window:?}"
                        );
                        *worst = worst.max(error);
                    }
                }
            }
        }
    }
    println!("largest differences from 16-bit matmuls and from the CPU: {worst:?}");
    Ok(())
}

/// FP4 matmuls over selected blocks, compared with 16-bit matmuls.
#[test]
#[ignore = "needs a GPU of compute capability 9.0, 10.x or 12.x"]
fn fp4_products_take_lists() -> Result<()> {
    let (n, heads, d) = (640, 2, 64);
    let inputs = Inputs::new((n, n), (heads, heads), d, None, DType::BF16)?;
    let q = (&inputs.tensors[0] * 0.1)?;
    let [k, v] = [&inputs.tensors[1], &inputs.tensors[2]];
    let plain = Attention::new(AttnQat::default()).causal(true);
    let selection = Selection::window(&inputs.shape, (128, 128), 1, 1, &super::device())?;
    let dense = Attention::new(AttnQat::default().products(Products::Nvfp4)).causal(true);
    let got = dense.select(&selection).apply(&q, k, v)?;
    let expected = plain.clone().select(&selection).apply(&q, k, v)?;
    let all = plain.apply(&q, k, v)?;
    assert!(error(&got, &expected)? < 8e-3 && error(&all, &expected)? > 0.05);
    Ok(())
}

/// A NaN in a key reaches only the queries that see the key; the output of a query that sees no key is zero.
#[test]
#[ignore = "needs a GPU of compute capability 9.0, 10.x or 12.x"]
fn fp4_products_pass_on_what_is_not_a_number() -> Result<()> {
    let inputs = Inputs::new((130, 100), (1, 1), 64, None, DType::BF16)?;
    let mut keys: Vec<f32> = inputs.values[1].clone();
    keys[70 * 64 + 5] = f32::NAN;
    let k = Tensor::from_vec(keys, (1, 100, 1, 64), &Device::Cpu)?
        .to_dtype(DType::BF16)?
        .to_device(&super::device())?;
    let op = Attention::new(AttnQat::default().products(Products::Nvfp4)).causal(true);
    let out = op.apply(&inputs.tensors[0], &k, &inputs.tensors[2])?;
    let sums = out.to_dtype(DType::F32)?.sum(D::Minus1)?.flatten_all()?.to_vec1::<f32>()?;
    for (query, sum) in sums.into_iter().enumerate() {
        // Query i sees keys up to i - 30.
        assert_eq!(sum.is_nan(), query >= 100, "query {query}");
        assert!(query >= 30 || sum == 0.0, "query {query}");
    }
    assert!(nvfp4::Scale::of(f32::NAN).dequant.is_nan());
    Ok(())
}
