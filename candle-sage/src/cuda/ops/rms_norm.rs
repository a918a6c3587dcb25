//! RMSNorm on the GPU.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result};
use cudarc::driver::CudaSlice;

use super::params::{self, launch};
use super::tensor::{Dense, Float, PARTS, Packs, Team, count, partial_sums, start_of};
use crate::cuda::Operand;
use crate::cuda::kernels::Gpu;
use crate::cuda::tensor::address;

const NAME: &str = "rms-norm";

/// Packs that a thread keeps in registers, and threads of a block at most: as in `kernels/rms_norm.cu`.
const KEEP: usize = 4;
const MAX_THREADS: usize = 512;

/// Normalizes the last dimension of `x`; `dy` and `partials` make it the way back. Returns y or dx.
fn run(
    gpu: &Gpu,
    what: &str,
    x: &Dense<'_>,
    weight: &Dense<'_>,
    eps: f32,
    gradient: Option<(&Dense<'_>, &CudaSlice<f32>)>,
) -> Result<CudaStorage> {
    let (storage, layout) = x.operand();
    let float = Float::of(NAME, storage)?;
    let (len, width) = (layout.shape().elem_count(), layout.dims().last().copied().unwrap_or(1));
    let out = float.alloc(gpu, len)?;
    let mut params = params::RmsNorm {
        x: x.start(gpu)?,
        weight: weight.start(gpu)?,
        out: start_of(&out, gpu)?,
        rows: count("rows", len / width)?,
        width: count("channels", width)?,
        weight_type: Float::of(NAME, weight.operand().0)? as i32,
        eps,
        ..Default::default()
    };
    if let Some((dy, partials)) = gradient {
        params.dy = dy.start(gpu)?;
        params.partials = address(partials, gpu);
    }
    let packs = Packs::of(float, &[params.x, params.weight, params.dy], &[width]);
    let team = Team::of(width / packs.elements(), KEEP, MAX_THREADS);
    params.lanes = team.lanes as i32;
    let most = if gradient.is_some() { PARTS } else { usize::MAX };
    launch(gpu, &packs.kernel(what), team.grid(len / width, most), &params)?;
    Ok(out)
}

pub(crate) fn forward(x: Operand<'_>, weight: Operand<'_>, eps: f32) -> Result<CudaStorage> {
    let gpu = Gpu::new(x.0.device())?;
    run(&gpu, "rms_norm_fwd", &Dense::new(x, &gpu)?, &Dense::new(weight, &gpu)?, eps, None)
}

/// Gradients of x and weight.
pub(crate) fn backward(
    x: Operand<'_>,
    weight: Operand<'_>,
    dy: Operand<'_>,
    eps: f32,
) -> Result<[CudaStorage; 2]> {
    let gpu = Gpu::new(x.0.device())?;
    let width = weight.1.shape().elem_count();
    // Zeros: blocks without rows write nothing, and rows too wide for the registers are added up here.
    let partials = gpu.alloc_zeros::<f32>(PARTS * width)?;
    let [x, dy] = [Dense::new(x, &gpu)?, Dense::new(dy, &gpu)?];
    let dx = run(&gpu, "rms_norm_bwd", &x, &Dense::new(weight, &gpu)?, eps, Some((&dy, &partials)))?;
    let dw = partial_sums(&gpu, &partials, PARTS, width, Float::of(NAME, weight.0)?)?;
    Ok([dx, dw])
}
