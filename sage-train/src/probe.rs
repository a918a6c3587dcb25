//! Measures the errors of low-bit attention, and of linear layers in FP8, against unquantized computation. On the
//! tensors of a trained model, errors are measured for each layer and head (Table 2 of arXiv 2603.02170), optionally
//! with only one matmul or operand quantized. The magnitudes of these tensors are measured too. On random tensors,
//! errors are measured for several standard deviations of Q and K (Table 1).

pub mod anatomy;
mod attn_qat;
pub mod gradient;
pub mod linear;
mod measures;
mod sagebwd;
pub mod selected;
mod sigma;

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_sage::{Error, Result, SageBwd, Scheme};
use rayon::prelude::*;

use crate::config::check_own;
use crate::data::{Batches, Dataset, Mixture, SequenceSplit, Tokenizer};
use crate::device::{DeviceKind, free_memory};
use crate::metrics::{Probed, QUANTITIES, RESULTS, Row, Sizes};
use crate::model::{BackwardObserver, Llama, LlamaConfig, Parameters, Training};
use crate::quantity::gib;
use crate::ranks::Ranks;
use crate::settings::{Attn, Settings};
use crate::trained::Trained;
use crate::{bar, during, notify};

use anatomy::{Anatomy, Inputs, OutOfRange, Quantities, QuantizedParts, bytes};
use attn_qat::AttnQatAnatomy;
use measures::{Sums, outlying};
use sagebwd::SageBwdAnatomy;
pub use sigma::{Shape, SigmaRow, sigma_table};

/// What to measure.
#[derive(Debug, Clone, Copy)]
pub struct ProbeOptions {
    /// Number of validation sequences.
    pub sequences: usize,
    /// Whether to also report each head.
    pub heads: bool,
    /// Whether to also measure, for each matmul or operand, the errors if only this one is quantized.
    pub products: bool,
    /// Factor by which queries and keys are multiplied.
    pub qk_scale: f64,
    /// Whether each token of Q and K has a separate scale instead of the scale of its tile.
    pub token_scales: bool,
}

impl Default for ProbeOptions {
    fn default() -> Self {
        Self { sequences: 4, heads: false, products: false, qk_scale: 1.0, token_scales: false }
    }
}

/// Probes a run, one of its checkpoints, or a model in Hugging Face's format. Validation sequences run through the
/// model with unquantized attention. Attention on each layer's Q, K, V and dO is then computed again with the run's
/// low-bit scheme (SageBwd, if the run has none). `settings` override the run's settings. `typed` are the settings on
/// the command line. Those for attention must apply to the probed scheme.
///
/// # Errors
/// When the folder has no weights, the run's data is missing or has changed, or the model has no attention.
pub fn probe(folder: &Path, options: ProbeOptions, settings: Settings, typed: &Settings) -> Result<Probed> {
    // The probe runs on the CPU, and therefore in f32, even if the model was trained on a GPU.
    let trained = Trained::open(folder, DeviceKind::Cpu, settings, true)?;
    trained.check_attention(folder)?;
    let Trained { config, parameters, .. } = &trained;
    let scheme = low_bit(&config.model, &config.settings);
    check_own(typed, scheme.into(), Some(scheme), None)?;
    scheme.validate()?;
    let data = Dataset::load_to_validate(&config.data, &|line| notify(line))?;
    trained.check_data(folder, &data)?;
    let cut = config.data.cut(&data.tokenizer);
    if cut.end_of_document.is_some() {
        notify(
            "the model was trained with attention inside documents, and is probed with attention over whole sequences",
        );
    }
    let mut probed = probe_model(&config.model, parameters, scheme, (&data.validation, cut), options)?;
    probed.step = trained.step;
    Ok(probed)
}

/// The scheme to probe: the model's, or SageBwd for a model that was trained with unquantized attention. If the model
/// has a soft cap or sinks, this SageBwd has no smoothing.
pub fn low_bit(model: &LlamaConfig, settings: &Settings) -> Scheme {
    if let Some(scheme) = model.scheme.filter(|scheme| *scheme != Scheme::Unquantized) {
        return scheme;
    }
    let scheme = Attn::from(SageBwd::default()).scheme(settings).unwrap_or_default();
    if model.needs_logits() { scheme.without_smoothing() } else { scheme }
}

/// The dense f64 implementation of a scheme.
fn anatomy_of(scheme: Scheme, token_scales: bool) -> Result<Box<dyn Anatomy>> {
    match scheme {
        Scheme::SageBwd(settings) => Ok(Box::new(SageBwdAnatomy { settings, token_scales })),
        Scheme::AttnQat(_) if token_scales => Err(Error::new("--token-scales applies only to SageBwd")
            .got(format!("--token-scales with {scheme}"))
            .allowed("sagebwd")
            .hint("leave --token-scales out, or use --attn sagebwd")),
        Scheme::AttnQat(settings) => Ok(Box::new(AttnQatAnatomy { settings })),
        _ => Err(Error::new("this scheme cannot be probed")
            .got(scheme)
            .allowed("sagebwd, attn-qat")
            .hint("choose one of them: --attn sagebwd")),
    }
}

/// Like [`probe`], for a model on the CPU with its parameters in memory.
///
/// # Errors
/// When memory is short, or the scheme cannot be probed.
pub fn probe_model(
    config: &LlamaConfig,
    parameters: &Parameters,
    scheme: Scheme,
    (text, cut): (&Mixture, SequenceSplit),
    options: ProbeOptions,
) -> Result<Probed> {
    let anatomy = anatomy_of(scheme, options.token_scales)?;
    let group = config.heads / config.key_heads;
    let needed = bytes(cut.context, group);
    if needed > available() {
        return Err(Error::new("this machine does not have enough memory to probe sequences of this length")
            .got(format!(
                "{} tokens: {:.1} GiB for one head, {:.1} free",
                cut.context,
                gib(needed),
                gib(available())
            ))
            .allowed("shorter sequences: the probe stores all of P, dP and dS")
            .hint("use a shorter --context"));
    }
    // The probe does not support the document mask: it computes attention over whole sequences.
    let cut = SequenceSplit { end_of_document: None, ..cut };
    let batches = Batches::new(text, cut);
    let sequences = options.sequences.min(batches.sequences() as usize);
    let layers = trace(config, parameters, &batches, sequences)?;
    let heads = [config.heads, config.key_heads];
    let bar = bar(layers.len() as u64, "{bar:30.cyan/blue} layer {pos}/{len} [{elapsed}, ETA {eta}]");
    let mut rows = Vec::new();
    for (layer, mut tensors) in layers.into_iter().enumerate() {
        for tensor in &mut tensors[..2] {
            *tensor = (&*tensor * options.qk_scale).map_err(during("the probe failed"))?;
        }
        let found =
            tensors_of_layers(&tensors, heads, &*anatomy, options).map_err(during("the probe failed"))?;
        rows.extend(found.rows(layer, options.heads));
        bar.inc(1);
    }
    bar.finish_and_clear();
    let (scheme, context) = (scheme.to_string(), cut.context);
    Ok(Probed {
        scheme,
        step: None,
        context,
        sequences,
        qk_scale: options.qk_scale,
        token_scales: options.token_scales,
        rows,
    })
}

/// `model` with unquantized attention, or unchanged if it has no attention.
fn unquantized(model: &LlamaConfig) -> LlamaConfig {
    LlamaConfig {
        scheme: model.scheme.map(|_| Scheme::Unquantized),
        layer_schemes: BTreeMap::new(),
        sla2: None,
        ..model.clone()
    }
}

/// Every layer's query, key, value and gradient of attention's output, from the model with unquantized attention. The
/// model's windows, soft cap and sinks apply here, but not in the probe's measurements.
fn trace(
    model: &LlamaConfig,
    parameters: &Parameters,
    batches: &Batches<'_>,
    sequences: usize,
) -> Result<Vec<[Tensor; 4]>> {
    let windows = model.windows.as_ref().map(|windows| format!("windows {windows}"));
    let cap = model.softcap.map(|cap| format!("a soft cap of {cap}"));
    for part in [windows, cap, model.sinks.then(|| "sinks".into())].into_iter().flatten() {
        notify(&format!(
            "the model has {part}: the probe measures attention without windows, soft cap and sinks"
        ));
    }
    let llama =
        Llama::new(&unquantized(model), parameters, &Device::Cpu).map_err(during("the probe failed"))?;
    let batch =
        batches.in_order(0, sequences)?.to_device(&Device::Cpu).map_err(during("the probe failed"))?;
    let mut layers = Vec::new();
    let mut observe = |[q, k, v]: [&Tensor; 3], dout: &Tensor| {
        layers.push([q.clone(), k.clone(), v.clone(), dout.clone()]);
        Ok(())
    };
    llama
        .train_observed(
            &batch.ids,
            &batch.targets,
            BackwardObserver { observe: Some(&mut observe), layer_done: None },
        )
        .map_err(during("the probe failed"))?;
    layers.reverse();
    Ok(layers)
}

/// The measurements of a layer, for each query head.
struct LayerErrors {
    heads: Vec<HeadErrors>,
}

#[derive(Clone, Default)]
struct HeadErrors {
    errors: BTreeMap<&'static str, Sums>,
    sizes: Option<Sizes>,
    /// For each of [`Anatomy::parts`], a matmul or operand: the errors of O, dQ, dK and dV if only it is quantized.
    products: Vec<(&'static str, [Option<Sums>; 4])>,
    out_of_range: Vec<(&'static str, OutOfRange)>,
    /// Number of (sequence, query head) pairs over which the sums are taken.
    count: usize,
}

impl HeadErrors {
    fn join(&mut self, other: &Self) {
        other.errors.iter().for_each(|(name, sums)| self.errors.entry(name).or_default().add(*sums));
        for (n, (part, sums)) in other.products.iter().enumerate() {
            if self.products.len() == n {
                self.products.push((*part, [None; 4]));
            }
            for (into, sums) in self.products[n].1.iter_mut().zip(sums.iter()) {
                sums.iter().for_each(|sums| into.get_or_insert_default().add(*sums));
            }
        }
        self.count += other.count;
        if let Some(sizes) = &other.sizes {
            let weight = other.count as f64 / self.count as f64;
            self.sizes.get_or_insert(*sizes).join(sizes, weight);
        }
        if self.out_of_range.is_empty() {
            self.out_of_range.clone_from(&other.out_of_range);
        }
        let weight = other.count as f64 / self.count as f64;
        for ((_, into), (_, groups)) in self.out_of_range.iter_mut().zip(&other.out_of_range) {
            into.vanished += weight * (groups.vanished - into.vanished);
            into.saturated += weight * (groups.saturated - into.saturated);
        }
    }

    fn row(&self, layer: usize, head: Option<usize>) -> Row {
        let of = |sums: &Sums| sums.distance();
        let shares = |of: fn(&OutOfRange) -> f64| {
            self.out_of_range.iter().map(|(name, groups)| ((*name).to_owned(), of(groups))).collect()
        };
        Row {
            layer,
            head,
            errors: self.errors.iter().map(|(name, sums)| ((*name).to_owned(), of(sums))).collect(),
            sizes: self.sizes,
            products: self
                .products
                .iter()
                .map(|(part, sums)| ((*part).to_owned(), sums.map(|sums| Some(of(&sums?).relative_l2))))
                .collect(),
            vanished: shares(|groups| groups.vanished),
            saturated: shares(|groups| groups.saturated),
        }
    }
}

impl LayerErrors {
    fn rows(&self, layer: usize, heads: bool) -> Vec<Row> {
        let mut whole = HeadErrors::default();
        self.heads.iter().for_each(|head| whole.join(head));
        let mut rows = vec![whole.row(layer, None)];
        if heads {
            rows.extend(self.heads.iter().enumerate().map(|(head, found)| found.row(layer, Some(head))));
        }
        rows
    }
}

/// The values of one head of one sequence of a (sequences, tokens, heads, head_dim) tensor.
fn head_of(x: &Tensor, sequence: usize, head: usize) -> candle_core::Result<Vec<f64>> {
    x.get(sequence)?.narrow(1, head, 1)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

/// Measures a layer: computes attention of every sequence and head with and without quantization, and compares the
/// two computations.
fn tensors_of_layers(
    tensors: &[Tensor; 4],
    [heads, key_heads]: [usize; 2],
    anatomy: &dyn Anatomy,
    options: ProbeOptions,
) -> candle_core::Result<LayerErrors> {
    let (sequences, tokens, _, head_dim) = tensors[0].dims4()?;
    let group = heads / key_heads;
    let pieces: Vec<(usize, usize)> =
        (0..key_heads).flat_map(|key| (0..sequences).map(move |sequence| (key, sequence))).collect();
    let piece = |&(key, sequence): &(usize, usize)| -> candle_core::Result<Vec<(usize, HeadErrors)>> {
        // The query heads of one key head are computed together, because the key head's gradients are sums over them.
        let inputs = (0..group)
            .map(|n| {
                let head = key * group + n;
                let rows = [
                    head_of(&tensors[0], sequence, head)?,
                    head_of(&tensors[1], sequence, key)?,
                    head_of(&tensors[2], sequence, key)?,
                    head_of(&tensors[3], sequence, head)?,
                ];
                Ok(Inputs { rows, tokens, head_dim })
            })
            .collect::<candle_core::Result<Vec<_>>>()?;
        let of = |low: QuantizedParts| -> candle_core::Result<Vec<Quantities>> {
            let all = inputs.iter().map(|inputs| anatomy.compute(inputs, low));
            let mut all = all.collect::<candle_core::Result<Vec<_>>>()?;
            share(&mut all);
            Ok(all)
        };
        let (exact, codes) = (of(QuantizedParts::None)?, of(QuantizedParts::All)?);
        let mut found: Vec<(usize, HeadErrors)> = (0..group)
            .map(|n| {
                let errors = errors(&codes[n], &exact[n], n == 0);
                let sizes = Some(sizes(&inputs[n], &exact[n], anatomy));
                let out_of_range = anatomy.out_of_range(&inputs[n], &exact[n]);
                (
                    key * group + n,
                    HeadErrors { errors, sizes, out_of_range, count: 1, ..HeadErrors::default() },
                )
            })
            .collect();
        if options.products {
            for (part, name) in anatomy.parts().iter().enumerate() {
                let alone = of(QuantizedParts::One(part))?;
                for (n, (_, found)) in found.iter_mut().enumerate() {
                    let got = errors(&alone[n], &exact[n], n == 0);
                    let sums = RESULTS.map(|name| got.get(name).copied());
                    found.products.push((*name, sums));
                }
            }
        }
        Ok(found)
    };
    let mut all = vec![HeadErrors::default(); heads];
    // Computes in parallel as many (key head, sequence) pairs as fit in the free memory.
    let at_once = (available() / bytes(tokens, group)).clamp(1, 1 << 16) as usize;
    for pieces in pieces.chunks(at_once) {
        let found = pieces.par_iter().map(piece).collect::<candle_core::Result<Vec<_>>>()?;
        found.into_iter().flatten().for_each(|(head, found)| all[head].join(&found));
    }
    Ok(LayerErrors { heads: all })
}

/// Bytes of free CPU memory; 8 GiB if the system does not report it.
fn available() -> u64 {
    free_memory().unwrap_or(8 << 30)
}

/// Sums the gradients dK and dV of a key head over its query heads, into the first query head's dK and dV.
fn share(heads: &mut [Quantities]) {
    let (first, others) = heads.split_at_mut(1);
    for other in others {
        for n in [1, 2] {
            let sum = first[0].gradients[n].iter_mut();
            sum.zip(&other.gradients[n]).for_each(|(into, x)| *into += x);
        }
    }
}

/// The errors of a query head. `first`: whether it is the first query head of its key head. Only then are the errors of
/// the key head's dK and dV included.
fn errors(got: &Quantities, exact: &Quantities, first: bool) -> BTreeMap<&'static str, Sums> {
    let pairs: [(&[f64], &[f64]); 8] = [
        (&got.delta, &exact.delta),
        (&got.p, &exact.p),
        (&got.dp, &exact.dp),
        (&got.ds, &exact.ds),
        (&got.o, &exact.o),
        (&got.gradients[0], &exact.gradients[0]),
        (&got.gradients[1], &exact.gradients[1]),
        (&got.gradients[2], &exact.gradients[2]),
    ];
    let all = QUANTITIES.into_iter().zip(pairs);
    all.filter(|(name, _)| first || !["dK", "dV"].contains(name))
        .map(|(name, (got, exact))| match name {
            // Above the diagonal P is 0, because queries do not attend to later keys. So no result depends on dP there.
            "dP" => (name, Sums::of(&seen(got, exact.len()), &seen(exact, exact.len()))),
            _ => (name, Sums::of(got, exact)),
        })
        .collect()
}

/// The values on and below the diagonal of a square matrix.
fn seen(values: &[f64], len: usize) -> Vec<f64> {
    let n = len.isqrt();
    values.chunks(n).enumerate().flat_map(|(i, row)| &row[..=i]).copied().collect()
}

fn sizes(inputs: &Inputs, exact: &Quantities, anatomy: &dyn Anatomy) -> Sizes {
    let (n, d) = (inputs.tokens, inputs.head_dim);
    let rms = |values: &[f64]| (values.iter().map(|x| x * x).sum::<f64>() / values.len() as f64).sqrt();
    let largest = |values: &[f64]| values.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    let (p, dp, ds) = (seen(&exact.p, n * n), seen(&exact.dp, n * n), seen(&exact.ds, n * n));
    let apart = exact.dp.chunks(n).enumerate().flat_map(|(i, row)| row[..=i].iter().map(move |x| (i, *x)));
    let apart = apart.fold(0.0, |most: f64, (i, dp)| most.max((dp - exact.delta[i]).abs()));
    let ([q, k], [tile_q, tile_k]) = (anatomy.smoothed(inputs), anatomy.tiles());
    Sizes {
        rms_p: rms(&p),
        rms_dp: rms(&dp),
        rms_ds: rms(&ds),
        bound_ds: apart * (2.0 / (n as f64 + 1.0)).sqrt(),
        largest_q: largest(&inputs.rows[0]),
        largest_k: largest(&inputs.rows[1]),
        largest_logit: largest(&seen(&exact.s, n * n)),
        outlying_queries: outlying(&q, d, tile_q),
        outlying_keys: outlying(&k, d, tile_k),
    }
}

/// Like [`probe`], during training: probes the weights that the run has just written.
///
/// # Errors
/// When the weights cannot be read, or memory is short.
pub fn probe_weights(
    config: &crate::config::Config,
    weights: &Path,
    (text, tokenizer): (&Mixture, &Tokenizer),
    step: u64,
) -> Result<Probed> {
    let parameters = Parameters::load(
        config.model.parameter_specs(),
        weights,
        &Device::Cpu,
        DType::F32,
        Some(Training::of_gradients(&Ranks::alone())),
    )?;
    let scheme = low_bit(&config.model, &config.settings);
    let options = ProbeOptions { sequences: 1, ..ProbeOptions::default() };
    let cut = config.data.cut(tokenizer);
    Ok(Probed { step: Some(step), ..probe_model(&config.model, &parameters, scheme, (text, cut), options)? })
}
