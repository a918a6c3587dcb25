//! The models of transformers that compute what ours do.

use serde::Deserialize;

use crate::model::LlamaConfig;

/// `model_type` of a `config.json`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelType {
    /// `LlamaForCausalLM`
    Llama,
    /// `Qwen3ForCausalLM`: a Llama with QK-norm
    Qwen3,
}

impl ModelType {
    pub(super) const ALL: [Self; 2] = [Self::Llama, Self::Qwen3];

    /// The model type that computes what a model of this shape computes with dense attention.
    pub fn of(config: &LlamaConfig) -> Self {
        // By name, so that a model with one part more is not written as one without it.
        let LlamaConfig {
            qk_norm,
            vocab: _,
            layers: _,
            width: _,
            heads: _,
            key_heads: _,
            head_dim: _,
            ffn: _,
            context: _,
            rope_base: _,
            norm_eps: _,
            init_std: _,
            // In transformers the model computes in its own precision.
            linear: _,
            linear_compute_layers: _,
            linear_head: _,
            scheme: _,
            layer_schemes: _,
            sla2: _,
            // Of training alone.
            z_loss: _,
            recompute: _,
            deterministic: _,
        } = config;
        if *qk_norm { Self::Qwen3 } else { Self::Llama }
    }

    /// Whether its queries and keys are normalized.
    pub(super) fn qk_norm(self) -> bool {
        match self {
            Self::Llama => false,
            Self::Qwen3 => true,
        }
    }

    /// `model_type`.
    pub(super) fn key(self) -> String {
        self.name().to_lowercase()
    }

    /// Its name in `architectures`, without `ForCausalLM`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "Llama",
            Self::Qwen3 => "Qwen3",
        }
    }
}
