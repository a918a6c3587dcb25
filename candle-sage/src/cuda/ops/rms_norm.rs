//! RMSNorm on the GPU.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result};

use super::fp8::{Codes, check_start};
use crate::cuda::address::{Address, address};
use crate::cuda::compiled::constants::elements_row::{KEEP, MAX_THREADS};
use crate::cuda::compiled::constants::quant_fp8_strip::FP8_STRIP_WIDTH;
use crate::cuda::compiled::constants::quant_fp8_tile::{FP8_LINES, FP8_THREADS};
use crate::cuda::compiled::kernel;
use crate::cuda::floats::{Dense, Float, PARTS, Packs, RowThreads, count, partial_sums, start_of};
use crate::cuda::kernels::{Gpu, Grid};
use crate::cuda::params::{self, launch};
use crate::launch::{Launch, Operand};
use crate::ops::fp8::{Fp8Copies, Quantized};
use crate::ops::fp8_fused::{NORM_WIDTH, NormBackwardFp8, NormFp8};
use crate::ops::rms_norm::{Gradients, RmsNorm};

const NAME: &str = "rms-norm";

/// Addresses that only some launches use.
#[derive(Default)]
pub(super) struct OptionalAddresses<'a> {
    pub(super) residual: Address<'a>,
    pub(super) sum: Address<'a>,
    pub(super) dy: Address<'a>,
    pub(super) partials: Address<'a>,
}

/// The parameters of a kernel that reads `x` along its last dimension and writes to `out`. `lanes`, the number of
/// threads per row, is 0: callers set it if the kernel reads it.
pub(super) fn params<'a>(
    gpu: &Gpu,
    x: &'a Dense<'_>,
    weight: &'a Dense<'_>,
    eps: f32,
    out: Address<'a>,
    extras: OptionalAddresses<'a>,
) -> Result<params::RmsNorm<'a>> {
    let layout = x.operand().1;
    let (len, width) = (layout.shape().elem_count(), layout.dims().last().copied().unwrap_or(1));
    Ok(params::RmsNorm {
        x: x.start(gpu)?,
        weight: weight.start(gpu)?,
        out,
        residual: extras.residual,
        sum: extras.sum,
        dy: extras.dy,
        partials: extras.partials,
        rows: count("rows", len / width)?,
        width: count("channels", width)?,
        weight_type: Float::of(NAME, weight.operand().0)? as i32,
        eps,
        ..Default::default()
    })
}

/// Launches a kernel over the last dimension of `x`. Returns y in the forward and dx in the backward.
fn run(
    gpu: &Gpu,
    what: &str,
    x: &Dense<'_>,
    weight: &Dense<'_>,
    eps: f32,
    extras: OptionalAddresses<'_>,
) -> Result<CudaStorage> {
    let (storage, layout) = x.operand();
    let float = Float::of(NAME, storage)?;
    let out = float.alloc(gpu, layout.shape().elem_count())?;
    let most = if extras.partials == Address::NULL { usize::MAX } else { PARTS };
    let mut params = params(gpu, x, weight, eps, start_of(&out, gpu)?, extras)?;
    let (rows, width) = (params.rows as usize, params.width as usize);
    let packs = Packs::of(float, &[params.x, params.weight, params.dy, params.residual], &[width]);
    let team = RowThreads::of(width / packs.elements(), KEEP, MAX_THREADS);
    params.lanes = team.lanes as i32;
    launch(gpu, &packs.kernel(what), team.grid(rows, most), &params)?;
    Ok(out)
}

const _: () = assert!(NORM_WIDTH == 2 * FP8_STRIP_WIDTH, "kernels with one and with two warps per row");

/// Launches a kernel that also writes FP8 values.
fn run_fp8(
    gpu: &Gpu,
    what: &str,
    float: Float,
    of: params::RmsNorm<'_>,
    codes: params::Fp8Codes<'_>,
) -> Result<()> {
    check_start("rms_norm in FP8", &[of.x, of.weight, of.dy, of.residual])?;
    let warps = (of.width as usize).div_ceil(FP8_STRIP_WIDTH);
    let rows = FP8_THREADS / (32 * warps) * FP8_LINES;
    let blocks = (of.rows as usize).div_ceil(rows).min(PARTS);
    let kernel = format!("{what}_{warps}_{}", float.name());
    launch(gpu, &kernel, Grid::line(blocks, FP8_THREADS), &params::Fp8RmsNorm { of, codes })
}

impl Launch<[Operand<'_>; 4], (Option<CudaStorage>, Quantized<CudaStorage>)> for NormFp8 {
    fn launch(
        &self,
        [x, residual, weight, state]: [Operand<'_>; 4],
    ) -> Result<(Option<CudaStorage>, Quantized<CudaStorage>)> {
        let gpu = Gpu::new(x.0.device())?;
        let (float, dims) = (Float::of(NAME, x.0)?, x.1.shape().dims2()?);
        let [x, weight] = [Dense::new(x, &gpu)?, Dense::new(weight, &gpu)?];
        let residual = self.residual.then(|| Dense::new(residual, &gpu)).transpose()?;
        let sum = residual.as_ref().map(|_| float.alloc(&gpu, dims.0 * dims.1)).transpose()?;
        let codes = Codes::new(&gpu, dims, self.copies)?;
        let extras = OptionalAddresses {
            residual: residual.as_ref().map_or(Ok(Address::NULL), |residual| residual.start(&gpu))?,
            sum: sum.as_ref().map_or(Ok(Address::NULL), |sum| start_of(sum, &gpu))?,
            ..OptionalAddresses::default()
        };
        let params = params(&gpu, &x, &weight, self.eps, Address::NULL, extras)?;
        run_fp8(
            &gpu,
            kernel!("rms_norm_fp8_fwd"),
            float,
            params,
            codes.params_of_site(&gpu, self.scale, state)?,
        )?;
        Ok((sum, codes.into_storages(&gpu)))
    }
}

impl Launch<[Operand<'_>; 5], ([CudaStorage; 2], Quantized<CudaStorage>)> for NormBackwardFp8 {
    fn launch(
        &self,
        [x, weight, dy, other, state]: [Operand<'_>; 5],
    ) -> Result<([CudaStorage; 2], Quantized<CudaStorage>)> {
        let gpu = Gpu::new(x.0.device())?;
        let (float, dims) = (Float::of(NAME, x.0)?, x.1.shape().dims2()?);
        let partials = gpu.alloc_zeros::<f32>(PARTS * dims.1)?;
        let [x, dy, dense] = [Dense::new(x, &gpu)?, Dense::new(dy, &gpu)?, Dense::new(weight, &gpu)?];
        let residual = self.of.residual.then(|| Dense::new(other, &gpu)).transpose()?;
        let dx = float.alloc(&gpu, dims.0 * dims.1)?;
        let codes = Codes::new(&gpu, dims, Fp8Copies::Both)?;
        let extras = OptionalAddresses {
            residual: residual.as_ref().map_or(Ok(Address::NULL), |residual| residual.start(&gpu))?,
            dy: dy.start(&gpu)?,
            partials: address(&partials, &gpu),
            ..OptionalAddresses::default()
        };
        let params = params(&gpu, &x, &dense, self.of.eps, start_of(&dx, &gpu)?, extras)?;
        run_fp8(
            &gpu,
            kernel!("rms_norm_fp8_bwd"),
            float,
            params,
            codes.params_of_site(&gpu, self.scale, state)?,
        )?;
        let dw = partial_sums(&gpu, &partials, PARTS, dims.1, Float::of(NAME, weight.0)?)?;
        Ok(([dx, dw], codes.into_storages(&gpu)))
    }
}

impl Launch<[Operand<'_>; 2], CudaStorage> for RmsNorm {
    fn launch(&self, [x, weight]: [Operand<'_>; 2]) -> Result<CudaStorage> {
        let gpu = Gpu::new(x.0.device())?;
        let [x, weight] = [Dense::new(x, &gpu)?, Dense::new(weight, &gpu)?];
        run(&gpu, kernel!("rms_norm_fwd"), &x, &weight, self.eps, OptionalAddresses::default())
    }
}

/// `x + residual`, and the RMSNorm of this sum.
impl Launch<[Operand<'_>; 3], [CudaStorage; 2]> for RmsNorm {
    fn launch(&self, [x, residual, weight]: [Operand<'_>; 3]) -> Result<[CudaStorage; 2]> {
        let gpu = Gpu::new(x.0.device())?;
        let [x, residual, weight] =
            [Dense::new(x, &gpu)?, Dense::new(residual, &gpu)?, Dense::new(weight, &gpu)?];
        let (storage, layout) = x.operand();
        let sum = Float::of(NAME, storage)?.alloc(&gpu, layout.shape().elem_count())?;
        let extras = OptionalAddresses {
            residual: residual.start(&gpu)?,
            sum: start_of(&sum, &gpu)?,
            ..OptionalAddresses::default()
        };
        let out = run(&gpu, kernel!("rms_norm_fwd"), &x, &weight, self.eps, extras)?;
        Ok([sum, out])
    }
}

impl Launch<[Operand<'_>; 4], [CudaStorage; 2]> for Gradients {
    fn launch(&self, [x, weight, dy, other]: [Operand<'_>; 4]) -> Result<[CudaStorage; 2]> {
        let gpu = Gpu::new(x.0.device())?;
        let width = weight.1.shape().elem_count();
        // Each thread block writes one row. Zeroed, because there may be fewer than PARTS thread blocks, and because
        // sums that do not fit in registers are accumulated in this memory.
        let partials = gpu.alloc_zeros::<f32>(PARTS * width)?;
        let [x, dy] = [Dense::new(x, &gpu)?, Dense::new(dy, &gpu)?];
        let residual = self.residual.then(|| Dense::new(other, &gpu)).transpose()?;
        let extras = OptionalAddresses {
            residual: residual.as_ref().map_or(Ok(Address::NULL), |residual| residual.start(&gpu))?,
            dy: dy.start(&gpu)?,
            partials: address(&partials, &gpu),
            ..OptionalAddresses::default()
        };
        let dx = run(&gpu, kernel!("rms_norm_bwd"), &x, &Dense::new(weight, &gpu)?, self.eps, extras)?;
        let dw = partial_sums(&gpu, &partials, PARTS, width, Float::of(NAME, weight.0)?)?;
        Ok([dx, dw])
    }
}
