//! RMSNorm on the GPU.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result};
use cudarc::driver::CudaSlice;

use super::tensor::{Dense, Float, PARTS, Packs, Team, count, partial_sums, start_of};
use crate::cuda::address::{Address, address};
use crate::cuda::compiled::constants::rms_norm::{KEEP, MAX_THREADS};
use crate::cuda::compiled::kernel;
use crate::cuda::kernels::Gpu;
use crate::cuda::params::{self, launch};
use crate::launch::{Launch, Operand};
use crate::ops::rms_norm::{Gradients, RmsNorm};

const NAME: &str = "rms-norm";

/// Addresses that only some launches have.
#[derive(Default)]
struct Extras<'a> {
    residual: Address<'a>,
    sum: Address<'a>,
    dy: Address<'a>,
    partials: Address<'a>,
    inverse: Address<'a>,
}

/// Launches a kernel over the last dimension of `x`. Returns y, or with `dy` and `partials` dx; with `inverse` nothing is written to it.
fn run(
    gpu: &Gpu,
    what: &str,
    x: &Dense<'_>,
    weight: &Dense<'_>,
    eps: f32,
    extras: &Extras<'_>,
) -> Result<CudaStorage> {
    let (storage, layout) = x.operand();
    let float = Float::of(NAME, storage)?;
    let (len, width) = (layout.shape().elem_count(), layout.dims().last().copied().unwrap_or(1));
    let out = float.alloc(gpu, if extras.inverse == Address::NULL { len } else { 0 })?;
    let mut params = params::RmsNorm {
        x: x.start(gpu)?,
        weight: weight.start(gpu)?,
        out: start_of(&out, gpu)?,
        residual: extras.residual,
        sum: extras.sum,
        dy: extras.dy,
        partials: extras.partials,
        inverse: extras.inverse,
        rows: count("rows", len / width)?,
        width: count("channels", width)?,
        weight_type: Float::of(NAME, weight.operand().0)? as i32,
        eps,
        ..Default::default()
    };
    let packs = Packs::of(float, &[params.x, params.weight, params.dy, params.residual], &[width]);
    let team = Team::of(width / packs.elements(), KEEP, MAX_THREADS);
    params.lanes = team.lanes as i32;
    let most = if extras.partials == Address::NULL { usize::MAX } else { PARTS };
    launch(gpu, &packs.kernel(what), team.grid(len / width, most), &params)?;
    Ok(out)
}

/// `x + residual` where there is one, and the inverse root mean square of each row of it.
pub(super) fn inverse_rms(
    gpu: &Gpu,
    x: &Dense<'_>,
    residual: Option<&Dense<'_>>,
    weight: &Dense<'_>,
    eps: f32,
) -> Result<(Option<CudaStorage>, CudaSlice<f32>)> {
    let (storage, layout) = x.operand();
    let len = layout.shape().elem_count();
    let inverse = gpu.alloc::<f32>(len / layout.dims().last().copied().unwrap_or(1).max(1))?;
    let sum = residual.map(|_| Float::of(NAME, storage)?.alloc(gpu, len)).transpose()?;
    let extras = Extras {
        residual: residual.map_or(Ok(Address::NULL), |residual| residual.start(gpu))?,
        sum: sum.as_ref().map_or(Ok(Address::NULL), |sum| start_of(sum, gpu))?,
        inverse: address(&inverse, gpu),
        ..Extras::default()
    };
    run(gpu, kernel!("rms_norm_fwd"), x, weight, eps, &extras)?;
    Ok((sum, inverse))
}

impl Launch<[Operand<'_>; 2], CudaStorage> for RmsNorm {
    fn launch(&self, [x, weight]: [Operand<'_>; 2]) -> Result<CudaStorage> {
        let gpu = Gpu::new(x.0.device())?;
        let [x, weight] = [Dense::new(x, &gpu)?, Dense::new(weight, &gpu)?];
        run(&gpu, kernel!("rms_norm_fwd"), &x, &weight, self.eps, &Extras::default())
    }
}

/// `x + residual`, and the norm of it.
impl Launch<[Operand<'_>; 3], [CudaStorage; 2]> for RmsNorm {
    fn launch(&self, [x, residual, weight]: [Operand<'_>; 3]) -> Result<[CudaStorage; 2]> {
        let gpu = Gpu::new(x.0.device())?;
        let [x, residual, weight] =
            [Dense::new(x, &gpu)?, Dense::new(residual, &gpu)?, Dense::new(weight, &gpu)?];
        let (storage, layout) = x.operand();
        let sum = Float::of(NAME, storage)?.alloc(&gpu, layout.shape().elem_count())?;
        let extras =
            Extras { residual: residual.start(&gpu)?, sum: start_of(&sum, &gpu)?, ..Extras::default() };
        let out = run(&gpu, kernel!("rms_norm_fwd"), &x, &weight, self.eps, &extras)?;
        Ok([sum, out])
    }
}

impl Launch<[Operand<'_>; 4], [CudaStorage; 2]> for Gradients {
    fn launch(&self, [x, weight, dy, other]: [Operand<'_>; 4]) -> Result<[CudaStorage; 2]> {
        let gpu = Gpu::new(x.0.device())?;
        let width = weight.1.shape().elem_count();
        // Zeros: blocks without rows write nothing, and channels beyond the registers are summed here.
        let partials = gpu.alloc_zeros::<f32>(PARTS * width)?;
        let [x, dy] = [Dense::new(x, &gpu)?, Dense::new(dy, &gpu)?];
        let residual = self.residual.then(|| Dense::new(other, &gpu)).transpose()?;
        let extras = Extras {
            residual: residual.as_ref().map_or(Ok(Address::NULL), |residual| residual.start(&gpu))?,
            dy: dy.start(&gpu)?,
            partials: address(&partials, &gpu),
            ..Extras::default()
        };
        let dx = run(&gpu, kernel!("rms_norm_bwd"), &x, &Dense::new(weight, &gpu)?, self.eps, &extras)?;
        let dw = partial_sums(&gpu, &partials, PARTS, width, Float::of(NAME, weight.0)?)?;
        Ok([dx, dw])
    }
}
