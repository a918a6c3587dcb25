//! A trained model with its settings and tokenizer, from a run's folder, a checkpoint, or a folder in Hugging
//! Face's format.

use std::path::Path;

use candle_core::Device;
use candle_sage::{Error, Result};

use crate::checkpoint;
use crate::config::Config;
use crate::data::{Boundaries, Dataset, Tokenizer};
use crate::device::DeviceKind;
use crate::hf;
use crate::model::{Llama, Parameters, Stage, Training};
use crate::quantity::Quantity;
use crate::ranks::{Rank, Ranks};
use crate::runs::{METRICS, Run, STARTS, tokenizer_hash};
use crate::settings::{Attn, BatchSettings, Settings};
use crate::{notify, on_device};

/// The stage of SLA2 that a run's model was in at the end of the run.
fn last_stage(saved: &Settings) -> Stage {
    let of_tokens =
        saved.batch.tokens.zip(saved.batch.tokens_per_step).map(|(all, step)| all.0.div_ceil(step.0.max(1)));
    let steps = saved.batch.steps.map(|steps| steps.0).or(of_tokens);
    match (steps, saved.sla2.sla2_dense_steps) {
        (Some(steps), Some(dense)) if dense.0 >= steps => Stage::Dense,
        _ => Stage::Sparse,
    }
}

/// The step of the last validation, after which the weights in the run's folder were saved. `None`, and not an error,
/// if the metrics are missing or unreadable, because the weights can still be used.
fn last_step(run: &Path) -> Option<u64> {
    if !run.join(METRICS).exists() {
        return None;
    }
    let unknown = |error: &Error| notify(&format!("warning: the step of the weights is unknown: {error}"));
    let points = Run::read(run).inspect_err(unknown).ok()?.points;
    points.iter().rev().find(|point| point.val_loss.is_some()).map(|point| point.step)
}

/// Reduces the length of training to one step of one micro-batch. Otherwise, [`Config::resolve`] could refuse the
/// settings, because the tokens per step are not a multiple of micro-batch x context.
fn one_micro_batch(mut settings: Settings) -> Settings {
    let micro_batch = settings.batch.micro_batch.unwrap_or(8);
    let tokens = settings.data.context.map(|context| Quantity(context.0.saturating_mul(micro_batch as u64)));
    settings.batch = BatchSettings {
        micro_batch: Some(micro_batch),
        tokens_per_step: tokens.or(settings.batch.tokens_per_step),
        steps: Some(Quantity(1)),
        tokens: None,
    };
    settings.sla2.sla2_dense_steps = Some(Quantity(0));
    settings.sla2.sla2_router_steps = Some(Quantity(0));
    settings.optimizer.forget_warmups();
    settings.run.eval_attn = None;
    settings.linear.linear_eval = None;
    settings
}

/// Keeps copies of the weights in the compute type, because evaluations and some probes compute in this type even if
/// the run trained in FP8.
fn keep_copies(parameters: &Parameters, alone: &Ranks) -> Result<()> {
    let expanded =
        parameters.expand(alone).map_err(on_device("cannot convert the weights for the forward"))?;
    expanded.keep();
    Ok(())
}

/// The folder of the run: `folder` itself, or the run that the checkpoint `folder` belongs to.
pub fn run_folder(folder: &Path) -> &Path {
    match checkpoint::is_one(folder) {
        true => folder.parent().and_then(Path::parent).unwrap_or(folder),
        false => folder,
    }
}

/// The tokenizer in the folder of a run or a model.
///
/// # Errors
/// When the tokenizer cannot be read, or the run was trained with another tokenizer.
pub fn tokenizer_of(folder: &Path) -> Result<Tokenizer> {
    let path = folder.join("tokenizer.json");
    let tokenizer = Tokenizer::load(&path)?;
    match tokenizer_hash(folder)?.filter(|hash| hash != tokenizer.hash()) {
        None => Ok(tokenizer),
        Some(hash) => Err(Error::new("the tokenizer is not the one that the model was trained with")
            .got(format!("{} with SHA-256 {:.12}", path.display(), tokenizer.hash()))
            .allowed(format!("{hash:.12}, as in {STARTS}"))
            .hint("restore tokenizer.json, for example from the run's prepared data")),
    }
}

/// A model with its settings and its tokenizer.
#[derive(Debug)]
pub struct Trained {
    /// The run's settings. For a folder in Hugging Face's format, the settings in its files.
    pub config: Config,
    /// The weights.
    pub parameters: Parameters,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The tokens around a document.
    pub boundaries: Boundaries,
    /// The device.
    pub device: Device,
    /// Number of steps that the model was trained for, if that is known.
    pub step: Option<u64>,
    /// Number of sequences of training data that the run has read. `None` if it is not known, or if the model was
    /// opened with another context length than the run's.
    pub sequences_seen: Option<u64>,
    stage: Stage,
}

impl Trained {
    /// Whether a model with SLA2 attends to all keys or to a selection.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// Opens the folder of a run, checkpoint or model. `settings` override the settings of the run. If `trained` is
    /// true, gradients can be computed.
    ///
    /// # Errors
    /// When the folder is not a run, checkpoint or model, or a file is missing or damaged.
    pub fn open(
        folder: &Path,
        device_kind: DeviceKind,
        mut settings: Settings,
        trained: bool,
    ) -> Result<Self> {
        let alone = Ranks::alone();
        let trained = trained.then_some(Training::of_gradients(&alone));
        settings.run.device = Some(device_kind);
        let device = device_kind.open(Rank::ALONE)?;
        crate::check_there(folder)?;
        let run = run_folder(folder);
        let saved = run.join("config.toml");
        if !saved.exists() && folder.join("config.json").exists() {
            let context = settings.data.context.unwrap_or(Quantity(hf::longest(folder)?.min(4096) as u64));
            let mut settings = settings.over(hf::settings(folder)?);
            settings.data.context = Some(context);
            // Unquantized attention, as the model was published, unless a scheme is requested.
            settings.attention.attn = settings.attention.attn.or(Some(Attn::EXACT));
            let config = Config::resolve(one_micro_batch(settings))?;
            let parameters = hf::load(folder, &config.model, &device, device_kind.dtype(), trained)?;
            keep_copies(&parameters, &alone)?;
            let tokenizer = tokenizer_of(folder)?;
            let boundaries = hf::boundaries(folder, &tokenizer)?;
            return Ok(Self {
                config,
                parameters,
                tokenizer,
                boundaries,
                device,
                step: None,
                sequences_seen: None,
                stage: Stage::Sparse,
            });
        }
        let saved = Config::read_last_settings(&saved).map_err(|error| {
            error.hint(
                "give the folder of a run, e.g. runs/tiny-sagebwd-001, or a folder in Hugging Face's format",
            )
        })?;
        let step = if run == folder { last_step(run) } else { checkpoint::step_of(folder) };
        let stage = last_stage(&saved);
        let context =
            saved.data.context.filter(|own| settings.data.context.is_none_or(|other| other == *own));
        let of_a_step = saved.batch.tokens_per_step.zip(context);
        let of_a_step = of_a_step.map(|(tokens, context)| tokens.0 / context.0.max(1));
        let sequences_seen = step.zip(of_a_step).map(|(step, sequences)| step * sequences);
        let state = match run == folder {
            true => None,
            false => {
                let (manifest, state) = checkpoint::open(folder)?;
                manifest.check_settings(run, &Config::resolve(saved.clone())?)?;
                Some(state)
            }
        };
        let config = Config::resolve(one_micro_batch(settings.over(saved)))?;
        let (model, dtype) = (&config.model, device_kind.dtype());
        let parameters = match &state {
            None => Parameters::load(
                model.parameter_specs(),
                &run.join("model.safetensors"),
                &device,
                dtype,
                trained,
            )?,
            Some(state) => Parameters::restore(model.parameter_specs(), state, &device, dtype, trained)?,
        };
        keep_copies(&parameters, &alone)?;
        let tokenizer = tokenizer_of(run)?;
        let boundaries = tokenizer.boundaries();
        Ok(Self { config, parameters, tokenizer, boundaries, device, step, sequences_seen, stage })
    }

    /// The model.
    ///
    /// # Errors
    /// When memory is short for the rotary tables.
    pub fn model(&self) -> Result<Llama> {
        let model = &self.config.model;
        let mut llama =
            Llama::new(model, &self.parameters, &self.device).map_err(on_device("cannot make the model"))?;
        llama.set_stage(self.stage);
        Ok(llama)
    }

    /// Checks that data was read with the model's tokenizer, if the model's folder has one.
    ///
    /// # Errors
    /// When the data has another tokenizer, such as a tokenizer that was trained on other text.
    pub fn check_data(&self, folder: &Path, data: &Dataset) -> Result<()> {
        let path = run_folder(folder).join("tokenizer.json");
        if path.exists() { data.tokenizer.check_same(&path) } else { Ok(()) }
    }

    /// Checks that the model has attention.
    ///
    /// # Errors
    /// When the model has no attention.
    pub fn check_attention(&self, folder: &Path) -> Result<()> {
        if self.config.model.scheme.is_some() {
            return Ok(());
        }
        Err(Error::new("cannot probe a model without attention")
            .got(folder.display())
            .allowed("a run with attention: any --attn except none")
            .hint("train one: sage-train --attn sagebwd"))
    }
}
