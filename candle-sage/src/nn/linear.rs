//! Linear maps as modules.

use candle_core::{Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};

use crate::error::Error;
use crate::variables;

/// A linear map of the last dimension, `y = x W^T`, or `y = x W^T + b` with a bias. All leading dimensions are
/// flattened into the rows of one matmul, so that the weight's gradient is one matmul too.
///
/// ```
/// use candle_core::{Device, Module, Tensor};
/// use candle_sage::nn::Linear;
///
/// let weight = Tensor::new(&[[1f32, 0.], [0., 2.], [1., 1.]], &Device::Cpu)?;
/// let map = Linear::new(weight, Some(Tensor::new(&[0f32, 0., 10.], &Device::Cpu)?));
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
    /// A map with a weight of shape (outputs, inputs) and an optional bias of shape (outputs), as in candle-nn.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        Self { weight, bias }
    }

    /// The weight, (outputs, inputs).
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias, (outputs).
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Loads `weight`. If a `VarMap` does not have the weight, it is initialized as in `candle_nn::linear`.
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
    /// When the weight is missing or has the wrong shape.
    pub fn load(inputs: usize, outputs: usize, vb: VarBuilder<'_>) -> Result<Self> {
        let init = candle_nn::init::DEFAULT_KAIMING_NORMAL;
        Ok(Self::new(variables::load(&vb, (outputs, inputs), "weight", init, vb.dtype())?, None))
    }

    /// Loads `weight` as [`Self::load`] does, and `bias`. If a `VarMap` does not have the bias, it is initialized to
    /// zero.
    ///
    /// # Errors
    /// When a tensor is missing or has the wrong shape.
    pub fn load_with_bias(inputs: usize, outputs: usize, vb: VarBuilder<'_>) -> Result<Self> {
        let bias = variables::load(&vb, outputs, "bias", Init::Const(0.0), vb.dtype())?;
        Ok(Self { bias: Some(bias), ..Self::load(inputs, outputs, vb)? })
    }

    /// The numbers of outputs and inputs.
    pub(super) fn dims(&self) -> Result<(usize, usize)> {
        let &[outputs, inputs] = self.weight.dims() else {
            return Err(Error::shape("the weight of a linear map is not a matrix")
                .got(format!("{:?}", self.weight.dims()))
                .allowed("(outputs, inputs)")
                .hint("`unsqueeze(0)` makes a matrix with one output")
                .into());
        };
        match &self.bias {
            Some(bias) if bias.dims() != [outputs] => Err(Error::shape("the bias does not fit the weight")
                .got(format!("bias {:?}, weight {:?}", bias.dims(), self.weight.dims()))
                .allowed(format!("bias [{outputs}]"))
                .hint("a bias has one value for each output")
                .into()),
            _ => Ok((outputs, inputs)),
        }
    }
}

impl Linear {
    /// Flattens the leading dimensions of `x` into the rows of a matrix, calls `product` with this matrix and the
    /// weight, and adds the bias.
    pub(super) fn map_rows(
        &self,
        x: &Tensor,
        product: impl FnOnce(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let (outputs, inputs) = self.dims()?;
        let mut dims = x.dims().to_vec();
        if dims.pop() != Some(inputs) {
            return Err(Error::shape("the input does not fit the linear map")
                .got(format!("input {:?}, weight {:?}", x.dims(), self.weight.dims()))
                .allowed(format!("an input (.., {inputs})"))
                .hint("a weight is (outputs, inputs); `t()` transposes a weight that is (inputs, outputs)")
                .into());
        }
        if x.dtype() != self.weight.dtype() {
            return Err(Error::new("the input and the weight differ in element type")
                .got(format!("input {}, weight {}", x.dtype().as_str(), self.weight.dtype().as_str()))
                .allowed("one element type")
                .hint("convert with `to_dtype`")
                .into());
        }
        let rows: usize = dims.iter().product();
        dims.push(outputs);
        let y = product(&x.reshape((rows, inputs))?, &self.weight)?;
        let y = match &self.bias {
            None => y,
            Some(bias) => y.broadcast_add(bias)?,
        };
        y.reshape(dims)
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.map_rows(x, |rows, weight| rows.matmul(&weight.t()?))
    }
}
