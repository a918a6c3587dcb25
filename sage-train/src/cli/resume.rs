//! Resuming a run.

use std::path::Path;

use candle_sage::{Error, Result};
use toml::{Table, Value};

use crate::checkpoint::FoundCheckpoint;
use crate::config::{Branch, Config, folder_of_runs, of_attention};
use crate::during;
use crate::ranks::Rank;
use crate::runs;
use crate::settings::{Role, Settings, SourceSetting, has_role, keys_with};

#[derive(Debug)]
pub(super) struct Resumed {
    pub(super) config: Config,
    pub(super) found: FoundCheckpoint,
}

impl Resumed {
    /// Finds the checkpoint, and overrides the settings of its run with `typed`. `branch` is the name of a new run that
    /// continues from the checkpoint, possibly with another attention scheme.
    pub(super) fn open(path: &Path, mut typed: Settings, branch: Option<&str>, rank: Rank) -> Result<Self> {
        let found = FoundCheckpoint::at(path, rank)?;
        let path = found.run.join("config.toml");
        let saved = match branch {
            None => Config::read_last_settings(&path)?,
            Some(_) => Config::read_settings_at(&path, found.manifest.step)?,
        };
        let (moved, data) = (&mut typed.data, &saved.data);
        moved.sources = with_weights(moved.sources.take(), data.sources.as_ref())?;
        moved.val_data = with_weights(moved.val_data.take(), data.val_data.as_ref())?;
        let mut merged = typed.over(saved.clone());
        let (before, after) = (table(&saved)?, table(&merged)?);
        let may = |key: &str| {
            has_role(key, Role::Resumable)
                || branch.is_some() && of_attention(key) && !key.starts_with("sla2-")
        };
        if let Some(key) = changed(&before, &after).find(|key| !may(key)) {
            let show = |table: &Table| table.get(key).map_or("not set".into(), Value::to_string);
            return Err(Error::new(format!("--{key} cannot change when a run is resumed"))
                .got(format!("{} now, {} in the run", show(&after), show(&before)))
                .allowed(format!("changes of {}", keys_with(Role::Resumable).join(", ")))
                .hint(match key {
                    "out" | "name" => {
                        "a run continues in its folder; --new-name NAME begins another run from its checkpoint"
                    }
                    key if branch.is_none() && of_attention(key) => {
                        "--new-name NAME begins a new run from this checkpoint; the new run may have another --attn"
                    }
                    _ => "for another model or other data begin a new run, with --init-from for the weights of this \
                          run",
                }));
        }
        merged.run.name = branch.map(str::to_owned);
        let before = Config::resolve(saved)?;
        found.manifest.check_settings(&found.run, &before)?;
        let mut config = Config::resolve(merged)?;
        config.branch = runs::branch(&found.run)?;
        if branch.is_some() {
            if before.attn != config.attn && !(before.attn.is_dense() && config.attn.is_dense()) {
                return Err(Error::new("the run's weights do not fit this attention")
                    .got(format!("--attn {} now, {} in the run", config.attn, before.attn))
                    .allowed("a change between dense schemes: fpa, sagebwd, attn-qat")
                    .hint(format!(
                        "begin a new run that starts from the run's weights: --init-from RUN --attn {}",
                        config.attn
                    )));
            }
            let run = found.run.display().to_string();
            config.branch =
                Some(Branch::new(run, found.manifest.step, &before.identity(), &config.identity()));
        }
        // The run may have been moved since it was created.
        if let Some(parent) = found.run.parent() {
            (config.out, config.data.out) = (parent.to_owned(), folder_of_runs(parent));
        }
        if config.data.tokenizer.is_some() {
            // The run uses its own copy of the tokenizer, because the original may be deleted. `config.settings` keeps
            // the original path, which is part of the run's identity.
            config.data.tokenizer = Some(found.run.join("tokenizer.json").display().to_string());
        }
        Ok(Self { config, found })
    }
}

/// Copies the mixture weights of the run's `saved` data sources to the sources that the user `typed`: when a run is
/// resumed, only the paths of its data may change.
fn with_weights(
    typed: Option<Vec<SourceSetting>>,
    saved: Option<&Vec<SourceSetting>>,
) -> Result<Option<Vec<SourceSetting>>> {
    let (Some(mut typed), Some(saved)) = (typed.clone(), saved) else { return Ok(typed) };
    let weights = |all: &[SourceSetting]| all.iter().map(|source| source.weight).collect::<Vec<_>>();
    let (new, old) = (weights(&typed), weights(saved));
    if new.len() != old.len() || (new.iter().any(Option::is_some) && new != old) {
        let show = |all: &[SourceSetting]| all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        return Err(Error::new("when a run is resumed, the paths of its data may change, but not the data")
            .got(format!("{} sources: {}", new.len(), show(&typed)))
            .allowed(format!("{} sources, with the weights of {}", old.len(), show(saved)))
            .hint("give each --data with its present path, in the same order; weights may be omitted"));
    }
    typed.iter_mut().zip(old).for_each(|(source, weight)| source.weight = weight);
    Ok(Some(typed))
}

fn table(settings: &Settings) -> Result<Table> {
    Table::try_from(settings).map_err(during("cannot compare the settings"))
}

/// The keys whose values differ between the two tables.
fn changed<'a>(before: &'a Table, after: &'a Table) -> impl Iterator<Item = &'a str> {
    let of_either = before.keys().chain(after.keys().filter(|key| !before.contains_key(*key)));
    of_either.filter(|key| before.get(*key) != after.get(*key)).map(String::as_str)
}
