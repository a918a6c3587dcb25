//! Rotary position embedding on slices of f32.

use rayon::prelude::*;

/// Rotates `x` of dimensions (batch, sequence, heads, head_dim) by the tables' angles times `direction`. Pairs are
/// channels (2 * i, 2 * i + 1) if `interleaved`, else (i, i + head_dim / 2).
pub(crate) fn rotate(
    interleaved: bool,
    dims: &[usize],
    x: &[f32],
    cos: &[f32],
    sin: &[f32],
    direction: f32,
) -> Vec<f32> {
    let (sequence, heads, d) = (dims[1], dims[2], dims[3]);
    let half = d / 2;
    let mut out = vec![0.0; x.len()];
    let token = (heads * d).max(1);
    out.par_chunks_mut(token).zip(x.par_chunks(token)).enumerate().for_each(|(n, (out, x))| {
        let at = n % sequence * half;
        let (cos, sin) = (&cos[at..at + half], &sin[at..at + half]);
        for (out, x) in out.chunks_exact_mut(d).zip(x.chunks_exact(d)) {
            for i in 0..half {
                let (p, q) = if interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
                let (cos, sin) = (cos[i], sin[i] * direction);
                out[p] = x[p] * cos - x[q] * sin;
                out[q] = x[p] * sin + x[q] * cos;
            }
        }
    });
    out
}
