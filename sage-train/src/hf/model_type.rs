//! Model types of the transformers library. Models of these types compute the same results in that library and in this
//! trainer.

use candle_sage::{Error, Result};
use serde::Deserialize;

use crate::model::LlamaConfig;

/// `model_type` of a `config.json`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelType {
    /// `LlamaForCausalLM`
    Llama,
    /// `MistralForCausalLM`: a Llama, optionally with a sliding window in all layers
    Mistral,
    /// `MinistralForCausalLM`: a Llama with a sliding window in some layers
    Ministral,
    /// `Qwen2ForCausalLM`: a Llama with biases of query, key and value
    Qwen2,
    /// `Qwen3ForCausalLM`: a Llama with QK-norm
    Qwen3,
}

impl ModelType {
    pub(super) fn all() -> impl Iterator<Item = Self> {
        // A match, so that the compiler reports a new model type that is missing here.
        let next = |of: &Self| match of {
            Self::Llama => Some(Self::Mistral),
            Self::Mistral => Some(Self::Ministral),
            Self::Ministral => Some(Self::Qwen2),
            Self::Qwen2 => Some(Self::Qwen3),
            Self::Qwen3 => None,
        };
        std::iter::successors(Some(Self::Llama), next)
    }

    /// The model type that computes the same results as a model of `config` would with dense attention.
    ///
    /// # Errors
    /// When transformers has no such model type.
    pub fn of(config: &LlamaConfig) -> Result<Self> {
        // Every field is named, so that an export cannot ignore a new component of the model. A new component must also
        // be counted in `LlamaConfig::flops` and `activation_bytes`. If the component is off by default, its setting
        // must be listed in `absent_by_default`.
        let LlamaConfig {
            qk_norm,
            qkv_bias,
            windows,
            softcap,
            sinks,
            layers,
            vocab: _,
            width: _,
            heads: _,
            key_heads: _,
            head_dim: _,
            ffn: _,
            context: _,
            // Every model type has these fields in its `config.json`.
            rope_base: _,
            rope_scaling: _,
            untied: _,
            norm_eps: _,
            init_std: _,
            // transformers chooses the precision itself.
            linear: _,
            linear_compute_layers: _,
            linear_head: _,
            linear_in_evaluation: _,
            scheme: _,
            layer_schemes: _,
            sla2: _,
            // These fields are used only in training.
            z_loss: _,
            recompute: _,
            deterministic: _,
        } = config;
        let cap = softcap.map(|cap| format!("a soft cap of attention's logits at {cap}"));
        if let Some(got) = cap.or(sinks.then(|| "sinks of attention".into())) {
            return Err(Error::new("transformers has no model with this attention")
                .got(got)
                .allowed("a model without a soft cap and without sinks (Gemma 2 has soft caps and GPT-OSS has sinks, but both have other feed-forward networks than this model)")
                .hint("use the run's model.safetensors: its weights are named as in a Llama model, and the sinks are `self_attn.sinks`"));
        }
        let windows = windows.as_ref().map(|windows| (0..*layers).all(|layer| windows.of(layer).is_some()));
        match (*qk_norm, *qkv_bias) {
            (false, false) => Ok(match windows {
                None => Self::Llama,
                Some(true) => Self::Mistral,
                Some(false) => Self::Ministral,
            }),
            (false, true) => Ok(Self::Qwen2),
            (true, false) => Ok(Self::Qwen3),
            (true, true) => Err(Error::new("transformers has no model of this shape")
                .got("QK-norm and biases of query, key and value")
                .allowed("one of the two: QK-norm (Qwen3) or the biases (Qwen2)")
                .hint("use the run's model.safetensors: its weights have the names of Qwen2 and Qwen3")),
        }
    }

    /// Whether the type's queries and keys are normalized.
    pub(super) fn qk_norm(self) -> bool {
        match self {
            Self::Llama | Self::Mistral | Self::Ministral | Self::Qwen2 => false,
            Self::Qwen3 => true,
        }
    }

    /// Whether the type's query, key and value have biases.
    pub(super) fn qkv_bias(self) -> bool {
        match self {
            Self::Llama | Self::Mistral | Self::Ministral | Self::Qwen3 => false,
            Self::Qwen2 => true,
        }
    }

    /// `model_type`.
    pub(super) fn key(self) -> String {
        self.name().to_lowercase()
    }

    /// The type's name in `architectures`, without `ForCausalLM`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "Llama",
            Self::Mistral => "Mistral",
            Self::Ministral => "Ministral",
            Self::Qwen2 => "Qwen2",
            Self::Qwen3 => "Qwen3",
        }
    }
}
