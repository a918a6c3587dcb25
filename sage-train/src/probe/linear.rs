//! Measures the errors of linear layers in FP8. The operands of each matmul are from a trained model that computes
//! without FP8.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;

use candle_core::{DType, Tensor};
use candle_sage::Result;
use candle_sage::fp8::Fp8Format;
use candle_sage::ops::{Fp8Copies, Fp8Linear, Fp8Matrix, sum_of_squares};
use serde::Serialize;

use crate::data::{Batches, Dataset, SequenceSplit};
use crate::device::DeviceKind;
use crate::model::{LinearPrecision, Llama, LlamaConfig, ObserveProducts, Products, Scaling};
use crate::settings::Settings;
use crate::trained::Trained;
use crate::{notify, on_device};

use super::unquantized;

/// The relative L2 errors of a linear layer's FP8 matmuls.
#[derive(Debug, Clone, Serialize)]
pub struct LinearLayerErrors {
    /// The layer, from 0.
    pub layer: usize,
    /// The name of the matrix.
    pub name: &'static str,
    /// Errors of the output, of the gradient of the input, and of the gradient of the weight.
    pub errors: [f64; 3],
}

/// The errors of a model's linear layers.
#[derive(Debug, Clone, Serialize)]
pub struct LinearErrors {
    /// Number of steps that the model was trained for, if that is known.
    pub step: Option<u64>,
    /// Number of validation sequences.
    pub sequences: usize,
    /// Tokens of a sequence.
    pub context: usize,
    /// The format of gradients; all other operands are in E4M3.
    pub gradient: &'static str,
    /// The errors, first layer first.
    pub linears: Vec<LinearLayerErrors>,
}

/// Probes a run, one of its checkpoints, or a model in Hugging Face's format. The model runs on `sequences` sequences
/// of the validation data without low-bit attention and without FP8. Each matmul of a linear layer is then computed
/// again in FP8, in the formats of the run, or in the default formats if the run is without FP8. The scale of each
/// matrix is computed from its largest absolute value.
///
/// # Errors
/// When the folder has no weights, the data is missing or has changed, or a matmul has sizes that are not multiples of
/// 16.
pub fn linear_errors(
    folder: &Path,
    device_kind: DeviceKind,
    settings: Settings,
    sequences: usize,
) -> Result<LinearErrors> {
    let trained = Trained::open(folder, device_kind, settings, true)?;
    let Trained { config, parameters, device, .. } = &trained;
    let model = &config.model;
    let fp8 = match model.linear {
        LinearPrecision::Fp8(settings, _) => settings,
        LinearPrecision::Compute => Fp8Linear::default(),
    };
    let data = Dataset::load_to_validate(&config.data, &|line| notify(line))?;
    trained.check_data(folder, &data)?;
    let cut = SequenceSplit { end_of_document: None, ..config.data.cut(&data.tokenizer) };
    let context = cut.context;
    let batches = Batches::new(&data.validation, cut);
    let sequences = sequences.min(batches.sequences() as usize);
    let precision = LinearPrecision::Fp8(fp8, Scaling::Current);
    for (name, size) in [
        ("sequences x context", sequences * context),
        ("width", model.width),
        ("ffn", model.ffn),
        ("heads x head-dim", model.heads * model.head_dim),
        ("key-heads x head-dim", model.key_heads * model.head_dim),
    ] {
        precision.check(name, size)?;
    }
    let exact = LlamaConfig {
        linear: LinearPrecision::Compute,
        linear_head: LinearPrecision::Compute,
        ..unquantized(model)
    };
    let linears = Rc::new(RefCell::new(Vec::new()));
    let found = linears.clone();
    let observe: Rc<ObserveProducts> = Rc::new(move |products: Products<'_>| {
        let errors = errors(products, fp8)?;
        found.borrow_mut().push(LinearLayerErrors { layer: products.layer, name: products.name, errors });
        Ok(())
    });
    let text = batches.in_order(0, sequences)?;
    let run = || -> candle_core::Result<()> {
        let mut llama = Llama::new(&exact, parameters, device)?;
        llama.observe_products(&observe);
        let batch = text.to_device(device)?;
        llama.train(&batch.ids, &batch.targets).map(drop)
    };
    run().map_err(on_device("the probe failed"))?;
    let mut linears = linears.take();
    // The backward visited the matrices from the last to the first.
    linears.reverse();
    let gradient = if fp8.gradient == Fp8Format::E4M3 { "e4m3" } else { "e5m2" };
    Ok(LinearErrors { step: trained.step, sequences, context, gradient, linears })
}

/// The errors of y, dx and dW.
fn errors(
    Products { x, dy, weight, .. }: Products<'_>,
    settings: Fp8Linear,
) -> candle_core::Result<[f64; 3]> {
    let quantize = |x: &Tensor, format| Fp8Matrix::quantize(&x.contiguous()?, format, Fp8Copies::Both);
    let (qx, qw) = (quantize(x, Fp8Format::E4M3)?, quantize(weight, Fp8Format::E4M3)?);
    let qdy = quantize(dy, settings.gradient)?;
    let [x, dy, weight] = [x, dy, weight].map(|x| x.to_dtype(DType::F32));
    let (x, dy, weight) = (x?, dy?, weight?);
    let [of_y, of_dx, of_dw] = settings.sums;
    let error = |got: Tensor, exact: Tensor| -> candle_core::Result<f64> {
        let size = |x: &Tensor| sum_of_squares(&x.flatten_all()?)?.to_scalar::<f64>();
        let (difference, exact) = (size(&(got - &exact)?)?, size(&exact)?);
        Ok(if exact == 0.0 { 0.0 } else { (difference / exact).sqrt() })
    };
    Ok([
        error(qx.product(&qw, DType::F32, of_y)?, x.matmul(&weight.t()?)?)?,
        error(qdy.product(&qw.t(), DType::F32, of_dx)?, dy.matmul(&weight)?)?,
        error(qdy.t().product(&qx.t(), DType::F32, of_dw)?, dy.t()?.matmul(&x)?)?,
    ])
}
