//! Many runs that differ in a few settings: planned from a file or from lists on the command line, run by child processes,
//! skipped where they are finished, resumed where they were cut off.
//!
//! The state of a sweep is its folder and nothing else: `SWEEP/NAME/` is the folder of a run like any other, and is
//! known by its settings; `SWEEP/plan/NAME.toml` says what it is asked to be, `NAME.stderr` what it said there,
//! `NAME.crash.json` that its process ended without a word, and `NAME.attempt-N` is what a start left that could not be
//! resumed. So processes, machines and job arrays can share one.

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
pub use mps::Sharing;
pub use progress::Progress;
pub use shipped::SHIPPED;
pub use slurm::script;
pub use state::State;
pub use worker::{Limits, Tally, run};

/// A run of a sweep.
#[derive(Debug, Clone)]
pub struct Planned {
    /// What differs, as the name of a folder.
    pub name: String,
    /// What to run.
    pub config: Config,
    identity: Identity,
}

/// Runs, and where they go.
#[derive(Debug, Clone)]
pub struct Sweep {
    /// The folder of the sweep.
    pub folder: PathBuf,
    /// Every run once, in the order in which they begin: all of one seed before the next.
    pub runs: Vec<Planned>,
}

impl Sweep {
    /// A sweep of these runs in a folder, which does not have to exist. Runs that compute the same are one.
    ///
    /// # Errors
    /// When the folder is something else than a sweep's.
    pub fn plan(folder: PathBuf, configs: Vec<Config>) -> Result<Self> {
        if folder.exists() && !folder.join(PLAN).is_dir() {
            return Err(Error::new("the folder is not that of a sweep")
                .got(folder.display())
                .allowed("a new folder, or that of an earlier start of this sweep")
                .hint("--name gives the sweep another folder"));
        }
        let mut seen = BTreeSet::new();
        let mut kept: Vec<(Config, Identity)> = configs
            .into_iter()
            .map(|config| (config.identity(), config))
            .filter_map(|(identity, config)| seen.insert(identity.clone()).then_some((config, identity)))
            .collect();
        // Whatever ends early ends with whole comparisons.
        kept.sort_by_key(|(config, _)| {
            (config.seed, config.weights_seed, config.data.order_seed, config.data.corpus_seed)
        });
        let identities: Vec<&Identity> = kept.iter().map(|(_, identity)| identity).collect();
        let names = names(&identities);
        let runs = kept.into_iter().zip(names).map(|((mut config, identity), name)| {
            (config.out, config.settings.out) = (folder.clone(), Some(folder.clone()));
            Planned { name, config, identity }
        });
        let runs = runs.collect();
        Ok(Self { folder, runs })
    }

    /// Where it says what was asked for.
    pub fn plan_folder(&self) -> PathBuf {
        self.folder.join(PLAN)
    }

    /// The settings that differ between runs, and their values, in the order of the plan.
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

/// Longer names are cut: with their endings they must fit what file systems take.
const LONGEST_NAME: usize = 180;

/// What distinguishes each of these, as the name of a folder.
fn names(identities: &[&Identity]) -> Vec<String> {
    let keys = differing(identities);
    let mut names: Vec<String> = Vec::new();
    for identity in identities {
        let parts: Vec<String> = keys.iter().filter_map(|key| Some(part(key, identity.get(key)?))).collect();
        let mut name = if parts.is_empty() { identity["attn"].clone() } else { parts.join("_") };
        // It is ASCII.
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

/// A setting in the name of a folder: `sagebwd`, `seed-1`, `tokens-per-step-64k`.
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
        // Full precision has neither smoothing nor granularity: they do not tell it from the others.
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
