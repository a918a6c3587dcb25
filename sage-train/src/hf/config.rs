//! Reads the `config.json` of a model, and checks that this trainer supports the model.

use std::path::Path;

use candle_sage::{Error, ErrorKind, Result};
use serde::Deserialize;
use serde_json::Value;

use super::{ACTIVATION, CONFIG, MOST, ModelType};
use crate::model::{RopeScaling, WindowPattern, Windows};
use crate::{during, read_small};

const HINT: &str = "supported models are, for example, SmolLM, Llama 3, Mistral 7B v0.3, Qwen2.5 and Qwen3";

/// The fields of a `config.json` that this trainer uses or checks.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct HfConfig {
    pub(super) model_type: ModelType,
    pub(super) vocab_size: usize,
    pub(super) hidden_size: usize,
    pub(super) intermediate_size: usize,
    pub(super) num_hidden_layers: usize,
    pub(super) num_attention_heads: usize,
    pub(super) num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    #[serde(default = "default_eps")]
    pub(super) rms_norm_eps: f64,
    max_position_embeddings: Option<usize>,
    /// In transformers 5 this field has priority over the field of the same name in `Rope`.
    original_max_position_embeddings: Option<f64>,
    #[serde(default)]
    pub(super) tie_word_embeddings: bool,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    is_causal: Option<bool>,
    use_sliding_window: Option<bool>,
    /// If this field is null, the model has no sliding window. A Qwen2 or Qwen3 has one only if `use_sliding_window` is
    /// true. If this field is missing, the window has 4096 tokens, as in transformers.
    #[serde(default = "default_window")]
    sliding_window: Option<usize>,
    /// Which layers have the sliding window. If this field is missing for a Qwen2 or Qwen3, the layers below
    /// `max_window_layers` have no window.
    layer_types: Option<Vec<String>>,
    max_window_layers: Option<usize>,
    hidden_act: Option<String>,
    rope_theta: Option<f64>,
    rope_scaling: Option<Rope>,
    /// In transformers 5 this field replaces `rope_theta` and `rope_scaling`.
    rope_parameters: Option<Rope>,
    quantization_config: Option<Value>,
}

fn default_window() -> Option<usize> {
    Some(4096)
}

fn default_eps() -> f64 {
    1e-6
}

/// The rotary embedding. The key `rope_type` is the kind of scaling; older files call this key `type`. Some files have
/// both keys, because transformers keeps `type` when it adds `rope_type`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
struct Rope {
    rope_type: Option<String>,
    #[serde(rename = "type")]
    older_type: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
}

/// The kinds of layers that this trainer supports.
pub(super) const LAYER_TYPES: [&str; 2] = ["full_attention", "sliding_attention"];

/// The kind of RoPE scaling that this trainer supports.
const LLAMA3: &str = "llama3";

impl Rope {
    /// The kind of RoPE scaling; `None` without scaling.
    fn kind(&self) -> Option<&str> {
        [&self.rope_type, &self.older_type]
            .into_iter()
            .flatten()
            .map(String::as_str)
            .find(|kind| *kind != "default")
    }

    /// Llama 3's scaling; `None` if one of its four numbers is missing. `original` is the value of
    /// `original_max_position_embeddings` at the top level of config.json.
    fn llama3(&self, original: Option<f64>) -> Option<RopeScaling> {
        Some(RopeScaling {
            factor: self.factor?,
            low_freq_factor: self.low_freq_factor?,
            high_freq_factor: self.high_freq_factor?,
            original_context: self.original_max_position_embeddings.or(original)? as usize,
        })
    }
}

pub(super) fn unusable(folder: &Path, got: String, allowed: &str) -> Error {
    Error::new(format!("the model in {} cannot be used", folder.display()))
        .got(got)
        .allowed(allowed)
        .hint(HINT)
}

impl HfConfig {
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(CONFIG);
        let failed = || format!("cannot use {}", path.display());
        let text = read_small(&path, MOST).map_err(during(failed())).map_err(|error| {
            if folder.join("config.toml").exists() {
                let run = folder.display();
                error.hint(format!(
                    "the folder is a run: `sage-train export {run} --to DIR` writes a model folder from it"
                ))
            } else {
                error.hint("a model folder contains config.json, model.safetensors and tokenizer.json")
            }
            .with_kind(ErrorKind::Invalid)
        })?;
        let unreadable =
            |error: serde_json::Error| during(failed())(error).hint(HINT).with_kind(ErrorKind::Invalid);
        let value: Value = serde_json::from_str(&text).map_err(unreadable)?;
        // The architecture is checked before the fields. Otherwise the error for an unsupported architecture might
        // only name a missing field.
        let kind = value["model_type"].as_str().unwrap_or("missing");
        let known: Vec<_> = ModelType::all().map(ModelType::key).collect();
        if !known.iter().any(|known| known == kind) {
            return Err(unusable(folder, format!("model_type {kind}"), &known.join(", ")));
        }
        // Parses `text`, not `value`, so that an error contains the line of the field.
        let config: Self = serde_json::from_str(&text).map_err(unreadable)?;
        config.check(folder)?;
        Ok(config)
    }

    fn check(&self, folder: &Path) -> Result<()> {
        let original = self.original_max_position_embeddings;
        let scaled = self.rope().and_then(|rope| Some((rope.kind()?, rope.llama3(original))));
        let stated = [&self.rope_scaling, &self.rope_parameters].map(Option::as_ref);
        let computed = |rope: &Rope| (rope.kind().map(str::to_owned), rope.llama3(original));
        let other_original = |rope: &&Rope| {
            rope.kind() == Some(LLAMA3)
                && original.is_some_and(|outer| {
                    rope.original_max_position_embeddings.is_some_and(|own| own != outer)
                })
        };
        let thetas = stated.into_iter().flatten().filter_map(|rope| rope.rope_theta).chain(self.rope_theta);
        let thetas: Vec<f64> = thetas.collect();
        let kinds = self.layer_types.as_deref().unwrap_or_default();
        let other = kinds.iter().find(|kind| !LAYER_TYPES.contains(&kind.as_str()));
        let activation = format!("hidden_act: {ACTIVATION}");
        // transformers reads each of these keys only for some model types.
        let has_bias = match self.model_type {
            ModelType::Llama => self.attention_bias || self.mlp_bias,
            ModelType::Qwen3 => self.attention_bias,
            ModelType::Mistral | ModelType::Ministral | ModelType::Qwen2 => false,
        };
        let refused = [
            (
                has_bias,
                "biases of the output projection or of the feed-forward network".into(),
                "attention_bias and mlp_bias: false",
            ),
            (self.is_causal == Some(false), "is_causal: false".into(), "is_causal: true"),
            (
                other.is_some(),
                format!("layers of {}", other.map_or("", String::as_str)),
                "full_attention, sliding_attention",
            ),
            (
                self.window() == Some(0)
                    || self.layer_types.as_ref().is_some_and(|kinds| kinds.len() != self.num_hidden_layers),
                format!(
                    "sliding_window {}, {} layer_types",
                    self.sliding_window.unwrap_or_default(),
                    kinds.len()
                ),
                "a window of at least 1; layer_types, if present, with a type for each layer",
            ),
            (
                !self.hidden_act.as_deref().is_none_or(|act| [ACTIVATION, "swish"].contains(&act)),
                format!("hidden_act: {}", self.hidden_act.as_deref().unwrap_or_default()),
                activation.as_str(),
            ),
            (
                scaled.is_some_and(|(kind, _)| kind != LLAMA3),
                format!("rotary scaling {}", scaled.map_or("", |(kind, _)| kind)),
                "rope_type: default or llama3",
            ),
            (
                scaled.is_some_and(|(kind, scaling)| kind == LLAMA3 && scaling.is_none()),
                "rotary scaling llama3 without one of its numbers".into(),
                "factor, low_freq_factor, high_freq_factor, original_max_position_embeddings",
            ),
            (
                matches!(stated, [Some(scaling), Some(parameters)] if computed(scaling) != computed(parameters))
                    || thetas.iter().any(|theta| *theta != thetas[0])
                    || self.rope().as_ref().is_some_and(other_original),
                "rope_scaling, rope_parameters, rope_theta and original_max_position_embeddings that contradict each \
                 other"
                    .into(),
                "one rotary embedding",
            ),
            (
                self.quantization_config.is_some(),
                "quantized weights (quantization_config)".into(),
                "weights in f32, f16 or bf16, without quantization_config",
            ),
            (self.num_attention_heads == 0, "no heads".into(), "1 and up"),
        ];
        match refused.into_iter().find(|(refused, ..)| *refused) {
            Some((_, got, allowed)) => Err(unusable(folder, got, allowed)),
            None => Ok(()),
        }
    }

    /// The fields of the rotary embedding, except a `rope_theta` at the file's top level. If a file has both
    /// `rope_scaling` and `rope_parameters`, transformers 5 uses `rope_scaling`.
    fn rope(&self) -> Option<&Rope> {
        self.rope_scaling.as_ref().or(self.rope_parameters.as_ref())
    }

    /// Channels of a head. If the file has no `head_dim`, this is the default of transformers.
    pub(super) fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or(match self.model_type {
            ModelType::Qwen3 => 128,
            ModelType::Llama | ModelType::Mistral | ModelType::Ministral | ModelType::Qwen2 => {
                self.hidden_size / self.num_attention_heads
            }
        })
    }

    /// Tokens of the longest sequence. If the file has no `max_position_embeddings`, this is the default of
    /// transformers.
    pub(super) fn longest(&self) -> usize {
        self.max_position_embeddings.unwrap_or(match self.model_type {
            ModelType::Llama => 2048,
            ModelType::Mistral | ModelType::Ministral => 131_072,
            ModelType::Qwen2 | ModelType::Qwen3 => 32_768,
        })
    }

    /// Tokens of the sliding window. A window that is at least as long as a sequence hides nothing, but is kept: the
    /// same model may later have longer sequences.
    fn window(&self) -> Option<usize> {
        match (self.model_type, self.use_sliding_window) {
            (ModelType::Mistral | ModelType::Ministral, _)
            | (ModelType::Qwen2 | ModelType::Qwen3, Some(true)) => self.sliding_window,
            // transformers' Llama does not read `sliding_window`.
            (ModelType::Llama | ModelType::Qwen2 | ModelType::Qwen3, _) => None,
        }
    }

    pub(super) fn windows(&self) -> Option<Windows> {
        let tokens = self.window()?;
        // Without `layer_types`, all layers of a Mistral or Ministral have the window. With `layer_types`, transformers'
        // AutoModel loads a Mistral as a Ministral.
        let first = match self.model_type {
            ModelType::Mistral | ModelType::Ministral => 0,
            ModelType::Llama | ModelType::Qwen2 | ModelType::Qwen3 => self.max_window_layers.unwrap_or(28),
        };
        let slides = |layer| match &self.layer_types {
            Some(kinds) => kinds[layer] == LAYER_TYPES[1],
            None => layer >= first,
        };
        let layers: Vec<bool> = (0..self.num_hidden_layers).map(slides).collect();
        let pattern = match layers.iter().all(|slides| *slides) {
            true => WindowPattern::default(),
            false => WindowPattern::by_layer(layers.iter().copied()),
        };
        layers.contains(&true).then_some(Windows { tokens, pattern })
    }

    pub(super) fn rope_scaling(&self) -> Option<RopeScaling> {
        let scaled = self.rope().filter(|rope| rope.kind().is_some());
        scaled.and_then(|rope| rope.llama3(self.original_max_position_embeddings))
    }

    pub(super) fn rope_theta(&self) -> f64 {
        self.rope().and_then(|rope| rope.rope_theta).or(self.rope_theta).unwrap_or(10_000.0)
    }
}
