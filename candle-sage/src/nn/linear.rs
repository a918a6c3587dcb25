//! Linear maps as modules.

use candle_core::{Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};

/// A linear map of the last dimension, `y = x W^T`, or `y = x W^T + b` with a bias. All leading dimensions
/// are flattened into the rows of one matrix product, so that the weight's gradient is one product too.
///
/// ```
/// use candle_core::{Device, Module, Tensor};
/// use candle_sage::nn::Linear;
///
/// let weight = Tensor::new(&[[1f32, 0.], [0., 2.], [1., 1.]], &Device::Cpu)?;
/// let map = Linear::new(weight).with_bias(Tensor::new(&[0f32, 0., 10.], &Device::Cpu)?);
/// let x = Tensor::new(&[[3f32, 4.]], &Device::Cpu)?;
/// assert_eq!(map.forward(&x)?.to_vec2::<f32>()?, [[3., 8., 17.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    /// A map with a weight of shape (outputs, inputs) and without bias.
    pub fn new(weight: Tensor) -> Self {
        Self { weight, bias: None }
    }

    /// Adds a bias of shape (outputs).
    #[must_use]
    pub fn with_bias(self, bias: Tensor) -> Self {
        Self { bias: Some(bias), ..self }
    }

    /// Loads `weight`, which a new model initializes as candle's linear layers do.
    ///
    /// ```
    /// use candle_core::{DType, Device, Module, Tensor};
    /// use candle_nn::{VarBuilder, VarMap};
    /// use candle_sage::nn::Linear;
    ///
    /// let (variables, device) = (VarMap::new(), Device::Cpu);
    /// let vb = VarBuilder::from_varmap(&variables, DType::F32, &device);
    /// let map = Linear::load(4, 6, vb.pp("up_proj"))?;
    /// assert_eq!(map.forward(&Tensor::zeros((2, 3, 4), DType::F32, &device)?)?.dims(), [2, 3, 6]);
    /// assert!(variables.data().lock().unwrap().contains_key("up_proj.weight"));
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// When it is missing or has another shape.
    pub fn load(inputs: usize, outputs: usize, vb: VarBuilder<'_>) -> Result<Self> {
        let init = candle_nn::init::DEFAULT_KAIMING_NORMAL;
        Ok(Self::new(vb.get_with_hints((outputs, inputs), "weight", init)?))
    }

    /// Loads `weight` and `bias`, which a new model initializes to zero.
    ///
    /// # Errors
    /// When one of them is missing or has another shape.
    pub fn load_with_bias(inputs: usize, outputs: usize, vb: VarBuilder<'_>) -> Result<Self> {
        let bias = vb.get_with_hints(outputs, "bias", Init::Const(0.0))?;
        Ok(Self::load(inputs, outputs, vb)?.with_bias(bias))
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut dims = x.dims().to_vec();
        let inputs = dims.pop().unwrap_or(0);
        let rows: usize = dims.iter().product();
        dims.push(self.weight.dim(0)?);
        let y = x.reshape((rows, inputs))?.matmul(&self.weight.t()?)?;
        let y = match &self.bias {
            None => y,
            Some(bias) => y.broadcast_add(bias)?,
        };
        y.reshape(dims)
    }
}
