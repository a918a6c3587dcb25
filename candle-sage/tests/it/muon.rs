//! Muon compared with its definition in f64, and the singular values of its steps.

use candle_core::{DType, Device, Result, Tensor};
use candle_sage::ops::{Muon, MuonMatrix, MuonScale, Orthogonalization, sum_of_squares};

use crate::support::{Normals, f64s, relative_l2};

/// The published polynomials. Those of Polar Express include the division of their inputs by a safety factor.
fn polynomials(which: Orthogonalization) -> Vec<[f64; 3]> {
    let margin = 1.01f64;
    match which {
        Orthogonalization::Quintic => vec![[3.4445, -4.775, 2.0315]; 5],
        Orthogonalization::PolarExpress => [
            [8.28721201814563, -23.595886519098837, 17.300387312530933],
            [4.107059111542203, -2.9478499167379106, 0.5448431082926601],
            [3.9486908534822946, -2.908902115962949, 0.5518191394370137],
            [3.3184196573706015, -2.488488024314874, 0.51004894012372],
            [2.300652019954817, -1.6689039845747493, 0.4188073119525673],
        ]
        .iter()
        .zip([margin * margin, margin, margin, margin, 1.0])
        .map(|([a, b, c], m)| [a / m, b / m.powi(3), c / m.powi(5)])
        .collect(),
    }
}

/// Orthogonalizes a matrix in f64. It is divided by its norm; then, for each of five triples (a, b, c), `x` becomes
/// `x (a + b x^T x + c (x^T x)^2)`.
fn direction(x: &[f64], rows: usize, columns: usize, which: Orthogonalization) -> Result<Vec<f64>> {
    let norm = x.iter().map(|x| x * x).sum::<f64>().sqrt();
    let x: Vec<f64> = x.iter().map(|x| if norm > 0.0 { x / norm } else { 0.0 }).collect();
    let mut x = Tensor::from_vec(x, (rows, columns), &Device::Cpu)?;
    for [a, b, c] in polynomials(which) {
        let gram = x.t()?.matmul(&x)?;
        let sum = ((&gram * b)? + (gram.matmul(&gram)? * c)?)?;
        x = ((&x * a)? + x.matmul(&sum)?)?;
    }
    x.flatten_all()?.to_vec1()
}

fn settings(nesterov: bool, scale: MuonScale, orthogonalization: Orthogonalization) -> Muon {
    let mut muon = Muon::new(0.02);
    (muon.momentum, muon.nesterov, muon.scale) = (0.9, nesterov, scale);
    (muon.weight_decay, muon.gradient_factor, muon.clip) = (0.1, 0.5, Some(3.0));
    muon.orthogonalization = orthogonalization;
    muon
}

const MATRICES: [MuonMatrix; 5] = [
    MuonMatrix { at: 3, rows: 4, columns: 6 },
    MuonMatrix { at: 32, rows: 6, columns: 4 },
    MuonMatrix { at: 64, rows: 1, columns: 16 },
    MuonMatrix { at: 80, rows: 16, columns: 1 },
    MuonMatrix { at: 100, rows: 4, columns: 6 },
];
const PARAMETERS: usize = 130;

/// Compares three steps in f32 with the definition in f64. Polar Express multiplies rounding errors of 2^-24 by at most
/// 8.3 * 4.1 * 3.9 * 3.3 * 2.3, about 2^10: less than 1e-4 of a step. The steps change the weights by less than a
/// tenth, so the weights' error is below 1e-5. Parameters before the first of `MATRICES` do not change.
#[test]
fn follows_the_definition() -> Result<()> {
    for nesterov in [true, false] {
        for scale in [MuonScale::AdamW, MuonScale::Original] {
            for which in [Orthogonalization::PolarExpress, Orthogonalization::Quintic] {
                let muon = settings(nesterov, scale, which);
                let mut normals = Normals::new(29);
                let start = normals.vec(PARAMETERS, 1.0);
                let state = [start.clone(), vec![0.0; PARAMETERS]].concat();
                let state = Tensor::from_vec(state, (2, PARAMETERS), &Device::Cpu)?;
                let mut weights: Vec<f64> = start.iter().map(|&x| f64::from(x)).collect();
                let mut momentum = vec![0.0; PARAMETERS];
                for _ in 0..3 {
                    let gradient = normals.vec(PARAMETERS, 1.0);
                    let tensor = Tensor::new(&*gradient, &Device::Cpu)?;
                    muon.step(&state, &tensor, &sum_of_squares(&tensor)?, &MATRICES, None, None)?;
                    let norm = 0.5 * gradient.iter().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
                    for MuonMatrix { at, rows, columns } in MATRICES {
                        let here = at..at + rows * columns;
                        let mut ahead = Vec::new();
                        for (m, g) in momentum[here.clone()].iter_mut().zip(&gradient[here.clone()]) {
                            let g = 0.1 * 0.5 * f64::from(*g) * (3.0 / norm).min(1.0);
                            *m = 0.9 * *m + g;
                            ahead.push(if nesterov { 0.9 * *m + g } else { *m });
                        }
                        let (long, wide) = (rows as f64, columns as f64);
                        let length = match scale {
                            MuonScale::AdamW => 0.2 * long.max(wide).sqrt(),
                            MuonScale::Original => (long / wide).max(1.0).sqrt(),
                        };
                        let direction = direction(&ahead, rows, columns, which)?;
                        for (w, d) in weights[here].iter_mut().zip(direction) {
                            *w = (1.0 - 0.02 * 0.1) * *w - 0.02 * length * d;
                        }
                    }
                }
                let got = state.to_vec2::<f32>()?;
                for (n, expected) in [weights, momentum].into_iter().enumerate() {
                    let got: Vec<f64> = got[n].iter().map(|&x| f64::from(x)).collect();
                    assert!(relative_l2(&got, &expected) < 1e-5, "{nesterov} {scale:?} {which:?}");
                    assert_eq!(got[..3], expected[..3]);
                }
            }
        }
    }
    Ok(())
}

/// Compares NorMuon with its definition in f64: each row of a matrix's step is divided by the root of the row's running
/// mean square, then the step is scaled to the norm that it had before the division.
#[test]
fn rows_are_normalized() -> Result<()> {
    let mut muon = Muon::new(1.0);
    (muon.momentum, muon.beta2, muon.scale) = (0.5, Some(0.75), MuonScale::Original);
    let rows: usize = MATRICES.iter().map(|matrix| matrix.rows).sum();
    let mean_squares = Tensor::zeros(rows, DType::F32, &Device::Cpu)?;
    let (mut expected, mut momentum) = (vec![0.0; rows], vec![0.0; PARAMETERS]);
    let mut normals = Normals::new(43);
    let state = Tensor::zeros((2, PARAMETERS), DType::F32, &Device::Cpu)?;
    for _ in 0..3 {
        let before = f64s(&state.get(0)?.to_vec1::<f32>()?);
        // Rows of different sizes.
        let gradient: Vec<f32> =
            normals.vec(PARAMETERS, 1.0).iter().enumerate().map(|(n, x)| x * (1 + n % 7) as f32).collect();
        let tensor = Tensor::new(&*gradient, &Device::Cpu)?;
        muon.step(&state, &tensor, &sum_of_squares(&tensor)?, &MATRICES, Some(&mean_squares), None)?;
        let after = f64s(&state.get(0)?.to_vec1::<f32>()?);
        let mut first = 0;
        for MuonMatrix { at, rows, columns } in MATRICES {
            let here = at..at + rows * columns;
            let mut ahead = Vec::new();
            for (m, &g) in momentum[here.clone()].iter_mut().zip(&gradient[here.clone()]) {
                *m = 0.5 * *m + 0.5 * f64::from(g);
                ahead.push(0.5 * *m + 0.5 * f64::from(g));
            }
            let direction = direction(&ahead, rows, columns, Orthogonalization::PolarExpress)?;
            let length = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>();
            let mut divided = direction.clone();
            for (row, mean) in divided.chunks_mut(columns).zip(&mut expected[first..]) {
                *mean = 0.75 * *mean + 0.25 * length(row) / columns as f64;
                row.iter_mut().for_each(|x| *x /= mean.sqrt());
            }
            let factor = (length(&direction) / length(&divided)).sqrt()
                * (rows as f64 / columns as f64).max(1.0).sqrt();
            let moved: Vec<f64> = before[here.clone()].iter().zip(&after[here]).map(|(a, b)| a - b).collect();
            let expected: Vec<f64> = divided.iter().map(|x| x * factor).collect();
            // The comment on `follows_the_definition` derives 1e-4.
            assert!(relative_l2(&moved, &expected) < 1e-4, "{rows} x {columns}");
            first += rows;
        }
        assert!(relative_l2(&f64s(&mean_squares.to_vec1::<f32>()?), &expected) < 1e-4);
    }
    let kept = mean_squares.to_vec1::<f32>()?;
    let bad = Tensor::full(f32::NAN, PARAMETERS, &Device::Cpu)?;
    muon.step(&state, &bad, &sum_of_squares(&bad)?, &MATRICES, Some(&mean_squares), None)?;
    assert_eq!(mean_squares.to_vec1::<f32>()?, kept);
    Ok(())
}

/// Singular values from .003 to 1 times the matrix's Frobenius norm become .84 to 1.13 with Polar Express, and .68 to
/// 1.21 with the quintic polynomial, whatever the norm.
#[test]
fn singular_values_come_close_to_one() -> Result<()> {
    let values: [f32; 6] = [1.0, -0.3, 0.1, 0.03, 0.01, 0.0035];
    for (which, least, most) in
        [(Orthogonalization::PolarExpress, 0.84, 1.13), (Orthogonalization::Quintic, 0.68, 1.21)]
    {
        for (rows, columns, norm) in [
            (6, 8, 1.0),
            (8, 6, 1e-20),
            (6, 6, 1e9),
            (6, 8, 1e-24),
            (6, 24, 1.0),
            (18, 6, 1e-20),
            (6, 12, 1e9),
        ] {
            let mut gradient = vec![0f32; rows * columns];
            for (n, value) in values.iter().enumerate() {
                gradient[n * columns + n] = *value * norm;
            }
            let mut muon = Muon::new(1.0);
            (muon.scale, muon.orthogonalization) = (MuonScale::Original, which);
            let state = Tensor::zeros((2, rows * columns), DType::F32, &Device::Cpu)?;
            let gradient = Tensor::from_vec(gradient, rows * columns, &Device::Cpu)?;
            let matrices = [MuonMatrix { at: 0, rows, columns }];
            muon.step(&state, &gradient, &sum_of_squares(&gradient)?, &matrices, None, None)?;
            let step = state.get(0)?.to_vec1::<f32>()?;
            let length = (rows as f32 / columns as f32).max(1.0).sqrt();
            for (n, value) in values.iter().enumerate() {
                let size = -step[n * columns + n] / length * value.signum();
                assert!((least..most).contains(&size), "{which:?}, {value}: {size}");
            }
        }
    }
    Ok(())
}

/// Zero gradients only decay weights; a non-finite gradient changes nothing; invalid arguments are errors.
#[test]
fn zeros_and_bad_gradients() -> Result<()> {
    let muon = settings(true, MuonScale::AdamW, Orthogonalization::PolarExpress);
    let matrices = [MuonMatrix { at: 0, rows: 2, columns: 3 }];
    let state = || Tensor::from_vec([vec![1f32; 6], vec![0.0; 6]].concat(), (2, 6), &Device::Cpu);
    let zeros = Tensor::zeros(6, DType::F32, &Device::Cpu)?;
    let decayed = state()?;
    muon.step(&decayed, &zeros, &sum_of_squares(&zeros)?, &matrices, None, None)?;
    assert_eq!(decayed.to_vec2::<f32>()?, [vec![0.998; 6], vec![0.0; 6]]);
    for bad in [f32::NAN, f32::INFINITY] {
        let gradient = Tensor::new(&[1f32, bad, 0., 0., 0., 0.], &Device::Cpu)?;
        let same = state()?;
        muon.step(&same, &gradient, &sum_of_squares(&gradient)?, &matrices, None, None)?;
        assert_eq!(same.to_vec2::<f32>()?, state()?.to_vec2::<f32>()?);
    }
    let [mut wrong, mut rows, mut odd] = [muon; 3];
    wrong.momentum = 1.0;
    (rows.beta2, odd.beta2) = (Some(0.9), Some(1.0));
    let sum = sum_of_squares(&zeros)?;
    let at = |at| MuonMatrix { at, rows: 2, columns: 2 };
    for (error, part) in [
        (muon.step(&state()?, &zeros, &sum, &[at(3)], None, None), "overlaps the next part"),
        (muon.step(&state()?, &zeros, &sum, &[at(2), at(0), at(1)], None, None), "overlaps the next part"),
        (muon.step(&zeros, &zeros, &sum, &[at(0)], None, None), "do not fit together"),
        (wrong.step(&state()?, &zeros, &sum, &[at(0)], None, None), "the momentum is out of range"),
        (rows.step(&state()?, &zeros, &sum, &[at(0)], None, None), "the mean squares of rows do not fit"),
        (
            rows.step(&state()?, &zeros, &sum, &[at(0)], Some(&zeros), None),
            "the mean squares of rows do not fit",
        ),
        (odd.step(&state()?, &zeros, &sum, &[at(0)], Some(&zeros), None), "beta2 is out of range"),
        // On a CPU, `copy` must be `None`, and `directions` must be f32.
        (muon.step(&state()?, &zeros, &sum, &[at(0)], None, Some(&zeros)), "do not fit together"),
        (
            muon.apply(&state()?, &zeros.to_dtype(DType::BF16)?, &sum, &[], None),
            "directions have the wrong type",
        ),
        (muon.apply(&state()?, &zeros.reshape((2, 3))?, &sum, &[], None), "directions have the wrong type"),
        (muon.apply(&state()?.to_dtype(DType::F64)?, &zeros, &sum, &[], None), "do not fit together"),
    ] {
        let error = error.expect_err(part).to_string();
        assert!(error.contains(part) && error.contains("hint:"), "{error}");
    }
    Ok(())
}
