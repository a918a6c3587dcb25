//! An arm of a comparison: its runs (which differ only in their seeds), the mean of their losses, and the difference of
//! this mean to the baseline.

use std::collections::{BTreeMap, BTreeSet};

use super::statistics::{Mean, Verdict};
use crate::metrics::Point;
use crate::runs::{Run, Status};

/// Runs that differ only in their seeds.
#[derive(Debug, Clone)]
pub struct Arm {
    /// The settings that distinguish the arm from other arms, as text.
    pub label: String,
    /// Index of the arm among all arms of the study. It selects the colour and the marker that the arm has in every
    /// [`Panel`](super::Panel).
    pub style: usize,
    /// The settings in which the runs of the study differ, with this arm's values.
    pub settings: Vec<(String, String)>,
    /// The runs of the arm.
    pub runs: Vec<Run>,
    /// Mean of the final validation losses of the finished runs, over seeds.
    pub loss: Option<Mean>,
    /// Difference of the final validation losses to the baseline's final validation losses.
    pub difference: Option<Difference>,
    /// Difference of the training losses to the baseline's training losses, over the last quarter of the steps. Set
    /// only if this arm and the baseline continue from the same weights on the same batches.
    pub training: Option<Difference>,
    /// The slope of this arm's training loss, minus the slope of the baseline's. Each slope is fitted by least squares
    /// over all steps. The unit is percent (of the baseline's loss) per million tokens. Set only if `training` is set.
    pub growth: Option<Mean>,
    /// Mean number of tokens after which runs reach the milestone (a validation loss), over the runs that reach it.
    pub reached: Option<Mean>,
    /// The runs that have already reached the milestone at their first validation needed at most this number of tokens.
    /// `None` without such runs.
    pub reached_before: Option<f64>,
    /// How many more tokens than the baseline the arm needs to reach the milestone, in percent.
    pub later: Option<Difference>,
    /// Tokens per second of the finished runs: each run's median over its steps, averaged over seeds.
    pub speed: Option<Mean>,
}

/// A mean difference to the baseline.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Difference {
    /// The mean difference of losses (or other numbers), arm minus baseline, in percent of the baseline's mean.
    pub mean: Mean,
    /// Whether `mean` is over pairs of runs with the same seeds.
    pub paired: bool,
    /// Whether this arm or the baseline has runs that diverged or failed.
    pub of_survivors: bool,
    /// The conclusion from the intervals of `mean`.
    pub verdict: Verdict,
}

/// A signed mean in percent, with its interval.
pub(super) fn in_percent(mean: &Mean) -> String {
    // The losses of runs that continue from the same weights can differ by less than 0.01 %, so small differences get
    // more digits.
    let digits = digits(mean);
    format!("{:+.digits$} %{}", mean.value, mean.plus_minus(digits))
}

/// The number of decimals that show a mean in percent and its interval.
fn digits(mean: &Mean) -> usize {
    let size = mean.value.abs().max(mean.half.unwrap_or(0.0));
    if size > 0.0 { (1.0 - size.log10().floor()).clamp(2.0, 6.0) as usize } else { 2 }
}

impl Difference {
    /// The difference in percent, with its interval: `+0.12 % ± 0.34`.
    pub fn numbers(&self) -> String {
        in_percent(&self.mean)
    }

    /// The verdict as text; `margin` is in percent. If only the 90 % interval is within the margin, the text has it,
    /// because [`Difference::numbers`] shows the 95 % interval.
    pub(super) fn conclusion(&self, margin: f64) -> String {
        let verdict = self.verdict.text(margin);
        let shown = self.mean.value.abs() + self.mean.half.unwrap_or(0.0);
        if self.verdict == Verdict::Matches && shown >= margin {
            return format!("{verdict}: 90 % interval ± {:.1$}", self.mean.half_of_90(), digits(&self.mean));
        }
        verdict
    }

    /// The number of pairs of runs, as text after [`Difference::numbers`]: `, only 2 pairs`. Empty for one pair.
    pub(super) fn pairs(&self) -> String {
        match (self.paired, self.mean.count) {
            (true, 1) => String::new(),
            // Verdicts from fewer than four pairs of runs often change with another seed.
            (true, pairs @ ..4) => format!(", only {pairs} pairs"),
            (true, pairs) => format!(", {pairs} pairs"),
            (false, _) => ", no pairs".into(),
        }
    }
}

impl Arm {
    pub(super) fn new(
        label: String,
        style: usize,
        settings: Vec<(String, String)>,
        runs: Vec<Run>,
        milestone: Option<f64>,
    ) -> Self {
        Self {
            label,
            style,
            settings,
            loss: mean_over_seeds(&runs, &Run::final_loss),
            difference: None,
            training: None,
            growth: None,
            reached: milestone.and_then(|loss| mean_over_seeds(&runs, &|run| reached(run, loss))),
            reached_before: milestone
                .and_then(|loss| runs.iter().filter_map(|run| reached_before(run, loss)).reduce(f64::max)),
            later: None,
            speed: mean_over_seeds(&runs, &|run| {
                run.usual_speed().filter(|_| run.status() == Some(Status::Finished))
            }),
            runs,
        }
    }

    /// Number of runs that ended with this status.
    pub fn count(&self, status: Status) -> usize {
        self.runs.iter().filter(|run| run.status() == Some(status)).count()
    }

    /// The devices that the runs were trained on.
    pub fn hardware(&self) -> BTreeSet<&str> {
        self.runs.iter().flat_map(|run| &run.starts).map(|start| start.hardware.as_str()).collect()
    }

    /// Number of distinct seeds.
    pub fn seeds(&self) -> usize {
        self.runs.iter().map(seeds).collect::<BTreeSet<_>>().len()
    }

    /// Whether a run of the arm has the same seeds as `run`, but other data.
    pub(super) fn has_other_data(&self, run: &Run) -> bool {
        self.runs.iter().any(|twin| seeds(twin) == seeds(run) && !same_data(run, twin))
    }

    /// Computes [`Arm::growth`]. Both arms must continue from the same weights on the same batches.
    pub(super) fn growth_against(&self, baseline: &Arm) -> Option<Mean> {
        let loss = mean_over_seeds(&baseline.runs, &late_training_loss)?;
        Some(self.paired(baseline, &training_slope)?.scaled(100.0 / loss.value))
    }

    /// The mean difference of `number` to the baseline, over pairs of runs with the same seeds and data.
    fn paired(&self, baseline: &Arm, number: &dyn Fn(&Run) -> Option<f64>) -> Option<Mean> {
        let twins = by_seed(baseline.runs.iter(), number);
        let own = by_seed(self.runs.iter().filter(|run| !baseline.has_other_data(run)), number);
        let pairs = own.into_iter().filter_map(|(seed, value)| Some(value - twins.get(&seed)?));
        Mean::of(&pairs.collect::<Vec<_>>())
    }

    /// The mean difference of `number` to the baseline, over pairs of runs with the same seeds and data. In two cases
    /// it is this arm's mean minus the baseline's mean, with Welch's interval: without a pair, and with only one pair if
    /// each of the two arms has at least two seeds.
    pub(super) fn against(
        &self,
        baseline: &Arm,
        margin: f64,
        number: &dyn Fn(&Run) -> Option<f64>,
    ) -> Option<Difference> {
        let (own, base) = (mean_over_seeds(&self.runs, number)?, mean_over_seeds(&baseline.runs, number)?);
        let (mean, paired) = match self.paired(baseline, number) {
            Some(mean) if mean.count > 1 || own.count < 2 || base.count < 2 => (mean, true),
            _ => (Mean::difference(&own, &base), false),
        };
        let mean = mean.scaled(100.0 / base.value);
        let lost = |arm: &Arm| arm.count(Status::Diverged) + arm.count(Status::Failed);
        let of_survivors = lost(self) + lost(baseline) > 0;
        Some(Difference { mean, paired, of_survivors, verdict: mean.verdict(margin) })
    }
}

/// The slope of the training loss, in nats per million tokens.
fn training_slope(run: &Run) -> Option<f64> {
    let n = run.points.len() as f64;
    let mean = |of: &dyn Fn(&Point) -> f64| run.points.iter().map(of).sum::<f64>() / n;
    let x = |point: &Point| point.tokens as f64 / 1e6;
    let (mean_x, mean_y) = (mean(&x), mean(&|point| point.loss));
    let slope = mean(&|point| (x(point) - mean_x) * (point.loss - mean_y))
        / mean(&|point| (x(point) - mean_x).powi(2));
    (run.status() == Some(Status::Finished) && slope.is_finite()).then_some(slope)
}

/// Mean training loss over the last quarter of a finished run's steps.
pub(super) fn late_training_loss(run: &Run) -> Option<f64> {
    let late = &run.points[run.points.len() - run.points.len().div_ceil(4)..];
    let mean = late.iter().map(|point| point.loss).sum::<f64>() / late.len() as f64;
    (run.status() == Some(Status::Finished) && mean.is_finite()).then_some(mean)
}

/// Tokens after which the validation loss falls to `loss`, interpolated linearly between validations. `None` if the
/// loss never falls so far, or is already so low at the first validation. `None` also for a diverged run, because its
/// loss does not stay low.
pub(super) fn reached(run: &Run, loss: f64) -> Option<f64> {
    let curve: Vec<(u64, f64)> = kept_validations(run)?.into_iter().collect();
    let at = curve.iter().position(|(_, value)| *value <= loss)?;
    let (tokens, value) = (curve[at].0 as f64, curve[at].1);
    let (from, above) = curve[at.checked_sub(1)?];
    Some(from as f64 + (tokens - from as f64) * (above - loss) / (above - value))
}

/// The number of tokens trained on before the first validation, if that validation's loss is not above `loss`.
fn reached_before(run: &Run, loss: f64) -> Option<f64> {
    let (tokens, value) = kept_validations(run)?.pop_first()?;
    (value <= loss).then_some(tokens as f64)
}

/// The validation losses of a run; `None` for a diverged run, which does not count in means.
fn kept_validations(run: &Run) -> Option<BTreeMap<u64, f64>> {
    (run.status() != Some(Status::Diverged)).then(|| validations(run))
}

/// The seeds of a run: weights, order of the data, corpus.
pub(super) fn seeds(run: &Run) -> [u64; 3] {
    let config = &run.config;
    [config.weights_seed, config.data.order_seed, config.data.corpus_seed]
}

/// Whether two runs were trained on the same data. Also true if one of them did not record its data.
pub(super) fn same_data(a: &Run, b: &Run) -> bool {
    a.data_fingerprint().zip(b.data_fingerprint()).is_none_or(|(a, b)| a == b)
}

/// The mean of `number` for each seed. Runs with the same seed are repetitions, not independent samples, so they
/// count as one.
fn by_seed<'a>(
    runs: impl Iterator<Item = &'a Run>,
    number: &dyn Fn(&Run) -> Option<f64>,
) -> BTreeMap<[u64; 3], f64> {
    let mut all: BTreeMap<[u64; 3], Vec<f64>> = BTreeMap::new();
    for run in runs {
        all.entry(seeds(run)).or_default().extend(number(run));
    }
    let mean =
        |values: Vec<f64>| (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64);
    all.into_iter().filter_map(|(seed, values)| Some((seed, mean(values)?))).collect()
}

fn mean_over_seeds(runs: &[Run], number: &dyn Fn(&Run) -> Option<f64>) -> Option<Mean> {
    Mean::of(&by_seed(runs.iter(), number).into_values().collect::<Vec<f64>>())
}

/// The validation losses of a run by the number of tokens trained on.
pub(super) fn validations(run: &Run) -> BTreeMap<u64, f64> {
    run.points.iter().filter_map(|point| Some((point.tokens, point.val_loss?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_match_that_the_shown_interval_does_not_explain_has_its_own() {
        let conclusion = |values: &[f64]| {
            let mean = Mean::of(values).expect("values");
            let difference =
                Difference { mean, paired: true, of_survivors: false, verdict: mean.verdict(0.5) };
            (difference.numbers(), difference.conclusion(0.5))
        };
        // The standard error is 0.14, and Student's t with 2 degrees of freedom is 4.303 at 97.5 % and 2.920 at 95 %.
        let (numbers, text) = conclusion(&[-0.2425, 0.0, 0.2425]);
        assert_eq!((&*numbers, &*text), ("+0.00 % ± 0.60", "matches within 0.5 %: 90 % interval ± 0.41"));
        assert_eq!(conclusion(&[-0.1, 0.0, 0.1]).1, "matches within 0.5 %");
    }
}
