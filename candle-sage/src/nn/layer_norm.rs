//! Layer normalization as a module.

use candle_core::{Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};

use crate::ops;
use crate::variables;

/// Layer normalization over the last dimension, (.., width): see [`ops::layer_norm`]. Input, weight and bias receive
/// gradients. (Candle-nn's `LayerNorm` with a bias computes no gradients if the input is contiguous.)
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use candle_sage::nn::LayerNorm;
///
/// let variables = VarMap::new();
/// let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
/// let norm = LayerNorm::load(4, 1e-5, vb.pp("ln"))?;
/// let x = Tensor::new(&[[1f32, 2., 3., 4.]], &Device::Cpu)?;
/// let gradients = norm.forward(&x)?.sqr()?.sum_all()?.backward()?;
/// assert!(candle_sage::untrained(&variables, &gradients).is_empty());
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
    eps: f64,
}

impl LayerNorm {
    /// A norm with weight and bias of shape (width).
    pub fn new(weight: Tensor, bias: Tensor, eps: f64) -> Self {
        Self { weight, bias, eps }
    }

    /// A norm with a weight of shape (width), and a constant bias of zeros.
    ///
    /// # Errors
    /// When there is not enough memory.
    pub fn new_no_bias(weight: Tensor, eps: f64) -> Result<Self> {
        Ok(Self { bias: weight.detach().zeros_like()?, weight, eps })
    }

    /// Loads `weight` and `bias`, which a new model initializes to one and zero.
    ///
    /// # Errors
    /// When a tensor is missing or has the wrong shape.
    pub fn load(width: usize, eps: f64, vb: VarBuilder<'_>) -> Result<Self> {
        let load = |name, value| variables::load(&vb, width, name, Init::Const(value), vb.dtype());
        Ok(Self::new(load("weight", 1.0)?, load("bias", 0.0)?, eps))
    }
}

impl Module for LayerNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        ops::layer_norm(x, &self.weight, &self.bias, self.eps)
    }
}
