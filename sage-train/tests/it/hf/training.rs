//! Compares training with PyTorch's AdamW in f64, on models of transformers. `scripts/hf_golden.py` makes the golden
//! files. The script contains the same settings as [`SETTINGS`].

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Result, Tensor};

use super::{KINDS, golden};
use crate::support::Scratch;

const STEPS: usize = 6;

/// Each step trains on all eight sequences in two micro-batches, so their order does not matter. The first steps are
/// clipped, the last steps are not.
const SETTINGS: [&str; 34] = [
    "--attn",
    "fpa",
    "--context",
    "32",
    "--micro-batch",
    "4",
    "--tokens-per-step",
    "256",
    "--steps",
    "6",
    "--lr",
    "1e-2",
    "--min-lr",
    "0.1",
    "--warmup-steps",
    "2",
    "--schedule",
    "cosine",
    "--weight-decay",
    "0.5",
    "--clip",
    "1.25",
    "--adam-eps",
    "1e-4",
    "--beta1",
    "0.9",
    "--beta2",
    "0.95",
    "--eval-every",
    "0",
    "--sample-tokens",
    "0",
    "--device",
    "cpu",
];

/// The golden file contains every `STRIDE`th element of each tensor.
const STRIDE: usize = 11;

fn load(path: &Path) -> Result<HashMap<String, Tensor>> {
    candle_core::safetensors::load(path, &Device::Cpu)
}

fn values(tensor: &Tensor, stride: usize) -> Result<Vec<f64>> {
    let all = tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
    Ok(all.into_iter().step_by(stride).collect())
}

/// `|got - expected| / |expected - before|`.
fn error(got: &[f64], expected: &[f64], before: &[f64]) -> f64 {
    let square = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f64>();
    assert_eq!((got.len(), before.len()), (expected.len(), expected.len()));
    (square(got, expected) / square(expected, before)).sqrt()
}

/// The trainer computes in f32. We measured relative errors of 1e-7 for losses, 2e-7 for gradient norms and 1.4e-5 for
/// weights and moments. Mistakes change the loss by more than 1e-7: a wrong step number (one too low) changes it by
/// 3e-2, weight decay of RMSNorm's weights by 9e-3, and division by norm + 1e-3 in clipping by 1.5e-5.
#[test]
fn a_training_is_that_of_pytorch_in_f64() -> Result<()> {
    let data = golden("training").display().to_string();
    for kind in KINDS {
        let (scratch, folder) = (Scratch::new(), golden(kind));
        let from = folder.display().to_string();
        scratch.ok(&[&["--init-from", &from, "--data", &data, "--name", "r"][..], &SETTINGS].concat());
        let mut expected = load(&folder.join("training.safetensors"))?;
        let points = scratch.metrics("r");
        assert_eq!(points.len(), STEPS);
        let mut course = |name: &str| values(&expected.remove(name).expect("numbers"), 1);
        let (losses, norms) = (course("loss")?, course("grad_norm")?);
        for ((point, loss), norm) in points.iter().zip(losses).zip(norms) {
            let [loss, norm] = [point.loss / loss - 1.0, point.grad_norm / norm - 1.0].map(f64::abs);
            assert!(
                loss < 1e-6 && norm < 2e-6,
                "{kind}, step {}: the loss is off by {loss:e}, the norm by {norm:e}",
                point.step
            );
        }
        let state = load(&scratch.path().join("runs/r/checkpoints/step-00000006/state.safetensors"))?;
        let before = load(&folder.join("model.safetensors"))?;
        assert_eq!(state.len(), expected.len());
        for (name, expected) in &expected {
            let expected = values(expected, 1)?;
            // Moments begin at 0.
            let before = match before.get(name) {
                Some(before) => values(before, STRIDE)?,
                None => vec![0.0; expected.len()],
            };
            let error = error(&values(&state[name], STRIDE)?, &expected, &before);
            assert!(error < 1e-4, "{kind}, {name}: {error:e}");
        }
    }
    Ok(())
}
