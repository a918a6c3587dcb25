//! The forward walk: for each tile of queries, over the keys it sees.

use std::ops::Range;

use rayon::prelude::*;

use super::numerics::{Head, Numerics, Problem, Softmax, Tile, mask};

/// Queries that one thread takes at a time; they share one reading of the keys.
const QUERIES_PER_ITEM: usize = 512;

/// Returns the output, (batch, query, query heads, head_dim), and the base-2 log-sum-exp,
/// (batch, query heads, query).
pub(super) fn run<N: Numerics>(numerics: &N, problem: &Problem<'_>) -> (Vec<f32>, Vec<f32>) {
    let (shape, d) = (problem.shape, problem.head_dim());
    let step = QUERIES_PER_ITEM.next_multiple_of(numerics.tile().0);
    let items: Vec<(Head, Range<usize>)> = (0..problem.segments.len())
        .flat_map(|segment| (0..shape.query_heads()).map(move |head| Head { segment, head }))
        .flat_map(|at| {
            let queries = problem.segments[at.segment].query.len();
            (0..queries).step_by(step).map(move |start| (at, start..(start + step).min(queries)))
        })
        .collect();
    let parts: Vec<(Vec<f32>, Vec<f32>)> =
        items.par_iter().map(|(at, queries)| run_item(numerics, problem, *at, queries.clone())).collect();

    let heads = shape.query_heads();
    let mut out = vec![0.0; shape.batch() * shape.query_len() * heads * d];
    let mut lse2 = vec![f32::NEG_INFINITY; shape.batch() * shape.query_len() * heads];
    for ((at, queries), (part, part_lse2)) in items.iter().zip(parts) {
        let segment = &problem.segments[at.segment];
        let first = segment.batch * shape.query_len() + segment.query.start + queries.start;
        for (r, row) in part.chunks_exact(d).enumerate() {
            let start = ((first + r) * heads + at.head) * d;
            out[start..start + d].copy_from_slice(row);
        }
        let start = problem.lse_start(*at) + queries.start;
        lse2[start..start + part_lse2.len()].copy_from_slice(&part_lse2);
    }
    (out, lse2)
}

fn run_item<N: Numerics>(
    numerics: &N,
    problem: &Problem<'_>,
    at: Head,
    range: Range<usize>,
) -> (Vec<f32>, Vec<f32>) {
    let (segment, d) = (&problem.segments[at.segment], problem.head_dim());
    let (tile_q, tile_k) = numerics.tile();
    let keys = numerics.keys(problem.key_head(at), 0..segment.visible_keys(range.end - 1));
    let queries = numerics.queries(at, range.clone());
    let mut logits = vec![0.0; tile_q * tile_k];
    let (mut out, mut lse2) = (Vec::with_capacity(range.len() * d), Vec::with_capacity(range.len()));
    for row in range.clone().step_by(tile_q) {
        let rows = tile_q.min(range.end - row);
        let mut softmax =
            Softmax { max: vec![f32::NEG_INFINITY; rows], sum: vec![0.0; rows], acc: vec![0.0; rows * d] };
        let visible = segment.visible_keys(row + rows - 1);
        for col in (0..visible).step_by(tile_k) {
            let tile = Tile { row, rows, col, cols: tile_k.min(visible - col) };
            let logits = &mut logits[..rows * tile.cols];
            numerics.logits(&queries, &keys, tile, logits);
            mask(segment, tile, logits);
            numerics.attend(&keys, tile, logits, &mut softmax);
        }
        for (r, acc) in softmax.acc.chunks_exact(d).enumerate() {
            // Only a query that sees no key gives zeros: a sum that came to 0 otherwise gives NaN.
            let (inverse, row_lse2) = match segment.visible_keys(row + r) {
                0 => (0.0, f32::NEG_INFINITY),
                _ => (1.0 / softmax.sum[r], softmax.max[r] + softmax.sum[r].log2()),
            };
            out.extend(acc.iter().map(|x| x * inverse));
            lse2.push(row_lse2);
        }
    }
    (out, lse2)
}
