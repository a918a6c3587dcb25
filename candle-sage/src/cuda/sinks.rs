//! The gradient of attention sinks on the GPU.

use candle_core::Result;

use super::address::{Address, address};
use super::buffer::Buffer;
use super::call::Call;
use super::compiled::constants::quantize::SINK_THREADS;
use super::compiled::kernel;
use super::kernels::Grid;
use super::memory::Purpose;
use super::params;
use super::plan::TILE;

/// The gradient of a call's sinks. `params` are those of the call's backward. `None` if the call has no sinks.
pub(super) fn sink_gradient(call: &Call<'_>, params: &params::Backward<'_>) -> Result<Option<Buffer<f32>>> {
    let (gpu, heads, sinks) = (call.gpu, call.problem.shape.query_heads(), call.problem.sinks);
    if sinks == Address::NULL {
        return Ok(None);
    }
    let gradient = gpu.alloc_for::<f32>(Purpose::Output, heads)?;
    let own = params::SinkGradient {
        sinks,
        minus_lse2: params.minus_lse2,
        minus_delta: params.minus_delta,
        gradient: address(&gradient, gpu),
        rows: (call.query_tiles() * TILE / heads) as i64,
    };
    params::launch(gpu, kernel!("sink_gradient_of_heads"), Grid::line(heads, SINK_THREADS), &own)?;
    Ok(Some(gradient))
}
