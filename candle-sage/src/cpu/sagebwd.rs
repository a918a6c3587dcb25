//! SageBwd on the CPU. INT8 values are stored as f32. The f32 sums of INT8 matmuls are exact.

mod backward;
mod forward;

use std::f32::consts::LOG2_E;
use std::ops::Range;

use backward::Values16;
use forward::ForwardValues;

use super::numerics::{Head, Operands, Problem, cut, per_head};
use super::product::{Mat, product};
use super::quantize::{TileCodes, channel_mean, subtract_mean, token_mean};
use super::tile::Tile;
use super::{Gradients, OnCpu, OutputGradient};
use crate::scheme::{Int8Products, SageBwd as Settings};

impl OnCpu for Settings {
    /// The base-2 log-sum-exps, and the INT8 values and scales of Q and K.
    type Kept = (Vec<f32>, Codes);

    fn forward(&self, problem: &Problem<'_>) -> (Vec<f32>, Self::Kept) {
        let codes = Codes::new(self, problem);
        let products = Products {
            settings: self,
            int8: Int8Products::PAPER,
            problem,
            codes: &codes,
            values: ForwardValues::new(self, problem),
        };
        let (out, lse2) = super::forward::run(&products, problem).out_and_lse2();
        (out, (lse2, codes))
    }

    fn lse2((lse2, _): &Self::Kept) -> &[f32] {
        lse2
    }

    fn backward(
        &self,
        problem: &Problem<'_>,
        (lse2, codes): &Self::Kept,
        output: &OutputGradient<'_>,
    ) -> Gradients {
        let values = Values16 { lse2, out: output.out };
        let products = Products { settings: self, int8: self.products, problem, codes, values };
        super::backward::run(&products, problem, output)
    }
}

/// State that the forward keeps for the backward: the INT8 values and scales of Q and K, and the means that were
/// subtracted from Q and K.
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
    /// The mean that was subtracted before quantizing: the token mean of K or V, or the mean of each tile of Q. Empty
    /// without smoothing.
    mean: Vec<f32>,
}

impl Codes {
    pub(super) fn new(settings: &Settings, problem: &Problem<'_>) -> Self {
        let d = problem.head_dim();
        let queries = per_head(problem, problem.shape.query_heads(), |at| {
            let mut rows = problem.q_rows(at, 0..problem.segments[at.segment].query.len());
            let mut mean = Vec::new();
            if settings.smoothing.of_queries() {
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
            if settings.smoothing.of_keys() {
                mean = token_mean(&rows, d, settings);
                subtract_mean(&mut rows, &mean);
            }
            HeadCodes { codes: TileCodes::new(&rows, d, settings.tile_k), mean }
        });
        Self { queries, keys }
    }
}

/// The matmuls of [`crate::scheme::SageBwd`], for the forward or for the backward.
struct Products<'a, V> {
    settings: &'a Settings,
    /// The backward's matmuls that run in INT8. For the forward it is always [`Int8Products::PAPER`]: S runs in INT8, and
    /// the type of `values` decides whether O does.
    int8: Int8Products,
    problem: &'a Problem<'a>,
    codes: &'a Codes,
    values: V,
}

/// V in the form that a mainloop reads.
trait Values: Sync {
    /// The rows `tokens` of V of one key head. `index` is the key head's index in `Codes::keys`.
    fn rows(&self, problem: &Problem<'_>, at: Head, index: usize, tokens: Range<usize>) -> Vec<f32>;
}

impl<V> Products<'_, V> {
    fn d(&self) -> usize {
        self.problem.head_dim()
    }

    /// The index, in `Codes`, of the key head that a query head reads.
    fn key_index(&self, at: Head) -> usize {
        let Head { segment, head } = self.problem.key_head(at);
        segment * self.problem.shape.key_heads() + head
    }

    fn q_dequant(&self, queries: &Queries, tile: Tile) -> f32 {
        self.codes.queries[queries.index].codes.dequant_scale[tile.row / self.settings.tile_q]
    }

    fn k_dequant(&self, keys: &Keys, tile: Tile) -> f32 {
        self.codes.keys[keys.index].codes.dequant_scale[tile.col / self.settings.tile_k]
    }

    /// The mean that was subtracted from the tile's queries, if there is one.
    fn q_mean(&self, queries: &Queries, tile: Tile) -> Option<&[f32]> {
        let mean = &self.codes.queries[queries.index].mean;
        (!mean.is_empty()).then(|| &mean[tile.row / self.settings.tile_q * self.d()..][..self.d()])
    }
}

/// K and V of one head, for a range of tokens that begins at `start`.
pub(super) struct Keys {
    start: usize,
    /// Index of the head's entry in `Codes`.
    index: usize,
    /// INT8 values of K.
    k: Vec<f32>,
    /// In the forward: INT8 values of V, or unquantized V. In the backward: V in 16-bit precision.
    v: Vec<f32>,
    /// K minus its mean, unquantized: for matmuls that do not run in INT8, and for the product with Q's mean (this
    /// product is added to the logits). Empty if not needed.
    k_smooth: Vec<f32>,
}

/// Q of one head, for a range of tokens that begins at `start`.
pub(super) struct Queries {
    start: usize,
    /// Index of the head's entry in `Codes`.
    index: usize,
    /// INT8 values of Q.
    q: Vec<f32>,
    /// Unquantized Q. Empty if all matmuls with Q run in INT8.
    q_rows: Vec<f32>,
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
        if settings.smoothing.of_queries() || !(self.int8.s && self.int8.dq) {
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
