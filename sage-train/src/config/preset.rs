//! The defaults of each preset.

use std::path::PathBuf;

use candle_sage::SageBwd;

use crate::device::DeviceKind;
use crate::model::Recompute;
use crate::quantity::Quantity;
use crate::settings::{
    AttentionSettings, BatchSettings, DataSettings, LinearSettings, ModelSettings, OptimizerSettings, Preset,
    RunSettings, Schedule, Settings, Sla2Settings, Switch,
};

/// The settings that differ between presets.
struct Size {
    layers: usize,
    width: usize,
    heads: usize,
    head_dim: usize,
    ffn: usize,
    vocab: u64,
    context: u64,
    init_std: f64,
    micro_batch: usize,
    tokens_per_step: u64,
    steps: u64,
    /// The default of `warmup-steps`. The default is limited to a tenth of the run's steps.
    warmup: u64,
    lr: f64,
    eval_every: u64,
    eval_tokens: u64,
}

const TINY: Size = Size {
    layers: 4,
    width: 128,
    heads: 4,
    head_dim: 32,
    ffn: 384,
    vocab: 1024,
    context: 256,
    init_std: 0.05,
    micro_batch: 16,
    tokens_per_step: 4 << 10,
    steps: 300,
    warmup: 20,
    lr: 4e-3,
    eval_every: 50,
    eval_tokens: 64 << 10,
};

const MINI: Size = Size {
    layers: 6,
    width: 384,
    heads: 6,
    head_dim: 64,
    ffn: 1024,
    vocab: 4096,
    context: 512,
    init_std: 0.03,
    micro_batch: 8,
    tokens_per_step: 8 << 10,
    steps: 200,
    warmup: 20,
    lr: 1.5e-3,
    eval_every: 25,
    eval_tokens: 32 << 10,
};

/// The learning rate is higher than 7.5e-4, the best of three rates at 32k tokens per step (docs/muon.md), because a
/// step of this preset has four times as many tokens.
const SMALL_40M: Size = Size {
    layers: 12,
    width: 512,
    heads: 8,
    head_dim: 64,
    ffn: 1408,
    vocab: 8192,
    context: 1 << 10,
    init_std: 0.02,
    micro_batch: 32,
    tokens_per_step: 128 << 10,
    steps: 6000,
    warmup: 200,
    lr: 1e-3,
    eval_every: 250,
    eval_tokens: 512 << 10,
};

const SMALL_124M: Size = Size {
    layers: 12,
    width: 768,
    heads: 12,
    head_dim: 64,
    ffn: 2048,
    vocab: 50257,
    context: 1 << 10,
    init_std: 0.02,
    micro_batch: 32,
    tokens_per_step: 512 << 10,
    steps: 4800,
    warmup: 250,
    lr: 6e-4,
    eval_every: 100,
    eval_tokens: 1 << 20,
};

/// SageBwd paper, sections 5.1 to 5.3: 2.1M tokens per step, 37.5k steps, 1k warm-up steps, learning rate 3e-5.
const PAPER_325M: Size = Size {
    layers: 20,
    width: 1024,
    heads: 16,
    head_dim: 64,
    ffn: 3072,
    vocab: 50257,
    context: 4 << 10,
    init_std: 0.02,
    micro_batch: 8,
    tokens_per_step: 2 << 20,
    steps: 37_500,
    warmup: 1000,
    lr: 3e-5,
    eval_every: 250,
    eval_tokens: 1 << 20,
};

const LARGE_1300M: Size = Size {
    layers: 24,
    width: 2048,
    heads: 16,
    head_dim: 128,
    ffn: 5632,
    vocab: 50257,
    context: 4 << 10,
    init_std: 0.02,
    micro_batch: 4,
    tokens_per_step: 1 << 20,
    steps: 25_000,
    warmup: 1000,
    lr: 3e-4,
    eval_every: 250,
    eval_tokens: 1 << 20,
};

fn size(preset: Preset) -> Size {
    match preset {
        Preset::Tiny => TINY,
        Preset::Mini => MINI,
        Preset::Small40m => SMALL_40M,
        Preset::Small124m => SMALL_124M,
        Preset::Paper325m => PAPER_325M,
        Preset::Large1300m => LARGE_1300M,
    }
}

/// The default settings of a preset. The functions below name every field of a struct of settings, so that a new
/// setting does not compile without a default.
pub(super) fn defaults(preset: Preset) -> Settings {
    let size = size(preset);
    Settings {
        run: run(preset, &size),
        attention: attention(),
        // All fields are unset: the defaults of some depend on the run's context, steps and device.
        sla2: Sla2Settings::default(),
        // All fields are unset: `LinearSettings::linear` is then bf16, and the other fields have no effect.
        linear: LinearSettings::default(),
        data: data(&size),
        batch: BatchSettings {
            tokens_per_step: Some(Quantity(size.tokens_per_step)),
            micro_batch: Some(size.micro_batch),
            steps: Some(Quantity(size.steps)),
            tokens: None,
        },
        optimizer: optimizer(&size),
        model: model(&size),
    }
}

fn run(preset: Preset, size: &Size) -> RunSettings {
    RunSettings {
        preset: Some(preset),
        device: Some(DeviceKind::default()),
        recompute: Some(Recompute::None),
        deterministic: Some(Switch::Off),
        seed: Some(0),
        weights_seed: None,
        order_seed: None,
        corpus_seed: None,
        out: Some(PathBuf::from("runs")),
        name: None,
        eval_every: Some(Quantity(size.eval_every)),
        eval_tokens: Some(Quantity(size.eval_tokens)),
        eval_attn: None,
        probe_every: Some(Quantity(0)),
        checkpoint_every: None,
        checkpoint_minutes: Some(10.0),
        keep_last: Some(2),
        keep_every: Some(Quantity(0)),
        sample_tokens: Some(160),
        threads: None,
        peak_tflops: None,
    }
}

fn attention() -> AttentionSettings {
    AttentionSettings {
        attn: Some(SageBwd::default().into()),
        attn_layers: None,
        qk_norm: Some(Switch::On),
        smoothing: None,
        key_mean: None,
        products: None,
        granularity: None,
        value_groups: None,
        value_scale: None,
        p_reference: None,
        high_precision_output: None,
        matched_recomputation: None,
        requantized_p: None,
    }
}

fn data(size: &Size) -> DataSettings {
    DataSettings {
        sources: None,
        val_data: None,
        text_field: Some("text".into()),
        tokenizer: None,
        end_of_text: None,
        document_mask: Some(Switch::Off),
        corpus_mb: Some(8),
        val_fraction: Some(0.05),
        vocab_size: Some(Quantity(size.vocab)),
        context: Some(Quantity(size.context)),
    }
}

fn optimizer(size: &Size) -> OptimizerSettings {
    OptimizerSettings {
        optimizer: None,
        muon_lr: None,
        muon_warmup_steps: None,
        muon_weight_decay: None,
        muon_momentum: None,
        muon_beta2: None,
        muon_orthogonalization: None,
        muon_scale: None,
        muon_heads: None,
        lr: Some(size.lr),
        min_lr: Some(0.1),
        warmup_steps: Some(Quantity(size.warmup)),
        schedule: Some(Schedule::Cosine),
        decay_fraction: Some(0.2),
        beta1: Some(0.9),
        beta2: Some(0.95),
        adam_eps: Some(1e-8),
        init_moments: Some(Switch::Off),
        weight_decay: Some(0.1),
        clip: Some(1.0),
        z_loss: Some(0.0),
        skip_spikes: Some(0.0),
    }
}

fn model(size: &Size) -> ModelSettings {
    ModelSettings {
        init_from: None,
        layers: Some(size.layers),
        width: Some(size.width),
        heads: Some(size.heads),
        key_heads: None,
        head_dim: Some(size.head_dim),
        ffn: Some(size.ffn),
        init_std: Some(size.init_std),
        rope_base: Some(10_000.0),
        rope_scaling: None,
        window: None,
        window_pattern: None,
        softcap: None,
        sinks: None,
        untied: None,
        qkv_bias: None,
        norm_eps: Some(1e-6),
    }
}
