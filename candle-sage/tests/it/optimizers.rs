//! Our optimizers with candle's interface, compared with candle-nn's AdamW and with the ops `AdamW` and `Muon`.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW, VarMap};
use candle_sage::nn::{self, MuonConfig};
use candle_sage::ops::{self, MuonMatrix, sum_of_squares};

use crate::support::{Normals, f64s, relative_l2};

fn variable(normals: &mut Normals, dims: &[usize]) -> Result<Var> {
    let values = Tensor::from_vec(normals.vec(dims.iter().product(), 1.0), dims, &Device::Cpu)?;
    Var::from_tensor(&values)
}

fn values(variable: &Var) -> Result<Vec<f32>> {
    variable.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}

/// For matrices and without clipping, AdamW differs from candle-nn's AdamW only by f32 roundings: about ten operations
/// a step, each rounded by at most 2^-24.
#[test]
fn adamw_follows_candles() -> Result<()> {
    let (ours, theirs) = (&mut Normals::new(5), &mut Normals::new(5));
    let dims = [&[3usize, 5][..], &[4, 4]];
    let ours: Vec<Var> = dims.iter().map(|dims| variable(ours, dims)).collect::<Result<_>>()?;
    let theirs: Vec<Var> = dims.iter().map(|dims| variable(theirs, dims)).collect::<Result<_>>()?;
    let mut settings = ops::AdamW::new(0.05);
    (settings.beta2, settings.weight_decay) = (0.99, 0.1);
    let of_candle = ParamsAdamW { lr: 0.05, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 };
    let mut our = nn::AdamW::new(ours.clone(), settings)?;
    let mut their = candle_nn::AdamW::new(theirs.clone(), of_candle)?;
    let loss = |all: &[Var]| (all[0].sqr()?.sum_all()? + all[1].sin()?.sum_all()?)?.sqr();
    for step in 0..30 {
        our.backward_step(&loss(&ours)?)?;
        their.backward_step(&loss(&theirs)?)?;
        if step == 20 {
            our.set_learning_rate(0.01);
            their.set_learning_rate(0.01);
        }
    }
    assert_eq!(our.learning_rate(), 0.01);
    for (a, b) in ours.iter().zip(&theirs) {
        let error = relative_l2(&f64s(&values(a)?), &f64s(&values(b)?));
        assert!(error < 1e-5, "{error:e}");
    }
    Ok(())
}

/// Steps that are too small for a 16-bit variable add up, because the optimizer has an f32 copy of the variable. A
/// variable without a gradient and a vector with zero gradients (vectors have no weight decay) do not change. A step
/// with a non-finite gradient changes no variable.
#[test]
fn weights_are_kept_in_f32() -> Result<()> {
    let normals = &mut Normals::new(7);
    for dtype in [DType::BF16, DType::F16] {
        let narrow = Var::from_tensor(&Tensor::ones((2, 8), dtype, &Device::Cpu)?)?;
        let (vector, other) = (variable(normals, &[3])?, variable(normals, &[2, 2])?);
        let before = [values(&vector)?, values(&other)?];
        let mut settings = ops::AdamW::new(1e-4);
        settings.weight_decay = 0.5;
        let mut optimizer = nn::AdamW::new(vec![narrow.clone(), vector.clone(), other.clone()], settings)?;
        for _ in 0..100 {
            let loss = narrow.to_dtype(DType::F32)?.sum_all()?;
            optimizer.backward_step(&(loss + vector.affine(0.0, 0.0)?.sum_all()?)?)?;
        }
        // In 16 bit, a step of 1e-4 would leave 1 unchanged: half of the distance to the next smaller number is .002 in
        // bf16 and .0002 in f16. A hundred steps subtract .01 in total, and weight decay subtracts another .005.
        assert!(values(&narrow)?.iter().all(|w| (w - 0.985).abs() < 3e-3), "{:?}", values(&narrow)?);
        assert_eq!([values(&vector)?, values(&other)?], before);
        let bad = (narrow.to_dtype(DType::F32)?.sum_all()? * f64::INFINITY)?;
        let before = values(&narrow)?;
        optimizer.backward_step(&bad)?;
        assert_eq!(values(&narrow)?, before);
    }
    Ok(())
}

/// `nn::Muon` updates each matrix as the op `Muon` does, and embeddings and vectors as the op `AdamW` does. Both ops
/// clip by the norm of all gradients.
#[test]
fn muon_is_that_of_the_op() -> Result<()> {
    let normals = &mut Normals::new(9);
    let map = VarMap::new();
    let shapes: [(&str, &[usize]); 5] =
        [("a", &[4, 6]), ("b", &[4, 6]), ("c", &[8, 3]), ("embedding", &[5, 4]), ("norm", &[6])];
    let mut starts = Vec::new();
    for (name, dims) in shapes {
        let variable = variable(normals, dims)?;
        starts.push(values(&variable)?);
        map.data().lock().expect("alone").insert(name.into(), variable);
    }
    let gradients: Vec<Tensor> = shapes
        .iter()
        .map(|(_, dims)| Ok(variable(normals, dims)?.as_tensor().clone()))
        .collect::<Result<_>>()?;
    let mut config = MuonConfig::new(0.02);
    (config.matrices.clip, config.matrices.weight_decay, config.others.lr) = (Some(1.0), 0.1, 0.01);
    config.matrices.beta2 = Some(0.9);
    let mut optimizer = nn::Muon::of_map(&map, &["embedding"], config.clone())?;
    let of = |name: &str| map.data().lock().expect("alone")[name].clone();
    let all: Vec<Var> = shapes.iter().map(|(name, _)| of(name)).collect();
    let mut loss = Tensor::new(0f32, &Device::Cpu)?;
    for (variable, gradient) in all.iter().zip(&gradients) {
        loss = (loss + (variable.as_tensor() * gradient)?.sum_all()?)?;
    }
    optimizer.backward_step(&loss)?;
    optimizer.set_learning_rate(0.04);
    assert_eq!(optimizer.learning_rate(), 0.04);
    let flat = |gradient: &Tensor| gradient.flatten_all()?.to_vec1::<f32>();
    let flats = gradients.iter().map(flat).collect::<Result<Vec<_>>>()?;
    let squares = sum_of_squares(&Tensor::new(flats.concat(), &Device::Cpu)?)?;
    for (n, (name, dims)) in shapes.iter().enumerate() {
        let len = starts[n].len();
        let is_matrix = n < 3;
        let rows = if is_matrix { 2 } else { 3 };
        let state = [starts[n].clone(), vec![0.0; (rows - 1) * len]].concat();
        let state = Tensor::from_vec(state, (rows, len), &Device::Cpu)?;
        let gradient = Tensor::new(&*flats[n], &Device::Cpu)?;
        if is_matrix {
            let matrix = [MuonMatrix { at: 0, rows: dims[0], columns: dims[1] }];
            let rows = Tensor::zeros(dims[0], DType::F32, &Device::Cpu)?;
            config.matrices.step(&state, &gradient, &squares, &matrix, Some(&rows), None)?;
        } else {
            let mut adamw = config.others;
            adamw.clip = Some(1.0);
            adamw.step(&state, &gradient, &squares, None)?;
        }
        let expected = state.get(0)?.to_vec1::<f32>()?;
        let error = relative_l2(&f64s(&values(&of(name))?), &f64s(&expected));
        assert!(error < 1e-6 && values(&of(name))? != starts[n], "{name}: {error:e}");
    }
    let error = nn::Muon::of_map(&map, &[], MuonConfig::new(0.0)).expect_err("no rate").to_string();
    assert!(error.contains("learning rate") && error.contains("hint:"), "{error}");
    let error = nn::Muon::of_map(&map, &["emb"], config).expect_err("no such name").to_string();
    assert!(
        error.contains("got:     emb") && error.contains("embedding, norm") && error.contains("hint:"),
        "{error}"
    );
    let whole = Var::from_tensor(&Tensor::zeros(3, DType::U32, &Device::Cpu)?)?;
    let error = nn::AdamW::new(vec![whole], ops::AdamW::new(0.1)).expect_err("whole numbers").to_string();
    assert!(error.contains("u32") && error.contains("hint:"), "{error}");
    Ok(())
}
