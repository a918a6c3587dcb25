//! Exact attention, forward and backward, in f64 with plain loops: the reference against which all other code is
//! checked.
//!
//! Tensors are contiguous slices in (batch, sequence, heads, head_dim) order. The optimized implementations share only
//! the code of [`AttentionShape`] with this module.

mod linear;

pub use linear::{linear_backward, linear_forward};

use crate::shape::AttentionShape;

/// The result of [`forward`].
#[derive(Debug, Clone)]
pub struct Forward {
    /// `softmax(scale Q K^T) V`, as (batch, query, query heads, head_dim). The row of a query that sees no key is zero.
    pub out: Vec<f64>,
    /// Natural log-sum-exp of each query's scaled logits, as (batch, query heads, query);
    /// minus infinity for a query that sees no key.
    pub lse: Vec<f64>,
}

/// The result of [`backward`]. Each gradient has the dimensions of its input.
#[derive(Debug, Clone)]
pub struct Gradients {
    /// Gradient of the query.
    pub dq: Vec<f64>,
    /// Gradient of the key.
    pub dk: Vec<f64>,
    /// Gradient of the value.
    pub dv: Vec<f64>,
}

/// A (query, key) pair of one query head that the mask allows: the argument of a [`Pattern`].
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

/// Selects, among the pairs that the mask allows, the pairs that are computed.
pub type Pattern<'a> = &'a dyn Fn(Pair) -> bool;

/// Every pair that the mask allows: dense attention.
pub const DENSE: Pattern<'static> = &|_| true;

/// How logits are computed from the dot products of queries and keys: `x = scale q k`. A soft cap changes x to
/// `softcap tanh(x / softcap)`. `ALiBi` then subtracts `slope |position - key|`: `position` is the query's position;
/// the last query has the position of the last key. `Logits::from(scale)` has no soft cap and no `ALiBi`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Logits {
    /// The softmax scale.
    pub scale: f64,
    /// The soft cap, if there is one.
    pub softcap: Option<f64>,
    /// The slope of each query head. Empty: no `ALiBi`.
    pub alibi_slopes: Vec<f64>,
}

impl From<f64> for Logits {
    fn from(scale: f64) -> Self {
        Self { scale, ..Self::default() }
    }
}

impl Logits {
    /// The logit of a dot product, and its derivative with respect to the dot product.
    fn of(&self, dot: f64, head: usize, distance: f64) -> (f64, f64) {
        let x = self.scale * dot;
        let (x, derivative) = self.softcap.map_or((x, self.scale), |cap| {
            let tanh = (x / cap).tanh();
            (cap * tanh, self.scale * (1.0 - tanh * tanh))
        });
        (x - self.alibi_slopes.get(head).map_or(0.0, |slope| slope * distance), derivative)
    }
}

/// One query of one head, with the keys that it sees.
struct Row {
    head: usize,
    /// Offset of the query's vector in the query tensor.
    query: usize,
    /// Index of the query's log-sum-exp.
    lse: usize,
    /// Offsets of the visible keys' vectors in the key tensor.
    keys: Vec<usize>,
    /// The distances of the visible keys from the query's position.
    distances: Vec<f64>,
}

/// Calls `f` for every query of every head.
fn each_row(shape: &AttentionShape, pattern: Pattern<'_>, mut f: impl FnMut(Row)) {
    let (d, hq, hk) = (shape.head_dim(), shape.query_heads(), shape.key_heads());
    for (number, segment) in shape.segments().into_iter().enumerate() {
        let b = segment.batch;
        for head in 0..hq {
            for (i, token) in segment.query.clone().enumerate() {
                let first_key = segment.key.start;
                let position = (i + segment.key.len()) as f64 - segment.query.len() as f64;
                let seen: Vec<usize> = (segment.first_key(i)..segment.visible_keys(i))
                    .filter(|&key| pattern(Pair { segment: number, head, query: i, key }))
                    .collect();
                f(Row {
                    head,
                    query: ((b * shape.query_len() + token) * hq + head) * d,
                    lse: (b * hq + head) * shape.query_len() + token,
                    keys: seen
                        .iter()
                        .map(|j| ((b * shape.key_len() + first_key + j) * hk + head / shape.group()) * d)
                        .collect(),
                    distances: seen.iter().map(|&j| (position - j as f64).abs()).collect(),
                });
            }
        }
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// The probabilities of one row, the derivatives of its logits with respect to the dot products, and its natural
/// log-sum-exp.
fn softmax(row: &Row, d: usize, logits: &Logits, q: &[f64], k: &[f64]) -> (Vec<f64>, Vec<f64>, f64) {
    let query = &q[row.query..row.query + d];
    let of_key = |(&at, &distance): (&usize, &f64)| logits.of(dot(query, &k[at..at + d]), row.head, distance);
    let (logits, derivatives): (Vec<f64>, Vec<f64>) = row.keys.iter().zip(&row.distances).map(of_key).unzip();
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|x| (x - max).exp()).sum();
    let lse = if logits.is_empty() { f64::NEG_INFINITY } else { max + sum.ln() };
    (logits.iter().map(|x| (x - lse).exp()).collect(), derivatives, lse)
}

/// `out = softmax(logits) V`. If `logits` is a number, the logits are this number times `Q K^T`; see [`Logits`].
///
/// ```
/// use candle_sage::{AttentionShape, reference};
///
/// let dims = (1, 2, 1, 8);
/// let shape = AttentionShape::new(dims, dims, dims, true, None)?;
/// // Logits of 0: each output is the mean of the values that the query sees.
/// let (zeros, v) = ([0.0; 16], [[1.0; 8], [3.0; 8]].concat());
/// let got = reference::forward(&shape, 1.0, &zeros, &zeros, &v);
/// assert!((got.out[0] - 1.0).abs() < 1e-12 && (got.out[8] - 2.0).abs() < 1e-12);
/// assert_eq!(got.lse, [0.0, 2f64.ln()]);
/// # Ok::<(), candle_sage::Error>(())
/// ```
///
/// # Panics
/// When the length of a slice does not match `shape`.
pub fn forward(
    shape: &AttentionShape,
    logits: impl Into<Logits>,
    q: &[f64],
    k: &[f64],
    v: &[f64],
) -> Forward {
    sparse_forward(shape, DENSE, logits, [q, k, v])
}

/// [`forward`] over the (query, key) pairs that `pattern` accepts.
///
/// ```
/// use candle_sage::{AttentionShape, reference};
///
/// let dims = (1, 2, 1, 8);
/// let shape = AttentionShape::new(dims, dims, dims, true, None)?;
/// // Each query sees only the key at its own position.
/// let (zeros, v) = ([0.0; 16], [[1.0; 8], [3.0; 8]].concat());
/// let own = |pair: reference::Pair| pair.key == pair.query;
/// assert_eq!(reference::sparse_forward(&shape, &own, 1.0, [&zeros, &zeros, &v]).out, v);
/// # Ok::<(), candle_sage::Error>(())
/// ```
///
/// # Panics
/// When the length of a slice does not match `shape`.
pub fn sparse_forward(
    shape: &AttentionShape,
    pattern: Pattern<'_>,
    logits: impl Into<Logits>,
    [q, k, v]: [&[f64]; 3],
) -> Forward {
    let (d, logits) = (shape.head_dim(), logits.into());
    assert_eq!(q.len(), shape.batch() * shape.query_len() * shape.query_heads() * d, "query length");
    assert_eq!(k.len(), shape.batch() * shape.key_len() * shape.key_heads() * d, "key length");
    assert_eq!(v.len(), k.len(), "value length");
    let mut out = vec![0.0; q.len()];
    let mut lse = vec![f64::NEG_INFINITY; q.len() / d];
    each_row(shape, pattern, |row| {
        let (p, _, row_lse) = softmax(&row, d, &logits, q, k);
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
/// `dV = P^T dO`, `dP = dO V^T`, `dS = P o (dP - rowsum(P o dP))`, `dQ = scale dS K`, `dK = scale dS^T Q`. With a soft
/// cap the elements of dS in the formulas of dQ and dK are multiplied by `1 - tanh(scale q k / softcap)^2`.
///
/// ```
/// use candle_sage::{AttentionShape, reference};
///
/// let dims = (1, 2, 1, 8);
/// let shape = AttentionShape::new(dims, dims, dims, true, None)?;
/// // The first query sees only the first key. The second query sees both keys and gives each the weight 1/2.
/// let (zeros, ones) = ([0.0; 16], [1.0; 16]);
/// let got = reference::backward(&shape, 1.0, &zeros, &zeros, &ones, &ones);
/// assert!((got.dv[0] - 1.5).abs() < 1e-12 && (got.dv[8] - 0.5).abs() < 1e-12);
/// // All values are the same, so the probabilities do not matter.
/// assert!(got.dq.iter().chain(&got.dk).all(|x| x.abs() < 1e-12));
/// # Ok::<(), candle_sage::Error>(())
/// ```
///
/// # Panics
/// When the length of a slice does not match `shape`.
pub fn backward(
    shape: &AttentionShape,
    logits: impl Into<Logits>,
    q: &[f64],
    k: &[f64],
    v: &[f64],
    dout: &[f64],
) -> Gradients {
    sparse_backward(shape, DENSE, logits, [q, k, v], dout)
}

/// [`backward`] over the (query, key) pairs that `pattern` accepts.
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
/// When the length of a slice does not match `shape`.
pub fn sparse_backward(
    shape: &AttentionShape,
    pattern: Pattern<'_>,
    logits: impl Into<Logits>,
    [q, k, v]: [&[f64]; 3],
    dout: &[f64],
) -> Gradients {
    assert_eq!(dout.len(), q.len(), "output gradient length");
    let (d, logits) = (shape.head_dim(), logits.into());
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    each_row(shape, pattern, |row| {
        let (p, derivatives, _) = softmax(&row, d, &logits, q, k);
        let grad = &dout[row.query..row.query + d];
        let dp: Vec<f64> = row.keys.iter().map(|&at| dot(grad, &v[at..at + d])).collect();
        let delta = dot(&p, &dp);
        for (((p, dp), derivative), &at) in p.iter().zip(&dp).zip(&derivatives).zip(&row.keys) {
            let ds = derivative * p * (dp - delta);
            for c in 0..d {
                dv[at + c] += p * grad[c];
                dq[row.query + c] += ds * k[at + c];
                dk[at + c] += ds * q[row.query + c];
            }
        }
    });
    Gradients { dq, dk, dv }
}
