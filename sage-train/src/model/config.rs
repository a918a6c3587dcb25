//! The shape of a Llama, its number of parameters, and the memory of its weights and activations.

use std::collections::{BTreeMap, BTreeSet};

use candle_sage::fp8::Fp8Format;
use candle_sage::{Error, Result, Scheme};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::precision::{LinearPrecision, OperandRole, Scaling};
use super::rope_scaling::RopeScaling;
use super::sla2_config::Sla2Config;
use super::spec::{EMBEDDING, Kind, OUTPUT, ParameterSpec, Start};
use super::windows::Windows;

/// The shape of a decoder-only transformer in Llama's style.
#[derive(Debug, Clone, PartialEq)]
pub struct LlamaConfig {
    /// Vocabulary size: rows of the embedding.
    pub vocab: usize,
    /// Number of transformer blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key heads, and of value heads.
    pub key_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Hidden width of the feed-forward network.
    pub ffn: usize,
    /// Longest sequence, in tokens.
    pub context: usize,
    /// Base of the rotary embedding.
    pub rope_base: f64,
    /// Llama 3's scaling of the rotary embedding's frequencies.
    pub rope_scaling: Option<RopeScaling>,
    /// Whether the output matrix is separate from the embedding.
    pub untied: bool,
    /// Whether the projections of query, key and value have biases.
    pub qkv_bias: bool,
    /// Epsilon of every RMSNorm.
    pub norm_eps: f64,
    /// Whether each head's queries and keys pass through an RMSNorm.
    pub qk_norm: bool,
    /// Standard deviation of the initial weights.
    pub init_std: f64,
    /// Precision of the matmuls of linear layers in training.
    pub linear: LinearPrecision,
    /// Indices of the transformer layers whose linear layers train without FP8, although `linear` is FP8.
    pub linear_compute_layers: BTreeSet<usize>,
    /// Precision of the matmuls of the output matrix in training.
    pub linear_head: LinearPrecision,
    /// Precision in validation of the linear layers that train in FP8. Validation does not use delayed scaling.
    pub linear_in_evaluation: LinearPrecision,
    /// Numerics of attention; `None` makes a model without attention.
    pub scheme: Option<Scheme>,
    /// The layers whose attention scheme differs from `scheme`, with their schemes.
    pub layer_schemes: BTreeMap<usize, Scheme>,
    /// Sliding windows; `None`: every layer attends to all earlier tokens.
    pub windows: Option<Windows>,
    /// Soft cap of attention's logits.
    pub softcap: Option<f64>,
    /// Whether attention has sinks: for each query head, a learned logit that is only added to the denominator of the
    /// softmax.
    pub sinks: bool,
    /// SLA2 settings, if attention is SLA2. SLA2 computes in the numerics of `scheme`.
    pub sla2: Option<Sla2Config>,
    /// Factor of the z-loss in the training loss.
    pub z_loss: f64,
    /// The activations that the backward recomputes.
    pub recompute: Recompute,
    /// Whether attention's gradients are bit-reproducible on a GPU.
    pub deterministic: bool,
}

/// The activations that the backward recomputes in order to save memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Nothing
    None,
    /// QK-norm and rotary embedding
    Rotary,
    /// QK-norm, rotary embedding, attention, and the element-wise product inside SwiGLU
    Attention,
    /// All activations of a transformer block except its input
    Block,
}

impl LlamaConfig {
    /// Checks the range of each size, and that sizes fit each other.
    ///
    /// # Errors
    /// When a size is out of range, or two sizes do not fit each other.
    pub fn validate(&self) -> Result<()> {
        for (name, value, low, high) in [
            ("layers", self.layers, 1, 1000),
            ("width", self.width, 1, 1 << 20),
            ("heads", self.heads, 1, 1 << 16),
            ("key-heads", self.key_heads, 1, self.heads),
            (
                "head-dim",
                self.head_dim,
                *candle_sage::shape::HEAD_DIM.start(),
                *candle_sage::shape::HEAD_DIM.end(),
            ),
            ("ffn", self.ffn, 1, 1 << 22),
            ("context", self.context, 2, 1 << 24),
            ("vocab-size", self.vocab, 2, 1 << 24),
        ] {
            if !(low..=high).contains(&value) {
                return Err(Error::new(format!("{name} is out of range"))
                    .got(value)
                    .allowed(format!("{low} to {high}"))
                    .hint(format!("set --{name} to an allowed value")));
            }
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(Error::new("head-dim is odd")
                .got(self.head_dim)
                .allowed("an even number: the rotary embedding rotates pairs of channels")
                .hint("--head-dim 64"));
        }
        if !self.heads.is_multiple_of(self.key_heads) {
            return Err(Error::new("query heads do not share key heads evenly")
                .got(format!("{} heads, {} key heads", self.heads, self.key_heads))
                .allowed("heads = n x key-heads")
                .hint("--key-heads 1 always fits"));
        }
        self.linear.check("width", self.width)?;
        self.linear.check("ffn", self.ffn)?;
        self.linear.check("heads x head-dim", self.heads * self.head_dim)?;
        self.linear.check("key-heads x head-dim", self.key_heads * self.head_dim)?;
        self.linear_head.check("the number of tokens in the vocabulary", self.vocab)?;
        // This loop checks every hidden matrix, but its errors name only a matrix. The checks above come first,
        // because their errors name a setting.
        for spec in self.parameter_specs().iter().filter(|spec| spec.kind.is_hidden_matrix()) {
            spec.dims.iter().try_for_each(|&len| self.linear.check(&spec.name, len))?;
        }
        self.scheme.as_ref().map_or(Ok(()), candle_sage::Scheme::validate)?;
        self.layer_schemes.values().try_for_each(candle_sage::Scheme::validate)?;
        crate::checks::above_zero("init-std", self.init_std)?;
        crate::checks::above_zero("rope-base", self.rope_base)?;
        self.rope_scaling.map_or(Ok(()), RopeScaling::check)?;
        Ok(())
    }

    /// The FP8 formats of all operands with delayed scaling: for each of the model's layers, a format for each
    /// [`OperandRole`]. If the output matrix is in FP8, the format of its input is last.
    pub(super) fn operand_formats(&self) -> Vec<Fp8Format> {
        let Some((settings, Scaling::Delayed)) = self.linear.fp8() else { return Vec::new() };
        let head = self.linear_head.fp8().map(|_| Fp8Format::E4M3);
        let layers = (0..self.layers).flat_map(|_| OperandRole::ALL.map(|role| role.format(settings)));
        layers.chain(head).collect()
    }

    /// Every parameter, in the order of initialization and update.
    pub fn parameter_specs(&self) -> Vec<ParameterSpec> {
        let std = self.init_std;
        // As in GPT-2, the initial scale of the projections into the residual stream falls with the number of
        // additions to the stream.
        let residual_std = std / (2.0 * self.layers as f64).sqrt();
        let matrix = |name: String, rows, columns, std| ParameterSpec {
            name,
            kind: Kind::Matrix,
            dims: vec![rows, columns],
            start: Start::Normal(std),
            follows: false,
            fp8: false,
        };
        let after = |spec| ParameterSpec { follows: true, ..spec };
        let heads = |spec| ParameterSpec { kind: Kind::Heads(self.head_dim), ..spec };
        let norm = |name: String, width| ParameterSpec {
            name,
            kind: Kind::Norm,
            dims: vec![width],
            start: Start::Value(1.0),
            follows: false,
            fp8: false,
        };
        let (width, ffn) = (self.width, self.ffn);
        let (queries, keys) = (self.heads * self.head_dim, self.key_heads * self.head_dim);
        let bias = |name: String, len| ParameterSpec {
            kind: Kind::Bias,
            start: Start::Value(0.0),
            ..norm(name, len)
        };
        let embedding = matrix(EMBEDDING.into(), self.vocab, width, std);
        let mut specs = vec![ParameterSpec { kind: Kind::Embedding, ..embedding }];
        for layer in 0..self.layers {
            let at = |name: &str| format!("model.layers.{layer}.{name}.weight");
            let fp8 = self.linear_of(layer).is_low();
            let matrix = |name, rows, columns, std| ParameterSpec { fp8, ..matrix(name, rows, columns, std) };
            if self.scheme.is_some() {
                specs.push(norm(at("input_layernorm"), width));
                specs.push(heads(matrix(at("self_attn.q_proj"), queries, width, std)));
                specs.push(after(heads(matrix(at("self_attn.k_proj"), keys, width, std))));
                specs.push(after(heads(matrix(at("self_attn.v_proj"), keys, width, std))));
                if self.qkv_bias {
                    let at = |name: &str| format!("model.layers.{layer}.self_attn.{name}.bias");
                    specs.push(bias(at("q_proj"), queries));
                    specs.push(after(bias(at("k_proj"), keys)));
                    specs.push(after(bias(at("v_proj"), keys)));
                }
                specs.push(matrix(at("self_attn.o_proj"), width, queries, residual_std));
                if self.qk_norm {
                    specs.push(norm(at("self_attn.q_norm"), self.head_dim));
                    specs.push(norm(at("self_attn.k_norm"), self.head_dim));
                }
                if self.sinks {
                    let name = format!("model.layers.{layer}.self_attn.sinks");
                    let start = Start::Value(0.0);
                    specs.push(ParameterSpec { kind: Kind::Sinks, start, ..norm(name, self.heads) });
                }
                if let Some(sla2) = &self.sla2 {
                    let heads = (self.heads, self.key_heads, self.head_dim);
                    specs.extend(sla2.parameter_specs(heads, &format!("model.layers.{layer}.self_attn")));
                }
            }
            specs.push(norm(at("post_attention_layernorm"), width));
            specs.push(matrix(at("mlp.gate_proj"), ffn, width, std));
            specs.push(after(matrix(at("mlp.up_proj"), ffn, width, std)));
            specs.push(matrix(at("mlp.down_proj"), width, ffn, residual_std));
        }
        specs.push(norm("model.norm.weight".into(), width));
        if self.untied {
            let (kind, fp8) = (Kind::Output, self.linear_head.is_low());
            specs.push(ParameterSpec { kind, fp8, ..matrix(OUTPUT.into(), self.vocab, width, std) });
        }
        specs
    }

    /// Precision of the matmuls of a layer's linear layers in training.
    pub fn linear_of(&self, layer: usize) -> LinearPrecision {
        if self.linear_compute_layers.contains(&layer) { LinearPrecision::Compute } else { self.linear }
    }

    /// Numerics of attention in a layer.
    pub fn scheme_of(&self, layer: usize) -> Option<Scheme> {
        self.layer_schemes.get(&layer).copied().or(self.scheme)
    }

    /// The most tokens that a query of a layer sees, including its own token. `None`: all tokens of a sequence.
    pub fn window_of(&self, layer: usize) -> Option<usize> {
        self.windows.as_ref()?.of(layer).filter(|tokens| *tokens < self.context)
    }

    /// Whether attention needs the logits themselves. Schemes with key smoothing compute logits only up to a constant
    /// for each query.
    pub fn needs_logits(&self) -> bool {
        self.softcap.is_some() || self.sinks
    }

    /// Numerics of attention as text: `scheme`, and then the layers that have another scheme.
    pub fn numerics(&self) -> String {
        let Some(scheme) = self.scheme else { return "none".into() };
        let mut layers_of: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (layer, other) in &self.layer_schemes {
            layers_of.entry(other.to_string()).or_default().push(layer.to_string());
        }
        let others =
            layers_of.iter().map(|(other, layers)| format!("; in layers {}: {other}", layers.join(", ")));
        std::iter::once(scheme.to_string()).chain(others).collect()
    }

    /// Number of parameters; an embedding that is also the output matrix counts once.
    pub fn parameters(&self) -> u64 {
        self.parameter_specs().iter().map(ParameterSpec::len).sum()
    }

    /// Number of parameters of the embedding. The output matrix has as many.
    pub fn embedding_parameters(&self) -> u64 {
        (self.vocab * self.width) as u64
    }

    /// Two numbers of parameters: of all hidden matrices, and of the hidden matrices with low-bit matmuls.
    fn linear_parameters(&self) -> [u64; 2] {
        let all: u64 = self
            .parameter_specs()
            .iter()
            .filter(|spec| spec.kind.is_hidden_matrix())
            .map(ParameterSpec::len)
            .sum();
        let layers = (self.layers - self.linear_compute_layers.len()) as u64;
        [all, if self.linear.is_low() { all / self.layers as u64 * layers } else { 0 }]
    }

    /// Bytes of the copies that training reads instead of the f32 weights. `element`: bytes per element of a copy that
    /// is not in FP8, or 0 if only FP8 copies exist.
    pub fn copies_of_weights(&self, element: u64) -> u64 {
        let specs = self.parameter_specs();
        let of_spec = |spec: &ParameterSpec| {
            let is_output = matches!(spec.kind, Kind::Embedding | Kind::Output);
            let low = if is_output { self.linear_head } else { self.linear }.copied_bytes();
            match spec.kind {
                _ if spec.fp8 => low,
                // With an FP8 head, an embedding that is also the output matrix exists in FP8 too.
                Kind::Embedding if !self.untied => element + low,
                _ => element,
            }
        };
        specs.iter().map(|spec| spec.len() * of_spec(spec)).sum()
    }

    /// Bytes of all weights in the form that training reads: FP8, or elements of `element` bytes.
    pub fn read_bytes(&self, element: u64) -> u64 {
        self.parameter_specs().iter().map(|spec| spec.len() * if spec.fp8 { 1 } else { element }).sum()
    }

    /// Training reads some weights only in FP8. Returns the bytes of the copies that validation makes of these weights,
    /// with `element` bytes per element.
    pub fn expanded_bytes(&self, element: u64) -> u64 {
        self.parameter_specs().iter().filter(|spec| spec.fp8).map(|spec| element * spec.len()).sum()
    }

    /// As [`LlamaConfig::flops_per_token`], but the FLOPs of FP8 matmuls are divided by their speedup over 16 bit.
    pub fn dense16_flops_per_token(&self) -> f64 {
        let saved = |parameters: u64, precision: LinearPrecision| {
            6.0 * parameters as f64 * (1.0 - 1.0 / precision.speed())
        };
        self.flops_per_token() as f64
            - saved(self.linear_parameters()[1], self.linear)
            - saved(self.embedding_parameters(), self.linear_head)
    }

    /// Estimated peak bytes of activations in a backward, for `batch` sequences and elements of `element` bytes.
    pub fn activation_bytes(&self, batch: usize, element: u64) -> u64 {
        // Every field is named, so that the bytes of a new part of the model cannot be forgotten.
        let Self {
            vocab,
            layers,
            width,
            heads,
            key_heads,
            head_dim,
            ffn,
            context,
            linear,
            scheme,
            layer_schemes,
            sla2,
            recompute,
            // These settings add no significant activations.
            rope_base: _,
            rope_scaling: _,
            untied: _,
            qkv_bias: _,
            norm_eps: _,
            qk_norm: _,
            init_std: _,
            linear_compute_layers: _,
            linear_head: _,
            linear_in_evaluation: _,
            windows: _,
            softcap: _,
            sinks: _,
            z_loss: _,
            deterministic: _,
        } = self;
        let tokens = (batch * context) as u64;
        let (width, ffn) = (*width as u64, *ffn as u64);
        let (queries, keys) = ((heads * head_dim) as u64, (key_heads * head_dim) as u64);
        let operand = linear.kept_bytes(element);
        let is_low = linear.is_low();
        let rotated = element * (queries + keys);
        // Activation bytes per token. `projected`: residual stream, normalized stream, projected query, key and value.
        // `core`: query and key after norm and rotation, attention's output, and other tensors for the backward.
        let (projected, core) = match scheme {
            None => (0, 0),
            Some(scheme) => {
                // SLA2 adds two stored tensors: the output of attention to selected blocks, and the tail's output.
                let branches = if sla2.is_some() { 2 * queries * element } else { 0 };
                let schemes = layer_schemes.values().chain([scheme]);
                // With FP8 linear layers, the attention output also exists in FP8.
                let codes = if is_low { queries } else { 0 };
                let kept = schemes.map(|scheme| scheme.kept_bytes(queries, keys, element)).max().unwrap_or(0)
                    + branches
                    + codes;
                (
                    operand * width + element * (width + queries + 2 * keys),
                    element * (2 * queries + keys) + kept,
                )
            }
        };
        let mlp = operand * width + element * (width + 2 * ffn);
        let kept = match recompute {
            Recompute::None | Recompute::Rotary => {
                let core = if *recompute == Recompute::Rotary { core.saturating_sub(rotated) } else { core };
                let hidden = if linear.keeps_hidden() { operand * ffn } else { 0 };
                projected + core + mlp + hidden
            }
            Recompute::Attention => projected + mlp,
            Recompute::Block => element * width,
        };
        // Activations that a block's backward recomputes.
        let again = match recompute {
            Recompute::None => 0,
            Recompute::Rotary => rotated,
            Recompute::Attention => core,
            Recompute::Block => projected + core + mlp,
        };
        // FP8 values are stored both row by row and transposed.
        let codes = if is_low { 2 * (width + ffn) } else { 0 };
        // In memory only during a block's backward: recomputed activations, gradients, and FP8 values.
        let at_hand = again + element * (2 * width + 3 * ffn) + codes;
        // Logits exist only in chunks: see `CrossEntropy::chunk_rows`.
        let logits = (*vocab as u64).saturating_mul(tokens * element).min(if element == 4 {
            64 << 20
        } else {
            256 << 20
        });
        tokens * (*layers as u64 * kept + at_hand) + logits
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;
    use crate::settings::{Preset, Settings};

    #[test]
    fn presets_have_the_sizes_of_their_names() {
        for (preset, millions) in [
            (Preset::Tiny, 1),
            (Preset::Mini, 12),
            (Preset::Small40m, 43),
            (Preset::Small124m, 124),
            (Preset::Large1300m, 1336),
        ] {
            let config = Config::resolve(Settings::with(|s| s.run.preset = Some(preset))).expect("a preset");
            assert_eq!((config.model.parameters() + 500_000) / 1_000_000, millions, "{preset:?}");
        }
    }

    #[test]
    fn the_paper_preset_has_the_papers_size() {
        let config =
            Config::resolve(Settings::with(|s| s.run.preset = Some(Preset::Paper325m))).expect("a preset");
        // 324.09M parameters without norms and vocabulary padding, as the SageBwd paper counts. With both, 324.18M.
        assert_eq!(config.model.parameters() / 100_000, 3241);
        assert_eq!(config.tokens_per_step(), 2_097_152);
        assert_eq!(config.steps, 37_500);
        assert_eq!(config.model.vocab, 50_304);
    }
}
