//! The charts of a [`Panel`]: losses, differences to the baseline, and errors of gradients.

use std::collections::BTreeMap;

use candle_sage::Result;

use super::arm::{Arm, same_data, seeds, validations};
use super::chart::{Chart, Series};
use super::gradient_table::gradient_plot;
use super::statistics::Mean;
use super::study::{Panel, Study};
use crate::metrics::{GradientErrors, Point, Probed};
use crate::runs::{Run, Status};

/// The z-score of a step's loss above which the step is marked as a spike.
pub const SPIKE: f64 = 8.0;

/// The first fraction of a run, in which losses fall fast. The visible range of the vertical axis ignores these
/// losses.
const SETTLING: f64 = 0.25;

/// Largest number of points of a curve of training losses. Each point is the mean over a group of steps.
const GROUPS: usize = 40;

/// A chart with its title and caption.
#[derive(Debug)]
pub struct Figure {
    /// The start of the chart's file name, such as `losses`.
    pub name: &'static str,
    /// The title above the chart.
    pub title: &'static str,
    /// The explanation below the chart.
    pub caption: String,
    /// The chart.
    pub svg: String,
}

impl Study {
    /// Every chart as SVG, with a name for its file.
    ///
    /// # Errors
    /// When a chart cannot be drawn.
    pub fn figures(&self) -> Result<Vec<(String, String)>> {
        let mut all = Vec::new();
        let plain = |c: char| if c.is_alphanumeric() || "-.".contains(c) { c } else { '-' };
        let labels: Vec<String> =
            self.panels.iter().map(|panel| panel.label.chars().map(plain).collect()).collect();
        for (n, panel) in self.panels.iter().enumerate() {
            let mut label = if labels[n].is_empty() {
                String::new()
            } else {
                format!("-{}", labels[n].replace("--", "-"))
            };
            if labels[..n].contains(&labels[n]) {
                label += &format!("-{n}");
            }
            let figures = panel.figures()?.into_iter();
            all.extend(figures.map(|Figure { name, svg, .. }| (format!("{name}{label}"), svg)));
        }
        Ok(all)
    }
}

impl Panel {
    /// The charts.
    ///
    /// # Errors
    /// When a chart cannot be drawn.
    pub fn figures(&self) -> Result<Vec<Figure>> {
        let figure = |name, title, caption: String, svg: Option<String>| {
            Some(Figure { name, title, caption, svg: svg? })
        };
        let all = [
            figure(
                "losses",
                "Validation loss over tokens",
                format!(
                    "Mean and range over seeds of the finished runs; for an arm without a finished run, of its \
                     unfinished runs, or else of its diverged runs. Crosses mark losses more than {SPIKE} standard \
                     deviations above the previous steps, and steps at which a run diverged or failed. The vertical axis \
                     covers the values after the first {:.0} % of the tokens: curves outside it are cut off, and \
                     crosses are drawn at the edge.",
                    100.0 * SETTLING
                ),
                losses(self)?,
            ),
            figure(
                "differences",
                "Difference to the baseline over tokens",
                "Differences between runs of one seed, their mean and its 95 % interval.".into(),
                differences(self)?,
            ),
            figure(
                "training-differences",
                "Difference of the training loss to the baseline over tokens",
                format!(
                    "Differences between runs that continue from the same weights on the same batches, in at most \
                     {GROUPS} groups of steps: their mean over seeds and its 95 % interval."
                ),
                training_differences(self)?,
            ),
            figure(
                "gradients",
                "Error of the whole gradient over tokens",
                "The error of the model's gradient under low-bit schemes, relative to the gradient without noise, \
                 from the last `probe --gradient`. An error that does not fall is a bias. For comparison: the noise \
                 from the choice of data, as measured for the first curve."
                    .into(),
                gradients(self)?,
            ),
            figure(
                "errors",
                "Error of attention's gradients over tokens",
                "Relative L2 of dQ against unquantized attention on the model's tensors, in the layer with the \
                 largest error; a model trained with unquantized attention is probed with SageBwd. Mean over seeds \
                 and its 95 % interval, truncated at 0."
                    .into(),
                errors(self)?,
            ),
        ];
        Ok(all.into_iter().flatten().collect())
    }

    /// The unigram entropy in nats per token, if it is the same for all runs.
    pub fn unigram_entropy(&self) -> Option<f64> {
        let runs = self.arms.iter().flat_map(|arm| &arm.runs);
        let mut entropies = runs.filter_map(|run| run.starts.last()).map(|start| start.unigram_entropy);
        let first = entropies.next()?;
        entropies.all(|other| (other - first).abs() < 1e-3).then_some(first)
    }
}

/// Validation loss over tokens: the mean of each arm, and the range over its seeds. Crosses mark spikes, and
/// the ends of runs that diverged or failed. `None` before the first validation.
fn losses(panel: &Panel) -> Result<Option<String>> {
    if panel.arms.iter().all(|arm| arm.runs.iter().all(|run| run.last_loss().is_none())) {
        return Ok(None);
    }
    let series: Vec<Series> = panel
        .arms
        .iter()
        .map(|arm| {
            let curves = by_seed(arm, |run| Some(validations(run)));
            Series {
                crosses: arm.runs.iter().flat_map(marked_points).collect(),
                band: range(&curves),
                ..curve(arm, &curves)
            }
        })
        .collect();
    let limits = limits(&series);
    let level =
        panel.unigram_entropy().filter(|level| limits.is_none_or(|(low, high)| (low..high).contains(level)));
    let chart = Chart {
        y: "validation loss, nats a token".into(),
        series,
        level: level.map(|level| (level, format!("unigram entropy {level:.3}"))),
        limits,
        ..Chart::default()
    };
    chart.to_svg().map(Some)
}

/// A plot of each arm's validation loss minus the baseline's, in percent of the baseline's. Runs with the same seeds
/// and data are compared. `None` without a baseline, or without such runs.
fn differences(panel: &Panel) -> Result<Option<String>> {
    let (true, Some((baseline, others))) = (panel.has_baseline, panel.arms.split_first()) else {
        return Ok(None);
    };
    differences_of("difference to", baseline, others.iter(), &validations)
}

/// Difference of the training loss to the baseline, for the arms that train on the baseline's batches.
fn training_differences(panel: &Panel) -> Result<Option<String>> {
    let Some((baseline, others)) = panel.arms.split_first() else { return Ok(None) };
    let alike = others.iter().filter(|arm| arm.training.is_some());
    differences_of("training loss: difference to", baseline, alike, &grouped_losses)
}

/// The mean training loss of each group of steps. The key is the number of tokens in all steps up to the group's end.
fn grouped_losses(run: &Run) -> BTreeMap<u64, f64> {
    let groups = run.points.chunks(run.points.len().div_ceil(GROUPS).max(1));
    let mean = |group: &[Point]| {
        let sum: f64 = group.iter().map(|point| point.loss).sum();
        Some((group.last()?.tokens, sum / group.len() as f64))
    };
    groups.filter_map(mean).collect()
}

fn differences_of<'a>(
    y: &str,
    baseline: &Arm,
    others: impl Iterator<Item = &'a Arm>,
    losses: &dyn Fn(&Run) -> BTreeMap<u64, f64>,
) -> Result<Option<String>> {
    let series: Vec<Series> = others
        .map(|arm| {
            let pairs =
                by_seed(arm, |run| Some(against(&losses(run), &losses(matching_run(run, baseline)?))));
            curve(arm, &pairs)
        })
        .filter(|series| !series.points.is_empty())
        .collect();
    if series.is_empty() {
        return Ok(None);
    }
    let limits = limits(&series).map(|(low, high)| (low.min(0.0), high.max(0.0)));
    let chart = Chart {
        y: format!("{y} {}, %", baseline.label),
        series,
        level: Some((0.0, String::new())),
        limits,
        from_zero: true,
        ..Chart::default()
    };
    chart.to_svg().map(Some)
}

/// A plot of the error of the model's gradient under low-bit schemes, at the last probe of each run. `None` if no run
/// has an error to plot.
fn gradients(panel: &Panel) -> Result<Option<String>> {
    let mut found: Vec<GradientErrors> = Vec::new();
    for (arm, run) in panel.arms.iter().flat_map(|arm| arm.runs.iter().map(move |run| (arm, run))) {
        let last = run.gradients.iter().map(|errors| errors.step).max();
        let visible = |errors: &GradientErrors| {
            errors.parts.first().is_some_and(|all| all.whole.mean_squares().exact > 0.0)
        };
        for errors in run.gradients.iter().filter(|errors| Some(errors.step) == last && visible(errors)) {
            let scheme = match panel.arms.len() {
                1 => errors.scheme.clone(),
                _ => format!("{}: {}", arm.label, errors.scheme),
            };
            found.push(GradientErrors { scheme, ..errors.clone() });
        }
    }
    if found.is_empty() { Ok(None) } else { gradient_plot(&found).map(Some) }
}

/// A chart over the training tokens: the relative L2 error of dQ, in the layer where it is largest. `None` if no run
/// was probed more than once.
fn errors(panel: &Panel) -> Result<Option<String>> {
    let series: Vec<Series> = panel
        .arms
        .iter()
        .map(|arm| {
            let mut series = curve(arm, &by_seed(arm, |run| Some(worst_errors(run))));
            // Errors are not negative, but the interval of a mean over few seeds may reach below 0.
            series.band.iter_mut().for_each(|(_, low, _)| *low = low.max(0.0));
            series
        })
        .filter(|series| series.points.len() > 1)
        .collect();
    if series.is_empty() {
        return Ok(None);
    }
    let chart =
        Chart { y: "relative L2 of dQ, worst layer".into(), series, from_zero: true, ..Chart::default() };
    chart.to_svg().map(Some)
}

/// The error of dQ in the layer where it is largest, for each number of tokens at which the run was probed.
fn worst_errors(run: &Run) -> BTreeMap<u64, f64> {
    let worst = |probed: &Probed| {
        let layers = probed.rows.iter().filter(|row| row.head.is_none());
        let errors = layers.filter_map(|row| Some(row.errors.get("dQ")?.relative_l2));
        Some((probed.step? * run.config.tokens_per_step(), errors.reduce(f64::max)?))
    };
    run.probes.iter().filter_map(worst).collect()
}

/// The finished runs of an arm. If no run is finished: the runs that have not diverged or failed. Without such runs:
/// all runs. A mean over runs of different lengths would jump where one run ends.
fn whole(arm: &Arm) -> impl Iterator<Item = &Run> {
    let rank = |run: &Run| match run.status() {
        Some(Status::Finished) => 0,
        None | Some(Status::Interrupted) => 1,
        Some(Status::Diverged | Status::Failed) => 2,
    };
    let best = arm.runs.iter().map(rank).min();
    arm.runs.iter().filter(move |run| Some(rank(run)) == best)
}

fn matching_run<'a>(run: &Run, baseline: &'a Arm) -> Option<&'a Run> {
    whole(baseline).find(|other| seeds(other) == seeds(run) && same_data(other, run))
}

/// A curve for each combination of seeds. Runs with the same seeds are repetitions: their curves are averaged.
fn by_seed(arm: &Arm, of: impl Fn(&Run) -> Option<BTreeMap<u64, f64>>) -> Vec<BTreeMap<u64, f64>> {
    let mut all: BTreeMap<[u64; 3], BTreeMap<u64, Vec<f64>>> = BTreeMap::new();
    for run in whole(arm) {
        for (tokens, value) in of(run).into_iter().flatten() {
            all.entry(seeds(run)).or_default().entry(tokens).or_default().push(value);
        }
    }
    let mean = |values: Vec<f64>| values.iter().sum::<f64>() / values.len() as f64;
    all.into_values()
        .map(|curve| curve.into_iter().map(|(tokens, values)| (tokens, mean(values))).collect())
        .collect()
}

/// `curve` minus `base` in percent of `base`, at the tokens where both have a value.
fn against(curve: &BTreeMap<u64, f64>, base: &BTreeMap<u64, f64>) -> BTreeMap<u64, f64> {
    let difference = |(tokens, loss): (&u64, &f64)| {
        let base = base.get(tokens)?;
        Some((*tokens, 100.0 * (loss - base) / base))
    };
    curve.iter().filter_map(difference).collect()
}

/// The mean of several curves, with its 95 % confidence interval.
fn curve(arm: &Arm, curves: &[BTreeMap<u64, f64>]) -> Series {
    let mut values: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    curves.iter().flatten().for_each(|(&tokens, &value)| values.entry(tokens).or_default().push(value));
    // Where some curves have ended, the mean over the remaining curves would jump. These points are omitted.
    let most = values.values().map(Vec::len).max().unwrap_or(0);
    let means: Vec<(f64, Mean)> = values
        .iter()
        .filter(|(_, values)| values.len() == most)
        .filter_map(|(&tokens, values)| Some((tokens as f64, Mean::of(values)?)))
        .collect();
    Series {
        label: arm.label.clone(),
        style: arm.style,
        points: means.iter().map(|(x, mean)| (*x, mean.value)).collect(),
        band: means
            .iter()
            .filter_map(|(x, mean)| mean.interval().map(|(low, high)| (*x, low, high)))
            .collect(),
        ..Series::default()
    }
}

/// The range of several curves: x, lowest, highest.
fn range(curves: &[BTreeMap<u64, f64>]) -> Vec<(f64, f64, f64)> {
    let mut ranges: BTreeMap<u64, (f64, f64, usize)> = BTreeMap::new();
    for (&tokens, &value) in curves.iter().flatten() {
        let (low, high, count) = ranges.entry(tokens).or_insert((value, value, 0));
        (*low, *high, *count) = (low.min(value), high.max(value), *count + 1);
    }
    let several = ranges.into_iter().filter(|(_, (_, _, count))| *count > 1);
    several.map(|(tokens, (low, high, _))| (tokens as f64, low, high)).collect()
}

/// Points to mark: spikes of the loss, and the last step of a run that diverged or failed.
fn marked_points(run: &Run) -> Vec<(f64, f64)> {
    let spikes = run.points.iter().filter(|point| point.loss_z.is_some_and(|z| z > SPIKE));
    let last = run.points.last().filter(|_| matches!(run.status(), Some(Status::Diverged | Status::Failed)));
    let loss = |loss: f64| if loss.is_finite() { loss } else { f64::MAX };
    spikes.chain(last).map(|point| (point.tokens as f64, loss(point.loss))).collect()
}

/// The smallest and the largest y of curves and bands. The first [`SETTLING`] (a fraction) of the tokens is ignored.
fn limits(series: &[Series]) -> Option<(f64, f64)> {
    let end = series.iter().flat_map(|series| &series.points).map(|(x, _)| *x).fold(0.0, f64::max);
    let values = series.iter().flat_map(|series| {
        let band = series.band.iter().flat_map(|&(x, low, high)| [(x, low), (x, high)]);
        series.points.iter().copied().chain(band)
    });
    let settled = values.filter(|(x, y)| *x >= SETTLING * end && y.is_finite()).map(|(_, y)| y);
    let (low, high) =
        settled.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), y| (low.min(y), high.max(y)));
    (low < high).then_some((low, high))
}
