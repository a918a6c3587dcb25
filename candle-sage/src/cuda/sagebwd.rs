//! SageBwd on the GPU: codes and scales around the kernels.

use candle_core::Result;
use cudarc::driver::CudaSlice;

use super::kernels::Grid;
use super::plan::{self, TILE};
use super::tensor::address;
use super::{Call, params};
use crate::scheme::{Granularity, SageBwd, Smoothing};

/// What the forward keeps: codes and scales of Q and K, and the means taken out of them. Buffers are (head, tile, ..)
/// with tiles of 64 tokens.
#[derive(Debug)]
pub(super) struct Codes {
    pub(super) q: CudaSlice<i8>,
    pub(super) k: CudaSlice<i8>,
    pub(super) q_scale: CudaSlice<f32>,
    pub(super) k_scale: CudaSlice<f32>,
    /// Empty without Q smoothing.
    q_mean: Option<CudaSlice<f32>>,
    k_mean: Option<CudaSlice<f32>>,
}

/// What the forward needs: V's codes go when it has run.
#[cfg_attr(not(test), expect(dead_code, reason = "kept alive for the kernels; tests read them"))]
pub(super) struct Operands {
    pub(super) codes: Codes,
    /// Codes and scales.
    pub(super) v: (CudaSlice<i8>, CudaSlice<f32>),
    _k_tile_sums: Option<CudaSlice<f32>>,
}

impl Operands {
    pub(super) fn keep(self) -> Codes {
        self.codes
    }
}

/// Makes the codes of Q, K and V, and puts their addresses into `params`.
pub(super) fn quantize(
    call: &Call<'_>,
    settings: &SageBwd,
    params: &mut params::Forward,
) -> Result<Operands> {
    plan::check_settings(settings)?;
    let (gpu, d) = (&call.gpu, call.d);
    let (queries, keys) = (call.query_tiles(), call.key_tiles());
    let smooth_q = settings.smoothing == Smoothing::Qk;
    let smooth_k = settings.smoothing != Smoothing::None;
    let means = call.segment_count() * call.problem.shape.key_heads() * d;
    let codes = Codes {
        q: gpu.alloc(queries * TILE * d)?,
        k: gpu.alloc(keys * TILE * d)?,
        q_scale: gpu.alloc(queries)?,
        k_scale: gpu.alloc(keys)?,
        q_mean: smooth_q.then(|| gpu.alloc(queries * d)).transpose()?,
        k_mean: smooth_k.then(|| gpu.alloc(means)).transpose()?,
    };
    let v = (gpu.alloc(keys * TILE * d)?, gpu.alloc(keys)?);
    let sums = smooth_k.then(|| gpu.alloc(keys * d)).transpose()?;
    params.codes = codes.params(call);
    params.codes.v_transposed = address(&v.0, gpu);
    params.codes.v_scale = address(&v.1, gpu);
    params.codes.k_tile_sums = sums.as_ref().map_or(0, |sums| address(sums, gpu));

    if smooth_k {
        let heads = call.problem.shape.key_heads();
        gpu.launch_forward("quantize", &call.kernel("sum_tiles"), Grid::line(keys, 256), params)?;
        let grid = Grid { blocks: (call.shape.segment_count as u32, heads as u32, 1), ..Grid::line(1, 256) };
        gpu.launch_forward("quantize", &format!("mean_of_tiles_{d}"), grid, params)?;
    }
    gpu.launch_forward("quantize", &call.kernel("quantize"), Grid::line(queries + 2 * keys, 256), params)?;
    Ok(Operands { codes, v, _k_tile_sums: sums })
}

impl Codes {
    fn params(&self, call: &Call<'_>) -> params::Codes {
        let gpu = &call.gpu;
        params::Codes {
            q: address(&self.q, gpu),
            k: address(&self.k, gpu),
            q_scale: address(&self.q_scale, gpu),
            k_scale: address(&self.k_scale, gpu),
            q_mean: self.q_mean.as_ref().map_or(0, |mean| address(mean, gpu)),
            k_mean: self.k_mean.as_ref().map_or(0, |mean| address(mean, gpu)),
            ..params::Codes::default()
        }
    }
}

/// What the backward needs besides the forward's codes.
#[cfg_attr(not(test), expect(dead_code, reason = "kept alive for the kernels; tests read them"))]
pub(super) struct Transposed {
    pub(super) q: CudaSlice<i8>,
    pub(super) dout: CudaSlice<i8>,
    pub(super) dout_scale: CudaSlice<f32>,
}

/// Makes the transposed codes of Q and dO, and delta; puts their addresses into `params`.
pub(super) fn prepare(
    call: &Call<'_>,
    settings: &SageBwd,
    codes: &Codes,
    params: &mut params::Backward,
) -> Result<Transposed> {
    let (gpu, d, queries) = (&call.gpu, call.d, call.query_tiles());
    let q = gpu.alloc(queries * TILE * d)?;
    let dout = gpu.alloc(queries * TILE * d)?;
    let dout_scale = gpu.alloc(queries * d)?;
    params.codes = codes.params(call);
    params.q_transposed = address(&q, gpu);
    params.dout_transposed = address(&dout, gpu);
    params.dout_scale = address(&dout_scale, gpu);
    params.group = settings.granularity.vectors(TILE) as i32;
    // A group of channels counts from the start; the padding beyond head_dim is zero and changes no maximum.
    params.dout_group = match settings.granularity {
        Granularity::Tile => d,
        other => other.vectors(d),
    } as i32;
    gpu.launch_backward("quantize", &call.kernel("prepare_sagebwd"), Grid::line(queries, 256), params)?;
    Ok(Transposed { q, dout, dout_scale })
}
