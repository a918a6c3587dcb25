//! The kernels' arguments, byte for byte as in `kernels/include/sage/params/attention.cuh`.
#![allow(unsafe_code)]

pub(super) mod sla2;

use std::marker::PhantomData;
use std::mem::{offset_of, size_of};

use candle_core::Result;
use cudarc::driver::DeviceRepr;

use super::address::Address;
use super::kernels::{Gpu, Grid};

/// The argument of the kernels of one family. Its addresses borrow the memory that the kernels read and write.
pub(super) trait Params: DeviceRepr {
    /// The `.cu` file of the kernels that take it.
    const FAMILY: &'static str;
}

/// Launches a kernel on candle's stream.
pub(super) fn launch<P: Params>(gpu: &Gpu, kernel: &str, grid: Grid, params: &P) -> Result<()> {
    // SAFETY: by its type every address in `params`, and in its tensor maps, is null or inside an allocation that is
    // borrowed, and therefore alive, at the launch. Work on one stream is in order, so that memory that is freed after
    // the launch is reused only after the kernel. The types do not guarantee the rest: that the allocations are as
    // large as the sizes in `params` say, have the elements that `kernel` expects, and belong to this device and
    // stream, that an address which the kernel uses is not null, and that `kernel` and `grid` fit `params`. For this
    // the modules beside this one vouch, which alone make parameters: they allocate for the sizes that they pass, and
    // the ops check the tensors of callers.
    unsafe { gpu.launch(P::FAMILY, kernel, grid, params) }
}

/// Implements [`Params`] for argument types, with the family of kernels that takes each.
macro_rules! kernel_params {
    ($($type:ty: $family:literal),* $(,)?) => {$(
        // SAFETY: plain data in C layout, the same on the device: the header has the same assertions as the
        // end of this file.
        unsafe impl cudarc::driver::DeviceRepr for $type {}
        impl $crate::cuda::params::Params for $type {
            const FAMILY: &'static str = $family;
        }
    )*};
}
pub(super) use kernel_params;

/// A (batch, token, head, channel) tensor of 16-bit elements; strides in elements.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct View<'a> {
    pub(super) data: Address<'a>,
    pub(super) batch: i64,
    pub(super) token: i64,
    pub(super) head: i64,
    pub(super) channel: i64,
    /// Whether 16-byte loads of eight channels are possible.
    pub(super) vector: i32,
    /// Of `q` in the forward and `dout` in the backward: whether the [`TensorMap`]s of the parameters are
    /// set.
    pub(super) mapped: i32,
}

/// A CUtensorMap, by which TMA copies a tensor tile by tile. It has the tensor's address in it, and borrows the tensor.
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct TensorMap<'a> {
    opaque: [u64; 16],
    tensor: PhantomData<&'a ()>,
}

/// One packed document.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) query_start: i32,
    pub(super) query_len: i32,
    pub(super) key_start: i32,
    pub(super) key_len: i32,
    pub(super) query_tile: i32,
    pub(super) key_tile: i32,
    pub(super) query_block: i32,
    pub(super) key_block: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Shape<'a> {
    pub(super) segments: Address<'a>,
    pub(super) segment_count: i32,
    pub(super) query_len: i32,
    pub(super) key_len: i32,
    pub(super) query_heads: i32,
    pub(super) key_heads: i32,
    pub(super) head_dim: i32,
    pub(super) causal: i32,
    pub(super) softmax_scale: f32,
    pub(super) query_tiles: i32,
    pub(super) key_tiles: i32,
    pub(super) heads_at_once: i32,
    pub(super) value_dim: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Codes<'a> {
    pub(super) q: Address<'a>,
    pub(super) k: Address<'a>,
    pub(super) v_transposed: Address<'a>,
    pub(super) q_dequant_scale: Address<'a>,
    pub(super) k_dequant_scale: Address<'a>,
    pub(super) v_dequant_scale: Address<'a>,
    pub(super) q_mean: Address<'a>,
    pub(super) k_mean: Address<'a>,
    pub(super) k_tile_sums: Address<'a>,
}

/// The blocks of keys that each block of queries sees, and the inverse lists.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Lists<'a> {
    pub(super) seen: Address<'a>,
    pub(super) users: Address<'a>,
    pub(super) first_users: Address<'a>,
    pub(super) stride: i32,
    pub(super) query_blocks: i32,
    pub(super) key_blocks: i32,
    pub(super) padding: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Cuts<'a> {
    pub(super) parts: Address<'a>,
    pub(super) lists: Address<'a>,
    pub(super) sums: Address<'a>,
    pub(super) arrivals: Address<'a>,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Forward<'a> {
    pub(super) q: View<'a>,
    pub(super) k: View<'a>,
    pub(super) v: View<'a>,
    pub(super) out: View<'a>,
    pub(super) minus_lse2: Address<'a>,
    pub(super) scheduler_counter: Address<'a>,
    pub(super) codes: Codes<'a>,
    pub(super) shape: Shape<'a>,
    pub(super) high_precision_out: View<'a>,
    pub(super) row_sums: Address<'a>,
    pub(super) p_lift: f32,
    pub(super) p_literal: i32,
    pub(super) lists: Lists<'a>,
    pub(super) key_sample: i32,
    pub(super) smooth_values: i32,
    pub(super) q_map: TensorMap<'a>,
    pub(super) k_map: TensorMap<'a>,
    pub(super) v_map: TensorMap<'a>,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Backward<'a> {
    pub(super) q: View<'a>,
    pub(super) k: View<'a>,
    pub(super) v: View<'a>,
    pub(super) out: View<'a>,
    pub(super) dout: View<'a>,
    pub(super) dq: View<'a>,
    pub(super) dk: View<'a>,
    pub(super) dv: View<'a>,
    pub(super) minus_lse2: Address<'a>,
    pub(super) minus_delta: Address<'a>,
    pub(super) dq_accum: Address<'a>,
    pub(super) q_transposed: Address<'a>,
    pub(super) dout_transposed: Address<'a>,
    pub(super) dout_dequant_scale: Address<'a>,
    pub(super) dq_semaphore: Address<'a>,
    pub(super) codes: Codes<'a>,
    pub(super) shape: Shape<'a>,
    pub(super) group: i32,
    pub(super) dout_group: i32,
    pub(super) dq_parts: i32,
    pub(super) row_sums: Address<'a>,
    pub(super) lists: Lists<'a>,
    pub(super) cuts: Cuts<'a>,
    pub(super) q_map: TensorMap<'a>,
    pub(super) dout_map: TensorMap<'a>,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct FakeQuantize<'a> {
    pub(super) q: View<'a>,
    pub(super) k: View<'a>,
    pub(super) v: View<'a>,
    pub(super) q_to: View<'a>,
    pub(super) k_to: View<'a>,
    pub(super) v_to: View<'a>,
    pub(super) k_mean: Address<'a>,
    pub(super) shape: Shape<'a>,
    pub(super) quantize: i32,
    pub(super) value_tokens: i32,
    pub(super) smooth_values: i32,
    pub(super) padding: i32,
}

// SAFETY: plain data in C layout, the same on the device: the header has the same assertions as the end of
// this file.
unsafe impl DeviceRepr for Forward<'_> {}
// SAFETY: as above.
unsafe impl DeviceRepr for Backward<'_> {}
kernel_params!(FakeQuantize<'_>: "fake_quantize");
// SAFETY: as above.
unsafe impl DeviceRepr for Segment {}

const _: () = {
    assert!(size_of::<Address>() == 8 && size_of::<TensorMap>() == 128);
    assert!(size_of::<View>() == 48 && offset_of!(View, vector) == 40);
    assert!(size_of::<Segment>() == 32);
    assert!(size_of::<Lists>() == 40 && offset_of!(Lists, stride) == 24);
    assert!(size_of::<Cuts>() == 32 && offset_of!(Cuts, sums) == 16);
    assert!(size_of::<Shape>() == 56 && offset_of!(Shape, softmax_scale) == 36);
    assert!(size_of::<Codes>() == 72);
    assert!(size_of::<Forward>() == 832 && offset_of!(Forward, q_map) == 448);
    assert!(offset_of!(Forward, minus_lse2) == 192 && offset_of!(Forward, shape) == 280);
    assert!(offset_of!(Forward, row_sums) == 384 && offset_of!(Forward, lists) == 400);
    assert!(offset_of!(Forward, key_sample) == 440 && offset_of!(Forward, smooth_values) == 444);
    assert!(size_of::<FakeQuantize>() == 368 && offset_of!(FakeQuantize, shape) == 296);
    assert!(offset_of!(FakeQuantize, smooth_values) == 360);
    assert!(size_of::<Backward>() == 960 && offset_of!(Backward, q_map) == 704);
    assert!(offset_of!(Backward, minus_lse2) == 384 && offset_of!(Backward, codes) == 440);
    assert!(offset_of!(Backward, shape) == 512 && offset_of!(Backward, group) == 568);
    assert!(offset_of!(Backward, row_sums) == 584 && offset_of!(Backward, lists) == 592);
    assert!(offset_of!(Backward, cuts) == 632);
};
