//! Linear maps that train in FP8, as modules.

use candle_core::{Module, Result, Tensor};
use candle_nn::VarBuilder;

use super::Linear;
use crate::ops::{self, fp8_linear};

/// A linear map of the last dimension, `y = x W^T`, with its three matmuls (output, gradient of the input, gradient of
/// the weight) in FP8; see [`ops::fp8_linear`]. It replaces a [`Linear`] that has no bias, and loads the same weights.
///
/// The numbers of inputs, outputs and rows (the product of all leading dimensions) must be multiples of 16.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use candle_sage::nn::Fp8Linear;
///
/// let (variables, device) = (VarMap::new(), Device::Cpu);
/// let vb = VarBuilder::from_varmap(&variables, DType::F32, &device);
/// let map = Fp8Linear::load(32, 64, vb.pp("up_proj"))?;
/// let y = map.forward(&Tensor::randn(0f32, 1., (2, 8, 32), &device)?)?;
/// assert_eq!(y.dims(), [2, 8, 64]);
/// let gradients = y.sqr()?.sum_all()?.backward()?;
/// assert!(candle_sage::untrained(&variables, &gradients).is_empty());
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Fp8Linear {
    map: Linear,
    settings: ops::Fp8Linear,
}

impl Fp8Linear {
    /// A map with a weight of shape (outputs, inputs).
    pub fn new(weight: Tensor, settings: ops::Fp8Linear) -> Self {
        Self { map: Linear::new(weight, None), settings }
    }

    /// Loads `weight`. If a `VarMap` does not have the weight, it is initialized as in `candle_nn::linear`.
    ///
    /// # Errors
    /// When the weight is missing or has the wrong shape.
    pub fn load(inputs: usize, outputs: usize, vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self { map: Linear::load(inputs, outputs, vb)?, settings: ops::Fp8Linear::default() })
    }

    /// Sets the format of the output's gradient, and the accumulators that the three matmuls use on a GPU.
    #[must_use]
    pub fn settings(self, settings: ops::Fp8Linear) -> Self {
        Self { settings, ..self }
    }
}

impl Module for Fp8Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.map.map_rows(x, |rows, weight| fp8_linear(rows, weight, self.settings))
    }
}
