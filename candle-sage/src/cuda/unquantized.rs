//! Unquantized attention on the GPU.

use candle_core::Result;

use super::call::Call;
use super::compiled::constants::quant_tile::TILE_THREADS;
use super::compiled::kernel;
use super::kernels::Grid;
use super::plan::Plan;
use super::{OnGpu, OutputGradient, params};

/// Name of the backward's kernel, which other schemes also run, on their own operands.
pub(super) const BACKWARD: &str = "attn_bwd_dense16";

/// See [`crate::scheme::Scheme::Unquantized`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Unquantized;

impl OnGpu for Unquantized {
    type Operands = ();
    type Kept = ();
    type Scratch = ();

    fn forward_kernel(&self) -> &'static str {
        "attn_fwd_dense16"
    }

    fn backward_kernel(&self) -> &'static str {
        BACKWARD
    }

    fn operands(&self, _: &Call<'_>, _: bool) -> Result<()> {
        Ok(())
    }

    fn before_forward<'p>(&self, _: &Call<'_>, (): &'p (), _: &mut params::Forward<'p>) -> Result<()> {
        Ok(())
    }

    fn keep(&self, (): ()) {}

    fn scratch(&self, _: &Call<'_>, (): &()) -> Result<()> {
        Ok(())
    }

    fn before_backward<'p>(
        &self,
        call: &Call<'_>,
        plan: &Plan,
        (): &'p (),
        (): &'p (),
        output: &OutputGradient<'_>,
        params: &mut params::Backward<'p>,
    ) -> Result<()> {
        call.set_backward_maps(plan, true, output.dout, params)?;
        launch_delta(call, params)
    }
}

/// Launches the computation of `delta = rowsum(dO o O)` from `params.out` and `params.dout`.
pub(super) fn launch_delta(call: &Call<'_>, params: &params::Backward<'_>) -> Result<()> {
    // The kernel is compiled only for d = 64, 128 and 256. It uses d / 8 threads per row, and needs a power of two.
    let kernel = call.kernel_for(kernel!("prepare_dense16"), call.d.next_power_of_two());
    call.gpu.launch_attention("quantize", &kernel, Grid::line(call.query_tiles(), TILE_THREADS), params)
}
