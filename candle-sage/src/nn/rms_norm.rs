//! RMSNorm as a module.

use candle_core::{Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};

use crate::ops;
use crate::variables;

/// Root-mean-square normalization over the last dimension, (.., width): see [`ops::rms_norm`].
///
/// ```
/// use candle_core::{Device, Module, Tensor};
/// use candle_sage::nn::RmsNorm;
///
/// let norm = RmsNorm::new(Tensor::new(&[1f32, 1., 2., 2.], &Device::Cpu)?, 0.0);
/// // The root of the mean square is 2.
/// let x = Tensor::new(&[[2f32, -2., 2., -2.]], &Device::Cpu)?;
/// assert_eq!(norm.forward(&x)?.to_vec2::<f32>()?, [[1., -1., 2., -2.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct RmsNorm {
    pub(super) weight: Tensor,
    pub(super) eps: f64,
}

impl RmsNorm {
    /// A norm with a weight of shape (width).
    pub fn new(weight: Tensor, eps: f64) -> Self {
        Self { weight, eps }
    }

    /// Loads `weight`.
    ///
    /// # Errors
    /// When the weight is missing or has the wrong shape.
    pub fn load(width: usize, eps: f64, vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self::new(variables::load(&vb, width, "weight", Init::Const(1.0), vb.dtype())?, eps))
    }
}

impl Module for RmsNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        ops::rms_norm(x, &self.weight, self.eps)
    }
}
