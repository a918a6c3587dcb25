//! A resolved run as a short table, for `--dry-run` and the log.

use std::fmt;

use super::Config;
use crate::quantity::{Quantity, grouped};

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let m = &self.model;
        let tokens = self.tokens_per_step() * self.steps;
        let source = match &self.data.path {
            Some(path) => path.display().to_string(),
            None => {
                format!("built-in corpus, {} MB, seed {}", self.data.corpus_bytes / 1_000_000, self.data.seed)
            }
        };
        let rows = [
            (
                "model",
                format!(
                    "{} layers, width {}, {} heads ({} key) of {}, SwiGLU {}",
                    m.layers, m.width, m.heads, m.key_heads, m.head_dim, m.ffn
                ),
            ),
            (
                "parameters",
                format!(
                    "{} ({} in the tied embedding of {})",
                    grouped(m.parameters()),
                    grouped(m.embedding_parameters()),
                    grouped(m.vocab as u64)
                ),
            ),
            ("attention", self.attention()),
            ("data", source),
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
            ("FLOPs a token", format!("{} forward + backward", grouped(m.flops_per_token()))),
            (
                "memory",
                format!(
                    "about {} MiB, and the data: {}",
                    grouped(self.memory().total() >> 20),
                    self.memory()
                ),
            ),
        ];
        for (label, text) in rows {
            writeln!(f, "{label:<14} {text}")?;
        }
        Ok(())
    }
}

/// An estimate of peak memory, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    weights: u64,
    optimizer: u64,
    gradients: u64,
    activations: u64,
}

impl Memory {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.weights + self.optimizer + self.gradients + self.activations
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
        )
    }
}

impl Config {
    fn attention(&self) -> String {
        let m = &self.model;
        match m.scheme {
            None => "none".into(),
            Some(scheme) => format!("{scheme}, QK-norm {}", if m.qk_norm { "on" } else { "off" }),
        }
    }

    fn optimizer(&self) -> String {
        let (lr, adamw) = (&self.learning_rate, &self.adamw);
        format!(
            "AdamW, lr {:.2e} to {:.2e} ({:?}, {} steps of warm-up), betas {} {}, decay {}, clip {}",
            lr.peak,
            lr.floor,
            lr.schedule,
            lr.warmup,
            adamw.beta1,
            adamw.beta2,
            adamw.weight_decay,
            self.clip.map_or("off".into(), |norm| norm.to_string())
        )
        .to_lowercase()
        .replacen("adamw", "AdamW", 1)
    }

    /// Peak memory of training, from the shapes.
    pub fn memory(&self) -> Memory {
        let weights = 4 * self.model.parameters();
        Memory {
            weights,
            optimizer: 2 * weights,
            // The sum so far, and those of the micro-batch at hand.
            gradients: 2 * weights,
            activations: self.model.activation_bytes(self.micro_batch),
        }
    }
}
