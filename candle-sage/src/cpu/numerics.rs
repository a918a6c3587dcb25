//! The traits that a scheme implements on the CPU: operands and matmuls of one tile.
//!
//! Tiles are processed in the order of FlashAttention-2: the forward keeps a tile of queries and iterates over the
//! keys, the backward keeps a tile of keys and iterates over the queries.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use rayon::prelude::*;

use super::score_mod::ScoreMod;
use super::tile::Tile;
use super::view::View;
use crate::selection::Lists;
use crate::shape::{AttentionShape, Segment};

/// One attention call: its shape, inputs and softmax scale.
#[derive(Debug)]
pub(crate) struct Problem<'a> {
    pub(crate) shape: &'a AttentionShape,
    pub(crate) segments: Vec<Segment>,
    pub(crate) softmax_scale: f32,
    pub(super) score_mod: ScoreMod,
    /// The sinks as base-2 logits, one for each query head. Empty without sinks.
    sinks: Vec<f32>,
    /// The selected blocks. `None`: queries attend to all keys that the mask allows.
    pub(super) lists: Option<&'a Lists>,
    q: View<'a>,
    k: View<'a>,
    v: View<'a>,
}

impl<'a> Problem<'a> {
    pub(crate) fn new(
        shape: &'a AttentionShape,
        softmax_scale: f32,
        lists: Option<&'a Lists>,
        [q, k, v]: [View<'a>; 3],
    ) -> Self {
        let (segments, score_mod, sinks) = (shape.segments(), ScoreMod::default(), Vec::new());
        Self { shape, segments, softmax_scale, score_mod, sinks, lists, q, k, v }
    }

    pub(crate) fn with_score_mod(self, score_mod: ScoreMod) -> Self {
        Self { score_mod, ..self }
    }

    pub(crate) fn with_sinks(self, mut sinks: Vec<f32>) -> Self {
        sinks.iter_mut().for_each(|sink| *sink *= LOG2_E);
        Self { sinks, ..self }
    }

    /// The sink of a query head, times `log2(e)`. `None` without sinks.
    pub(super) fn sink(&self, at: Head) -> Option<f32> {
        self.sinks.get(at.head).copied()
    }

    /// Number of tokens of a query tile and of a key tile, for schemes without settings for tile sizes. Without a
    /// selection: 64. With a selection: the largest of 64, 32 and 16 that divides the selection's block size.
    pub(super) fn tile(&self) -> (usize, usize) {
        let of_block =
            |block: usize| [64, 32].into_iter().find(|tile| block.is_multiple_of(*tile)).unwrap_or(16);
        self.lists.map_or((64, 64), |lists| (of_block(lists.blocks.query), of_block(lists.blocks.key)))
    }

    pub(crate) fn head_dim(&self) -> usize {
        self.shape.head_dim()
    }

    /// Whether the inputs are f16 (as opposed to bf16 or f32).
    pub(crate) fn is_f16(&self) -> bool {
        self.q.is_f16()
    }

    /// Rows of one query head; `tokens` are indices inside the segment.
    pub(crate) fn q_rows(&self, at: Head, tokens: Range<usize>) -> Vec<f32> {
        self.query_rows(&self.q, at, tokens)
    }

    /// Rows of a tensor with the query's shape.
    pub(crate) fn query_rows(&self, view: &View<'_>, at: Head, tokens: Range<usize>) -> Vec<f32> {
        let segment = &self.segments[at.segment];
        view.rows(segment.batch, inside(&segment.query, tokens), at.head)
    }

    pub(crate) fn k_rows(&self, at: Head, tokens: Range<usize>) -> Vec<f32> {
        let segment = &self.segments[at.segment];
        self.k.rows(segment.batch, inside(&segment.key, tokens), at.head)
    }

    pub(crate) fn v_rows(&self, at: Head, tokens: Range<usize>) -> Vec<f32> {
        let segment = &self.segments[at.segment];
        self.v.rows(segment.batch, inside(&segment.key, tokens), at.head)
    }

    /// The key head that a query head reads.
    pub(crate) fn key_head(&self, at: Head) -> Head {
        Head { segment: at.segment, head: at.head / self.shape.group() }
    }

    /// Index of the log-sum-exp of the segment's first query, in a tensor (batch, query heads, query).
    pub(crate) fn lse_start(&self, at: Head) -> usize {
        let segment = &self.segments[at.segment];
        (segment.batch * self.shape.query_heads() + at.head) * self.shape.query_len() + segment.query.start
    }
}

fn inside(segment: &Range<usize>, tokens: Range<usize>) -> Range<usize> {
    segment.start + tokens.start..segment.start + tokens.end
}

/// One head of one [`Segment`]: a query head or a key head, depending on the use.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Head {
    pub(crate) segment: usize,
    pub(crate) head: usize,
}

/// The rows `at..at + count` of a row-major matrix. The first row in `values` is the matrix's row `start`.
pub(crate) fn cut(values: &[f32], start: usize, at: usize, count: usize, width: usize) -> &[f32] {
    &values[(at - start) * width..(at - start + count) * width]
}

/// The online softmax of a tile of queries, with an accumulator for each of [`Finished::outputs`].
#[derive(Debug)]
pub(crate) struct Softmax<const OUTPUTS: usize = 1> {
    /// For each row, the base-2 logit that is subtracted from the row's logits: the largest so far, unless the scheme
    /// uses another reference.
    pub(crate) reference: Vec<f32>,
    /// Sum of `2^(logit - reference)`.
    pub(crate) sum: Vec<f32>,
    /// Accumulators (rows, head_dim): sums of values times `2^(logit - reference)`, not yet divided by `sum`.
    pub(crate) acc: [Vec<f32>; OUTPUTS],
}

impl<const OUTPUTS: usize> Softmax<OUTPUTS> {
    pub(crate) fn new(rows: usize, d: usize) -> Self {
        Self {
            reference: vec![f32::NEG_INFINITY; rows],
            sum: vec![0.0; rows],
            acc: std::array::from_fn(|_| vec![0.0; rows * d]),
        }
    }

    /// Includes the base-2 logit `sink`, if any, in the sums, and divides the accumulators by the sums. `sees` tells
    /// whether a row of the tile sees any key.
    pub(crate) fn finish(self, sink: Option<f32>, sees: &dyn Fn(usize) -> bool) -> Finished {
        let Self { reference, sum, mut acc } = self;
        let d = acc[0].len() / sum.len();
        let mut lse2 = Vec::with_capacity(sum.len());
        for (r, (&reference, &sum)) in reference.iter().zip(&sum).enumerate() {
            // A query that sees no key has the output zero. If a query sees keys and its sum is 0, the output is NaN.
            let (mut inverse, mut row_lse2) =
                if sees(r) { (1.0 / sum, reference + sum.log2()) } else { (0.0, f32::NEG_INFINITY) };
            if let Some(sink) = sink.filter(|_| sees(r)) {
                let with_sink = log2_with_sink(sink, row_lse2);
                inverse *= (-with_sink).exp2();
                row_lse2 += with_sink;
            }
            for acc in &mut acc {
                acc[r * d..(r + 1) * d].iter_mut().for_each(|x| *x *= inverse);
            }
            lse2.push(row_lse2);
        }
        Finished { outputs: acc.into(), states: vec![lse2] }
    }
}

/// The base-2 logarithm of the factor by which a sink increases `2^lse2`, a row's sum of exponentials.
fn log2_with_sink(sink: f32, lse2: f32) -> f32 {
    let above = sink - lse2;
    above.max(0.0) + (1.0 + (-above.abs()).exp2()).log2()
}

/// The forward's final results for the queries of one tile or of a whole call.
#[derive(Debug)]
pub(crate) struct Finished {
    /// Each output has head_dim values per query. The first output is O.
    pub(crate) outputs: Vec<Vec<f32>>,
    /// Each vector has one value per query. The first vector has the base-2 log-sum-exps.
    pub(crate) states: Vec<Vec<f32>>,
}

impl Finished {
    /// Adds to the output the mean that was subtracted from V. `mean` is empty without smoothing.
    pub(crate) fn add_value_mean(&mut self, mean: &[f32], sees: &dyn Fn(usize) -> bool) {
        if mean.is_empty() {
            return;
        }
        // The output of a query that sees no key remains zero.
        let rows = self.outputs[0].chunks_exact_mut(mean.len()).enumerate().filter(|(r, _)| sees(*r));
        rows.for_each(|(_, row)| row.iter_mut().zip(mean).for_each(|(x, mean)| *x += mean));
    }

    /// O and the base-2 log-sum-exps.
    pub(crate) fn out_and_lse2(mut self) -> (Vec<f32>, Vec<f32>) {
        (self.outputs.swap_remove(0), self.states.swap_remove(0))
    }
}

/// What forward and backward need: Q, K and V as the scheme represents them, and the logits of a tile.
pub(crate) trait Operands: Sync {
    /// Key and value of one head, as operands of matmuls.
    type Keys;
    /// Query of one head, as an operand of matmuls.
    type Queries;

    /// Number of tokens of a query tile and of a key tile.
    fn tile(&self) -> (usize, usize);

    fn keys(&self, at: Head, tokens: Range<usize>) -> Self::Keys;
    fn queries(&self, at: Head, tokens: Range<usize>) -> Self::Queries;

    /// `out = softmax_scale log2(e) Q K^T`.
    fn logits(&self, queries: &Self::Queries, keys: &Self::Keys, tile: Tile, out: &mut [f32]);
}

/// The matmuls of a scheme's forward.
pub(crate) trait ForwardNumerics: Operands {
    /// The state of a tile of queries: the online softmax and the accumulators.
    type RowState;
    /// Number of results with the query's shape: see [`Finished::outputs`].
    const OUTPUTS: usize;
    /// Number of [`Finished::states`].
    const STATES: usize;

    /// The state of a tile of `count` queries before the first key.
    fn rows(&self, count: usize) -> Self::RowState;

    /// One step of the online softmax: adds a tile of logits, masked with minus infinity, to `rows`.
    /// Overwrites `logits`.
    fn attend(&self, keys: &Self::Keys, tile: Tile, logits: &mut [f32], rows: &mut Self::RowState);

    /// The results of a tile of queries of one head. `sees` tells whether a row of the tile sees any key.
    fn finish(&self, at: Head, rows: Self::RowState, sees: &dyn Fn(usize) -> bool) -> Finished;
}

/// The matmuls of a scheme's backward.
pub(crate) trait BackwardNumerics: Operands {
    /// Output gradient of one head, as an operand of matmuls.
    type Grads;

    /// The base-2 log-sum-exps, (batch, query heads, query).
    fn lse2(&self) -> &[f32];

    /// The delta of each query of a head: `rowsum(dO o O)`.
    fn delta(&self, at: Head, dout: &[f32]) -> Vec<f32>;

    fn grads(&self, at: Head, dout: Vec<f32>) -> Self::Grads;

    /// `dv += P^T dO`, for the keys of the tile.
    fn add_dv(&self, p: &[f32], grads: &Self::Grads, tile: Tile, dv: &mut [f32]);

    /// `out = dO V^T`.
    fn dp(&self, grads: &Self::Grads, keys: &Self::Keys, tile: Tile, out: &mut [f32]);

    /// `dq += dS K`, for the queries of the tile; without the softmax scale.
    fn add_dq(&self, ds: &[f32], keys: &Self::Keys, tile: Tile, dq: &mut [f32]);

    /// `dk += dS^T Q`, for the keys of the tile; without the softmax scale.
    fn add_dk(&self, ds: &[f32], queries: &Self::Queries, tile: Tile, dk: &mut [f32]);
}

/// Calls `make` in parallel for every head of every segment. The results are in (segment, head) order.
pub(crate) fn per_head<T: Send>(
    problem: &Problem<'_>,
    heads: usize,
    make: impl Fn(Head) -> T + Sync,
) -> Vec<T> {
    (0..problem.segments.len() * heads)
        .into_par_iter()
        .map(|n| make(Head { segment: n / heads, head: n % heads }))
        .collect()
}
