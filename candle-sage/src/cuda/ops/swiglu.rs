//! SwiGLU on the GPU.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result};

use super::params::{self, launch};
use super::tensor::{Dense, Float, Packs, elementwise, start_of};
use crate::cuda::Operand;
use crate::cuda::kernels::Gpu;

const NAME: &str = "swiglu";

pub(crate) fn forward(gate: Operand<'_>, up: Operand<'_>) -> Result<CudaStorage> {
    let gpu = Gpu::new(gate.0.device())?;
    let float = Float::of(NAME, gate.0)?;
    let len = gate.1.shape().elem_count();
    let (gate, up) = (Dense::new(gate, &gpu)?, Dense::new(up, &gpu)?);
    let out = float.alloc(&gpu, len)?;
    let params = params::SwiGlu {
        gate: gate.start(&gpu)?,
        up: up.start(&gpu)?,
        out: start_of(&out, &gpu)?,
        len: len as i64,
        ..Default::default()
    };
    let packs = Packs::of(float, &[params.gate, params.up], &[]);
    launch(&gpu, &packs.kernel("swiglu_fwd"), elementwise(len, packs), &params)?;
    Ok(out)
}

/// Gradients of gate and up, and where `again` is true the output once more.
pub(crate) fn backward(
    gate: Operand<'_>,
    up: Operand<'_>,
    dy: Operand<'_>,
    again: bool,
) -> Result<([CudaStorage; 2], Option<CudaStorage>)> {
    let gpu = Gpu::new(gate.0.device())?;
    let float = Float::of(NAME, gate.0)?;
    let len = gate.1.shape().elem_count();
    let (gate, up, dy) = (Dense::new(gate, &gpu)?, Dense::new(up, &gpu)?, Dense::new(dy, &gpu)?);
    let (dgate, dup) = (float.alloc(&gpu, len)?, float.alloc(&gpu, len)?);
    let y = again.then(|| float.alloc(&gpu, len)).transpose()?;
    let params = params::SwiGlu {
        gate: gate.start(&gpu)?,
        up: up.start(&gpu)?,
        dy: dy.start(&gpu)?,
        out: start_of(&dgate, &gpu)?,
        dup: start_of(&dup, &gpu)?,
        y: y.as_ref().map_or(Ok(0), |y| start_of(y, &gpu))?,
        len: len as i64,
    };
    let packs = Packs::of(float, &[params.gate, params.up, params.dy], &[]);
    launch(&gpu, &packs.kernel("swiglu_bwd"), elementwise(len, packs), &params)?;
    Ok(([dgate, dup], y))
}
