//! A table of attention's errors by layer, with shaded cells.

use maud::{Markup, html};

use super::study::Study;
use crate::metrics::{Probed, QUANTITIES};
use crate::runs::Run;

/// Cells with at least this relative L2 error have the darkest shade.
const DARKEST: f64 = 0.5;

impl Study {
    /// A table for each arm with a probed run: the errors from the last probe of the arm's first probed run.
    pub(super) fn errors(&self) -> Markup {
        let arms = self.panels.iter().flat_map(|panel| panel.arms.iter().map(move |arm| (panel, arm)));
        let probed: Vec<(String, &Run, &Probed)> = arms
            .filter_map(|(panel, arm)| {
                let run = arm.runs.iter().find(|run| !run.probes.is_empty())?;
                let name = if panel.label.is_empty() {
                    arm.label.clone()
                } else {
                    format!("{}, {}", arm.label, panel.label)
                };
                Some((name, run, run.probes.last()?))
            })
            .collect();
        html! {
            @if !probed.is_empty() {
                section aria-labelledby="errors" {
                    h2 id="errors" { "Errors of attention" }
                    p.note {
                        "Relative L2 against unquantized attention on the tensors of each model, layer by layer, at \
                         its last probe: delta, P, dP and dS inside of attention, then its results. A model trained \
                         with unquantized attention is probed with SageBwd."
                    }
                    @for (name, run, probed) in probed {
                        div.scroll tabindex="0" { table {
                            caption {
                                (name) ", " (run.name())
                                @if let Some(step) = probed.step { ", step " (step) }
                                ": " (probed.scheme)
                            }
                            thead { tr { th scope="col" { "layer" } @for name in names(probed) { th.n scope="col" { (name) } } } }
                            tbody { @for row in probed.rows.iter().filter(|row| row.head.is_none()) {
                                tr {
                                    th scope="row" { (row.layer) }
                                    @for name in names(probed) { (cell(row.errors.get(name).map(|error| error.relative_l2))) }
                                }
                            } }
                        } }
                    }
                }
            }
        }
    }
}

fn names(probed: &Probed) -> Vec<&'static str> {
    let has = |name: &&str| probed.rows.iter().any(|row| row.errors.contains_key(*name));
    QUANTITIES.into_iter().filter(has).collect()
}

/// A cell with `error` on a shade of orange. Black and white text are readable on every shade.
fn cell(error: Option<f64>) -> Markup {
    let shade = error.map_or(0.0, |error| (error / DARKEST).sqrt().min(1.0) * 70.0);
    html! {
        td.n style=(format!("background: color-mix(in srgb, #d55e00 {shade:.0}%, transparent)")) {
            (error.map_or("-".into(), |error| format!("{error:.4}")))
        }
    }
}
