//! Decides whether a run whose numbers are all finite has diverged. Training and reports use the same definition, which
//! `docs/runs.md` describes.

use crate::metrics::Point;
use crate::runs::median;

/// Number of steps in a block. Each block is represented by the median of its training losses, so that single spikes
/// have no effect.
const WINDOW: usize = 16;

/// A run has diverged if its training loss ends more than this many nats above its lowest training loss. The noise of
/// the loss is below 1 nat.
const RISE: f64 = 1.0;

/// A run has diverged if its last validation loss is more than this many nats above both its first training loss and
/// ln(vocabulary), the loss of the uniform distribution. A new model's loss is a few hundredths of a nat above
/// ln(vocabulary).
const ABOVE_CHANCE: f64 = 0.1;

/// The reason why a complete run has diverged; `None` if it has not. A run has diverged if, at the end,
///
/// - the validation loss is more than 0.1 nats above both ln(vocabulary) and the loss of the first step;
/// - or the median training loss of the last 16 steps is more than 1 nat above the lower of two values: the loss of the
///   first step, and the lowest median of an earlier block of 16 steps.
pub fn divergence(points: &[Point], vocab: usize) -> Option<String> {
    let (first, last) = (points.first()?, points.last()?);
    let chance = (vocab as f64).ln();
    let limit = chance.max(first.loss) + ABOVE_CHANCE;
    if let Some(loss) = last.val_loss.filter(|loss| *loss > limit) {
        return Some(format!(
            "the validation loss is {loss:.3} after step {}, above ln(vocabulary) = {chance:.3}, the loss of the uniform distribution",
            last.step
        ));
    }
    let loss = |points: &[Point]| median(points.iter().map(|point| point.loss)).unwrap_or(f64::INFINITY);
    let (before, end) = points.split_at(points.len().saturating_sub(WINDOW));
    let lowest = before.chunks_exact(WINDOW).map(loss).fold(first.loss, f64::min);
    (loss(end) > lowest + RISE).then(|| {
        format!(
            "the training loss ends at {:.3}, more than {RISE} nat above the lowest, {lowest:.3}",
            loss(end)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Points with these training losses; the last point has a validation loss.
    fn points(losses: impl Iterator<Item = f64>, val_loss: f64) -> Vec<Point> {
        let point = |(n, loss)| Point { step: n as u64 + 1, loss, ..Point::default() };
        let mut points: Vec<Point> = losses.enumerate().map(point).collect();
        points.last_mut().expect("a step").val_loss = Some(val_loss);
        points
    }

    #[test]
    fn divergence_differs_from_noise_spikes_and_overfitting() {
        let falling = |n: usize| 5.7 - 3.0 * n as f64 / 200.0;
        let of = |losses: &dyn Fn(usize) -> f64, val_loss: f64| {
            divergence(&points((0..200).map(losses), val_loss), 300)
        };
        assert_eq!(of(&falling, 2.8), None);
        // A validation loss that rises while the training loss falls is overfitting.
        assert_eq!(of(&falling, 5.0), None);
        // A spike of a few steps is not a divergence, even at the end.
        assert_eq!(of(&|n| falling(n) + if n % 50 > 46 { 9.0 } else { 0.0 }, 2.9), None);
        // ln(300) is 5.70.
        assert!(of(&falling, 5.9).expect("above").contains("ln(vocabulary) = 5.704"));
        assert!(of(&|_| 92.0, 92.0).is_none(), "it began there");
        assert!(of(&|n| 5.7 + n as f64, 205.0).is_some());
        // The loss fell and then rose again, without reaching ln(vocabulary).
        let lost = of(&|n| if n < 150 { falling(n) } else { 5.0 }, 5.0).expect("lost");
        assert!(lost.contains("ends at 5.000"), "{lost}");
        // After one step, a loss slightly above ln(300) is not a divergence.
        assert_eq!(divergence(&points([5.72].into_iter(), 5.73), 300), None);
        assert_eq!(divergence(&[], 300), None);
    }
}
