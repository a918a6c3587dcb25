//! The functions for training loops without candle's autograd, compared with autograd, on the CPU in f32, and on a GPU
//! also in 16 bit.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_sage::ops::{self, CrossEntropy, QkNormRopeGrad, RopeStyle};

use crate::support::{Normals, f64s, relative_l2};

#[derive(Clone)]
struct Case {
    device: Device,
    dtype: DType,
}

const CPU: Case = Case { device: Device::Cpu, dtype: DType::F32 };

#[cfg(feature = "cuda")]
fn on_gpu(check: impl Fn(&Case) -> Result<()>) -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        check(&Case { device: crate::support::gpu(), dtype })?;
    }
    Ok(())
}

impl Case {
    fn draw(&self, normals: &mut Normals, dims: &[usize]) -> Result<Var> {
        let values = normals.vec(dims.iter().product(), 1.0);
        Var::from_tensor(&Tensor::from_vec(values, dims, &self.device)?.to_dtype(self.dtype)?)
    }

    /// Half a unit in the last place, relative to the value.
    fn rounding(&self) -> f64 {
        match self.dtype {
            DType::F16 => 2f64.powi(-11),
            DType::BF16 => 2f64.powi(-8),
            _ => 2f64.powi(-24),
        }
    }
}

fn values(t: &Tensor) -> Result<Vec<f64>> {
    Ok(f64s(&t.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?))
}

/// The gradients of `vars` by candle's autograd, for the gradient `dout` of `out`.
fn graph(out: &Tensor, dout: &Tensor, vars: &[&Var]) -> Result<Vec<Tensor>> {
    let grads = (out * dout)?.to_dtype(DType::F32)?.sum_all()?.backward()?;
    Ok(vars.iter().map(|var| grads.get(var).expect("a gradient").clone()).collect())
}

#[track_caller]
fn same(name: &str, got: &Tensor, expected: &Tensor) -> Result<()> {
    assert_eq!((got.dims(), got.dtype()), (expected.dims(), expected.dtype()), "{name}");
    assert!(values(got)? == values(expected)?, "{name}: other bits");
    Ok(())
}

#[track_caller]
fn close(name: &str, got: &Tensor, expected: &Tensor, limit: f64) -> Result<()> {
    assert_eq!(got.dims(), expected.dims(), "{name}");
    let error = relative_l2(&values(got)?, &values(expected)?);
    assert!(error <= limit, "{name}: {error:.1e}, limit {limit:.1e}");
    Ok(())
}

fn apart_of(x: &Tensor) -> Result<Tensor> {
    let rows = x.narrow(0, 10, 15)?;
    Tensor::stack(&[&rows, &rows], 0)
}

/// The backward functions return the same bits as autograd.
fn backwards(place: &Case) -> Result<()> {
    let mut normals = Normals::new(1);
    let mut draw = |dims: &[usize]| place.draw(&mut normals, dims);
    let (gate, up, dout) = (draw(&[30, 40])?, draw(&[30, 40])?, draw(&[30, 40])?);
    let out = ops::swiglu(&gate, &up)?;
    let expected = graph(&out, &dout, &[&gate, &up])?;
    // Layouts of gate and up: separate tensors, views of one tensor, a view and a separate tensor, channels that are
    // not adjacent, rows at unequal distances.
    let joined = Tensor::cat(&[gate.as_tensor(), up.as_tensor()], 1)?;
    let halves = [joined.narrow(1, 0, 40)?, joined.narrow(1, 40, 40)?];
    let turned = [gate.t()?.contiguous()?.t()?, up.t()?.contiguous()?.t()?];
    let plain = [gate.as_tensor().clone(), up.as_tensor().clone()];
    let mixed = [halves[0].clone(), plain[1].clone()];
    let apart = |x: &Tensor| Tensor::cat(&[x, x], 0)?.reshape((2, 30, 40))?.narrow(1, 10, 15);
    let both = Tensor::cat(&expected, 1)?;
    for [gate, up] in [plain.clone(), halves, mixed, turned] {
        same("swiglu of strided inputs", &ops::swiglu(&gate, &up)?, &out)?;
        let (got, again) = ops::swiglu_backward(&gate, &up, &dout, true)?;
        same("swiglu", &again.expect("asked for"), &out)?;
        same("swiglu's gradients", &got, &both)?;
        assert!(ops::swiglu_backward(&gate, &up, &dout, false)?.1.is_none());
    }
    let (got, _) = ops::swiglu_backward(&apart(&plain[0])?, &apart(&plain[1])?, &apart(&dout)?, false)?;
    same("rows that are not equally far apart", &got, &apart_of(&both)?)?;
    // Row lengths that are not multiples of a GPU's vector width.
    let odd = |t: &Tensor| t.narrow(1, 0, 37);
    let (both, _) = ops::swiglu_backward(&odd(&gate)?, &odd(&up)?, &odd(&dout)?, false)?;
    same("odd rows", &both, &Tensor::cat(&[odd(&expected[0])?, odd(&expected[1])?], 1)?)?;

    let (x, weight, dout) = (draw(&[2, 15, 3, 64])?, draw(&[64])?, draw(&[2, 15, 3, 64])?);
    let other_weight = draw(&[64])?;
    let (cos, sin) = ops::rope_tables(15, 64, 100.0, &place.device)?;
    for style in [RopeStyle::Halves, RopeStyle::Interleaved] {
        let out = ops::qk_norm_rope(&x, &weight, &cos, &sin, 1e-6, style)?;
        let expected = graph(&out, &dout, &[&x, &weight])?;
        let grad = QkNormRopeGrad { x: &x, weight: &weight, dout: &dout };
        let (dx, dweights) = ops::qk_norm_rope_backward(&[grad], [&cos, &sin], 1e-6, style)?;
        same("qk_norm_rope", &dx, &expected[0])?;
        same("its weight", &dweights[0], &expected[1])?;
        // Query and key are views of one tensor.
        let joined = Tensor::cat(&[x.as_tensor(), &x.narrow(2, 1, 1)?], 2)?;
        let (query, key) = (joined.narrow(2, 0, 3)?, joined.narrow(2, 3, 1)?);
        same("of a strided input", &ops::qk_norm_rope(&query, &weight, &cos, &sin, 1e-6, style)?, &out)?;
        let (dkey, alone) = (dout.narrow(2, 1, 1)?, Var::from_tensor(&key)?);
        let key_out = ops::qk_norm_rope(&alone, &other_weight, &cos, &sin, 1e-6, style)?;
        let of_key = graph(&key_out, &dkey, &[&alone, &other_weight])?;
        let grads = [
            QkNormRopeGrad { x: &query, weight: &weight, dout: &dout },
            QkNormRopeGrad { x: &key, weight: &other_weight, dout: &dkey },
        ];
        let (dx, dweights) = ops::qk_norm_rope_backward(&grads, [&cos, &sin], 1e-6, style)?;
        same("side by side", &dx, &Tensor::cat(&[&expected[0], &of_key[0]], 2)?)?;
        same("the first weight", &dweights[0], &expected[1])?;
        same("the second weight", &dweights[1], &of_key[1])?;

        let out = ops::rope(&x, &cos, &sin, style)?;
        let expected = &graph(&out, &dout, &[&x])?[0];
        same("rope", &ops::rope_backward(&[&dout], &cos, &sin, style)?, expected)?;
        let both = ops::rope_backward(&[&dout, &dkey], &cos, &sin, style)?;
        same("rope, side by side", &both, &Tensor::cat(&[expected, &expected.narrow(2, 1, 1)?], 2)?)?;
    }

    let (table, dout) = (draw(&[50, 16])?, draw(&[4, 25, 16])?);
    let ids: Vec<u32> = (0..100).map(|n| n * n % 47).collect();
    let ids = Tensor::from_vec(ids, (4, 25), &place.device)?;
    let out = ops::embedding(&table, &ids)?;
    same("embedding", &ops::embedding_forward(&table, &ids)?, &out)?;
    same("embedding", &ops::embedding_backward(&ids, &dout, 50)?, &graph(&out, &dout, &[&table])?[0])
}

/// `residual_rms_norm` and `rms_norm_backward`, for rows that a GPU kernel can keep in registers, and for longer rows.
fn norms(place: &Case) -> Result<()> {
    let mut normals = Normals::new(2);
    for dims in [[700, 64], [5, 7], [9, 1024], [3, 20_000]] {
        let mut draw = |dims: &[usize]| place.draw(&mut normals, dims);
        let (x, other, weight) = (draw(&dims)?, draw(&dims)?, draw(&dims[1..])?);
        let (sum, y) = ops::residual_rms_norm(&x, &other, &weight, 1e-6)?;
        same("the sum", &sum, &(x.as_tensor() + other.as_tensor())?.detach())?;
        same("its norm", &y, &ops::rms_norm(&sum, &weight, 1e-6)?.detach())?;

        let dout = draw(&dims)?;
        let expected = graph(&ops::rms_norm(&x, &weight, 1e-6)?, &dout, &[&x, &weight])?;
        let [dx, dweight] = ops::rms_norm_backward(&x, &weight, &dout, None, 1e-6)?;
        same("dx", &dx, &expected[0])?;
        same("dweight", &dweight, &expected[1])?;
        let [dx, dweight] = ops::rms_norm_backward(&x, &weight, &dout, Some(&other), 1e-6)?;
        // `sum` is rounded one time more than `dx`.
        let sum = (&expected[0] + other.as_tensor())?;
        close("dx past the norm", &dx, &sum, 2.0 * place.rounding())?;
        same("dweight", &dweight, &expected[1])?;
    }
    Ok(())
}

/// Compares `product_into` with f64. Each result is an f32 sum of 70 terms: it errs by at most 70 * 2^-24 times the
/// sum of the terms' absolute values. In the L2 norm over all results, the sums of absolute values are below 8.4 times
/// the results.
fn products(place: &Case) -> Result<()> {
    let mut normals = Normals::new(3);
    let (rows, inner, cols) = (33, 70, 24);
    let product = |a: &[f64], b: &[f64]| -> Vec<f64> {
        (0..rows * cols)
            .map(|n| (0..inner).map(|k| a[n / cols * inner + k] * b[k * cols + n % cols]).sum())
            .collect()
    };
    let (a, b) = (place.draw(&mut normals, &[rows, inner])?, place.draw(&mut normals, &[inner, cols])?);
    let expected = product(&values(&a)?, &values(&b)?);
    let turned = |t: &Tensor| t.t()?.contiguous()?.t();
    for a in [a.as_tensor().clone(), turned(&a)?] {
        for b in [b.as_tensor().clone(), turned(&b)?] {
            // The output is a slice of a longer tensor, whose other elements must not change.
            for dtype in [DType::F32, place.dtype] {
                let all = Tensor::ones(rows * cols + 16, dtype, &place.device)?;
                let out = all.narrow(0, 8, rows * cols)?.reshape((rows, cols))?;
                ops::product_into(&out, &a, &b, 7.0, true)?;
                ops::product_into(&out, &a, &b, 2.0, false)?;
                ops::product_into(&out, &a, &b, -0.5, true)?;
                let expected: Vec<f64> = expected.iter().map(|x| 1.5 * x).collect();
                let rounding = if dtype == DType::F32 { 0.0 } else { 2.5 * place.rounding() };
                let error = relative_l2(&values(&out)?, &expected);
                let limit = 3.0 * 70.0 * 8.4 * 2f64.powi(-24) + rounding;
                assert!(error < limit, "{dtype:?}: {error:.1e}, limit {limit:.1e}");
                let edges = values(&all)?;
                assert!(edges[..8].iter().chain(&edges[rows * cols + 8..]).all(|&x| x == 1.0));
            }
        }
    }
    let turned_out = Tensor::zeros((cols, rows), place.dtype, &place.device)?.t()?;
    let error = ops::product_into(&turned_out, &a, &b, 1.0, true).expect_err("strides").to_string();
    assert!(error.contains("not contiguous"), "{error}");
    // An offset of one element: not aligned to 16 bytes.
    let shifted = Tensor::ones(rows * inner + 1, DType::F32, &place.device)?.narrow(0, 1, rows * inner)?;
    ops::add_into(&shifted, &a.flatten_all()?)?;
    same("a sum", &shifted, &(a.flatten_all()?.to_dtype(DType::F32)? + 1.0)?.detach())?;
    let sum = Tensor::ones((rows, inner), DType::F32, &place.device)?;
    ops::add_into(&sum, &a)?;
    same("a sum", &sum, &(a.to_dtype(DType::F32)? + 1.0)?.detach())
}

/// `linear_cross_entropy_into` compared with autograd. The gradients differ only by roundings.
fn loss(place: &Case) -> Result<()> {
    let mut normals = Normals::new(4);
    let (rows, width, classes) = (40, 32, 50);
    let (hidden, weight) =
        (place.draw(&mut normals, &[rows, width])?, place.draw(&mut normals, &[classes, width])?);
    let targets: Vec<u32> = (0..rows as u32).map(|n| n * 7 % classes as u32).collect();
    let targets = Tensor::from_vec(targets, rows, &place.device)?;
    for (chunk_rows, z_loss) in [(None, 0.0), (Some(7), 0.0), (Some(7), 0.01)] {
        let settings = CrossEntropy::default().chunk_rows(chunk_rows).z_loss(z_loss);
        let expected = ops::linear_cross_entropy(&hidden, &weight, &targets, settings)?;
        let grads = expected.backward()?;
        let grad = |var: &Var| grads.get(var).expect("a gradient").to_dtype(DType::F32);
        // The gradient is added to a `dweight` of 0.01. This addition rounds, so `dweight` has a larger error limit
        // than `dhidden`.
        let dweight = (Tensor::ones((classes, width), DType::F32, &place.device)? * 0.01)?;
        let (loss, dhidden) =
            ops::linear_cross_entropy_into(&dweight, &hidden, &weight, &targets, settings, 0.5)?;
        assert_eq!(loss.to_scalar::<f32>()?, expected.to_scalar::<f32>()?);
        assert_eq!(dhidden.dtype(), place.dtype);
        let limit = 2.0 * place.rounding() + 1e-6;
        close("dhidden", &dhidden.to_dtype(DType::F32)?, &(grad(&hidden)? * 0.5)?, limit)?;
        close("dweight", &(dweight - 0.01)?, &(grad(&weight)? * 0.5)?, limit + 1e-6)?;
    }
    Ok(())
}

/// Splits the parts in two, computes the sum of each side recursively, and adds both sums. The number of parts on the
/// first side is the largest power of two below `parts.len()`.
fn sum_of_halves(parts: &[&[f32]]) -> Vec<f32> {
    if let [part] = parts {
        return part.to_vec();
    }
    let (first, second) = parts.split_at(parts.len().next_power_of_two() / 2);
    sum_of_halves(first).iter().zip(sum_of_halves(second)).map(|(a, b)| a + b).collect()
}

/// `sum_in_order` adds in the order of `sum_of_halves`: another order would give other bits.
fn in_order(at: &Case) -> Result<()> {
    let mut normals = Normals::new(21);
    for (parts, place, len) in [
        (1, 0, 64),
        (2, 0, 4),
        (2, 1, 64),
        (3, 1, 40_000),
        (8, 7, 20_004),
        (8, 2, 20_004),
        (13, 12, 64),
        (53, 9, 1000),
    ] {
        let values: Vec<f32> =
            (0..parts).flat_map(|part| normals.vec(len, 10f32.powi(part % 3 * 4))).collect();
        let expected = sum_of_halves(&values.chunks(len).collect::<Vec<_>>());
        // The part at `place` is a slice of `around`. The sum overwrites this slice, and nothing else in `around`.
        let around = [&[7.0; 4], &values[place * len..][..len], &[7.0; 4]].concat();
        let around = Tensor::from_vec(around, len + 8, &at.device)?;
        // `sum_in_order` must not read `received[place]`.
        let mut received = values;
        received[place * len..][..len].fill(f32::NAN);
        let received = Tensor::from_vec(received, (parts as usize, len), &at.device)?;
        ops::sum_in_order(&around.narrow(0, 4, len)?, &received, place)?;
        let got = around.to_vec1::<f32>()?;
        assert_eq!(got[4..len + 4], expected);
        assert!(got[..4].iter().chain(&got[len + 4..]).all(|&x| x == 7.0));
    }
    Ok(())
}

#[test]
fn parts_are_added_in_their_order() -> Result<()> {
    in_order(&CPU)
}

#[test]
fn backwards_are_those_of_the_graph() -> Result<()> {
    backwards(&CPU)?;
    norms(&CPU)
}

#[test]
fn sums_in_place() -> Result<()> {
    products(&CPU)?;
    loss(&CPU)
}

#[test]
fn messages() {
    let zeros = |dims: &[usize], dtype| Tensor::zeros(dims, dtype, &Device::Cpu).expect("zeros");
    let (a, b) = (zeros(&[2, 3], DType::F32), zeros(&[3, 4], DType::F32));
    let (point, tables) = (zeros(&[], DType::F32), zeros(&[2, 2], DType::F32));
    for (wrong, expected) in [
        (ops::product_into(&zeros(&[2, 3], DType::F32), &a, &b, 1.0, true), "matrices do not fit together"),
        (ops::product_into(&zeros(&[2, 4], DType::BF16), &a, &b, 1.0, true), "must be f32 and contiguous"),
        (ops::add_into(&zeros(&[3, 2], DType::F32), &a), "the tensor to write to has another shape"),
        (ops::sum_in_order(&zeros(&[2], DType::F32), &a, 0), "the parts do not fit the sum"),
        (ops::sum_in_order(&zeros(&[3], DType::F32), &a, 2), "the parts do not fit"),
        (ops::sum_of_squares(&zeros(&[3], DType::BF16)).map(drop), "needs f32"),
        (ops::embedding_backward(&zeros(&[3], DType::U32), &a, 5).map(drop), "does not match the ids"),
        (
            ops::residual_rms_norm(&a, &b, &zeros(&[3], DType::F32), 1e-6).map(drop),
            "the residual does not match",
        ),
        (ops::swiglu_backward(&a, &a, &b, false).map(drop), "gate and dout differ"),
        (ops::swiglu_backward(&point, &point, &point, false).map(drop), "have no width"),
        (ops::rope_backward(&[], &a, &a, RopeStyle::Halves).map(drop), "cannot be concatenated"),
        (
            ops::rope_backward(
                &[&zeros(&[1, 2, 3, 4], DType::F32), &zeros(&[2, 2, 3, 4], DType::F32)],
                &tables,
                &tables,
                RopeStyle::Halves,
            )
            .map(drop),
            "cannot be concatenated",
        ),
    ] {
        let message = wrong.expect_err("a mistake").to_string();
        assert!(message.contains(expected) && message.contains("hint:"), "{message}");
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use candle_sage::ops::AdamW;

    use super::*;
    use crate::support::gpu;

    #[test]
    #[ignore = "needs a GPU"]
    fn backwards_are_those_of_the_graph() -> Result<()> {
        on_gpu(backwards)?;
        on_gpu(norms)
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn parts_are_added_in_their_order() -> Result<()> {
        in_order(&Case { device: crate::support::gpu(), ..CPU })
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn sums_in_place() -> Result<()> {
        on_gpu(products)?;
        on_gpu(loss)
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn a_target_that_is_no_class_makes_the_loss_nan() -> Result<()> {
        let (hidden, weight) =
            (Tensor::ones((3, 8), DType::F32, &gpu())?, Tensor::ones((5, 8), DType::F32, &gpu())?);
        let targets = Tensor::new(&[1u32, 5, 2], &gpu())?;
        let sum = weight.zeros_like()?;
        let (loss, _) =
            ops::linear_cross_entropy_into(&sum, &hidden, &weight, &targets, CrossEntropy::default(), 1.0)?;
        assert!(loss.to_scalar::<f32>()?.is_nan());
        Ok(())
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn an_id_that_is_not_in_the_table_makes_its_row_nan() -> Result<()> {
        for dtype in [DType::F32, DType::BF16] {
            let table = Tensor::ones((5, 8), dtype, &gpu())?;
            let rows = ops::embedding_forward(&table, &Tensor::new(&[4u32, 5, 0], &gpu())?)?;
            let rows = values(&rows)?;
            assert!(rows[..8].iter().chain(&rows[16..]).all(|&x| x == 1.0));
            assert!(rows[8..16].iter().all(|x| x.is_nan()));
        }
        Ok(())
    }

    /// In a table of 256 rows, every 8-bit id is valid. To sort invalid ids last, the sort needs a ninth bit.
    #[test]
    #[ignore = "needs a GPU"]
    fn ids_that_are_not_in_the_table_get_no_gradient() -> Result<()> {
        let ids = Tensor::new(&[255i64, -1, 255, 300, 7], &gpu())?;
        let dout = Tensor::ones((5, 4), DType::F32, &gpu())?;
        let sums = values(&ops::embedding_backward(&ids, &dout, 256)?.sum(1)?)?;
        assert_eq!((sums[255], sums[7]), (8.0, 4.0));
        assert_eq!(sums.iter().sum::<f64>(), 12.0);
        Ok(())
    }

    /// A step on the GPU differs from the same step on the CPU only by f32 roundings.
    #[test]
    #[ignore = "needs a GPU"]
    fn adamw_is_that_of_the_cpu() -> Result<()> {
        let settings = |clip| {
            let mut adamw = AdamW::new(0.1);
            (adamw.weight_decay, adamw.decayed, adamw.step) = (0.1, 50_001, 3);
            (adamw.gradient_factor, adamw.clip) = (0.25, clip);
            adamw
        };
        let mut normals = Normals::new(5);
        let len = 100_004;
        let start = normals
            .vec(3 * len, 1.0)
            .iter()
            .enumerate()
            .map(|(n, x)| if n < len { *x } else { x * x })
            .collect();
        let start = Tensor::from_vec::<_, f32>(start, (3, len), &Device::Cpu)?;
        let gradient = Tensor::from_vec(normals.vec(len, 3.0), len, &Device::Cpu)?;
        for (clip, copy) in [(None, None), (Some(1.0), Some(DType::BF16)), (Some(1e9), Some(DType::F16))] {
            let run = |device: &Device| -> Result<(Tensor, f64, Option<Tensor>)> {
                let state = start.to_device(device)?.copy()?;
                let gradient = gradient.to_device(device)?;
                let sum = ops::sum_of_squares(&gradient)?;
                let copy = copy.filter(|_| device.is_cuda());
                let copy = copy.map(|dtype| Tensor::zeros(len, dtype, device)).transpose()?;
                settings(clip).step(&state, &gradient, &sum, copy.as_ref())?;
                Ok((state.to_device(&Device::Cpu)?, sum.to_scalar::<f64>()?, copy))
            };
            let ((got, sum, copy), (expected, exact, _)) = (run(&gpu())?, run(&Device::Cpu)?);
            assert!((sum / exact - 1.0).abs() < 1e-12, "{sum} {exact}");
            close("weights and moments", &got, &expected, 4.0 * 2f64.powi(-24))?;
            if let Some(copy) = copy {
                same("the copy", &copy.to_device(&Device::Cpu)?, &got.get(0)?.to_dtype(copy.dtype())?)?;
            }
            // A non-finite norm changes nothing.
            let state = start.to_device(&gpu())?.copy()?;
            let bad = Tensor::new(f64::INFINITY, &gpu())?;
            settings(clip).step(&state, &gradient.to_device(&gpu())?, &bad, None)?;
            same("nothing", &state.to_device(&Device::Cpu)?, &start)?;
        }
        Ok(())
    }
}
