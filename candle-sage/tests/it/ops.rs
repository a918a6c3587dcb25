//! Each operator compared with plain f64 arithmetic, and its gradients with central differences of the f64 result.

mod norms;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_sage::ops::{self, CrossEntropy, RopeStyle};

use crate::support::{Normals, f64s, relative_l2};

/// Limit of relative errors. An f32 sum of 200 terms is off by sqrt(200) * 2^-24 = 8e-7. In a gradient, the errors of
/// forward and backward add up.
const F32: f64 = 2e-6;

struct Checked<'a> {
    /// Differentiable inputs.
    inputs: Vec<(Vec<f32>, Vec<usize>)>,
    op: &'a dyn Fn(&[Var]) -> Result<Tensor>,
    exact: &'a dyn Fn(&[Vec<f64>]) -> Vec<f64>,
}

impl Checked<'_> {
    /// Compares the output with `exact`, and the gradients of `sum(out * direction)` with central differences.
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
    let gate = Var::from_slice(&[-1e30f32, -200.0, 200.0, 1e30, f32::MIN], 5, &Device::Cpu)?;
    let up = Var::ones(5, DType::F32, &Device::Cpu)?;
    let out = ops::swiglu(&gate, &up)?;
    let values = out.to_vec1::<f32>()?;
    assert_eq!(values, [0.0, 0.0, 200.0, 1e30, 0.0]);
    let grads = out.sum_all()?.backward()?;
    assert_eq!(grads.get(&gate).expect("a gradient").to_vec1::<f32>()?, [0.0, 0.0, 1.0, 1.0, 0.0]);
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
fn qk_norm_rope() -> Result<()> {
    let (sequence, heads) = (4, 3);
    let mut normals = Normals::new(15);
    for (d, style) in [(8, RopeStyle::Halves), (8, RopeStyle::Interleaved), (2, RopeStyle::Halves)] {
        let (cos, sin) = ops::rope_tables(sequence, d, 100.0, &Device::Cpu)?;
        let exact = |inputs: &[Vec<f64>]| {
            let (x, w) = (&inputs[0], &inputs[1]);
            let mut out = x.clone();
            for (n, (out, x)) in out.chunks_exact_mut(d).zip(x.chunks_exact(d)).enumerate() {
                let r = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / d as f64 + 1e-6).sqrt();
                let y: Vec<f64> = x.iter().zip(w).map(|(x, w)| x * r * w).collect();
                for i in 0..d / 2 {
                    let angle = (n / heads % sequence) as f64 * 100f64.powf(-2.0 * i as f64 / d as f64);
                    let (p, q) = if style == RopeStyle::Halves { (i, i + d / 2) } else { (2 * i, 2 * i + 1) };
                    out[p] = y[p] * angle.cos() - y[q] * angle.sin();
                    out[q] = y[p] * angle.sin() + y[q] * angle.cos();
                }
            }
            out
        };
        let x = normals.vec(2 * sequence * heads * d, 2.0);
        let weight = normals.vec(d, 1.0);
        let dims = vec![2, sequence, heads, d];
        Checked {
            inputs: vec![(x.clone(), dims.clone()), (weight.clone(), vec![d])],
            op: &|vars| ops::qk_norm_rope(&vars[0], &vars[1], &cos, &sin, 1e-6, style),
            exact: &exact,
        }
        .check(&format!("qk_norm_rope of {d} channels, {style:?}"))?;

        // In f32 nothing is rounded between the two ops, so results are bit-identical.
        let x = Tensor::from_vec(x, dims, &Device::Cpu)?;
        let weight = Tensor::from_vec(weight, d, &Device::Cpu)?;
        let fused = ops::qk_norm_rope(&x, &weight, &cos, &sin, 1e-6, style)?;
        let apart = ops::rope(&ops::rms_norm(&x, &weight, 1e-6)?, &cos, &sin, style)?;
        let values = |t: &Tensor| t.flatten_all()?.to_vec1::<f32>();
        assert_eq!(values(&fused)?, values(&apart)?);
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

fn exact_cross_entropy(logits: &[f64], classes: usize, targets: &[Option<usize>], z_loss: f32) -> Vec<f64> {
    let losses = logits.chunks_exact(classes).zip(targets).filter_map(|(row, target)| {
        let lse = row.iter().map(|x| x.exp()).sum::<f64>().ln();
        target.map(|t| lse - row[t] + f64::from(z_loss) * lse * lse)
    });
    vec![losses.sum::<f64>() / targets.iter().flatten().count() as f64]
}

#[test]
fn cross_entropy() -> Result<()> {
    let targets = Tensor::from_slice(&[4u32, 18, 7, 0, 7], 5, &Device::Cpu)?;
    // The log-sum-exp has chunks of 256 classes, so 300 classes need two.
    for (classes, ignore_id, z_loss) in
        [(19, None, 0.0), (19, Some(7), 0.0), (300, None, 0.0), (19, None, 0.1), (300, Some(7), 0.01)]
    {
        let settings = CrossEntropy::default().ignore_id(ignore_id).z_loss(z_loss);
        let counted: Vec<Option<usize>> =
            [4, 18, 7, 0, 7].into_iter().map(|t| (ignore_id != Some(t as i64)).then_some(t)).collect();
        Checked {
            inputs: vec![(Normals::new(5).vec(5 * classes, 2.0), vec![5, classes])],
            op: &|vars| ops::cross_entropy(&vars[0], &targets, settings),
            exact: &|inputs| exact_cross_entropy(&inputs[0], classes, &counted, z_loss),
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
    for (chunk_rows, ignore_id, z_loss) in [
        (None, None, 0.0),
        (Some(1), None, 0.0),
        (Some(3), Some(2), 0.0),
        (Some(100), None, 0.0),
        (None, None, 0.1),
        (Some(3), Some(2), 0.01),
    ] {
        let settings = CrossEntropy::default().ignore_id(ignore_id).chunk_rows(chunk_rows).z_loss(z_loss);
        let counted: Vec<Option<usize>> =
            ids.into_iter().map(|t| (ignore_id != Some(t as i64)).then_some(t)).collect();
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
                exact_cross_entropy(&logits, classes, &counted, z_loss)
            },
        }
        .check(&format!("linear_cross_entropy in chunks of {chunk_rows:?}"))?;
    }
    Ok(())
}

/// For a large input, which several threads process, an operation's output equals the concatenated outputs for parts
/// of the input. The weight's gradient is the sum of its gradients for the parts.
#[test]
fn large_inputs_are_the_sum_of_their_parts() -> Result<()> {
    const PARTS: usize = 4;
    let (rows, width) = (200, 96);
    let mut normals = Normals::new(12);
    let mut tensor =
        |dims: &[usize]| Tensor::from_vec(normals.vec(dims.iter().product(), 1.0), dims, &Device::Cpu);
    let (x, y) = (tensor(&[PARTS * rows, width])?, tensor(&[PARTS * rows, width])?);
    let direction = tensor(&[PARTS * rows, width])?;
    let (weight, table) = (tensor(&[width])?, tensor(&[500, width])?);
    let ids: Vec<u32> = (0..(PARTS * rows) as u32).map(|n| n * 7919 % 500).collect();
    let ids = Tensor::new(ids, &Device::Cpu)?;

    type Op<'a> = &'a dyn Fn(&Tensor, &Tensor, &Tensor, &Tensor) -> Result<Tensor>;
    let ops: [(&str, &Tensor, Op<'_>); 5] = [
        ("rms_norm", &weight, &|x, _, _, shared| ops::rms_norm(x, shared, 1e-6)),
        ("layer_norm's weight", &weight, &|x, _, _, shared| ops::layer_norm(x, shared, &weight, 1e-6)),
        ("layer_norm's bias", &weight, &|x, _, _, shared| ops::layer_norm(x, &weight, shared, 1e-6)),
        ("swiglu", &weight, &|x, y, _, shared| ops::swiglu(&x.broadcast_mul(shared)?, y)),
        ("embedding", &table, &|_, _, ids, shared| ops::embedding(shared, ids)),
    ];
    for (name, shared, op) in ops {
        let run = |start: usize, len: usize| -> Result<(Vec<f32>, Vec<f64>)> {
            let part = |t: &Tensor| t.narrow(0, start, len);
            let shared = Var::from_tensor(shared)?;
            let out = op(&part(&x)?, &part(&y)?, &part(&ids)?, shared.as_tensor())?;
            let grads = (&out * part(&direction)?)?.sum_all()?.backward()?;
            let grad = grads.get(&shared).expect("a gradient").flatten_all()?.to_vec1()?;
            Ok((out.flatten_all()?.to_vec1()?, f64s(&grad)))
        };
        let (whole, whole_grad) = run(0, PARTS * rows)?;
        let (mut parts, mut grad) = (Vec::new(), vec![0.0; whole_grad.len()]);
        for part in 0..PARTS {
            let (out, part_grad) = run(part * rows, rows)?;
            parts.extend(out);
            grad.iter_mut().zip(part_grad).for_each(|(sum, x)| *sum += x);
        }
        assert_eq!(whole, parts, "{name}");
        let error = relative_l2(&whole_grad, &grad);
        assert!(error < F32, "{name}: {error:e}");
    }
    Ok(())
}

/// A frozen operand gets no gradient, and the gradient of the other operand does not change.
#[test]
fn linear_cross_entropy_leaves_a_frozen_side_alone() -> Result<()> {
    let mut normals = Normals::new(13);
    let hidden = Var::from_vec(normals.vec(5 * 4, 1.0), (5, 4), &Device::Cpu)?;
    let weight = Var::from_vec(normals.vec(7 * 4, 1.0), (7, 4), &Device::Cpu)?;
    let targets = Tensor::new(&[1u32, 2, 3, 4, 6], &Device::Cpu)?;
    let run = |hidden: &Tensor, weight: &Tensor| {
        ops::linear_cross_entropy(hidden, weight, &targets, CrossEntropy::default())?.backward()
    };
    let both = run(&hidden, &weight)?;
    let values = |t: &Tensor| t.flatten_all()?.to_vec1::<f32>();
    let frozen_weight = run(&hidden, &weight.detach())?;
    assert_eq!(
        values(both.get(&hidden).expect("both"))?,
        values(frozen_weight.get(&hidden).expect("hidden"))?
    );
    let frozen_hidden = run(&hidden.detach(), &weight)?;
    assert_eq!(
        values(both.get(&weight).expect("both"))?,
        values(frozen_hidden.get(&weight).expect("weight"))?
    );
    assert!(frozen_weight.get(&weight).is_none() && frozen_hidden.get(&hidden).is_none());
    Ok(())
}

/// An op's output and gradient for a transposed bf16 tensor are those for the tensor's contiguous f32 copy, up to
/// rounding to bf16.
#[test]
fn sixteen_bit_and_strided_inputs() -> Result<()> {
    let mut normals = Normals::new(14);
    let mut tensor = |dims: &[usize]| -> Result<Tensor> {
        Tensor::from_vec(normals.vec(dims.iter().product(), 1.0), dims, &Device::Cpu)?.to_dtype(DType::BF16)
    };
    let turned = tensor(&[2, 3, 8, 5])?;
    let (weight, direction) = (tensor(&[8])?, tensor(&[2, 5, 3, 8])?);
    let (cos, sin) = ops::rope_tables(5, 8, 100.0, &Device::Cpu)?;
    let ids = Tensor::new(&[[4u32, 1], [0, 4]], &Device::Cpu)?;

    type Op<'a> = &'a dyn Fn(&Tensor, &Tensor) -> Result<Tensor>;
    let ops: [(&str, Op<'_>); 6] = [
        ("rms_norm", &|x, w| ops::rms_norm(x, w, 1e-6)),
        ("qk_norm_rope", &|x, w| ops::qk_norm_rope(x, w, &cos, &sin, 1e-6, RopeStyle::Interleaved)),
        ("swiglu", &|x, w| ops::swiglu(x, &x.broadcast_mul(w)?)),
        ("rope", &|x, _| ops::rope(x, &cos, &sin, RopeStyle::Halves)),
        ("embedding", &|x, _| {
            ops::embedding(&x.narrow(0, 1, 1)?.squeeze(0)?.narrow(1, 2, 1)?.squeeze(1)?, &ids)
        }),
        ("cross_entropy", &|x, _| {
            let logits = x.narrow(0, 1, 1)?.squeeze(0)?.narrow(1, 2, 1)?.squeeze(1)?;
            ops::cross_entropy(
                &logits,
                &Tensor::new(&[4u32, 1, 0, 4, 7], &Device::Cpu)?,
                CrossEntropy::default(),
            )
        }),
    ];
    for (name, op) in ops {
        let run = |var: &Var, x: Tensor, w: &Tensor| -> Result<(Vec<f64>, Vec<f64>)> {
            let out = op(&x, w)?.to_dtype(DType::F32)?;
            let direction = direction.to_dtype(DType::F32)?.flatten_all()?.narrow(0, 0, out.elem_count())?;
            let grads = (out.flatten_all()? * direction)?.sum_all()?.backward()?;
            let grad = grads.get(var).expect("a gradient");
            assert_eq!(grad.dtype(), var.dtype(), "{name}");
            let values =
                |t: &Tensor| -> Result<Vec<f64>> { t.to_dtype(DType::F64)?.flatten_all()?.to_vec1() };
            Ok((values(&out)?, values(grad)?))
        };
        let low = Var::from_tensor(&turned)?;
        let (out, grad) = run(&low, low.permute((0, 3, 1, 2))?, &weight)?;
        let high = Var::from_tensor(&turned.to_dtype(DType::F32)?)?;
        let straight = high.permute((0, 3, 1, 2))?.contiguous()?;
        let (exact, exact_grad) = run(&high, straight, &weight.to_dtype(DType::F32)?)?;
        // Swiglu has the most roundings to bf16: of its second operand, of the gradients of x, and of their sum.
        for (what, got, exact) in [("output", out, exact), ("gradient", grad, exact_grad)] {
            let error = relative_l2(&got, &exact);
            assert!(error < 3.0 * 2f64.powi(-9), "{name}: {what} off by {error:e}");
        }
    }
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
            let settings = CrossEntropy::default().chunk_rows(Some(600));
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
