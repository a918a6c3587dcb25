//! The backward of SageBwd on the CPU: quantizes P, dS and dO to INT8, with scales that are constant along each
//! matmul's reduction.

use std::ops::Range;

use half::{bf16, f16};
use multiversion::multiversion;

use super::{Keys, Products, Queries, Values};
use crate::cpu::backward::row_dots;
use crate::cpu::lanes;
use crate::cpu::numerics::{BackwardNumerics, Head, Problem, cut};
use crate::cpu::product::{Mat, product};
use crate::cpu::quantize::{Scale, code};
use crate::cpu::tile::Tile;
use crate::cpu::view::View;

/// The forward's log-sum-exps and output, which the backward reads. [`Values::rows`] returns V rounded to 16 bit.
pub(super) struct Values16<'a> {
    pub(super) lse2: &'a [f32],
    pub(super) out: &'a View<'a>,
}

impl Values for Values16<'_> {
    fn rows(&self, problem: &Problem<'_>, at: Head, _: usize, tokens: Range<usize>) -> Vec<f32> {
        round16(problem, problem.v_rows(at, tokens))
    }
}

/// Rounds to the 16-bit type that dP is computed from: the inputs' type, or bf16 for f32 inputs. (f16 would flush small
/// output gradients to zero.)
fn round16(problem: &Problem<'_>, mut values: Vec<f32>) -> Vec<f32> {
    if problem.is_f16() {
        values.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32());
    } else {
        values.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
    }
    values
}

/// The output gradient of one head.
pub(in crate::cpu) struct Grads {
    /// Operand of dV: INT8 values of dO, or unquantized dO.
    of_dv: Vec<f32>,
    /// Scales of dO's INT8 values, (tile, channel).
    dequant: Vec<f32>,
    /// dO in 16-bit precision, for dP.
    dout16: Vec<f32>,
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

/// `into += sums * (row_dequant * dequant)`, with one `row_dequant` per row.
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

/// Quantizes a matrix with one scale per `group` adjacent columns, and returns the dequantization scale of each
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

/// Quantizes a matrix with one scale per `group` adjacent rows, and returns the dequantization scale of each row.
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
