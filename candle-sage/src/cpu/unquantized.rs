//! Unquantized attention on the CPU: every matmul in f32.

use multiversion::multiversion;

use super::backward::row_dots;
use super::numerics::{BackwardNumerics, Finished, ForwardNumerics, Head, Problem, Softmax};
use super::product::{Mat, product};
use super::rows::{Keys, RowSource, Rows};
use super::tile::Tile;
use super::view::View;
use super::{Gradients, OnCpu, OutputGradient, backward, forward, lanes};

/// See [`crate::scheme::Scheme::Unquantized`].
#[derive(Debug)]
pub(super) struct Unquantized;

impl OnCpu for Unquantized {
    /// The base-2 log-sum-exps, (batch, query heads, query).
    type Kept = Vec<f32>;

    fn forward(&self, problem: &Problem<'_>) -> (Vec<f32>, Self::Kept) {
        forward::run(&Forward(problem), problem).out_and_lse2()
    }

    fn lse2(kept: &Self::Kept) -> &[f32] {
        kept
    }

    fn backward(&self, problem: &Problem<'_>, lse2: &Self::Kept, output: &OutputGradient<'_>) -> Gradients {
        backward::run(&Backward { problem, lse2, out: output.out }, problem, output)
    }
}

struct Forward<'a>(&'a Problem<'a>);

struct Backward<'a> {
    problem: &'a Problem<'a>,
    lse2: &'a [f32],
    out: &'a View<'a>,
}

impl RowSource for Forward<'_> {
    fn problem(&self) -> &Problem<'_> {
        self.0
    }
}

impl RowSource for Backward<'_> {
    fn problem(&self) -> &Problem<'_> {
        self.problem
    }
}

impl ForwardNumerics for Forward<'_> {
    type RowState = Softmax;
    const OUTPUTS: usize = 1;
    const STATES: usize = 1;

    fn rows(&self, count: usize) -> Softmax {
        Softmax::new(count, self.0.head_dim())
    }

    fn attend(&self, keys: &Keys, tile: Tile, logits: &mut [f32], rows: &mut Softmax) {
        online_softmax(tile.cols, logits, rows);
        let p = Mat::new(logits, tile.rows, tile.cols);
        product(&mut rows.acc[0], p, keys.v.of_keys(tile), 1.0, true);
    }

    fn finish(&self, at: Head, rows: Softmax, sees: &dyn Fn(usize) -> bool) -> Finished {
        rows.finish(self.0.sink(at), sees)
    }
}

impl BackwardNumerics for Backward<'_> {
    type Grads = Rows;

    fn lse2(&self) -> &[f32] {
        self.lse2
    }

    fn delta(&self, at: Head, dout: &[f32]) -> Vec<f32> {
        let d = self.problem.head_dim();
        row_dots(&self.problem.query_rows(self.out, at, 0..dout.len() / d), dout, d)
    }

    fn grads(&self, _: Head, dout: Vec<f32>) -> Rows {
        Rows::new(0, self.problem.head_dim(), dout)
    }

    fn add_dv(&self, p: &[f32], grads: &Rows, tile: Tile, dv: &mut [f32]) {
        product(dv, Mat::new(p, tile.rows, tile.cols).t(), grads.of_queries(tile), 1.0, true);
    }

    fn dp(&self, grads: &Rows, keys: &Keys, tile: Tile, out: &mut [f32]) {
        product(out, grads.of_queries(tile), keys.v.of_keys(tile).t(), 1.0, false);
    }

    fn add_dq(&self, ds: &[f32], keys: &Keys, tile: Tile, dq: &mut [f32]) {
        product(dq, Mat::new(ds, tile.rows, tile.cols), keys.k.of_keys(tile), 1.0, true);
    }

    fn add_dk(&self, ds: &[f32], queries: &Rows, tile: Tile, dk: &mut [f32]) {
        product(dk, Mat::new(ds, tile.rows, tile.cols).t(), queries.of_queries(tile), 1.0, true);
    }
}

/// Updates the row maxima, replaces each logit of a tile by `2^(logit - max)`, and rescales sums and accumulators to
/// the new maxima.
#[multiversion(targets = "simd")]
pub(super) fn online_softmax(cols: usize, logits: &mut [f32], softmax: &mut Softmax) {
    let Softmax { reference, sum, acc: [acc] } = softmax;
    let d = acc.len() / sum.len();
    let state = reference.iter_mut().zip(sum).zip(acc.chunks_exact_mut(d));
    for (row, ((max, sum), acc)) in logits.chunks_exact_mut(cols).zip(state) {
        let row_max = lanes::max(row);
        let new_max = if row_max > *max { row_max } else { *max };
        // If no visible key was read yet, every term is 2^-inf = 0, whatever the finite `shift` is.
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
