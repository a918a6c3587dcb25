//! Quantization error on the real tensors of a trained model: Table 2 of arXiv 2603.02170.

use std::path::Path;

use candle_core::{DType, Device, Tensor, Var};
use candle_sage::{Attention, Result, SageBwd, Scheme};

use crate::data::{Batches, Cut, Dataset};
use crate::device::Place;
use crate::model::{Llama, LlamaConfig, Parameters};
use crate::settings::{Attn, Settings};
use crate::trained::Trained;
use crate::{during, tell};

/// How far one result of attention is from full precision.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Distance {
    /// Cosine of the angle between the two.
    pub cosine: f64,
    /// Norm of the difference over the norm of the exact result.
    pub relative_l2: f64,
}

/// The errors of one layer.
#[derive(Debug, Clone, Copy)]
pub struct LayerErrors {
    /// The layer, from 0.
    pub layer: usize,
    /// Output and gradients of query, key and value.
    pub results: [Distance; 4],
}

/// The names of [`LayerErrors::results`].
pub const RESULTS: [&str; 4] = ["O", "dQ", "dK", "dV"];

/// What was probed, and the errors found.
#[derive(Debug, Clone)]
pub struct Probed {
    /// The numerics whose error it is.
    pub scheme: Scheme,
    /// Validation sequences looked at.
    pub sequences: usize,
    /// One for each layer.
    pub layers: Vec<LayerErrors>,
}

/// Runs validation sequences through the model of a run with full-precision attention, and computes
/// every layer's attention again with the run's low-bit scheme (SageBwd, if it has none) on the tensors found there. `settings` win over the run's.
///
/// # Errors
/// When the folder is not a run with weights, its data is gone or another, or the model has no attention.
pub fn probe(folder: &Path, sequences: usize, settings: Settings) -> Result<Probed> {
    // In f32, wherever it was trained.
    let trained = Trained::open(folder, Place::Cpu, settings, true)?;
    trained.check_attention(folder, "probe")?;
    let Trained { config, parameters, device, .. } = &trained;
    let scheme = match config.model.scheme {
        Some(scheme) if scheme != Scheme::FullPrecision => scheme,
        _ => Attn::from(SageBwd::default()).scheme(&config.settings).unwrap_or_default(),
    };
    let data = Dataset::load(&config.data, &|line| tell(line))?;
    data.tokenizer.check_same(&folder.join("tokenizer.json"))?;
    let cut = Cut { end_of_document: None, ..config.data.cut(&data.tokenizer) };
    let batches = Batches::new(&data.validation, cut);
    let sequences = sequences.min(batches.sequences() as usize);
    let layers = trace(&config.model, parameters, &batches, sequences, device)?;
    let errors = layers.into_iter().enumerate().map(|(layer, (inputs, dout))| {
        let exact = results(Scheme::FullPrecision, &inputs, &dout)?;
        let quantized = results(scheme, &inputs, &dout)?;
        let distance = |n: usize| distance(&quantized[n], &exact[n]);
        Ok(LayerErrors { layer, results: [distance(0)?, distance(1)?, distance(2)?, distance(3)?] })
    });
    let errors: candle_core::Result<_> = errors.collect();
    Ok(Probed { scheme, sequences, layers: errors.map_err(during("probing"))? })
}

/// Query, key, value and output gradient of every layer, with full-precision attention.
fn trace(
    model: &LlamaConfig,
    parameters: &Parameters,
    batches: &Batches<'_>,
    sequences: usize,
    device: &Device,
) -> Result<Vec<([Tensor; 3], Tensor)>> {
    let sequences = batches.in_order(0, sequences)?;
    let batch = sequences.to_device(device).map_err(during("probing"))?;
    let exact = LlamaConfig { scheme: Some(Scheme::FullPrecision), sla2: None, ..model.clone() };
    let mut layers = Vec::new();
    let mut observe = |inputs: [&Tensor; 3], dout: &Tensor| {
        layers.push((inputs.map(Tensor::clone), dout.clone()));
        Ok(())
    };
    Llama::new(&exact, parameters, device)
        .and_then(|model| model.train_observed(&batch.ids, &batch.targets, Some(&mut observe)))
        .map_err(during("probing"))?;
    layers.reverse();
    Ok(layers)
}

/// Output and gradients with a scheme.
fn results(scheme: Scheme, inputs: &[Tensor; 3], dout: &Tensor) -> candle_core::Result<[Tensor; 4]> {
    let [q, k, v] = inputs.each_ref().map(Var::from_tensor);
    let (q, k, v) = (q?, k?, v?);
    let out = Attention::new(scheme).causal(true).apply(&q, &k, &v)?;
    let grads = (&out * dout)?.sum_all()?.backward()?;
    let grad = |var: &Var| match grads.get(var) {
        Some(grad) => Ok(grad.clone()),
        None => candle_core::bail!("attention gave no gradient"),
    };
    Ok([out.detach(), grad(&q)?, grad(&k)?, grad(&v)?])
}

fn distance(got: &Tensor, exact: &Tensor) -> candle_core::Result<Distance> {
    let values = |t: &Tensor| t.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
    let (a, b) = (values(got)?, values(exact)?);
    let sum = |f: &dyn Fn(f64, f64) -> f64| a.iter().zip(&b).map(|(&a, &b)| f(a, b)).sum::<f64>();
    let (ab, aa, bb) = (sum(&|a, b| a * b), sum(&|a, _| a * a), sum(&|_, b| b * b));
    let difference = sum(&|a, b| (a - b) * (a - b));
    Ok(Distance { cosine: ab / (aa * bb).sqrt(), relative_l2: (difference / bb).sqrt() })
}
