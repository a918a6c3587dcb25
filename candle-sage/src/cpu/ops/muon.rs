//! Muon's passes over matrices of f32.

use rayon::prelude::*;

use crate::cpu::ops::adamw::squares;
use crate::update::{Muon, clipped};

/// Elements of one parallel task.
const SPAN: usize = 32 * 1024;

/// Updates the momentum of a matrix, and returns the direction divided by its Frobenius norm. Nothing changes if the norm of the gradient
/// is not finite.
pub(crate) fn direction(
    settings: &Muon,
    sum_of_squares: f64,
    momentum: &mut [f32],
    gradient: &[f32],
) -> Vec<f32> {
    let mut direction = vec![0.0; momentum.len()];
    let Some(factor) = clipped(settings.gradient_factor, settings.clip, sum_of_squares) else {
        return direction;
    };
    let beta = settings.momentum as f32;
    let spans = momentum.par_chunks_mut(SPAN).zip(gradient.par_chunks(SPAN));
    spans.zip(direction.par_chunks_mut(SPAN)).for_each(|((m, g), d)| {
        for ((m, g), d) in m.iter_mut().zip(g).zip(d) {
            let g = (1.0 - beta) * (factor * g);
            *m = beta * *m + g;
            *d = if settings.nesterov { beta * *m + g } else { *m };
        }
    });
    let norm = squares(&direction).sqrt();
    let inverse = if norm > 0.0 { (1.0 / norm) as f32 } else { 0.0 };
    direction.par_iter_mut().with_min_len(SPAN).for_each(|x| *x *= inverse);
    direction
}

/// `w = keep w - rate direction`.
pub(crate) fn apply(weights: &mut [f32], direction: &[f32], keep: f32, rate: f32) {
    weights.par_chunks_mut(SPAN).zip(direction.par_chunks(SPAN)).for_each(|(w, d)| {
        w.iter_mut().zip(d).for_each(|(w, d)| *w = keep * *w - rate * d);
    });
}
