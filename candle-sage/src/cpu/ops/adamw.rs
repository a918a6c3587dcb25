//! AdamW on slices of f32.

use rayon::prelude::*;

use crate::update::{AdamW, Factors, clipped};

/// Number of elements per parallel task. In [`squares`] each task computes one partial sum, so that the order of
/// additions does not depend on the number of threads.
const SPAN: usize = 32 * 1024;

/// One step. `state` contains the weights, then both moments. Nothing changes if the norm of the gradient is not
/// finite.
pub(crate) fn step(settings: &AdamW, sum_of_squares: f64, state: &mut [f32], gradient: &[f32]) {
    // `settings.factors()` uses the other settings.
    let AdamW { beta1, beta2, eps, decayed, gradient_factor, clip, lr: _, weight_decay: _, step: _ } =
        *settings;
    let Some(factor) = clipped(gradient_factor, clip, sum_of_squares) else { return };
    let (beta1, beta2, eps) = (beta1 as f32, beta2 as f32, eps as f32);
    let Factors { rate, root, keep } = settings.factors();
    let (weights, moments) = state.split_at_mut(gradient.len());
    let (mean, square) = moments.split_at_mut(gradient.len());
    let spans = weights.par_chunks_mut(SPAN).zip(mean.par_chunks_mut(SPAN).zip(square.par_chunks_mut(SPAN)));
    spans.zip(gradient.par_chunks(SPAN)).enumerate().for_each(|(n, ((w, (m, v)), g))| {
        for (i, (((w, m), v), g)) in w.iter_mut().zip(m).zip(v).zip(g).enumerate() {
            let g = g * factor;
            *m = beta1 * *m + (1.0 - beta1) * g;
            *v = beta2 * *v + (1.0 - beta2) * (g * g);
            let keep = if n * SPAN + i < decayed { keep } else { 1.0 };
            *w = keep * *w - rate * *m / ((root * *v).sqrt() + eps);
        }
    });
}

pub(crate) fn squares(values: &[f32]) -> f64 {
    let of_span = |span: &[f32]| {
        // Independent partial sums, so that an addition does not wait for the previous addition.
        let mut lanes = [0f64; 8];
        for chunk in span.chunks(8) {
            for (lane, &x) in lanes.iter_mut().zip(chunk) {
                *lane += f64::from(x) * f64::from(x);
            }
        }
        lanes.iter().sum::<f64>()
    };
    let parts: Vec<f64> = values.par_chunks(SPAN).map(of_span).collect();
    parts.iter().sum()
}
