//! Results as text, Markdown and comma-separated values.

use std::collections::BTreeSet;
use std::fmt::Write;

use super::arm::{Arm, Difference, in_percent, late_training_loss, seeds};
use super::chart::short;
use super::statistics::Mean;
use super::study::{Panel, Study};
use crate::metrics::Outcome;
use crate::quantity::{counted, grouped};
use crate::runs::{Run, Status};

/// The table of one run.
pub fn result_table(run: &Outcome) -> String {
    format!(
        "{:<13} {:>9} {:>11} {:>10}  folder\n{:<13} {:>9.4} {:>11.4} {:>10.0}  {}\n\nunigram entropy {:.4} nats: {:.2} {} the validation loss\n",
        "attention",
        "val loss",
        "bits / byte",
        "tokens/s",
        run.attn.to_string(),
        run.val_loss,
        run.val_bits_per_byte,
        run.tokens_per_second,
        run.folder.display(),
        run.unigram_entropy,
        (run.unigram_entropy - run.val_loss).abs(),
        if run.unigram_entropy < run.val_loss { "below" } else { "above" },
    )
}

impl Arm {
    /// The number of runs with each outcome, for example `2 finished, 1 diverged`. If all runs finished, only their
    /// number, for example `3`. If several runs have the same seed, also the number of seeds: `4 runs of 2 seeds`.
    pub fn outcomes(&self) -> String {
        let finished = self.count(Status::Finished);
        let mut text = finished.to_string();
        let (runs, seeds) = (self.runs.len(), self.seeds());
        match (finished < runs, seeds < runs) {
            (true, _) => text += " finished",
            (false, true) => text += " runs",
            (false, false) => {}
        }
        if seeds < runs {
            text += &format!(" of {}", counted(seeds as u64, "seed"));
        }
        for status in [Status::Diverged, Status::Failed, Status::Interrupted] {
            match self.count(status) {
                0 => {}
                n => text += &format!(", {n} {status}"),
            }
        }
        match self.runs.iter().filter(|run| run.status().is_none()).count() {
            0 => text,
            n => text + &format!(", {n} unfinished"),
        }
    }
}

fn percent(difference: &Difference, margin: f64) -> String {
    let survivors = if difference.of_survivors { ", without diverged or failed runs" } else { "" };
    let verdict = difference.conclusion(margin);
    format!("{} ({verdict}{}{survivors})", difference.numbers(), difference.pairs())
}

/// Tokens per second with the confidence interval.
pub(super) fn speed(mean: Mean) -> String {
    let half = mean.half.map_or(String::new(), |half| format!(" ± {}", grouped(half.round() as u64)));
    format!("{}{half}", grouped(mean.value as u64))
}

/// Text as a cell of CSV. Text that a spreadsheet would evaluate as a formula gets an apostrophe in front, except
/// numbers with a sign.
pub(super) fn csv_cell(text: &str) -> String {
    let is_formula = text.starts_with(['=', '+', '-', '@', '\t', '\r']) && text.parse::<f64>().is_err();
    let text = if is_formula { format!("'{text}") } else { text.to_owned() };
    match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text,
    }
}

/// Text as a cell of a Markdown table.
fn cell(text: &str) -> String {
    text.replace('|', r"\|").replace('\n', " ")
}

impl Study {
    /// The head of each column, and `true` for text (aligned left), `false` for numbers (aligned right).
    pub(super) fn heads(&self) -> Vec<(String, bool)> {
        let mut heads = vec![("arm", true), ("seeds", false), ("val loss", false), ("difference", true)];
        if self.has_training() {
            heads.extend([("training loss", true), ("growth / 1M tokens", true)]);
        }
        heads.extend([("tokens/s", false), ("speedup", false)]);
        let mut heads: Vec<(String, bool)> =
            heads.into_iter().map(|(head, words)| (head.to_owned(), words)).collect();
        if let Some(loss) = self.milestone {
            heads.extend([(format!("tokens to {loss}"), false), ("later".into(), true)]);
        }
        heads
    }

    /// Whether training losses are compared.
    fn has_training(&self) -> bool {
        self.panels.iter().flat_map(|panel| &panel.arms).any(|arm| arm.training.is_some())
    }

    /// The cells of an arm's row.
    pub(super) fn cells(&self, panel: &Panel, arm: &Arm) -> Vec<String> {
        let baseline = panel.has_baseline && arm.style == panel.arms[0].style;
        let against = |difference: &Option<Difference>| match difference {
            None if baseline => "baseline".into(),
            None => "-".into(),
            Some(difference) => percent(difference, self.margin),
        };
        // A ratio of speeds is shown only between runs on the same hardware.
        let first = panel.arms.first().filter(|first| first.hardware() == arm.hardware());
        let ratio = arm.speed.zip(first.and_then(|first| first.speed));
        let ratio = ratio.map_or("-".into(), |(own, first)| format!("{:.2}x", own.value / first.value));
        let mut cells = vec![
            arm.label.clone(),
            arm.outcomes(),
            arm.loss.map_or("-".into(), |mean| format!("{:.4}{}", mean.value, mean.plus_minus(4))),
            against(&arm.difference),
        ];
        if self.has_training() {
            cells.push(against(&arm.training));
            let none = if baseline { "baseline" } else { "-" };
            cells.push(arm.growth.map_or(none.into(), |mean| in_percent(&mean)));
        }
        cells.extend([arm.speed.map_or("-".into(), speed), ratio]);
        if self.milestone.is_some() {
            let tokens = |mean: Mean| {
                let interval = mean.half.map_or(String::new(), |half| format!(" ± {}", short(half)));
                let some = if mean.count < arm.runs.len() {
                    format!(" ({})", counted(mean.count as u64, "run"))
                } else {
                    String::new()
                };
                format!("{}{interval}{some}", short(mean.value))
            };
            cells.push(match (arm.reached_before, arm.reached) {
                (Some(first), _) => format!("before {}", short(first)),
                (None, reached) => reached.map_or("not reached".into(), tokens),
            });
            cells.push(against(&arm.later));
        }
        cells
    }

    /// The study as text for a terminal.
    pub fn to_text(&self) -> String {
        let mut out = String::new();
        let heads = self.heads();
        let rows = |panel: &Panel| panel.arms.iter().map(|arm| self.cells(panel, arm)).collect::<Vec<_>>();
        let all: Vec<_> = self.panels.iter().flat_map(rows).collect();
        let width = |n: usize| {
            let own = heads[n].0.chars().count();
            all.iter().map(|cells| cells[n].chars().count()).chain([own]).max().unwrap_or(0)
        };
        let line = |cells: &[String]| {
            let mut line = String::new();
            for (n, cell) in cells.iter().enumerate() {
                let _ = match heads[n].1 {
                    true => write!(line, "{cell:<width$}  ", width = width(n)),
                    false => write!(line, "{cell:>width$}  ", width = width(n)),
                };
            }
            line.trim_end().to_owned() + "\n"
        };
        let titles: Vec<String> = heads.iter().map(|(head, _)| head.clone()).collect();
        for panel in &self.panels {
            if !panel.label.is_empty() {
                out += &format!("{}\n", panel.label);
            }
            out += &line(&titles);
            rows(panel).iter().for_each(|cells| out += &line(cells));
            out.push('\n');
        }
        out + &self.footnote() + "\n" + &self.warned("warning: ")
    }

    /// The warnings, each on a line that begins with `before`.
    fn warned(&self, before: &str) -> String {
        self.warnings.iter().map(|warning| format!("{before}{warning}\n")).collect()
    }

    /// A line that explains the numbers in the tables.
    pub fn footnote(&self) -> String {
        let mut entropies = self.panels.iter().map(Panel::unigram_entropy);
        let entropy = entropies.next().flatten().filter(|first| entropies.all(|other| other == Some(*first)));
        let entropy = entropy.map_or(String::new(), |nats| format!("; unigram entropy {nats:.4}"));
        format!(
            "losses are in nats per token{entropy}; ± is the half-width of a 95 % interval (Student's t) over seeds \
             of finished runs; diverged runs are excluded; differences are over shared seeds, in percent of the \
             baseline's mean; an arm matches if its 90 % interval is within the margin of ± {} %; an arm that does not \
             match is higher or lower if its 95 % interval excludes 0, and otherwise undecided{}",
            self.margin,
            match self.has_training() {
                true =>
                    "; training loss: mean over the last quarter of the steps, on the same batches as the baseline; \
                     growth: slope of its difference over all steps",
                false => "",
            }
        )
    }

    /// The study as Markdown.
    pub fn to_markdown(&self) -> String {
        let mut out = self.about.as_ref().map_or(String::new(), |about| format!("{about}\n\n"));
        for panel in &self.panels {
            if !panel.label.is_empty() {
                out += &format!("**{}**\n\n", cell(&panel.label));
            }
            let heads: Vec<String> = self.heads().into_iter().map(|(head, _)| head).collect();
            out += &format!("| {} |\n|{}\n", heads.join(" | "), "---|".repeat(heads.len()));
            for arm in &panel.arms {
                let cells: Vec<String> = self.cells(panel, arm).iter().map(|text| cell(text)).collect();
                out += &format!("| {} |\n", cells.join(" | "));
            }
            out.push('\n');
        }
        out + &self.footnote() + "\n" + &self.warned("\nWarning: ")
    }

    /// The name of a run's folder, with the parent folder's name if two runs have the same name.
    pub fn name_of(&self, run: &Run) -> String {
        let name = run.name();
        if self.trained().filter(|other| other.name() == name).count() < 2 {
            return name;
        }
        let folder = run.folder.canonicalize().unwrap_or_else(|_| run.folder.clone());
        let parent = folder.parent().and_then(|parent| parent.file_name()).unwrap_or_default();
        format!("{}/{name}", parent.to_string_lossy())
    }

    /// CSV: one line for each run, with every setting in which the runs differ.
    pub fn to_csv(&self) -> String {
        let arms = || self.panels.iter().flat_map(|panel| &panel.arms);
        let mut keys: Vec<&String> = Vec::new();
        for (key, _) in arms().flat_map(|arm| &arm.settings) {
            if !keys.contains(&key) {
                keys.push(key);
            }
        }
        let number = |number: Option<f64>| number.map_or(String::new(), |n| n.to_string());
        let heads = [
            "run",
            "status",
            "steps",
            "tokens",
            "val_loss",
            "late_training_loss",
            "tokens_per_second",
            "weights_seed",
            "order_seed",
            "corpus_seed",
        ];
        // The settings `steps` and `tokens` may differ from the results of the same names, because a run may end early.
        let column = |key: &&String| match heads.contains(&key.as_str()) {
            true => format!("asked_{key}"),
            false => csv_cell(key),
        };
        let head: Vec<String> = heads.map(String::from).into_iter().chain(keys.iter().map(column)).collect();
        let mut out = head.join(",") + "\n";
        let mut seen = BTreeSet::new();
        for arm in arms() {
            for run in
                arm.runs.iter().filter(|run| seen.insert((&run.folder, run.config.eval_scheme.is_some())))
            {
                let [weights, order, corpus] = seeds(run);
                let mut cells = vec![
                    csv_cell(&self.name_of(run)),
                    run.status().map_or("unfinished".into(), |status| status.to_string()),
                    run.steps().to_string(),
                    run.points.last().map_or(0, |point| point.tokens).to_string(),
                    number(run.last_loss().filter(|_| run.status() != Some(Status::Diverged))),
                    number(late_training_loss(run)),
                    number(run.usual_speed()),
                    weights.to_string(),
                    order.to_string(),
                    corpus.to_string(),
                ];
                cells.extend(keys.iter().map(|key| {
                    let value = arm.settings.iter().find(|(other, _)| other == *key);
                    value.map_or(String::new(), |(_, value)| csv_cell(value))
                }));
                out += &(cells.join(",") + "\n");
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_text_or_numbers_and_never_formulas() {
        for (text, cell) in [
            ("fpa", "fpa"),
            ("a, b", "\"a, b\""),
            ("a \"b\"", "\"a \"\"b\"\"\""),
            ("-0.5", "-0.5"),
            ("+1e-3", "+1e-3"),
            ("-", "'-"),
            ("=1+1", "'=1+1"),
            ("@SUM(A1)", "'@SUM(A1)"),
            ("-2+3,x", "\"'-2+3,x\""),
            ("\t=1", "'\t=1"),
        ] {
            assert_eq!(csv_cell(text), cell);
        }
    }
}
