//! One of the things that are compared: runs that differ in their seeds alone, their mean, and its difference to another's.

use std::collections::{BTreeMap, BTreeSet};

use super::statistics::{Mean, Verdict};
use crate::runs::{Run, Status, median};

/// Runs that differ in their seeds alone.
#[derive(Debug, Clone)]
pub struct Arm {
    /// What tells it from other arms.
    pub label: String,
    /// Its place among all arms: arms of the same name look the same in every panel.
    pub style: usize,
    /// What it is, by the keys that differ in the study.
    pub settings: Vec<(String, String)>,
    /// Its runs.
    pub runs: Vec<Run>,
    /// Final validation losses of those that are finished.
    pub loss: Option<Mean>,
    /// Difference of the final losses to the baseline's, percent of the baseline's.
    pub difference: Option<Difference>,
    /// Tokens after which its runs reach the milestone, of those that do.
    pub reached: Option<Mean>,
    /// How many more tokens than the baseline's of the same seed, percent.
    pub later: Option<Difference>,
    /// Tokens a second of a usual step, the median over the runs.
    pub speed: Option<f64>,
}

/// A mean difference to the baseline.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Difference {
    /// Percent of the baseline's mean; over the seeds that both have, where there are several.
    pub mean: Mean,
    /// Whether it is over pairs of one seed.
    pub paired: bool,
    /// Whether runs are missing that diverged or failed.
    pub of_survivors: bool,
    /// What may be said.
    pub verdict: Verdict,
}

impl Difference {
    /// In percent, with its interval: `+0.12 % ± 0.34`.
    pub fn numbers(&self) -> String {
        format!("{:+.2} %{}", self.mean.value, self.mean.plus_minus(2))
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
            reached: milestone.and_then(|loss| mean_over_seeds(&runs, &|run| reached(run, loss))),
            later: None,
            speed: median(runs.iter().filter_map(Run::usual_speed)),
            runs,
        }
    }

    /// How many of its runs ended so.
    pub fn count(&self, status: Status) -> usize {
        self.runs.iter().filter(|run| run.status() == Some(status)).count()
    }

    /// What computed its runs.
    pub fn hardware(&self) -> BTreeSet<&str> {
        self.runs.iter().flat_map(|run| &run.starts).map(|start| start.hardware.as_str()).collect()
    }

    /// How many seeds it has.
    pub fn seeds(&self) -> usize {
        self.runs.iter().map(seeds).collect::<BTreeSet<_>>().len()
    }

    /// Whether its run of this run's seeds learned from other data.
    pub(super) fn has_other_data(&self, run: &Run) -> bool {
        self.runs.iter().any(|twin| seeds(twin) == seeds(run) && !same_data(run, twin))
    }

    /// The difference of a number of its runs to that of the baseline's of the same seeds and data; where fewer than two
    /// seeds are in common and both arms have more, of the means.
    pub(super) fn against(
        &self,
        baseline: &Arm,
        margin: f64,
        number: &dyn Fn(&Run) -> Option<f64>,
    ) -> Option<Difference> {
        let (own, base) = (mean_over_seeds(&self.runs, number)?, mean_over_seeds(&baseline.runs, number)?);
        let twins = by_seed(baseline.runs.iter(), number);
        let pairs: Vec<f64> = by_seed(self.runs.iter().filter(|run| !baseline.has_other_data(run)), number)
            .into_iter()
            .filter_map(|(seed, value)| Some(100.0 * (value - twins.get(&seed)?) / base.value))
            .collect();
        let means = || Mean::difference(&own, &base).scaled(100.0 / base.value);
        let (mean, paired) = match Mean::of(&pairs) {
            Some(mean) if mean.count > 1 || own.count < 2 || base.count < 2 => (mean, true),
            _ => (means(), false),
        };
        let lost = |arm: &Arm| arm.count(Status::Diverged) + arm.count(Status::Failed);
        let of_survivors = lost(self) + lost(baseline) > 0;
        Some(Difference { mean, paired, of_survivors, verdict: mean.verdict(margin) })
    }
}

/// Tokens after which the validation loss is down at `loss`, on a straight line between validations.
pub(super) fn reached(run: &Run, loss: f64) -> Option<f64> {
    let curve: Vec<(u64, f64)> = validations(run).into_iter().collect();
    let at = curve.iter().position(|(_, value)| *value <= loss)?;
    let (tokens, value) = (curve[at].0 as f64, curve[at].1);
    Some(match at.checked_sub(1).map(|before| curve[before]) {
        Some((from, above)) => from as f64 + (tokens - from as f64) * (above - loss) / (above - value),
        None => tokens,
    })
}

/// What a run drew its chances from.
pub(super) fn seeds(run: &Run) -> [u64; 3] {
    let config = &run.config;
    [config.weights_seed, config.data.order_seed, config.data.corpus_seed]
}

/// Whether two runs read the same text, as far as they said it.
pub(super) fn same_data(a: &Run, b: &Run) -> bool {
    a.data_fingerprint().zip(b.data_fingerprint()).is_none_or(|(a, b)| a == b)
}

/// A number of each seed: the mean over the runs of one seed that have it, which are repetitions and no samples of their own.
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

/// What a curve is at some tokens: of each run at the validations that it has.
pub(super) fn validations(run: &Run) -> BTreeMap<u64, f64> {
    run.points.iter().filter_map(|point| Some((point.tokens, point.val_loss?))).collect()
}
