//! What a new run begins with (`--init-from`): the weights, the shape and the tokenizer of a run, of one of its checkpoints, or of a
//! folder in Hugging Face's format.

use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use candle_sage::Result;

use crate::config::Config;
use crate::model::{LlamaConfig, Parameters};
use crate::ranks::Ranks;
use crate::settings::{AttentionSettings, Attn, ModelSettings, Settings};
use crate::trained::run_folder;
use crate::{checkpoint, hf};

/// The `config.toml` of a run, if the folder is one or one of its checkpoints.
fn config_of(folder: &Path) -> Option<PathBuf> {
    let path = run_folder(folder).join("config.toml");
    path.exists().then_some(path)
}

/// The settings that the folder determines. Those of attention alone if the new run attends as the folder's model did: `attn` is
/// what it asks for.
///
/// # Errors
/// When the folder has none of these formats, or its files cannot be read.
pub fn settings(folder: &Path, attn: Option<Attn>) -> Result<Settings> {
    let Some(path) = config_of(folder) else {
        let mut told = hf::settings(folder)?;
        // The tail is a part of the form that the folder was trained in: another form has its own.
        if attn.is_some() && attn != told.attention.attn {
            told.sla2.sla2_tail = None;
        }
        return Ok(told);
    };
    let saved = Config::read_last_settings(&path)?;
    let tokenizer = run_folder(folder).join("tokenizer.json");
    let same = attn.is_none_or(|attn| saved.attention.attn == Some(attn));
    Ok(Settings::with(|s| {
        s.model = ModelSettings { init_from: None, ..saved.model };
        s.data.vocab_size = saved.data.vocab_size;
        s.data.tokenizer = tokenizer.exists().then(|| tokenizer.display().to_string());
        s.attention = match same {
            true => saved.attention,
            false => AttentionSettings { qk_norm: saved.attention.qk_norm, ..AttentionSettings::default() },
        };
        if same {
            s.sla2 = saved.sla2;
        }
    }))
}

/// The weights in the folder, with moments of zero.
///
/// # Errors
/// When they cannot be read, or are of another model.
pub fn weights(
    folder: &Path,
    model: &LlamaConfig,
    (device, dtype): (&Device, DType),
    ranks: &Ranks,
) -> Result<Parameters> {
    let run = run_folder(folder);
    match config_of(folder) {
        None => hf::load(folder, model, device, dtype, Some(ranks)),
        Some(_) if run == folder => {
            Parameters::load(model, &run.join("model.safetensors"), device, dtype, Some(ranks))
        }
        Some(path) => {
            let (about, state) = checkpoint::open(folder)?;
            about.check_settings(run, &Config::resolve(Config::read_last_settings(&path)?)?.identity())?;
            Parameters::weights_of(model, &state, device, dtype, Some(ranks))
        }
    }
}
