//! The description of a sweep: a TOML file, or lists of values on the command line.

use std::path::Path;

use candle_sage::{Error, Result};
use serde::Deserialize;
use toml::{Table, Value};

use crate::config::{Config, MOST_SETTINGS, short_message};
use crate::quantity::Quantity;
use crate::settings::tables::flat;
use crate::settings::{Preset, Settings};
use crate::{during, read_small};

/// The description of a sweep.
///
/// ```toml
/// about = "Does INT8 cost anything?"
/// [settings]             # of all runs
/// preset = "tiny"
/// [grid]                 # all combinations of these lists
/// tokens-per-step = ["4k", "32k"]
/// seed = [1, 2, 3]
/// [[points]]             # a set of settings that is run with each combination of the grid
/// attn = "fpa"
/// [[points]]
/// attn = "sagebwd"
/// smoothing = ["none", "k"]  # a list: one set of settings for each value
/// ```
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct Spec {
    /// The question that the sweep answers, as a title.
    pub about: Option<String>,
    /// Settings that the command line must set, for example `["data", "init-from"]`.
    pub needs: Vec<String>,
    /// How to get values for the settings in `needs`. This is the hint of the error about a missing setting.
    pub needs_hint: Option<String>,
    /// Settings that identify the baseline arm, for example `{ attn = "fpa" }`.
    pub baseline: Table,
    /// Settings of all runs.
    pub settings: Table,
    /// Lists of values; all combinations of them are run.
    pub grid: Table,
    /// Sets of settings. Each set is run with each combination of the values in `grid`.
    pub points: Vec<Table>,
}

impl Spec {
    /// Reads a file.
    ///
    /// # Errors
    /// When the file cannot be read, or is not the description of a sweep.
    pub fn read(path: &Path) -> Result<Self> {
        let text = read_small(path, MOST_SETTINGS)
            .map_err(during(format!("cannot read the sweep in {}", path.display())))
            .map_err(|error| error.hint("name a TOML file, or a built-in sweep: see --help"))?;
        Self::parse(&text, &path.display().to_string())
    }

    /// Parses the text of a file. Messages refer to the file as `name`.
    ///
    /// # Errors
    /// When the text is not the description of a sweep.
    pub fn parse(text: &str, name: &str) -> Result<Self> {
        let spec: Self = toml::from_str(text).map_err(|error| {
            Error::new(format!("cannot use the sweep in {name}"))
                .got(short_message(&error))
                .allowed("the keys about, baseline, needs, needs-hint; the tables [settings], [grid], [[points]]")
                .hint("keys of [settings], [grid] and [[points]] are the long flags without the leading `--`, e.g. seed = [1, 2, 3]")
        })?;
        Ok(Self {
            settings: flat(spec.settings, &format!("[settings] of {name}"))?,
            grid: flat(spec.grid, &format!("[grid] of {name}"))?,
            points: spec
                .points
                .into_iter()
                .map(|point| flat(point, &format!("[[points]] of {name}")))
                .collect::<Result<_>>()?,
            baseline: flat(spec.baseline, &format!("baseline of {name}"))?,
            ..spec
        })
    }

    /// The settings of every run. `over` are settings from the command line, which override the file's, and `lists` are
    /// lists from the command line, which replace the file's values for their keys.
    ///
    /// # Errors
    /// When a key is not a setting, a value is invalid for its setting, a list is empty, or there are more than 10,000
    /// runs.
    pub fn runs(&self, over: &Settings, lists: &Table) -> Result<Vec<Settings>> {
        // Removes the keys for which the command line has a list. An `attn` that is not a list stays: from it,
        // `merged` decides whether the attention settings of the same table apply to a run.
        let plain = |table: &Table| -> Table {
            let whose = |key: &str, value: &Value| key == "attn" && !value.is_array();
            let free = table.iter().filter(|(key, value)| !lists.contains_key(*key) || whose(key, value));
            free.map(|(key, value)| (key.clone(), value.clone())).collect()
        };
        let shared = settings(&plain(&self.settings), "[settings]")?;
        let whole = vec![Table::new()];
        let points = if self.points.is_empty() { &whole } else { &self.points };
        let points: Vec<Table> = points.iter().map(plain).collect();
        let grid = plain(&self.grid);
        let count = |table: &Table| table.values().map(length).fold(1, usize::saturating_mul);
        let of_points = points.iter().map(count).fold(0, usize::saturating_add);
        let all = of_points.saturating_mul(count(&grid)).saturating_mul(count(lists));
        if all > MOST_RUNS {
            return Err(Error::new("the sweep has too many runs")
                .got(all)
                .allowed(format!("at most {MOST_RUNS}"))
                .hint(
                    "every list multiplies the number of runs; in a sweep's file, [[points]] list single \
                     combinations",
                ));
        }
        let (grid, typed) = (combinations(&grid, "[grid]")?, combinations(lists, "the command line")?);
        let mut runs = Vec::with_capacity(all);
        for point in &points {
            for of_point in combinations(point, "[[points]]")? {
                for of_grid in &grid {
                    for of_typed in &typed {
                        let layers = [
                            over.clone(),
                            settings(of_typed, "the command line")?,
                            settings(&of_point, "[[points]]")?,
                            settings(of_grid, "[grid]")?,
                            shared.clone(),
                        ];
                        runs.push(with_equal_budget(merged(layers)));
                    }
                }
            }
        }
        self.check_needs(&runs)?;
        Ok(runs)
    }

    fn check_needs(&self, runs: &[Settings]) -> Result<()> {
        let lacks = |key: &&String| {
            runs.iter().any(|run| Table::try_from(run).is_ok_and(|run| !run.contains_key(key.as_str())))
        };
        let Some(key) = self.needs.iter().find(lacks) else { return Ok(()) };
        Err(Error::new("the sweep needs settings from the command line")
            .got(format!("no --{key}"))
            .allowed(self.needs.iter().map(|key| format!("--{key}")).collect::<Vec<_>>().join(", "))
            .hint(self.needs_hint.as_deref().unwrap_or("--print shows the file and its purpose")))
    }
}

/// More runs than this are probably a mistake, and are rejected.
const MOST_RUNS: usize = 10_000;

/// Merges layers of settings; earlier layers have priority. A layer whose `attn` differs from the merged `attn`
/// contributes no attention settings except `qk_norm`. Here, all variants of SLA2 count as the same `attn`.
fn merged(layers: [Settings; 5]) -> Settings {
    let attn = layers.iter().find_map(|layer| layer.attention.attn);
    let only = Settings::with(|s| s.attention.attn = attn);
    let meant = layers.into_iter().map(|layer| {
        let mut meant = only.clone().over(layer);
        meant.attention.attn = None;
        meant
    });
    let mut merged = meant.reduce(Settings::over).unwrap_or_default();
    merged.attention.attn = attn;
    merged
}

fn settings(table: &Table, place: &str) -> Result<Settings> {
    Settings::deserialize(table.clone()).map_err(|error| {
        Error::new(format!("invalid settings of the sweep, in {place}"))
            .got(short_message(&error))
            .allowed("keys and values, where a key is a long flag of sage-train without the leading `--`")
            .hint("in a file, lists of values belong in [grid] or [[points]]")
    })
}

fn length(value: &Value) -> usize {
    value.as_array().map_or(1, Vec::len)
}

/// One table for each way to choose one value from every list in `table`.
fn combinations(table: &Table, place: &str) -> Result<Vec<Table>> {
    let mut all = vec![Table::new()];
    for (key, value) in table {
        let one = std::slice::from_ref(value);
        let values = value.as_array().map_or(one, Vec::as_slice);
        if values.is_empty() {
            return Err(Error::new("a list of the sweep is empty")
                .got(format!("{key} = [], in {place}"))
                .allowed("at least one value for each setting")
                .hint("leave the setting out for its default"));
        }
        let with = |under: Table| {
            values.iter().map(move |value| {
                let mut table = under.clone();
                table.insert(key.clone(), value.clone());
                table
            })
        };
        all = all.into_iter().flat_map(with).collect();
    }
    Ok(all)
}

/// Number of validations of a run that does not set their frequency: enough for a curve.
const VALIDATIONS: u64 = 20;

/// Runs that do not set their length train on their preset's default number of tokens, so runs with more tokens per
/// step have fewer steps, as in the SageBwd paper. If a run does not set `eval-every`, it has about
/// [`VALIDATIONS`] validations, and its `checkpoint-every` defaults to the preset's `eval-every`.
fn with_equal_budget(mut run: Settings) -> Settings {
    let preset = Config::defaults(run.run.preset.unwrap_or(Preset::Tiny));
    let value = |quantity: Option<Quantity>| quantity.map_or(1, |quantity| quantity.0.max(1));
    let usual = value(preset.batch.tokens_per_step);
    if run.batch.steps.is_none() && run.batch.tokens.is_none() {
        run.batch.tokens = Some(Quantity(value(preset.batch.steps) * usual));
    }
    if run.run.eval_every.is_none() {
        let step = run.batch.tokens_per_step.map_or(usual, |tokens| tokens.0.max(1));
        let steps = run.batch.steps.map_or_else(|| value(run.batch.tokens) / step, |steps| steps.0);
        run.run.eval_every = Some(Quantity((steps / VALIDATIONS).max(1)));
        run.run.checkpoint_every = run.run.checkpoint_every.or(preset.run.eval_every);
    }
    // By default, runs of a sweep generate no sample text.
    run.run.sample_tokens = run.run.sample_tokens.or(Some(0));
    run
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::SmoothingSetting;

    const TEXT: &str = r#"
        about = "?"
        baseline = { attn = "fpa" }
        [settings]
        preset = "mini"
        lr = 1e-3
        [grid]
        tokens-per-step = ["8k", "64k"]
        seed = [1, 2]
        [[points]]
        attn = "fpa"
        [[points]]
        attn = "sagebwd"
        smoothing = ["none", "k"]
        lr = 2e-3
    "#;

    #[test]
    fn points_run_with_the_whole_grid_at_equal_budgets() {
        let spec = Spec::parse(TEXT, "text").expect("a sweep");
        let runs = spec.runs(&Settings::default(), &Table::new()).expect("runs");
        assert_eq!(runs.len(), 3 * 4);
        assert_eq!(runs.iter().filter(|run| run.optimizer.lr == Some(2e-3)).count(), 8);
        for run in &runs {
            let config = Config::resolve(run.clone()).expect("a run");
            assert_eq!(config.steps * config.tokens_per_step(), 200 * 8192);
            assert_eq!(config.eval_every, (config.steps / 20).max(1));
        }
        // A list of seeds on the command line replaces the file's.
        let lists: Table = toml::from_str("seed = [7, 8, 9]").expect("a table");
        let over = Settings::with(|s| s.batch.tokens = Some(Quantity(1 << 20)));
        let runs = spec.runs(&over, &lists).expect("runs");
        assert_eq!(runs.len(), 3 * 2 * 3);
        assert!(runs.iter().all(|run| run.run.seed >= Some(7) && run.batch.tokens == over.batch.tokens));
    }

    #[test]
    fn what_is_no_setting_is_refused_with_its_place() {
        for (text, place) in [
            ("[settings]\nlr = [1e-3, 2e-3]", "[settings]"),
            ("[grid]\nlearning-rate = [1e-3]", "[grid]"),
            ("[[points]]\nattn = \"sage\"", "[[points]]"),
            ("[[points]]\nattn = \"fpa\"\n[[points]]\nseed = []", "seed = [], in [[points]]"),
        ] {
            let spec = Spec::parse(text, "text").expect("TOML");
            let error = spec.runs(&Settings::default(), &Table::new()).expect_err(text).to_string();
            assert!(error.contains(place) && error.contains("hint:"), "{error}");
        }
        assert!(Spec::parse("[grids]", "text").is_err());
        let ten: Vec<i64> = (1..=10).collect();
        let axes = ["seed", "weights-seed", "order-seed", "corpus-seed", "layers"];
        let huge: Table = axes.iter().map(|key| ((*key).to_owned(), ten.clone().into())).collect();
        let spec = Spec { grid: huge, ..Spec::default() };
        let error = spec.runs(&Settings::default(), &Table::new()).expect_err("too many").to_string();
        assert!(error.contains("100000"), "{error}");
    }

    #[test]
    fn messages_about_attention_name_the_runs_scheme() {
        let spec = |text: &str| Spec::parse(text, "text").expect("a sweep");
        let runs = |text: &str| spec(text).runs(&Settings::default(), &Table::new()).expect("runs");
        let runs = runs(
            "[settings]\nattn = \"fpa\"\n[grid]\nsmoothing = [\"none\", \"qk\"]\n[[points]]\nattn = \"sagebwd\"",
        );
        let smoothing: Vec<_> = runs.iter().map(|run| run.attention.smoothing).collect();
        assert_eq!(smoothing, [Some(SmoothingSetting::None), Some(SmoothingSetting::Qk)]);
        // The file describes one run, and the command line lists two schemes: the file's smoothing applies only to the
        // file's scheme.
        let file = spec("[settings]\nattn = \"sagebwd\"\nsmoothing = \"k\"\nlr = 1e-3");
        let lists: Table = toml::from_str("attn = [\"sagebwd\", \"attn-qat\"]").expect("a table");
        let runs = file.runs(&Settings::default(), &lists).expect("runs");
        let smoothing: Vec<_> = runs.iter().map(|run| (run.attention.smoothing, run.optimizer.lr)).collect();
        assert_eq!(smoothing, [(Some(SmoothingSetting::K), Some(1e-3)), (None, Some(1e-3))]);
    }
}
