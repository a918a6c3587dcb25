//! Every product in f32.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use multiversion::multiversion;

use super::lanes;
use super::numerics::{Head, Numerics, Problem, Softmax, Tile, cut};
use super::product::{Mat, product};

/// Rows of a query tile and of a key tile.
const TILE: (usize, usize) = (64, 64);

/// See [`crate::scheme::Scheme::FullPrecision`].
pub(super) struct FullPrecision<'a> {
    problem: &'a Problem<'a>,
}

impl<'a> FullPrecision<'a> {
    pub(super) fn new(problem: &'a Problem<'a>) -> Self {
        Self { problem }
    }

    fn d(&self) -> usize {
        self.problem.head_dim()
    }
}

/// The rows of a head from `start` on.
pub(super) struct Rows<const TENSORS: usize> {
    start: usize,
    rows: [Vec<f32>; TENSORS],
}

impl Numerics for FullPrecision<'_> {
    type Keys = Rows<2>;
    type Queries = Rows<1>;
    type Grads = Vec<f32>;

    fn tile(&self) -> (usize, usize) {
        TILE
    }

    fn keys(&self, at: Head, tokens: Range<usize>) -> Rows<2> {
        let (k, v) = (self.problem.k_rows(at, tokens.clone()), self.problem.v_rows(at, tokens.clone()));
        Rows { start: tokens.start, rows: [k, v] }
    }

    fn queries(&self, at: Head, tokens: Range<usize>) -> Rows<1> {
        Rows { start: tokens.start, rows: [self.problem.q_rows(at, tokens)] }
    }

    fn grads(&self, dout: Vec<f32>) -> Vec<f32> {
        dout
    }

    fn logits(&self, queries: &Rows<1>, keys: &Rows<2>, tile: Tile, out: &mut [f32]) {
        let (q, k) = (self.tile_rows(&queries.rows[0], queries.start, tile), self.tile_cols(keys, 0, tile));
        product(out, q, k.t(), self.problem.softmax_scale * LOG2_E, false);
    }

    fn attend(&self, keys: &Rows<2>, tile: Tile, logits: &mut [f32], softmax: &mut Softmax) {
        online_softmax(tile.cols, logits, softmax);
        let p = Mat::new(logits, tile.rows, tile.cols);
        product(&mut softmax.acc, p, self.tile_cols(keys, 1, tile), 1.0, true);
    }

    fn add_dv(&self, p: &[f32], grads: &Vec<f32>, tile: Tile, dv: &mut [f32]) {
        let p = Mat::new(p, tile.rows, tile.cols);
        product(dv, p.t(), self.tile_rows(grads, 0, tile), 1.0, true);
    }

    fn dp(&self, grads: &Vec<f32>, keys: &Rows<2>, tile: Tile, out: &mut [f32]) {
        product(out, self.tile_rows(grads, 0, tile), self.tile_cols(keys, 1, tile).t(), 1.0, false);
    }

    fn add_dq(&self, ds: &[f32], keys: &Rows<2>, tile: Tile, dq: &mut [f32]) {
        product(dq, Mat::new(ds, tile.rows, tile.cols), self.tile_cols(keys, 0, tile), 1.0, true);
    }

    fn add_dk(&self, ds: &[f32], queries: &Rows<1>, tile: Tile, dk: &mut [f32]) {
        let q = self.tile_rows(&queries.rows[0], queries.start, tile);
        product(dk, Mat::new(ds, tile.rows, tile.cols).t(), q, 1.0, true);
    }
}

impl FullPrecision<'_> {
    fn tile_rows<'m>(&self, rows: &'m [f32], start: usize, tile: Tile) -> Mat<'m> {
        Mat::new(cut(rows, start, tile.row, tile.rows, self.d()), tile.rows, self.d())
    }

    fn tile_cols<'m>(&self, keys: &'m Rows<2>, tensor: usize, tile: Tile) -> Mat<'m> {
        Mat::new(cut(&keys.rows[tensor], keys.start, tile.col, tile.cols, self.d()), tile.cols, self.d())
    }
}

/// Turns a tile of logits into probabilities relative to the new row maxima, and scales what was
/// accumulated so far to them.
#[multiversion(targets = "simd")]
fn online_softmax(cols: usize, logits: &mut [f32], softmax: &mut Softmax) {
    let d = softmax.acc.len() / softmax.max.len();
    let state = softmax.max.iter_mut().zip(&mut softmax.sum).zip(softmax.acc.chunks_exact_mut(d));
    for (row, ((max, sum), acc)) in logits.chunks_exact_mut(cols).zip(state) {
        let row_max = lanes::max(row);
        let new_max = if row_max > *max { row_max } else { *max };
        // Where nothing is visible yet every term is 2^-inf, whatever is subtracted.
        let shift = if new_max == f32::NEG_INFINITY { 0.0 } else { new_max };
        let decay = lanes::exp2(*max - shift);
        for x in row.iter_mut() {
            *x = lanes::exp2(*x - shift);
        }
        *sum = decay * *sum + lanes::sum(row);
        *max = new_max;
        if decay != 1.0 {
            for x in acc {
                *x *= decay;
            }
        }
    }
}
