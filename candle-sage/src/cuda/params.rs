//! The kernels' arguments, and launches with these arguments. `build.rs` generates the arguments from
//! `kernels/include/sage/params`.
#![allow(unsafe_code)]

use std::marker::PhantomData;

use candle_core::Result;
use cudarc::driver::DeviceRepr;

use super::address::Address;
use super::kernels::{Gpu, Grid};

/// The argument of the kernels of one family.
pub(super) trait Params: DeviceRepr {
    /// The `.cu` file of the kernels that take this argument.
    const FAMILY: &'static str;
}

pub(super) fn launch<P: Params>(gpu: &Gpu, kernel: &str, grid: Grid, params: &P) -> Result<()> {
    // SAFETY: by the type `Address`, every address in `params` and its tensor maps is null or inside an allocation that
    // is borrowed, and so alive, at the launch. Work on one stream is in order, so memory that is freed after the
    // launch is reused only after the kernel. The types do not guarantee that (1) the allocations belong to this device
    // and stream, and have the sizes in `params` and the element types of `kernel`, (2) no address that the kernel uses
    // is null, (3) `kernel` and `grid` match `params`. The modules of this folder vouch for these conditions; no other
    // code creates `params`. The modules allocate buffers of the sizes that they write to `params`, and the ops check
    // the tensors that callers pass.
    unsafe { gpu.launch(P::FAMILY, kernel, grid, params) }
}

/// The argument of attention kernels. Unlike a [`Params`], it is for kernels in several `.cu` files.
pub(super) trait AttentionParams: DeviceRepr {}
impl AttentionParams for Forward<'_> {}
impl AttentionParams for Backward<'_> {}

impl Gpu {
    pub(super) fn launch_attention<P: AttentionParams>(
        &self,
        family: &str,
        kernel: &str,
        grid: Grid,
        params: &P,
    ) -> Result<()> {
        // SAFETY: as in `launch`.
        unsafe { self.launch(family, kernel, grid, params) }
    }
}

/// A CUtensorMap: it describes a tensor that TMA (hardware of Hopper and later GPUs) copies tile by tile. The map
/// contains the tensor's address, and borrows the tensor.
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct TensorMap<'a> {
    opaque: [u64; 16],
    tensor: PhantomData<&'a ()>,
}

include!(concat!(env!("OUT_DIR"), "/params.rs"));

/// The family of each argument's kernels.
macro_rules! families {
    ($($type:ident: $family:literal),* $(,)?) => {$(
        impl Params for $type<'_> {
            const FAMILY: &'static str = $family;
        }
    )*};
}

families! {
    AdamW: "adamw",
    Blend: "blend",
    CheckIds: "ids",
    Choose: "selection",
    CopyHeads: "copy_heads",
    CrossEntropy: "cross_entropy",
    Embedding: "embedding",
    FakeQuantize: "fake_quantize",
    Fp8CrossEntropy: "cross_entropy",
    Fp8Quantize: "fp8",
    Fp8Rescale: "fp8",
    Fp8RmsNorm: "rms_norm",
    Fp8Rope: "rope",
    Fp8SwiGlu: "swiglu",
    Linear: "past_linear",
    LogSumExp: "quantize",
    Mass: "selection",
    LayerNorm: "layer_norm",
    MuonApply: "muon",
    MuonCombine: "muon",
    MuonMomentum: "muon",
    MuonRows: "muon",
    MuonTrace: "muon",
    PartialSums: "partial_sums",
    Pool: "selection",
    RmsNorm: "rms_norm",
    Rope: "rope",
    Scale: "cross_entropy",
    SinkGradient: "quantize",
    SortIds: "ids",
    SumInOrder: "partial_sums",
    SumOfSquares: "adamw",
    SwiGlu: "swiglu",
    InvertedLists: "selection",
}
