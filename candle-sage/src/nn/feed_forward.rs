//! Llama's feed-forward network.

use candle_core::{Module, Result, Tensor};
use candle_nn::VarBuilder;

use super::Linear;
use crate::ops;

/// Llama's feed-forward network: `W_down swiglu(W_gate x, W_up x)`.
#[derive(Debug, Clone)]
pub struct FeedForward {
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl FeedForward {
    /// A network of its three maps.
    pub fn new(gate: Linear, up: Linear, down: Linear) -> Self {
        Self { gate, up, down }
    }

    /// Loads `gate_proj`, `up_proj` and `down_proj`.
    ///
    /// # Errors
    /// When a weight is missing or has another shape.
    pub fn load(width: usize, hidden: usize, vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self {
            gate: Linear::load(width, hidden, vb.pp("gate_proj"))?,
            up: Linear::load(width, hidden, vb.pp("up_proj"))?,
            down: Linear::load(hidden, width, vb.pp("down_proj"))?,
        })
    }
}

impl Module for FeedForward {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.down.forward(&ops::swiglu(&self.gate.forward(x)?, &self.up.forward(x)?)?)
    }
}
