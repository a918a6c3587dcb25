//! The kernels' arguments, byte for byte as in `kernels/include/sage/params/ops.cuh`.
#![allow(unsafe_code)]

use std::mem::{offset_of, size_of};

use crate::cuda::address::Address;
use crate::cuda::params::kernel_params;
pub(super) use crate::cuda::params::launch;

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RmsNorm<'a> {
    pub(super) x: Address<'a>,
    pub(super) weight: Address<'a>,
    pub(super) dy: Address<'a>,
    pub(super) residual: Address<'a>,
    pub(super) sum: Address<'a>,
    pub(super) out: Address<'a>,
    pub(super) partials: Address<'a>,
    pub(super) rows: i32,
    pub(super) width: i32,
    pub(super) lanes: i32,
    pub(super) weight_type: i32,
    pub(super) eps: f32,
    pub(super) padding: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PartialSums<'a> {
    pub(super) partials: Address<'a>,
    pub(super) out: Address<'a>,
    pub(super) parts: i32,
    pub(super) width: i32,
}

/// Contiguous rows to add up in order. `sum` has the term at `place`, whose row is not read.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SumInOrder<'a> {
    pub(super) parts: Address<'a>,
    pub(super) sum: Address<'a>,
    pub(super) width: i64,
    pub(super) count: i32,
    pub(super) place: i32,
}

/// A (batch, token, head, channel) tensor whose channels are adjacent; strides in elements.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Heads<'a> {
    pub(super) data: Address<'a>,
    pub(super) batch: i64,
    pub(super) token: i64,
    pub(super) head: i64,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct CopyHeads<'a> {
    pub(super) x: Heads<'a>,
    pub(super) out: Heads<'a>,
    pub(super) tokens: i32,
    pub(super) sequence: i32,
    pub(super) heads: i32,
    pub(super) packs: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Rope<'a> {
    pub(super) x: Heads<'a>,
    pub(super) dy: Heads<'a>,
    pub(super) out: Heads<'a>,
    pub(super) cos: Address<'a>,
    pub(super) sin: Address<'a>,
    pub(super) weight: Address<'a>,
    pub(super) partials: Address<'a>,
    pub(super) tokens: i32,
    pub(super) sequence: i32,
    pub(super) heads: i32,
    pub(super) half: i32,
    pub(super) lanes: i32,
    pub(super) interleaved: i32,
    pub(super) weight_type: i32,
    pub(super) eps: f32,
    pub(super) direction: f32,
    pub(super) padding: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SwiGlu<'a> {
    pub(super) gate: Address<'a>,
    pub(super) up: Address<'a>,
    pub(super) dy: Address<'a>,
    pub(super) out: Address<'a>,
    pub(super) dup: Address<'a>,
    pub(super) y: Address<'a>,
    pub(super) len: i64,
    pub(super) columns: i64,
    pub(super) gate_row: i64,
    pub(super) up_row: i64,
    pub(super) out_row: i64,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct CheckIds<'a> {
    pub(super) ids: Address<'a>,
    pub(super) places: Address<'a>,
    pub(super) status: Address<'a>,
    pub(super) limit: i64,
    pub(super) ignored: i64,
    pub(super) ignores: i32,
    pub(super) len: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SortIds<'a> {
    pub(super) ids: Address<'a>,
    pub(super) order: Address<'a>,
    pub(super) sorted_ids: Address<'a>,
    pub(super) sorted_order: Address<'a>,
    pub(super) counts: Address<'a>,
    pub(super) len: i32,
    pub(super) shift: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Embedding<'a> {
    pub(super) from: Address<'a>,
    pub(super) ids: Address<'a>,
    pub(super) order: Address<'a>,
    pub(super) starts: Address<'a>,
    pub(super) pieces: Address<'a>,
    pub(super) out: Address<'a>,
    pub(super) row_stride: i64,
    pub(super) column_stride: i64,
    pub(super) len: i32,
    pub(super) rows: i32,
    pub(super) width: i32,
    pub(super) lanes: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct CrossEntropy<'a> {
    pub(super) logits: Address<'a>,
    pub(super) gradient: Address<'a>,
    pub(super) targets: Address<'a>,
    pub(super) status: Address<'a>,
    pub(super) dloss: Address<'a>,
    pub(super) losses: Address<'a>,
    pub(super) lse: Address<'a>,
    pub(super) rows: i32,
    pub(super) classes: i32,
    pub(super) lanes: i32,
    pub(super) z_loss: f32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Scale<'a> {
    pub(super) from: Address<'a>,
    pub(super) out: Address<'a>,
    pub(super) dloss: Address<'a>,
    pub(super) status: Address<'a>,
    pub(super) len: i64,
    pub(super) accumulate: i32,
    pub(super) padding: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SumOfSquares<'a> {
    pub(super) x: Address<'a>,
    pub(super) partials: Address<'a>,
    pub(super) out: Address<'a>,
    pub(super) len: i64,
    pub(super) parts: i32,
    pub(super) vector: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct AdamW<'a> {
    pub(super) weights: Address<'a>,
    pub(super) mean: Address<'a>,
    pub(super) square: Address<'a>,
    pub(super) gradient: Address<'a>,
    pub(super) sum_of_squares: Address<'a>,
    pub(super) copy: Address<'a>,
    pub(super) len: i64,
    pub(super) decayed: i64,
    pub(super) factor: f32,
    pub(super) clip: f32,
    pub(super) beta1: f32,
    pub(super) beta2: f32,
    pub(super) rate: f32,
    pub(super) root: f32,
    pub(super) eps: f32,
    pub(super) keep: f32,
    pub(super) copy_type: i32,
    pub(super) padding: i32,
}

kernel_params! {
    RmsNorm<'_>: "rms_norm",
    PartialSums<'_>: "partial_sums",
    SumInOrder<'_>: "partial_sums",
    CopyHeads<'_>: "copy_heads",
    Rope<'_>: "rope",
    SwiGlu<'_>: "swiglu",
    CheckIds<'_>: "ids",
    SortIds<'_>: "ids",
    Embedding<'_>: "embedding",
    CrossEntropy<'_>: "cross_entropy",
    Scale<'_>: "cross_entropy",
    SumOfSquares<'_>: "adamw",
    AdamW<'_>: "adamw",
}

const _: () = {
    assert!(size_of::<RmsNorm>() == 80 && offset_of!(RmsNorm, rows) == 56 && offset_of!(RmsNorm, eps) == 72);
    assert!(size_of::<PartialSums>() == 24);
    assert!(size_of::<SumInOrder>() == 32 && offset_of!(SumInOrder, count) == 24);
    assert!(size_of::<Heads>() == 32);
    assert!(size_of::<CopyHeads>() == 80 && offset_of!(CopyHeads, tokens) == 64);
    assert!(size_of::<Rope>() == 168 && offset_of!(Rope, out) == 64);
    assert!(offset_of!(Rope, tokens) == 128 && offset_of!(Rope, eps) == 156);
    assert!(size_of::<SwiGlu>() == 88 && offset_of!(SwiGlu, out_row) == 80);
    assert!(size_of::<CheckIds>() == 48 && offset_of!(CheckIds, ignores) == 40);
    assert!(size_of::<SortIds>() == 48 && offset_of!(SortIds, len) == 40);
    assert!(size_of::<Embedding>() == 80);
    assert!(offset_of!(Embedding, row_stride) == 48 && offset_of!(Embedding, len) == 64);
    assert!(
        size_of::<CrossEntropy>() == 72
            && offset_of!(CrossEntropy, rows) == 56
            && offset_of!(CrossEntropy, z_loss) == 68
    );
    assert!(size_of::<SumOfSquares>() == 40 && offset_of!(SumOfSquares, parts) == 32);
    assert!(size_of::<AdamW>() == 104 && offset_of!(AdamW, len) == 48 && offset_of!(AdamW, factor) == 64);
    assert!(offset_of!(AdamW, copy_type) == 96);
    assert!(size_of::<Scale>() == 48 && offset_of!(Scale, accumulate) == 40);
};
