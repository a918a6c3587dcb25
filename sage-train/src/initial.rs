//! The model that a new run begins with (`--init-from`): weights, shape and tokenizer of a run, of one of its
//! checkpoints, or of a folder in Hugging Face's format.

use std::fs::File;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use candle_sage::{Error, Result};
use sha2::{Digest, Sha256};

use crate::config::Config;
use crate::model::{InitialValues, OUTPUT, ParameterSpec, Parameters, StateFile};
use crate::quantity::Quantity;
use crate::ranks::Ranks;
use crate::settings::{Attn, ModelSettings, Settings, Sla2Settings};
use crate::trained::{run_folder, tokenizer_of};
use crate::{check_there, checkpoint, during, hex, hf};

/// The `config.toml` of a run, if the folder is a run or a checkpoint of a run.
fn config_of(folder: &Path) -> Option<PathBuf> {
    let path = run_folder(folder).join("config.toml");
    path.exists().then_some(path)
}

/// The settings of the model in `folder` that a new run takes over. `attn` is the attention that the new run asks for;
/// if the folder's attention differs, [`Settings::over`] drops the folder's attention settings.
///
/// # Errors
/// When the folder is not a run, checkpoint or model; when its files cannot be read; when a run's tokenizer is missing
/// or is not the tokenizer that the run was trained with.
pub fn settings(folder: &Path, attn: Option<Attn>) -> Result<Settings> {
    check_there(folder)?;
    let config = config_of(folder);
    if config.is_none() && !folder.join("config.json").exists() {
        return Err(Error::new("no model in this folder")
            .got(folder.display())
            .allowed("a folder with config.toml, or one in Hugging Face's format, with config.json")
            .hint("--init-from takes a run, RUN/checkpoints/step-N, or what `sage-train export` writes"));
    }
    let mut told = match config {
        None => hf::settings(folder)?,
        Some(path) => {
            let saved = Config::read_last_settings(&path)?;
            let run = run_folder(folder);
            tokenizer_of(run)?;
            // Some presets pad the vocabulary, so the embedding can have more rows than the vocabulary has entries.
            let rows = Config::resolve(saved.clone())?.model.vocab;
            Settings::with(|s| {
                s.model = ModelSettings { init_from: None, ..saved.model };
                s.data.vocab_size = Some(Quantity(rows as u64));
                s.data.tokenizer = Some(run.join("tokenizer.json").display().to_string());
                s.attention = saved.attention;
                s.sla2 = saved.sla2;
            })
        }
    };
    // The new run never takes over SLA2's numbers of steps. It takes over SLA2's tail only if it keeps the attention
    // of the model in `folder`.
    let same_form = attn.is_none() || attn == told.attention.attn;
    told.sla2 = Sla2Settings {
        sla2_dense_steps: None,
        sla2_router_steps: None,
        sla2_tail: told.sla2.sla2_tail.filter(|_| same_form),
        ..told.sla2
    };
    Ok(told)
}

/// SHA-256 of the folder's files of weights.
///
/// # Errors
/// When a file cannot be read.
pub fn fingerprint(folder: &Path) -> Result<String> {
    let failed = || format!("cannot read {}", folder.display());
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder).map_err(during(failed()))?.flatten().map(|entry| entry.path()).collect();
    files.retain(|path| path.extension().is_some_and(|ending| ending == "safetensors"));
    files.sort();
    let mut hash = Sha256::new();
    for path in &files {
        let mut file = File::open(path).map_err(during(failed()))?;
        std::io::copy(&mut file, &mut hash).map_err(during(failed()))?;
    }
    Ok(hex(&hash.finalize()))
}

/// Checks that the folder has moments for `--init-moments`.
///
/// # Errors
/// When the folder is not a checkpoint.
pub fn check_moments(folder: &Path) -> Result<()> {
    if checkpoint::is_one(folder) {
        return Ok(());
    }
    Err(Error::new("no moments of an optimizer in this folder")
        .got(format!("--init-moments on, --init-from {}", folder.display()))
        .allowed("--init-from RUN/checkpoints/step-N")
        .hint("a run's last weights and a Hugging Face folder have no moments: --init-moments off, or name a checkpoint"))
}

/// The weights in the folder. The optimizer's moments are zeros or, if `config` asks for them, the checkpoint's moments
/// after bias correction. SLA2's parameters (the routers and `theta`) keep their initial values if the folder lacks
/// them.
///
/// # Errors
/// When the weights cannot be read or belong to another model, or when moments are requested and a parameter has none.
pub fn parameters(
    folder: &Path,
    config: &Config,
    (device, dtype): (&Device, DType),
    ranks: &Ranks,
) -> Result<Parameters> {
    if config.optimizer.has_initial_moments() {
        check_moments(folder)?;
    }
    let (run, model, trained) = (run_folder(folder), &config.model, Some(config.training(ranks)));
    let Some(path) = config_of(folder) else {
        return hf::load(folder, model, device, dtype, trained);
    };
    let make = |names: &[&str], values: InitialValues<'_>| {
        if names.contains(&OUTPUT) && !model.untied {
            return Err(hf::output_is_apart(folder));
        }
        hf::warn_of_others(folder, model, names);
        let missing =
            |spec: &ParameterSpec| spec.start_in_sla2().filter(|_| !names.contains(&spec.name.as_str()));
        if values.moments.is_some() {
            // A parameter that the checkpoint lacks would begin with moments of zero and without bias correction, so
            // its first updates would have the wrong size.
            if let Some(spec) = model.parameter_specs().iter().find(|spec| missing(spec).is_some()) {
                return Err(Error::new("the checkpoint has no moments of a parameter")
                    .got(format!("{}: the checkpoint was trained without it", spec.name))
                    .allowed("the attention that the checkpoint was trained with")
                    .hint("--init-moments off begins with moments of zero"));
            }
        }
        let weights = |spec: &ParameterSpec| missing(spec).map_or_else(|| (values.weights)(spec), Ok);
        let values = InitialValues { weights: &weights, ..values };
        Parameters::from_values(model.parameter_specs(), &values, device, dtype, trained)
    };
    if run == folder {
        let file = StateFile::of_run(&run.join("model.safetensors"))?;
        let names = file.names().collect::<Vec<_>>();
        return make(&names, InitialValues::weights(&|spec| file.values(spec, "")));
    }
    let (manifest, state) = checkpoint::open(folder)?;
    let before = Config::resolve(Config::read_last_settings(&path)?)?;
    manifest.check_settings(run, &before)?;
    let moments = |moment: &'static str, spec: &ParameterSpec, range| {
        let factor = before.optimizer.unbiased(moment, manifest.step);
        let values = state.moments(moment, spec, range)?;
        Ok(values.into_iter().map(|value| (f64::from(value) * factor) as f32).collect())
    };
    // Muon's running mean squares of matrix rows; zeros if the checkpoint does not contain them. They need no bias
    // correction: row normalization keeps a matrix's norm, so a factor common to all of its rows has no effect.
    let rows =
        |name: String, rows| if state.has(&name) { state.rows(name, rows) } else { Ok(vec![0.0; rows]) };
    let names = state.names();
    let values = InitialValues {
        weights: &|spec| state.weights(spec),
        moments: config.optimizer.has_initial_moments().then_some(&moments),
        rows: config.optimizer.has_initial_moments().then_some(&rows),
    };
    make(&names.iter().map(String::as_str).collect::<Vec<_>>(), values)
}
