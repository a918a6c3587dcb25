//! RMSNorm on the GPU.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result};

use super::params::{self, launch};
use super::tensor::{Dense, Float, PARTS, Packs, Team, count, partial_sums, start_of};
use crate::cuda::Operand;
use crate::cuda::kernels::Gpu;
use crate::cuda::params::Address;
use crate::cuda::tensor::address;

const NAME: &str = "rms-norm";

/// Packs that a thread keeps in registers, and the largest number of threads of a block, as in
/// `kernels/rms_norm.cu`.
const KEEP: usize = 4;
const MAX_THREADS: usize = 512;

/// Addresses that only some launches have.
#[derive(Default)]
struct Extras {
    residual: Address,
    sum: Address,
    dy: Address,
    partials: Address,
}

/// Launches a kernel over the last dimension of `x`. Returns y, or with `dy` and `partials` dx.
fn run(
    gpu: &Gpu,
    what: &str,
    x: &Dense<'_>,
    weight: &Dense<'_>,
    eps: f32,
    extras: &Extras,
) -> Result<CudaStorage> {
    let (storage, layout) = x.operand();
    let float = Float::of(NAME, storage)?;
    let (len, width) = (layout.shape().elem_count(), layout.dims().last().copied().unwrap_or(1));
    let out = float.alloc(gpu, len)?;
    let mut params = params::RmsNorm {
        x: x.start(gpu)?,
        weight: weight.start(gpu)?,
        out: start_of(&out, gpu)?,
        residual: extras.residual,
        sum: extras.sum,
        dy: extras.dy,
        partials: extras.partials,
        rows: count("rows", len / width)?,
        width: count("channels", width)?,
        weight_type: Float::of(NAME, weight.operand().0)? as i32,
        eps,
        ..Default::default()
    };
    let packs = Packs::of(float, &[params.x, params.weight, params.dy, params.residual], &[width]);
    let team = Team::of(width / packs.elements(), KEEP, MAX_THREADS);
    params.lanes = team.lanes as i32;
    let most = if extras.partials == 0 { usize::MAX } else { PARTS };
    launch(gpu, &packs.kernel(what), team.grid(len / width, most), &params)?;
    Ok(out)
}

pub(crate) fn forward(x: Operand<'_>, weight: Operand<'_>, eps: f32) -> Result<CudaStorage> {
    let gpu = Gpu::new(x.0.device())?;
    run(&gpu, "rms_norm_fwd", &Dense::new(x, &gpu)?, &Dense::new(weight, &gpu)?, eps, &Extras::default())
}

/// `x + residual`, and the norm of it.
pub(crate) fn residual_forward(
    x: Operand<'_>,
    residual: Operand<'_>,
    weight: Operand<'_>,
    eps: f32,
) -> Result<[CudaStorage; 2]> {
    let gpu = Gpu::new(x.0.device())?;
    let [x, residual, weight] =
        [Dense::new(x, &gpu)?, Dense::new(residual, &gpu)?, Dense::new(weight, &gpu)?];
    let (storage, layout) = x.operand();
    let sum = Float::of(NAME, storage)?.alloc(&gpu, layout.shape().elem_count())?;
    let extras = Extras { residual: residual.start(&gpu)?, sum: start_of(&sum, &gpu)?, ..Extras::default() };
    let out = run(&gpu, "rms_norm_fwd", &x, &weight, eps, &extras)?;
    Ok([sum, out])
}

/// The gradients of x, to which `residual` is added, and of the weight.
pub(crate) fn backward(
    x: Operand<'_>,
    weight: Operand<'_>,
    dy: Operand<'_>,
    residual: Option<Operand<'_>>,
    eps: f32,
) -> Result<[CudaStorage; 2]> {
    let gpu = Gpu::new(x.0.device())?;
    let width = weight.1.shape().elem_count();
    // Zeros: blocks without rows write nothing, and channels beyond the registers are summed here.
    let partials = gpu.alloc_zeros::<f32>(PARTS * width)?;
    let [x, dy] = [Dense::new(x, &gpu)?, Dense::new(dy, &gpu)?];
    let residual = residual.map(|residual| Dense::new(residual, &gpu)).transpose()?;
    let extras = Extras {
        residual: residual.as_ref().map_or(Ok(0), |residual| residual.start(&gpu))?,
        dy: dy.start(&gpu)?,
        partials: address(&partials, &gpu),
        ..Extras::default()
    };
    let dx = run(&gpu, "rms_norm_bwd", &x, &Dense::new(weight, &gpu)?, eps, &extras)?;
    let dw = partial_sums(&gpu, &partials, PARTS, width, Float::of(NAME, weight.0)?)?;
    Ok([dx, dw])
}
