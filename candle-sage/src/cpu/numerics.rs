//! What a scheme supplies: the seven products, a tile at a time.

use std::ops::Range;

use super::view::View;
use crate::shape::{AttentionShape, Segment};

/// One attention call: shape, inputs and softmax scale.
#[derive(Debug)]
pub(crate) struct Problem<'a> {
    pub(crate) shape: &'a AttentionShape,
    pub(crate) segments: Vec<Segment>,
    pub(crate) softmax_scale: f32,
    q: View<'a>,
    k: View<'a>,
    v: View<'a>,
}

impl<'a> Problem<'a> {
    pub(crate) fn new(shape: &'a AttentionShape, softmax_scale: f32, [q, k, v]: [View<'a>; 3]) -> Self {
        Self { shape, segments: shape.segments(), softmax_scale, q, k, v }
    }

    pub(crate) fn head_dim(&self) -> usize {
        self.shape.head_dim()
    }

    /// Whether the inputs are f16 (as opposed to bf16 or f32).
    pub(crate) fn is_f16(&self) -> bool {
        self.q.is_f16()
    }

    /// Rows of the query of one head; `tokens` count inside the segment.
    pub(crate) fn q_rows(&self, at: Head, tokens: Range<usize>) -> Vec<f32> {
        self.query_rows(&self.q, at, tokens)
    }

    /// Rows of a tensor with the query's shape.
    pub(crate) fn query_rows(&self, view: &View<'_>, at: Head, tokens: Range<usize>) -> Vec<f32> {
        let segment = &self.segments[at.segment];
        view.rows(segment.batch, inside(&segment.query, tokens), at.head)
    }

    /// Rows of the key of one key head.
    pub(crate) fn k_rows(&self, at: Head, tokens: Range<usize>) -> Vec<f32> {
        let segment = &self.segments[at.segment];
        self.k.rows(segment.batch, inside(&segment.key, tokens), at.head)
    }

    /// Rows of the value of one key head.
    pub(crate) fn v_rows(&self, at: Head, tokens: Range<usize>) -> Vec<f32> {
        let segment = &self.segments[at.segment];
        self.v.rows(segment.batch, inside(&segment.key, tokens), at.head)
    }

    /// The key head that a query head reads.
    pub(crate) fn key_head(&self, at: Head) -> Head {
        Head { segment: at.segment, head: at.head / self.shape.group() }
    }

    /// Where the log-sum-exps of one query head start in (batch, query heads, query) order.
    pub(crate) fn lse_start(&self, at: Head) -> usize {
        let segment = &self.segments[at.segment];
        (segment.batch * self.shape.query_heads() + at.head) * self.shape.query_len() + segment.query.start
    }
}

fn inside(segment: &Range<usize>, tokens: Range<usize>) -> Range<usize> {
    segment.start + tokens.start..segment.start + tokens.end
}

/// One head of one segment; a query head or a key head, as the user says.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Head {
    pub(crate) segment: usize,
    pub(crate) head: usize,
}

/// A tile of the (query, key) plane of one head, counted inside the segment. Starts are multiples
/// of the tile size; the last tile of a row or column may be smaller.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tile {
    pub(crate) row: usize,
    pub(crate) rows: usize,
    pub(crate) col: usize,
    pub(crate) cols: usize,
}

/// Cuts the rows `at..at + count` out of a row-major matrix whose first row is number `start`.
pub(crate) fn cut(values: &[f32], start: usize, at: usize, count: usize, width: usize) -> &[f32] {
    &values[(at - start) * width..(at - start + count) * width]
}

/// The running softmax of a tile of queries.
#[derive(Debug)]
pub(crate) struct Softmax {
    /// Largest base-2 logit so far.
    pub(crate) max: Vec<f32>,
    /// Sum of `2^(logit - max)`.
    pub(crate) sum: Vec<f32>,
    /// Weighted sum of the values, not yet divided by `sum`.
    pub(crate) acc: Vec<f32>,
}

/// The products of one scheme. Tiles come in the order of FlashAttention-2: the forward keeps a
/// tile of queries and walks the keys, the backward keeps a tile of keys and walks the queries.
pub(crate) trait Numerics: Sync {
    /// Key and value of one head, ready for products.
    type Keys;
    /// Query of one head, ready for products.
    type Queries;
    /// Output gradient of one head, ready for products.
    type Grads;

    /// Rows of a query tile and of a key tile.
    fn tile(&self) -> (usize, usize);

    fn keys(&self, at: Head, tokens: Range<usize>) -> Self::Keys;
    fn queries(&self, at: Head, tokens: Range<usize>) -> Self::Queries;
    fn grads(&self, dout: Vec<f32>) -> Self::Grads;

    /// `out = softmax_scale log2(e) Q K^T`.
    fn logits(&self, queries: &Self::Queries, keys: &Self::Keys, tile: Tile, out: &mut [f32]);

    /// One step of the online softmax: folds a tile of logits, masked with minus infinity, into
    /// `softmax`. Overwrites `logits`.
    fn attend(&self, keys: &Self::Keys, tile: Tile, logits: &mut [f32], softmax: &mut Softmax);

    /// `dv += P^T dO`, for the keys of the tile.
    fn add_dv(&self, p: &[f32], grads: &Self::Grads, tile: Tile, dv: &mut [f32]);

    /// `out = dO V^T`.
    fn dp(&self, grads: &Self::Grads, keys: &Self::Keys, tile: Tile, out: &mut [f32]);

    /// `dq += dS K`, for the queries of the tile; without the softmax scale.
    fn add_dq(&self, ds: &[f32], keys: &Self::Keys, tile: Tile, dq: &mut [f32]);

    /// `dk += dS^T Q`, for the keys of the tile; without the softmax scale.
    fn add_dk(&self, ds: &[f32], queries: &Self::Queries, tile: Tile, dk: &mut [f32]);
}

/// Hides the keys that a query of the tile does not see.
pub(crate) fn mask(segment: &Segment, tile: Tile, logits: &mut [f32]) {
    // Later queries see at least as many keys, so the first row decides whether anything is hidden.
    if segment.visible_keys(tile.row) >= tile.col + tile.cols {
        return;
    }
    for (r, row) in logits.chunks_exact_mut(tile.cols).enumerate() {
        let visible = segment.visible_keys(tile.row + r).saturating_sub(tile.col).min(tile.cols);
        row[visible..].fill(f32::NEG_INFINITY);
    }
}
