//! Attn-QAT on the CPU: f32 matmuls of NVFP4 values.

use std::ops::Range;

use multiversion::multiversion;

use super::backward::row_dots;
use super::numerics::{BackwardNumerics, Finished, ForwardNumerics, Head, Problem, Softmax, per_head};
use super::product::{Mat, product};
use super::quantize::{channel_mean, subtract_mean};
use super::rows::{Keys, RowSource, Rows};
use super::tile::Tile;
use super::view::View;
use super::{Gradients, OnCpu, OutputGradient, backward, forward, lanes};
use crate::nvfp4::{Axis, GROUP, Packed, Scale, e2m1, head_factor};
use crate::scheme::{AttnQat as Settings, MEAN_ROWS, PReference, ValueGroups, ValueScale};

#[derive(Debug)]
pub(super) struct Kept {
    codes: Codes,
    /// Base-2 log-sum-exp of each query, (batch, query heads, query).
    lse2: Vec<f32>,
    /// For each query, in the order of `lse2`: the sum of `2^(logit - reference)` over the keys and the sink, where
    /// `reference` is `PReference::of(largest logit)`. With `PReference::Literal`: this sum, divided by the sum
    /// without the sink's term.
    sum: Vec<f32>,
    /// O', the output with unquantized P, (batch, query, query heads, head_dim).
    high_precision_out: Vec<f32>,
}

/// Q, K and V in NVFP4, one entry per segment and head.
#[derive(Debug)]
struct Codes {
    q: Vec<Packed>,
    k: Vec<Packed>,
    /// (V multiplied by a factor, the factor). `ValueScale` sets the factor.
    v: Vec<(Packed, f32)>,
    /// The mean of K over tokens, if it was subtracted from K.
    k_mean: Vec<Option<Vec<f32>>>,
    /// The mean of V over tokens, if it was subtracted from V.
    v_mean: Vec<Option<Vec<f32>>>,
}

impl Codes {
    fn new(settings: &Settings, problem: &Problem<'_>) -> Self {
        let (d, shape) = (problem.head_dim(), problem.shape);
        let keys = |at: Head| 0..problem.segments[at.segment].key.len();
        let q = per_head(problem, shape.query_heads(), |at| {
            let rows = problem.q_rows(at, 0..problem.segments[at.segment].query.len());
            Packed::new(&rows, d, Axis::Channels)
        });
        let axis = match settings.value_groups {
            ValueGroups::Tokens => Axis::Rows,
            ValueGroups::HeadDim => Axis::Channels,
        };
        let smoothed = |mut rows: Vec<f32>, smooth: bool| {
            let mean = smooth.then(|| channel_mean(&rows, d, MEAN_ROWS));
            if let Some(mean) = &mean {
                subtract_mean(&mut rows, mean);
            }
            (rows, mean)
        };
        let (smoothing, heads) = (settings.smoothing, shape.key_heads());
        let k = per_head(problem, heads, |at| {
            let (rows, mean) = smoothed(problem.k_rows(at, keys(at)), smoothing.of_keys());
            (Packed::new(&rows, d, Axis::Channels), mean)
        });
        let v = per_head(problem, heads, |at| {
            let rows = problem.v_rows(at, keys(at));
            let factor = match settings.value_scale {
                ValueScale::None => 1.0,
                ValueScale::Head => head_factor(f32::from_bits(lanes::max_abs_bits(&rows))),
            };
            let (mut rows, mean) = smoothed(rows, smoothing.of_values());
            rows.iter_mut().for_each(|x| *x *= factor);
            ((Packed::new(&rows, d, axis), factor), mean)
        });
        let ((k, k_mean), (v, v_mean)) = (k.into_iter().unzip(), v.into_iter().unzip());
        Self { q, k, v, k_mean, v_mean }
    }
}

fn query_index(problem: &Problem<'_>, at: Head) -> usize {
    at.segment * problem.shape.query_heads() + at.head
}

fn key_index(problem: &Problem<'_>, at: Head) -> usize {
    at.segment * problem.shape.key_heads() + at.head
}

impl OnCpu for Settings {
    type Kept = Kept;

    fn forward(&self, problem: &Problem<'_>) -> (Vec<f32>, Kept) {
        let codes = Codes::new(self, problem);
        let Finished { outputs, states } =
            forward::run(&Forward { settings: self, problem, codes: &codes }, problem);
        let (Ok([out, high_precision_out]), Ok([lse2, sum])) =
            (<[_; 2]>::try_from(outputs), <[_; 2]>::try_from(states))
        else {
            unreachable!("`finish` returns two of each")
        };
        (out, Kept { codes, lse2, sum, high_precision_out })
    }

    fn lse2(kept: &Kept) -> &[f32] {
        &kept.lse2
    }

    fn backward(&self, problem: &Problem<'_>, kept: &Kept, output: &OutputGradient<'_>) -> Gradients {
        backward::run(&Backward { settings: self, problem, kept, out: output.out }, problem, output)
    }
}

struct Forward<'a> {
    settings: &'a Settings,
    problem: &'a Problem<'a>,
    codes: &'a Codes,
}

impl RowSource for Forward<'_> {
    fn problem(&self) -> &Problem<'_> {
        self.problem
    }
    fn q_rows(&self, at: Head, tokens: Range<usize>) -> Vec<f32> {
        self.codes.q[query_index(self.problem, at)].rows(tokens)
    }
    fn k_rows(&self, at: Head, tokens: Range<usize>) -> Vec<f32> {
        self.codes.k[key_index(self.problem, at)].rows(tokens)
    }
    fn v_rows(&self, at: Head, tokens: Range<usize>) -> Vec<f32> {
        let (v, factor) = &self.codes.v[key_index(self.problem, at)];
        let mut rows = v.rows(tokens);
        rows.iter_mut().for_each(|x| *x /= factor);
        rows
    }
}

impl ForwardNumerics for Forward<'_> {
    type RowState = Softmax<2>;
    const OUTPUTS: usize = 2;
    const STATES: usize = 2;

    fn rows(&self, count: usize) -> Softmax<2> {
        Softmax::new(count, self.problem.head_dim())
    }

    fn attend(&self, keys: &Keys, tile: Tile, logits: &mut [f32], rows: &mut Softmax<2>) {
        online_softmax(self.settings.p_reference, tile.cols, logits, rows);
        let mut quantized = vec![0.0; logits.len()];
        for (row, quantized) in logits.chunks_exact(tile.cols).zip(quantized.chunks_exact_mut(tile.cols)) {
            quantize_probabilities(row, 1.0, quantized);
        }
        let v = keys.v.of_keys(tile);
        for (acc, p) in rows.acc.iter_mut().zip([&quantized[..], logits]) {
            product(acc, Mat::new(p, tile.rows, tile.cols), v, 1.0, true);
        }
    }

    fn finish(&self, at: Head, rows: Softmax<2>, sees: &dyn Fn(usize) -> bool) -> Finished {
        let (mut sum, references) = (rows.sum.clone(), rows.reference.clone());
        let sink = self.problem.sink(at);
        let mut finished = rows.finish(sink, sees);
        let literal = self.settings.p_reference == PReference::Literal;
        for (r, sum) in sum.iter_mut().enumerate().filter(|(r, _)| sees(*r)) {
            // The backward quantizes `P * sum`. P's denominator includes the sink, so `sum` includes it too. If the
            // keys' probabilities sum to less than 2^-64, the clamp makes `P * sum` small, which loses bits in FP4.
            let with_sink = sink.map_or(1.0, |_| {
                let keys = references[r] + sum.log2();
                (finished.states[0][r] - keys).clamp(0.0, 64.0).exp2()
            });
            *sum = with_sink * if literal { 1.0 } else { *sum };
        }
        // V's mean m is added to O, but not to O' (the output with unquantized P). The backward subtracts m from V, so
        // that delta = rowsum(dO o O') matches dP = dO (V - m)^T.
        if let Some(mean) = &self.codes.v_mean[key_index(self.problem, self.problem.key_head(at))] {
            finished.add_value_mean(mean, sees);
        }
        finished.states.push(sum);
        finished
    }
}

struct Backward<'a> {
    settings: &'a Settings,
    problem: &'a Problem<'a>,
    kept: &'a Kept,
    out: &'a View<'a>,
}

impl Backward<'_> {
    fn forward(&self) -> Forward<'_> {
        Forward { settings: self.settings, problem: self.problem, codes: &self.kept.codes }
    }
}

impl RowSource for Backward<'_> {
    fn problem(&self) -> &Problem<'_> {
        self.problem
    }
    fn q_rows(&self, at: Head, tokens: Range<usize>) -> Vec<f32> {
        if self.settings.matched_recomputation {
            self.forward().q_rows(at, tokens)
        } else {
            self.problem.q_rows(at, tokens)
        }
    }
    fn k_rows(&self, at: Head, tokens: Range<usize>) -> Vec<f32> {
        if self.settings.matched_recomputation {
            return self.forward().k_rows(at, tokens);
        }
        let mut rows = self.problem.k_rows(at, tokens);
        if let Some(mean) = &self.kept.codes.k_mean[key_index(self.problem, at)] {
            subtract_mean(&mut rows, mean);
        }
        rows
    }
    fn v_rows(&self, at: Head, tokens: Range<usize>) -> Vec<f32> {
        if self.settings.matched_recomputation {
            return self.forward().v_rows(at, tokens);
        }
        let mut rows = self.problem.v_rows(at, tokens);
        if let Some(mean) = &self.kept.codes.v_mean[key_index(self.problem, at)] {
            subtract_mean(&mut rows, mean);
        }
        rows
    }
}

/// For one head: the gradient of the output, and the [`Kept::sum`] of each query.
struct Grads {
    dout: Rows,
    sum: Vec<f32>,
}

impl BackwardNumerics for Backward<'_> {
    type Grads = Grads;

    fn lse2(&self) -> &[f32] {
        &self.kept.lse2
    }

    fn delta(&self, at: Head, dout: &[f32]) -> Vec<f32> {
        let d = self.problem.head_dim();
        let tokens = 0..dout.len() / d;
        if self.settings.high_precision_output {
            let out = View::contiguous(&self.kept.high_precision_out, self.problem.shape.query_dims());
            row_dots(&self.problem.query_rows(&out, at, tokens), dout, d)
        } else {
            row_dots(&self.problem.query_rows(self.out, at, tokens), dout, d)
        }
    }

    fn grads(&self, at: Head, dout: Vec<f32>) -> Grads {
        let d = self.problem.head_dim();
        let sum = self.kept.sum[self.problem.lse_start(at)..][..dout.len() / d].to_vec();
        Grads { dout: Rows::new(0, d, dout), sum }
    }

    fn add_dv(&self, p: &[f32], grads: &Grads, tile: Tile, dv: &mut [f32]) {
        let dout = grads.dout.of_queries(tile);
        if !self.settings.requantized_p {
            return product(dv, Mat::new(p, tile.rows, tile.cols).t(), dout, 1.0, true);
        }
        let mut quantized = vec![0.0; p.len()];
        let rows = p.chunks_exact(tile.cols).zip(quantized.chunks_exact_mut(tile.cols));
        for ((p, quantized), &sum) in rows.zip(&grads.sum[tile.row..]) {
            quantize_probabilities(p, sum, quantized);
        }
        product(dv, Mat::new(&quantized, tile.rows, tile.cols).t(), dout, 1.0, true);
    }

    fn dp(&self, grads: &Grads, keys: &Keys, tile: Tile, out: &mut [f32]) {
        product(out, grads.dout.of_queries(tile), keys.v.of_keys(tile).t(), 1.0, false);
    }

    fn add_dq(&self, ds: &[f32], keys: &Keys, tile: Tile, dq: &mut [f32]) {
        product(dq, Mat::new(ds, tile.rows, tile.cols), keys.k.of_keys(tile), 1.0, true);
    }

    fn add_dk(&self, ds: &[f32], queries: &Rows, tile: Tile, dk: &mut [f32]) {
        product(dk, Mat::new(ds, tile.rows, tile.cols).t(), queries.of_queries(tile), 1.0, true);
    }
}

/// Updates each row's reference, the value that is subtracted from the row's logits. Replaces the tile's logits by the
/// powers `2^(logit - reference)`. Rescales the sums and accumulators in `softmax` to the new references, then adds the
/// powers to the sums.
#[multiversion(targets = "simd")]
fn online_softmax(reference: PReference, cols: usize, logits: &mut [f32], softmax: &mut Softmax<2>) {
    let Softmax { reference: references, sum, acc: [first, second] } = softmax;
    let d = first.len() / sum.len();
    let state = references.iter_mut().zip(sum).zip(first.chunks_exact_mut(d).zip(second.chunks_exact_mut(d)));
    for (row, ((old, sum), (first, second))) in logits.chunks_exact_mut(cols).zip(state) {
        let new = reference.of(lanes::max(row));
        let new = if new > *old { new } else { *old };
        // As long as all logits of the row are -inf, any finite shift gives 2^-inf = 0.
        let shift = if new == f32::NEG_INFINITY { 0.0 } else { new };
        let decay = lanes::exp2(*old - shift);
        for x in row.iter_mut() {
            *x = lanes::exp2(*x - shift);
        }
        *sum = decay * *sum + lanes::sum(row);
        *old = new;
        if decay != 1.0 {
            first.iter_mut().chain(second).for_each(|x| *x *= decay);
        }
    }
}

/// Fake-quantizes a row of `p * sum` in groups of 16 keys, then divides it by `sum`. In the forward `sum` is 1, in the
/// backward it is from [`Kept::sum`].
#[multiversion(targets = "simd")]
fn quantize_probabilities(p: &[f32], sum: f32, quantized: &mut [f32]) {
    // If the query sees no key, `sum` is 0.
    let (sum, inverse) = if sum == 0.0 { (1.0, 1.0) } else { (sum, 1.0 / sum) };
    for (p, quantized) in p.chunks(GROUP).zip(quantized.chunks_mut(GROUP)) {
        let scale = Scale::of(f32::from_bits(lanes::max_abs_bits(p)) * sum);
        let (quant, dequant) = (sum * scale.quant, scale.dequant * inverse);
        for (quantized, &p) in quantized.iter_mut().zip(p) {
            *quantized = e2m1(p * quant) * dequant;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A row's reference is the value that is subtracted from its logits. The backward uses the final reference, the
    /// forward may use an earlier one. If both references are whole numbers and no E4M3 scale of P is subnormal,
    /// forward and backward compute the same FP4 values.
    #[test]
    fn the_backward_uses_the_forwards_fp4_values() {
        let logits: Vec<f32> = (0..64).map(|i| ((i * 29 % 64) as f32) * 0.08 - 3.0).collect();
        let quantized = |reference: f32| {
            let p: Vec<f32> = logits.iter().map(|x| lanes::exp2(x - reference)).collect();
            let mut out = vec![0.0; p.len()];
            quantize_probabilities(&p, 1.0, &mut out);
            out.iter().map(|x| x * lanes::exp2(reference)).collect::<Vec<_>>()
        };
        assert_eq!(quantized(3.0), quantized(2.0));
        assert_ne!(quantized(3.0), quantized(2.3));
    }

    #[test]
    fn references_are_above_the_largest_logit() {
        for max in [-3.5f32, 0.0, 0.1, 7.0, 1e6] {
            let reference = PReference::RowMax.of(max);
            assert!(reference >= max && reference < max + 1.0 && reference.fract() == 0.0);
            // The scale of the largest probability, `2^(max - reference) / 6`, is at most 448, the maximum of E4M3.
            assert!(lanes::exp2(max - PReference::TwoLevel.of(max)) / 6.0 <= 448.0);
        }
        assert_eq!(PReference::RowMax.of(f32::NEG_INFINITY), f32::NEG_INFINITY);
    }
}
