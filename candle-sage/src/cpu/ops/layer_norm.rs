//! Layer normalization on slices of f32.

use multiversion::multiversion;
use rayon::prelude::*;

use super::rms_norm::{VECTORS, inverse_rms};
use crate::cpu::lanes;

/// Normalizes all vectors of `x`, each as wide as the weight.
pub(crate) fn forward(x: &[f32], weight: &[f32], bias: &[f32], eps: f32) -> Vec<f32> {
    let span = VECTORS * weight.len();
    let mut out = vec![0.0; x.len()];
    let spans = out.par_chunks_mut(span).zip(x.par_chunks(span));
    spans.for_each(|(out, x)| normalize(out, x, weight, bias, eps));
    out
}

/// Gradients of `x`, the weight and the bias.
pub(crate) fn backward(x: &[f32], weight: &[f32], dy: &[f32], eps: f32) -> [Vec<f32>; 3] {
    let span = VECTORS * weight.len();
    let mut dx = vec![0.0; x.len()];
    let partial: Vec<[Vec<f32>; 2]> = dx
        .par_chunks_mut(span)
        .zip(x.par_chunks(span).zip(dy.par_chunks(span)))
        .map(|(dx, (x, dy))| normalize_backward(dx, x, dy, weight, eps))
        .collect();
    let (mut dw, mut db) = (vec![0.0; weight.len()], vec![0.0; weight.len()]);
    for [of_weight, of_bias] in partial {
        dw.iter_mut().zip(of_weight).for_each(|(sum, part)| *sum += part);
        db.iter_mut().zip(of_bias).for_each(|(sum, part)| *sum += part);
    }
    [dx, dw, db]
}

/// Writes `x` minus its mean to `centered`, and returns the inverse root of the mean square of `centered`.
#[inline(always)]
fn center(centered: &mut [f32], x: &[f32], eps: f32) -> f32 {
    let mean = lanes::sum(x) / x.len() as f32;
    centered.iter_mut().zip(x).for_each(|(centered, x)| *centered = x - mean);
    inverse_rms(centered, eps)
}

#[multiversion(targets = "simd")]
fn normalize(out: &mut [f32], x: &[f32], weight: &[f32], bias: &[f32], eps: f32) {
    let width = weight.len();
    for (out, x) in out.chunks_exact_mut(width).zip(x.chunks_exact(width)) {
        let r = center(out, x, eps);
        for ((out, w), b) in out.iter_mut().zip(weight).zip(bias) {
            *out = *out * r * w + b;
        }
    }
}

/// Fills `dx`, and returns the contributions of the vectors of `x` to the gradients of weight and bias.
#[multiversion(targets = "simd")]
fn normalize_backward(dx: &mut [f32], x: &[f32], dy: &[f32], weight: &[f32], eps: f32) -> [Vec<f32>; 2] {
    let width = weight.len();
    let [mut dw, mut db, mut g, mut c] = std::array::from_fn(|_| vec![0.0; width]);
    let rows = x.chunks_exact(width).zip(dy.chunks_exact(width));
    for (dx, (x, dy)) in dx.chunks_exact_mut(width).zip(rows) {
        let r = center(&mut c, x, eps);
        for ((g, dy), w) in g.iter_mut().zip(dy).zip(weight) {
            *g = dy * w;
        }
        let pull = lanes::dot(&g, &c) * r * r / width as f32;
        let shift = lanes::sum(&g) / width as f32;
        for (((dx, dw), (c, dy)), g) in dx.iter_mut().zip(&mut dw).zip(c.iter().zip(dy)).zip(&g) {
            *dx = r * (g - shift - c * pull);
            *dw += dy * c * r;
        }
        db.iter_mut().zip(dy).for_each(|(db, dy)| *db += dy);
    }
    [dw, db]
}
