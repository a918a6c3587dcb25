//! Import and export of models in Hugging Face's format: Llama, Mistral and Ministral (windows), Qwen2 (biases) and
//! Qwen3 (QK-norm).
//! `config.json` contains the shape; `model.safetensors` (or several files with an index) contains the weights. A run
//! saves its weights under the same names.

mod config;
mod model_type;
mod weights;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use candle_core::{DType, Device};
use candle_sage::{Error, Result};
use clap::ValueEnum;
use serde_json::{Value, json};

use config::{HfConfig, LAYER_TYPES, unusable};
pub use model_type::ModelType;

use crate::data::{Boundaries, Tokenizer, token_ids};
use crate::model::{
    InitialValues, Kind, LlamaConfig, OUTPUT, ParameterSpec, Parameters, RopeScaling, StateFile, Training,
};
use crate::partial::Folder;
use crate::quantity::{Quantity, counted};
use crate::ranks::Ranks;
use crate::settings::{
    AttentionSettings, ModelSettings, Settings, Sla2Settings, SmoothingSetting, Switch, TailSetting,
    exported_settings, form_name, in_words_by_layer,
};
use crate::{during, notify, read_small, writing};

const CONFIG: &str = "config.json";
/// The file with the settings of attention, for a model trained with Attn-QAT or SLA2.
const ATTENTION: &str = "attention.json";
const WEIGHTS: &str = "model.safetensors";
const GENERATION: &str = "generation_config.json";
/// transformers' name of the activation in `candle_sage::ops::swiglu`, the only activation of the models.
const ACTIVATION: &str = "silu";
/// Largest size of `config.json` and of `attention.json`, in bytes.
const MOST: u64 = 1 << 20;

/// The settings in a folder's `config.json` and `attention.json`. `data.context` is not set, because it can be any
/// length up to the model's longest sequence.
///
/// # Errors
/// When the files cannot be read, or describe another kind of model.
pub fn settings(folder: &Path) -> Result<Settings> {
    let config = HfConfig::read(folder)?;
    let tokenizer = folder.join("tokenizer.json");
    let (attention, sla2) = attention(folder)?;
    let windows = config.windows();
    let on = |is_on: bool| is_on.then_some(Switch::On);
    Ok(Settings::with(|s| {
        s.attention = attention;
        s.sla2 = sla2;
        s.attention.qk_norm = Some(if config.model_type.qk_norm() { Switch::On } else { Switch::Off });
        s.data.vocab_size = Some(Quantity(config.vocab_size as u64));
        s.data.tokenizer = tokenizer.exists().then(|| tokenizer.display().to_string());
        // The struct is written without `..`, so that each setting of a model is decided here.
        s.model = ModelSettings {
            layers: Some(config.num_hidden_layers),
            width: Some(config.hidden_size),
            heads: Some(config.num_attention_heads),
            key_heads: config.num_key_value_heads,
            head_dim: Some(config.head_dim()),
            ffn: Some(config.intermediate_size),
            norm_eps: Some(config.rms_norm_eps),
            rope_base: Some(config.rope_theta()),
            rope_scaling: config.rope_scaling(),
            window: windows.as_ref().map(|windows| Quantity(windows.tokens as u64)),
            window_pattern: windows.map(|windows| windows.pattern),
            untied: on(!config.tie_word_embeddings),
            qkv_bias: on(config.model_type.qkv_bias()),
            // No supported model type has these settings.
            softcap: None,
            sinks: None,
            init_from: None,
            init_std: None,
        };
    }))
}

/// The attention that a model was trained with, if the folder has `attention.json`.
fn attention(folder: &Path) -> Result<(AttentionSettings, Sla2Settings)> {
    let path = folder.join(ATTENTION);
    if !path.exists() {
        return Ok(Default::default());
    }
    let unusable = |got: String| {
        Error::new(format!("cannot use {}", path.display()))
            .got(got)
            .allowed("what `sage-train export` writes")
            .hint("remove this file to load the model with the attention that --attn sets")
    };
    let text = std::fs::read_to_string(&path).map_err(|error| unusable(error.to_string()))?;
    let stated: Value = serde_json::from_str(&text).map_err(|error| unusable(error.to_string()))?;
    if stated.get("attn").is_some() {
        let told: Settings = serde_json::from_value(stated).map_err(|error| unusable(error.to_string()))?;
        return match (told.sla2.sla2_blocks, told.sla2.sla2_block) {
            (Some(_), Some(_)) => Ok((told.attention, told.sla2)),
            _ => Err(unusable("SLA2 without sla2-blocks or sla2-block".into())),
        };
    }
    let stated: BTreeMap<String, String> =
        serde_json::from_value(stated).map_err(|error| unusable(error.to_string()))?;
    let word = |name: &str| stated.get(name).map(String::as_str);
    let settings = || -> Result<AttentionSettings> {
        let smoothing = word("smoothing").map(|text| SmoothingSetting::from_str(text, false));
        Ok(AttentionSettings {
            attn: word("scheme").map(str::parse).transpose()?,
            attn_layers: word("attn_layers").map(str::parse).transpose()?,
            value_groups: word("value_groups").map(str::parse).transpose()?,
            value_scale: word("value_scale").map(str::parse).transpose()?,
            p_reference: word("probability_reference").map(str::parse).transpose()?,
            smoothing: smoothing.transpose().map_err(|error| Error::new("unknown smoothing").got(error))?,
            ..AttentionSettings::default()
        })
    };
    let settings = settings().map(|attention| (attention, Sla2Settings::default()));
    settings.map_err(|error| unusable(error.to_string().replace('\n', "\n           ")))
}

/// The model's longest sequence, in tokens.
///
/// # Errors
/// As [`settings`].
pub fn longest(folder: &Path) -> Result<usize> {
    Ok(HfConfig::read(folder)?.longest())
}

/// The weights of a folder. Parameters of SLA2 that the files lack keep their initial values. But a missing parameter
/// is an error if the folder's `attention.json` has the `--attn` of `config`, and agrees with `config` on whether SLA2
/// has a tail.
///
/// # Errors
/// When a file is missing or damaged, or a tensor does not have the shape that `config` requires.
pub fn load(
    folder: &Path,
    config: &LlamaConfig,
    device: &Device,
    dtype: DType,
    trained: Option<Training<'_>>,
) -> Result<Parameters> {
    let stated = HfConfig::read(folder)?;
    if !stated.tie_word_embeddings && !config.untied {
        return Err(output_is_apart(folder));
    }
    let (attention, told) = attention(folder)?;
    let exported = attention.attn.map(|attn| attn.to_string());
    let no_tail = exported.as_deref() == Some("sla2-sparse") || told.sla2_tail == Some(TailSetting::None);
    let complete = config
        .sla2
        .as_ref()
        .is_some_and(|sla2| exported.as_deref() == Some(form_name(sla2)) && no_tail == sla2.tail.is_none());
    let opened = weights::open(folder, config)?;
    check_tied(folder, config, &opened)?;
    warn_of_others(folder, config, &opened.iter().flat_map(StateFile::names).collect::<Vec<_>>());
    let holder = |name: &str| opened.iter().find(|file| file.contains(name));
    let values = |spec: &ParameterSpec| match (holder(&spec.name), spec.start_in_sla2()) {
        (None, Some(start)) if !complete => Ok(start),
        (None, None) if spec.kind == Kind::Embedding && !config.untied && holder(OUTPUT).is_some() => {
            // safetensors' `save_model` stores tied matrices once, with the name of the embedding or of the output.
            let output = ParameterSpec { name: OUTPUT.into(), ..spec.clone() };
            holder(OUTPUT).unwrap_or(&opened[0]).values(&output, "")
        }
        (found, _) => found.unwrap_or(&opened[0]).values(spec, ""),
    };
    Parameters::from_values(
        config.parameter_specs(),
        &InitialValues::weights(&values),
        device,
        dtype,
        trained,
    )
}

/// The error for settings that tie the output matrix to the embedding, if the weights have a separate output matrix.
pub fn output_is_apart(folder: &Path) -> Error {
    Error::new(format!("the weights in {} have an output matrix that is not the embedding", folder.display()))
        .got("--untied off")
        .allowed("--untied on")
        .hint("leave --untied out: --init-from sets it to match the weights")
}

/// Warns of weights that a model of `config` does not use. Without these weights, its outputs differ from the original
/// model's.
pub fn warn_of_others(folder: &Path, config: &LlamaConfig, names: &[&str]) {
    let specs = config.parameter_specs();
    let known: BTreeSet<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
    // A tied model's output matrix is the embedding, and the rotary frequencies are computed.
    let derived = |name: &str| name == OUTPUT || name.ends_with("rotary_emb.inv_freq");
    let left = names.iter().copied().filter(|name| !known.contains(name) && !derived(name));
    let left: BTreeSet<&str> = left.collect();
    if let Some(first) = left.first() {
        notify(&format!(
            "warning: ignored {} of {}, such as {first}; the outputs differ from the original model's",
            counted(left.len() as u64, "weight"),
            folder.display()
        ));
    }
}

/// The tokens around a document, as `generation_config.json` or else `config.json` says: the first of `bos_token_id`
/// and all of `eos_token_id`. Ids that are not in the tokenizer are ignored with a warning. If neither file has a
/// usable id for a key, the tokenizer's end-of-text token is used.
///
/// # Errors
/// When a file cannot be read, or an id is not a number.
pub fn boundaries(folder: &Path, tokenizer: &Tokenizer) -> Result<Boundaries> {
    let (mut begin, mut ends) = (Vec::new(), Vec::new());
    for name in [GENERATION, CONFIG] {
        let path = folder.join(name);
        if !path.exists() {
            continue;
        }
        let failed = || format!("cannot use {}", path.display());
        let text = read_small(&path, MOST).map_err(during(failed()))?;
        let config: Value = serde_json::from_str(&text)
            .map_err(during(failed()))
            .map_err(|error| error.hint("repair the file, or remove it if it is generation_config.json"))?;
        let ids = |key: &str| -> Result<Vec<u32>> {
            let mut ids = token_ids(&config, key).map_err(|got| {
                Error::new(failed())
                    .got(got)
                    .allowed("the id of a token, or a list of ids")
                    .hint(format!("use ids of tokenizer.json, which has {} entries", tokenizer.vocab_size()))
            })?;
            ids.retain(|&id| {
                let is_known = tokenizer.entry(id).is_ok();
                if !is_known {
                    notify(&format!(
                        "warning: {key} {id} of {} is not in the tokenizer: ignored",
                        path.display()
                    ));
                }
                is_known
            });
            Ok(ids)
        };
        if begin.is_empty() {
            begin = ids("bos_token_id")?;
        }
        if ends.is_empty() {
            ends = ids("eos_token_id")?;
        }
    }
    let own = tokenizer.boundaries();
    Ok(Boundaries {
        begin: begin.first().copied().unwrap_or(own.begin),
        ends: if ends.is_empty() { own.ends } else { ends },
    })
}

/// A tied model computes its logits from the embedding. Checks that an output matrix, if the files have one, equals
/// the embedding.
fn check_tied(folder: &Path, config: &LlamaConfig, files: &[StateFile]) -> Result<()> {
    if config.untied {
        return Ok(());
    }
    let specs = config.parameter_specs();
    let Some(table) = specs.iter().find(|spec| spec.kind == Kind::Embedding) else { return Ok(()) };
    let head = ParameterSpec { name: OUTPUT.into(), ..table.clone() };
    let of = |spec: &ParameterSpec| {
        let holder = files.iter().find(|file| file.contains(&spec.name));
        holder.map(|file| file.values(spec, "")).transpose()
    };
    // Compares bits, so that a NaN equals the same NaN.
    let differ = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits();
    match (of(&head)?, of(table)?) {
        (Some(head), Some(embedding)) if head.iter().zip(&embedding).any(differ) => Err(unusable(
            folder,
            format!("tie_word_embeddings: true, and {OUTPUT} that is not {}", table.name),
            "one matrix for both",
        )),
        _ => Ok(()),
    }
}

fn config_json(config: &LlamaConfig, end_of_text: u32, dtype: DType) -> Result<Value> {
    let kind = ModelType::of(config)?;
    let rope = match config.rope_scaling {
        None => json!({ "rope_type": "default", "rope_theta": config.rope_base }),
        Some(RopeScaling { factor, low_freq_factor, high_freq_factor, original_context }) => json!({
            "rope_type": "llama3",
            "rope_theta": config.rope_base,
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_context,
        }),
    };
    let is_qwen = matches!(kind, ModelType::Qwen2 | ModelType::Qwen3);
    let mut all = json!({
        "architectures": [format!("{}ForCausalLM", kind.name())],
        "model_type": kind.key(),
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_heads,
        "head_dim": config.head_dim,
        "hidden_act": ACTIVATION,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,
        "rope_parameters": rope,
        "initializer_range": config.init_std,
        "tie_word_embeddings": !config.untied,
        "attention_bias": false,
        "attention_dropout": 0.0,
        "mlp_bias": false,
        "use_sliding_window": config.windows.is_some() && is_qwen,
        "use_cache": true,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "torch_dtype": if dtype == DType::BF16 { "bfloat16" } else { "float32" },
    });
    if let Some(windows) = &config.windows {
        all["sliding_window"] = windows.tokens.into();
        // In a Mistral all layers have the window.
        if kind != ModelType::Mistral {
            let kinds = (0..config.layers).map(|layer| LAYER_TYPES[usize::from(windows.of(layer).is_some())]);
            all["layer_types"] = kinds.collect::<Vec<_>>().into();
        }
        if is_qwen {
            // Versions of transformers without `layer_types` give the window to each layer from `max_window_layers` on.
            // They do not support other choices of layers.
            let first = (0..config.layers).find(|&layer| windows.of(layer).is_some());
            all["max_window_layers"] = first.unwrap_or(config.layers).into();
        }
    }
    if config.rope_scaling.is_some() {
        // The name of this key before transformers 5.
        all["rope_scaling"] = all["rope_parameters"].clone();
    }
    Ok(all)
}

/// A model to export.
#[derive(Debug, Clone, Copy)]
pub struct Model<'a> {
    /// The model's shape.
    pub config: &'a LlamaConfig,
    /// The model's weights.
    pub parameters: &'a Parameters,
    /// The model's tokenizer.
    pub tokenizer: &'a Tokenizer,
}

/// Exports a model to a new folder that `transformers` can load. `transformers` computes dense attention, and ignores
/// the exported router and `theta` of SLA2. [`load`] reads them.
///
/// # Errors
/// When the folder exists or cannot be written, or the model has no attention.
pub fn export(model: Model<'_>, to: &Path, dtype: DType) -> Result<()> {
    if model.config.scheme.is_none() {
        return Err(Error::new("transformers has no model without attention")
            .got("--attn none")
            .allowed("a run with attention: any --attn except none")
            .hint("the run's weights are in RUN/model.safetensors, with transformers' names"));
    }
    let folder = Folder::begin(to)?;
    export_into(model, folder.path(), dtype)?;
    folder.finish()
}

fn export_into(model: Model<'_>, to: &Path, dtype: DType) -> Result<()> {
    let write = |name: &str, value: &Value| {
        let path = to.join(name);
        std::fs::write(&path, serde_json::to_string_pretty(value).expect("plain values"))
            .map_err(writing(&path))
    };
    let Model { config, parameters, tokenizer } = model;
    let end = tokenizer.end_of_text();
    write(CONFIG, &config_json(config, end, dtype)?)?;
    write(GENERATION, &json!({ "bos_token_id": end, "eos_token_id": end }))?;
    write("tokenizer_config.json", &tokenizer_config(tokenizer, config.context)?)?;
    tokenizer.save_as_trained(&to.join("tokenizer.json"))?;
    if let Some(scheme) = config.scheme {
        let name = [("scheme", scheme.name().to_string())];
        let schemes = || config.layer_schemes.values().chain([&scheme]);
        let words = match &config.sla2 {
            Some(sla2) => exported_settings(sla2, &scheme),
            None if schemes().all(|scheme| scheme.runtime_settings().is_empty()) => Vec::new(),
            None => {
                let layers = in_words_by_layer(&config.layer_schemes);
                let layers = Some(("attn_layers", layers)).filter(|(_, text)| !text.is_empty());
                name.into_iter().chain(scheme.runtime_settings()).chain(layers).collect()
            }
        };
        if !words.is_empty() {
            // For SLA2, integers in `words` are written as JSON numbers. For other attention, every value is text.
            let number = |text: &str| config.sla2.and_then(|_| text.parse::<u64>().ok());
            let typed = |text: String| number(&text).map_or_else(|| text.clone().into(), Value::from);
            let all = words.into_iter().map(|(key, text)| (key.to_string(), typed(text)));
            write(ATTENTION, &Value::Object(all.collect()))?;
        }
    }
    let weights = to.join(WEIGHTS);
    parameters
        .weights(&Ranks::alone())
        .and_then(|snapshot| snapshot.map_or(Ok(()), |snapshot| snapshot.save_as(&weights, dtype).map(drop)))
        .map_err(writing(&weights))
}

fn tokenizer_config(tokenizer: &Tokenizer, context: usize) -> Result<Value> {
    let end = tokenizer.entry(tokenizer.end_of_text())?;
    Ok(json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "bos_token": end,
        "eos_token": end,
        "add_bos_token": false,
        "add_eos_token": false,
        "clean_up_tokenization_spaces": false,
    }))
}
