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

/// Gradients of gate and up.
pub(crate) fn backward(gate: Operand<'_>, up: Operand<'_>, dy: Operand<'_>) -> Result<[CudaStorage; 2]> {
    let gpu = Gpu::new(gate.0.device())?;
    let float = Float::of(NAME, gate.0)?;
    let len = gate.1.shape().elem_count();
    let (gate, up, dy) = (Dense::new(gate, &gpu)?, Dense::new(up, &gpu)?, Dense::new(dy, &gpu)?);
    let (dgate, dup) = (float.alloc(&gpu, len)?, float.alloc(&gpu, len)?);
    let params = params::SwiGlu {
        gate: gate.start(&gpu)?,
        up: up.start(&gpu)?,
        dy: dy.start(&gpu)?,
        out: start_of(&dgate, &gpu)?,
        dup: start_of(&dup, &gpu)?,
        len: len as i64,
    };
    let packs = Packs::of(float, &[params.gate, params.up, params.dy], &[]);
    launch(&gpu, &packs.kernel("swiglu_bwd"), elementwise(len, packs), &params)?;
    Ok([dgate, dup])
}
