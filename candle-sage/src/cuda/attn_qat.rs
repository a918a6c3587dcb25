//! Attn-QAT on the GPU: rounds operands to NVFP4 before the kernels of 16-bit operands, or for inference
//! packs operands for FP4 products.
//!
//! The backward rounds Q, K and V again instead of keeping the rounded tensors, three that a training step
//! would hold for every layer. It rounds K and V into the memory of dK and dV: no block reads another block's
//! keys, and each writes its gradients after its last product. (A block whose keys no query sees writes zeros
//! while its own copies may be in flight; nothing uses those.)

use candle_core::{CudaStorage, Result};
use cudarc::driver::CudaSlice;

use super::call::Call;
use super::full_precision::{self, launch_delta};
use super::kernels::Grid;
use super::plan::{Plan, TILE};
use super::sagebwd::launch_key_mean;
use super::tensor::address;
use super::{OnGpu, Past, params};
use crate::error::Error;
use crate::scheme::{AttnQat, PReference, Products, Smoothing, ValueGroups};

/// Name of the forward's kernel in FP4 products, and of the `.cu` file with it and the kernel that packs its
/// operands.
const NVFP4: &str = "attn_fwd_nvfp4";

/// What the forward's kernel reads and writes besides inputs and output, kept alive until its launch.
pub(super) struct Operands {
    kept: Kept,
    /// Q, K and V, rounded to NVFP4, for products in 16 bit.
    #[cfg_attr(not(test), expect(dead_code, reason = "kept alive for the kernel; tests read them"))]
    pub(super) rounded: Vec<CudaStorage>,
    /// Codes and scales of Q, K and V, for FP4 products, in the tiles of
    /// `kernels/include/sage/layout/nvfp4.cuh`.
    _codes: Vec<CudaSlice<i8>>,
    _k_tile_sums: Option<CudaSlice<f32>>,
}

/// What the forward keeps for the backward.
#[derive(Debug)]
pub(super) struct Kept {
    /// The high-precision output O'. `None` without a backward, or with one that does not use it.
    high_precision_out: Option<(CudaStorage, params::View)>,
    /// The sum of a row's probabilities relative to the row's reference. `None` without a backward.
    row_sums: Option<CudaSlice<f32>>,
    k_mean: Option<CudaSlice<f32>>,
}

impl OnGpu for AttnQat {
    type Operands = Operands;
    type Kept = Kept;
    /// Q as the backward's kernel reads it.
    type Scratch = Option<CudaStorage>;

    fn forward_kernel(&self) -> &'static str {
        match self.products {
            Products::Nvfp4 => NVFP4,
            _ => "attn_fwd_attn_qat",
        }
    }

    fn backward_kernel(&self) -> &'static str {
        match self.requantized_p {
            true => "attn_bwd_attn_qat",
            // P is not quantized again: the kernel is that of full precision, on other operands.
            false => full_precision::BACKWARD,
        }
    }

    fn before_forward(&self, call: &Call<'_>, keep: bool, params: &mut params::Forward) -> Result<Operands> {
        let (gpu, shape) = (&call.gpu, call.problem.shape);
        let smooth = self.smoothing != Smoothing::None;
        let means = call.segment_count() * shape.key_heads() * call.d;
        let k_mean = smooth.then(|| gpu.alloc(means)).transpose()?;
        let sums = smooth.then(|| gpu.alloc(call.key_tiles() * call.d)).transpose()?;
        if let (Some(mean), Some(sums)) = (&k_mean, &sums) {
            params.codes.k_mean = address(mean, gpu);
            params.codes.k_tile_sums = address(sums, gpu);
            launch_key_mean(call, params)?;
        }
        params.p_literal = (self.p_reference == PReference::Literal).into();
        params.p_lift = -self.p_reference.of(0.0);
        if self.products == Products::Nvfp4 {
            let _codes = pack(call, params)?.into();
            let kept = Kept { high_precision_out: None, row_sums: None, k_mean };
            return Ok(Operands { kept, rounded: Vec::new(), _codes, _k_tile_sums: sums });
        }
        let (q, q_to) = call.output(shape.query_dims())?;
        let (k, k_to) = call.output(shape.key_dims())?;
        let (v, v_to) = call.output(shape.key_dims())?;
        let k_mean_at = params.codes.k_mean;
        launch_fake_quantize(
            self,
            call,
            [params.q, params.k, params.v],
            [q_to, k_to, v_to],
            k_mean_at,
            true,
        )?;
        (params.q, params.k, params.v) = (q_to, k_to, v_to);
        let second = keep && self.high_precision_output;
        let high_precision_out = second.then(|| call.output(shape.query_dims())).transpose()?;
        let row_sums = keep.then(|| gpu.alloc(call.query_tiles() * TILE)).transpose()?;
        params.high_precision_out =
            high_precision_out.as_ref().map_or_else(Default::default, |(_, view)| *view);
        params.row_sums = row_sums.as_ref().map_or(0, |sums| address(sums, gpu));
        let kept = Kept { high_precision_out, row_sums, k_mean };
        Ok(Operands { kept, rounded: vec![q, k, v], _codes: Vec::new(), _k_tile_sums: sums })
    }

    fn keep(&self, operands: Operands) -> Kept {
        operands.kept
    }

    fn before_backward(
        &self,
        call: &Call<'_>,
        plan: &Plan,
        kept: &Kept,
        past: &Past<'_>,
        params: &mut params::Backward,
    ) -> Result<Option<CudaStorage>> {
        let (gpu, shape) = (&call.gpu, call.problem.shape);
        if let Some((_, view)) = &kept.high_precision_out {
            params.out = *view;
        }
        params.row_sums = kept.row_sums.as_ref().map_or(0, |sums| address(sums, gpu));
        let k_mean = kept.k_mean.as_ref().map_or(0, |mean| address(mean, gpu));
        let mut scratch = None;
        if self.matched_recomputation || k_mean != 0 {
            let (q, q_to) = call.output(shape.query_dims())?;
            let to = [q_to, params.dk, params.dv];
            let from = [params.q, params.k, params.v];
            launch_fake_quantize(self, call, from, to, k_mean, self.matched_recomputation)?;
            [params.q, params.k, params.v] = to;
            scratch = Some(q);
        }
        call.set_backward_maps(plan, true, past.dout.1, params)?;
        launch_delta(call, params)?;
        Ok(scratch)
    }
}

/// Launches the packing of Q, K and V into the codes and scales that FP4 products read, and sets their
/// addresses in `params`.
fn pack(call: &Call<'_>, params: &mut params::Forward) -> Result<[CudaSlice<i8>; 3]> {
    let gpu = &call.gpu;
    // This crate's own tests also run where the kernel emulates the instruction.
    if !gpu.architecture.has_nvfp4() && !cfg!(test) {
        return Err(Error::unsupported("this GPU has no FP4 products, or this build no kernels with them")
            .got(format!("kernels for {}", gpu.architecture))
            .allowed("compute capability 12.x, a build with CUDA 12.9 or later (12.8 for 12.0)")
            .hint("AttnQat::products(Products::SixteenBit) gives the same values everywhere")
            .into());
    }
    let of_tiles = |tiles: usize| gpu.alloc::<i8>(tiles * TILE * (call.d / 2 + call.d / 16));
    let codes = [of_tiles(call.query_tiles())?, of_tiles(call.key_tiles())?, of_tiles(call.key_tiles())?];
    let [q, k, v] = codes.each_ref().map(|codes| address(codes, gpu));
    (params.codes.q, params.codes.k, params.codes.v_transposed) = (q, k, v);
    let grid = Grid::line(call.query_tiles() + 2 * call.key_tiles(), 256);
    gpu.launch_forward(NVFP4, &call.kernel("pack_nvfp4"), grid, params)?;
    Ok(codes)
}

/// Launches the rounding of Q, K and V into other tensors: to NVFP4 if `quantize`, otherwise to 16 bit alone.
/// K's mean is subtracted first.
fn launch_fake_quantize(
    settings: &AttnQat,
    call: &Call<'_>,
    [q, k, v]: [params::View; 3],
    [q_to, k_to, v_to]: [params::View; 3],
    k_mean: params::Address,
    quantize: bool,
) -> Result<()> {
    let params = params::FakeQuantize {
        q,
        k,
        v,
        q_to,
        k_to,
        v_to,
        k_mean,
        shape: call.shape,
        quantize: quantize.into(),
        value_tokens: (settings.value_groups == ValueGroups::Tokens).into(),
    };
    let blocks = call.query_tiles() + 2 * call.key_tiles();
    // As many threads as `kernels/fake_quantize.cu` expects: each takes eight channels of two rows.
    let threads = (TILE * call.d / 16) as u32;
    params::launch(&call.gpu, &call.kernel("fake_quantize"), Grid::line(blocks, threads), &params)
}
