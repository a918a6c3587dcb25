//! SwiGLU, the gated unit of Llama's feed-forward network, with a backward.

use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp2, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

use super::support::{
    Rows, SPAN, cpu_storage, cuda_tensor, f32_tensor, shape_error, shapes_of, supported, with_cuda,
};
use crate::cpu::ops::swiglu::{gated, gated_backward};
use crate::cpu::view::to_storage;
use crate::launch::Launch;

const NAME: &str = "swiglu";

/// `y = silu(gate) o up` with `silu(x) = x / (1 + exp(-x))`. `o` is the element-wise product.
///
/// Both inputs have the same shape and type (f32, f16, bf16; any strides) and receive gradients:
/// `dup = dy o silu(gate)`, `dgate = dy o up o s (1 + gate (1 - s))` with `s = 1 / (1 + exp(-gate))`.
/// (SwiGLU: arXiv 2002.05202.)
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use candle_sage::ops::swiglu;
///
/// let gate = Var::new(&[0f32, 1.], &Device::Cpu)?;
/// let up = Tensor::new(&[5f32, 2.], &Device::Cpu)?;
/// let y = swiglu(&gate, &up)?;
/// let values = y.to_vec1::<f32>()?;
/// assert!(values[0] == 0.0 && (values[1] - 2.0 / (1.0 + (-1f32).exp())).abs() < 1e-6);
/// // The slope of silu at 0 is 1/2.
/// let dgate = y.sum_all()?.backward()?.get(&gate).unwrap().to_vec1::<f32>()?;
/// assert!((dgate[0] - 2.5).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// When the shapes or types differ, or the types are not floats.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    check(gate, ("up", up))?;
    supported(NAME, &[gate, up])?;
    gate.apply_op2(up, SwiGlu)
}

fn check(gate: &Tensor, (name, other): (&str, &Tensor)) -> Result<()> {
    if gate.dims() == other.dims() && gate.dtype() == other.dtype() {
        return Ok(());
    }
    Err(shape_error(
        &format!("swiglu: gate and {name} differ"),
        shapes_of(&[("gate", gate), (name, other)]),
        "tensors of one shape and one element type",
        "gate, up and the output's gradient (`dout`) have the shape of the output",
    ))
}

pub(crate) struct SwiGlu;

/// Returns the gradients of gate and up in [`swiglu`] for the output's gradient `dout`. If `again` is true, it also
/// returns the output. For training loops that do not use candle's graph.
///
/// The gradients are concatenated along the last dimension, (.., 2 * width): if one matmul computed gate and up, the
/// concatenation is the operand of one backward matmul. The gradient of gate is `narrow(D::Minus1, 0, width)`, and the
/// gradient of up is `narrow(D::Minus1, width, width)`.
///
/// ```
/// use candle_core::{D, Device, Tensor, Var};
/// use candle_sage::ops::{swiglu, swiglu_backward};
///
/// let gate = Var::randn(0f32, 1., (3, 4), &Device::Cpu)?;
/// let up = Var::randn(0f32, 1., (3, 4), &Device::Cpu)?;
/// let y = swiglu(&gate, &up)?;
/// let (both, again) = swiglu_backward(&gate, &up, &y.ones_like()?, true)?;
/// assert_eq!(again.unwrap().to_vec2::<f32>()?, y.to_vec2::<f32>()?);
/// let dup = both.narrow(D::Minus1, 4, 4)?;
/// let gradients = y.sum_all()?.backward()?;
/// assert_eq!(dup.to_vec2::<f32>()?, gradients.get(&up).unwrap().to_vec2::<f32>()?);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As [`swiglu`], and when `dout` has another shape or type, or the inputs have no dimensions.
pub fn swiglu_backward(
    gate: &Tensor,
    up: &Tensor,
    dout: &Tensor,
    again: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    if gate.rank() == 0 {
        let hint = "reshape them to one dimension";
        return Err(shape_error(
            "swiglu: gate and up have no width",
            shapes_of(&[("gate", gate)]),
            "(.., width)",
            hint,
        ));
    }
    Gradients { again, is_concatenated: true }.of([gate, up, dout])
}

pub(crate) struct Gradients {
    pub(crate) again: bool,
    /// Whether the gradients of gate and up are concatenated along the last dimension; otherwise they are stacked along
    /// a new first dimension.
    pub(crate) is_concatenated: bool,
}

impl Gradients {
    fn of(&self, [gate, up, dout]: [&Tensor; 3]) -> Result<(Tensor, Option<Tensor>)> {
        check(gate, ("up", up))?;
        check(gate, ("dout", dout))?;
        supported(NAME, &[gate, up, dout])?;
        let mut dims = gate.dims().to_vec();
        match dims.last_mut() {
            Some(width) if self.is_concatenated => *width *= 2,
            _ => dims.insert(0, 2),
        }
        if gate.device().is_cuda() {
            let (both, y): (_, Option<_>) =
                with_cuda(NAME, [gate, up, dout], |operands| self.launch(operands))?;
            return Ok((cuda_tensor(both, dims), y.map(|y| cuda_tensor(y, gate.shape()))));
        }
        let y = self.again.then(|| swiglu(&gate.detach(), &up.detach())).transpose()?;
        let width = gate.dims().last().copied().unwrap_or(1);
        let guards = [gate, up, dout].map(Tensor::storage_and_layout);
        let rows = |n: usize| Rows::new(NAME, cpu_storage(&guards[n].0, NAME)?, guards[n].1);
        let (gates, ups, dys) = (rows(0)?, rows(1)?, rows(2)?);
        let mut both = vec![0.0; 2 * gate.elem_count()];
        let span = |row: usize, at: Range<usize>, dgate: &mut [f32], dup: &mut [f32]| {
            let [gate, up, dy] = [&gates, &ups, &dys].map(|rows| rows.part(row, at.clone()));
            gated_backward(dgate, dup, gate, up, dy);
        };
        let of_row = |row: usize, dgate: &mut [f32], dup: &mut [f32]| {
            if width <= SPAN {
                return span(row, 0..width, dgate, dup);
            }
            let parts = dgate.par_chunks_mut(SPAN).zip(dup.par_chunks_mut(SPAN));
            parts.enumerate().for_each(|(n, (dgate, dup))| {
                span(row, n * SPAN..n * SPAN + dgate.len(), dgate, dup);
            });
        };
        let (step, tasks) = (width.max(1), SPAN.div_ceil(width.max(1)));
        if self.is_concatenated {
            both.par_chunks_mut(2 * step).with_min_len(tasks).enumerate().for_each(|(row, both)| {
                let (dgate, dup) = both.split_at_mut(step);
                of_row(row, dgate, dup);
            });
        } else {
            let (dgate, dup) = both.split_at_mut(gate.elem_count());
            let rows = dgate.par_chunks_mut(step).zip(dup.par_chunks_mut(step)).with_min_len(tasks);
            rows.enumerate().for_each(|(row, (dgate, dup))| of_row(row, dgate, dup));
        }
        Ok((f32_tensor(both, dims, gate.dtype())?, y))
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
        let (gates, ups) = (Rows::new(NAME, gate, gate_layout)?, Rows::new(NAME, up, up_layout)?);
        let mut out = vec![0.0; gate_layout.shape().elem_count()];
        let width = gate_layout.dims().last().copied().unwrap_or(1).max(1);
        let rows = out.par_chunks_mut(width).with_min_len(SPAN.div_ceil(width));
        let span = |row: usize, at: Range<usize>, out: &mut [f32]| {
            gated(out, gates.part(row, at.clone()), ups.part(row, at));
        };
        rows.enumerate().for_each(|(row, out)| {
            if width <= SPAN {
                return span(row, 0..width, out);
            }
            out.par_chunks_mut(SPAN).enumerate().for_each(|(n, out)| {
                span(row, n * SPAN..n * SPAN + out.len(), out);
            });
        });
        let dtype = gate.dtype();
        Ok((to_storage(out, dtype)?, gate_layout.shape().clone()))
    }

    fn cuda_fwd(
        &self,
        gate: &CudaStorage,
        gate_layout: &Layout,
        up: &CudaStorage,
        up_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let out = self.launch([(gate, gate_layout), (up, up_layout)])?;
        Ok((out, gate_layout.shape().clone()))
    }

    fn bwd(
        &self,
        gate: &Tensor,
        up: &Tensor,
        _out: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (both, _) = Gradients { again: false, is_concatenated: false }.of([gate, up, dout])?;
        Ok((Some(both.get(0)?), Some(both.get(1)?)))
    }
}
