//! Cross-entropy on slices of f32: from rows of logits, and from logits that are computed and used chunk by chunk.

use multiversion::multiversion;
use rayon::prelude::*;

use crate::cpu::lanes;
use crate::cpu::product::{Mat, product_parallel};

/// The natural log-sum-exp of a row.
#[multiversion(targets = "simd")]
pub(crate) fn log_sum_exp(row: &[f32]) -> f32 {
    let max = lanes::max(row);
    let mut sum = 0.0;
    for chunk in row.chunks(256) {
        let mut terms = [0.0; 256];
        for (term, x) in terms.iter_mut().zip(chunk) {
            *term = lanes::exp2((x - max) * std::f32::consts::LOG2_E);
        }
        sum += lanes::sum(&terms[..chunk.len()]);
    }
    max + sum.ln()
}

/// Turns a row of logits into `factor * ((1 + 2 z_loss lse) softmax(row) - onehot(target))`.
#[multiversion(targets = "simd")]
pub(crate) fn to_gradient(row: &mut [f32], lse: f32, target: usize, factor: f32, z_loss: f32) {
    let raised = factor * (1.0 + 2.0 * z_loss * lse);
    for x in row.iter_mut() {
        *x = raised * lanes::exp2((*x - lse) * std::f32::consts::LOG2_E);
    }
    row[target] -= factor;
}

/// The loss of a row, from its log-sum-exp and the logit of its target.
pub(crate) fn row_loss(lse: f32, picked: f32, z_loss: f32) -> f32 {
    lse - picked + z_loss * lse * lse
}

/// The sum of the losses, in f64, divided by the number of targets that are not ignored.
pub(crate) fn mean_loss(losses: impl Iterator<Item = f32>, counted: usize) -> f32 {
    (losses.map(f64::from).sum::<f64>() / counted as f64) as f32
}

/// A cross-entropy from hidden states and the output matrix, in chunks of rows of the hidden states.
pub(crate) struct Linear<'a> {
    /// The class of each row, `None` if the target is ignored.
    pub(crate) targets: &'a [Option<usize>],
    /// Number of targets that are not ignored.
    pub(crate) counted: usize,
    /// Number of rows of logits that are computed at a time.
    pub(crate) chunk_rows: usize,
    /// See [`row_loss`].
    pub(crate) z_loss: f32,
    /// Rounds each element of the logits' gradient.
    pub(crate) rounded: Option<&'a (dyn Fn(f32) -> f32 + Sync)>,
}

/// One pass over the chunks of logits. The pass returns the mean loss. It writes the hidden states' gradient to
/// `dhidden` and adds the weight's gradient to `dweight`, both multiplied by `factor`. A gradient whose slice is empty
/// is not computed.
pub(crate) fn linear_pass(
    hidden: &[f32],
    weight: Mat<'_>,
    [outputs, width]: [usize; 2],
    settings: &Linear<'_>,
    factor: f32,
    [dhidden, dweight]: [&mut [f32]; 2],
) -> f32 {
    let Linear { targets, counted, chunk_rows, z_loss, rounded } = *settings;
    let rows = targets.len();
    let chunk = chunk_rows.min(rows);
    let mut logits = vec![0.0; chunk * outputs];
    let mut losses = vec![0.0; rows];
    let wanted = !dhidden.is_empty() || !dweight.is_empty();
    let factor = factor / counted as f32;
    for start in (0..rows).step_by(chunk) {
        let end = (start + chunk).min(rows);
        let inputs = Mat::new(&hidden[start * width..end * width], end - start, width);
        let logits = &mut logits[..(end - start) * outputs];
        product_parallel(logits, inputs, weight.t(), 1.0, false);
        let rows = logits.par_chunks_mut(outputs).zip(&mut losses[start..end]).zip(&targets[start..end]);
        rows.for_each(|((row, loss), target)| {
            let Some(target) = *target else {
                row.fill(0.0);
                return;
            };
            let lse = log_sum_exp(row);
            *loss = row_loss(lse, row[target], z_loss);
            if wanted {
                to_gradient(row, lse, target, factor, z_loss);
                if let Some(rounded) = rounded {
                    row.iter_mut().for_each(|x| *x = rounded(*x));
                }
            }
        });
        let dlogits = Mat::new(logits, end - start, outputs);
        if !dhidden.is_empty() {
            product_parallel(&mut dhidden[start * width..end * width], dlogits, weight, 1.0, false);
        }
        if !dweight.is_empty() {
            product_parallel(dweight, dlogits.t(), inputs, 1.0, true);
        }
    }
    mean_loss(losses.into_iter(), counted)
}
