//! A sweep: many runs that differ in a few settings. A sweep is planned from a file or from lists on the
//! command line; child processes run it. Finished runs are skipped, and interrupted runs are resumed.
//!
//! The folder of a sweep is its whole state. `SWEEP/NAME/` is an ordinary run folder, whose settings identify the run.
//! The folder `SWEEP/plan/` has four kinds of entries for a run. `NAME.toml` contains the settings that the run was
//! started with, and `NAME.stderr` the standard error of its process. `NAME.crash.json` is written if the process ended
//! without writing an `ending.json`. `NAME.attempt-N` is the folder of an attempt that could not be resumed. Because
//! there is no other state, several processes, machines and job arrays can work on one sweep.

mod estimate;
mod file;
mod mps;
mod progress;
mod shipped;
mod slurm;
mod state;
mod worker;

use std::collections::BTreeSet;
use std::path::PathBuf;

use candle_sage::{Error, Result};

use crate::config::{Config, Identity, PLAN, differing};

pub use estimate::{Estimate, estimate};
pub use file::Spec;
pub use mps::MpsMode;
pub use progress::Progress;
pub use shipped::SHIPPED;
pub use slurm::script;
pub use state::State;
pub use worker::{Limits, RunCounts, run};

/// One run of a sweep.
#[derive(Debug, Clone)]
pub struct PlannedRun {
    /// The name of the run's folder: the settings that distinguish the run from the others.
    pub name: String,
    /// The resolved settings of the run.
    pub config: Config,
    identity: Identity,
}

/// The runs of a sweep, and the folder that they are written to.
#[derive(Debug, Clone)]
pub struct Sweep {
    /// The folder of the sweep.
    pub folder: PathBuf,
    /// Every distinct run, in the order in which they start: all runs of one seed before the runs of the next seed.
    pub runs: Vec<PlannedRun>,
}

impl Sweep {
    /// Plans a sweep of these runs in `folder`, which does not have to exist. Runs with the same [`Identity`]
    /// compute the same results, and are planned once.
    ///
    /// # Errors
    /// When the folder exists and is not the folder of a sweep.
    pub fn plan(folder: PathBuf, configs: Vec<Config>) -> Result<Self> {
        if folder.exists() && !folder.join(PLAN).is_dir() {
            return Err(Error::new("the folder exists, and does not contain a sweep")
                .got(folder.display())
                .allowed("a new folder, or the folder of an earlier start of this sweep")
                .hint("choose another folder for the sweep with --name"));
        }
        let mut seen = BTreeSet::new();
        let mut kept: Vec<(Config, Identity)> = configs
            .into_iter()
            .map(|config| (config.identity(), config))
            .filter_map(|(identity, config)| seen.insert(identity.clone()).then_some((config, identity)))
            .collect();
        // Sorted by seed: if the sweep stops early, it has run all arms with the first seeds.
        kept.sort_by_key(|(config, _)| {
            (config.seed, config.weights_seed, config.data.order_seed, config.data.corpus_seed)
        });
        let identities: Vec<&Identity> = kept.iter().map(|(_, identity)| identity).collect();
        let names = names(&identities);
        let runs = kept.into_iter().zip(names).map(|((mut config, identity), name)| {
            (config.out, config.settings.run.out) = (folder.clone(), Some(folder.clone()));
            PlannedRun { name, config, identity }
        });
        let runs = runs.collect();
        Ok(Self { folder, runs })
    }

    /// The folder that contains the settings of each run, and the output of its process.
    pub fn plan_folder(&self) -> PathBuf {
        self.folder.join(PLAN)
    }

    /// Whether the runs differ in setting `key`, but no run sets it to `value`.
    pub fn lacks_value(&self, key: &str, value: &toml::Value) -> bool {
        let value = crate::config::as_text(value);
        self.axes().iter().any(|(axis, values)| axis == key && !values.contains(&value))
    }

    /// The settings in which the runs differ. The values of a setting are in the order of the planned runs.
    pub fn axes(&self) -> Vec<(String, Vec<String>)> {
        let identities: Vec<&Identity> = self.runs.iter().map(|run| &run.identity).collect();
        let axis = |key: String| {
            let mut values: Vec<String> = Vec::new();
            for value in identities.iter().filter_map(|identity| identity.get(&key)) {
                if !values.contains(value) {
                    values.push(value.clone());
                }
            }
            (key, values)
        };
        differing(&identities).into_iter().map(axis).collect()
    }
}

/// Longest name of a run in bytes. Longer names are truncated, so that a name with its suffixes (`.attempt-2`,
/// `.crash.json`) stays within the 255 bytes that file systems allow.
const LONGEST_NAME: usize = 180;

/// A folder name for each identity, made of the settings in which the identities differ.
fn names(identities: &[&Identity]) -> Vec<String> {
    let keys = differing(identities);
    let mut names: Vec<String> = Vec::new();
    for identity in identities {
        let parts: Vec<String> = keys.iter().filter_map(|key| Some(part(key, identity.get(key)?))).collect();
        let mut name = if parts.is_empty() { identity["attn"].clone() } else { parts.join("_") };
        // The name is ASCII, so any byte is a character boundary.
        name.truncate(LONGEST_NAME);
        let mut unique = name.clone();
        let mut n = 2;
        while names.contains(&unique) {
            unique = format!("{name}-{n}");
            n += 1;
        }
        names.push(unique);
    }
    names
}

/// One setting as a part of a folder's name: `sagebwd`, `seed-1`, `tokens-per-step-64k`.
fn part(key: &str, value: &str) -> String {
    let plain: String =
        value.chars().map(|c| if c.is_ascii_alphanumeric() || "-.=".contains(c) { c } else { '-' }).collect();
    if key == "attn" { plain } else { format!("{key}-{plain}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{Attn, Settings};

    fn config(text: &str) -> Config {
        let settings: Settings = toml::from_str(text).expect("settings");
        Config::resolve(settings).expect("a run")
    }

    #[test]
    fn names_say_what_differs_and_equal_runs_are_one() {
        let texts = [
            "attn = \"fpa\"\nseed = 1",
            "attn = \"fpa\"\nseed = 1\nsmoothing = \"none\"",
            "attn = \"sagebwd\"\nseed = 1",
            "attn = \"sagebwd\"\nseed = 2\nsmoothing = \"k\"",
            "attn = \"sagebwd\"\nseed = 1\nsmoothing = \"k\"",
            "attn = \"sagebwd\"\nseed = 1\nsmoothing = \"none\"",
        ];
        let sweep = Sweep::plan("nowhere".into(), texts.map(config).to_vec()).expect("a plan");
        let names: Vec<&str> = sweep.runs.iter().map(|run| run.name.as_str()).collect();
        // Unquantized attention has no smoothing, so the first two elements of `texts` describe the same run.
        assert_eq!(
            names,
            [
                "fpa_seed-1",
                "sagebwd_smoothing-k_seed-1",
                "sagebwd_smoothing-none_seed-1",
                "sagebwd_smoothing-k_seed-2"
            ]
        );
        let single = Sweep::plan("nowhere".into(), vec![config("")]).expect("a plan");
        assert_eq!(single.runs[0].name, Attn::from(candle_sage::SageBwd::default()).to_string());
    }

    #[test]
    fn steps_that_follow_from_a_budget_do_not_tell_runs_apart() {
        let at = |tps: &str, tokens: &str| {
            config(&format!("tokens-per-step = \"{tps}\"\ntokens = \"{tokens}\"\nmicro-batch = 8"))
        };
        let equal = Sweep::plan("nowhere".into(), vec![at("4k", "1m"), at("8k", "1m")]).expect("a plan");
        assert_eq!(equal.runs[1].name, "tokens-per-step-8k");
        let runs = vec![at("4k", "1m"), at("4k", "2m"), at("8k", "1m")];
        let other = Sweep::plan("nowhere".into(), runs).expect("a plan");
        assert_eq!(other.runs[0].name, "steps-256_tokens-per-step-4k");
    }
}
