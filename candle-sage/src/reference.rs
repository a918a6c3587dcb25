//! Exact attention, forward and backward, in f64 with plain loops: the oracle that all other code is checked
//! against.
//!
//! Tensors are contiguous slices in (batch, sequence, heads, head_dim) order. This module shares nothing but
//! the shape with the optimized implementations, so that the two are independent.

mod linear;

pub use linear::{linear_backward, linear_forward};

use crate::shape::AttentionShape;

/// The result of [`forward`].
#[derive(Debug, Clone)]
pub struct Forward {
    /// `softmax(scale Q K^T) V`, as (batch, query, query heads, head_dim). A query that sees no key
    /// gives zeros.
    pub out: Vec<f64>,
    /// Natural log-sum-exp of each query's scaled logits, as (batch, query heads, query);
    /// minus infinity for a query that sees no key.
    pub lse: Vec<f64>,
}

/// The result of [`backward`]: gradients with the dimensions of their tensors.
#[derive(Debug, Clone)]
pub struct Gradients {
    /// Gradient of the query.
    pub dq: Vec<f64>,
    /// Gradient of the key.
    pub dk: Vec<f64>,
    /// Gradient of the value.
    pub dv: Vec<f64>,
}

/// A query of one head and a key that the mask lets it see: the argument of a [`Pattern`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair {
    /// Index of the segment: a batch entry, or a packed document.
    pub segment: usize,
    /// The query head.
    pub head: usize,
    /// Index of the query inside its segment.
    pub query: usize,
    /// Index of the key inside its segment.
    pub key: usize,
}

/// Decides which of the pairs that the mask allows are computed.
pub type Pattern<'a> = &'a dyn Fn(Pair) -> bool;

/// Every pair that the mask allows: dense attention.
pub const DENSE: Pattern<'static> = &|_| true;

/// One query of one head, with the keys that it sees.
struct Row {
    /// Offset of the query's vector in the query tensor.
    query: usize,
    /// Index of the query's log-sum-exp.
    lse: usize,
    /// Offsets of the visible keys' vectors in the key tensor.
    keys: Vec<usize>,
}

/// Calls `f` for every query of every head.
fn each_row(shape: &AttentionShape, pattern: Pattern<'_>, mut f: impl FnMut(Row)) {
    let (d, hq, hk) = (shape.head_dim(), shape.query_heads(), shape.key_heads());
    for (number, segment) in shape.segments().into_iter().enumerate() {
        let b = segment.batch;
        for head in 0..hq {
            for (i, token) in segment.query.clone().enumerate() {
                let first_key = segment.key.start;
                f(Row {
                    query: ((b * shape.query_len() + token) * hq + head) * d,
                    lse: (b * hq + head) * shape.query_len() + token,
                    keys: (segment.first_key(i)..segment.visible_keys(i))
                        .filter(|&key| pattern(Pair { segment: number, head, query: i, key }))
                        .map(|j| ((b * shape.key_len() + first_key + j) * hk + head / shape.group()) * d)
                        .collect(),
                });
            }
        }
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// The probabilities of one row and its natural log-sum-exp.
fn softmax(row: &Row, d: usize, scale: f64, q: &[f64], k: &[f64]) -> (Vec<f64>, f64) {
    let query = &q[row.query..row.query + d];
    let logits: Vec<f64> = row.keys.iter().map(|&at| scale * dot(query, &k[at..at + d])).collect();
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|x| (x - max).exp()).sum();
    let lse = if logits.is_empty() { f64::NEG_INFINITY } else { max + sum.ln() };
    (logits.iter().map(|x| (x - lse).exp()).collect(), lse)
}

/// `out = softmax(softmax_scale Q K^T) V`.
///
/// ```
/// use candle_sage::{AttentionShape, reference};
///
/// let dims = (1, 2, 1, 8);
/// let shape = AttentionShape::new(dims, dims, dims, true, None)?;
/// // Logits of 0: each query takes the mean of the values that the mask leaves.
/// let (zeros, v) = ([0.0; 16], [[1.0; 8], [3.0; 8]].concat());
/// let got = reference::forward(&shape, 1.0, &zeros, &zeros, &v);
/// assert!((got.out[0] - 1.0).abs() < 1e-12 && (got.out[8] - 2.0).abs() < 1e-12);
/// assert_eq!(got.lse, [0.0, 2f64.ln()]);
/// # Ok::<(), candle_sage::Error>(())
/// ```
///
/// # Panics
/// When a slice does not have the shape's length.
pub fn forward(shape: &AttentionShape, softmax_scale: f64, q: &[f64], k: &[f64], v: &[f64]) -> Forward {
    sparse_forward(shape, DENSE, softmax_scale, [q, k, v])
}

/// As [`forward`], over the pairs that `pattern` accepts.
///
/// ```
/// use candle_sage::{AttentionShape, reference};
///
/// let dims = (1, 2, 1, 8);
/// let shape = AttentionShape::new(dims, dims, dims, true, None)?;
/// // Each query sees the key at its own place alone.
/// let (zeros, v) = ([0.0; 16], [[1.0; 8], [3.0; 8]].concat());
/// let own = |pair: reference::Pair| pair.key == pair.query;
/// assert_eq!(reference::sparse_forward(&shape, &own, 1.0, [&zeros, &zeros, &v]).out, v);
/// # Ok::<(), candle_sage::Error>(())
/// ```
///
/// # Panics
/// When a slice does not have the shape's length.
pub fn sparse_forward(
    shape: &AttentionShape,
    pattern: Pattern<'_>,
    softmax_scale: f64,
    [q, k, v]: [&[f64]; 3],
) -> Forward {
    let d = shape.head_dim();
    assert_eq!(q.len(), shape.batch() * shape.query_len() * shape.query_heads() * d, "query length");
    assert_eq!(k.len(), shape.batch() * shape.key_len() * shape.key_heads() * d, "key length");
    assert_eq!(v.len(), k.len(), "value length");
    let mut out = vec![0.0; q.len()];
    let mut lse = vec![f64::NEG_INFINITY; q.len() / d];
    each_row(shape, pattern, |row| {
        let (p, row_lse) = softmax(&row, d, softmax_scale, q, k);
        lse[row.lse] = row_lse;
        for (p, &at) in p.iter().zip(&row.keys) {
            for c in 0..d {
                out[row.query + c] += p * v[at + c];
            }
        }
    });
    Forward { out, lse }
}

/// The gradients of a loss whose gradient with respect to the output is `dout`.
///
/// `dV = P^T dO`, `dP = dO V^T`, `dS = P o (dP - rowsum(P o dP))`, `dQ = scale dS K`, `dK = scale dS^T Q`.
///
/// ```
/// use candle_sage::{AttentionShape, reference};
///
/// let dims = (1, 2, 1, 8);
/// let shape = AttentionShape::new(dims, dims, dims, true, None)?;
/// // The first key is seen by both queries, the second one by the second query, which gives half of its weight to each.
/// let (zeros, ones) = ([0.0; 16], [1.0; 16]);
/// let got = reference::backward(&shape, 1.0, &zeros, &zeros, &ones, &ones);
/// assert!((got.dv[0] - 1.5).abs() < 1e-12 && (got.dv[8] - 0.5).abs() < 1e-12);
/// // All values are the same, so that the probabilities do not matter.
/// assert!(got.dq.iter().chain(&got.dk).all(|x| x.abs() < 1e-12));
/// # Ok::<(), candle_sage::Error>(())
/// ```
///
/// # Panics
/// When a slice does not have the shape's length.
pub fn backward(
    shape: &AttentionShape,
    softmax_scale: f64,
    q: &[f64],
    k: &[f64],
    v: &[f64],
    dout: &[f64],
) -> Gradients {
    sparse_backward(shape, DENSE, softmax_scale, [q, k, v], dout)
}

/// As [`backward`], over the pairs that `pattern` accepts.
///
/// ```
/// use candle_sage::{AttentionShape, reference};
///
/// let dims = (1, 2, 1, 8);
/// let shape = AttentionShape::new(dims, dims, dims, true, None)?;
/// let (zeros, dout) = ([0.0; 16], [[1.0; 8], [3.0; 8]].concat());
/// let own = |pair: reference::Pair| pair.key == pair.query;
/// let got = reference::sparse_backward(&shape, &own, 1.0, [&zeros, &zeros, &zeros], &dout);
/// assert_eq!(got.dv, dout);
/// # Ok::<(), candle_sage::Error>(())
/// ```
///
/// # Panics
/// When a slice does not have the shape's length.
pub fn sparse_backward(
    shape: &AttentionShape,
    pattern: Pattern<'_>,
    softmax_scale: f64,
    [q, k, v]: [&[f64]; 3],
    dout: &[f64],
) -> Gradients {
    assert_eq!(dout.len(), q.len(), "output gradient length");
    let d = shape.head_dim();
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    each_row(shape, pattern, |row| {
        let (p, _) = softmax(&row, d, softmax_scale, q, k);
        let grad = &dout[row.query..row.query + d];
        let dp: Vec<f64> = row.keys.iter().map(|&at| dot(grad, &v[at..at + d])).collect();
        let delta = dot(&p, &dp);
        for ((p, dp), &at) in p.iter().zip(&dp).zip(&row.keys) {
            let ds = softmax_scale * p * (dp - delta);
            for c in 0..d {
                dv[at + c] += p * grad[c];
                dq[row.query + c] += ds * k[at + c];
                dk[at + c] += ds * q[row.query + c];
            }
        }
    });
    Gradients { dq, dk, dv }
}
