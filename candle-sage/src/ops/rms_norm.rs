//! Root-mean-square normalization with a backward.

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};
use multiversion::multiversion;
use rayon::prelude::*;

#[cfg(feature = "cuda")]
use super::support::{cuda_tensor, with_cuda};
use super::support::{f32_tensor, f32_values, shape_error, supported, with_f32};
use crate::cpu::lanes;
use crate::cpu::view::to_storage;
#[cfg(feature = "cuda")]
use crate::cuda;

const NAME: &str = "rms-norm";

/// `y = x * r * weight` with `r = 1 / sqrt(mean(x^2) + eps)` and the mean over the last dimension.
///
/// `x` is (.., width) in f32, f16 or bf16 with any strides, `weight` is (width); the output has the shape and
/// type of `x`. Sums run in f32. Both inputs receive gradients: `dx = r (g - x r^2 mean(g o x))` with
/// `g = dy o weight`, and `dweight = sum(dy o x r)` over all vectors. (RMSNorm: arXiv 1910.07467.)
///
/// # Errors
/// When the weight does not match the last dimension, or the types are not floats.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let op = RmsNorm::new(x, weight, eps)?;
    supported(NAME, &[x, weight])?;
    x.apply_op2(weight, op)
}

/// `sum = x + residual` and `y = rms_norm(sum, weight)` in one pass, outside candle's graph; returns
/// `(sum, y)`.
///
/// Inputs and outputs have the same shape and type; the norm is of the rounded sum. For training loops that
/// do not use candle's graph; [`rms_norm_backward`] is the backward.
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
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        let [sum, y] = with_cuda(NAME, [x, residual, weight], |[x, residual, weight]| {
            cuda::ops::rms_norm::residual_forward(x, residual, weight, op.eps)
        })?;
        return Ok((cuda_tensor(sum, x.shape()), cuda_tensor(y, x.shape())));
    }
    let sum = (x.detach() + residual.detach())?;
    let y = sum.apply_op2_no_bwd(&weight.detach(), &op)?;
    Ok((sum, y))
}

/// The gradients of `x` and the weight of [`rms_norm`] for the output's gradient `dout`. `residual`, the
/// gradient of `x` through the residual connection past the norm, is added to that of `x` in the same pass,
/// before it is rounded.
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
    let op = RmsNorm::new(x, weight, eps)?;
    same_shape("the output's gradient", x, dout)?;
    if let Some(residual) = residual {
        same_shape("the residual's gradient", x, residual)?;
    }
    supported(NAME, &[x, weight, dout, residual.unwrap_or(x)])?;
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        let [dx, dw] =
            with_cuda(NAME, [x, weight, dout, residual.unwrap_or(x)], |[x, weight, dout, other]| {
                let residual = residual.is_some().then_some(other);
                cuda::ops::rms_norm::backward(x, weight, dout, residual, op.eps)
            })?;
        return Ok([cuda_tensor(dx, x.shape()), cuda_tensor(dw, weight.shape())]);
    }
    let (dx, dw) = with_f32(NAME, [x, weight, dout, residual.unwrap_or(x)], |[x, w, dy, other]| {
        let (mut dx, dw) = backward(x, w, dy, op.eps);
        if residual.is_some() {
            dx.par_chunks_mut(VECTORS).zip(other.par_chunks(VECTORS)).for_each(|(dx, other)| {
                dx.iter_mut().zip(other).for_each(|(dx, other)| *dx += other);
            });
        }
        Ok((dx, dw))
    })?;
    Ok([f32_tensor(dx, x.shape(), x.dtype())?, f32_tensor(dw, weight.shape(), weight.dtype())?])
}

fn same_shape(what: &str, x: &Tensor, other: &Tensor) -> Result<()> {
    if x.dims() == other.dims() && x.dtype() == other.dtype() {
        return Ok(());
    }
    Err(shape_error(
        &format!("rms_norm: {what} does not match the input"),
        ((x.dims(), x.dtype()), (other.dims(), other.dtype())),
        "one shape and one element type",
        "convert with `to_dtype`",
    ))
}

/// Checks `eps`, which is added to the mean square, and converts it to f32.
pub(super) fn checked_eps(op: &str, eps: f64) -> Result<f32> {
    if (eps as f32) >= 0.0 && (eps as f32).is_finite() {
        return Ok(eps as f32);
    }
    Err(shape_error(&format!("{op}: eps is out of range"), eps, "0 and up", "1e-6 is the usual eps"))
}

struct RmsNorm {
    eps: f32,
}

impl RmsNorm {
    fn new(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Self> {
        let width = x.dims().last().copied().unwrap_or(0);
        if width == 0 || weight.dims() != [width] {
            return Err(shape_error(
                "rms_norm: the weight does not match the input",
                (x.dims(), weight.dims()),
                "x (.., width) and weight (width), width at least 1",
                "normalization runs over the last dimension",
            ));
        }
        Ok(Self { eps: checked_eps("rms_norm", eps)? })
    }
}

/// Vectors of one parallel task. Each task makes one partial sum of the weight's gradient, which makes the
/// order of additions independent of the number of threads.
const VECTORS: usize = 256;

#[inline(always)]
fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    let mean = lanes::dot(x, x) / x.len() as f32;
    if mean.is_finite() { 1.0 / (mean + eps).sqrt() } else { inverse_rms_of_large(x, eps) }
}

/// The squares of elements above 1.8e19 overflow; those of elements relative to the largest one do not.
#[cold]
fn inverse_rms_of_large(x: &[f32], eps: f32) -> f32 {
    let max = f32::from_bits(lanes::max_abs_bits(x));
    let mean = x.iter().map(|x| (x / max) * (x / max)).sum::<f32>() / x.len() as f32;
    1.0 / max / (mean + eps / max / max).sqrt()
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

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        w: &CudaStorage,
        w_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let out = cuda::ops::rms_norm::forward((x, x_layout), (w, w_layout), self.eps)?;
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

/// Normalizes all vectors of `x`, each as wide as the weight.
pub(super) fn forward(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let span = VECTORS * weight.len();
    let mut out = vec![0.0; x.len()];
    out.par_chunks_mut(span).zip(x.par_chunks(span)).for_each(|(out, x)| normalize(out, x, weight, eps));
    out
}

/// Gradients of `x` and the weight.
pub(super) fn backward(x: &[f32], weight: &[f32], dy: &[f32], eps: f32) -> (Vec<f32>, Vec<f32>) {
    let span = VECTORS * weight.len();
    let mut dx = vec![0.0; x.len()];
    let partial: Vec<Vec<f32>> = dx
        .par_chunks_mut(span)
        .zip(x.par_chunks(span).zip(dy.par_chunks(span)))
        .map(|(dx, (x, dy))| normalize_backward(dx, x, dy, weight, eps))
        .collect();
    let mut dw = vec![0.0; weight.len()];
    for part in partial {
        dw.iter_mut().zip(part).for_each(|(dw, part)| *dw += part);
    }
    (dx, dw)
}

/// Normalizes each vector of `x`.
#[multiversion(targets = "simd")]
fn normalize(out: &mut [f32], x: &[f32], weight: &[f32], eps: f32) {
    let width = weight.len();
    for (out, x) in out.chunks_exact_mut(width).zip(x.chunks_exact(width)) {
        let r = inverse_rms(x, eps);
        for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
            *out = x * r * w;
        }
    }
}

/// Fills `dx`, and returns the contribution of these vectors to the weight's gradient.
#[multiversion(targets = "simd")]
fn normalize_backward(dx: &mut [f32], x: &[f32], dy: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let width = weight.len();
    let (mut dw, mut g) = (vec![0.0; width], vec![0.0; width]);
    let rows = x.chunks_exact(width).zip(dy.chunks_exact(width));
    for (dx, (x, dy)) in dx.chunks_exact_mut(width).zip(rows) {
        let r = inverse_rms(x, eps);
        for ((g, dy), w) in g.iter_mut().zip(dy).zip(weight) {
            *g = dy * w;
        }
        let pull = lanes::dot(&g, x) * r * r / width as f32;
        for (((dx, dw), (x, dy)), g) in dx.iter_mut().zip(&mut dw).zip(x.iter().zip(dy)).zip(&g) {
            *dx = r * (g - x * pull);
            *dw += dy * x * r;
        }
    }
    dw
}
