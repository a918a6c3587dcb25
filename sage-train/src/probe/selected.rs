//! Measures the errors of SLA2 (arXiv 2602.12675) on the heads of a model that was trained without SLA2. SLA2 attends
//! exactly to selected blocks, and approximates the others. [`WAYS`] lists the measured selections and approximations.

use std::path::Path;

use candle_core::{D, DType, Device, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW};
use candle_sage::ops::{Alpha, Tail, blend, past_linear};
use candle_sage::shape::AttentionShape;
use candle_sage::{Attention, Result, Router, Scheme, Selection, Sla2};
use serde::Serialize;

use super::{bar, during, trace};
use crate::checks::in_range;
use crate::data::{Batches, Dataset, SequenceSplit};
use crate::device::DeviceKind;
use crate::notify;
use crate::settings::Settings;
use crate::trained::Trained;

/// Number of training steps of the router. Its learning rate decays from `ROUTER_LR` to zero.
const ROUTER_STEPS: usize = 100;
const ROUTER_LR: f64 = 3e-3;

/// How blocks are selected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Chosen {
    /// The blocks with the largest probability mass in dense attention. A router cannot know them in advance.
    Best,
    /// By a router that was trained on other sequences.
    Learned,
    /// By an untrained router: it selects by dot products of the blocks' mean queries and mean keys.
    Identity,
    /// The blocks nearest to the query block, and the first block.
    Window,
}

/// The approximation of the blocks that are not selected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Unselected {
    /// Linear attention over all past blocks.
    Linear,
    /// As `Linear`, but the weight of the selected blocks in the output is the constant .85.
    Constant,
    /// The mean of all past values.
    Mean,
    /// Softmax attention over the mean keys and mean values of the past blocks.
    Pooled,
    /// The blocks that are not selected are skipped.
    Nothing,
}

/// The measured combinations of selection and approximation.
pub const WAYS: [(Chosen, Unselected); 10] = [
    (Chosen::Best, Unselected::Linear),
    (Chosen::Learned, Unselected::Linear),
    (Chosen::Identity, Unselected::Linear),
    (Chosen::Window, Unselected::Linear),
    (Chosen::Best, Unselected::Nothing),
    (Chosen::Identity, Unselected::Nothing),
    (Chosen::Window, Unselected::Nothing),
    (Chosen::Identity, Unselected::Constant),
    (Chosen::Identity, Unselected::Mean),
    (Chosen::Identity, Unselected::Pooled),
];

/// What to measure.
#[derive(Debug, Clone, Copy)]
pub struct SelectionOptions {
    /// Number of validation sequences. Routers and `theta`, which sets the weight of the selected blocks in the output,
    /// are fitted on the first half. Errors are measured on the second half.
    pub sequences: usize,
    /// Number of key blocks that a query block selects.
    pub blocks: usize,
    /// Tokens of a block. `None` means a sixteenth of the context, but at least 16 and at most 128 tokens.
    pub block: Option<usize>,
}

/// A layer's results, for all its heads and all measured sequences together.
#[derive(Debug, Clone, Serialize)]
pub struct LayerResult {
    /// Index of the layer, from 0.
    pub layer: usize,
    /// Relative L2 errors of the output against dense attention, one for each element of [`WAYS`].
    pub errors: Vec<f64>,
    /// Dense attention's probability mass on selected past blocks, divided by its mass on all past blocks. One number
    /// for each kind of selection, in the order of [`Chosen`].
    pub mass: [f64; 4],
}

/// The result of [`probe_selections`].
#[derive(Debug, Clone, Serialize)]
pub struct Selections {
    /// Tokens of a sequence.
    pub context: usize,
    /// Tokens of a block.
    pub block: usize,
    /// Number of measured sequences.
    pub measured: usize,
    /// Fraction of dense attention's (query, key) pairs that is skipped.
    pub sparsity: f64,
    /// The results of each layer.
    pub layers: Vec<LayerResult>,
}

/// Measures the errors of attention to selected blocks against dense attention, in the model in `folder`. `settings`
/// override that model's settings. If `folder` is not a run or checkpoint, `settings` must name the data.
///
/// # Errors
/// When the folder has no weights or data, or the context has fewer than two blocks.
pub fn probe_selections(
    folder: &Path,
    selecting: SelectionOptions,
    settings: Settings,
) -> Result<Selections> {
    let trained = Trained::open(folder, DeviceKind::Cpu, settings, true)?;
    trained.check_attention(folder)?;
    let Trained { config, parameters, .. } = &trained;
    let data = Dataset::load_to_validate(&config.data, &|line| notify(line))?;
    trained.check_data(folder, &data)?;
    let cut = SequenceSplit { end_of_document: None, ..config.data.cut(&data.tokenizer) };
    let block = selecting.block.unwrap_or((cut.context / 16).clamp(16, 128));
    in_range("block", block, 1, cut.context / 2)?;
    in_range("blocks", selecting.blocks, 0, cut.context / block)?;
    let batches = Batches::new(&data.validation, cut);
    let sequences = in_range("sequences", selecting.sequences.min(batches.sequences() as usize), 2, 1 << 12)?;
    let layers = trace(&config.model, parameters, &batches, sequences)?;
    let bar = bar(layers.len() as u64, "{bar:30.cyan/blue} layer {pos}/{len} [{elapsed}, ETA {eta}]");
    let (mut found, mut sparsity) = (Vec::new(), 0.0);
    for (layer, [q, k, v, _]) in layers.into_iter().enumerate() {
        let measured = of_layer([&q, &k, &v], (selecting.blocks, block))
            .map_err(during("the probe of selections failed"))?;
        sparsity = measured.2;
        found.push(LayerResult { layer, errors: measured.0, mass: measured.1 });
        bar.inc(1);
    }
    bar.finish_and_clear();
    let measured = sequences - sequences / 2;
    Ok(Selections { context: cut.context, block, measured, sparsity, layers: found })
}

/// Queries, keys and values of one layer for some sequences, and the output of dense attention.
struct Part {
    inputs: [Tensor; 3],
    out: Tensor,
    shape: AttentionShape,
}

impl Part {
    fn new(inputs: [&Tensor; 3], first: usize, count: usize) -> candle_core::Result<Self> {
        let [q, k, v] = inputs.map(|x| x.narrow(0, first, count)?.contiguous());
        let inputs = [q?, k?, v?];
        let [q, k, v] = &inputs;
        let out = Attention::new(Scheme::Unquantized).causal(true).apply(q, k, v)?;
        let shape = AttentionShape::new(q.dims4()?, k.dims4()?, v.dims4()?, true, None)?;
        Ok(Self { inputs, out, shape })
    }

    /// Each query's attention probability, summed over each key block: (batch, token, query head, block). The sums are
    /// the output of attention if each key's value vector is the one-hot code of the key's block. A value vector has
    /// head_dim elements, so one call of attention covers head_dim blocks.
    fn mass(&self, block: usize) -> candle_core::Result<Tensor> {
        let [q, k, _] = &self.inputs;
        let (batch, tokens, key_heads, d) = k.dims4()?;
        let number = |first: usize, token: usize, channel: usize| token / block == first + channel;
        let parts = (0..tokens.div_ceil(block)).step_by(d).map(|first| {
            let ones: Vec<f32> = (0..tokens)
                .flat_map(|token| {
                    (0..d).map(move |channel| f32::from(u8::from(number(first, token, channel))))
                })
                .collect();
            let values = Tensor::from_vec(ones, (1, tokens, 1, d), &Device::Cpu)?;
            let values = values.broadcast_as((batch, tokens, key_heads, d))?.contiguous()?;
            Attention::new(Scheme::Unquantized).causal(true).apply(q, k, &values)
        });
        Tensor::cat(&parts.collect::<candle_core::Result<Vec<_>>>()?, D::Minus1)
    }

    /// The blocks with the largest probability mass.
    fn best(&self, blocks: usize, block: usize) -> candle_core::Result<Selection> {
        let (group, len) = (self.shape.group(), self.shape.query_len());
        let mass = self.mass(block)?;
        let mut of_blocks = Vec::new();
        for first in (0..len).step_by(block) {
            let rows = mass.narrow(1, first, block.min(len - first))?.sum(1)?;
            let (batch, heads, columns) = rows.dims3()?;
            of_blocks.push(rows.reshape((batch, heads / group, group, columns))?.sum(2)?.to_vec3::<f32>()?);
        }
        Selection::from_lists(&self.shape, (block, block), &Device::Cpu, |at| {
            let mass = &of_blocks[at.block][at.segment][at.key_head];
            let mut order: Vec<usize> = (0..at.candidates).collect();
            order.sort_by(|&a, &b| mass[b].total_cmp(&mass[a]));
            order.truncate(blocks);
            order
        })
    }

    /// All approximations of the attention to blocks that are not selected. They do not depend on which blocks
    /// `selection` selects.
    fn tails(&self, selection: &Selection, block: usize) -> candle_core::Result<[(Unselected, Tensor); 5]> {
        let [q, k, v] = &self.inputs;
        let linear = past_linear(q, k, v, selection, Tail::Past)?;
        // With queries and keys of zero, linear attention weights all tokens of past blocks equally, so the result is
        // the mean of their values.
        let mean = past_linear(&q.zeros_like()?, &k.zeros_like()?, v, selection, Tail::Past)?;
        Ok([
            (Unselected::Linear, linear.clone()),
            (Unselected::Constant, linear),
            (Unselected::Mean, mean),
            (Unselected::Pooled, self.pooled(block)?),
            (Unselected::Nothing, self.out.zeros_like()?),
        ])
    }

    /// Softmax attention over the mean keys and mean values of past blocks. The result is meaningless for queries of
    /// the first block, which have no past block.
    fn pooled(&self, block: usize) -> candle_core::Result<Tensor> {
        let [q, k, v] = &self.inputs;
        let (batch, tokens, heads, d) = q.dims4()?;
        let (whole, group) = (tokens / block, self.shape.group());
        let means = |x: &Tensor| -> candle_core::Result<Tensor> {
            let (_, _, key_heads, _) = x.dims4()?;
            let x = x.narrow(1, 0, whole * block)?.reshape((batch, whole, block, key_heads, d))?.mean(2)?;
            // (batch, key heads, blocks, d), repeated for each query head of a group.
            let x = x.transpose(1, 2)?.unsqueeze(2)?;
            x.broadcast_as((batch, key_heads, group, whole, d))?.reshape((batch, heads, whole, d))
        };
        let logits = (q.transpose(1, 2)?.contiguous()?.matmul(&means(k)?.t()?.contiguous()?)?
            * self.shape.default_softmax_scale())?;
        let hidden: Vec<f32> = (0..tokens)
            .flat_map(|token| {
                (0..whole).map(move |at| if at < token / block { 0.0 } else { f32::NEG_INFINITY })
            })
            .collect();
        // Queries of the first block see no past block. Their logits can have any finite value, because their result
        // later gets weight zero.
        let hidden: Vec<f32> =
            hidden.into_iter().enumerate().map(|(n, x)| if n < block * whole { 0.0 } else { x }).collect();
        let logits = logits.broadcast_add(&Tensor::from_vec(hidden, (tokens, whole), &Device::Cpu)?)?;
        let weights = candle_nn::ops::softmax_last_dim(&logits.contiguous()?)?;
        weights.matmul(&means(v)?.contiguous()?)?.transpose(1, 2)?.contiguous()
    }

    /// For each query head, the squared distance between the output of dense attention and the blend of `picked.out`
    /// and `tail`.
    fn distances(
        &self,
        picked: &SelectedBlocks,
        tail: &Tensor,
        theta: &[f32],
        alpha: Alpha,
    ) -> candle_core::Result<Vec<f32>> {
        let theta = Tensor::new(theta, &Device::Cpu)?;
        let out = blend(&picked.out, tail, &theta, &picked.selection, alpha)?;
        (out - &self.out)?.sqr()?.sum((0, 1, 3))?.to_vec1()
    }
}

/// The selected blocks of some sequences, and the output of attention to only these blocks.
struct SelectedBlocks {
    selection: Selection,
    out: Tensor,
}

impl SelectedBlocks {
    fn new(part: &Part, selection: Selection) -> candle_core::Result<Self> {
        let [q, k, v] = &part.inputs;
        let out = Attention::new(Scheme::Unquantized).causal(true).select(&selection).apply(q, k, v)?;
        Ok(Self { selection, out })
    }
}

/// For each query head, the `theta` that minimizes `distances`, or a constant if `rest` is `Constant` or `Nothing`.
fn fit(
    part: &Part,
    picked: &SelectedBlocks,
    rest: Unselected,
    tail: &Tensor,
) -> candle_core::Result<Vec<f32>> {
    let heads = part.shape.query_heads();
    match rest {
        // sigmoid(1.7346) = .85
        Unselected::Constant => return Ok(vec![1.7346; heads]),
        Unselected::Nothing => return Ok(vec![f32::INFINITY; heads]),
        _ => {}
    }
    let mut best = vec![(f32::INFINITY, 0.0); heads];
    for step in -24..=40 {
        let theta = step as f32 / 4.0;
        let distances = part.distances(picked, tail, &vec![theta; heads], Alpha::Count)?;
        for (best, distance) in best.iter_mut().zip(distances) {
            if distance < best.0 {
                *best = (distance, theta);
            }
        }
    }
    Ok(best.into_iter().map(|(_, theta)| theta).collect())
}

/// A router that is trained to select the blocks with the largest probability mass in dense attention.
fn learn(op: &Sla2, part: &Part) -> candle_core::Result<Router> {
    let [q, k, _] = &part.inputs;
    let start = Router::new(part.shape.key_heads(), part.shape.head_dim(), &Device::Cpu)?;
    let vars = start.weights().map(Var::from_tensor);
    let [query, key] = vars;
    let (query, key) = (query?, key?);
    let settings = ParamsAdamW { lr: ROUTER_LR, weight_decay: 0.0, ..ParamsAdamW::default() };
    let mut adam = AdamW::new(vec![query.clone(), key.clone()], settings)?;
    let router = Router::from_tensors(query.as_tensor().clone(), key.as_tensor().clone())?;
    for step in 0..ROUTER_STEPS {
        adam.set_learning_rate(ROUTER_LR * (1.0 - step as f64 / ROUTER_STEPS as f64));
        adam.backward_step(&op.router_loss(&router, q, k)?)?;
    }
    Router::from_tensors(query.as_detached_tensor(), key.as_detached_tensor())
}

/// Returns [`LayerResult::errors`], [`LayerResult::mass`] and [`Selections::sparsity`].
fn of_layer(
    inputs: [&Tensor; 3],
    (blocks, block): (usize, usize),
) -> candle_core::Result<(Vec<f64>, [f64; 4], f64)> {
    let sequences = inputs[0].dim(0)?;
    let half = sequences / 2;
    let (seen, held) = (Part::new(inputs, 0, half)?, Part::new(inputs, half, sequences - half)?);
    let op = Sla2::new(Scheme::Unquantized).blocks(blocks).block((block, block)).causal(true);
    let learned = learn(&op, &seen)?;
    let identity = Router::new(seen.shape.key_heads(), seen.shape.head_dim(), &Device::Cpu)?;
    let select = |part: &Part, chosen: Chosen| -> candle_core::Result<Selection> {
        let [q, k, _] = &part.inputs;
        match chosen {
            Chosen::Best => part.best(blocks, block),
            Chosen::Learned => op.select(&learned, q, k),
            Chosen::Identity => op.select(&identity, q, k),
            Chosen::Window => {
                let (nearest, sinks) = (blocks.saturating_sub(1), blocks.min(1));
                Selection::window(&part.shape, (block, block), nearest, sinks, &Device::Cpu)
            }
        }
    };
    let picked = |chosen: Chosen| -> candle_core::Result<[SelectedBlocks; 2]> {
        Ok([
            SelectedBlocks::new(&seen, select(&seen, chosen)?)?,
            SelectedBlocks::new(&held, select(&held, chosen)?)?,
        ])
    };
    let all = [Chosen::Best, Chosen::Learned, Chosen::Identity, Chosen::Window];
    let all = all.map(|chosen| Ok((chosen, picked(chosen)?)));
    let all = all.into_iter().collect::<candle_core::Result<Vec<_>>>()?;
    let [q, k, _] = &held.inputs;
    let mut mass = [0.0; 4];
    for (mass, (_, [_, held])) in mass.iter_mut().zip(&all) {
        *mass = op.mass_caught(&held.selection, q, k)?;
    }
    // `tails` gives the same result for each selection, because all selections have the same block size.
    let (_, [of_seen, of_held]) = &all[0];
    let fitted_tails = seen.tails(&of_seen.selection, block)?;
    let tails = held.tails(&of_held.selection, block)?;
    let size = held.out.to_dtype(DType::F64)?.sqr()?.sum_all()?.to_scalar::<f64>()?;
    let mut errors = Vec::new();
    for (chosen, rest) in WAYS {
        let (_, picked) = all.iter().find(|(other, _)| *other == chosen).expect("all were picked");
        let of = |tails: &[(Unselected, Tensor)]| {
            let (_, tail) = tails.iter().find(|(other, _)| *other == rest).expect("all were made");
            tail.clone()
        };
        let theta = fit(&seen, &picked[0], rest, &of(&fitted_tails))?;
        let alpha = if rest == Unselected::Constant { Alpha::Constant } else { Alpha::Count };
        let wrong: f32 = held.distances(&picked[1], &of(&tails), &theta, alpha)?.iter().sum();
        errors.push((f64::from(wrong) / size).sqrt());
    }
    let sparsity = of_held.selection.sparsity()?;
    Ok((errors, mass, sparsity))
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;
    use rand_distr::{Distribution, StandardNormal};

    use super::*;

    fn normal(dims: (usize, usize, usize, usize), seed: u64) -> candle_core::Result<Tensor> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let count = dims.0 * dims.1 * dims.2 * dims.3;
        let values: Vec<f32> = (0..count).map(|_| StandardNormal.sample(&mut rng)).collect();
        Tensor::from_vec(values, dims, &Device::Cpu)
    }

    /// If all past blocks are selected, the error is zero. If fewer are selected, those of `Chosen::Best` have the
    /// largest probability mass, and `Unselected::Linear` has smaller errors than `Unselected::Nothing`.
    #[test]
    fn errors_are_of_the_unselected_blocks() -> candle_core::Result<()> {
        let dims = (4, 96, 2, 16);
        let (q, k, v) = (normal(dims, 1)?, normal(dims, 2)?, normal(dims, 3)?);
        let (errors, mass, sparsity) = of_layer([&q, &k, &v], (6, 16))?;
        assert!(
            errors.iter().zip(WAYS).all(|(error, (chosen, _))| *error < 1e-5 || chosen == Chosen::Window)
        );
        assert!(mass[..3].iter().all(|mass| (mass - 1.0).abs() < 1e-5) && sparsity.abs() < 1e-9, "{mass:?}");
        let (errors, mass, _) = of_layer([&q, &k, &v], (2, 16))?;
        let of = |way| errors[WAYS.iter().position(|other| *other == way).expect("one of them")];
        for chosen in [Chosen::Best, Chosen::Identity, Chosen::Window] {
            let [linear, nothing] = [Unselected::Linear, Unselected::Nothing].map(|rest| of((chosen, rest)));
            assert!(linear < 0.9 * nothing, "{chosen:?}: {linear}, {nothing}");
        }
        assert!(mass[1..].iter().all(|&other| other < mass[0]), "{mass:?}");
        Ok(())
    }

    /// With only one past block, attention over block means returns the mean V of that block.
    #[test]
    fn pooled_tail_is_attention_over_means() -> candle_core::Result<()> {
        let dims = (1, 8, 1, 8);
        let (q, k, v) = (normal(dims, 1)?, normal(dims, 2)?, normal(dims, 3)?);
        let pooled = Part::new([&q, &k, &v], 0, 1)?.pooled(4)?;
        let mean = v.narrow(1, 0, 4)?.mean_keepdim(1)?;
        let difference =
            pooled.narrow(1, 4, 4)?.broadcast_sub(&mean)?.abs()?.max_all()?.to_scalar::<f32>()?;
        assert!(difference < 1e-6);
        Ok(())
    }
}
