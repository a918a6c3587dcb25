//! SageBwd on the CPU: INT8 codes, held as f32 in products, where sums of code products are exact.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use half::{bf16, f16};
use multiversion::multiversion;

use super::backward::row_dots;
use super::numerics::{
    BackwardNumerics, Finished, ForwardNumerics, Head, Operands, Problem, Softmax, Tile, cut, per_head,
};
use super::product::{Mat, product};
use super::quantize::{Scale, TileCodes, channel_mean, code, subtract_mean};
use super::view::View;
use super::{Gradients, OnCpu, Past, backward, forward, lanes};
use crate::scheme::{Int8Products, SageBwd as Settings, Smoothing};

impl OnCpu for Settings {
    /// The base-2 log-sum-exps, and the codes and scales of Q and K.
    type Kept = (Vec<f32>, Codes);

    fn forward(&self, problem: &Problem<'_>) -> (Vec<f32>, Self::Kept) {
        let codes = Codes::new(self, problem);
        let products = Products {
            settings: self,
            int8: Int8Products::PAPER,
            problem,
            codes: &codes,
            values: CodesOfV::new(self, problem),
        };
        let (out, lse2) = forward::run(&products, problem).out_and_lse2();
        (out, (lse2, codes))
    }

    fn backward(&self, problem: &Problem<'_>, (lse2, codes): &Self::Kept, past: &Past<'_>) -> Gradients {
        let values = Values16 { lse2, out: past.out };
        let products = Products { settings: self, int8: self.products, problem, codes, values };
        backward::run(&products, problem, past.dout)
    }
}

/// What the forward keeps: the codes and scales of Q and K, and the means that were subtracted from them.
#[derive(Debug)]
pub(super) struct Codes {
    /// One entry per segment and query head.
    queries: Vec<HeadCodes>,
    /// One entry per segment and key head.
    keys: Vec<HeadCodes>,
}

#[derive(Debug)]
struct HeadCodes {
    codes: TileCodes,
    /// The mean that was subtracted before quantizing: K's token mean, or the mean of each tile of Q. Empty
    /// without smoothing.
    mean: Vec<f32>,
}

impl Codes {
    pub(super) fn new(settings: &Settings, problem: &Problem<'_>) -> Self {
        let d = problem.head_dim();
        let queries = per_head(problem, problem.shape.query_heads(), |at| {
            let mut rows = problem.q_rows(at, 0..problem.segments[at.segment].query.len());
            let mut mean = Vec::new();
            if settings.smoothing == Smoothing::Qk {
                for tile in rows.chunks_mut(settings.tile_q * d) {
                    let tile_mean = channel_mean(tile, d, settings.tile_q);
                    subtract_mean(tile, &tile_mean);
                    mean.extend(tile_mean);
                }
            }
            HeadCodes { codes: TileCodes::new(&rows, d, settings.tile_q), mean }
        });
        let keys = per_head(problem, problem.shape.key_heads(), |at| {
            let mut rows = problem.k_rows(at, 0..problem.segments[at.segment].key.len());
            let mut mean = Vec::new();
            if settings.smoothing != Smoothing::None {
                mean = channel_mean(&rows, d, settings.tile_k);
                subtract_mean(&mut rows, &mean);
            }
            HeadCodes { codes: TileCodes::new(&rows, d, settings.tile_k), mean }
        });
        Self { queries, keys }
    }
}

/// The products of [`crate::scheme::SageBwd`] for one of the mainloops, which read V in different forms.
struct Products<'a, V> {
    settings: &'a Settings,
    /// Which of the mainloop's products run on codes: all of the forward's.
    int8: Int8Products,
    problem: &'a Problem<'a>,
    codes: &'a Codes,
    values: V,
}

/// V in the form that a mainloop reads.
trait Values: Sync {
    /// The rows of one key head, which is number `index` among the codes.
    fn rows(&self, problem: &Problem<'_>, at: Head, index: usize, tokens: Range<usize>) -> Vec<f32>;
}

/// V in the forward: codes, one entry per segment and key head.
struct CodesOfV(Vec<TileCodes>);

impl CodesOfV {
    fn new(settings: &Settings, problem: &Problem<'_>) -> Self {
        Self(per_head(problem, problem.shape.key_heads(), |at| {
            let rows = problem.v_rows(at, 0..problem.segments[at.segment].key.len());
            TileCodes::new(&rows, problem.head_dim(), settings.tile_k)
        }))
    }
}

impl Values for CodesOfV {
    fn rows(&self, problem: &Problem<'_>, _: Head, index: usize, tokens: Range<usize>) -> Vec<f32> {
        self.0[index].rows_f32(tokens, problem.head_dim())
    }
}

/// V in the backward: in 16-bit precision. Also the forward's log-sum-exp and output.
struct Values16<'a> {
    lse2: &'a [f32],
    out: &'a View<'a>,
}

impl Values for Values16<'_> {
    fn rows(&self, problem: &Problem<'_>, at: Head, _: usize, tokens: Range<usize>) -> Vec<f32> {
        round16(problem, problem.v_rows(at, tokens))
    }
}

/// Rounds to the 16-bit type that dP is computed from: the inputs' type, or bf16 for f32 inputs. (f16 would
/// flush real output gradients to zero.)
fn round16(problem: &Problem<'_>, mut values: Vec<f32>) -> Vec<f32> {
    if problem.is_f16() {
        values.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32());
    } else {
        values.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
    }
    values
}

impl<V> Products<'_, V> {
    fn d(&self) -> usize {
        self.problem.head_dim()
    }

    fn q_dequant(&self, queries: &Queries, tile: Tile) -> f32 {
        self.codes.queries[queries.index].codes.dequant_scale[tile.row / self.settings.tile_q]
    }

    fn k_dequant(&self, keys: &Keys, tile: Tile) -> f32 {
        self.codes.keys[keys.index].codes.dequant_scale[tile.col / self.settings.tile_k]
    }

    /// The mean that was subtracted from the tile's queries, if any was.
    fn q_mean(&self, queries: &Queries, tile: Tile) -> Option<&[f32]> {
        let mean = &self.codes.queries[queries.index].mean;
        (!mean.is_empty()).then(|| &mean[tile.row / self.settings.tile_q * self.d()..][..self.d()])
    }
}

/// The keys of one head from `start` on.
pub(super) struct Keys {
    start: usize,
    /// Index of the head among the codes.
    index: usize,
    /// Codes of K.
    k: Vec<f32>,
    /// Codes of V in the forward, V in 16-bit precision in the backward.
    v: Vec<f32>,
    /// K less its mean, unquantized: for the logits of Q's mean, and for products that do not run on codes.
    /// Empty if neither is needed.
    k_smooth: Vec<f32>,
}

/// The queries of one head from `start` on.
pub(super) struct Queries {
    start: usize,
    /// Index of the head among the codes.
    index: usize,
    /// Codes of Q.
    q: Vec<f32>,
    /// Q, unquantized, for products that do not run on codes; otherwise empty.
    q_rows: Vec<f32>,
}

/// The output gradient of one head.
pub(super) struct Grads {
    /// Operand of dV: dO's codes, or unquantized dO.
    of_dv: Vec<f32>,
    /// Scales of dO's codes, (tile, channel).
    dequant: Vec<f32>,
    /// dO in 16-bit precision, for dP.
    dout16: Vec<f32>,
}

impl<V: Values> Operands for Products<'_, V> {
    type Keys = Keys;
    type Queries = Queries;

    fn tile(&self) -> (usize, usize) {
        (self.settings.tile_q, self.settings.tile_k)
    }

    fn keys(&self, at: Head, tokens: Range<usize>) -> Keys {
        let (d, settings) = (self.d(), self.settings);
        let index = at.segment * self.problem.shape.key_heads() + at.head;
        let head = &self.codes.keys[index];
        let mut k_smooth = Vec::new();
        if settings.smoothing == Smoothing::Qk || !(self.int8.s && self.int8.dq) {
            k_smooth = self.problem.k_rows(at, tokens.clone());
            if !head.mean.is_empty() {
                subtract_mean(&mut k_smooth, &head.mean);
            }
        }
        let v = self.values.rows(self.problem, at, index, tokens.clone());
        Keys { start: tokens.start, k: head.codes.rows_f32(tokens, d), index, v, k_smooth }
    }

    fn queries(&self, at: Head, tokens: Range<usize>) -> Queries {
        let index = at.segment * self.problem.shape.query_heads() + at.head;
        let q = self.codes.queries[index].codes.rows_f32(tokens.clone(), self.d());
        let start = tokens.start;
        let q_rows = if self.int8.s && self.int8.dk { Vec::new() } else { self.problem.q_rows(at, tokens) };
        Queries { start, index, q, q_rows }
    }

    fn logits(&self, queries: &Queries, keys: &Keys, tile: Tile, out: &mut [f32]) {
        let (d, scale) = (self.d(), self.problem.softmax_scale * LOG2_E);
        if !self.int8.s {
            let q = Mat::new(cut(&queries.q_rows, queries.start, tile.row, tile.rows, d), tile.rows, d);
            let k = Mat::new(cut(&keys.k_smooth, keys.start, tile.col, tile.cols, d), tile.cols, d);
            return product(out, q, k.t(), scale, false);
        }
        let q = Mat::new(cut(&queries.q, queries.start, tile.row, tile.rows, d), tile.rows, d);
        let k = Mat::new(cut(&keys.k, keys.start, tile.col, tile.cols, d), tile.cols, d);
        let dequant = self.q_dequant(queries, tile) * self.k_dequant(keys, tile);
        product(out, q, k.t(), dequant * scale, false);
        if let Some(mean) = self.q_mean(queries, tile) {
            let mut row = vec![0.0; tile.cols];
            let k = Mat::new(cut(&keys.k_smooth, keys.start, tile.col, tile.cols, d), tile.cols, d);
            product(&mut row, Mat::new(mean, 1, d), k.t(), scale, false);
            for logits in out.chunks_exact_mut(tile.cols) {
                logits.iter_mut().zip(&row).for_each(|(x, y)| *x += y);
            }
        }
    }
}

impl ForwardNumerics for Products<'_, CodesOfV> {
    type Rows = Softmax;
    const OUTPUTS: usize = 1;
    const STATES: usize = 1;

    fn rows(&self, count: usize) -> Softmax {
        Softmax::new(count, self.d())
    }

    fn attend(&self, keys: &Keys, tile: Tile, logits: &mut [f32], rows: &mut Softmax) {
        let d = self.d();
        let v_dequant = self.values.0[keys.index].dequant_scale[tile.col / self.settings.tile_k];
        let mut steps = vec![Step::default(); tile.rows];
        online_softmax(tile.cols, logits, rows, &mut steps);
        let mut pv = vec![0.0; tile.rows * d];
        let v = Mat::new(cut(&keys.v, keys.start, tile.col, tile.cols, d), tile.cols, d);
        product(&mut pv, Mat::new(logits, tile.rows, tile.cols), v, 1.0, false);
        accumulate_steps(&mut rows.acc[0], &pv, &steps, v_dequant);
    }

    fn finish(&self, rows: Softmax, sees: &dyn Fn(usize) -> bool) -> Finished {
        rows.finish(sees)
    }
}

impl BackwardNumerics for Products<'_, Values16<'_>> {
    type Grads = Grads;

    fn lse2(&self) -> &[f32] {
        self.values.lse2
    }

    fn delta(&self, at: Head, dout: &[f32]) -> Vec<f32> {
        let d = self.d();
        row_dots(&self.problem.query_rows(self.values.out, at, 0..dout.len() / d), dout, d)
    }

    fn grads(&self, _: Head, dout: Vec<f32>) -> Grads {
        let d = self.d();
        if !self.int8.dv {
            return Grads { of_dv: dout.clone(), dequant: Vec::new(), dout16: round16(self.problem, dout) };
        }
        let group = self.settings.granularity.vectors(d);
        let mut codes = vec![0.0; dout.len()];
        let mut dequant = Vec::with_capacity(dout.len().div_ceil(self.settings.tile_q));
        let size = self.settings.tile_q * d;
        for (tile, codes) in dout.chunks(size).zip(codes.chunks_mut(size)) {
            dequant.extend(quantize_columns(tile, d, group, codes));
        }
        Grads { of_dv: codes, dequant, dout16: round16(self.problem, dout) }
    }

    fn add_dv(&self, p: &[f32], grads: &Grads, tile: Tile, dv: &mut [f32]) {
        let d = self.d();
        let dout = Mat::new(cut(&grads.of_dv, 0, tile.row, tile.rows, d), tile.rows, d);
        if !self.int8.dv {
            return product(dv, Mat::new(p, tile.rows, tile.cols).t(), dout, 1.0, true);
        }
        let group = self.settings.granularity.vectors(self.settings.tile_k);
        let mut codes = vec![0.0; p.len()];
        let p_dequant = quantize_columns(p, tile.cols, group, &mut codes);
        let mut sums = vec![0.0; dv.len()];
        product(&mut sums, Mat::new(&codes, tile.rows, tile.cols).t(), dout, 1.0, false);
        let dout_dequant = &grads.dequant[tile.row / self.settings.tile_q * d..][..d];
        add_outer(dv, &sums, &p_dequant, dout_dequant);
    }

    fn dp(&self, grads: &Grads, keys: &Keys, tile: Tile, out: &mut [f32]) {
        let d = self.d();
        let dout = Mat::new(cut(&grads.dout16, 0, tile.row, tile.rows, d), tile.rows, d);
        let v = Mat::new(cut(&keys.v, keys.start, tile.col, tile.cols, d), tile.cols, d);
        product(out, dout, v.t(), 1.0, false);
    }

    fn add_dq(&self, ds: &[f32], keys: &Keys, tile: Tile, dq: &mut [f32]) {
        let d = self.d();
        if !self.int8.dq {
            let k = Mat::new(cut(&keys.k_smooth, keys.start, tile.col, tile.cols, d), tile.cols, d);
            return product(dq, Mat::new(ds, tile.rows, tile.cols), k, 1.0, true);
        }
        let group = self.settings.granularity.vectors(self.settings.tile_q);
        let mut codes = vec![0.0; ds.len()];
        let ds_dequant = quantize_rows(ds, tile.cols, group, &mut codes);
        let mut sums = vec![0.0; dq.len()];
        let k = Mat::new(cut(&keys.k, keys.start, tile.col, tile.cols, d), tile.cols, d);
        product(&mut sums, Mat::new(&codes, tile.rows, tile.cols), k, 1.0, false);
        add_rows(dq, &sums, &ds_dequant, self.k_dequant(keys, tile));
    }

    fn add_dk(&self, ds: &[f32], queries: &Queries, tile: Tile, dk: &mut [f32]) {
        let d = self.d();
        if !self.int8.dk {
            let q = Mat::new(cut(&queries.q_rows, queries.start, tile.row, tile.rows, d), tile.rows, d);
            return product(dk, Mat::new(ds, tile.rows, tile.cols).t(), q, 1.0, true);
        }
        let group = self.settings.granularity.vectors(self.settings.tile_k);
        let mut codes = vec![0.0; ds.len()];
        let ds_dequant = quantize_columns(ds, tile.cols, group, &mut codes);
        let mut sums = vec![0.0; dk.len()];
        let q = Mat::new(cut(&queries.q, queries.start, tile.row, tile.rows, d), tile.rows, d);
        product(&mut sums, Mat::new(&codes, tile.rows, tile.cols).t(), q, 1.0, false);
        add_rows(dk, &sums, &ds_dequant, self.q_dequant(queries, tile));
        if let Some(mean) = self.q_mean(queries, tile) {
            // dK = dS^T (Q - mean) + (dS^T 1) mean, where the second term uses unquantized dS.
            let ones = vec![1.0; tile.rows];
            let mut column_sums = vec![0.0; tile.cols];
            let ds = Mat::new(ds, tile.rows, tile.cols);
            product(&mut column_sums, Mat::new(&ones, 1, tile.rows), ds, 1.0, false);
            product(dk, Mat::new(&column_sums, tile.cols, 1), Mat::new(mean, 1, d), 1.0, true);
        }
    }
}

/// Result of one step of the online softmax for a row.
#[derive(Debug, Clone, Copy, Default)]
struct Step {
    /// Factor that rescales the accumulator.
    decay: f32,
    /// dequant_scale of the row's probabilities.
    p_dequant: f32,
}

/// Turns a tile of logits into codes of the probabilities, with one scale per row.
///
/// A code has a single rounding, because it is relative to the row's maximum inside the tile:
/// `round(127 * 2^(t - row_max))`, with the dequant_scale `2^(row_max - max) / 127`.
#[multiversion(targets = "simd")]
fn online_softmax(cols: usize, logits: &mut [f32], softmax: &mut Softmax, steps: &mut [Step]) {
    let state = softmax.reference.iter_mut().zip(&mut softmax.sum).zip(steps);
    for (row, ((max, sum), step)) in logits.chunks_exact_mut(cols).zip(state) {
        let row_max = lanes::max(row);
        let new_max = if row_max > *max { row_max } else { *max };
        // While no key is visible every term is 2^-inf, whatever finite number is subtracted.
        let shift = if new_max == f32::NEG_INFINITY { 0.0 } else { new_max };
        let row_shift = if row_max == f32::NEG_INFINITY { 0.0 } else { row_max } - lanes::LOG2_127;
        for x in row.iter_mut() {
            *x = lanes::exp2(*x - row_shift);
        }
        step.p_dequant = lanes::exp2(row_max - shift - lanes::LOG2_127);
        step.decay = lanes::exp2(*max - shift);
        // The sum is of unquantized probabilities.
        *sum = step.decay * *sum + step.p_dequant * lanes::sum(row);
        *max = new_max;
        for x in row.iter_mut() {
            *x = x.round_ties_even();
        }
    }
}

/// `acc = decay * acc + pv * (p_dequant * v_dequant)`, row by row.
#[multiversion(targets = "simd")]
fn accumulate_steps(acc: &mut [f32], pv: &[f32], steps: &[Step], v_dequant: f32) {
    let d = acc.len() / steps.len();
    for ((acc, pv), step) in acc.chunks_exact_mut(d).zip(pv.chunks_exact(d)).zip(steps) {
        let dequant = step.p_dequant * v_dequant;
        for (acc, pv) in acc.iter_mut().zip(pv) {
            *acc = step.decay * *acc + dequant * pv;
        }
    }
}

/// `into += sums * (row_dequant * dequant)`, with one `row_dequant` a row.
#[multiversion(targets = "simd")]
fn add_rows(into: &mut [f32], sums: &[f32], row_dequant: &[f32], dequant: f32) {
    let d = into.len() / row_dequant.len();
    for ((into, sums), row_dequant) in into.chunks_exact_mut(d).zip(sums.chunks_exact(d)).zip(row_dequant) {
        let factor = row_dequant * dequant;
        for (into, sum) in into.iter_mut().zip(sums) {
            *into += sum * factor;
        }
    }
}

/// `into += sums * (row_dequant * column_dequant)`.
#[multiversion(targets = "simd")]
fn add_outer(into: &mut [f32], sums: &[f32], row_dequant: &[f32], column_dequant: &[f32]) {
    let d = column_dequant.len();
    for ((into, sums), row_dequant) in into.chunks_exact_mut(d).zip(sums.chunks_exact(d)).zip(row_dequant) {
        for ((into, sum), column_dequant) in into.iter_mut().zip(sums).zip(column_dequant) {
            *into += sum * (row_dequant * column_dequant);
        }
    }
}

/// Quantizes a matrix with one scale per `group` of adjacent columns, and returns the dequant_scale of each
/// column.
#[multiversion(targets = "simd")]
fn quantize_columns(values: &[f32], cols: usize, group: usize, codes: &mut [f32]) -> Vec<f32> {
    let (mut maxima, mut quant, mut dequant) = (vec![0u32; cols], vec![0.0; cols], vec![0.0; cols]);
    for row in values.chunks_exact(cols) {
        for (max, &x) in maxima.iter_mut().zip(row) {
            *max = (*max).max(lanes::abs_bits(x));
        }
    }
    for (g, maxima) in maxima.chunks(group).enumerate() {
        let scale = Scale::of(maxima.iter().copied().max().unwrap_or(0));
        for c in g * group..g * group + maxima.len() {
            (quant[c], dequant[c]) = (scale.quant, scale.dequant);
        }
    }
    for (row, codes) in values.chunks_exact(cols).zip(codes.chunks_exact_mut(cols)) {
        for ((code_of, &x), &quant) in codes.iter_mut().zip(row).zip(&quant) {
            *code_of = code(x, quant);
        }
    }
    dequant
}

/// Quantizes a matrix with one scale per `group` of adjacent rows, and returns the dequant_scale of each row.
#[multiversion(targets = "simd")]
fn quantize_rows(values: &[f32], cols: usize, group: usize, codes: &mut [f32]) -> Vec<f32> {
    let mut dequant = Vec::with_capacity(values.len() / cols);
    for (rows, codes) in values.chunks(group * cols).zip(codes.chunks_mut(group * cols)) {
        let scale = Scale::of(lanes::max_abs_bits(rows));
        for _ in 0..rows.len() / cols {
            dequant.push(scale.dequant);
        }
        for (code_of, &x) in codes.iter_mut().zip(rows) {
            *code_of = code(x, scale.quant);
        }
    }
    dequant
}
