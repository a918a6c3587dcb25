//! The resolved and checked configuration of a run, which is printed and saved with the results.

mod attention;
mod batch;
mod branch;
mod changes;
mod checkpoints;
mod identity;
mod model;
mod preset;
mod reference;
pub mod several;
mod summary;

use std::path::{Path, PathBuf};

use candle_sage::{Error, ErrorKind, Result, Scheme};
use serde::Deserialize;
use toml::Table;

use crate::checks::{self, above_zero, in_range, need};
use crate::data::DataConfig;
use crate::device::DeviceKind;
use crate::model::{LlamaConfig, Training};
use crate::optim::{LearningRate, Optimizer};
use crate::quantity::Quantity;
use crate::ranks::Ranks;
use crate::settings::{Attn, Preset, SchemeSetting, Settings, Sla2Settings, Switch, tables};
use crate::{acts_on_terminals, during, read_small};

pub use attention::check_own;
pub use branch::Branch;
pub use changes::Change;
pub use checkpoints::CheckpointConfig;
pub use identity::{BRANCHED_FROM, Identity, as_text, differing, is_meaningless, is_seed, of_attention};
pub use reference::reference;

/// The name of the subfolder where a sweep keeps the requested settings of its runs.
pub const PLAN: &str = "plan";

/// The configuration of a run, with all defaults filled in.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The complete settings.
    pub settings: Settings,
    /// The kind of attention.
    pub attn: Attn,
    /// The model.
    pub model: LlamaConfig,
    /// The training and validation data.
    pub data: DataConfig,
    /// The folder of the initial weights, if it was given.
    pub init_from: Option<PathBuf>,
    /// Sequences in a micro-batch.
    pub micro_batch: usize,
    /// Micro-batches in a step.
    pub accumulation: usize,
    /// Optimizer steps.
    pub steps: u64,
    /// Schedule of the learning rate.
    pub learning_rate: LearningRate,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// An update is skipped if the loss or the gradient norm is more than this many standard deviations above its mean
    /// over recent steps.
    pub skip_spikes: Option<f64>,
    /// The device to train on.
    pub device: DeviceKind,
    /// Seed of the initial weights.
    pub weights_seed: u64,
    /// Seed of the sample text, and the default for the seeds of weights and data.
    pub seed: u64,
    /// Folder of runs.
    pub out: PathBuf,
    /// Name of the run's folder, if given.
    pub name: Option<String>,
    /// Steps between validations; 0 validates only at the end.
    pub eval_every: u64,
    /// Tokens of a validation.
    pub eval_tokens: u64,
    /// The scheme with which each validation also computes the loss (`--eval-attn`), if any.
    pub eval_scheme: Option<Scheme>,
    /// Steps between probes, which measure the errors of low-bit attention; 0 for no probes.
    pub probe_every: u64,
    /// Which checkpoints are written and kept.
    pub checkpoints: CheckpointConfig,
    /// Tokens of sample text.
    pub sample_tokens: usize,
    /// Number of threads; all cores if `None`.
    pub threads: Option<usize>,
    /// FLOP/s of one device, if known.
    pub peak_flops: Option<f64>,
    /// The run that this run was branched off, if any.
    pub branch: Option<Branch>,
}

/// More threads than this are an error: no machine has as many cores.
pub(crate) const MOST_THREADS: usize = 4096;

impl Config {
    /// Resolves settings, with missing values from the preset.
    ///
    /// # Errors
    /// When a setting is out of range, or two settings contradict each other.
    pub fn resolve(settings: Settings) -> Result<Self> {
        let preset = settings.run.preset.unwrap_or(Preset::Tiny);
        let asked_warmup = settings.optimizer.warmup_steps;
        if settings.batch.steps.is_some() && settings.batch.tokens.is_some() {
            return Err(Error::new("both steps and tokens are given")
                .got("steps and tokens")
                .allowed("one of them")
                .hint("tokens = steps x tokens-per-step"));
        }
        let mut s = settings.over(preset::defaults(preset));
        let attn = need(s.attention.attn);
        let steps = batch::steps(&s.batch)?;
        let is_on_gpu = need(s.run.device) == DeviceKind::Cuda;
        let sla2 = attn.sla2(&s.sla2, need(s.data.context).0 as usize, steps, is_on_gpu)?;
        if let Some(sla2) = &sla2 {
            // The resolved values are saved, because they would differ with another device, context or number of steps.
            s.sla2 = Sla2Settings {
                sla2_block: Some(sla2.block),
                sla2_blocks: Some(sla2.blocks),
                sla2_nearest: Some(sla2.nearest),
                sla2_sparsity: None,
                sla2_dense_steps: Some(Quantity(sla2.dense_steps)),
                sla2_router_steps: Some(Quantity(sla2.router_steps)),
                ..s.sla2
            };
        }
        let model = model::resolve(preset, &s, sla2)?;
        if s.optimizer.init_moments == Some(Switch::On) && s.model.init_from.is_none() {
            return Err(Error::new("--init-moments needs a checkpoint")
                .got("--init-moments on without --init-from")
                .allowed("--init-from RUN/checkpoints/step-N --init-moments on")
                .hint("a run that starts from random weights starts with moments of zero"));
        }
        let eval_scheme = eval_scheme(&s, &model)?;
        let (micro_batch, accumulation) = batch::resolve(&s.batch, model.context, steps)?;
        model.linear.check("micro-batch x context", micro_batch * model.context)?;
        // The last batch of a validation may be a single sequence: FP8 matmuls must support its number of tokens too.
        model.linear_in_evaluation.check("context", model.context)?;
        let learning_rate = LearningRate::resolve(&s.optimizer, steps, asked_warmup)?;
        // A default warm-up is not saved: it is computed from the number of steps whenever settings are resolved.
        s.optimizer.warmup_steps = asked_warmup;
        let out = need(s.run.out.clone());
        let seed = checks::seed("seed", need(s.run.seed))?;
        let config = Self {
            attn,
            data: DataConfig::resolve(&s, folder_of_runs(&out), seed)?,
            model,
            micro_batch,
            accumulation,
            steps,
            optimizer: Optimizer::resolve(&s.optimizer, &learning_rate)?,
            learning_rate,
            init_from: s.model.init_from.clone(),
            skip_spikes: Some(in_range("skip-spikes", need(s.optimizer.skip_spikes), 0.0, 1e6)?)
                .filter(|z| *z > 0.0),
            device: need(s.run.device),
            weights_seed: checks::seed("weights-seed", s.run.weights_seed.unwrap_or(seed))?,
            seed,
            out,
            name: s.run.name.clone(),
            eval_every: need(s.run.eval_every).0,
            eval_tokens: in_range("eval-tokens", need(s.run.eval_tokens).0, 1, 1 << 40)?,
            eval_scheme,
            probe_every: need(s.run.probe_every).0,
            checkpoints: CheckpointConfig::resolve(&s.run)?,
            sample_tokens: in_range("sample-tokens", need(s.run.sample_tokens), 0, 1 << 40)?,
            threads: s
                .run
                .threads
                .map(|threads| in_range("threads", threads, 1, MOST_THREADS))
                .transpose()?,
            peak_flops: s
                .run
                .peak_tflops
                .map(|t| above_zero("peak-tflops", t).map(|t| t * 1e12))
                .transpose()?,
            branch: None,
            settings: s,
        };
        config.check_names()?;
        Ok(config)
    }

    /// Checks the name of the run's folder and the paths that the run uses.
    fn check_names(&self) -> Result<()> {
        self.name.as_deref().map_or(Ok(()), check_name)?;
        let sources = self.data.all_sources().map(|source| &source.path);
        for path in sources.chain([&self.out]).chain(&self.init_from) {
            if path.to_str().is_none() {
                return Err(Error::new("a path is not UTF-8")
                    .got(path.display())
                    .allowed("UTF-8: the path is saved in the run's config.toml")
                    .hint("use a symbolic link whose name is UTF-8"));
            }
        }
        Ok(())
    }

    /// How the run's parameters are stored for training: sharded over these ranks, with the state that the optimizer
    /// needs.
    pub fn training<'a>(&self, ranks: &'a Ranks) -> Training<'a> {
        Training { ranks, moments: self.optimizer.moments() }
    }

    /// Number of rows of the embedding: the vocabulary size, which some presets pad.
    pub fn embedding_rows(preset: Preset, vocab_size: usize) -> usize {
        model::model_vocab(preset, vocab_size)
    }

    /// The settings of a preset: every setting that is not optional has a value.
    pub fn defaults(preset: Preset) -> Settings {
        preset::defaults(preset)
    }

    /// Reads settings from a TOML file.
    ///
    /// # Errors
    /// When the file cannot be read, or has keys that are not settings.
    pub fn read_settings(path: &Path) -> Result<Settings> {
        let text = read_small(path, MOST_SETTINGS)
            .map_err(during::<std::io::Error>(format!("cannot read the settings in {}", path.display())))
            .map_err(|error| {
                error
                    .hint("--config needs a TOML file, such as the config.toml of a run")
                    .with_kind(ErrorKind::Invalid)
            })?;
        let unusable = |error: toml::de::Error| {
            let hint = match error.message().starts_with("invalid type: string") {
                true => {
                    "numbers have no quotes, as in layers = 4; a count with a unit has quotes, as in tokens-per-step \
                     = \"256k\""
                }
                false => {
                    "keys are the long flags of --help without `--`; text is in quotes: \
                     tokens-per-step = \"256k\"; a file with lists is for `sage-train sweep FILE`"
                }
            };
            Error::new(format!("cannot use the settings in {}", path.display()))
                .got(short_message(&error))
                .hint(hint)
        };
        // If possible, the settings are deserialized from `text`, not from `table`, so that errors name the line.
        let mut table: Table = toml::from_str(&text).map_err(unusable)?;
        // A run's `config.toml` also lists the settings that were changed when the run was resumed: see `Change`.
        let listed = table.remove(changes::LIST).is_some();
        match listed || table.values().any(|value| value.is_table() || value.is_bool()) {
            true => {
                Settings::deserialize(tables::flat(table, &path.display().to_string())?).map_err(unusable)
            }
            false => toml::from_str(&text).map_err(unusable),
        }
    }

    /// The settings of the last start of a run: its initial settings with the changes that its `config.toml` lists.
    ///
    /// # Errors
    /// As [`Config::read_settings`] and [`Change::read`].
    pub fn read_last_settings(path: &Path) -> Result<Settings> {
        Self::read_settings_at(path, u64::MAX)
    }

    /// The settings with which a run reached step `step`. A change is left out if it was made when the run was resumed
    /// at this step or later.
    ///
    /// # Errors
    /// As [`Config::read_settings`] and [`Change::read`].
    pub fn read_settings_at(path: &Path, step: u64) -> Result<Settings> {
        let mut changes = Change::read(path)?;
        changes.retain(|change| change.step < step);
        changes::applied(Self::read_settings(path)?, &changes, path)
    }

    /// The settings as TOML, without the run's name, so that a run with this file as `--config` gets a separate folder.
    pub fn to_toml(&self) -> String {
        toml::to_string(&tables::in_tables(self.saved())).expect("settings are plain values")
    }

    /// The settings that [`Config::to_toml`] saves, in one table without sections.
    fn saved(&self) -> Table {
        let mut settings = self.settings.clone();
        settings.run.name = None;
        let mut table = Table::try_from(&settings).expect("settings are plain values");
        // A scheme's default settings are saved too, because defaults of a later version may differ.
        for (key, value) in Attn::settings_of(self.model.scheme, self.model.sla2.as_ref()) {
            let with = |value: &str| {
                let mut with = table.clone();
                with.entry(key).or_insert(value.into());
                Settings::deserialize(with.clone()).ok().map(|_| with)
            };
            table = with(&value).unwrap_or(table);
        }
        table
    }

    /// Tokens of the whole run.
    pub fn tokens(&self) -> u64 {
        self.tokens_per_step() * self.steps
    }

    /// Tokens of an optimizer step.
    pub fn tokens_per_step(&self) -> u64 {
        (self.micro_batch * self.accumulation * self.model.context) as u64
    }
}

/// The scheme of `--eval-attn`; `None` without this flag, or if the model trains with the same scheme.
fn eval_scheme(s: &Settings, model: &LlamaConfig) -> Result<Option<Scheme>> {
    let Some(asked) = s.run.eval_attn else { return Ok(None) };
    let attn = need(s.attention.attn);
    if !attn.is_dense() {
        return Err(Error::new("--eval-attn needs a model with dense attention")
            .got(format!("--eval-attn {asked} with --attn {attn}"))
            .allowed(format!(
                "--attn {}",
                Scheme::all().iter().map(Scheme::name).collect::<Vec<_>>().join(", ")
            ))
            .hint("leave --eval-attn out: models with SLA2 or without attention have other weights than dense models"));
    }
    let SchemeSetting(scheme) = asked;
    model::check_logits(model, Some(scheme), s)?;
    let same = Some(scheme) == model.scheme && model.layer_schemes.is_empty();
    Ok((!same).then_some(scheme))
}

/// The largest file of settings, in bytes.
pub(crate) const MOST_SETTINGS: u64 = 1 << 20;

/// Checks the name of a run or a sweep. The name is printed, written to scripts, CSV and HTML, and is part of commands
/// in hints.
///
/// # Errors
/// When `name` is empty, `.`, `..` or `cache`, or contains special characters.
pub fn check_name(name: &str) -> Result<()> {
    let refused =
        |c: char| ['/', '\\', '"', '\'', '`'].contains(&c) || c.is_control() || acts_on_terminals(c);
    if !name.contains(refused) && !["", ".", "..", "cache"].contains(&name) {
        return Ok(());
    }
    Err(Error::new("not a name for a folder")
        .got(format!("`{}`", name.escape_debug()))
        .allowed(
            "a name without slashes, quotes and control characters; not `.`, `..` or `cache` (the folder of \
             tokenizers)",
        )
        .hint("--out is the folder of all runs, --name the name of this run"))
}

/// The folder of all runs: `out`, or its parent if `out` is the folder of a sweep.
pub fn folder_of_runs(out: &Path) -> PathBuf {
    match out.parent().filter(|_| out.join(PLAN).is_dir()) {
        Some(parent) if parent.as_os_str().is_empty() => ".".into(),
        Some(parent) => parent.to_owned(),
        None => out.to_owned(),
    }
}

/// Names of settings in other programs, and their names here.
const ELSEWHERE: [(&str, &str); 9] = [
    ("learning-rate", "lr"),
    ("batch-size", "tokens-per-step"),
    ("max-steps", "steps"),
    ("num-layers", "layers"),
    ("hidden-size", "width"),
    ("block-size", "context"),
    ("seq-len", "context"),
    ("max-seq-len", "context"),
    ("grad-clip", "clip"),
];

/// A short error message for a TOML file. For an unknown key it suggests the closest valid key, instead of listing all
/// keys.
pub fn short_message(error: &toml::de::Error) -> String {
    let text = error.to_string();
    let unknown =
        text.split("unknown field `").nth(1).and_then(|rest| rest.split_once("`, expected one of "));
    let Some((unknown, known)) = unknown else { return text.trim_end().replace('\n', "\n           ") };
    let known = known.split(", ").map(|key| key.trim().trim_matches('`'));
    let nearest =
        known.map(|key| (strsim::jaro_winkler(unknown, key), key)).max_by(|a, b| a.0.total_cmp(&b.0));
    let elsewhere =
        ELSEWHERE.iter().find(|(name, _)| unknown.replace('_', "-") == *name).map(|(_, key)| *key);
    let nearest = elsewhere.or(nearest.filter(|(near, _)| *near > 0.7).map(|(_, key)| key));
    let nearest = nearest.map(|key| format!("; did you mean `{key}`?"));
    let before = text.split("unknown field").next().unwrap_or("");
    format!("{before}unknown setting `{unknown}`{}", nearest.unwrap_or_default())
        .replace('\n', "\n           ")
}
