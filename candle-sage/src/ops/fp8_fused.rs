//! Operators whose output is quantized to FP8 as it is made: no 16-bit tensor is written in between. For training loops that do
//! not use candle's graph.
//!
//! Each returns what the plain operator and [`Fp8Matrix::quantize_with`] return. On a GPU values are quantized from f32, without the
//! rounding to 16 bits in between. A matrix without a scale of earlier steps is made by the plain operator first, and measured.

use candle_core::{CudaStorage, Result, Tensor};

use super::fp8::{Fp8Copies, Fp8Matrix, Quantized, check_dims};
use super::fp8_scales::Fp8Scale;
use super::rms_norm::{residual_rms_norm, rms_norm};
use super::support::{cuda_tensor, shape_error, supported, with_cuda};
use super::swiglu::{swiglu, swiglu_backward};
use crate::launch::Launch;

const SWIGLU: &str = "swiglu-fp8";
const NORM: &str = "rms-norm-fp8";

/// [`swiglu`] of matrices (rows, columns), quantized.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_sage::fp8::Fp8Format::E4M3;
/// use candle_sage::ops::{Fp8Copies, Fp8Matrix, Fp8Scales, swiglu, swiglu_fp8};
///
/// let scales = Fp8Scales::new(&[E4M3], &Device::Cpu)?;
/// let both = Tensor::randn(0f32, 1., (16, 64), &Device::Cpu)?;
/// let (gate, up) = (both.narrow(1, 0, 32)?, both.narrow(1, 32, 32)?);
/// let y = swiglu_fp8(&gate, &up, Fp8Copies::Both, &scales.at(0))?;
/// let plain = Fp8Matrix::quantize_with(&swiglu(&gate, &up)?, Fp8Copies::Both, &scales.at(0))?;
/// assert_eq!(y.codes().unwrap().to_vec2::<u8>()?, plain.codes().unwrap().to_vec2::<u8>()?);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As [`swiglu`] and [`Fp8Matrix::quantize_with`].
pub fn swiglu_fp8(gate: &Tensor, up: &Tensor, copies: Fp8Copies, scale: &Fp8Scale) -> Result<Fp8Matrix> {
    check_gated(gate, &[up])?;
    if !(gate.device().is_cuda() && scale.is_known()) {
        let plain = Fp8Matrix::quantize_with(&swiglu(&gate.detach(), &up.detach())?, copies, scale)?;
        if gate.device().is_cpu() {
            return Ok(plain);
        }
    }
    supported(SWIGLU, &[gate, up])?;
    let state = scale.on_device()?;
    let op = SwiGluFp8 { copies, scale: scale.site() };
    let codes = with_cuda(SWIGLU, [gate, up, state], |operands| op.launch(operands))?;
    Ok(Fp8Matrix::of_codes(codes, gate.dims2()?, scale.format()))
}

/// [`swiglu_backward`] of matrices (rows, columns): the gradients of gate and up, concatenated along the columns, (rows, 2 columns), quantized in both
/// copies; and with `again` also the output, of which the transposed copy is made.
///
/// # Errors
/// As [`swiglu_backward`] and [`Fp8Matrix::quantize_with`].
pub fn swiglu_backward_fp8(
    gate: &Tensor,
    up: &Tensor,
    dout: &Tensor,
    scale: &Fp8Scale,
    again: Option<&Fp8Scale>,
) -> Result<(Fp8Matrix, Option<Fp8Matrix>)> {
    check_gated(gate, &[up, dout])?;
    let is_known = again.is_none_or(Fp8Scale::is_known) && scale.is_known();
    if !(gate.device().is_cuda() && is_known) {
        let (both, y) = swiglu_backward(gate, up, dout, again.is_some())?;
        let y = y.zip(again).map(|(y, again)| Fp8Matrix::quantize_with(&y, Fp8Copies::Columns, again));
        let plain = (Fp8Matrix::quantize_with(&both, Fp8Copies::Both, scale)?, y.transpose()?);
        if gate.device().is_cpu() {
            return Ok(plain);
        }
    }
    supported(SWIGLU, &[gate, up, dout])?;
    let state = scale.on_device()?;
    let op = SwiGluBackwardFp8 { scale: scale.site(), again: again.map(Fp8Scale::site) };
    let (codes, turned): (Quantized<CudaStorage>, Option<Quantized<CudaStorage>>) =
        with_cuda(SWIGLU, [gate, up, dout, state], |operands| op.launch(operands))?;
    let (rows, columns) = gate.dims2()?;
    let y =
        again.zip(turned).map(|(again, codes)| Fp8Matrix::of_codes(codes, (rows, columns), again.format()));
    Ok((Fp8Matrix::of_codes(codes, (rows, 2 * columns), scale.format()), y))
}

/// [`residual_rms_norm`] of a matrix (rows, width), or [`rms_norm`] without a residual, quantized. Returns the sum and the norm.
///
/// # Errors
/// As [`residual_rms_norm`] and [`Fp8Matrix::quantize_with`].
pub fn residual_rms_norm_fp8(
    x: &Tensor,
    residual: Option<&Tensor>,
    weight: &Tensor,
    eps: f64,
    copies: Fp8Copies,
    scale: &Fp8Scale,
) -> Result<(Tensor, Fp8Matrix)> {
    check_dims(NORM, x.dims())?;
    if !(x.device().is_cuda() && scale.is_known()) {
        let (sum, y) = match residual {
            Some(residual) => residual_rms_norm(x, residual, weight, eps)?,
            None => (x.clone(), rms_norm(&x.detach(), &weight.detach(), eps)?),
        };
        let plain = (sum, Fp8Matrix::quantize_with(&y, copies, scale)?);
        if x.device().is_cpu() {
            return Ok(plain);
        }
    }
    if weight.dims() != [x.dim(1)?]
        || residual.is_some_and(|r| (r.dims(), r.dtype()) != (x.dims(), x.dtype()))
    {
        return Err(shape_error(
            "residual_rms_norm_fp8: the inputs do not fit together",
            (x.dims(), residual.map(Tensor::dims), weight.dims()),
            "x and residual (rows, width) of one type, weight (width)",
            "the weight has one value for each channel",
        ));
    }
    supported(NORM, &[x, residual.unwrap_or(x), weight])?;
    let state = scale.on_device()?;
    let op = NormFp8 { eps: eps as f32, residual: residual.is_some(), copies, scale: scale.site() };
    let (sum, codes): (Option<CudaStorage>, Quantized<CudaStorage>) =
        with_cuda(NORM, [x, residual.unwrap_or(x), weight, state], |operands| op.launch(operands))?;
    let sum = sum.map_or_else(|| x.clone(), |sum| cuda_tensor(sum, x.shape()));
    Ok((sum, Fp8Matrix::of_codes(codes, x.dims2()?, scale.format())))
}

fn check_gated(gate: &Tensor, others: &[&Tensor]) -> Result<()> {
    check_dims(SWIGLU, gate.dims())?;
    match others.iter().find(|other| (other.dims(), other.dtype()) != (gate.dims(), gate.dtype())) {
        None => Ok(()),
        Some(other) => Err(shape_error(
            "swiglu in FP8: gate, up and gradient differ",
            ((gate.dims(), gate.dtype()), (other.dims(), other.dtype())),
            "matrices of one shape and one element type",
            "gate and up are projections of the same input",
        )),
    }
}

/// A matrix in the state of [`Fp8Scales`](super::Fp8Scales), and whether it is in E5M2.
#[allow(dead_code, reason = "only kernels read it")]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fp8Site {
    pub(crate) index: usize,
    pub(crate) e5m2: bool,
}

#[allow(dead_code, reason = "only kernels read it")]
pub(crate) struct SwiGluFp8 {
    pub(crate) copies: Fp8Copies,
    pub(crate) scale: Fp8Site,
}

#[allow(dead_code, reason = "only kernels read it")]
pub(crate) struct SwiGluBackwardFp8 {
    pub(crate) scale: Fp8Site,
    pub(crate) again: Option<Fp8Site>,
}

#[allow(dead_code, reason = "only kernels read it")]
pub(crate) struct NormFp8 {
    pub(crate) eps: f32,
    pub(crate) residual: bool,
    pub(crate) copies: Fp8Copies,
    pub(crate) scale: Fp8Site,
}
