//! What will run: every setting resolved and checked, printable, saved beside the results.

mod identity;
mod preset;
pub mod several;
mod summary;

use std::path::{Path, PathBuf};
use std::time::Duration;

use candle_sage::{Error, Result, Scheme};
use serde::Deserialize;
use toml::Table;

use crate::checks::{above_zero, in_range};
use crate::data::{Cut, Tokenizer};
use crate::device::Place;
use crate::during;
use crate::model::{LlamaConfig, Sla2Config};
use crate::optim::{AdamWConfig, LearningRate};
use crate::quantity::{Quantity, grouped};
use crate::settings::{Attn, Preset, Settings, SourceSetting, Switch, tables};

pub use identity::{Identity, differing, is_seed, of_attention};

/// The folder in a sweep's that holds what was asked for.
pub const PLAN: &str = "plan";

/// A resolved run.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The complete settings.
    pub settings: Settings,
    /// How to attend.
    pub attn: Attn,
    /// The model.
    pub model: LlamaConfig,
    /// Where the text comes from.
    pub data: DataConfig,
    /// A Hugging Face folder to begin with.
    pub init_from: Option<PathBuf>,
    /// Sequences in a micro-batch.
    pub micro_batch: usize,
    /// Micro-batches in a step.
    pub accumulation: usize,
    /// Optimizer steps.
    pub steps: u64,
    /// Course of the learning rate.
    pub learning_rate: LearningRate,
    /// AdamW.
    pub adamw: AdamWConfig,
    /// Standard deviations above the mean from which on an update is skipped.
    pub skip_spikes: Option<f64>,
    /// Where it trains.
    pub device: Place,
    /// Seed of the initial weights.
    pub weights_seed: u64,
    /// Seed of what is left to chance beside weights and data.
    pub seed: u64,
    /// Folder of runs.
    pub out: PathBuf,
    /// Name of the run's folder, if one was given.
    pub name: Option<String>,
    /// Steps between validations; 0 for the end only.
    pub eval_every: u64,
    /// Tokens of a validation.
    pub eval_tokens: u64,
    /// What a second validation attends with, where it is not what training does.
    pub eval_scheme: Option<Scheme>,
    /// Steps between probes of attention's errors; 0 for none.
    pub probe_every: u64,
    /// Which checkpoints are written and kept.
    pub checkpoints: CheckpointConfig,
    /// Tokens of sample text.
    pub sample_tokens: usize,
    /// Threads, if not all.
    pub threads: Option<usize>,
    /// FLOP/s of the machine, if known.
    pub peak_flops: Option<f64>,
}

/// More than any machine's cores: a mistake.
pub(crate) const MOST_THREADS: usize = 4096;

/// Micro-batches of a step, at most.
const MOST_MICRO_BATCHES: u64 = 1 << 16;

/// Which checkpoints are written and kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckpointConfig {
    /// Steps between them; 0 for the end only.
    pub every: u64,
    /// The longest time between them.
    pub within: Option<Duration>,
    /// How many are kept.
    pub keep_last: usize,
    /// Those of every so many steps are kept as well; 0 for none.
    pub keep_every: u64,
}

/// Where the text comes from and how it is cut.
#[derive(Debug, Clone, PartialEq)]
pub struct DataConfig {
    /// Files, folders and patterns, with weights; none for the built-in corpus.
    pub sources: Vec<SourceSetting>,
    /// The key or column of text.
    pub text_field: String,
    /// A file or a name, where it is not found by itself.
    pub tokenizer: Option<String>,
    /// Whether attention stays inside documents.
    pub document_mask: bool,
    /// Bytes of built-in corpus.
    pub corpus_bytes: u64,
    /// Part kept for validation.
    pub val_fraction: f64,
    /// Entries of the vocabulary, at most.
    pub vocab_size: usize,
    /// Tokens in a sequence.
    pub context: usize,
    /// Folder of runs, which is never read as data.
    pub out: PathBuf,
    /// Seed of the order.
    pub order_seed: u64,
    /// Seed of the built-in corpus.
    pub corpus_seed: u64,
}

impl DataConfig {
    /// The weight of each source, the built-in corpus among them.
    pub fn weights(&self) -> Vec<f64> {
        if self.sources.is_empty() { vec![1.0] } else { self.sources.iter().map(|s| s.weight).collect() }
    }

    /// How tokens become sequences.
    pub fn cut(&self, tokenizer: &Tokenizer) -> Cut {
        Cut {
            context: self.context,
            seed: self.order_seed,
            vocab: tokenizer.vocab_size(),
            end_of_document: self.document_mask.then_some(tokenizer.end_of_text()),
        }
    }

    /// Where trained tokenizers are kept.
    pub fn cache(&self) -> PathBuf {
        self.out.join("cache")
    }
}

impl Config {
    /// Resolves settings over a preset's.
    ///
    /// # Errors
    /// When a setting is out of range or two do not fit together.
    pub fn resolve(settings: Settings) -> Result<Self> {
        let preset = settings.preset.unwrap_or(Preset::Tiny);
        let asked_warmup = settings.warmup_steps;
        if settings.steps.is_some() && settings.tokens.is_some() {
            return Err(Error::new("both steps and tokens are given")
                .got("steps and tokens in one place")
                .allowed("one of them")
                .hint("tokens = steps x tokens-per-step"));
        }
        let mut s = settings.over(preset::defaults(preset));
        let (attn, qk_norm) = (need(s.attn), need(s.qk_norm) == Switch::On);
        let heads = need(s.heads);
        let context = need(s.context).0 as usize;
        let micro_batch = in_range("micro-batch", need(s.micro_batch) as u64, 1, 1 << 20)? as usize;
        let tokens_per_step = in_range("tokens-per-step", need(s.tokens_per_step).0, 1, 1 << 40)?;
        let steps = match (s.steps, s.tokens) {
            (Some(steps), _) => steps.0,
            (None, Some(tokens)) => tokens.0.div_ceil(tokens_per_step),
            (None, None) => unreachable!("presets name steps"),
        };
        let steps = in_range("steps", steps, 1, 1 << 40)?;
        let sla2 = attn.sla2(&s, context, steps, need(s.device) == Place::Cuda)?;
        if let Some(sla2) = &sla2 {
            // As it came out: on another device, over another context or for more steps it would come out otherwise.
            (s.sla2_block, s.sla2_blocks, s.sla2_sparsity) = (Some(sla2.block), Some(sla2.blocks), None);
            s.sla2_dense_steps = Some(Quantity(sla2.dense_steps));
            s.sla2_router_steps = Some(Quantity(sla2.router_steps));
        }
        let model = LlamaConfig {
            vocab: model_vocab(preset, need(s.vocab_size).0 as usize),
            layers: need(s.layers),
            width: need(s.width),
            heads,
            key_heads: s.key_heads.unwrap_or(heads),
            head_dim: need(s.head_dim),
            ffn: need(s.ffn),
            context,
            rope_base: need(s.rope_base),
            norm_eps: above_zero("norm-eps", need(s.norm_eps))?,
            qk_norm,
            init_std: need(s.init_std),
            scheme: attn.scheme(&s).map(|scheme| scheme_of_blocks(scheme, sla2.as_ref())),
            sla2,
            z_loss: in_range("z-loss", need(s.z_loss), 0.0, 1.0)?,
            recompute: need(s.recompute),
            deterministic: need(s.deterministic) == Switch::On,
        };
        model.validate()?;
        let eval_scheme = s.eval_attn.map(|eval| eval.instead_of(attn)).transpose()?;
        // The same twice would say nothing.
        let eval_scheme = eval_scheme.filter(|scheme| Some(*scheme) != model.scheme);
        if let Some(scheme) = eval_scheme {
            LlamaConfig { scheme: Some(scheme), ..model.clone() }.validate()?;
        }
        let accumulation = accumulation(tokens_per_step, micro_batch, model.context)?;
        if steps.checked_mul(tokens_per_step).is_none() {
            return Err(Error::new("the run is too long to count its tokens")
                .got(format!("{steps} steps of {tokens_per_step} tokens"))
                .allowed("fewer than 2^64 tokens")
                .hint("--steps or --tokens-per-step"));
        }
        let warmup = match asked_warmup {
            None => need(s.warmup_steps).0.min(steps / 10),
            Some(warmup) => in_range("warmup-steps", warmup.0, 0, steps - 1)?,
        };
        // Left open where it was: a longer run from the saved settings warms up longer.
        s.warmup_steps = asked_warmup;
        let in_part = |name: &str, value: f64| in_range(name, value, 0.0, 1.0);
        let peak = above_zero("lr", need(s.lr))?;
        let out = need(s.out.clone());
        // TOML, which keeps the settings, has no larger numbers.
        let seed_of = |name: &str, seed: u64| in_range(name, seed, 0, i64::MAX as u64);
        let seed = seed_of("seed", need(s.seed))?;
        let corpus_mb = in_range("corpus-mb", need(s.corpus_mb), 0, 1 << 40)?;
        let config = Self {
            attn,
            data: DataConfig {
                sources: s.data.clone().unwrap_or_default(),
                text_field: need(s.text_field.clone()),
                tokenizer: s.tokenizer.clone(),
                document_mask: need(s.document_mask) == Switch::On,
                corpus_bytes: corpus_mb.saturating_mul(1_000_000),
                val_fraction: in_range("val-fraction", need(s.val_fraction), 0.0001, 0.9)?,
                vocab_size: need(s.vocab_size).0 as usize,
                context: model.context,
                out: folder_of_runs(&out),
                order_seed: seed_of("order-seed", s.order_seed.unwrap_or(seed))?,
                corpus_seed: seed_of("corpus-seed", s.corpus_seed.unwrap_or(seed))?,
            },
            model,
            micro_batch,
            accumulation,
            steps,
            learning_rate: LearningRate {
                peak,
                floor: peak * in_part("min-lr", need(s.min_lr))?,
                warmup,
                steps,
                schedule: need(s.schedule),
                decay_fraction: in_part("decay-fraction", need(s.decay_fraction))?,
            },
            adamw: AdamWConfig {
                beta1: in_range("beta1", need(s.beta1), 0.0, 0.999_999)?,
                beta2: in_range("beta2", need(s.beta2), 0.0, 0.999_999)?,
                eps: above_zero("adam-eps", need(s.adam_eps))?,
                weight_decay: in_part("weight-decay", need(s.weight_decay))?,
                clip: Some(in_range("clip", need(s.clip), 0.0, 1e9)?).filter(|norm| *norm > 0.0),
            },
            init_from: s.init_from.clone(),
            skip_spikes: Some(in_range("skip-spikes", need(s.skip_spikes), 0.0, 1e6)?).filter(|z| *z > 0.0),
            device: need(s.device),
            weights_seed: seed_of("weights-seed", s.weights_seed.unwrap_or(seed))?,
            seed,
            out,
            name: s.name.clone(),
            eval_every: need(s.eval_every).0,
            eval_tokens: in_range("eval-tokens", need(s.eval_tokens).0, 1, 1 << 40)?,
            eval_scheme,
            probe_every: need(s.probe_every).0,
            checkpoints: CheckpointConfig {
                every: s.checkpoint_every.unwrap_or(need(s.eval_every)).0,
                within: Some(in_range("checkpoint-minutes", need(s.checkpoint_minutes), 0.0, 1e6)?)
                    .filter(|minutes| *minutes > 0.0)
                    .map(|minutes| Duration::from_secs_f64(60.0 * minutes)),
                keep_last: in_range("keep-last", need(s.keep_last) as u64, 1, 1 << 20)? as usize,
                keep_every: need(s.keep_every).0,
            },
            sample_tokens: in_range("sample-tokens", need(s.sample_tokens), 0, 1 << 40)?,
            threads: s.threads,
            peak_flops: s.peak_tflops.map(|t| above_zero("peak-tflops", t).map(|t| t * 1e12)).transpose()?,
            settings: s,
        };
        config.threads.map(|threads| in_range("threads", threads, 1, MOST_THREADS)).transpose()?;
        config.name.as_deref().map_or(Ok(()), check_name)?;
        let sources = config.data.sources.iter().map(|source| &source.path);
        for path in sources.chain([&config.out]).chain(&config.init_from) {
            if path.to_str().is_none() {
                return Err(Error::new("a path is not UTF-8")
                    .got(path.display())
                    .allowed("UTF-8: the path is saved in the run's config.toml")
                    .hint("use a link with another name"));
            }
        }
        Ok(config)
    }

    /// What a preset says, with every setting that is not optional.
    pub fn defaults(preset: Preset) -> Settings {
        preset::defaults(preset)
    }

    /// Reads settings from a TOML file.
    ///
    /// # Errors
    /// When the file cannot be read, or has keys that are not settings.
    pub fn read_settings(path: &Path) -> Result<Settings> {
        let text = std::fs::read_to_string(path)
            .map_err(during::<std::io::Error>(format!("cannot read the settings in {}", path.display())))
            .map_err(|error| error.hint("--config takes a TOML file; every run leaves one, config.toml"))?;
        let unusable = |error: toml::de::Error| {
            Error::new(format!("cannot use the settings in {}", path.display()))
                .got(in_short(&error))
                .hint("keys are the long flags without the dashes, e.g. tokens-per-step = \"256k\"")
        };
        // A file without tables says in which line it is wrong.
        let table: Table = toml::from_str(&text).map_err(unusable)?;
        match table.values().any(|value| value.is_table() || value.is_bool()) {
            true => Settings::deserialize(tables::flat(table)?).map_err(unusable),
            false => toml::from_str(&text).map_err(unusable),
        }
    }

    /// The settings as TOML, without the run's name: run again, they make a folder of their own.
    pub fn to_toml(&self) -> String {
        let settings = Settings { name: None, ..self.settings.clone() };
        let mut table = Table::try_from(&settings).expect("settings are plain values");
        // What a scheme leaves to its own defaults is said too: those of a later version may be others.
        for (key, value) in self.attn.own_settings(self.model.scheme, self.model.sla2.as_ref()) {
            let with = |value: &str| {
                let mut with = table.clone();
                with.entry(key).or_insert(value.into());
                Settings::deserialize(with.clone()).ok().map(|_| with)
            };
            table = with(&value).unwrap_or(table);
        }
        toml::to_string(&tables::in_tables(table)).expect("settings are plain values")
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

/// Checks that a run or a sweep can be called so.
///
/// # Errors
/// When it would not be a folder of its own.
pub fn check_name(name: &str) -> Result<()> {
    if !name.contains(['/', '\\']) && !["", ".", "..", "cache"].contains(&name) {
        return Ok(());
    }
    Err(Error::new("not a name for a folder")
        .got(format!("`{name}`"))
        .allowed("a name without slashes; `cache` is taken by the tokenizers")
        .hint("--out says where runs go, --name how this one is called"))
}

/// Where runs go, their own or their sweep's: a sweep's folder lies in it.
pub fn folder_of_runs(out: &Path) -> PathBuf {
    match out.parent().filter(|_| out.join(PLAN).is_dir()) {
        Some(parent) if parent.as_os_str().is_empty() => ".".into(),
        Some(parent) => parent.to_owned(),
        None => out.to_owned(),
    }
}

/// On small blocks SageBwd has smaller tiles.
fn scheme_of_blocks(scheme: Scheme, sla2: Option<&Sla2Config>) -> Scheme {
    match (scheme, sla2) {
        (Scheme::SageBwd(sage), Some(sla2)) => {
            sage.tile_q(sage.tile_q.min(sla2.block)).tile_k(sage.tile_k.min(sla2.block)).into()
        }
        (scheme, _) => scheme,
    }
}

/// What is wrong with a TOML file; a key that is not one is told the nearest that is, and not all of them.
pub fn in_short(error: &toml::de::Error) -> String {
    let text = error.to_string();
    let unknown =
        text.split("unknown field `").nth(1).and_then(|rest| rest.split_once("`, expected one of "));
    let Some((unknown, known)) = unknown else { return text.trim_end().replace('\n', "\n           ") };
    let known = known.split(", ").map(|key| key.trim().trim_matches('`'));
    let nearest =
        known.map(|key| (strsim::jaro_winkler(unknown, key), key)).max_by(|a, b| a.0.total_cmp(&b.0));
    let nearest = nearest.filter(|(near, _)| *near > 0.7).map(|(_, key)| format!("; did you mean `{key}`?"));
    let before = text.split("unknown field").next().unwrap_or("");
    format!("{before}unknown setting `{unknown}`{}", nearest.unwrap_or_default())
        .replace('\n', "\n           ")
}

/// A setting that every preset fills in.
fn need<T>(setting: Option<T>) -> T {
    setting.expect("presets fill in every setting that is not optional")
}

/// Rows of the embedding: the paper's is padded to a multiple of 128 for the sake of GPUs.
fn model_vocab(preset: Preset, vocab_size: usize) -> usize {
    if preset == Preset::Paper325m { vocab_size.next_multiple_of(128) } else { vocab_size }
}

/// How many micro-batches make a step. Both factors are in range, and so is their product.
fn accumulation(tokens_per_step: u64, micro_batch: usize, context: usize) -> Result<usize> {
    let micro = (micro_batch * context) as u64;
    if tokens_per_step.is_multiple_of(micro) {
        let count = tokens_per_step / micro;
        return match count <= MOST_MICRO_BATCHES {
            true => Ok(count as usize),
            false => Err(Error::new("a step has too many micro-batches")
                .got(format!("{} of {} tokens", grouped(count), grouped(micro)))
                .allowed(format!("at most {}", grouped(MOST_MICRO_BATCHES)))
                .hint("--micro-batch makes them larger, --tokens-per-step the step smaller")),
        };
    }
    let below = tokens_per_step / micro * micro;
    let nearest: Vec<String> = [below, below + micro]
        .into_iter()
        .filter(|&tokens| tokens > 0)
        .map(|tokens| format!("--tokens-per-step {}", Quantity(tokens)))
        .collect();
    let sequences = tokens_per_step / context as u64;
    let fits = (tokens_per_step.is_multiple_of(context as u64) && sequences > 0)
        .then(|| (1..=sequences.min(micro_batch as u64)).rev().find(|m| sequences.is_multiple_of(*m)))
        .flatten()
        .map(|m| format!(", or --micro-batch {m}"))
        .unwrap_or_default();
    Err(Error::new("tokens per step is not a whole number of micro-batches")
        .got(format!(
            "{} tokens = {:.3} x (micro-batch {micro_batch} x context {context})",
            grouped(tokens_per_step),
            tokens_per_step as f64 / micro as f64,
        ))
        .allowed(format!("a multiple of {} tokens", grouped(micro)))
        .hint(format!("nearest: {}{fits}", nearest.join(" or "))))
}
