//! Quantization error on the real tensors of a trained model: Table 2 of arXiv 2603.02170.

use std::path::Path;

use candle_core::{DType, Device, Tensor, Var};
use candle_sage::{Attention, Error, Result, SageBwd, Scheme};

use crate::config::Config;
use crate::data::{Batches, Dataset};
use crate::model::{Llama, Parameters};
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

/// What attention reads in one layer, and the gradient that comes back to it.
struct Layer {
    inputs: [Tensor; 3],
    /// Zero, added to the output: its gradient is the output's.
    tap: Var,
}

/// Runs validation sequences through the model of a run with full-precision attention, and computes
/// every layer's attention again with SageBwd on the tensors found there.
///
/// # Errors
/// When the folder is not a finished run, its data is gone, or the model has no attention.
pub fn probe(folder: &Path, sequences: usize, sage: Option<SageBwd>) -> Result<(Scheme, Vec<LayerErrors>)> {
    let device = Device::Cpu;
    let config = Config::resolve(Config::read_settings(&folder.join("config.toml"))?)?;
    let Some(trained) = config.model.scheme else {
        return Err(Error::new("the model has no attention to probe")
            .got(folder.display())
            .allowed("a run with --attn fpa or sagebwd")
            .hint("train one: sage-train --attn sagebwd"));
    };
    let scheme = match (sage, trained) {
        (Some(sage), _) => sage.into(),
        (None, Scheme::SageBwd(_)) => trained,
        (None, _) => SageBwd::default().into(),
    };
    let parameters = Parameters::load(&config.model, &folder.join("model.safetensors"), &device)?;
    let data = Dataset::load(&config.data, &|line| tell(line))?;
    let layers = trace(&config, &parameters, &data, sequences, &device).map_err(during("probing"))?;
    let errors = layers.into_iter().enumerate().map(|(layer, (inputs, dout))| {
        let exact = results(Scheme::FullPrecision, &inputs, &dout)?;
        let quantized = results(scheme, &inputs, &dout)?;
        let distance = |n: usize| distance(&quantized[n], &exact[n]);
        Ok(LayerErrors { layer, results: [distance(0)?, distance(1)?, distance(2)?, distance(3)?] })
    });
    let errors: candle_core::Result<_> = errors.collect();
    Ok((scheme, errors.map_err(during("probing"))?))
}

/// Query, key, value and output gradient of every layer.
fn trace(
    config: &Config,
    parameters: &Parameters,
    data: &Dataset,
    sequences: usize,
    device: &Device,
) -> candle_core::Result<Vec<([Tensor; 3], Tensor)>> {
    let batches = Batches::new(&data.validation, config.model.context, config.seed);
    let batch = batches.in_order(0, sequences.min(batches.sequences() as usize), device)?;
    let model = Llama::load(&config.model, parameters.tracked(device), device)?;
    let exact = Attention::new(Scheme::FullPrecision).causal(true);
    let mut layers = Vec::new();
    let mut attend = |q: &Tensor, k: &Tensor, v: &Tensor| {
        let out = exact.apply(q, k, v)?;
        let tap = Var::zeros(out.dims(), DType::F32, device)?;
        let out = (out + tap.as_tensor())?;
        layers.push(Layer { inputs: [q.detach(), k.detach(), v.detach()], tap });
        Ok(out)
    };
    let loss = model.loss_with(&batch.ids, &batch.targets, Some(&mut attend))?;
    let grads = loss.backward()?;
    let dout = |layer: &Layer| match grads.get(&layer.tap) {
        Some(dout) => Ok(dout.clone()),
        None => candle_core::bail!("a layer's output received no gradient"),
    };
    layers.into_iter().map(|layer| Ok((layer.inputs.clone(), dout(&layer)?))).collect()
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
