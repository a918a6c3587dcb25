//! Root-mean-square normalization on slices of f32.

use multiversion::multiversion;
use rayon::prelude::*;

use crate::cpu::lanes;

/// Number of vectors per parallel task. Each task computes one partial sum of the weight's gradient, so that the order
/// of additions does not depend on the number of threads.
pub(super) const VECTORS: usize = 256;

#[inline(always)]
pub(super) fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    let mean = lanes::dot(x, x) / x.len() as f32;
    if mean.is_finite() { 1.0 / (mean + eps).sqrt() } else { inverse_rms_of_large(x, eps) }
}

/// The squares of elements above 1.8e19 overflow, so elements are divided by the largest element first.
#[cold]
fn inverse_rms_of_large(x: &[f32], eps: f32) -> f32 {
    let max = f32::from_bits(lanes::max_abs_bits(x));
    let mean = x.iter().map(|x| (x / max) * (x / max)).sum::<f32>() / x.len() as f32;
    1.0 / max / (mean + eps / max / max).sqrt()
}

/// Normalizes all vectors of `x`, each as wide as the weight.
pub(crate) fn forward(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let span = VECTORS * weight.len();
    let mut out = vec![0.0; x.len()];
    out.par_chunks_mut(span).zip(x.par_chunks(span)).for_each(|(out, x)| normalize(out, x, weight, eps));
    out
}

/// Gradients of `x` and the weight.
pub(crate) fn backward(x: &[f32], weight: &[f32], dy: &[f32], eps: f32) -> (Vec<f32>, Vec<f32>) {
    let span = VECTORS * weight.len();
    let mut dx = vec![0.0; x.len()];
    let partial: Vec<Vec<f32>> = dx
        .par_chunks_mut(span)
        .zip(x.par_chunks(span).zip(dy.par_chunks(span)))
        .map(|(dx, (x, dy))| normalize_backward(dx, x, dy, weight, eps))
        .collect();
    let mut dw = vec![0.0; weight.len()];
    for part in partial {
        dw.iter_mut().zip(part).for_each(|(dw, part)| *dw += part);
    }
    (dx, dw)
}

#[multiversion(targets = "simd")]
fn normalize(out: &mut [f32], x: &[f32], weight: &[f32], eps: f32) {
    let width = weight.len();
    for (out, x) in out.chunks_exact_mut(width).zip(x.chunks_exact(width)) {
        let r = inverse_rms(x, eps);
        for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
            *out = x * r * w;
        }
    }
}

/// Fills `dx`, and returns the contribution of the vectors of `x` to the weight's gradient.
#[multiversion(targets = "simd")]
fn normalize_backward(dx: &mut [f32], x: &[f32], dy: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let width = weight.len();
    let (mut dw, mut g) = (vec![0.0; width], vec![0.0; width]);
    let rows = x.chunks_exact(width).zip(dy.chunks_exact(width));
    for (dx, (x, dy)) in dx.chunks_exact_mut(width).zip(rows) {
        let r = inverse_rms(x, eps);
        for ((g, dy), w) in g.iter_mut().zip(dy).zip(weight) {
            *g = dy * w;
        }
        let pull = lanes::dot(&g, x) * r * r / width as f32;
        for (((dx, dw), (x, dy)), g) in dx.iter_mut().zip(&mut dw).zip(x.iter().zip(dy)).zip(&g) {
            *dx = r * (g - x * pull);
            *dw += dy * x * r;
        }
    }
    dw
}
