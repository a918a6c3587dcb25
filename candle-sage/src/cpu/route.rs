//! The computations of SLA2's router on the CPU.

use rayon::prelude::*;

use super::lanes;
use super::numerics::{Head, Problem};
use super::product::{Mat, product};
use super::view::View;
use crate::selection::Blocks;
use crate::shape::{AttentionShape, Segment};

/// For each key head and each block, the mean row over the block's tokens and over the `heads` heads of `view` that
/// share the key head. Dimensions of the result: (key heads, blocks of all segments, head_dim).
pub(crate) fn pool(
    view: &View<'_>,
    key_heads: usize,
    heads: usize,
    blocks: &[(Segment, std::ops::Range<usize>)],
) -> Vec<f32> {
    let d = view.head_dim();
    let rows: Vec<Vec<f32>> = (0..key_heads * blocks.len())
        .into_par_iter()
        .map(|n| {
            let (key_head, (segment, tokens)) = (n / blocks.len(), &blocks[n % blocks.len()]);
            let mut sum = vec![0.0; d];
            for head in key_head * heads..(key_head + 1) * heads {
                for row in view.rows(segment.batch, tokens.clone(), head).chunks_exact(d) {
                    sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
                }
            }
            let inverse = 1.0 / (heads * tokens.len()) as f32;
            sum.iter_mut().for_each(|x| *x *= inverse);
            sum
        })
        .collect();
    rows.concat()
}

/// The indices of the `most` largest scores, in ascending order of index. NaN counts as largest; ties go to the first
/// scores.
pub(crate) fn largest(scores: &[f32], most: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..scores.len() as u32).collect();
    let key = |&at: &u32| {
        let score = scores[at as usize];
        if score.is_nan() { f32::INFINITY } else { score }
    };
    order.sort_by(|a, b| key(b).total_cmp(&key(a)));
    order.truncate(most);
    order.sort_unstable();
    order
}

/// The attention mass that each block of queries gives to each block of keys that it may select: probabilities, summed
/// over queries, keys, and the query heads that share a key head. The result is (key heads, blocks of queries,
/// columns). A column is a block of keys: of the queries' sequence, or of any document if documents are packed.
pub(crate) fn block_mass(
    shape: &AttentionShape,
    problem: &Problem<'_>,
    blocks: &Blocks,
    columns: usize,
) -> Vec<f32> {
    let rows: Vec<(usize, usize, usize)> = (0..blocks.key_heads)
        .flat_map(|head| blocks.each().map(move |(segment, block)| (head, segment, block)))
        .collect();
    let d = shape.head_dim();
    let masses: Vec<Vec<f32>> = rows
        .par_iter()
        .map(|&(key_head, segment, block)| {
            let mut mass = vec![0.0; columns];
            let candidates = blocks.candidates(segment, block);
            if candidates == 0 {
                return mass;
            }
            let bounds = &problem.segments[segment];
            let queries = block * blocks.query..((block + 1) * blocks.query).min(bounds.query.len());
            let visible = bounds.visible_keys(queries.end - 1);
            let k = problem.k_rows(Head { segment, head: key_head }, 0..visible);
            let k = Mat::new(&k, visible, d);
            let mut logits = vec![0.0; queries.len() * visible];
            let first_column = blocks.first_column(segment);
            for head in key_head * shape.group()..(key_head + 1) * shape.group() {
                let q = problem.q_rows(Head { segment, head }, queries.clone());
                product(&mut logits, Mat::new(&q, queries.len(), d), k.t(), problem.softmax_scale, false);
                for (query, logits) in queries.clone().zip(logits.chunks_exact_mut(visible)) {
                    let logits = &mut logits[..bounds.visible_keys(query)];
                    let max = lanes::max(logits);
                    for x in logits.iter_mut() {
                        *x = lanes::exp2((*x - max) * std::f32::consts::LOG2_E);
                    }
                    let inverse = 1.0 / lanes::sum(logits);
                    for key_block in 0..candidates {
                        let keys = blocks.keys(segment, key_block);
                        mass[first_column + key_block] += inverse * lanes::sum(&logits[keys]);
                    }
                }
            }
            mass
        })
        .collect();
    masses.concat()
}
