//! Compares the gradient under a low-bit scheme with the gradient under unquantized attention on the same data: how
//! much of the error is noise, which averages out, and how much is a bias, which does not.
//!
//! Micro-batch `i` has the gradient `g_i` under unquantized attention and `h_i` under the scheme; `e_i = h_i - g_i` is
//! the error. `g_i` has the mean `G`, and `h_i` the mean `G + B`. Gradients of disjoint data are independent, so that
//! for `i != j` the expectation of `g_i . g_j` is `|G|^2` and that of `e_i . e_j` is `|B|^2`, the squared bias. The
//! rest of `|g_i|^2` and `|e_i|^2` is noise, which falls with the number of tokens (for `g_i`: arXiv 1812.06162,
//! appendix A). A binary tree over the micro-batches sums gradients and errors, and computes each sum's squared norm.
//! The dot products follow from these norms: for sums `a` and `b` over disjoint micro-batches,
//! `2 a . b = |a + b|^2 - |a|^2 - |b|^2`.

use std::ops::Range;
use std::path::Path;

use candle_core::Tensor;
use candle_sage::{Error, Result, Scheme, ops};

use crate::data::{Batch, Batches, Dataset};
use crate::device::DeviceKind;
use crate::metrics::{BLOCKS, GradientErrors, Part, Squares, Sums};
use crate::model::{Input, Llama, LlamaConfig, Parameters};
use crate::settings::{Settings, in_words_by_layer};
use crate::trained::Trained;
use crate::{bar, notify, on_device};

use super::low_bit;

/// What to measure.
#[derive(Debug, Clone)]
pub struct Extent {
    /// Schemes to compare with unquantized attention, one at a time in all layers. If empty: the scheme that each
    /// layer of the model has, or SageBwd for a model with unquantized attention.
    pub schemes: Vec<Scheme>,
    /// Number of micro-batches, a power of two, at least twice [`BLOCKS`].
    pub micro_batches: usize,
}

/// Measures the errors that low-bit attention causes in the gradients of a run, one of its checkpoints, or a model in
/// Hugging Face's format. The data is the validation data that is set in `settings`. If none is set, it is the training
/// data that would follow the model's last step.
///
/// # Errors
/// When the folder has no weights; when the data is missing, has changed or is too short; when the model has no dense
/// attention; when the number of micro-batches is not a power of two of at least 16; when memory is short.
pub fn gradient_errors(
    folder: &Path,
    device_kind: DeviceKind,
    settings: Settings,
    extent: &Extent,
) -> Result<Vec<GradientErrors>> {
    let count = extent.micro_batches;
    if !count.is_power_of_two() || count < 2 * BLOCKS {
        return Err(Error::new("--micro-batches is not a power of two, or is below 16")
            .got(count)
            .allowed("16, 32, 64, ..")
            .hint("confidence intervals need eight blocks of at least two micro-batches each"));
    }
    let own_data = settings.data.val_data.is_none();
    let trained = Trained::open(folder, device_kind, settings, true)?;
    trained.check_attention(folder)?;
    let Trained { config, parameters, device, .. } = &trained;
    if config.model.sla2.is_some() {
        return Err(Error::unsupported("the probe of gradients does not support SLA2")
            .got(format!("--attn {}", config.attn))
            .allowed("a model with dense attention")
            .hint("--selections measures the error of block selections"));
    }
    let load = if own_data { Dataset::load } else { Dataset::load_to_validate };
    let data = load(&config.data, &|line| notify(line))?;
    trained.check_data(folder, &data)?;
    let mixture = if own_data { &data.train } else { &data.validation };
    let mut batches = Batches::new(mixture, config.data.cut(&data.tokenizer));
    if own_data && trained.sequences_seen.is_none() {
        notify(
            "the sequences that the model was trained on are unknown: the probe starts with the first sequence, which \
             the model may have seen in training",
        );
    }
    let first = trained.sequences_seen.filter(|_| own_data).unwrap_or(0);
    check_disjoint(&mut batches, first, count.saturating_mul(config.micro_batch))?;
    let arms = arms(&config.model, &config.settings, &extent.schemes);
    let make = |model: &LlamaConfig| {
        Llama::new(model, parameters, device).map_err(on_device("cannot make the model"))
    };
    let exact = make(&with_scheme(&config.model, Scheme::Unquantized))?;
    let models = arms.iter().map(|(_, model)| make(model)).collect::<Result<Vec<_>>>()?;
    let parts = parts(parameters).map_err(on_device("the probe failed"))?;
    let mut tree = Tree::new(parts, arms.len(), count);
    let template = "{bar:30.cyan/blue} {pos}/{len} gradients [{elapsed}, ETA {eta}]";
    let bar = bar((count * (1 + models.len())) as u64, template);
    for n in 0..count {
        let sequences = batches.shuffled(first + (n * config.micro_batch) as u64, config.micro_batch)?;
        let mut measure = || -> candle_core::Result<()> {
            let batch = sequences.to_device(device)?;
            let exact = gradient(&exact, parameters, &batch)?.copy()?;
            bar.inc(1);
            let mut errors = Vec::with_capacity(models.len());
            for model in &models {
                errors.push((gradient(model, parameters, &batch)? - &exact)?);
                bar.inc(1);
            }
            tree.push(exact, errors)
        };
        measure().map_err(on_device("the probe failed"))?;
    }
    bar.finish_and_clear();
    let tokens = (config.micro_batch * config.model.context) as u64;
    let of = |(arm, (scheme, _)): (usize, (String, LlamaConfig))| GradientErrors {
        scheme,
        step: trained.step,
        tokens,
        parts: tree.of_arm(arm),
    };
    Ok(arms.into_iter().enumerate().map(of).collect())
}

/// Checks that the training sequences `first..first + count` are distinct: the bias is estimated from micro-batches
/// without common sequences.
fn check_disjoint(batches: &mut Batches, first: u64, count: usize) -> Result<()> {
    let all = batches.sequences();
    let different = if count as u64 > all { all } else { batches.different(first, count) as u64 };
    if different == count as u64 {
        return Ok(());
    }
    Err(Error::new("the data is too short for so many micro-batches")
        .got(format!("{different} distinct sequences"))
        .allowed(format!("{count} distinct sequences: errors of repeated sequences would count as bias"))
        .hint("fewer --micro-batches, a smaller --micro-batch, or more text with --data"))
}

/// The model with one scheme in all layers.
fn with_scheme(model: &LlamaConfig, scheme: Scheme) -> LlamaConfig {
    LlamaConfig { scheme: Some(scheme), layer_schemes: Default::default(), ..model.clone() }
}

/// The models to compare with unquantized attention, each with the names of its schemes.
fn arms(model: &LlamaConfig, settings: &Settings, schemes: &[Scheme]) -> Vec<(String, LlamaConfig)> {
    if !schemes.is_empty() {
        return schemes.iter().map(|scheme| (scheme.to_string(), with_scheme(model, *scheme))).collect();
    }
    if model.layer_schemes.is_empty() {
        let scheme = low_bit(model, settings);
        return vec![(scheme.to_string(), with_scheme(model, scheme))];
    }
    let base = model.scheme.map_or(String::new(), |scheme| scheme.to_string());
    vec![(format!("{base}, {}", in_words_by_layer(&model.layer_schemes)), model.clone())]
}

/// The gradient of a micro-batch. The next call overwrites this tensor, which belongs to `parameters`.
fn gradient<'a>(model: &Llama, parameters: &'a Parameters, batch: &Batch) -> candle_core::Result<&'a Tensor> {
    parameters.clear_gradients()?;
    model.train(Input { ids: &batch.ids, documents: batch.documents.as_ref() }, &batch.targets)?;
    parameters.gradients()
}

/// The name of a parameter group, and the ranges of its parameters in the gradient.
type Ranges = (String, Vec<Range<usize>>);

/// Groups the parameters: one group for the embedding and the output matrix together, one for each layer, and one for
/// the last norm.
fn parts(parameters: &Parameters) -> candle_core::Result<Vec<Ranges>> {
    let mut parts: Vec<Ranges> = Vec::new();
    for spec in parameters.specs() {
        let mut words = spec.name.split('.').skip(1);
        let name = match (words.next(), words.next()) {
            (Some("layers"), Some(layer)) => format!("layer {layer}"),
            (Some("norm"), _) => "norm".into(),
            _ => "embedding".into(),
        };
        let range = parameters.range(&spec.name)?;
        match parts.iter_mut().find(|(other, _)| *other == name) {
            Some((_, ranges)) => ranges.push(range),
            None => parts.push((name, vec![range])),
        }
    }
    Ok(parts)
}

/// The exact gradient and the errors under each scheme, summed over `count` consecutive micro-batches.
struct Node {
    count: usize,
    exact: Tensor,
    /// The errors of each scheme.
    errors: Vec<Tensor>,
}

/// The squared norms of the gradients and errors in a [`Node`], by scheme and parameter group.
type Norms = Vec<Vec<Squares>>;

/// A binary tree of [`Node`]s. Only nodes that wait for their siblings are in memory, at most one for each `count`.
struct Tree {
    parts: Vec<Ranges>,
    schemes: usize,
    /// Number of micro-batches in one of the [`BLOCKS`] blocks.
    block: usize,
    /// Number of micro-batches in all blocks.
    all: usize,
    waiting: Vec<Node>,
    /// For 1, 2, 4, .. micro-batches: the number of nodes of this size, and the sum of these nodes' squared norms.
    levels: Vec<(usize, Norms)>,
    /// For each block of micro-batches: the squared norms of the block's [`Node`], and the value of `each` after the
    /// block's last micro-batch.
    blocks: Vec<(Norms, Norms)>,
    /// The sum of the [`Norms`] of single micro-batches, over the micro-batches of the current block (one of
    /// [`BLOCKS`]).
    each: Norms,
}

impl Tree {
    fn new(parts: Vec<Ranges>, schemes: usize, all: usize) -> Self {
        let none = vec![vec![Squares::default(); parts.len()]; schemes];
        let levels = vec![(0, none.clone()); all.ilog2() as usize + 1];
        let block = all / BLOCKS;
        Self { parts, schemes, block, all, waiting: Vec::new(), levels, blocks: Vec::new(), each: none }
    }

    /// Adds a micro-batch: its exact gradient, and the error of each scheme.
    fn push(&mut self, exact: Tensor, errors: Vec<Tensor>) -> candle_core::Result<()> {
        let mut node = Node { count: 1, exact, errors };
        loop {
            let norms = self.norms(&node)?;
            let (nodes, sum) = &mut self.levels[node.count.ilog2() as usize];
            *nodes += 1;
            add(sum, &norms);
            if node.count == 1 {
                add(&mut self.each, &norms);
            }
            if node.count == self.block {
                let none = vec![vec![Squares::default(); self.parts.len()]; self.schemes];
                self.blocks.push((norms, std::mem::replace(&mut self.each, none)));
            }
            match self.waiting.pop_if(|other| other.count == node.count) {
                None => break,
                Some(other) => {
                    ops::add_into(&other.exact, &node.exact)?;
                    other.errors.iter().zip(&node.errors).try_for_each(|(a, b)| ops::add_into(a, b))?;
                    node = Node { count: 2 * node.count, ..other };
                }
            }
        }
        self.waiting.push(node);
        Ok(())
    }

    fn norms(&self, node: &Node) -> candle_core::Result<Norms> {
        let squares = |tensor: &Tensor| -> candle_core::Result<Vec<f64>> {
            let mut all = Vec::new();
            for range in self.parts.iter().flat_map(|(_, ranges)| ranges) {
                all.push(ops::sum_of_squares(&tensor.narrow(0, range.start, range.len())?)?);
            }
            let all = Tensor::stack(&all, 0)?.to_vec1::<f64>()?;
            let mut all = all.iter();
            let part = |(_, ranges): &Ranges| all.by_ref().take(ranges.len()).sum();
            Ok(self.parts.iter().map(part).collect())
        };
        let exact = squares(&node.exact)?;
        let of_error = |error: &Tensor| -> candle_core::Result<Vec<Squares>> {
            let (low, error) = (squares(&(&node.exact + error)?)?, squares(error)?);
            let part = |n: usize| Squares { exact: exact[n], low: low[n], error: error[n] };
            Ok((0..exact.len()).map(part).collect())
        };
        node.errors.iter().map(of_error).collect()
    }

    /// The measurements of a scheme: first those of the whole model, then those of each parameter group.
    fn of_arm(&self, arm: usize) -> Vec<Part> {
        let whole = |norms: &Norms| {
            let mut sum = Squares::default();
            norms[arm].iter().for_each(|part| sum.add(part));
            sum
        };
        let part = |name: &str, of: &dyn Fn(&Norms) -> Squares| {
            let block = |(of_sum, of_each): &(Norms, Norms)| Sums {
                count: self.block,
                of_sum: of(of_sum),
                of_each: of(of_each),
            };
            let level = |(n, (nodes, sum)): (usize, &(usize, Norms))| {
                let count = 1usize << n;
                (count, of(sum).times(1.0 / (nodes * count * count) as f64))
            };
            let (first, last) = (&self.levels[0].1, &self.levels[self.levels.len() - 1].1);
            Part {
                name: name.into(),
                curve: self.levels.iter().enumerate().map(level).collect(),
                whole: Sums { count: self.all, of_sum: of(last), of_each: of(first) },
                blocks: self.blocks.iter().map(block).collect(),
            }
        };
        let mut parts = vec![part("all", &whole)];
        parts.extend(self.parts.iter().enumerate().map(|(n, (name, _))| part(name, &|norms| norms[arm][n])));
        parts
    }
}

fn add(sum: &mut Norms, norms: &Norms) {
    let pairs = sum.iter_mut().flatten().zip(norms.iter().flatten());
    pairs.for_each(|(sum, norm)| sum.add(norm));
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;
    use rand_distr::{Distribution, StandardNormal};

    use super::*;

    /// The estimated squared norms of the mean gradient and of the bias (the mean error) are within 3 standard errors
    /// of the known values. The dot product of two noise vectors of `d` elements with variance `s2` has the standard
    /// deviation `s2 sqrt(d)`. Averaged over the `n (n - 1) / 2` pairs of `n` vectors, it has the standard deviation
    /// `s2 sqrt(2 d) / n`. Each vector is noise plus a known vector `m` (the mean gradient or the bias). In the same
    /// average, the dot products of noise with `m` have the standard deviation `2 |m| sqrt(s2 / n)`. The test takes the
    /// sum of both deviations as the standard error.
    #[test]
    fn a_known_bias_is_found() -> candle_core::Result<()> {
        const D: usize = 20_000;
        const COUNT: usize = 64;
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut normal = |size: f64| -> Vec<f32> {
            let draw = |_| (size * Distribution::<f64>::sample(&StandardNormal, &mut rng)) as f32;
            (0..D).map(draw).collect()
        };
        let (mean, bias) = (normal(0.1), normal(0.02));
        let (noise, error_noise) = (1.0, 0.05);
        let halves = vec![
            ("embedding".into(), vec![0..100, 100..D / 4]),
            ("layer 0".into(), vec![D / 4..D / 2, D / 2..D]),
        ];
        let mut tree = Tree::new(halves, 1, COUNT);
        for _ in 0..COUNT {
            let sum = |a: &[f32], b: Vec<f32>| -> Vec<f32> { a.iter().zip(b).map(|(a, b)| a + b).collect() };
            let tensor = |x: Vec<f32>| Tensor::from_vec(x, D, &Device::Cpu);
            let exact = tensor(sum(&mean, normal(noise)))?;
            tree.push(exact, vec![tensor(sum(&bias, normal(error_noise)))?])?;
        }
        let parts = tree.of_arm(0);
        assert_eq!(
            parts.iter().map(|part| part.name.as_str()).collect::<Vec<_>>(),
            ["all", "embedding", "layer 0"]
        );
        let squares = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
        let near = |got: f64, mean: f64, variance: f64, count: usize| {
            let (d, n) = (D as f64, count as f64);
            let error = variance * (2.0 * d).sqrt() / n + 2.0 * (mean * variance / n).sqrt();
            assert!((got - mean).abs() < 3.0 * error, "{got} for {mean}, standard error {error}");
        };
        let (of_mean, of_bias) = (squares(&mean), squares(&bias));
        for sums in parts[0].blocks.iter().chain([&parts[0].whole]) {
            near(sums.mean_squares().exact, of_mean, noise.powi(2), sums.count);
            near(sums.mean_squares().error, of_bias, error_noise.powi(2), sums.count);
            let apart = sums.variances().exact / (D as f64 * noise.powi(2)) - 1.0;
            // The relative standard error of the variance of n values is `sqrt(2 / n)`.
            assert!(apart.abs() < 3.0 * (2.0 / (D * sums.count) as f64).sqrt(), "{apart}");
        }
        // The mean over `count` gradients divides the variance of their errors by `count` and keeps the bias.
        for (count, squares) in &parts[0].curve {
            let expected = of_bias + D as f64 * error_noise.powi(2) / *count as f64;
            assert!(
                (squares.error / expected - 1.0).abs() < 0.1,
                "{count}: {} for {expected}",
                squares.error
            );
        }
        let added = parts[1].whole.of_sum.low + parts[2].whole.of_sum.low;
        assert!((added / parts[0].whole.of_sum.low - 1.0).abs() < 1e-12);
        assert_eq!(parts[0].blocks.len(), BLOCKS);
        Ok(())
    }
}
