//! Muon on a GPU, compared with the CPU.

use candle_core::{DType, Device, Result, Tensor};
use candle_sage::ops::{Muon, MuonMatrix, Orthogonalization, sum_of_squares};

use crate::support::{Normals, f64s, gpu, relative_l2};

/// On a GPU, matrices are orthogonalized in bf16. Orthogonalization maps each singular value to a number near 1. bf16's
/// rounding errors may change this number by up to a quarter. The allowed relative L2 error of an update is 25 % for a
/// matrix with one singular value, and 8 % for a matrix with many. The momenta of GPU and CPU differ only by f32
/// roundings.
#[test]
#[ignore = "needs a GPU"]
fn muon_is_that_of_the_cpu() -> Result<()> {
    let shapes = [(64, 192), (192, 64), (64, 64), (64, 64), (64, 64), (8, 1), (1, 8), (256, 1024)];
    // Number of elements between each matrix and the next.
    let gaps = [16, 0, 0, 0, 16, 0, 16, 16];
    let matrices: Vec<MuonMatrix> = shapes
        .into_iter()
        .zip(gaps)
        .scan(16, |at, ((rows, columns), gap)| {
            let matrix = MuonMatrix { at: *at, rows, columns };
            *at += rows * columns + gap;
            Some(matrix)
        })
        .collect();
    let len = matrices.last().map_or(0, |last| last.at + last.rows * last.columns + 16);
    for which in [Orthogonalization::PolarExpress, Orthogonalization::Quintic] {
        let mut normals = Normals::new(31);
        let mut muon = Muon::new(0.02);
        (muon.weight_decay, muon.clip, muon.orthogonalization) = (0.1, Some(1.0), which);
        let state =
            Tensor::from_vec([normals.vec(len, 1.0), vec![0.0; len]].concat(), (2, len), &Device::Cpu)?;
        let first = state.get(0)?.to_vec1::<f32>()?;
        let on_gpu = state.to_device(&gpu())?;
        for copies in [None, Some(DType::BF16), Some(DType::F16)] {
            let gradient = Tensor::from_vec(normals.vec(len, 1.0), len, &Device::Cpu)?;
            muon.step(&state, &gradient, &sum_of_squares(&gradient)?, &matrices, None, None)?;
            let there = gradient.to_device(&gpu())?;
            let copy = copies.map(|dtype| Tensor::zeros(len, dtype, &gpu())).transpose()?;
            muon.step(&on_gpu, &there, &sum_of_squares(&there)?, &matrices, None, copy.as_ref())?;
            let (got, expected) = (on_gpu.to_vec2::<f32>()?, state.to_vec2::<f32>()?);
            for matrix in &matrices {
                let here = matrix.at..matrix.at + matrix.rows * matrix.columns;
                let moved = |all: &[f32]| -> Vec<f64> {
                    all[here.clone()]
                        .iter()
                        .zip(&first[here.clone()])
                        .map(|(a, b)| f64::from(a - b))
                        .collect()
                };
                let error = relative_l2(&moved(&got[0]), &moved(&expected[0]));
                println!("{which:?} {} x {}: {error:.1e}", matrix.rows, matrix.columns);
                let limit = if matrix.rows.min(matrix.columns) == 1 { 0.25 } else { 0.08 };
                assert!(error < limit, "{which:?} {matrix:?}: {error:.1e}");
                if let Some(copy) = &copy {
                    let copy = copy.to_dtype(DType::F32)?.to_vec1::<f32>()?;
                    let error = relative_l2(&f64s(&copy[here.clone()]), &f64s(&got[0][here]));
                    assert!(error < 2f64.powi(-8), "{error:.1e}");
                }
            }
            assert!(relative_l2(&f64s(&got[1]), &f64s(&expected[1])) < 1e-6, "the momentum");
            assert_eq!(got[0][..16], expected[0][..16], "nothing else changes");
        }
        // A second run is bit-identical, and a non-finite gradient changes nothing.
        let again = || -> Result<Vec<Vec<f32>>> {
            let state = state.to_device(&gpu())?;
            let gradient = Tensor::from_vec(Normals::new(37).vec(len, 1.0), len, &gpu())?;
            muon.step(&state, &gradient, &sum_of_squares(&gradient)?, &matrices, None, None)?;
            state.to_vec2()
        };
        assert_eq!(again()?, again()?);
        let bad = Tensor::full(f32::INFINITY, len, &gpu())?;
        let before = on_gpu.to_vec2::<f32>()?;
        muon.step(&on_gpu, &bad, &sum_of_squares(&bad)?, &matrices, None, None)?;
        assert_eq!(on_gpu.to_vec2::<f32>()?, before);
    }
    // Tiny and huge gradients are orthogonalized like gradients of usual size. If a gradient's sum of squares
    // overflows or is zero, the weights do not change.
    let matrix = [MuonMatrix { at: 0, rows: 64, columns: 64 }];
    let gradient = Tensor::from_vec(Normals::new(41).vec(4096, 1.0), 4096, &gpu())?;
    let step = |norm: f64| -> Result<Vec<f64>> {
        let state = Tensor::zeros((2, 4096), DType::F32, &gpu())?;
        let gradient = (&gradient * norm)?;
        Muon::new(1.0).step(&state, &gradient, &sum_of_squares(&gradient)?, &matrix, None, None)?;
        Ok(f64s(&state.get(0)?.to_vec1::<f32>()?))
    };
    let usual = step(1.0)?;
    for norm in [2f64.powi(-60), 2f64.powi(-76), 2f64.powi(30)] {
        assert!(relative_l2(&step(norm)?, &usual) < 0.08, "{norm:e}");
    }
    assert!(step(1e30)?.iter().chain(&step(0.0)?).all(|moved| *moved == 0.0));
    Ok(())
}

/// Row normalization of Muon's update directions: bf16 on a GPU, compared with f32 on the CPU. The limits allow for
/// the rounding of directions to bf16. The running mean squares are f32 on both devices.
#[test]
#[ignore = "needs a GPU"]
fn rows_are_normalized_as_on_the_cpu() -> Result<()> {
    let shapes = [(64, 200), (64, 200), (3, 8), (1, 1024), (1000, 8)];
    let (rows, len) = shapes.iter().fold((0, 0), |(rows, len), (r, c)| (rows + r, len + r * c));
    let mut muon = Muon::new(0.02);
    muon.beta2 = Some(0.9);
    let means = Tensor::from_vec(Normals::new(47).vec(rows, 1.0), rows, &Device::Cpu)?.sqr()?;
    let on_gpu = means.to_device(&gpu())?;
    let x = Tensor::from_vec(Normals::new(53).vec(len, 1.0), len, &Device::Cpu)?.to_dtype(DType::BF16)?;
    let expected = x.to_dtype(DType::F32)?;
    for (finite, sum) in [(true, 1.0), (false, f64::NAN)] {
        let kept = on_gpu.to_vec1::<f32>()?;
        let got = x.to_device(&gpu())?;
        muon.normalize_rows(&got, &Tensor::new(sum, &gpu())?, &shapes, Some(&on_gpu))?;
        if finite {
            muon.normalize_rows(&expected, &Tensor::new(sum, &Device::Cpu)?, &shapes, Some(&means))?;
            let got = got.to_dtype(DType::F32)?.to_vec1::<f32>()?;
            let error = relative_l2(&f64s(&got), &f64s(&expected.to_vec1::<f32>()?));
            assert!(error < 2f64.powi(-9), "{error:.1e}");
            let error = relative_l2(&f64s(&on_gpu.to_vec1::<f32>()?), &f64s(&means.to_vec1::<f32>()?));
            assert!(error < 1e-5, "{error:.1e}");
        } else {
            assert_eq!(on_gpu.to_vec1::<f32>()?, kept);
        }
    }
    Ok(())
}
