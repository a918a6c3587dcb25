//! The forward's mainloop: for each tile of queries, a loop over the keys that these queries see.

use std::ops::Range;

use rayon::prelude::*;

use super::numerics::{Finished, ForwardNumerics, Head, Problem};
use super::tile::{Tile, mask};

/// Number of queries in a parallel task. The queries of a task share one copy of the keys.
const QUERIES_PER_ITEM: usize = 512;

/// The forward of all queries. [`Finished::outputs`] are (batch, query, query heads, head_dim), [`Finished::states`]
/// are (batch, query heads, query).
pub(super) fn run<N: ForwardNumerics>(numerics: &N, problem: &Problem<'_>) -> Finished {
    let (shape, d) = (problem.shape, problem.head_dim());
    let step = QUERIES_PER_ITEM.next_multiple_of(numerics.tile().0);
    let items: Vec<(Head, Range<usize>)> = (0..problem.segments.len())
        .flat_map(|segment| (0..shape.query_heads()).map(move |head| Head { segment, head }))
        .flat_map(|at| {
            let queries = problem.segments[at.segment].query.len();
            (0..queries).step_by(step).map(move |start| (at, start..(start + step).min(queries)))
        })
        .collect();
    let parts: Vec<Vec<Finished>> =
        items.par_iter().map(|(at, queries)| run_item(numerics, problem, *at, queries.clone())).collect();

    let heads = shape.query_heads();
    let rows = shape.batch() * shape.query_len() * heads;
    let mut all = Finished {
        outputs: vec![vec![0.0; rows * d]; N::OUTPUTS],
        states: vec![vec![f32::NEG_INFINITY; rows]; N::STATES],
    };
    for ((at, queries), tiles) in items.iter().zip(parts) {
        let segment = &problem.segments[at.segment];
        let mut row = queries.start;
        for tile in tiles {
            let count = tile.states[0].len();
            let first = segment.batch * shape.query_len() + segment.query.start + row;
            for (all, tile) in all.outputs.iter_mut().zip(&tile.outputs) {
                for (r, values) in tile.chunks_exact(d).enumerate() {
                    let start = ((first + r) * heads + at.head) * d;
                    all[start..start + d].copy_from_slice(values);
                }
            }
            let start = problem.lse_start(*at) + row;
            for (all, tile) in all.states.iter_mut().zip(&tile.states) {
                all[start..start + count].copy_from_slice(tile);
            }
            row += count;
        }
    }
    all
}

fn run_item<N: ForwardNumerics>(
    numerics: &N,
    problem: &Problem<'_>,
    at: Head,
    range: Range<usize>,
) -> Vec<Finished> {
    let segment = &problem.segments[at.segment];
    let (tile_q, tile_k) = numerics.tile();
    let first_key = segment.first_key(range.start) / tile_k * tile_k;
    let end_key = segment.visible_keys(range.end - 1);
    let keys = numerics.keys(problem.key_head(at), first_key.min(end_key)..end_key);
    let queries = numerics.queries(at, range.clone());
    let mut logits = vec![0.0; tile_q * tile_k];
    let tiles = range.clone().step_by(tile_q).map(|row| {
        let rows = tile_q.min(range.end - row);
        let mut state = numerics.rows(rows);
        for run in problem.keys_seen(at, row..row + rows, tile_k) {
            for col in run.clone().step_by(tile_k) {
                let tile = Tile { row, rows, col, cols: tile_k.min(run.end - col) };
                let logits = &mut logits[..rows * tile.cols];
                numerics.logits(&queries, &keys, tile, logits);
                problem.score_mod.apply(at.head, segment, tile, logits, &mut []);
                mask(segment, tile, logits);
                numerics.attend(&keys, tile, logits, &mut state);
            }
        }
        numerics.finish(at, state, &|r| segment.visible_keys(row + r) > 0)
    });
    tiles.collect()
}
