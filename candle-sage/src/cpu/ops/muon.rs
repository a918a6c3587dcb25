//! Muon's passes over matrices of f32.

use rayon::prelude::*;

use crate::update::{DIRECTION_UNIT, MomentumPass, Muon, clipped};

/// Elements of one parallel task.
const SPAN: usize = 32 * 1024;

/// Updates `momentum`, and sets `direction` to the update's direction times [`DIRECTION_UNIT`]. Changes neither if
/// `sum_of_squares`, of the whole gradient, is not finite.
pub(crate) fn direction(
    settings: &Muon,
    sum_of_squares: f64,
    momentum: &mut [f32],
    gradient: &[f32],
    direction: &mut [f32],
) {
    let MomentumPass { beta, nesterov, gradient_factor, clip } = settings.momentum_pass();
    let Some(factor) = clipped(gradient_factor, clip, sum_of_squares) else { return };
    let spans = momentum.par_chunks_mut(SPAN).zip(gradient.par_chunks(SPAN));
    spans.zip(direction.par_chunks_mut(SPAN)).for_each(|((m, g), d)| {
        for ((m, g), d) in m.iter_mut().zip(g).zip(d) {
            let g = (1.0 - beta) * (factor * g);
            *m = beta * *m + g;
            *d = DIRECTION_UNIT * if nesterov { beta * *m + g } else { *m };
        }
    });
}

/// Lower limit of a row's mean square, so that the row is not divided by zero.
const SMALLEST: f64 = 1e-20;

/// With a `beta`, updates the running mean squares of a matrix's rows. Returns a factor for each row: the inverse root
/// of its running mean square, times a constant. Multiplying the rows by their factors does not change the matrix's sum
/// of squares.
pub(crate) fn row_factors(mean_squares: &mut [f32], matrix: &[f32], beta: Option<f64>) -> Vec<f32> {
    let columns = matrix.len() / mean_squares.len();
    let square = |row: &[f32]| row.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>() / columns as f64;
    let of_rows: Vec<f64> = matrix.par_chunks(columns).map(square).collect();
    if let Some(beta) = beta {
        let mean = |mean: f32, now: f64| (beta * f64::from(mean) + (1.0 - beta) * now) as f32;
        mean_squares.iter_mut().zip(&of_rows).for_each(|(all, &now)| *all = mean(*all, now));
    }
    let divisor = |mean: f32| f64::from(mean).max(SMALLEST);
    let divided: f64 = of_rows.iter().zip(&*mean_squares).map(|(now, &mean)| now / divisor(mean)).sum();
    let size = if divided > 0.0 { of_rows.iter().sum::<f64>() / divided } else { 0.0 };
    mean_squares.iter().map(|&mean| (size / divisor(mean)).sqrt() as f32).collect()
}

pub(crate) fn scale_rows(rows: &mut [f32], factors: &[f32]) {
    rows.par_chunks_mut(rows.len() / factors.len())
        .zip(factors)
        .for_each(|(row, factor)| row.iter_mut().for_each(|x| *x *= factor));
}

/// `w = keep w - rate direction`.
pub(crate) fn apply(weights: &mut [f32], direction: &[f32], [keep, rate]: [f32; 2]) {
    weights.par_chunks_mut(SPAN).zip(direction.par_chunks(SPAN)).for_each(|(w, d)| {
        w.iter_mut().zip(d).for_each(|(w, d)| *w = keep * *w - rate * d);
    });
}

/// Divides matrices (size, size) by their traces, and returns the inverse square roots of the traces. If a trace is 0
/// or not finite, its matrix becomes zero and its inverse root is 0.
pub(crate) fn unit_traces(matrices: &mut [f32], size: usize) -> Vec<f32> {
    let of = |matrix: &mut [f32]| {
        let trace: f64 = matrix.iter().step_by(size + 1).map(|&x| f64::from(x)).sum();
        let inverse = if trace > 0.0 && trace.is_finite() { (1.0 / trace.sqrt()) as f32 } else { 0.0 };
        // Two multiplications, because `inverse * inverse` may overflow even if the result does not.
        matrix.iter_mut().for_each(|x| *x = if inverse == 0.0 { 0.0 } else { *x * inverse * inverse });
        inverse
    };
    matrices.par_chunks_mut(size * size).map(of).collect()
}

/// `y = f (a I + b x + c y)` for matrices (size, size), with one factor `f` per matrix.
pub(crate) fn combine(y: &mut [f32], x: &[f32], size: usize, [a, b, c]: [f32; 3], factors: &[f32]) {
    let square = size * size;
    y.par_chunks_mut(square).zip(x.par_chunks(square)).zip(factors).for_each(|((y, x), f)| {
        y.iter_mut().zip(x).for_each(|(y, x)| *y = f * (b * x + c * *y));
        y.iter_mut().step_by(size + 1).for_each(|y| *y += f * a);
    });
}
