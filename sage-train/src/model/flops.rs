//! The FLOPs of a model.

use super::config::LlamaConfig;
use super::sla2_config::{Sla2Config, Stage};
use super::windows::causal_pairs;

impl LlamaConfig {
    /// FLOPs of forward and backward for one token: 6 per parameter of a matmul, and
    /// `6 * layers * heads * head_dim * context` for causal attention. Sliding windows reduce this attention term. SLA2
    /// multiplies it by the fraction of (query, key) pairs that exact attention computes, and SLA2's tail adds
    /// `24 * layers * heads * head_dim^2`.
    pub fn flops_per_token(&self) -> u64 {
        self.flops(self.sla2.as_ref())
    }

    /// As [`LlamaConfig::flops_per_token`], but with dense attention if `step` (the first is 0) is before SLA2's
    /// sparse stage.
    pub fn flops_per_token_at(&self, step: u64) -> u64 {
        self.flops(self.sla2.as_ref().filter(|sla2| sla2.stage(step) == Stage::Sparse))
    }

    fn flops(&self, sla2: Option<&Sla2Config>) -> u64 {
        // Every field is named, so that the FLOPs of a new part of the model cannot be forgotten.
        let Self {
            layers,
            heads,
            head_dim,
            context,
            untied,
            scheme,
            // The methods `parameters`, `embedding_parameters` and `window_of` read these fields, except `sla2`. The
            // argument `sla2` replaces the field.
            vocab: _,
            width: _,
            key_heads: _,
            ffn: _,
            qkv_bias: _,
            qk_norm: _,
            sinks: _,
            windows: _,
            sla2: _,
            // These settings add no significant FLOPs, or change only the precision of matmuls. FLOPs of recomputation
            // in the backward are not counted.
            rope_base: _,
            rope_scaling: _,
            norm_eps: _,
            init_std: _,
            linear: _,
            linear_compute_layers: _,
            linear_head: _,
            linear_in_evaluation: _,
            layer_schemes: _,
            softcap: _,
            z_loss: _,
            recompute: _,
            deterministic: _,
        } = *self;
        let channels = (layers * heads * head_dim) as f64;
        let attention = match (scheme, sla2) {
            (None, _) => 0.0,
            (_, None) => {
                let pairs = |layer| causal_pairs(context, self.window_of(layer));
                let all: f64 = (0..layers).map(pairs).sum();
                2.0 * all / context as f64 * (heads * head_dim) as f64
            }
            (_, Some(sla2)) => {
                let tail = if sla2.tail.is_some() { 4.0 * head_dim as f64 } else { 0.0 };
                channels * (context as f64 * (1.0 - sla2.sparsity(context)) + tail)
            }
        };
        let looked_up = if untied { self.embedding_parameters() } else { 0 };
        6 * (self.parameters() - looked_up + attention as u64)
    }
}
