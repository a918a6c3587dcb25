//! Operators that quantize their output to FP8 before they write it, without a 16-bit tensor in between. For training
//! loops that do not use candle's graph.
//!
//! Each operator returns the result of the plain operator (the name without `_fp8`), quantized with
//! [`Fp8Matrix::quantize_with`]. On a GPU there is one difference: fused kernels quantize values from f32, without
//! rounding them to 16 bits first. If an output has no scale yet, the plain operator runs first, and the scale is
//! computed from its result.

use candle_core::{CudaStorage, DType, Result, Tensor};

use super::fp8::{Fp8Copies, Fp8Matrix, Quantized, check_dims};
use super::fp8_scales::{Fp8Scale, Fp8Site};
use super::qk_norm_rope::{self, QkNormRopeGrad, checked_backward, qk_norm_rope_backward};
use super::rms_norm::{self, checked_norm_backward, residual_rms_norm, rms_norm, rms_norm_backward};
use super::rope::{RopeStyle, concatenated_shape};
use super::support::{cuda_tensor, shape_error, shapes_of, supported, with_all_cuda, with_cuda};
use super::swiglu::{swiglu, swiglu_backward};
use crate::launch::Launch;

const SWIGLU: &str = "swiglu-fp8";
const NORM: &str = "rms-norm-fp8";
const QK_NORM_ROPE: &str = "qk-norm-rope-fp8";

/// Computes [`swiglu`] of matrices (rows, columns), and quantizes the result.
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

/// Computes [`swiglu_backward`] of matrices (rows, columns), and quantizes the gradients of gate and up. Returns them
/// as one matrix (rows, 2 * columns), which also stores its transpose ([`Fp8Copies::Both`]). `again` is a scale for the
/// output of [`swiglu`]. If it is given, the function also recomputes this output, and returns its quantized transpose.
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

/// [`residual_rms_norm`] of a matrix (rows, width), or [`rms_norm`] without a residual. Returns the sum (without a
/// residual: `x`), which is not quantized, and the quantized normalized rows.
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
    if !(has_norm_kernel(x) && scale.is_known()) {
        let (sum, y) = match residual {
            Some(residual) => residual_rms_norm(x, residual, weight, eps)?,
            None => (x.clone(), rms_norm(&x.detach(), &weight.detach(), eps)?),
        };
        let plain = (sum, Fp8Matrix::quantize_with(&y, copies, scale)?);
        if !has_norm_kernel(x) {
            return Ok(plain);
        }
    }
    if weight.dims() != [x.dim(1)?]
        || residual.is_some_and(|r| (r.dims(), r.dtype()) != (x.dims(), x.dtype()))
    {
        let mut given = vec![("x", x), ("weight", weight)];
        given.extend(residual.map(|residual| ("residual", residual)));
        return Err(shape_error(
            "residual_rms_norm_fp8: the inputs do not fit together",
            shapes_of(&given),
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

/// [`rms_norm_backward`] of a matrix (rows, width). Returns three values: the gradients of `x` and of the weight, both
/// unquantized, and the gradient of `x` in FP8 with both copies ([`Fp8Copies::Both`]).
///
/// # Errors
/// As [`rms_norm_backward`] and [`Fp8Matrix::quantize_with`].
pub fn rms_norm_backward_fp8(
    x: &Tensor,
    weight: &Tensor,
    dout: &Tensor,
    residual: Option<&Tensor>,
    eps: f64,
    scale: &Fp8Scale,
) -> Result<([Tensor; 2], Fp8Matrix)> {
    check_dims(NORM, x.dims())?;
    if !(has_norm_kernel(x) && scale.is_known()) {
        let [dx, dweight] = rms_norm_backward(x, weight, dout, residual, eps)?;
        let plain = Fp8Matrix::quantize_with(&dx, Fp8Copies::Both, scale)?;
        if !has_norm_kernel(x) {
            return Ok(([dx, dweight], plain));
        }
    }
    let of = checked_norm_backward(x, weight, dout, residual, eps)?;
    let op = NormBackwardFp8 { of, scale: scale.site() };
    let tensors = [x, weight, dout, residual.unwrap_or(x), scale.on_device()?];
    let ([dx, dw], codes): ([CudaStorage; 2], Quantized<CudaStorage>) =
        with_cuda(NORM, tensors, |operands| op.launch(operands))?;
    let gradients = [cuda_tensor(dx, x.shape()), cuda_tensor(dw, weight.shape())];
    Ok((gradients, Fp8Matrix::of_codes(codes, x.dims2()?, scale.format())))
}

/// The largest number of columns of a matrix that kernels normalize and quantize in one pass.
pub(crate) const NORM_WIDTH: usize = 2048;

fn has_norm_kernel(x: &Tensor) -> bool {
    x.device().is_cuda() && x.dtype() != DType::F32 && x.dims()[1] <= NORM_WIDTH
}

/// [`qk_norm_rope_backward`], quantized. Returns the gradients of the inputs as a matrix (batch * sequence, channels of
/// all heads) with both copies ([`Fp8Copies::Both`]), and the gradients of the weights. `through` is the gradient of
/// heads that are neither normalized nor rotated, such as the values; it is appended to the matrix. If one matmul
/// computed query, key and value, the matrix is the gradient of this matmul's output.
///
/// # Errors
/// As [`qk_norm_rope_backward`] and [`Fp8Matrix::quantize_with`].
pub fn qk_norm_rope_backward_fp8(
    all: &[QkNormRopeGrad<'_>],
    through: Option<&Tensor>,
    [cos, sin]: [&Tensor; 2],
    eps: f64,
    style: RopeStyle,
    scale: &Fp8Scale,
) -> Result<(Fp8Matrix, Vec<Tensor>)> {
    checked_backward(all, [cos, sin], eps, style)?;
    let inputs: Vec<&Tensor> = all.iter().map(|grad| grad.x).chain(through).collect();
    let (batch, sequence, heads, head_dim) = concatenated_shape("qk_norm_rope", &inputs)?;
    let dims = (batch * sequence, heads * head_dim);
    check_dims(QK_NORM_ROPE, &[dims.0, dims.1])?;
    let has_kernel = cos.device().is_cuda() && style == RopeStyle::Halves && [64, 128].contains(&head_dim);
    if !(has_kernel && scale.is_known()) {
        let (dx, dweights) = qk_norm_rope_backward(all, [cos, sin], eps, style)?;
        let dx = through.map_or_else(|| Ok(dx.clone()), |through| Tensor::cat(&[&dx, through], 2))?;
        let plain = Fp8Matrix::quantize_with(&dx.reshape(dims)?, Fp8Copies::Both, scale)?;
        if !has_kernel {
            return Ok((plain, dweights));
        }
    }
    let gradients = qk_norm_rope::Gradients { eps: eps as f32, style };
    let op = QkNormRopeFp8 { gradients, scale: scale.site() };
    let tensors: Vec<&Tensor> = all
        .iter()
        .flat_map(|grad| [grad.x, grad.weight, grad.dout])
        .chain([cos, sin, scale.on_device()?])
        .chain(through)
        .collect();
    let (codes, dweights): (Quantized<CudaStorage>, Vec<_>) =
        with_all_cuda(QK_NORM_ROPE, &tensors, |operands| {
            let (inputs, others) = operands.split_at(3 * all.len());
            let (inputs, _) = inputs.as_chunks::<3>();
            op.launch(((inputs, [others[0], others[1]]), others.get(3).copied(), others[2]))
        })?;
    let dweights = dweights.into_iter().zip(all).map(|(dw, grad)| cuda_tensor(dw, grad.weight.shape()));
    Ok((Fp8Matrix::of_codes(codes, dims, scale.format()), dweights.collect()))
}

fn check_gated(gate: &Tensor, others: &[&Tensor]) -> Result<()> {
    check_dims(SWIGLU, gate.dims())?;
    match others.iter().find(|other| (other.dims(), other.dtype()) != (gate.dims(), gate.dtype())) {
        None => Ok(()),
        Some(other) => Err(shape_error(
            "swiglu in FP8: gate, up and gradient differ",
            shapes_of(&[("gate", gate), ("up or dout", other)]),
            "matrices of one shape and one element type",
            "gate and up are projections of the same input",
        )),
    }
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

#[allow(dead_code, reason = "only kernels read it")]
pub(crate) struct QkNormRopeFp8 {
    pub(crate) gradients: qk_norm_rope::Gradients,
    pub(crate) scale: Fp8Site,
}

#[allow(dead_code, reason = "only kernels read it")]
pub(crate) struct NormBackwardFp8 {
    pub(crate) of: rms_norm::Gradients,
    pub(crate) scale: Fp8Site,
}
