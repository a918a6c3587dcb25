//! Attn-QAT on the GPU: rounds operands to NVFP4 values for 16-bit kernels, or packs operands for FP4 matmuls in
//! inference.
//!
//! The backward rounds Q, K and V again, instead of keeping three rounded tensors per layer for a whole training step.
//! It rounds K and V into the memory of dK and dV. This is safe: no thread block reads another thread block's keys, and
//! each thread block writes gradients after its last matmul. (A thread block whose keys no query sees writes zeros,
//! perhaps before its asynchronous copies of K and V have finished. Nothing reads these copies.)

use candle_core::Result;

use super::address::{Address, address, address_if_any};
use super::buffer::Buffer;
use super::call::Call;
use super::compiled::constants::fake_quantize::VALUES;
use super::compiled::constants::quant_pack_nvfp4::PACK_THREADS;
use super::compiled::kernel;
use super::kernels::Grid;
use super::memory::Purpose;
use super::plan::{Plan, TILE, Visits};
use super::sagebwd::launch_means;
use super::tensor::Output;
use super::unquantized::{self, launch_delta};
use super::{OnGpu, OutputGradient, params};
use crate::error::Error;
use crate::scheme::{AttnQat, MEAN_ROWS, PReference, Products, ValueGroups, ValueScale};

// For the means of K and V, the kernels compute a partial sum per tile, the CPU a partial sum per MEAN_ROWS rows.
const _: () = assert!(MEAN_ROWS == TILE);

/// Name of the forward's kernel with FP4 matmuls, and of its `.cu` file. The kernel `pack_nvfp4` is in the same file.
const NVFP4: &str = "attn_fwd_nvfp4";

pub(super) struct Operands {
    kept: Kept,
    pub(super) rounded: Rounded,
    k_tile_sums: Option<Buffer<f32>>,
    value_max: ValueMax,
}

/// With [`ValueScale::Head`], for each key head of each sequence or packed document: the largest |V|, as the bits of an
/// f32.
type ValueMax = Option<Buffer<u32>>;

/// Buffers that the backward's kernels read and write in addition to the forward's state.
pub(super) struct Scratch {
    /// Q, rounded for the backward's kernel. `None` if the kernel reads the unrounded Q.
    q: Option<Output>,
    value_max: ValueMax,
}

/// Q, K and V as operands of the forward's matmuls.
pub(super) enum Rounded {
    /// For 16-bit matmuls: tensors of values that are rounded to NVFP4.
    Values(Box<[Output; 3]>),
    /// For FP4 matmuls: packed values and scales, in the layout of `kernels/include/sage/layout/nvfp4.cuh`.
    Codes([Buffer<i8>; 3]),
}

#[derive(Debug)]
pub(super) struct Kept {
    /// The high-precision output O'. `None` without a backward, or if the backward does not use it.
    high_precision_out: Option<Output>,
    /// For each query: the sum of `2^logit` over the keys and the sink, divided by the backward's [`PReference`]. With
    /// `PReference::Literal`, the divisor is the sum over the keys only. `None` without a backward.
    row_sums: Option<Buffer<f32>>,
    k_mean: Option<Buffer<f32>>,
}

impl OnGpu for AttnQat {
    type Operands = Operands;
    type Kept = Kept;
    type Scratch = Scratch;

    fn forward_kernel(&self) -> &'static str {
        match self.products {
            Products::Nvfp4 => NVFP4,
            _ => "attn_fwd_attn_qat",
        }
    }

    fn backward_kernel(&self) -> &'static str {
        match self.requantized_p {
            true => "attn_bwd_attn_qat",
            // Without quantization of P, the backward uses the kernel of unquantized attention.
            false => unquantized::BACKWARD,
        }
    }

    fn operands(&self, call: &Call<'_>, keep: bool) -> Result<Operands> {
        let (gpu, shape) = (call.gpu, call.problem.shape);
        let smooth = self.smoothing.of_keys();
        // V's means and sums are stored after K's.
        let smoothed = 1 + usize::from(self.smoothing.of_values());
        let means = smoothed * call.segment_count() * shape.key_heads() * call.d;
        let k_mean = smooth.then(|| gpu.alloc_for(Purpose::kept(keep), means)).transpose()?;
        let k_tile_sums = smooth.then(|| gpu.alloc(smoothed * call.key_tiles() * call.d)).transpose()?;
        if self.products == Products::Nvfp4 {
            let kept = Kept { high_precision_out: None, row_sums: None, k_mean };
            return Ok(Operands {
                kept,
                rounded: Rounded::Codes(codes(call)?),
                k_tile_sums,
                value_max: None,
            });
        }
        let rounded = |dims| call.tensor(Purpose::Scratch, dims);
        let (q, k) = (rounded(shape.query_dims())?, rounded(shape.key_dims())?);
        let rounded = Rounded::Values(Box::new([q, k, rounded(shape.key_dims())?]));
        let second = keep && self.high_precision_output;
        let high_precision_out =
            second.then(|| call.tensor(Purpose::Kept, shape.query_dims())).transpose()?;
        let rows = call.query_tiles() * TILE;
        let row_sums = keep.then(|| gpu.alloc_for(Purpose::Kept, rows)).transpose()?;
        let kept = Kept { high_precision_out, row_sums, k_mean };
        Ok(Operands { kept, rounded, k_tile_sums, value_max: self.value_max(call)? })
    }

    fn before_forward<'p>(
        &self,
        call: &Call<'_>,
        operands: &'p Operands,
        params: &mut params::Forward<'p>,
    ) -> Result<()> {
        let gpu = call.gpu;
        let Kept { high_precision_out, row_sums, k_mean } = &operands.kept;
        params.smooth_values = self.smoothing.of_values().into();
        if let (Some(mean), Some(sums)) = (k_mean, &operands.k_tile_sums) {
            params.codes.k_mean = address(mean, gpu);
            params.codes.k_tile_sums = address(sums, gpu);
            launch_means(call, params)?;
        }
        params.p_literal = (self.p_reference == PReference::Literal).into();
        params.p_lift = -self.p_reference.of(0.0);
        let [q, k, v] = match &operands.rounded {
            Rounded::Codes(codes) => return pack(call, codes, params),
            Rounded::Values(rounded) => rounded.as_ref(),
        };
        let to = [q.view(gpu), k.view(gpu), v.view(gpu)];
        let from = [params.q, params.k, params.v];
        launch_fake_quantize(self, call, from, to, params.codes.k_mean, operands.value_max.as_ref(), true)?;
        [params.q, params.k, params.v] = to;
        if let Some(out) = high_precision_out {
            params.high_precision_out = out.view(gpu);
        }
        params.row_sums = address_if_any(row_sums.as_ref(), gpu);
        Ok(())
    }

    fn keep(&self, operands: Operands) -> Kept {
        operands.kept
    }

    fn scratch(&self, call: &Call<'_>, kept: &Kept) -> Result<Scratch> {
        let again = self.matched_recomputation || kept.k_mean.is_some();
        let q = again.then(|| call.tensor(Purpose::Scratch, call.problem.shape.query_dims())).transpose()?;
        let value_max = if self.matched_recomputation { self.value_max(call)? } else { None };
        Ok(Scratch { q, value_max })
    }

    fn before_backward<'p>(
        &self,
        call: &Call<'_>,
        plan: &Plan,
        kept: &'p Kept,
        scratch: &'p Scratch,
        output: &OutputGradient<'_>,
        params: &mut params::Backward<'p>,
    ) -> Result<()> {
        let gpu = call.gpu;
        if let Some(out) = &kept.high_precision_out {
            params.out = out.view(gpu);
        }
        params.row_sums = address_if_any(kept.row_sums.as_ref(), gpu);
        let k_mean = address_if_any(kept.k_mean.as_ref(), gpu);
        if let Some(q) = &scratch.q {
            let to = [q.view(gpu), params.dk, params.dv];
            let from = [params.q, params.k, params.v];
            let (value_max, quantize) = (scratch.value_max.as_ref(), self.matched_recomputation);
            launch_fake_quantize(self, call, from, to, k_mean, value_max, quantize)?;
            [params.q, params.k, params.v] = to;
        }
        call.set_backward_maps(plan, true, output.dout, params)?;
        launch_delta(call, params)
    }
}

impl AttnQat {
    fn value_max(&self, call: &Call<'_>) -> Result<ValueMax> {
        let heads = call.segment_count() * call.problem.shape.key_heads();
        (self.value_scale == ValueScale::Head).then(|| call.gpu.alloc_zeros(heads)).transpose()
    }
}

/// Memory for the packed values and scales of Q, K and V for FP4 matmuls.
fn codes(call: &Call<'_>) -> Result<[Buffer<i8>; 3]> {
    let gpu = call.gpu;
    // This crate's own tests also run on GPUs on which the kernel emulates FP4 matmuls.
    if !gpu.architecture.has_nvfp4() && !cfg!(test) {
        return Err(Error::unsupported(
            "this GPU does not support FP4 matmuls, or this build has no kernels for them",
        )
        .got(format!("kernels for {}", gpu.architecture))
        .allowed("kernels for sm_100, sm_103 or sm_12x, built with CUDA 12.9 or later (sm_100, sm_120: 12.8)")
        .hint("AttnQat::products(Products::SixteenBit) multiplies FP4 values in 16 bits, on every GPU")
        .into());
    }
    let plan = Plan::of(NVFP4, (call.d, call.d), gpu.architecture, Visits::Every)?;
    let of_tiles = |tiles: usize| gpu.alloc::<i8>(tiles * TILE * plan.row_bytes);
    Ok([of_tiles(call.query_tiles())?, of_tiles(call.key_tiles())?, of_tiles(call.key_tiles())?])
}

/// Launches the packing of Q, K and V into FP4 values and scales, and sets their addresses in `params`.
fn pack<'p>(call: &Call<'_>, codes: &'p [Buffer<i8>; 3], params: &mut params::Forward<'p>) -> Result<()> {
    let gpu = call.gpu;
    let [q, k, v] = codes.each_ref().map(|codes| address(codes, gpu));
    (params.codes.q, params.codes.k, params.codes.v_transposed) = (q, k, v);
    let grid = Grid::line(call.query_tiles() + 2 * call.key_tiles(), PACK_THREADS);
    gpu.launch_attention(NVFP4, &call.kernel("pack_nvfp4"), grid, params)
}

/// Launches the rounding of Q, K and V into other tensors: to NVFP4 if `quantize`, otherwise only to 16 bit. The means
/// of smoothed operands (K, or K and V) are subtracted before the rounding. If `value_max` is given, it must
/// contain zeros, and a launch before the rounding writes the largest |V| of each head to it.
fn launch_fake_quantize(
    settings: &AttnQat,
    call: &Call<'_>,
    [q, k, v]: [params::View<'_>; 3],
    [q_to, k_to, v_to]: [params::View<'_>; 3],
    k_mean: Address<'_>,
    value_max: Option<&Buffer<u32>>,
    quantize: bool,
) -> Result<()> {
    let gpu = call.gpu;
    let params = params::FakeQuantize {
        q,
        k,
        v,
        q_to,
        k_to,
        v_to,
        k_mean,
        value_max: address_if_any(value_max, gpu),
        shape: call.shape(),
        quantize: quantize.into(),
        value_tokens: (settings.value_groups == ValueGroups::Tokens).into(),
        smooth_values: settings.smoothing.of_values().into(),
        padding: 0,
    };
    let threads = TILE * call.d / VALUES;
    if value_max.is_some() {
        let tiles = Grid::line(call.key_tiles(), threads);
        params::launch(gpu, &call.kernel(kernel!("value_maxima")), tiles, &params)?;
    }
    let blocks = call.query_tiles() + 2 * call.key_tiles();
    params::launch(gpu, &call.kernel(kernel!("fake_quantize")), Grid::line(blocks, threads), &params)
}
