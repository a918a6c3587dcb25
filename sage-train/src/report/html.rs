//! A study as one self-contained HTML file: charts, tables, and the provenance of the runs.

use std::path::Path;

use candle_sage::{Result, Scheme, Smoothing};
use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::arm::Arm;
use super::chart::{STYLE, short};
use super::figures::SPIKE;
use super::statistics::Verdict;
use super::study::{Panel, Study};
use super::table::speed;
use crate::partial;
use crate::quantity::{counted, grouped};
use crate::runs::{Run, Start, Status, median, own_steps};
use crate::settings::Attn;
use crate::writing;

const PAGE: &str = "
:root { color-scheme: light dark; --paper: #ffffff; --ink: #222222; --soft: #5f5f5f; --line: #d8d8d8; --shade: #f5f5f5; }
@media (prefers-color-scheme: dark) { @media screen {
  :root { --paper: #16181c; --ink: #e4e4e4; --soft: #a8a8a8; --line: #33363c; --shade: #1f2227; }
} }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { font-size: 1.25rem; margin-top: 2.5rem; } h3 { font-size: 1rem; }
a { color: inherit; } nav a { margin-right: 1rem; }
:focus-visible { outline: 3px solid #0072B2; outline-offset: 2px; }
.skip { position: absolute; left: -100rem; } .skip:focus { position: static; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; margin: .8rem 0; }
caption { text-align: left; color: var(--soft); padding-bottom: .3rem; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; white-space: nowrap; }
td.n, th.n { text-align: right; } td.wrap { white-space: normal; min-width: 16rem; }
thead th { border-bottom: 2px solid var(--soft); }
tbody tr:nth-child(even) { background: var(--shade); } tbody th { font-weight: normal; }
.warning { border-left: 4px solid #D55E00; padding-left: .8rem; }
figure { margin: 1rem 0; } figcaption, .note { color: var(--soft); font-size: .92rem; }
code { font-size: .88em; } pre { white-space: pre-wrap; overflow-wrap: anywhere; }
details { margin: .4rem 0; } summary { cursor: pointer; }
@media (max-width: 45rem) { body { padding: .8rem; } h1 { font-size: 1.3rem; } figure svg { min-width: 40rem; } td.wrap { min-width: 11rem; } }
@media print { body { max-width: none; padding: 0; } figure, tr { break-inside: avoid; } nav { display: none; } details > * { display: block; } }
";

/// The default file name of the page.
pub const REPORT: &str = "report.html";

/// The generator in the page's metadata.
pub const GENERATOR: &str = "sage-train report";

impl Study {
    /// Writes the page.
    ///
    /// # Errors
    /// When a chart cannot be drawn, or the file cannot be written.
    pub fn write_html(&self, path: &Path) -> Result<()> {
        let page = self.to_html()?;
        partial::file(path, |partial| std::fs::write(partial, &page).map_err(writing(partial)))
    }

    /// The page.
    ///
    /// # Errors
    /// When a chart cannot be drawn.
    pub fn to_html(&self) -> Result<String> {
        let title = self.about.as_deref().unwrap_or("Comparison of runs");
        let panels: Vec<Markup> =
            self.panels.iter().enumerate().map(|(n, panel)| self.panel(n, panel)).collect::<Result<_>>()?;
        let page = html! {
            (DOCTYPE)
            html lang="en" {
                head {
                    meta charset="utf-8";
                    meta name="viewport" content="width=device-width, initial-scale=1";
                    meta name="generator" content=(GENERATOR);
                    title { (title) }
                    style { (PreEscaped(PAGE)) (PreEscaped(STYLE)) }
                }
                body {
                    a.skip href="#results" { "Skip to the results" }
                    h1 { (title) }
                    (self.summary())
                    nav aria-label="Sections" {
                        @for (n, panel) in self.panels.iter().enumerate() {
                            a href=(format!("#panel-{n}")) { (heading(panel)) }
                        }
                        a href="#speed" { "Speed" } a href="#runs" { "Runs" }
                    }
                    main #results {
                        @for panel in panels { (panel) }
                        (self.paper())
                        (self.errors())
                        (self.speed())
                        (self.provenance())
                    }
                }
            }
        };
        Ok(page.into_string())
    }

    fn summary(&self) -> Markup {
        let sentence = |panel: &Panel, arm: &Arm| -> Option<String> {
            let (difference, baseline) = (arm.difference?, &panel.arms.first()?.label);
            let place = panel.place();
            let numbers = difference.numbers() + &difference.pairs();
            Some(match difference.verdict {
                Verdict::Matches => {
                    format!("{} matches {baseline} within {} %: {numbers}{place}.", arm.label, self.margin)
                }
                Verdict::Higher => {
                    format!("{} ends with a higher loss than {baseline}: {numbers}{place}.", arm.label)
                }
                Verdict::Lower => {
                    format!("{} ends with a lower loss than {baseline}: {numbers}{place}.", arm.label)
                }
                Verdict::Undecided => {
                    format!("{} against {baseline} is undecided: {numbers}{place}.", arm.label)
                }
                Verdict::OneSeed => {
                    format!("{} against {baseline}: {numbers}, from only one seed{place}.", arm.label)
                }
            })
        };
        let lost = |panel: &Panel, arm: &Arm| -> Option<String> {
            let short = arm.count(Status::Finished) < arm.runs.len();
            short.then(|| {
                format!("{}: {} of {} runs{}.", arm.label, arm.outcomes(), arm.runs.len(), panel.place())
            })
        };
        let each = || self.panels.iter().flat_map(|panel| panel.arms.iter().map(move |arm| (panel, arm)));
        let sentences: Vec<String> = each()
            .filter_map(|(panel, arm)| lost(panel, arm))
            .chain(each().filter_map(|(panel, arm)| sentence(panel, arm)))
            .collect();
        html! {
            p.note { (counted(self.trained().count() as u64, "run")) ". " (self.footnote()) "." }
            @for warning in &self.warnings { p.warning { strong { "Warning: " } (warning) "." } }
            @if !sentences.is_empty() { ul { @for sentence in sentences { li { (sentence) } } } }
        }
    }

    fn panel(&self, n: usize, panel: &Panel) -> Result<Markup> {
        let figures = panel.figures()?;
        Ok(html! {
            section aria-labelledby=(format!("panel-{n}")) {
                h2 id=(format!("panel-{n}")) { (heading(panel)) }
                @for figure in figures {
                    figure {
                        div.scroll role="img" tabindex="0" aria-label=(format!("{}, {}", figure.title, heading(panel))) { (PreEscaped(figure.svg)) }
                        figcaption { (figure.caption) }
                    }
                }
                div.scroll tabindex="0" {
                    table {
                        caption { "At the end" }
                        thead { tr {
                            @for (head, words) in self.heads() { th.n[!words] scope="col" { (head) } }
                        } }
                        tbody { @for arm in &panel.arms {
                            tr { @for (n, (cell, (_, words))) in self.cells(panel, arm).iter().zip(self.heads()).enumerate() {
                                @if n == 0 { th scope="row" { (cell) } } @else { td.n[!words] { (cell) } }
                            } }
                        } }
                    }
                }
            }
        })
    }

    /// This study's results next to the published ones.
    fn paper(&self) -> Markup {
        let rows: Vec<[String; 3]> = PUBLISHED
            .iter()
            .filter_map(|row| Some([row.arm.to_owned(), row.claim.to_owned(), self.our_result(row)?]))
            .collect();
        html! {
            @if !rows.is_empty() {
                section aria-labelledby="paper" {
                    h2 id="paper" { "Comparison with the paper" }
                    div.scroll tabindex="0" { table {
                        caption {
                            "SageBwd (arXiv 2603.02170, section 5): 325M parameters, 78 billion tokens, one run each. \
                             Final loss, and its difference to unquantized attention at the same tokens per step; \
                             here both runs have QK-norm, or neither has it."
                        }
                        thead { tr { th scope="col" { "arm" } th scope="col" { "paper" } th scope="col" { "here" } } }
                        tbody { @for row in rows { tr { @for cell in row { td.wrap { (cell) } } } } }
                    } }
                }
            }
        }
    }

    /// The result of our first arm that has the settings of the published run `row`.
    fn our_result(&self, row: &Published) -> Option<String> {
        let tokens = |arm: &Arm| arm.runs.first().map_or(0, |run| run.config.tokens_per_step());
        let arms =
            || self.panels.iter().flat_map(|panel| panel.arms.iter().map(move |arm| (&panel.arms[0], arm)));
        let sizes = || arms().map(|(_, arm)| tokens(arm));
        let (least, most) = (sizes().min()?, sizes().max()?);
        // `first` is the baseline of `arm` if it is unquantized and has the same tokens per step and `qk_norm`.
        let of_row = |(first, arm): &(&Arm, &Arm)| {
            let (Some(own), Some(base)) = (arm.runs.first(), first.runs.first()) else { return false };
            let (own, base) = (&own.config, &base.config);
            let k_alone =
                matches!(own.model.scheme, Some(Scheme::SageBwd(sage)) if sage.smoothing == Smoothing::K);
            let twin = base.attn == Attn::EXACT
                && base.model.qk_norm == own.model.qk_norm
                && tokens(first) == tokens(arm);
            least < most
                && k_alone
                && twin
                && own.model.qk_norm == row.qk_norm
                && tokens(arm) == if row.many { most } else { least }
        };
        let (_, arm) = arms().find(of_row)?;
        let diverged = arm.count(Status::Diverged);
        let tokens = format!("{} tokens a step", short(tokens(arm) as f64));
        match (diverged, arm.difference) {
            (0, None) => None,
            (0, Some(difference)) => {
                Some(format!("{} ({}), {tokens}", difference.numbers(), difference.conclusion(self.margin)))
            }
            (n, _) => Some(format!("{n} of {} runs diverged, {tokens}", arm.runs.len())),
        }
    }

    fn speed(&self) -> Markup {
        let median = |arm: &Arm, number: fn(&crate::metrics::Point) -> Option<f64>| {
            let finished = arm.runs.iter().filter(|run| run.status() == Some(Status::Finished));
            median(finished.flat_map(|run| own_steps(&run.config, &run.points)).filter_map(number))
        };
        let cell =
            |number: Option<f64>, digits: usize| number.map_or("-".into(), |n| format!("{n:.digits$}"));
        html! {
            section aria-labelledby="speed" {
                h2 id="speed" { "Speed" }
                div.scroll tabindex="0" { table {
                    caption { "Medians over the steps of finished runs, which a slow first step or a validation does \
                               not affect. Concurrent runs on one device share its speed and power." }
                    thead { tr {
                        th scope="col" { "arm" }
                        @for head in ["tokens/s", "ms a step", "GPU GiB", "watts", "MHz", "MFU %"] { th.n scope="col" { (head) } }
                    } }
                    tbody { @for panel in &self.panels { @for arm in &panel.arms {
                        tr {
                            th scope="row" { (arm.label) @if !panel.label.is_empty() { ", " (panel.label) } }
                            td.n { (arm.speed.map_or("-".into(), speed)) }
                            td.n { (cell(arm.speed.zip(arm.runs.first()).map(|(speed, run)| 1e3 * run.config.tokens_per_step() as f64 / speed.value), 2)) }
                            td.n { (cell(median(arm, |point| point.gpu_gib), 1)) }
                            td.n { (cell(median(arm, |point| point.gpu_watts), 0)) }
                            td.n { (cell(median(arm, |point| point.gpu_mhz), 0)) }
                            td.n { (cell(median(arm, |point| point.mfu).map(|mfu| 100.0 * mfu), 1)) }
                        }
                    } } }
                } }
            }
        }
    }

    fn provenance(&self) -> Markup {
        html! {
            section aria-labelledby="runs" {
                h2 id="runs" { "Runs" }
                div.scroll tabindex="0" { table {
                    thead { tr { @for head in ["run", "status", "steps", "val loss", "spikes"] { th scope="col" { (head) } } } }
                    tbody { @for run in self.trained() { tr {
                        th scope="row" { (self.name_of(run)) }
                        td.wrap { (status(run)) }
                        td.n { (grouped(run.steps())) " / " (grouped(run.config.steps)) }
                        td.n { (run.last_loss().map_or("-".into(), |loss| format!("{loss:.4}"))) }
                        td.n { (spikes(run)) }
                    } } }
                } }
                h3 { "Where they ran" }
                @for run in self.trained() {
                    details {
                        summary { (self.name_of(run)) }
                        @for start in &run.starts { (start_of(start)) }
                        pre tabindex="0" { (run.config.to_toml()) }
                    }
                }
            }
        }
    }
}

fn heading(panel: &Panel) -> &str {
    if panel.label.is_empty() { "Results" } else { &panel.label }
}

/// The number of loss spikes; a dash for a run with too few steps to tell spikes from noise.
fn spikes(run: &Run) -> String {
    let known: Vec<f64> = run.points.iter().filter_map(|point| point.loss_z).collect();
    if known.is_empty() { "-".into() } else { known.iter().filter(|z| **z > SPIKE).count().to_string() }
}

/// How a run ended, and why.
fn status(run: &Run) -> String {
    let reason =
        run.ending.as_ref().and_then(|ending| ending.reason.as_deref()).and_then(|text| text.lines().next());
    let status = run.status().map_or("unfinished".into(), |status| status.to_string());
    reason.map_or(status.clone(), |reason| format!("{status}: {reason}"))
}

fn start_of(start: &Start) -> Markup {
    let commit = start.commit.as_deref().unwrap_or("unknown");
    html! {
        p.note {
            (start.hardware) " of " (start.host) ", sage-train " (start.version) " (commit " (commit) "), from step "
            (grouped(start.step)) "; " (start.data) " (" (start.data_fingerprint.get(..12).unwrap_or_default()) "); "
            (grouped(start.parameters)) " parameters"
        }
        pre tabindex="0" { (start.command.join(" ")) }
    }
}

struct Published {
    arm: &'static str,
    qk_norm: bool,
    /// Whether the published run has 2.1M tokens per step, and not 260K.
    many: bool,
    claim: &'static str,
}

const PUBLISHED: [Published; 4] = [
    Published {
        arm: "SageBwd, many tokens a step, QK-norm",
        qk_norm: true,
        many: true,
        claim: "2.640 against 2.586: +2.09 % at 2.1M tokens a step",
    },
    Published {
        arm: "SageBwd, many tokens a step, no QK-norm",
        qk_norm: false,
        many: true,
        claim: "diverges at 2.1M tokens a step",
    },
    Published {
        arm: "SageBwd, few tokens a step, QK-norm",
        qk_norm: true,
        many: false,
        claim: "2.561 against 2.563: -0.08 % at 260K tokens a step",
    },
    Published {
        arm: "SageBwd, few tokens a step, no QK-norm",
        qk_norm: false,
        many: false,
        claim: "matches within noise at 260K tokens a step (a figure without numbers)",
    },
];
