//! Operands that are rows of f32: the inputs, or rows that a scheme computes from them.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use super::numerics::{Head, Operands, Problem, cut};
use super::product::{Mat, product};
use super::tile::Tile;

/// Rows of one head from `start` on.
#[derive(Debug)]
pub(crate) struct Rows {
    start: usize,
    d: usize,
    values: Vec<f32>,
}

impl Rows {
    pub(super) fn new(start: usize, d: usize, values: Vec<f32>) -> Self {
        Self { start, d, values }
    }

    pub(super) fn of_queries(&self, tile: Tile) -> Mat<'_> {
        Mat::new(cut(&self.values, self.start, tile.row, tile.rows, self.d), tile.rows, self.d)
    }

    pub(super) fn of_keys(&self, tile: Tile) -> Mat<'_> {
        Mat::new(cut(&self.values, self.start, tile.col, tile.cols, self.d), tile.cols, self.d)
    }
}

/// Key and value of one head.
#[derive(Debug)]
pub(crate) struct Keys {
    pub(super) k: Rows,
    pub(super) v: Rows,
}

/// A source of rows. Every source implements [`Operands`].
pub(super) trait RowSource: Sync {
    fn problem(&self) -> &Problem<'_>;

    fn q_rows(&self, at: Head, tokens: Range<usize>) -> Vec<f32> {
        self.problem().q_rows(at, tokens)
    }
    fn k_rows(&self, at: Head, tokens: Range<usize>) -> Vec<f32> {
        self.problem().k_rows(at, tokens)
    }
    fn v_rows(&self, at: Head, tokens: Range<usize>) -> Vec<f32> {
        self.problem().v_rows(at, tokens)
    }
}

impl<S: RowSource> Operands for S {
    type Keys = Keys;
    type Queries = Rows;

    fn tile(&self) -> (usize, usize) {
        self.problem().tile()
    }

    fn keys(&self, at: Head, tokens: Range<usize>) -> Keys {
        let rows = |values| Rows::new(tokens.start, self.problem().head_dim(), values);
        Keys { k: rows(self.k_rows(at, tokens.clone())), v: rows(self.v_rows(at, tokens.clone())) }
    }

    fn queries(&self, at: Head, tokens: Range<usize>) -> Rows {
        Rows::new(tokens.start, self.problem().head_dim(), self.q_rows(at, tokens))
    }

    fn logits(&self, queries: &Rows, keys: &Keys, tile: Tile, out: &mut [f32]) {
        let scale = self.problem().softmax_scale * LOG2_E;
        product(out, queries.of_queries(tile), keys.k.of_keys(tile).t(), scale, false);
    }
}
