//! The backward's mainloop: for each tile of keys, a loop over the queries that see these keys.

use std::ops::Range;

use multiversion::multiversion;
use rayon::prelude::*;

use super::numerics::{BackwardNumerics, Head, Operands, Problem, cut};
use super::score_mod::chain;
use super::tile::{Tile, mask};
use super::{Gradients, OutputGradient, lanes};

/// One parallel task: keys of one key head.
struct Item {
    at: Head,
    keys: Range<usize>,
}

/// The result of one task: dK and dV of its keys, and its contribution to dQ.
struct Part {
    dk: Vec<f32>,
    dv: Vec<f32>,
    /// For each query head of the group: the contribution of the task's keys to dQ, for all queries.
    dq: Vec<Vec<f32>>,
}

/// If the number of segments times the number of key heads is less than this, the keys of each head are split, so that
/// more threads have work. Each split needs another buffer for dQ.
const ENOUGH_ITEMS: usize = 16;
const MOST_SPLITS: usize = 8;

fn items<N: Operands>(numerics: &N, problem: &Problem<'_>) -> Vec<Item> {
    let heads = problem.shape.key_heads();
    // The number of splits depends only on the shape: the order of additions must not depend on the threads.
    let splits = ENOUGH_ITEMS.div_ceil(problem.segments.len() * heads).min(MOST_SPLITS);
    let tile_k = numerics.tile().1;
    let mut items = Vec::new();
    for (segment, bounds) in problem.segments.iter().enumerate() {
        let keys = bounds.key.len();
        let step = keys.div_ceil(splits).next_multiple_of(tile_k).max(tile_k);
        for head in 0..heads {
            for start in (0..keys).step_by(step) {
                let at = Head { segment, head };
                items.push(Item { at, keys: start..(start + step).min(keys) });
            }
        }
    }
    items
}

pub(super) fn run<N: BackwardNumerics>(
    numerics: &N,
    problem: &Problem<'_>,
    output: &OutputGradient<'_>,
) -> Gradients {
    let (shape, d) = (problem.shape, problem.head_dim());
    let items = items(numerics, problem);
    let parts: Vec<Part> = items.par_iter().map(|item| run_item(numerics, problem, output, item)).collect();

    let (heads, key_heads, group) = (shape.query_heads(), shape.key_heads(), shape.group());
    let mut dq = vec![0.0; shape.batch() * shape.query_len() * heads * d];
    let mut dk = vec![0.0; shape.batch() * shape.key_len() * key_heads * d];
    let mut dv = dk.clone();
    let scale = problem.softmax_scale;
    for (item, part) in items.iter().zip(parts) {
        let segment = &problem.segments[item.at.segment];
        let first = segment.batch * shape.key_len() + segment.key.start + item.keys.start;
        add_rows(&mut dk, &part.dk, d, first, key_heads, item.at.head, scale);
        add_rows(&mut dv, &part.dv, d, first, key_heads, item.at.head, 1.0);
        let first = segment.batch * shape.query_len() + segment.query.start;
        for (member, part) in part.dq.iter().enumerate() {
            add_rows(&mut dq, part, d, first, heads, item.at.head * group + member, scale);
        }
    }
    Gradients { dq, dk, dv, dsinks: sink_gradients(numerics, problem, output) }
}

/// The gradient of each head's sink: minus the sum over queries of the sink's probability times delta. A sink acts as a
/// key with a value of zero.
fn sink_gradients<N: BackwardNumerics>(
    numerics: &N,
    problem: &Problem<'_>,
    output: &OutputGradient<'_>,
) -> Vec<f32> {
    let of_head = |head: usize| {
        let of_segment = |segment: usize| {
            let (at, count) = (Head { segment, head }, problem.segments[segment].query.len());
            let sink = problem.sink(at)?;
            let delta = deltas(numerics, problem, output, at, &problem.query_rows(output.dout, at, 0..count));
            let start = problem.lse_start(at);
            let seen = numerics.lse2()[start..start + count].iter().zip(delta);
            let seen = seen.filter(|(lse2, _)| **lse2 != f32::NEG_INFINITY);
            Some(seen.map(|(lse2, delta)| -(sink - lse2).exp2().min(1.0) * delta).sum::<f32>())
        };
        (0..problem.segments.len()).map(of_segment).sum()
    };
    let all: Vec<Option<f32>> = (0..problem.shape.query_heads()).into_par_iter().map(of_head).collect();
    all.into_iter().flatten().collect()
}

/// [`BackwardNumerics::delta`], minus the gradients of the log-sum-exps, if any.
fn deltas<N: BackwardNumerics>(
    numerics: &N,
    problem: &Problem<'_>,
    output: &OutputGradient<'_>,
    at: Head,
    dout: &[f32],
) -> Vec<f32> {
    let mut delta = numerics.delta(at, dout);
    let rows = problem.lse_start(at)..problem.lse_start(at) + delta.len();
    if let Some(dlse) = output.dlse.get(rows.clone()) {
        // The derivative of the log-sum-exp with respect to a logit is P. If a query sees no key, its log-sum-exp is
        // minus infinity, and its `dlse` may be NaN.
        let seen = delta.iter_mut().zip(dlse).zip(&numerics.lse2()[rows]);
        let seen = seen.filter(|(_, lse2)| **lse2 != f32::NEG_INFINITY);
        seen.for_each(|((delta, dlse), _)| *delta -= dlse);
    }
    delta
}

/// Adds the rows of one head, times `factor`, into a (token, heads, head_dim) tensor.
fn add_rows(into: &mut [f32], rows: &[f32], d: usize, first: usize, heads: usize, head: usize, factor: f32) {
    for (r, row) in rows.chunks_exact(d).enumerate() {
        let start = ((first + r) * heads + head) * d;
        for (into, x) in into[start..start + d].iter_mut().zip(row) {
            *into += factor * x;
        }
    }
}

fn run_item<N: BackwardNumerics>(
    numerics: &N,
    problem: &Problem<'_>,
    output: &OutputGradient<'_>,
    item: &Item,
) -> Part {
    let d = problem.head_dim();
    let segment = &problem.segments[item.at.segment];
    let count = segment.query.len();
    let (tile_q, tile_k) = numerics.tile();
    let keys = numerics.keys(item.at, item.keys.clone());
    let mut part =
        Part { dk: vec![0.0; item.keys.len() * d], dv: vec![0.0; item.keys.len() * d], dq: Vec::new() };
    let (mut p, mut ds) = (vec![0.0; tile_q * tile_k], vec![0.0; tile_q * tile_k]);
    let mut derivatives = vec![0.0; if problem.score_mod.has_softcap() { tile_q * tile_k } else { 0 }];
    let group = problem.shape.group();
    for member in 0..group {
        let at = Head { segment: item.at.segment, head: item.at.head * group + member };
        let queries = numerics.queries(at, 0..count);
        let dout = problem.query_rows(output.dout, at, 0..count);
        let delta = deltas(numerics, problem, output, at, &dout);
        let lse2 = &numerics.lse2()[problem.lse_start(at)..problem.lse_start(at) + count];
        let grads = numerics.grads(at, dout);
        let mut dq = vec![0.0; count * d];
        for col in item.keys.clone().step_by(tile_k) {
            let cols = tile_k.min(item.keys.end - col);
            let at_keys = (col - item.keys.start) * d..(col - item.keys.start + cols) * d;
            let (dk, dv) = (&mut part.dk[at_keys.clone()], &mut part.dv[at_keys]);
            let tiles = problem
                .queries_that_see(item.at, col..col + cols, tile_q)
                .into_iter()
                .flat_map(|run| run.clone().step_by(tile_q).map(move |row| (row, tile_q.min(run.end - row))));
            for (row, rows) in tiles {
                let tile = Tile { row, rows, col, cols };
                let (p, ds) = (&mut p[..rows * cols], &mut ds[..rows * cols]);
                let at_queries = row * d..(row + rows) * d;
                numerics.logits(&queries, &keys, tile, p);
                let count = derivatives.len().min(rows * cols);
                let derivatives = &mut derivatives[..count];
                problem.score_mod.apply(at.head, segment, tile, p, derivatives);
                mask(segment, tile, p);
                probabilities(cols, cut(lse2, 0, row, rows, 1), p);
                numerics.add_dv(p, &grads, tile, dv);
                numerics.dp(&grads, &keys, tile, ds);
                softmax_backward(cols, p, cut(&delta, 0, row, rows, 1), ds);
                chain(derivatives, ds);
                numerics.add_dq(ds, &keys, tile, &mut dq[at_queries]);
                numerics.add_dk(ds, &queries, tile, dk);
            }
        }
        part.dq.push(dq);
    }
    part
}

/// The dot product of each row of `out` with the same row of `dout`: delta.
#[multiversion(targets = "simd")]
pub(super) fn row_dots(out: &[f32], dout: &[f32], d: usize) -> Vec<f32> {
    let mut delta = vec![0.0; out.len() / d];
    for ((delta, out), dout) in delta.iter_mut().zip(out.chunks_exact(d)).zip(dout.chunks_exact(d)) {
        *delta = lanes::dot(out, dout);
    }
    delta
}

/// Turns base-2 logits T into probabilities, `P = 2^(T - LSE)`, in place.
#[multiversion(targets = "simd")]
fn probabilities(cols: usize, lse2: &[f32], t: &mut [f32]) {
    for (row, &lse2) in t.chunks_exact_mut(cols).zip(lse2) {
        // A query that sees no key has an LSE of minus infinity, and all its logits are masked.
        let lse2 = if lse2 == f32::NEG_INFINITY { 0.0 } else { lse2 };
        for x in row {
            *x = lanes::exp2(*x - lse2);
        }
    }
}

/// Replaces dP by `dS = P o (dP - delta)`.
#[multiversion(targets = "simd")]
fn softmax_backward(cols: usize, p: &[f32], delta: &[f32], dp: &mut [f32]) {
    for ((dp, p), &delta) in dp.chunks_exact_mut(cols).zip(p.chunks_exact(cols)).zip(delta) {
        for (dp, p) in dp.iter_mut().zip(p) {
            *dp = p * (*dp - delta);
        }
    }
}
