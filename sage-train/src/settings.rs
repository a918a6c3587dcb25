//! Every setting of a run, as typed on the command line or written in a TOML file. All optional:
//! `config` fills in the rest from the preset.

mod attention;
mod sla2;
mod source;
pub mod tables;

use std::path::PathBuf;

pub use attention::{Attn, Numerics, SmoothingSetting, Text};
use candle_sage::{Granularity, Int8Products, PReference, ValueGroups};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
pub use sla2::{AlphaSetting, Share, TailSetting};
pub use source::SourceSetting;
use source::sources;

use crate::device::Place;
use crate::model::Recompute;
use crate::quantity::Quantity;

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum Switch {
    On,
    Off,
}

/// A named set of defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Preset {
    /// 1M parameters, context 256: trains in about a minute on two cores
    Tiny,
    /// 12M parameters, context 512: minutes to hours on a CPU
    Mini,
    /// The paper's Llama: 20 layers, width 1024, 16 heads of 64, context 4096
    #[value(name = "325m")]
    #[serde(rename = "325m")]
    Paper325m,
}

/// How the learning rate moves after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    /// Half a cosine down to `min-lr`
    Cosine,
    /// Warm-up, stable, decay: constant, then straight down to `min-lr` over `decay-fraction`
    Wsd,
    /// Constant
    Constant,
}

impl Schedule {
    /// The keys of the settings that are its own.
    pub fn own_settings(self) -> &'static [&'static str] {
        match self {
            Self::Cosine => &["min-lr"],
            Self::Wsd => &["min-lr", "decay-fraction"],
            Self::Constant => &[],
        }
    }
}

/// The settings of a run. The doc comment of a field is its help text and its TOML key its name.
#[derive(Debug, Clone, Default, PartialEq, Args, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct Settings {
    /// A named set of defaults [default: tiny]
    #[arg(long, value_enum, help_heading = "Run")]
    pub preset: Option<Preset>,

    /// How to attend [default: sagebwd]
    #[arg(long, value_enum, help_heading = "Attention")]
    pub attn: Option<Attn>,
    /// RMSNorm of each head's queries and keys before the rotary embedding [default: on]
    #[arg(long, value_enum, help_heading = "Attention")]
    pub qk_norm: Option<Switch>,
    /// Token means subtracted before quantizing [default: k for sagebwd, none for attn-qat]
    #[arg(long, value_enum, help_heading = "Attention")]
    pub smoothing: Option<SmoothingSetting>,
    /// SageBwd: products in INT8: paper, forward-and-s, forward, or a list such as forward,s,dv [default: paper]
    #[arg(long, help_heading = "Attention")]
    pub products: Option<Text<Int8Products>>,
    /// SageBwd: vectors that share a scale in the backward: vector, group-N, tile [default: vector]
    #[arg(long, help_heading = "Attention")]
    pub granularity: Option<Text<Granularity>>,
    /// Attn-QAT: along what 16 values of V share a scale: tokens, head-dim [default: tokens]
    #[arg(long, help_heading = "Attention")]
    pub value_groups: Option<Text<ValueGroups>>,
    /// Attn-QAT: what probabilities are relative to when quantized: row-max, two-level, literal [default: row-max]
    #[arg(long, help_heading = "Attention")]
    pub p_reference: Option<Text<PReference>>,
    /// Attn-QAT: compute dS with the output of unquantized probabilities [default: on]
    #[arg(long, value_enum, help_heading = "Attention")]
    pub high_precision_output: Option<Switch>,
    /// Attn-QAT: compute the backward from the quantized query, key and value [default: on]
    #[arg(long, value_enum, help_heading = "Attention")]
    pub matched_recomputation: Option<Switch>,
    /// Attn-QAT: compute dV from quantized probabilities [default: on]
    #[arg(long, value_enum, help_heading = "Attention")]
    pub requantized_p: Option<Switch>,

    /// Numerics of the selected blocks, and of the dense attention before: fpa, sagebwd, attn-qat [default: sagebwd]
    #[arg(long, value_name = "SCHEME", help_heading = "SLA2")]
    pub sla2_numerics: Option<Text<Numerics>>,
    /// Part of the (query, key) pairs that is not computed, such as 90% [default: 90%]
    #[arg(long, value_name = "SHARE", help_heading = "SLA2")]
    pub sla2_sparsity: Option<Share>,
    /// Blocks of keys that a block of queries picks, instead of a sparsity
    #[arg(long, value_name = "N", help_heading = "SLA2")]
    pub sla2_blocks: Option<usize>,
    /// Tokens of a block; on a GPU 128 [default on the CPU: a sixteenth of the context, 16 to 128]
    #[arg(long, value_name = "N", help_heading = "SLA2")]
    pub sla2_block: Option<usize>,
    /// What the linear tail sums over [default: past]
    #[arg(long, value_enum, help_heading = "SLA2")]
    pub sla2_tail: Option<TailSetting>,
    /// How the share of the selected blocks comes from what is learned [default: count]
    #[arg(long, value_enum, help_heading = "SLA2")]
    pub sla2_alpha: Option<AlphaSetting>,
    /// Steps of dense attention at the start [default: 60 % of the run]
    #[arg(long, value_name = "N", help_heading = "SLA2")]
    pub sla2_dense_steps: Option<Quantity>,
    /// The last of them, in which the router learns where dense attention looks [default: 100, at most a tenth of the run]
    #[arg(long, value_name = "N", help_heading = "SLA2")]
    pub sla2_router_steps: Option<Quantity>,

    /// What to train on: .txt, .jsonl (each also .gz, .zst), .parquet, or .bin shards of tokens; a folder or a
    /// 'pattern*' of them; given again, with weights, a mixture [default: the built-in corpus]
    #[arg(long, value_name = "PATH[=WEIGHT]", help_heading = "Data")]
    #[serde(deserialize_with = "sources")]
    pub data: Option<Vec<SourceSetting>>,
    /// Key of JSON lines, or column of parquet, that holds the text [default: text]
    #[arg(long, value_name = "NAME", help_heading = "Data")]
    pub text_field: Option<String>,
    /// A tokenizer.json, or a model on the Hugging Face Hub that has one, e.g. gpt2
    /// [default: the one beside the shards; for text, trained on it]
    #[arg(long, value_name = "FILE", help_heading = "Data")]
    pub tokenizer: Option<String>,
    /// Keep attention inside each document of a sequence [default: off]
    #[arg(long, value_enum, help_heading = "Data")]
    pub document_mask: Option<Switch>,
    /// Megabytes of built-in corpus [default: 8]
    #[arg(long, value_name = "MB", help_heading = "Data")]
    pub corpus_mb: Option<u64>,
    /// Part of the data kept for validation [default: 0.05]
    #[arg(long, value_name = "PART", help_heading = "Data")]
    pub val_fraction: Option<f64>,
    /// Entries of the model's vocabulary, and of the byte-level BPE trained on the data [default: the tokenizer's,
    /// where there is one, up to a multiple of 64]
    #[arg(long, value_name = "N", help_heading = "Data")]
    pub vocab_size: Option<Quantity>,
    /// Tokens in a sequence
    #[arg(long, value_name = "N", help_heading = "Data")]
    pub context: Option<Quantity>,

    /// Tokens in an optimizer step, e.g. 256k = 262,144
    #[arg(long, value_name = "N", help_heading = "Batch and length")]
    pub tokens_per_step: Option<Quantity>,
    /// Sequences that go through the model at once
    #[arg(long, value_name = "N", help_heading = "Batch and length")]
    pub micro_batch: Option<usize>,
    /// Optimizer steps
    #[arg(long, value_name = "N", help_heading = "Batch and length", conflicts_with = "tokens")]
    pub steps: Option<Quantity>,
    /// Tokens in all, instead of steps
    #[arg(long, value_name = "N", help_heading = "Batch and length")]
    pub tokens: Option<Quantity>,

    /// Peak learning rate
    #[arg(long, value_name = "LR", help_heading = "Optimizer")]
    pub lr: Option<f64>,
    /// Learning rate at the end, as a part of the peak [default: 0.1, ours: the paper does not say]
    #[arg(long, value_name = "PART", help_heading = "Optimizer")]
    pub min_lr: Option<f64>,
    /// Steps of linear warm-up [default: the preset's, at most a tenth of the steps]
    #[arg(long, value_name = "N", help_heading = "Optimizer")]
    pub warmup_steps: Option<Quantity>,
    /// Course of the learning rate after the warm-up [default: cosine]
    #[arg(long, value_enum, help_heading = "Optimizer")]
    pub schedule: Option<Schedule>,
    /// Part of the run in which `wsd` decays [default: 0.2]
    #[arg(long, value_name = "PART", help_heading = "Optimizer")]
    pub decay_fraction: Option<f64>,
    /// AdamW beta1 [default: 0.9, ours]
    #[arg(long, value_name = "BETA", help_heading = "Optimizer")]
    pub beta1: Option<f64>,
    /// AdamW beta2 [default: 0.95, ours]
    #[arg(long, value_name = "BETA", help_heading = "Optimizer")]
    pub beta2: Option<f64>,
    /// AdamW epsilon [default: 1e-8, ours]
    #[arg(long, value_name = "EPS", help_heading = "Optimizer")]
    pub adam_eps: Option<f64>,
    /// Weight decay, of matrices only [default: 0.1, ours]
    #[arg(long, value_name = "DECAY", help_heading = "Optimizer")]
    pub weight_decay: Option<f64>,
    /// Largest norm of the gradient; 0 does not clip [default: 1, ours]
    #[arg(long, value_name = "NORM", help_heading = "Optimizer")]
    pub clip: Option<f64>,

    /// Factor of the z-loss, which keeps logits from drifting (PaLM: 1e-4); part of the training loss, not of the
    /// validation's [default: 0]
    #[arg(long, value_name = "Z", help_heading = "Optimizer")]
    pub z_loss: Option<f64>,
    /// Skip updates whose loss or gradient norm lies so many standard deviations above the mean of the last 128
    /// steps; 0 skips none [default: 0]
    #[arg(long, value_name = "Z", help_heading = "Optimizer")]
    pub skip_spikes: Option<f64>,

    /// Begin with the weights, the shape and the tokenizer of a Hugging Face folder: a Llama, or a Qwen3 with QK-norm
    #[arg(long, value_name = "DIR", help_heading = "Model")]
    pub init_from: Option<PathBuf>,
    /// Transformer blocks
    #[arg(long, value_name = "N", help_heading = "Model")]
    pub layers: Option<usize>,
    /// Width of the residual stream
    #[arg(long, value_name = "N", help_heading = "Model")]
    pub width: Option<usize>,
    /// Query heads
    #[arg(long, value_name = "N", help_heading = "Model")]
    pub heads: Option<usize>,
    /// Key and value heads, a divisor of the query heads [default: as many]
    #[arg(long, value_name = "N", help_heading = "Model")]
    pub key_heads: Option<usize>,
    /// Width of a head
    #[arg(long, value_name = "N", help_heading = "Model")]
    pub head_dim: Option<usize>,
    /// Hidden width of the SwiGLU network
    #[arg(long, value_name = "N", help_heading = "Model")]
    pub ffn: Option<usize>,
    /// Standard deviation of the initial weights
    #[arg(long, value_name = "STD", help_heading = "Model")]
    pub init_std: Option<f64>,
    /// Base of the rotary embedding [default: 10000]
    #[arg(long, value_name = "BASE", help_heading = "Model")]
    pub rope_base: Option<f64>,
    /// Epsilon of every RMSNorm [default: 1e-6]
    #[arg(long, value_name = "EPS", help_heading = "Model")]
    pub norm_eps: Option<f64>,

    /// Where to train [default: cuda if this build has it]
    #[arg(long, value_enum, help_heading = "Run")]
    pub device: Option<Place>,
    /// What the backward makes again instead of keeping it [default: none]
    #[arg(long, value_enum, help_heading = "Run")]
    pub recompute: Option<Recompute>,
    /// Results repeat to the bit on a GPU too; attention's backward takes longer [default: off]
    #[arg(long, value_enum, help_heading = "Run")]
    pub deterministic: Option<Switch>,
    /// Seed of weights, order of the data, built-in corpus and sample [default: 0]
    #[arg(long, value_name = "N", help_heading = "Run")]
    pub seed: Option<u64>,
    /// Seed of the initial weights alone [default: --seed]
    #[arg(long, value_name = "N", help_heading = "Run")]
    pub weights_seed: Option<u64>,
    /// Seed of the order of the data alone [default: --seed]
    #[arg(long, value_name = "N", help_heading = "Run")]
    pub order_seed: Option<u64>,
    /// Seed of the built-in corpus alone [default: --seed]
    #[arg(long, value_name = "N", help_heading = "Run")]
    pub corpus_seed: Option<u64>,
    /// Folder that gets a folder for the run [default: runs]
    #[arg(long, value_name = "DIR", help_heading = "Run")]
    pub out: Option<PathBuf>,
    /// Name of the run's folder, or the sweep's [default: made from preset and attention, and numbered; a sweep file's]
    #[arg(long, help_heading = "Run")]
    pub name: Option<String>,
    /// Steps between validations; 0 validates at the end only
    #[arg(long, value_name = "N", help_heading = "Run")]
    pub eval_every: Option<Quantity>,
    /// Validation tokens of each validation
    #[arg(long, value_name = "N", help_heading = "Run")]
    pub eval_tokens: Option<Quantity>,
    /// Validate a second time with this attention, by its defaults: `--attn fpa --eval-attn attn-qat` follows what FP4 would
    /// cost a model that is not trained for it
    #[arg(long, value_enum, value_name = "ATTN", help_heading = "Run")]
    pub eval_attn: Option<Attn>,
    /// Steps between probes of attention's errors, which validate as well and take some time on the CPU; 0 for none
    /// [default: 0]
    #[arg(long, value_name = "N", help_heading = "Run")]
    pub probe_every: Option<Quantity>,
    /// Steps between checkpoints; 0 saves at the end only [default: as eval-every]
    #[arg(long, value_name = "N", help_heading = "Run")]
    pub checkpoint_every: Option<Quantity>,
    /// Minutes after which a checkpoint is written in any case; 0 for none [default: 10]
    #[arg(long, value_name = "MINUTES", help_heading = "Run")]
    pub checkpoint_minutes: Option<f64>,
    /// Checkpoints that are kept, the last ones [default: 2]
    #[arg(long, value_name = "N", help_heading = "Run")]
    pub keep_last: Option<usize>,
    /// Also keep the checkpoint of every so many steps; 0 for none [default: 0]
    #[arg(long, value_name = "N", help_heading = "Run")]
    pub keep_every: Option<Quantity>,
    /// Tokens of sample text at the end; 0 for none [default: 160]
    #[arg(long, value_name = "N", help_heading = "Run")]
    pub sample_tokens: Option<usize>,
    /// Threads; results do not depend on them [default: all cores]
    #[arg(long, value_name = "N", help_heading = "Run")]
    pub threads: Option<usize>,
    /// Peak speed of this machine in TFLOP/s, for the MFU
    #[arg(long, value_name = "TFLOPS", help_heading = "Run")]
    pub peak_tflops: Option<f64>,
}

impl Settings {
    /// These settings, with what they leave open taken from `under`.
    #[must_use]
    pub fn over(self, mut under: Settings) -> Settings {
        // Sparsity and blocks say the same thing, and so do steps and tokens: the upper layer's word replaces either.
        if self.sla2_sparsity.is_some() || self.sla2_blocks.is_some() {
            (under.sla2_sparsity, under.sla2_blocks) = (None, None);
        }
        if self.steps.is_some() || self.tokens.is_some() {
            (under.steps, under.tokens) = (None, None);
        }
        // An upper layer's attention comes with settings of its own: a scheme's do not carry over to another.
        if self.attn.is_some_and(|attn| under.attn.is_some_and(|other| !other.shares_settings(attn))) {
            under = Settings {
                smoothing: None,
                products: None,
                granularity: None,
                value_groups: None,
                p_reference: None,
                high_precision_output: None,
                matched_recomputation: None,
                requantized_p: None,
                ..under
            };
        }
        macro_rules! each {
            ($($field:ident),* $(,)?) => { Settings { $($field: self.$field.or(under.$field)),* } };
        }
        // A field that is not listed does not compile.
        each! {
            preset, attn, qk_norm, smoothing, products, granularity, value_groups, p_reference,
            high_precision_output, matched_recomputation, requantized_p, sla2_numerics, sla2_sparsity,
            sla2_blocks, sla2_block, sla2_tail, sla2_alpha, sla2_dense_steps, sla2_router_steps, data,
            text_field, tokenizer, document_mask, corpus_mb, val_fraction, vocab_size, context,
            tokens_per_step, micro_batch, steps, tokens, lr, min_lr, warmup_steps, schedule, decay_fraction,
            beta1, beta2, adam_eps, weight_decay, clip, z_loss, skip_spikes, init_from, layers, width, heads,
            key_heads, head_dim, ffn, init_std, rope_base, norm_eps, device, recompute, deterministic, seed,
            weights_seed, order_seed, corpus_seed, out, name, eval_every, eval_tokens, eval_attn, probe_every,
            checkpoint_every, checkpoint_minutes, keep_last, keep_every, sample_tokens, threads, peak_tflops
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_attention_does_not_take_over_settings() {
        let saved = || Settings {
            attn: Some(candle_sage::SageBwd::default().into()),
            smoothing: Some(SmoothingSetting::K),
            layers: Some(3),
            ..Settings::default()
        };
        let asked = |attn: Attn| Settings { attn: Some(attn), ..Settings::default() }.over(saved());
        let same = asked(candle_sage::SageBwd::default().into());
        assert_eq!((same.smoothing, same.layers), (Some(SmoothingSetting::K), Some(3)));
        let other = asked(candle_sage::AttnQat::default().into());
        assert_eq!((other.smoothing, other.layers), (None, Some(3)));
    }
}
