//! Each operator against plain f64 arithmetic, its gradients against central differences of that.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_sage::ops::{self, CrossEntropy, RopeStyle};

use crate::support::{Normals, f64s, relative_l2};

/// f32 sums of at most 200 terms: sqrt(200) 2^-24 = 8e-7, doubled for the two passes of a gradient.
const F32: f64 = 2e-6;

struct Checked<'a> {
    /// Differentiable inputs.
    inputs: Vec<(Vec<f32>, Vec<usize>)>,
    op: &'a dyn Fn(&[Var]) -> Result<Tensor>,
    exact: &'a dyn Fn(&[Vec<f64>]) -> Vec<f64>,
}

impl Checked<'_> {
    /// Compares output and gradients of `sum(out o direction)`.
    fn check(&self, name: &str) -> Result<()> {
        let vars = self
            .inputs
            .iter()
            .map(|(values, dims)| Var::from_vec(values.clone(), dims.as_slice(), &Device::Cpu))
            .collect::<Result<Vec<_>>>()?;
        let out = (self.op)(&vars)?;
        let mut inputs: Vec<Vec<f64>> = self.inputs.iter().map(|(values, _)| f64s(values)).collect();
        let direction = Normals::new(99).vec(out.elem_count(), 1.0);
        let error = relative_l2(&f64s(&out.flatten_all()?.to_vec1()?), &(self.exact)(&inputs));
        assert!(error < F32, "{name}: output off by {error:e}");

        let weighted = (&out * Tensor::from_slice(&direction, out.dims(), &Device::Cpu)?)?;
        let grads = weighted.sum_all()?.backward()?;
        for n in 0..inputs.len() {
            let expected: Vec<f64> = (0..inputs[n].len())
                .map(|at| {
                    const STEP: f64 = 1e-5;
                    let x = inputs[n][at];
                    let mut loss = |x| {
                        inputs[n][at] = x;
                        let out = (self.exact)(&inputs);
                        out.iter().zip(&direction).map(|(o, d)| o * f64::from(*d)).sum::<f64>()
                    };
                    let slope = (loss(x + STEP) - loss(x - STEP)) / (2.0 * STEP);
                    loss(x);
                    slope
                })
                .collect();
            let got = grads.get(&vars[n]).expect("a gradient").flatten_all()?.to_vec1::<f32>()?;
            let error = relative_l2(&f64s(&got), &expected);
            assert!(error < F32, "{name}: gradient {n} off by {error:e}");
        }
        Ok(())
    }
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
fn swiglu() -> Result<()> {
    let mut normals = Normals::new(2);
    let dims = vec![7, 9];
    Checked {
        inputs: vec![(normals.vec(63, 3.0), dims.clone()), (normals.vec(63, 1.0), dims)],
        op: &|vars| ops::swiglu(&vars[0], &vars[1]),
        exact: &|inputs| inputs[0].iter().zip(&inputs[1]).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect(),
    }
    .check("swiglu")
}

#[test]
fn swiglu_saturates_without_nan() -> Result<()> {
    let gate = Var::from_slice(&[-1e30f32, -200.0, 200.0, 1e30], 4, &Device::Cpu)?;
    let up = Var::ones(4, DType::F32, &Device::Cpu)?;
    let out = ops::swiglu(&gate, &up)?;
    let values = out.to_vec1::<f32>()?;
    assert!(values[0].abs() < 1e-6 && values[1].abs() < 1e-6, "{values:?}");
    assert_eq!(values[2..], [200.0, 1e30]);
    let grads = out.sum_all()?.backward()?;
    assert!(grads.get(&gate).expect("a gradient").to_vec1::<f32>()?.iter().all(|x| x.is_finite()));
    Ok(())
}

#[test]
fn rope() -> Result<()> {
    let (sequence, heads, d) = (5, 3, 8);
    let mut normals = Normals::new(3);
    for style in [RopeStyle::Halves, RopeStyle::Interleaved] {
        let (cos, sin) = ops::rope_tables(sequence, d, 100.0, &Device::Cpu)?;
        let exact = |inputs: &[Vec<f64>]| {
            let mut out = inputs[0].clone();
            for (n, (out, x)) in out.chunks_exact_mut(d).zip(inputs[0].chunks_exact(d)).enumerate() {
                let position = n / heads % sequence;
                for i in 0..d / 2 {
                    let angle = position as f64 * 100f64.powf(-2.0 * i as f64 / d as f64);
                    let (p, q) = if style == RopeStyle::Halves { (i, i + d / 2) } else { (2 * i, 2 * i + 1) };
                    out[p] = x[p] * angle.cos() - x[q] * angle.sin();
                    out[q] = x[p] * angle.sin() + x[q] * angle.cos();
                }
            }
            out
        };
        Checked {
            inputs: vec![(normals.vec(2 * sequence * heads * d, 1.0), vec![2, sequence, heads, d])],
            op: &|vars| ops::rope(&vars[0], &cos, &sin, style),
            exact: &exact,
        }
        .check(&format!("rope {style:?}"))?;
    }
    Ok(())
}

#[test]
fn embedding_sums_repeated_ids() -> Result<()> {
    let mut normals = Normals::new(4);
    let ids = Tensor::from_slice(&[3u32, 0, 3, 3, 1, 0], (2, 3), &Device::Cpu)?;
    Checked {
        inputs: vec![(normals.vec(5 * 4, 1.0), vec![5, 4])],
        op: &|vars| ops::embedding(&vars[0], &ids),
        exact: &|inputs| {
            [3, 0, 3, 3, 1, 0].iter().flat_map(|&id| inputs[0][id * 4..id * 4 + 4].to_vec()).collect()
        },
    }
    .check("embedding")
}

fn exact_cross_entropy(logits: &[f64], classes: usize, targets: &[Option<usize>]) -> Vec<f64> {
    let losses = logits.chunks_exact(classes).zip(targets).filter_map(|(row, target)| {
        let lse = row.iter().map(|x| x.exp()).sum::<f64>().ln();
        target.map(|t| lse - row[t])
    });
    vec![losses.sum::<f64>() / targets.iter().flatten().count() as f64]
}

#[test]
fn cross_entropy() -> Result<()> {
    let classes = 19;
    let targets = Tensor::from_slice(&[4u32, 18, 7, 0, 7], 5, &Device::Cpu)?;
    for ignore_id in [None, Some(7)] {
        let settings = CrossEntropy { ignore_id, ..Default::default() };
        let counted: Vec<Option<usize>> =
            [4, 18, 7, 0, 7].into_iter().map(|t| (ignore_id != Some(t as u32)).then_some(t)).collect();
        Checked {
            inputs: vec![(Normals::new(5).vec(5 * classes, 2.0), vec![5, classes])],
            op: &|vars| ops::cross_entropy(&vars[0], &targets, settings),
            exact: &|inputs| exact_cross_entropy(&inputs[0], classes, &counted),
        }
        .check("cross_entropy")?;
    }
    Ok(())
}

#[test]
fn linear_cross_entropy_in_any_chunks() -> Result<()> {
    let (rows, width, classes) = (7, 6, 11);
    let ids = [4usize, 10, 7, 0, 7, 2, 2];
    let targets = Tensor::from_slice(&ids.map(|id| id as i64), rows, &Device::Cpu)?;
    for (chunk_rows, ignore_id) in [(None, None), (Some(1), None), (Some(3), Some(2)), (Some(100), None)] {
        let settings = CrossEntropy { ignore_id, chunk_rows };
        let counted: Vec<Option<usize>> =
            ids.into_iter().map(|t| (ignore_id != Some(t as u32)).then_some(t)).collect();
        let mut normals = Normals::new(6);
        Checked {
            inputs: vec![
                (normals.vec(rows * width, 1.0), vec![rows, width]),
                (normals.vec(classes * width, 1.0), vec![classes, width]),
            ],
            op: &|vars| ops::linear_cross_entropy(&vars[0], &vars[1], &targets, settings),
            exact: &|inputs| {
                let logits: Vec<f64> = inputs[0]
                    .chunks_exact(width)
                    .flat_map(|h| {
                        inputs[1]
                            .chunks_exact(width)
                            .map(|w| h.iter().zip(w).map(|(a, b)| a * b).sum::<f64>())
                    })
                    .collect();
                exact_cross_entropy(&logits, classes, &counted)
            },
        }
        .check(&format!("linear_cross_entropy in chunks of {chunk_rows:?}"))?;
    }
    Ok(())
}

#[test]
fn sixteen_bit_and_strided_inputs() -> Result<()> {
    let x = Tensor::randn(0f32, 1., (4, 6, 10), &Device::Cpu)?.to_dtype(DType::BF16)?;
    let w = Tensor::ones(6, DType::BF16, &Device::Cpu)?;
    let turned = Var::from_tensor(&x)?;
    let out = ops::rms_norm(&turned.transpose(1, 2)?, &w, 1e-6)?;
    assert_eq!((out.dtype(), out.dims()), (DType::BF16, [4, 10, 6].as_slice()));
    let straight = ops::rms_norm(&x.transpose(1, 2)?.contiguous()?, &w, 1e-6)?;
    let values = |t: &Tensor| t.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
    assert_eq!(values(&out)?, values(&straight)?);
    let grads = out.sum_all()?.backward()?;
    let grad = grads.get(&turned).expect("a gradient");
    assert_eq!((grad.dtype(), grad.dims()), (DType::BF16, [4, 6, 10].as_slice()));
    Ok(())
}

#[test]
fn ops_do_not_depend_on_the_number_of_threads() -> Result<()> {
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
        pool.install(|| -> Result<Vec<Vec<f32>>> {
            let mut normals = Normals::new(8);
            let mut var =
                |dims: &[usize]| Var::from_vec(normals.vec(dims.iter().product(), 1.0), dims, &Device::Cpu);
            let (table, weight, norm) = (var(&[300, 96])?, var(&[500, 96])?, var(&[96])?);
            let ids: Vec<u32> = (0..2000).map(|n| n * 7919 % 300).collect();
            let hidden = ops::rms_norm(
                &ops::embedding(&table, &Tensor::new(ids.as_slice(), &Device::Cpu)?)?,
                &norm,
                1e-6,
            )?;
            let hidden = ops::swiglu(&hidden, &hidden)?;
            let settings = CrossEntropy { chunk_rows: Some(600), ..Default::default() };
            let targets = Tensor::new(ids.as_slice(), &Device::Cpu)?;
            let loss = ops::linear_cross_entropy(&hidden, &weight, &targets, settings)?;
            let grads = loss.backward()?;
            let mut all = vec![vec![loss.to_scalar::<f32>()?]];
            for var in [&table, &weight, &norm] {
                all.push(grads.get(var).expect("a gradient").flatten_all()?.to_vec1()?);
            }
            Ok(all)
        })
    };
    let one = run(1)?;
    for threads in [2, 5] {
        assert!(one == run(threads)?, "{threads} threads give other bits");
    }
    Ok(())
}
