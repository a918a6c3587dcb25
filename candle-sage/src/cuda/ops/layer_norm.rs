//! Layer normalization on the GPU.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result};

use super::rms_norm::{OptionalAddresses, params};
use crate::cuda::address::{Address, address};
use crate::cuda::compiled::constants::elements_row::{KEEP, MAX_THREADS};
use crate::cuda::compiled::constants::layer_norm::BACKWARD_THREADS;
use crate::cuda::compiled::kernel;
use crate::cuda::floats::{Dense, Float, PARTS, Packs, RowThreads, partial_sums, start_of};
use crate::cuda::kernels::Gpu;
use crate::cuda::params::{self, launch};
use crate::launch::{Launch, Operand};
use crate::ops::layer_norm::{Gradients, LayerNorm};

const NAME: &str = "layer-norm";

/// Launches the kernel `what` on `x`. Returns y in the forward and dx in the backward.
fn run(
    gpu: &Gpu,
    what: &str,
    [x, weight, bias]: [&Dense<'_>; 3],
    eps: f32,
    extras: OptionalAddresses<'_>,
    bias_partials: Address<'_>,
) -> Result<CudaStorage> {
    let (storage, layout) = x.operand();
    let float = Float::of(NAME, storage)?;
    let out = float.alloc(gpu, layout.shape().elem_count())?;
    let (lanes, blocks) =
        if extras.dy == Address::NULL { (MAX_THREADS, usize::MAX) } else { (BACKWARD_THREADS, PARTS) };
    let mut of = params(gpu, x, weight, eps, start_of(&out, gpu)?, extras)?;
    let (rows, width, bias_start) = (of.rows as usize, of.width as usize, bias.start(gpu)?);
    let packs = Packs::of(float, &[of.x, of.weight, of.dy, bias_start], &[width]);
    let team = RowThreads::of(width / packs.elements(), KEEP, lanes);
    of.lanes = team.lanes as i32;
    let bias_type = Float::of(NAME, bias.operand().0)? as i32;
    let params = params::LayerNorm { of, bias: bias_start, bias_partials, bias_type, padding: 0 };
    launch(gpu, &packs.kernel(what), team.grid(rows, blocks), &params)?;
    Ok(out)
}

impl Launch<[Operand<'_>; 3], CudaStorage> for LayerNorm {
    fn launch(&self, [x, weight, bias]: [Operand<'_>; 3]) -> Result<CudaStorage> {
        let gpu = Gpu::new(x.0.device())?;
        let [x, weight, bias] = [Dense::new(x, &gpu)?, Dense::new(weight, &gpu)?, Dense::new(bias, &gpu)?];
        run(
            &gpu,
            kernel!("layer_norm_fwd"),
            [&x, &weight, &bias],
            self.eps,
            OptionalAddresses::default(),
            Address::NULL,
        )
    }
}

impl Launch<[Operand<'_>; 4], [CudaStorage; 3]> for Gradients {
    fn launch(&self, [x, weight, bias, dy]: [Operand<'_>; 4]) -> Result<[CudaStorage; 3]> {
        let gpu = Gpu::new(x.0.device())?;
        let width = weight.1.shape().elem_count();
        // Each thread block has one of the PARTS rows for its sums of the gradients. Zeroed, because there may be fewer
        // thread blocks than rows, and because sums that do not fit in registers are accumulated in this memory.
        let [of_weight, of_bias] =
            [gpu.alloc_zeros::<f32>(PARTS * width)?, gpu.alloc_zeros::<f32>(PARTS * width)?];
        let [x, dy] = [Dense::new(x, &gpu)?, Dense::new(dy, &gpu)?];
        let types = [Float::of(NAME, weight.0)?, Float::of(NAME, bias.0)?];
        let [weight, bias] = [Dense::new(weight, &gpu)?, Dense::new(bias, &gpu)?];
        let extras = OptionalAddresses {
            dy: dy.start(&gpu)?,
            partials: address(&of_weight, &gpu),
            ..OptionalAddresses::default()
        };
        let all = [&x, &weight, &bias];
        let dx = run(&gpu, kernel!("layer_norm_bwd"), all, self.eps, extras, address(&of_bias, &gpu))?;
        let dw = partial_sums(&gpu, &of_weight, PARTS, width, types[0])?;
        let db = partial_sums(&gpu, &of_bias, PARTS, width, types[1])?;
        Ok([dx, dw, db])
    }
}
