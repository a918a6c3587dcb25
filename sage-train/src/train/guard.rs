//! Detection of spikes: compares a step's loss and gradient norm with recent steps.

use crate::metrics::Point;

/// Largest number of recent steps that a step is compared with.
const WINDOW: usize = 128;

/// Smallest number of recent steps that a step is compared with. With fewer, no step counts as a spike.
const FEWEST: usize = 16;

/// Mean and standard deviation of the losses and of the gradient norms of recent steps, without skipped
/// steps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Recent {
    loss: (f64, f64),
    grad_norm: (f64, f64),
}

/// The limits above which a step counts as a spike.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Limit for the step's mean loss.
    pub loss: f64,
    /// Limit for the norm of the step's gradient.
    pub grad_norm: f64,
}

impl Recent {
    /// The statistics that are known when step `step` (from 0) is launched. They exclude the previous step:
    /// on a GPU its results arrive after the launch. CPU runs and resumed runs exclude it for consistency.
    pub fn before(step: u64, points: &[Point]) -> Option<Self> {
        let known = &points[..points.len().min((step as usize).saturating_sub(1))];
        let counted: Vec<&Point> = known.iter().rev().filter(|point| !point.skipped).take(WINDOW).collect();
        if counted.len() < FEWEST {
            return None;
        }
        let spread = |number: fn(&Point) -> f64| {
            let n = counted.len() as f64;
            let mean = counted.iter().map(|point| number(point)).sum::<f64>() / n;
            let variance =
                counted.iter().map(|point| (number(point) - mean).powi(2)).sum::<f64>() / (n - 1.0);
            // The floor of 1e-3 of the mean keeps small deviations of nearly constant values from counting as spikes.
            (mean, variance.sqrt().max(1e-3 * mean.abs()))
        };
        Some(Self { loss: spread(|point| point.loss), grad_norm: spread(|point| point.grad_norm) })
    }

    /// How many standard deviations the loss and the norm are above their means.
    pub fn scores(&self, loss: f64, grad_norm: f64) -> (f64, f64) {
        let score = |x: f64, (mean, deviation): (f64, f64)| (x - mean) / deviation;
        (score(loss, self.loss), score(grad_norm, self.grad_norm))
    }

    /// The values `z` standard deviations above the mean.
    pub fn limits(&self, z: f64) -> Limits {
        let limit = |(mean, deviation): (f64, f64)| mean + z * deviation;
        Limits { loss: limit(self.loss), grad_norm: limit(self.grad_norm) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(n: usize) -> Vec<Point> {
        let point = |i: usize| Point {
            loss: 5.0 + 0.1 * (i % 2) as f64,
            grad_norm: 1.0,
            skipped: i % 7 == 3,
            ..Point::default()
        };
        (0..n).map(point).collect()
    }

    #[test]
    fn the_step_before_and_those_that_were_skipped_do_not_count() {
        let mut points = points(60);
        let recent = Recent::before(60, &points).expect("enough");
        points[59].loss = 100.0;
        points[3].loss = 100.0;
        assert_eq!(Recent::before(60, &points), Some(recent));
        assert_eq!(Recent::before(60, &points[..59]), Some(recent));
        assert!(Recent::before(15, &points).is_none());
        let (loss, norm) = recent.scores(5.05, 1.1);
        assert!(loss.abs() < 0.2 && (norm - 100.0).abs() < 1e-6, "{loss} {norm}");
        let limits = recent.limits(10.0);
        let (loss, norm) = recent.scores(limits.loss, limits.grad_norm);
        assert!((loss - 10.0).abs() < 1e-9 && (norm - 10.0).abs() < 1e-9);
    }
}
