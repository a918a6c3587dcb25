//! RMSNorm and layer normalization.

use candle_core::{DType, Device, Result, Tensor};
use candle_sage::ops;

use super::Checked;
use crate::support::{Normals, f64s, relative_l2};

#[test]
fn layer_norm() -> Result<()> {
    let mut normals = Normals::new(2);
    for width in [3, 5, 64, 100] {
        let exact = |inputs: &[Vec<f64>]| {
            let (x, w, b) = (&inputs[0], &inputs[1], &inputs[2]);
            x.chunks_exact(width)
                .flat_map(|row| {
                    let mean = row.iter().sum::<f64>() / width as f64;
                    let square = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width as f64;
                    let r = 1.0 / (square + 1e-6).sqrt();
                    row.iter()
                        .zip(w)
                        .zip(b)
                        .map(move |((x, w), b)| (x - mean) * r * w + b)
                        .collect::<Vec<_>>()
                })
                .collect()
        };
        Checked {
            inputs: vec![
                (normals.vec(3 * width, 2.0), vec![1, 3, width]),
                (normals.vec(width, 1.0), vec![width]),
                (normals.vec(width, 1.0), vec![width]),
            ],
            op: &|vars| ops::layer_norm(&vars[0], &vars[1], &vars[2], 1e-6),
            exact: &exact,
        }
        .check(&format!("layer_norm of width {width}"))?;
    }
    Ok(())
}

/// A row's mean is subtracted before squares are summed. With a mean of a thousand standard deviations the only large
/// error is that of rounding the inputs: 2^-24 of the mean is 6e-5 of the standard deviation.
#[test]
fn layer_norm_of_a_large_mean_is_that_of_the_spread() -> Result<()> {
    let spread = Normals::new(3).vec(256, 1.0);
    let (one, zero) =
        (Tensor::ones(64, DType::F32, &Device::Cpu)?, Tensor::zeros(64, DType::F32, &Device::Cpu)?);
    let of = |mean: f32| -> Result<Vec<f64>> {
        let x: Vec<f32> = spread.iter().map(|x| x + mean).collect();
        let x = Tensor::from_vec(x, (4, 64), &Device::Cpu)?;
        Ok(f64s(&ops::layer_norm(&x, &one, &zero, 1e-6)?.flatten_all()?.to_vec1::<f32>()?))
    };
    assert!(relative_l2(&of(1000.0)?, &of(0.0)?) < 1e-4);
    Ok(())
}

#[test]
fn rms_norm() -> Result<()> {
    let mut normals = Normals::new(1);
    for width in [3, 5, 64, 100] {
        let exact = |inputs: &[Vec<f64>]| {
            let (x, w) = (&inputs[0], &inputs[1]);
            x.chunks_exact(width)
                .flat_map(|row| {
                    let r = 1.0 / (row.iter().map(|x| x * x).sum::<f64>() / width as f64 + 1e-6).sqrt();
                    row.iter().zip(w).map(move |(x, w)| x * r * w).collect::<Vec<_>>()
                })
                .collect()
        };
        Checked {
            inputs: vec![
                (normals.vec(3 * width, 2.0), vec![1, 3, width]),
                (normals.vec(width, 1.0), vec![width]),
            ],
            op: &|vars| ops::rms_norm(&vars[0], &vars[1], 1e-6),
            exact: &exact,
        }
        .check(&format!("rms_norm of width {width}"))?;
    }
    Ok(())
}

#[test]
fn rms_norm_of_huge_elements_does_not_overflow() -> Result<()> {
    let x = Tensor::new(&[[3e30f32, 4e30], [3.0, 4.0]], &Device::Cpu)?;
    let out = ops::rms_norm(&x, &Tensor::ones(2, DType::F32, &Device::Cpu)?, 1e-6)?.to_vec2::<f32>()?;
    for (a, b) in out[0].iter().zip(&out[1]) {
        assert!((a - b).abs() < 1e-6, "{out:?}");
    }
    let bad = Tensor::new(&[[f32::INFINITY, 1.0]], &Device::Cpu)?;
    let out = ops::rms_norm(&bad, &Tensor::ones(2, DType::F32, &Device::Cpu)?, 1e-6)?.to_vec2::<f32>()?;
    assert!(out[0][0].is_nan());
    Ok(())
}
