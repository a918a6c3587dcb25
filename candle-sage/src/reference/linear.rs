//! Exact linear attention with softmax features, in f64.

use super::{Gradients, Pattern, dot, each_row};
use crate::shape::AttentionShape;

/// `phi`: the softmax over the channels of each row.
fn features(x: &[f64], d: usize) -> Vec<f64> {
    let mut features = x.to_vec();
    for row in features.chunks_exact_mut(d) {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        row.iter_mut().for_each(|x| *x = (*x - max).exp());
        let sum: f64 = row.iter().sum();
        row.iter_mut().for_each(|x| *x /= sum);
    }
    features
}

/// The gradient of the input of [`features`], from its output `phi` and the output's gradient `dphi`.
fn features_backward(phi: &[f64], dphi: &[f64], d: usize) -> Vec<f64> {
    let mut dx = vec![0.0; phi.len()];
    for ((dx, phi), dphi) in dx.chunks_exact_mut(d).zip(phi.chunks_exact(d)).zip(dphi.chunks_exact(d)) {
        let mean = dot(phi, dphi);
        for c in 0..d {
            dx[c] = phi[c] * (dphi[c] - mean);
        }
    }
    dx
}

/// Linear attention over the pairs of a pattern: `out_i = sum_j w_ij v_j / sum_j w_ij` with
/// `w_ij = phi(q_i) . phi(k_j)` and `phi` the softmax over the channels. The row of a query that sees no key is zero.
///
/// ```
/// use candle_sage::{AttentionShape, reference};
///
/// let dims = (1, 2, 1, 8);
/// let shape = AttentionShape::new(dims, dims, dims, true, None)?;
/// // Each query sees the keys before its own position: the first query sees none.
/// let (zeros, v) = ([0.0; 16], [[1.0; 8], [3.0; 8]].concat());
/// let past = |pair: reference::Pair| pair.key < pair.query;
/// let out = reference::linear_forward(&shape, &past, [&zeros, &zeros, &v]);
/// assert_eq!(out, [[0.0; 8], [1.0; 8]].concat());
/// # Ok::<(), candle_sage::Error>(())
/// ```
///
/// # Panics
/// When the length of a slice does not match `shape`.
pub fn linear_forward(shape: &AttentionShape, pattern: Pattern<'_>, [q, k, v]: [&[f64]; 3]) -> Vec<f64> {
    let d = shape.head_dim();
    let (phi_q, phi_k) = (features(q, d), features(k, d));
    let mut out = vec![0.0; q.len()];
    each_row(shape, pattern, |row| {
        let weights: Vec<f64> =
            row.keys.iter().map(|&at| dot(&phi_q[row.query..row.query + d], &phi_k[at..at + d])).collect();
        let sum: f64 = weights.iter().sum();
        for (weight, &at) in weights.iter().zip(&row.keys) {
            for c in 0..d {
                out[row.query + c] += weight / sum * v[at + c];
            }
        }
    });
    out
}

/// The gradients of [`linear_forward`].
///
/// ```
/// use candle_sage::{AttentionShape, reference};
///
/// let dims = (1, 2, 1, 8);
/// let shape = AttentionShape::new(dims, dims, dims, true, None)?;
/// let (zeros, dout) = ([0.0; 16], [[1.0; 8], [3.0; 8]].concat());
/// let past = |pair: reference::Pair| pair.key < pair.query;
/// let got = reference::linear_backward(&shape, &past, [&zeros, &zeros, &zeros], &dout);
/// // Only the second query sees the first key.
/// assert_eq!(got.dv, [[3.0; 8], [0.0; 8]].concat());
/// # Ok::<(), candle_sage::Error>(())
/// ```
///
/// # Panics
/// When the length of a slice does not match `shape`.
pub fn linear_backward(
    shape: &AttentionShape,
    pattern: Pattern<'_>,
    [q, k, v]: [&[f64]; 3],
    dout: &[f64],
) -> Gradients {
    let d = shape.head_dim();
    let (phi_q, phi_k) = (features(q, d), features(k, d));
    let (mut dphi_q, mut dphi_k, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    each_row(shape, pattern, |row| {
        let query = row.query..row.query + d;
        let weights: Vec<f64> =
            row.keys.iter().map(|&at| dot(&phi_q[query.clone()], &phi_k[at..at + d])).collect();
        let sum: f64 = weights.iter().sum();
        let grads: Vec<f64> = row.keys.iter().map(|&at| dot(&dout[query.clone()], &v[at..at + d])).collect();
        let mean: f64 = weights.iter().zip(&grads).map(|(w, g)| w / sum * g).sum();
        for ((weight, grad), &at) in weights.iter().zip(&grads).zip(&row.keys) {
            let dweight = (grad - mean) / sum;
            for c in 0..d {
                dv[at + c] += weight / sum * dout[row.query + c];
                dphi_q[row.query + c] += dweight * phi_k[at + c];
                dphi_k[at + c] += dweight * phi_q[row.query + c];
            }
        }
    });
    Gradients { dq: features_backward(&phi_q, &dphi_q, d), dk: features_backward(&phi_k, &dphi_k, d), dv }
}
