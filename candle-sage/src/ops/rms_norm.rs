//! Root-mean-square normalization with a backward.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp2, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

use super::support::{
    SPAN, argument_error, cuda_tensor, f32_tensor, f32_values, shape_error, shapes_of, supported, with_cuda,
    with_f32,
};
use crate::cpu::ops::rms_norm::{backward, forward};
use crate::cpu::view::to_storage;
use crate::launch::Launch;

const NAME: &str = "rms-norm";

/// `y = x * r * weight` with `r = 1 / sqrt(mean(x^2) + eps)` and the mean over the last dimension.
///
/// `x` is (.., width) in f32, f16 or bf16 with any strides, `weight` is (width); the output has the shape and
/// type of `x`. Sums run in f32. Both inputs receive gradients: `dx = r * (g - x * r^2 * mean(g * x))` with
/// `g = dy * weight`, and `dweight = sum(dy * x * r)` over all vectors. (RMSNorm: arXiv 1910.07467.)
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use candle_sage::ops::rms_norm;
///
/// let x = Var::new(&[[1f32, 7.], [3., 4.]], &Device::Cpu)?;
/// let weight = Tensor::ones(2, DType::F32, &Device::Cpu)?;
/// let y = rms_norm(&x, &weight, 0.0)?;
/// // The mean square of the first vector is 25.
/// let first = y.get(0)?.to_vec1::<f32>()?;
/// assert!((first[0] - 1. / 5.).abs() < 1e-6 && (first[1] - 7. / 5.).abs() < 1e-6);
/// assert!(y.sum_all()?.backward()?.get(&x).is_some());
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// When the weight does not match the last dimension, or the types are not floats.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let op = RmsNorm::new(x, weight, eps)?;
    supported(NAME, &[x, weight])?;
    x.apply_op2(weight, op)
}

/// `sum = x + residual` and `y = rms_norm(sum, weight)` in one pass; returns `(sum, y)`.
///
/// `x`, `residual` and the outputs have the same shape and type. `y` is computed from the rounded sum. For training
/// loops that do not use candle's graph; [`rms_norm_backward`] is the backward.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_sage::ops::{residual_rms_norm, rms_norm};
///
/// let x = Tensor::new(&[[1f32, 2.]], &Device::Cpu)?;
/// let residual = Tensor::new(&[[10f32, 20.]], &Device::Cpu)?;
/// let weight = Tensor::ones(2, DType::F32, &Device::Cpu)?;
/// let (sum, y) = residual_rms_norm(&x, &residual, &weight, 1e-6)?;
/// assert_eq!(sum.to_vec2::<f32>()?, [[11., 22.]]);
/// assert_eq!(y.to_vec2::<f32>()?, rms_norm(&sum, &weight, 1e-6)?.to_vec2::<f32>()?);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As [`rms_norm`], and when the inputs differ in shape or type.
pub fn residual_rms_norm(
    x: &Tensor,
    residual: &Tensor,
    weight: &Tensor,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    let op = RmsNorm::new(x, weight, eps)?;
    same_shape("the residual", x, residual)?;
    supported(NAME, &[x, residual, weight])?;
    if x.device().is_cuda() {
        let [sum, y] = with_cuda(NAME, [x, residual, weight], |operands| op.launch(operands))?;
        return Ok((cuda_tensor(sum, x.shape()), cuda_tensor(y, x.shape())));
    }
    let sum = (x.detach() + residual.detach())?;
    let y = sum.apply_op2_no_bwd(&weight.detach(), &op)?;
    Ok((sum, y))
}

/// The gradients of `x` and the weight of [`rms_norm`] for the output's gradient `dout`. `residual`, if given, is the
/// gradient that `x` receives through the residual connection around the norm. The function adds `residual` to the
/// gradient of `x` in the same pass, before rounding.
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use candle_sage::ops::{rms_norm, rms_norm_backward};
///
/// let x = Var::randn(0f32, 1., (3, 8), &Device::Cpu)?;
/// let weight = Var::ones(8, DType::F32, &Device::Cpu)?;
/// let y = rms_norm(&x, &weight, 1e-6)?;
/// let [dx, dweight] = rms_norm_backward(&x, &weight, &y.ones_like()?, None, 1e-6)?;
/// let gradients = y.sum_all()?.backward()?;
/// assert_eq!(dx.to_vec2::<f32>()?, gradients.get(&x).unwrap().to_vec2::<f32>()?);
/// assert_eq!(dweight.to_vec1::<f32>()?, gradients.get(&weight).unwrap().to_vec1::<f32>()?);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As [`rms_norm`], and when a gradient does not have the shape and type of `x`.
pub fn rms_norm_backward(
    x: &Tensor,
    weight: &Tensor,
    dout: &Tensor,
    residual: Option<&Tensor>,
    eps: f64,
) -> Result<[Tensor; 2]> {
    let gradients = checked_norm_backward(x, weight, dout, residual, eps)?;
    let tensors = [x, weight, dout, residual.unwrap_or(x)];
    if x.device().is_cuda() {
        let [dx, dw] = with_cuda(NAME, tensors, |operands| gradients.launch(operands))?;
        return Ok([cuda_tensor(dx, x.shape()), cuda_tensor(dw, weight.shape())]);
    }
    let (dx, dw) = with_f32(NAME, tensors, |[x, w, dy, other]| {
        let (mut dx, dw) = backward(x, w, dy, gradients.eps);
        if gradients.residual {
            dx.par_chunks_mut(SPAN).zip(other.par_chunks(SPAN)).for_each(|(dx, other)| {
                dx.iter_mut().zip(other).for_each(|(dx, other)| *dx += other);
            });
        }
        Ok((dx, dw))
    })?;
    Ok([f32_tensor(dx, x.shape(), x.dtype())?, f32_tensor(dw, weight.shape(), weight.dtype())?])
}

pub(super) fn checked_norm_backward(
    x: &Tensor,
    weight: &Tensor,
    dout: &Tensor,
    residual: Option<&Tensor>,
    eps: f64,
) -> Result<Gradients> {
    let op = RmsNorm::new(x, weight, eps)?;
    same_shape("the output's gradient", x, dout)?;
    if let Some(residual) = residual {
        same_shape("the residual's gradient", x, residual)?;
    }
    supported(NAME, &[x, weight, dout, residual.unwrap_or(x)])?;
    Ok(Gradients { eps: op.eps, residual: residual.is_some() })
}

fn same_shape(what: &str, x: &Tensor, other: &Tensor) -> Result<()> {
    if x.dims() == other.dims() && x.dtype() == other.dtype() {
        return Ok(());
    }
    Err(shape_error(
        &format!("rms_norm: {what} does not match the input"),
        shapes_of(&[("x", x), (what, other)]),
        "one shape and one element type",
        "reshape, or convert with `to_dtype`",
    ))
}

/// Checks `eps`, which is added to the mean square, and converts it to f32.
pub(super) fn checked_eps(op: &str, eps: f64) -> Result<f32> {
    if (eps as f32) >= 0.0 && (eps as f32).is_finite() {
        return Ok(eps as f32);
    }
    Err(argument_error(&format!("{op}: eps is out of range"), eps, "finite, 0 and up", "1e-6 is usual"))
}

/// On a GPU the op is launched with `x` and the weight, or with `x`, a residual and the weight; with a residual it also
/// computes `x + residual`.
pub(crate) struct RmsNorm {
    pub(crate) eps: f32,
}

/// The op that computes the gradients of `x` and of the weight. Its inputs are `x`, the weight, the output's gradient,
/// and a fourth tensor. If `residual` is set, the fourth is added to the gradient of `x`; otherwise it is ignored.
pub(crate) struct Gradients {
    pub(crate) eps: f32,
    pub(crate) residual: bool,
}

impl RmsNorm {
    fn new(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Self> {
        let width = x.dims().last().copied().unwrap_or(0);
        if width == 0 || weight.dims() != [width] {
            return Err(shape_error(
                "rms_norm: the weight does not match the input",
                shapes_of(&[("x", x), ("weight", weight)]),
                "x (.., width) and weight (width), width at least 1",
                "normalization runs over the last dimension",
            ));
        }
        Ok(Self { eps: checked_eps("rms_norm", eps)? })
    }
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        w: &CpuStorage,
        w_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (values, weight) = (f32_values(NAME, x, x_layout)?, f32_values(NAME, w, w_layout)?);
        let dtype = x.dtype();
        Ok((to_storage(forward(&values, &weight, self.eps), dtype)?, x_layout.shape().clone()))
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        w: &CudaStorage,
        w_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let out = self.launch([(x, x_layout), (w, w_layout)])?;
        Ok((out, x_layout.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _out: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [dx, dw] = rms_norm_backward(x, weight, dout, None, f64::from(self.eps))?;
        Ok((Some(dx), Some(dw)))
    }
}
