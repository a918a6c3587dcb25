//! SLA2 on the CPU: the weighted sum of sparse attention's output and the tail's output.

use super::lanes;
use crate::shape::AttentionShape;

/// The weight `a` in [`forward`] for a row whose sparse attention covers `exact` keys. Another `left` keys are covered
/// only by the tail.
fn share(theta: f32, (exact, left): (u32, u32), by_count: bool) -> f32 {
    if left == 0 {
        return 1.0;
    }
    let log_odds = if by_count { (exact as f32 / left as f32).ln() } else { 0.0 };
    1.0 / (1.0 + (-(theta + log_odds)).exp())
}

/// Calls `f(row, head, a)` for each (batch, token, query head). `row` is its index in row-major order, and `a` is the
/// result of [`share`]. `token_counts` contains `(exact, left)` for each (key head, batch, token).
fn each_row(
    shape: &AttentionShape,
    token_counts: &[(u32, u32)],
    by_count: bool,
    theta: &[f32],
    mut f: impl FnMut(usize, usize, f32),
) {
    let tokens = shape.batch() * shape.query_len();
    for token in 0..tokens {
        for (head, &theta) in theta.iter().enumerate() {
            let counts = token_counts[head / shape.group() * tokens + token];
            f(token * shape.query_heads() + head, head, share(theta, counts, by_count));
        }
    }
}

/// `a * sparse + (1 - a) * tail`.
pub(crate) fn forward(
    shape: &AttentionShape,
    token_counts: &[(u32, u32)],
    by_count: bool,
    [sparse, tail, theta]: [&[f32]; 3],
) -> Vec<f32> {
    let d = shape.head_dim();
    let mut out = sparse.to_vec();
    each_row(shape, token_counts, by_count, theta, |row, _, a| {
        if a < 1.0 {
            let at = row * d..(row + 1) * d;
            for (out, tail) in out[at.clone()].iter_mut().zip(&tail[at]) {
                *out = a * *out + (1.0 - a) * tail;
            }
        }
    });
    out
}

/// The gradients of `sparse`, `tail` and `theta`.
pub(crate) fn backward(
    shape: &AttentionShape,
    token_counts: &[(u32, u32)],
    by_count: bool,
    [sparse, tail, theta]: [&[f32]; 3],
    dout: &[f32],
) -> [Vec<f32>; 3] {
    let d = shape.head_dim();
    let (mut dsparse, mut dtail) = (dout.to_vec(), vec![0.0; dout.len()]);
    let mut dtheta = vec![0f64; theta.len()];
    each_row(shape, token_counts, by_count, theta, |row, head, a| {
        if a < 1.0 {
            let at = row * d..(row + 1) * d;
            let dout = &dout[at.clone()];
            let difference = lanes::dot(dout, &sparse[at.clone()]) - lanes::dot(dout, &tail[at.clone()]);
            dtheta[head] += f64::from(a * (1.0 - a) * difference);
            for ((dsparse, dtail), g) in dsparse[at.clone()].iter_mut().zip(&mut dtail[at]).zip(dout) {
                *dsparse = a * g;
                *dtail = (1.0 - a) * g;
            }
        }
    });
    [dsparse, dtail, dtheta.into_iter().map(|x| x as f32).collect()]
}
