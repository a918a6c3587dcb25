//! Learning-rate schedules.

use candle_sage::Result;

use crate::checks::{above_zero, in_range, need};
use crate::quantity::Quantity;
use crate::settings::{OptimizerSettings, Schedule};

/// A linear warm-up, then a schedule.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LearningRate {
    /// Highest rate, at the end of the warm-up.
    pub peak: f64,
    /// Rate at the last step, unless the schedule is constant.
    pub floor: f64,
    /// Steps of warm-up.
    pub warmup: u64,
    /// Number of steps of the run.
    pub steps: u64,
    /// Schedule after the warm-up.
    pub schedule: Schedule,
    /// Fraction of the run over which [`Schedule::Wsd`] decays.
    pub decay_fraction: f64,
}

impl LearningRate {
    /// The schedule that table `[optimizer]` of the settings describes, for a run of `steps` steps. Without
    /// `asked_warmup`, the warm-up is `s.warmup_steps`, but at most a tenth of the steps.
    ///
    /// # Errors
    /// When a setting is out of range.
    pub fn resolve(s: &OptimizerSettings, steps: u64, asked_warmup: Option<Quantity>) -> Result<Self> {
        let warmup = match asked_warmup {
            None => need(s.warmup_steps).0.min(steps / 10),
            Some(warmup) => in_range("warmup-steps", warmup.0, 0, steps - 1)?,
        };
        let peak = above_zero("lr", need(s.lr))?;
        Ok(Self {
            peak,
            floor: peak * in_range("min-lr", need(s.min_lr), 0.0, 1.0)?,
            warmup,
            steps,
            schedule: need(s.schedule),
            decay_fraction: in_range("decay-fraction", need(s.decay_fraction), 0.0, 1.0)?,
        })
    }

    /// The rate of a step (from 0).
    pub fn at(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.peak * (step + 1) as f64 / self.warmup as f64;
        }
        let last = self.steps.saturating_sub(1);
        let part = |from: u64| {
            let span = last.saturating_sub(from).max(1) as f64;
            (step.saturating_sub(from) as f64 / span).min(1.0)
        };
        match self.schedule {
            Schedule::Constant => self.peak,
            Schedule::Cosine => {
                let cosine = 0.5 * (1.0 + (std::f64::consts::PI * part(self.warmup)).cos());
                self.floor + (self.peak - self.floor) * cosine
            }
            Schedule::Wsd => {
                let decay = (self.steps as f64 * self.decay_fraction).round() as u64;
                let start = self.steps.saturating_sub(decay).max(self.warmup);
                if step < start || decay == 0 {
                    self.peak
                } else {
                    self.peak + (self.floor - self.peak) * part(start)
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(schedule: Schedule) -> LearningRate {
        LearningRate { peak: 1.0, floor: 0.1, warmup: 10, steps: 110, schedule, decay_fraction: 0.2 }
    }

    #[test]
    fn schedules_start_peak_and_end_as_defined() {
        for schedule in [Schedule::Cosine, Schedule::Wsd, Schedule::Constant] {
            let lr = rate(schedule);
            assert!(
                (lr.at(0) - 0.1).abs() < 1e-12
                    && (lr.at(9) - 1.0).abs() < 1e-12
                    && (lr.at(10) - 1.0).abs() < 1e-12
            );
            let end = if schedule == Schedule::Constant { 1.0 } else { 0.1 };
            assert!((lr.at(109) - end).abs() < 1e-12, "{schedule:?}: {}", lr.at(109));
            assert!((10..109).all(|step| lr.at(step + 1) <= lr.at(step)));
        }
        assert_eq!(rate(Schedule::Wsd).at(87), 1.0);
        assert!(rate(Schedule::Wsd).at(90) < 1.0);
        assert!((rate(Schedule::Cosine).at(59) - 0.55).abs() < 0.02);
    }

    #[test]
    fn short_runs_do_not_divide_by_zero() {
        for steps in 1..4 {
            for warmup in 0..5 {
                let lr = LearningRate { steps, warmup, ..rate(Schedule::Wsd) };
                assert!((0..steps).all(|step| lr.at(step).is_finite()));
            }
        }
    }
}
