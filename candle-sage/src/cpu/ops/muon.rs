//! Muon's passes over matrices of f32.

use rayon::prelude::*;

use crate::update::{DIRECTION_UNIT, Muon, clipped};

/// Elements of one parallel task.
const SPAN: usize = 32 * 1024;

/// Updates the momentum, and writes the direction times [`DIRECTION_UNIT`]. Nothing changes if the norm of the gradient is not finite.
pub(crate) fn direction(
    settings: &Muon,
    sum_of_squares: f64,
    momentum: &mut [f32],
    gradient: &[f32],
    direction: &mut [f32],
) {
    let Some(factor) = clipped(settings.gradient_factor, settings.clip, sum_of_squares) else { return };
    let beta = settings.momentum as f32;
    let spans = momentum.par_chunks_mut(SPAN).zip(gradient.par_chunks(SPAN));
    spans.zip(direction.par_chunks_mut(SPAN)).for_each(|((m, g), d)| {
        for ((m, g), d) in m.iter_mut().zip(g).zip(d) {
            let g = (1.0 - beta) * (factor * g);
            *m = beta * *m + g;
            *d = DIRECTION_UNIT * if settings.nesterov { beta * *m + g } else { *m };
        }
    });
}

/// `w = keep w - rate direction`.
pub(crate) fn apply(weights: &mut [f32], direction: &[f32], [keep, rate]: [f32; 2]) {
    weights.par_chunks_mut(SPAN).zip(direction.par_chunks(SPAN)).for_each(|(w, d)| {
        w.iter_mut().zip(d).for_each(|(w, d)| *w = keep * *w - rate * d);
    });
}

/// Divides matrices (size, size) by their traces, and returns the inverse roots of these; 0, and zeros, for a trace
/// that is 0 or not finite.
pub(crate) fn unit_traces(matrices: &mut [f32], size: usize) -> Vec<f32> {
    let of = |matrix: &mut [f32]| {
        let trace: f64 = matrix.iter().step_by(size + 1).map(|&x| f64::from(x)).sum();
        let inverse = if trace > 0.0 && trace.is_finite() { (1.0 / trace.sqrt()) as f32 } else { 0.0 };
        // One factor after the other, because the square may overflow where the product does not.
        matrix.iter_mut().for_each(|x| *x = if inverse == 0.0 { 0.0 } else { *x * inverse * inverse });
        inverse
    };
    matrices.par_chunks_mut(size * size).map(of).collect()
}

/// `y = f (a I + b x + c y)` for matrices (size, size), with a factor of each.
pub(crate) fn combine(y: &mut [f32], x: &[f32], size: usize, [a, b, c]: [f32; 3], factors: &[f32]) {
    let square = size * size;
    y.par_chunks_mut(square).zip(x.par_chunks(square)).zip(factors).for_each(|((y, x), f)| {
        y.iter_mut().zip(x).for_each(|(y, x)| *y = f * (b * x + c * *y));
        y.iter_mut().step_by(size + 1).for_each(|y| *y += f * a);
    });
}
