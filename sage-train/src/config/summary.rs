//! A run's [`Config`] as a short table, for `--dry-run` and the log.

use std::fmt;

use candle_sage::ops::{MuonScale, Orthogonalization};

use super::Config;
use crate::model::{Choice, LinearPrecision, Recompute};
use crate::optim::Optimizer;
use crate::quantity::{Quantity, grouped};
use crate::settings::SourceSetting;

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let m = &self.model;
        let tokens = self.tokens();
        let rows = [
            (
                "model",
                format!(
                    "{} layers, width {}, {} heads ({} key) of {}{}, SwiGLU {}{}",
                    m.layers,
                    m.width,
                    m.heads,
                    m.key_heads,
                    m.head_dim,
                    if m.qkv_bias { " with biases" } else { "" },
                    m.ffn,
                    m.rope_scaling.map_or_else(String::new, |scaling| format!(", rotary scaling {scaling}"))
                ),
            ),
            (
                "parameters",
                format!(
                    "{} ({} in the {} of {})",
                    grouped(m.parameters()),
                    grouped(m.embedding_parameters()),
                    if m.untied { "embedding, as many in the output matrix," } else { "tied embedding" },
                    grouped(m.vocab as u64)
                ),
            ),
            ("attention", self.attention()),
            ("linear layers", self.linear()),
            ("validation", self.validation()),
            ("device", self.device()),
            ("data", self.sources()),
            (
                "tokens",
                format!(
                    "{} = {} steps of {} ({})",
                    grouped(tokens),
                    grouped(self.steps),
                    grouped(self.tokens_per_step()),
                    Quantity(self.tokens_per_step())
                ),
            ),
            (
                "step",
                format!(
                    "micro-batch {} x context {} x accumulation {}",
                    self.micro_batch, m.context, self.accumulation
                ),
            ),
            ("optimizer", self.optimizer()),
            ("FLOPs", self.compute()),
            (
                "memory",
                format!(
                    "about {} MiB plus the data: {}",
                    grouped(self.memory().total() >> 20),
                    self.memory()
                ),
            ),
        ];
        for (label, text) in rows.iter().filter(|(_, text)| !text.is_empty()) {
            writeln!(f, "{label:<14} {text}")?;
        }
        Ok(())
    }
}

/// An estimate of peak memory, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    pub(super) weights: u64,
    pub(super) optimizer: u64,
    pub(super) gradients: u64,
    pub(super) activations: u64,
    /// Memory that NCCL uses in a run with several ranks.
    pub(super) links: u64,
}

impl Memory {
    /// The sum of all parts.
    pub fn total(&self) -> u64 {
        self.weights + self.optimizer + self.gradients + self.activations + self.links
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| grouped(bytes >> 20);
        write!(
            f,
            "weights {}, optimizer {}, gradients {}, activations {}",
            mib(self.weights),
            mib(self.optimizer),
            mib(self.gradients),
            mib(self.activations)
        )?;
        if self.links > 0 { write!(f, ", NCCL {}", mib(self.links)) } else { Ok(()) }
    }
}

/// Dense 16-bit FLOP/s of an H100 SXM, and the fraction of it that a good training step reaches.
pub(super) const H100: (f64, f64) = (989e12, 0.4);

impl Config {
    fn compute(&self) -> String {
        let a_token = self.model.flops_per_token();
        let all = a_token as f64 * self.tokens() as f64;
        let seconds = all / (H100.0 * H100.1);
        let time = match seconds {
            0.0..1.0 => "less than a second".into(),
            1.0..60.0 => format!("{seconds:.0} s"),
            60.0..3600.0 => format!("{:.1} min", seconds / 60.0),
            _ => format!("{:.1} h", seconds / 3600.0),
        };
        format!(
            "{} per token, forward + backward; {all:.2e} in total, {time} on one H100 at {:.0} % of its peak",
            grouped(a_token),
            100.0 * H100.1
        )
    }

    /// Text about the additional validation with `--eval-attn`; empty without it.
    fn validation(&self) -> String {
        self.eval_scheme.map_or(String::new(), |scheme| format!("a second time with {scheme}"))
    }

    /// The precision of linear layers as text; empty if they compute in the model's compute type.
    fn linear(&self) -> String {
        let m = &self.model;
        let (settings, scaling) = match m.linear {
            LinearPrecision::Compute => return String::new(),
            LinearPrecision::Fp8(settings, scaling) => (settings, scaling),
        };
        let others = match m.linear_compute_layers.len() {
            0 => String::new(),
            _ => {
                let layers: Vec<String> = m.linear_compute_layers.iter().map(usize::to_string).collect();
                format!("; without FP8 in layers {}", layers.join(", "))
            }
        };
        let sums = settings.sums[0];
        let head = m.linear_head.fp8().map_or("", |_| ", the output matrix too");
        let validation = m.linear_in_evaluation.fp8().map_or("", |_| " and validation");
        format!(
            "FP8 in training{validation}, gradients {:?}, scaling {scaling:?}, sums {sums:?}{head}{others}",
            settings.gradient
        )
    }

    fn attention(&self) -> String {
        let m = &self.model;
        match m.scheme {
            None => "none".into(),
            Some(_) => {
                let norm = if m.qk_norm { "on" } else { "off" };
                let sla2 = m.sla2.as_ref().map_or(String::new(), |sla2| {
                    let chosen = match sla2.choice {
                        Choice::Learned => "selected by a learned router",
                        Choice::Identity => "selected by an untrained router",
                        Choice::Window => "the nearest and the first",
                    };
                    let learns = sla2.choice == Choice::Learned || sla2.tail.is_some();
                    let router = if learns { format!(" (in the last {} ", sla2.router_steps) } else { String::new() };
                    let router = match (sla2.choice, sla2.tail) {
                        (Choice::Learned, Some(_)) => router + "router and theta learn)",
                        (Choice::Learned, None) => router + "the router learns)",
                        (_, Some(_)) => router + "theta learns)",
                        (_, None) => router,
                    };
                    format!(
                        "SLA2: {} block{} of {}{}, {chosen}, and the diagonal{}, {:.1} % sparse, after {} dense steps{router}; ",
                        sla2.blocks,
                        if sla2.blocks == 1 { "" } else { "s" },
                        sla2.block,
                        if sla2.nearest > 0 { format!(" ({} nearest)", sla2.nearest) } else { String::new() },
                        if sla2.tail.is_none() { ", no tail" } else { "" },
                        sla2.sparsity(m.context) * 100.0,
                        sla2.dense_steps,
                    )
                });
                let windows =
                    m.windows.as_ref().map_or_else(String::new, |windows| format!(", windows {windows}"));
                let softcap = m.softcap.map_or_else(String::new, |cap| format!(", logits capped at {cap}"));
                let sinks = if m.sinks { ", sinks" } else { "" };
                format!("{sla2}{}, QK-norm {norm}{windows}{softcap}{sinks}", m.numerics())
            }
        }
    }

    fn sources(&self) -> String {
        let data = &self.data;
        let list = |sources: &[SourceSetting]| {
            sources.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
        };
        let mut text = list(&data.sources);
        if data.sources.is_empty() {
            text =
                format!("built-in corpus, {} MB, seed {}", data.corpus_bytes / 1_000_000, data.corpus_seed);
        }
        if !data.val_sources.is_empty() {
            text += &format!("; validation on {}", list(&data.val_sources));
        }
        text + if data.document_mask { ", attention inside documents" } else { "" }
    }

    fn device(&self) -> String {
        let recompute = match self.model.recompute {
            Recompute::None => String::new(),
            Recompute::Rotary => ", rotary embedding recomputed".into(),
            Recompute::Attention => ", attention recomputed".into(),
            Recompute::Block => ", blocks recomputed".into(),
        };
        let deterministic = if self.model.deterministic { ", deterministic" } else { "" };
        format!("{} in {}{recompute}{deterministic}", self.device, self.device.dtype().as_str())
    }

    fn optimizer(&self) -> String {
        let (lr, adamw) = (&self.learning_rate, self.optimizer.adamw());
        let muon = match &self.optimizer {
            Optimizer::AdamW(_) => String::new(),
            Optimizer::Muon(muon) => format!(
                "Muon for hidden matrices ({}, momentum {}{}, lr {:.2e} to {:.2e}, {} steps of warm-up, decay {}, \
                 {}{}); ",
                match muon.orthogonalization {
                    Orthogonalization::PolarExpress => "Polar Express",
                    Orthogonalization::Quintic => "quintic",
                },
                muon.momentum,
                muon.beta2
                    .map_or_else(String::new, |beta| format!(", rows divided by their size, beta2 {beta}")),
                muon.learning_rate.peak,
                muon.learning_rate.floor,
                muon.learning_rate.warmup,
                muon.weight_decay,
                match muon.scale {
                    MuonScale::AdamW => "steps of AdamW's size",
                    MuonScale::Original => "original steps",
                },
                if muon.heads_apart { ", each head apart" } else { "" }
            ),
        };
        let rest = if muon.is_empty() { "" } else { " for the rest" };
        let adamw_of_all = format!(
            "AdamW{rest}{}, lr {:.2e} to {:.2e} ({:?}, {} steps of warm-up), betas {} {}, decay {}, clip {}",
            if adamw.initial_moments { " with the checkpoint's moments" } else { "" },
            lr.peak,
            lr.floor,
            lr.schedule,
            lr.warmup,
            adamw.beta1,
            adamw.beta2,
            adamw.weight_decay,
            adamw.clip.map_or("off".into(), |norm| norm.to_string())
        )
        .to_lowercase()
        .replacen("adamw", "AdamW", 1);
        format!("{muon}{adamw_of_all}")
    }

    fn moment_bytes(&self) -> u64 {
        let moments = self.optimizer.moments();
        let specs = self.model.parameter_specs();
        let of_elements: u64 = specs.iter().map(|spec| moments.of(spec.kind).len() as u64 * spec.len()).sum();
        let matrices = specs.iter().filter(|spec| spec.kind.is_hidden_matrix());
        let of_rows: u64 = moments.rows.map_or(0, |_| matrices.map(|spec| spec.dims[0] as u64).sum());
        4 * (of_elements + of_rows)
    }

    /// Peak memory of training, from the shapes.
    pub fn memory(&self) -> Memory {
        let (parameters, element) = (self.model.parameters(), self.device.dtype().size_in_bytes() as u64);
        Memory {
            // The weights in f32, and their copies in 16 bit or FP8, if any.
            weights: 4 * parameters + self.model.copies_of_weights(if element == 4 { 0 } else { element }),
            optimizer: self.moment_bytes(),
            gradients: 4 * parameters,
            // The largest of three, of which at most one is in memory at a time: training's activations, the update's
            // temporary tensors, and validation's 16-bit copies of FP8 weights.
            activations: self
                .model
                .activation_bytes(self.micro_batch, element)
                .max(self.optimizer.scratch_bytes(&self.model.parameter_specs(), element))
                .max(self.model.expanded_bytes(if element == 4 { 0 } else { element })),
            links: 0,
        }
    }
}
