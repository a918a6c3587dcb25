//! A comparison of runs: groups runs into arms and panels, finds the baseline, and computes differences to the
//! baseline.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use candle_sage::{Error, Result, Scheme};
use serde::{Deserialize, Serialize};
use toml::Table;

use super::arm::{Arm, late_training_loss, reached};
use super::chart::short;
use crate::config::{BRANCHED_FROM, Identity, as_text, differing, is_seed, of_attention};
use crate::quantity::counted;
use crate::runs::{Run, initial_weights};
use crate::settings::Attn;
use crate::{during, partial, writing};

/// The file in a sweep's folder that contains the sweep's [`ReportOptions`].
const STUDY: &str = "study.toml";

/// Options of a report that compares runs.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ReportOptions {
    /// The question that the comparison answers, as a title.
    pub about: Option<String>,
    /// Settings that identify the baseline arm; if empty, the baseline is the arm with unquantized attention, or else
    /// the first arm.
    pub baseline: Table,
    /// The settings that distinguish arms. If empty, `arm_keys` chooses them.
    pub by: Vec<String>,
    /// The settings in the `[[points]]` tables of a sweep's file.
    pub points: Vec<String>,
    /// Equivalence margin in percent of the baseline's loss: smaller differences do not matter.
    pub margin: f64,
    /// If set, the report compares the numbers of tokens after which runs reach this validation loss.
    pub milestone: Option<f64>,
}

impl ReportOptions {
    /// Saves the options for later reports of a sweep.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self, sweep: &Path) -> Result<()> {
        let path = sweep.join(STUDY);
        let text = toml::to_string(self).map_err(during("cannot save the options of the report"))?;
        partial::file(&path, |to| std::fs::write(to, text).map_err(writing(to)))
    }

    /// The options that [`Self::save`] wrote to this folder; the defaults if the folder has no such file.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn of(folder: &Path) -> Result<Self> {
        let path = folder.join(STUDY);
        let failed = || format!("cannot read {}", path.display());
        match std::fs::read_to_string(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(during(failed())(error)),
            Ok(text) => toml::from_str(&text).map_err(during(failed())),
        }
    }
}

impl Default for ReportOptions {
    fn default() -> Self {
        Self {
            about: None,
            baseline: Table::new(),
            by: Vec::new(),
            points: Vec::new(),
            margin: 0.5,
            milestone: None,
        }
    }
}

/// Arms that differ only in the compared settings.
#[derive(Debug, Clone)]
pub struct Panel {
    /// The settings that distinguish this panel from the others; empty if there is one panel.
    pub label: String,
    /// The arms. If one of them is the baseline, it is the first.
    pub arms: Vec<Arm>,
    /// Whether the first arm is the baseline.
    pub has_baseline: bool,
}

/// A comparison of runs.
#[derive(Debug, Clone)]
pub struct Study {
    /// The question that the comparison answers.
    pub about: Option<String>,
    /// One panel for each combination of the settings that are not compared.
    pub panels: Vec<Panel>,
    /// Equivalence margin in percent of the baseline's loss.
    pub margin: f64,
    /// The milestone: a loss that runs should reach.
    pub milestone: Option<f64>,
    /// Warnings for the reader.
    pub warnings: Vec<String>,
}

type Values = Vec<(String, String)>;

/// A `T` for each combination of settings, in the order in which the combinations first occur in the runs.
type Grouped<T> = Vec<(Values, T)>;

impl Study {
    /// Compares runs, which may be in any order.
    ///
    /// # Errors
    /// When `runs` is empty, `by` names a setting in which the runs do not differ, or none of several arms has the
    /// settings of `options.baseline`.
    pub fn new(runs: Vec<Run>, options: &ReportOptions) -> Result<Self> {
        let runs: Vec<Run> = runs.into_iter().flat_map(Run::seen).collect();
        let identities: Vec<Identity> = runs.iter().map(|run| run.config.identity()).collect();
        let all: Vec<&Identity> = identities.iter().collect();
        let keys: Vec<String> = differing(&all).into_iter().filter(|key| !is_seed(key)).collect();
        let of_arm = arm_keys(&keys, options)?;
        let values = |identity: &Identity, of_arm_: bool| -> Values {
            let chosen = keys.iter().filter(|key| of_arm.contains(key) == of_arm_);
            chosen.filter_map(|key| Some((key.clone(), identity.get(key)?.clone()))).collect()
        };
        let mut panels: Grouped<Grouped<Vec<Run>>> = Vec::new();
        let mut order: Vec<Values> = Vec::new();
        for (run, identity) in runs.into_iter().zip(&identities) {
            let (panel, arm) = (values(identity, false), values(identity, true));
            if !order.contains(&arm) {
                order.push(arm.clone());
            }
            let arms = entry(&mut panels, panel);
            entry(arms, arm).push(run);
        }
        // A setting that all runs share does not identify an arm.
        let mut asked = options.baseline.clone();
        asked.retain(|key, value| {
            !identities.iter().all(|run| run.get(key).is_some_and(|own| is_same(own, &as_text(value))))
        });
        let baseline = baseline(&order, &asked)?;
        // The baseline is the first arm in every table.
        if let Some(at) = baseline {
            let first = order.remove(at);
            order.insert(0, first);
        }
        let mut panels = spread(panels);
        panels.sort_by_key(|(panel, _)| {
            panel.iter().map(|(key, value)| natural(key, value)).collect::<Vec<_>>()
        });
        let labels = labels(&order);
        let all_panels: Vec<Values> = panels.iter().map(|(panel, _)| panel.clone()).collect();
        let panels = panels.into_iter().map(|(panel, arms)| {
            let mut arms: Vec<Arm> = arms
                .into_iter()
                .map(|(arm, runs)| {
                    let style = order.iter().position(|other| *other == arm).expect("it was put there");
                    let settings = panel.iter().chain(&arm).cloned().collect();
                    Arm::new(labels[style].clone(), style, settings, runs, options.milestone)
                })
                .collect();
            arms.sort_by_key(|arm| arm.style);
            let has_baseline = baseline.is_some() && arms[0].style == 0;
            if has_baseline {
                let (first, others) = arms.split_at_mut(1);
                for arm in others {
                    arm.difference = arm.against(&first[0], options.margin, &Run::final_loss);
                    let pairs = continue_equally(first[0].runs.iter().chain(&arm.runs));
                    let training = arm.against(&first[0], options.margin, &late_training_loss);
                    arm.training = training.filter(|difference| pairs && difference.paired);
                    arm.growth = arm.training.and_then(|_| arm.growth_against(&first[0]));
                    // If a run reached the milestone before its first validation, the number of tokens that it needed
                    // is not known. A mean over the other runs would exclude the fastest runs.
                    let known = arm.reached_before.is_none() && first[0].reached_before.is_none();
                    if let Some(milestone) = options.milestone.filter(|_| known) {
                        // The margin is 0, because `options.margin` is for losses, not for numbers of tokens.
                        arm.later = arm.against(&first[0], 0.0, &|run| reached(run, milestone));
                    }
                }
            }
            let label = if panel.is_empty() { unset(&panel, &all_panels) } else { text(&panel) };
            Panel { label, arms, has_baseline }
        });
        let panels: Vec<Panel> = panels.collect();
        match panels.is_empty() {
            true => Err(Error::new("no runs to report")
                .got("nothing")
                .allowed("at least one run")
                .hint("name the folder of a run, or a folder that contains runs")),
            false => Ok(Self {
                about: options.about.clone(),
                warnings: panels.iter().flat_map(Panel::warnings).collect(),
                panels,
                margin: options.margin,
                milestone: options.milestone,
            }),
        }
    }

    /// Adds `warnings` at the start of the study's list of warnings.
    #[must_use]
    pub fn with_warnings(mut self, warnings: Vec<String>) -> Self {
        self.warnings.splice(0..0, warnings);
        self
    }

    /// Every run, once.
    pub fn trained(&self) -> impl Iterator<Item = &Run> {
        let mut seen = BTreeSet::new();
        self.runs().filter(move |run| run.config.eval_scheme.is_none() && seen.insert(&run.folder))
    }

    /// All runs. A run with `--eval-attn` occurs twice, the second time with the validation losses under that scheme.
    pub fn runs(&self) -> impl Iterator<Item = &Run> {
        self.panels.iter().flat_map(|panel| &panel.arms).flat_map(|arm| &arm.runs)
    }
}

impl Panel {
    /// The panel's label in parentheses, for a sentence.
    pub fn place(&self) -> String {
        if self.label.is_empty() { String::new() } else { format!(" ({})", self.label) }
    }

    /// Warnings about runs of different lengths or on different data.
    fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        let runs = || self.arms.iter().flat_map(|arm| &arm.runs);
        let tokens = || runs().map(|run| run.config.tokens());
        let (least, most) = (tokens().min(), tokens().max());
        let step = runs().map(|run| run.config.tokens_per_step()).max().unwrap_or(0);
        if let (Some(least), Some(most)) = (least, most)
            && most - least >= step.max(1)
        {
            let (least, most) = (short(least as f64), short(most as f64));
            warnings.push(format!(
                "runs of different lengths are compared: {least} to {most} tokens{}",
                self.place()
            ));
        }
        let mut weights: BTreeMap<&Path, BTreeSet<&String>> = BTreeMap::new();
        for run in runs() {
            let began = initial_weights(&run.starts).zip(run.config.init_from.as_deref());
            began.map(|(hash, from)| weights.entry(from).or_default().insert(hash));
        }
        for (from, _) in weights.iter().filter(|(_, hashes)| hashes.len() > 1) {
            let place = self.place();
            warnings.push(format!(
                "runs started from different weights of {}, which was trained further in the meantime{place}",
                from.display()
            ));
        }
        let mut data: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
        for run in runs().filter(|run| !run.config.data.sources.is_empty()) {
            let own = &run.config.data;
            let tokenizer = (&own.tokenizer, own.vocab_size);
            let settings = format!("{:?}", (&own.sources, &own.val_sources, own.val_fraction, tokenizer));
            data.entry(settings).or_default().extend(run.data_fingerprint());
        }
        if data.values().any(|fingerprints| fingerprints.len() > 1) {
            warnings.push(format!(
                "runs with the same --data were trained on different data, which changed in the meantime{}",
                self.place()
            ));
        }
        if let Some(baseline) = self.arms.first() {
            let count = runs().filter(|run| baseline.has_other_data(run)).count();
            if count > 0 {
                let runs = counted(count as u64, "run");
                let pairs = "with a seed of the baseline had other data, and cannot be paired with it";
                warnings.push(format!("{runs} {pairs}{}", self.place()));
            }
        }
        warnings
    }
}

/// Adds runs to several panels, if the setting that distinguishes these panels has no effect on the runs. For example,
/// runs without attention are in the panel with QK-norm and in the panel without it.
fn spread(panels: Grouped<Grouped<Vec<Run>>>) -> Grouped<Grouped<Vec<Run>>> {
    let within = |part: &Values, whole: &Values| {
        part.len() < whole.len() && part.iter().all(|value| whole.contains(value))
    };
    let all: Vec<Values> = panels.iter().map(|(panel, _)| panel.clone()).collect();
    // A panel is larger than `panel` if it has all settings of `panel`, and additional ones. If one larger panel's
    // additional settings are all meaningless for the runs of `panel`, every larger panel gets these runs.
    let (parts, mut wholes): (Grouped<_>, Grouped<_>) = panels.into_iter().partition(|(panel, arms)| {
        let meaningless = |key: &str| {
            arms.iter().all(|(_, runs): &(Values, Vec<Run>)| {
                runs.iter().all(|run| crate::config::is_meaningless(key, &run.config))
            })
        };
        all.iter().any(|whole| {
            within(panel, whole)
                && whole
                    .iter()
                    .all(|(key, value)| panel.contains(&(key.clone(), value.clone())) || meaningless(key))
        })
    });
    for (panel, arms) in parts {
        for (_, others) in wholes.iter_mut().filter(|(whole, _)| within(&panel, whole)) {
            arms.iter().for_each(|(arm, runs)| entry(others, arm.clone()).extend(runs.iter().cloned()));
        }
    }
    wholes
}

/// The keys that distinguish arms, chosen from the `keys` in which runs differ: `by` if it is not empty. Otherwise
/// `branched-from`, the keys of attention, and the keys in `points` and `baseline`. If runs differ in none of these, or
/// only in `branched-from`: also the first of the other keys.
fn arm_keys(keys: &[String], options: &ReportOptions) -> Result<Vec<String>> {
    let ReportOptions { by, points, baseline, .. } = options;
    if let Some(missing) = by.iter().find(|key| !keys.contains(key)) {
        return Err(Error::new("the runs do not differ in this setting")
            .got(format!("--by {missing}"))
            .allowed(if keys.is_empty() {
                "nothing: they differ only in seeds".into()
            } else {
                keys.join(", ")
            })
            .hint("without --by, the settings of attention distinguish the arms"));
    }
    if !by.is_empty() {
        return Ok(by.to_vec());
    }
    // The identity has the number of steps instead of the number of tokens.
    let in_points =
        |key: &String| points.contains(key) || (key == "steps" && points.iter().any(|p| p == "tokens"));
    let told_apart =
        |key: &&String| of_attention(key) || in_points(key) || baseline.contains_key(key.as_str());
    let (branch, others): (Vec<&String>, Vec<&String>) = keys.iter().partition(|key| *key == BRANCHED_FROM);
    let mut chosen: Vec<&String> = others.iter().copied().filter(told_apart).collect();
    if chosen.is_empty() {
        chosen.extend(others.first());
    }
    Ok(branch.into_iter().chain(chosen).cloned().collect())
}

/// Whether two texts are the same value: numbers and quantities are compared by size, so `1k` is `1024`.
fn is_same(a: &str, b: &str) -> bool {
    let number = |text: &str| text.parse::<f64>().ok();
    let quantity = |text: &str| text.parse::<crate::quantity::Quantity>().ok();
    a == b
        || number(a).is_some_and(|own| Some(own) == number(b))
        || quantity(a).is_some_and(|own| Some(own) == quantity(b))
}

/// Whether all runs start from the same weights of one earlier model, train for equally many steps, and have batches of
/// the same shape. If so, runs with equal data seeds train on the same batches. Compares hashes of the weights: the
/// earlier model may have been trained further between the starts of two runs.
fn continue_equally<'a>(runs: impl Iterator<Item = &'a Run>) -> bool {
    let course = |run: &'a Run| {
        let (model, of) = (&run.config, initial_weights(&run.starts)?);
        Some((of, model.steps, model.tokens_per_step(), model.model.context, model.data.document_mask))
    };
    let mut all = runs.map(course);
    let first = all.next().flatten();
    first.is_some() && all.all(|other| other == first)
}

fn baseline(arms: &[Values], asked: &Table) -> Result<Option<usize>> {
    let has = |arm: &Values, key: &str, value: &str| arm.iter().any(|(k, v)| k == key && is_same(v, value));
    // A run with `--eval-attn` makes two arms. The arm without `eval-attn` is preferred as the baseline.
    let plain = |is: &dyn Fn(&Values) -> bool| {
        let those = || arms.iter().enumerate().filter(|(_, arm)| is(arm)).map(|(at, _)| at);
        let second = |at: &usize| arms[*at].iter().any(|(key, _)| key == "eval-attn");
        those().find(|at| !second(at)).or_else(|| those().next())
    };
    if asked.is_empty() {
        let exact = plain(&|arm| has(arm, "attn", &Attn::EXACT.to_string()));
        return Ok(exact.or_else(|| if arms.len() > 1 { plain(&|_| true) } else { None }));
    }
    if arms.len() < 2 {
        // A subset of a sweep may have only one arm, without anything to compare.
        return Ok(None);
    }
    match plain(&|arm| asked.iter().all(|(key, value)| has(arm, key, &as_text(value)))) {
        Some(at) => Ok(Some(at)),
        None => Err(Error::new("no arm has the settings of the baseline")
            .got(asked.to_string().trim().replace('\n', ", "))
            .allowed(labels(arms).join("; "))
            .hint("name one of these with --baseline KEY=VALUE")),
    }
}

/// A label for each arm, with only the settings that distinguish arms: `sagebwd, smoothing k`.
fn labels(arms: &[Values]) -> Vec<String> {
    fn value<'a>(arm: &'a Values, key: &str) -> Option<&'a str> {
        arm.iter().find(|(k, _)| k == key).map(|(_, value)| value.as_str())
    }
    // Attention settings are compared only between arms with the same `attn`.
    let tells = |arm: &Values, key: &str| {
        let own = of_attention(key) && key != "attn" && value(arm, "attn").is_some();
        let differs = |other: &Values| {
            value(other, "attn") == value(arm, "attn") && value(other, key) != value(arm, key)
        };
        !own || arms.iter().any(differs)
    };
    let schemes = Scheme::all();
    let by_default = |arm: &Values, key: &str, default: &str| {
        let scheme = schemes.iter().find(|scheme| Some(scheme.name()) == value(arm, "attn"));
        scheme.is_some_and(|scheme| scheme.settings().iter().any(|(k, v)| *k == key && v == default))
    };
    let label = |arm: &Values| {
        let mut kept: Values = arm.iter().filter(|(key, _)| tells(arm, key)).cloned().collect();
        // If a label would have more than two attention settings, the scheme's default values are left out.
        if kept.iter().filter(|(key, _)| of_attention(key)).count() > 2 {
            kept.retain(|(key, value)| !by_default(arm, key, value));
        }
        text(&kept)
    };
    let or = |text: String, other: &dyn Fn() -> String| if text.is_empty() { other() } else { text };
    arms.iter().map(|arm| or(or(label(arm), &|| unset(arm, arms)), &|| "all runs".into())).collect()
}

/// Replaces an empty label of an arm or panel: `KEY not set` for each key that only other arms or panels have.
fn unset(of: &Values, all: &[Values]) -> String {
    let keys: BTreeSet<&String> = all.iter().flatten().map(|(key, _)| key).collect();
    let unset = keys.into_iter().filter(|key| of.iter().all(|(own, _)| own != *key));
    unset.map(|key| format!("{key} not set")).collect::<Vec<_>>().join(", ")
}

fn text(values: &Values) -> String {
    let one = |(key, value): &(String, String)| {
        if key == "attn" { value.clone() } else { format!("{key} {value}") }
    };
    values.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// A sorting key: numbers by their size, and `on` before `off`.
fn natural(key: &str, value: &str) -> (String, u64, String) {
    let number = value.parse::<f64>().ok().map(|x| (x * 1e9) as u64);
    let quantity = value.parse::<crate::quantity::Quantity>().ok().map(|q| q.0.saturating_mul(1_000_000_000));
    let rank = number.or(quantity).unwrap_or(if value == "on" { 0 } else { 1 });
    (key.into(), rank, value.into())
}

/// The value of a key. A new key is appended, so the order of insertion is kept.
fn entry<K: PartialEq, V: Default>(map: &mut Vec<(K, V)>, key: K) -> &mut V {
    let at = map.iter().position(|(other, _)| *other == key).unwrap_or_else(|| {
        map.push((key, V::default()));
        map.len() - 1
    });
    &mut map[at].1
}

#[cfg(test)]
mod tests;
