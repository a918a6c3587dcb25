//! Linear attention over blocks of keys. The results equal those of attention with weights `phi(q) . phi(k)`, where
//! `phi` is the softmax over the channels, but the time is linear in the sequence length.

use rayon::prelude::*;

use super::numerics::{Head, Problem};
use super::product::{Mat, product};
use super::view::View;
use super::{Gradients, lanes};
use crate::selection::{Blocks, Lists};

/// Sums over the keys of one block, or of all blocks that a block of queries reads: `h = sum phi(k)^T v`,
/// (head_dim, head_dim), and `z = sum phi(k)`.
#[derive(Clone)]
struct State {
    h: Vec<f32>,
    z: Vec<f32>,
}

impl State {
    fn zeros(d: usize) -> Self {
        Self { h: vec![0.0; d * d], z: vec![0.0; d] }
    }

    fn add(&mut self, other: &Self) {
        let pairs = self.h.iter_mut().zip(&other.h).chain(self.z.iter_mut().zip(&other.z));
        pairs.for_each(|(x, y)| *x += y);
    }

    /// Adds `phi^T x` to `h` and `phi^T w` to `z`: `phi` and `x` have rows of the same width, `w` has one
    /// value per row.
    fn add_rows(&mut self, phi: &[f32], x: &[f32], w: &[f32]) {
        let d = self.z.len();
        let phi = Mat::new(phi, w.len(), d);
        product(&mut self.h, phi.t(), Mat::new(x, w.len(), d), 1.0, true);
        product(&mut self.z, phi.t(), Mat::new(w, w.len(), 1), 1.0, true);
    }
}

/// The inverse of a query's normalizer; 0 if the normalizer is too small to invert, so that a query with zero weight on
/// every key has zero output and gradients. NaN stays NaN.
fn inverse_norm(norm: f32) -> f32 {
    if norm < f32::MIN_POSITIVE { 0.0 } else { 1.0 / norm }
}

/// `phi`: the softmax over the channels, in place.
fn features(rows: &mut [f32], d: usize) {
    for row in rows.chunks_exact_mut(d) {
        let max = lanes::max(row);
        row.iter_mut().for_each(|x| *x = lanes::exp2((*x - max) * std::f32::consts::LOG2_E));
        let inverse = 1.0 / lanes::sum(row);
        row.iter_mut().for_each(|x| *x *= inverse);
    }
}

/// The backward of [`features`]: replaces the gradient of `phi` by the gradient of the softmax's input.
fn features_backward(phi: &[f32], dphi: &mut [f32], d: usize) {
    for (phi, dphi) in phi.chunks_exact(d).zip(dphi.chunks_exact_mut(d)) {
        let mean = lanes::dot(phi, dphi);
        dphi.iter_mut().zip(phi).for_each(|(dphi, phi)| *dphi = phi * (*dphi - mean));
    }
}

/// One key head of one segment: the features of its keys, its values, and the state that each block of
/// queries reads.
struct Run<'a> {
    problem: &'a Problem<'a>,
    blocks: &'a Blocks,
    /// For each block of queries, the key blocks that its state excludes. `None`: no state excludes a block.
    except: Option<&'a Lists>,
    at: Head,
    d: usize,
    phi_k: Vec<f32>,
    v: Vec<f32>,
    states: Vec<State>,
}

impl<'a> Run<'a> {
    fn new(problem: &'a Problem<'a>, blocks: &'a Blocks, except: Option<&'a Lists>, at: Head) -> Self {
        let d = problem.head_dim();
        let count = problem.segments[at.segment].key.len();
        let mut phi_k = problem.k_rows(at, 0..count);
        if !problem.shape.causal() {
            centre(&mut phi_k, d);
        }
        features(&mut phi_k, d);
        let mut run =
            Self { problem, blocks, except, at, d, phi_k, v: problem.v_rows(at, 0..count), states: vec![] };
        let of_blocks: Vec<State> = (0..blocks.key_blocks(at.segment))
            .map(|block| {
                let mut state = State::zeros(d);
                let keys = blocks.keys(at.segment, block);
                let rows = keys.start * d..keys.end * d;
                state.add_rows(&run.phi_k[rows.clone()], &run.v[rows], &vec![1.0; keys.len()]);
                state
            })
            .collect();
        let mut past = State::zeros(d);
        let mut next = 0;
        for block in 0..blocks.query_blocks(at.segment) {
            let state = if except.is_some() {
                let mut state = State::zeros(d);
                run.sources(block).for_each(|key_block| state.add(&of_blocks[key_block]));
                state
            } else {
                // `past` contains the states of the previous block's candidates (see `Blocks::candidates`). They are
                // also candidates of this block.
                let candidates = blocks.candidates(at.segment, block);
                of_blocks[next..candidates].iter().for_each(|state| past.add(state));
                next = candidates;
                past.clone()
            };
            run.states.push(state);
        }
        run
    }

    /// The blocks of keys that a block of queries sums over.
    fn sources(&self, block: usize) -> impl Iterator<Item = usize> + '_ {
        let seen = self.except.map(|lists| lists.seen(self.at.segment, self.at.head, block));
        (0..self.blocks.candidates(self.at.segment, block)).filter(move |&key_block| {
            seen.is_none_or(|seen| seen.binary_search(&(key_block as u32)).is_err())
        })
    }

    fn queries(&self, block: usize) -> std::ops::Range<usize> {
        let count = self.problem.segments[self.at.segment].query.len();
        block * self.blocks.query..((block + 1) * self.blocks.query).min(count)
    }

    fn query_head(&self, member: usize) -> Head {
        Head { segment: self.at.segment, head: self.at.head * self.problem.shape.group() + member }
    }

    /// For the queries of a block: features, outputs, and reciprocals of the normalizers `phi(q) . z`. `None` if the
    /// block sums over no keys.
    fn block(&self, at: Head, block: usize) -> Option<(Vec<f32>, Vec<f32>, Vec<f32>)> {
        self.sources(block).next()?;
        let State { h, z } = &self.states[block];
        let d = self.d;
        let mut phi = self.problem.q_rows(at, self.queries(block));
        features(&mut phi, d);
        let rows = phi.len() / d;
        let mut out = vec![0.0; rows * d];
        product(&mut out, Mat::new(&phi, rows, d), Mat::new(h, d, d), 1.0, false);
        let inverses: Vec<f32> = phi.chunks_exact(d).map(|phi| inverse_norm(lanes::dot(phi, z))).collect();
        for (row, inverse) in out.chunks_exact_mut(d).zip(&inverses) {
            row.iter_mut().for_each(|x| *x *= inverse);
        }
        Some((phi, out, inverses))
    }

    /// The output of each query head of the group.
    fn forward(&self) -> Vec<Vec<f32>> {
        let count = self.problem.segments[self.at.segment].query.len();
        (0..self.problem.shape.group())
            .map(|member| {
                let mut all = vec![0.0; count * self.d];
                for block in 0..self.states.len() {
                    if let Some((_, out, _)) = self.block(self.query_head(member), block) {
                        all[self.queries(block).start * self.d..][..out.len()].copy_from_slice(&out);
                    }
                }
                all
            })
            .collect()
    }

    /// The gradients of each query head of the group, of the key and of the value.
    fn backward(&self, dout: &View<'_>) -> (Vec<Vec<f32>>, Vec<f32>, Vec<f32>) {
        let d = self.d;
        let count = self.problem.segments[self.at.segment].query.len();
        let mut dq = vec![vec![0.0; count * d]; self.problem.shape.group()];
        // For each block of queries, the gradient of the state that the block reads.
        let mut dstates = vec![State::zeros(d); self.states.len()];
        for (member, dq) in dq.iter_mut().enumerate() {
            let at = self.query_head(member);
            for (block, dstate) in dstates.iter_mut().enumerate() {
                let Some((phi, out, inverses)) = self.block(at, block) else { continue };
                let queries = self.queries(block);
                let mut g = self.problem.query_rows(dout, at, queries.clone());
                let mut w = Vec::with_capacity(inverses.len());
                for ((g, out), inverse) in g.chunks_exact_mut(d).zip(out.chunks_exact(d)).zip(&inverses) {
                    w.push(-inverse * lanes::dot(g, out));
                    g.iter_mut().for_each(|x| *x *= inverse);
                }
                dstate.add_rows(&phi, &g, &w);
                let State { h, z } = &self.states[block];
                let dphi = &mut dq[queries.start * d..queries.end * d];
                product(dphi, Mat::new(&g, w.len(), d), Mat::new(h, d, d).t(), 1.0, false);
                product(dphi, Mat::new(&w, w.len(), 1), Mat::new(z, 1, d), 1.0, true);
                features_backward(&phi, dphi, d);
            }
        }
        let (mut dk, mut dv) = (vec![0.0; self.v.len()], vec![0.0; self.v.len()]);
        let mut future = State::zeros(d);
        let mut next = self.states.len();
        for key_block in (0..self.blocks.key_blocks(self.at.segment)).rev() {
            if self.except.is_some() {
                future = State::zeros(d);
                let readers =
                    (0..self.states.len()).filter(|&block| self.sources(block).any(|b| b == key_block));
                readers.for_each(|block| future.add(&dstates[block]));
            } else {
                while next > 0 && self.blocks.candidates(self.at.segment, next - 1) > key_block {
                    next -= 1;
                    future.add(&dstates[next]);
                }
            }
            let keys = self.blocks.keys(self.at.segment, key_block);
            let at = keys.start * d..keys.end * d;
            let (phi, v) = (&self.phi_k[at.clone()], &self.v[at.clone()]);
            let (g, gz) = (Mat::new(&future.h, d, d), Mat::new(&future.z, 1, d));
            product(&mut dv[at.clone()], Mat::new(phi, keys.len(), d), g, 1.0, false);
            let dphi = &mut dk[at];
            product(dphi, Mat::new(v, keys.len(), d), g.t(), 1.0, false);
            product(dphi, Mat::new(&vec![1.0; keys.len()], keys.len(), 1), gz, 1.0, true);
            features_backward(phi, dphi, d);
        }
        if !self.problem.shape.causal() {
            centre(&mut dk, d);
        }
        (dq, dk, dv)
    }
}

/// Subtracts the rows' mean. Without a causal mask this function is applied to keys and, because it is its own
/// backward, to their gradients.
fn centre(rows: &mut [f32], d: usize) {
    let mut mean = vec![0f64; d];
    for row in rows.chunks_exact(d) {
        mean.iter_mut().zip(row).for_each(|(mean, &x)| *mean += f64::from(x));
    }
    let count = (rows.len() / d).max(1) as f64;
    for row in rows.chunks_exact_mut(d) {
        row.iter_mut().zip(&mean).for_each(|(x, mean)| *x -= (mean / count) as f32);
    }
}

/// Calls `f` on the [`Run`] of each key head of each segment. The calls run in parallel.
fn runs<T: Send>(
    problem: &Problem<'_>,
    blocks: &Blocks,
    except: Option<&Lists>,
    f: impl Fn(&Run<'_>) -> T + Sync,
) -> Vec<(Head, T)> {
    let heads = problem.shape.key_heads();
    (0..problem.segments.len() * heads)
        .into_par_iter()
        .map(|n| {
            let at = Head { segment: n / heads, head: n % heads };
            (at, f(&Run::new(problem, blocks, except, at)))
        })
        .collect()
}

/// Copies `rows` to one head of a (batch, token, heads, head_dim) tensor, starting at token `first`, counted over the
/// whole batch.
fn put(into: &mut [f32], rows: &[f32], first: usize, heads: usize, head: usize, d: usize) {
    for (r, row) in rows.chunks_exact(d).enumerate() {
        into[((first + r) * heads + head) * d..][..d].copy_from_slice(row);
    }
}

fn put_queries(problem: &Problem<'_>, into: &mut [f32], at: Head, rows: &[Vec<f32>]) {
    let (shape, segment) = (problem.shape, &problem.segments[at.segment]);
    let first = segment.batch * shape.query_len() + segment.query.start;
    for (member, rows) in rows.iter().enumerate() {
        let head = at.head * shape.group() + member;
        put(into, rows, first, shape.query_heads(), head, shape.head_dim());
    }
}

/// The output, (batch, query, query heads, head_dim).
pub(crate) fn forward(problem: &Problem<'_>, blocks: &Blocks, except: Option<&Lists>) -> Vec<f32> {
    let shape = problem.shape;
    let mut out = vec![0.0; shape.batch() * shape.query_len() * shape.query_heads() * shape.head_dim()];
    for (at, rows) in runs(problem, blocks, except, |run| run.forward()) {
        put_queries(problem, &mut out, at, &rows);
    }
    out
}

/// The gradients of query, key and value.
pub(crate) fn backward(
    problem: &Problem<'_>,
    blocks: &Blocks,
    except: Option<&Lists>,
    dout: &View<'_>,
) -> Gradients {
    let (shape, d) = (problem.shape, problem.head_dim());
    let mut dq = vec![0.0; shape.batch() * shape.query_len() * shape.query_heads() * d];
    let mut dk = vec![0.0; shape.batch() * shape.key_len() * shape.key_heads() * d];
    let mut dv = dk.clone();
    for (at, (dquery, dkey, dvalue)) in runs(problem, blocks, except, |run| run.backward(dout)) {
        put_queries(problem, &mut dq, at, &dquery);
        let segment = &problem.segments[at.segment];
        let first = segment.batch * shape.key_len() + segment.key.start;
        put(&mut dk, &dkey, first, shape.key_heads(), at.head, d);
        put(&mut dv, &dvalue, first, shape.key_heads(), at.head, d);
    }
    Gradients { dq, dk, dv, dsinks: Vec::new() }
}
