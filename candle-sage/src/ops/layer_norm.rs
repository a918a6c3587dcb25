//! Layer normalization with a backward.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp3, Layout, Result, Shape, Tensor};

use super::rms_norm::checked_eps;
use super::support::{
    cuda_tensor, f32_tensor, f32_values, shape_error, shapes_of, supported, with_cuda, with_f32,
};
use crate::cpu::ops::layer_norm::{backward, forward};
use crate::cpu::view::to_storage;
use crate::launch::Launch;

const NAME: &str = "layer-norm";

/// `y = (x - mean(x)) * r * weight + bias` with `r = 1 / sqrt(mean((x - mean(x))^2) + eps)` and means over the last
/// dimension (layer normalization, arXiv 1607.06450).
///
/// `x` is (.., width) in f32, f16 or bf16 with any strides, `weight` and `bias` are (width); the output has the shape
/// and type of `x`. Sums run in f32. `x`, weight and bias receive gradients. (candle-nn's `layer_norm`, and candle-nn's
/// `LayerNorm` with a bias, compute no gradients if `x` is contiguous.) With `c = x - mean(x)` and `g = dy o weight`:
///
/// ```text
/// dx = r (g - mean(g) - c r^2 mean(g o c))        dweight = sum(dy o c r)        dbias = sum(dy)
/// ```
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use candle_sage::ops::layer_norm;
///
/// let x = Var::new(&[[1f32, 5.], [3., 3.]], &Device::Cpu)?;
/// let (weight, bias) = (Tensor::new(&[1f32, 2.], &Device::Cpu)?, Tensor::new(&[0f32, 10.], &Device::Cpu)?);
/// let y = layer_norm(&x, &weight, &bias, 1e-6)?;
/// let rows = y.to_vec2::<f32>()?;
/// assert!((rows[0][0] + 1.).abs() < 1e-5 && (rows[0][1] - 12.).abs() < 1e-5);
/// assert_eq!(rows[1], [0., 10.]);
/// assert!(y.sqr()?.sum_all()?.backward()?.get(&x).is_some());
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// When weight or bias do not match the last dimension, or the types are not floats.
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
    let width = x.dims().last().copied().unwrap_or(0);
    if width == 0 || weight.dims() != [width] || bias.dims() != [width] {
        return Err(shape_error(
            "layer_norm: the weight or the bias does not match the input",
            shapes_of(&[("x", x), ("weight", weight), ("bias", bias)]),
            "x (.., width), weight (width) and bias (width), width at least 1",
            "normalization runs over the last dimension; for a norm without bias use a bias of zeros",
        ));
    }
    let op = LayerNorm { eps: checked_eps("layer_norm", eps)? };
    supported(NAME, &[x, weight, bias])?;
    x.apply_op3(weight, bias, op)
}

pub(crate) struct LayerNorm {
    pub(crate) eps: f32,
}

/// The op that computes the gradients of the inputs from the inputs and the output's gradient.
pub(crate) struct Gradients {
    pub(crate) eps: f32,
}

impl CustomOp3 for LayerNorm {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        w: &CpuStorage,
        w_layout: &Layout,
        b: &CpuStorage,
        b_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let values = f32_values(NAME, x, x_layout)?;
        let (weight, bias) = (f32_values(NAME, w, w_layout)?, f32_values(NAME, b, b_layout)?);
        let out = forward(&values, &weight, &bias, self.eps);
        Ok((to_storage(out, x.dtype())?, x_layout.shape().clone()))
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        w: &CudaStorage,
        w_layout: &Layout,
        b: &CudaStorage,
        b_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let out = self.launch([(x, x_layout), (w, w_layout), (b, b_layout)])?;
        Ok((out, x_layout.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _out: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (gradients, tensors) = (Gradients { eps: self.eps }, [x, weight, bias, dout]);
        if x.device().is_cuda() {
            let [dx, dw, db] = with_cuda(NAME, tensors, |operands| gradients.launch(operands))?;
            let width = weight.shape();
            return Ok((
                Some(cuda_tensor(dx, x.shape())),
                Some(cuda_tensor(dw, width)),
                Some(cuda_tensor(db, width)),
            ));
        }
        let [dx, dw, db] = with_f32(NAME, tensors, |[x, w, _, dy]| Ok(backward(x, w, dy, gradients.eps)))?;
        Ok((
            Some(f32_tensor(dx, x.shape(), x.dtype())?),
            Some(f32_tensor(dw, weight.shape(), weight.dtype())?),
            Some(f32_tensor(db, bias.shape(), bias.dtype())?),
        ))
    }
}
