//! The `config.json` of a model: its shape, and whether it is a model of this shape at all.

use std::path::Path;

use candle_sage::{Error, ErrorKind, Result};
use serde::Deserialize;
use serde_json::Value;

use super::{CONFIG, MOST, ModelType};
use crate::{during, read_small};

const HINT: &str = "models like SmolLM and Qwen3-0.6B can be: Llama or Qwen3, a tied embedding, plain angles";

/// The part of a `config.json` that is used. Fields that would change the computation are checked.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct HfConfig {
    pub(super) model_type: ModelType,
    pub(super) vocab_size: usize,
    pub(super) hidden_size: usize,
    pub(super) intermediate_size: usize,
    pub(super) num_hidden_layers: usize,
    pub(super) num_attention_heads: usize,
    pub(super) num_key_value_heads: Option<usize>,
    pub(super) head_dim: Option<usize>,
    pub(super) rms_norm_eps: f64,
    pub(super) max_position_embeddings: usize,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    #[serde(default)]
    use_sliding_window: bool,
    hidden_act: Option<String>,
    rope_theta: Option<f64>,
    rope_scaling: Option<Rope>,
    /// Replaces the two fields before in transformers 5.
    rope_parameters: Option<Rope>,
}

/// The rotary embedding. Its kind has two names, and transformers writes both into files that had the older one.
#[derive(Debug, Clone, PartialEq, Deserialize)]
struct Rope {
    rope_type: Option<String>,
    #[serde(rename = "type")]
    older_type: Option<String>,
    rope_theta: Option<f64>,
}

impl Rope {
    /// The kind, if it is not the plain one.
    fn scaling(&self) -> Option<&str> {
        [&self.rope_type, &self.older_type]
            .into_iter()
            .flatten()
            .map(String::as_str)
            .find(|kind| *kind != "default")
    }
}

pub(super) fn unusable(folder: &Path, got: String, allowed: &str) -> Error {
    Error::new(format!("the model in {} cannot be continued", folder.display()))
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
                    "this is a run: `sage-train export {run} --to DIR` writes what is taken here"
                ))
            } else {
                error.hint("this takes a folder with config.json, model.safetensors, tokenizer.json")
            }
            .with_kind(ErrorKind::Invalid)
        })?;
        let unreadable =
            |error: serde_json::Error| during(failed())(error).hint(HINT).with_kind(ErrorKind::Invalid);
        let value: Value = serde_json::from_str(&text).map_err(unreadable)?;
        // The architecture is checked first: the files of others lack fields, which would hide the reason.
        let kind = value["model_type"].as_str().unwrap_or("missing");
        let known = ModelType::ALL.map(ModelType::key);
        if !known.iter().any(|known| known == kind) {
            return Err(unusable(folder, format!("model_type {kind}"), &known.join(", ")));
        }
        let config: Self = serde_json::from_value(value).map_err(unreadable)?;
        config.check(folder)?;
        Ok(config)
    }

    fn check(&self, folder: &Path) -> Result<()> {
        let scaled =
            [&self.rope_scaling, &self.rope_parameters].into_iter().flatten().find_map(Rope::scaling);
        let refused = [
            (!self.tie_word_embeddings, "a separate output matrix".into(), "tie_word_embeddings: true"),
            (self.attention_bias || self.mlp_bias, "biases".into(), "attention_bias and mlp_bias: false"),
            (self.use_sliding_window, "a sliding window".into(), "use_sliding_window: false"),
            (
                self.hidden_act.as_deref().is_some_and(|act| act != "silu"),
                format!("{:?}", self.hidden_act),
                "hidden_act: silu",
            ),
            (
                scaled.is_some(),
                format!("rotary scaling {}", scaled.unwrap_or_default()),
                "rope_type: default",
            ),
            (self.num_attention_heads == 0, "no heads".into(), "1 and up"),
        ];
        match refused.into_iter().find(|(refused, ..)| *refused) {
            Some((_, got, allowed)) => Err(unusable(folder, got, allowed)),
            None => Ok(()),
        }
    }

    pub(super) fn rope_theta(&self) -> f64 {
        self.rope_parameters.as_ref().and_then(|rope| rope.rope_theta).or(self.rope_theta).unwrap_or(10_000.0)
    }
}
