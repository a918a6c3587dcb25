//! The gated unit of Llama's feed-forward network, with a backward.

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

const NAME: &str = "swiglu";

/// Elements that one task takes.
const SPAN: usize = 16 * 1024;

/// `y = silu(gate) o up`, `silu(x) = x / (1 + exp(-x))`, element by element.
///
/// Both inputs have the same shape and type (f32, f16, bf16; any strides) and receive gradients:
/// `dup = dy o silu(gate)`, `dgate = dy o up o s (1 + gate (1 - s))` with `s = 1 / (1 + exp(-gate))`.
/// (SwiGLU: arXiv 2002.05202.)
///
/// # Errors
/// When the shapes or types differ, or the types are not floats.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    check(gate, up)?;
    supported(NAME, &[gate, up])?;
    gate.apply_op2(up, SwiGlu)
}

fn check(gate: &Tensor, other: &Tensor) -> Result<()> {
    if gate.dims() == other.dims() && gate.dtype() == other.dtype() {
        return Ok(());
    }
    Err(shape_error(
        "swiglu: gate and up differ",
        ((gate.dims(), gate.dtype()), (other.dims(), other.dtype())),
        "tensors of one shape and one element type",
        "both are projections of the same input",
    ))
}

struct SwiGlu;

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    let e = -x * std::f32::consts::LOG2_E;
    // Where 2^e would be infinite the sigmoid is 0, and so is the product with x.
    if e > 127.0 { 0.0 } else { 1.0 / (1.0 + lanes::exp2(e)) }
}

#[multiversion(targets = "simd")]
fn gated(out: &mut [f32], gate: &[f32], up: &[f32]) {
    for ((out, &gate), up) in out.iter_mut().zip(gate).zip(up) {
        *out = gate * sigmoid(gate) * up;
    }
}

#[multiversion(targets = "simd")]
fn gated_backward(dgate: &mut [f32], dup: &mut [f32], gate: &[f32], up: &[f32], dy: &[f32]) {
    let inputs = gate.iter().zip(up).zip(dy);
    for ((dgate, dup), ((&gate, up), dy)) in dgate.iter_mut().zip(dup).zip(inputs) {
        let s = sigmoid(gate);
        *dup = dy * gate * s;
        *dgate = dy * up * s * (1.0 + gate * (1.0 - s));
    }
}

/// The gradients of gate and up for the output's gradient `dout`, and the output once more where it is wanted `again`: for
/// training loops that keep their own books, and may not have kept the output. See [`swiglu`].
///
/// # Errors
/// As [`swiglu`], and when `dout` does not fit.
pub fn swiglu_backward(
    gate: &Tensor,
    up: &Tensor,
    dout: &Tensor,
    again: bool,
) -> Result<([Tensor; 2], Option<Tensor>)> {
    check(gate, up)?;
    check(gate, dout)?;
    supported(NAME, &[gate, up, dout])?;
    #[cfg(feature = "cuda")]
    if gate.device().is_cuda() {
        let (gradients, y) = with_cuda(NAME, [gate, up, dout], |[gate, up, dy]| {
            cuda::ops::swiglu::backward(gate, up, dy, again)
        })?;
        let tensor = |storage| cuda_tensor(storage, gate.shape());
        return Ok((gradients.map(tensor), y.map(tensor)));
    }
    let y = again.then(|| swiglu(&gate.detach(), &up.detach())).transpose()?;
    match SwiGlu.bwd(gate, up, gate, dout)? {
        (Some(dgate), Some(dup)) => Ok(([dgate, dup], y)),
        _ => unreachable!("both have a gradient"),
    }
}

impl CustomOp2 for SwiGlu {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        gate: &CpuStorage,
        gate_layout: &Layout,
        up: &CpuStorage,
        up_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (gates, ups) = (f32_values(NAME, gate, gate_layout)?, f32_values(NAME, up, up_layout)?);
        let mut out = vec![0.0; gates.len()];
        let inputs = gates.par_chunks(SPAN).zip(ups.par_chunks(SPAN));
        out.par_chunks_mut(SPAN).zip(inputs).for_each(|(out, (gate, up))| gated(out, gate, up));
        let dtype = gate.dtype();
        Ok((to_storage(out, dtype)?, gate_layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        gate: &CudaStorage,
        gate_layout: &Layout,
        up: &CudaStorage,
        up_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let out = cuda::ops::swiglu::forward((gate, gate_layout), (up, up_layout))?;
        Ok((out, gate_layout.shape().clone()))
    }

    fn bwd(
        &self,
        gate: &Tensor,
        up: &Tensor,
        _out: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        #[cfg(feature = "cuda")]
        if gate.device().is_cuda() {
            let ([dgate, dup], _) = with_cuda(NAME, [gate, up, dout], |[gate, up, dy]| {
                cuda::ops::swiglu::backward(gate, up, dy, false)
            })?;
            return Ok((Some(cuda_tensor(dgate, gate.shape())), Some(cuda_tensor(dup, up.shape()))));
        }
        let (dgate, dup) = with_f32(NAME, [gate, up, dout], |[gate, up, dy]| {
            let (mut dgate, mut dup) = (vec![0.0; gate.len()], vec![0.0; gate.len()]);
            let inputs = gate.par_chunks(SPAN).zip(up.par_chunks(SPAN)).zip(dy.par_chunks(SPAN));
            let outputs = dgate.par_chunks_mut(SPAN).zip(dup.par_chunks_mut(SPAN));
            outputs.zip(inputs).for_each(|((dgate, dup), ((gate, up), dy))| {
                gated_backward(dgate, dup, gate, up, dy);
            });
            Ok((dgate, dup))
        })?;
        let dtype = gate.dtype();
        Ok((Some(f32_tensor(dgate, gate.shape(), dtype)?), Some(f32_tensor(dup, up.shape(), dtype)?)))
    }
}
