//! Llama's feed-forward network.

use candle_core::{Module, Result, Tensor};
use candle_nn::VarBuilder;

use super::Linear;
use crate::ops;

/// Llama's feed-forward network: `W_down swiglu(W_gate x, W_up x)`.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use candle_sage::nn::FeedForward;
///
/// let variables = VarMap::new();
/// let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
/// let network = FeedForward::load(8, 24, vb)?;
/// let x = Tensor::randn(0f32, 1., (2, 5, 8), &Device::Cpu)?;
/// let out = network.forward(&x)?;
/// assert_eq!(out.dims(), x.dims());
/// let gradients = out.sqr()?.sum_all()?.backward()?;
/// assert!(variables.all_vars().iter().all(|weight| gradients.get(weight).is_some()));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct FeedForward {
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl FeedForward {
    /// A network from its three linear maps.
    pub fn new(gate: Linear, up: Linear, down: Linear) -> Self {
        Self { gate, up, down }
    }

    /// Loads `gate_proj`, `up_proj` and `down_proj`.
    ///
    /// # Errors
    /// When a weight is missing or has the wrong shape.
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
