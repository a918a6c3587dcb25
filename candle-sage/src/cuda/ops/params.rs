//! The kernels' arguments, byte for byte as in `kernels/include/sage/params/ops.cuh`.
#![allow(unsafe_code)]

use std::mem::{offset_of, size_of};

pub(super) use crate::cuda::params::launch;
use crate::cuda::params::{Address, kernel_params};

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RmsNorm {
    pub(super) x: Address,
    pub(super) weight: Address,
    pub(super) dy: Address,
    pub(super) residual: Address,
    pub(super) sum: Address,
    pub(super) out: Address,
    pub(super) partials: Address,
    pub(super) rows: i32,
    pub(super) width: i32,
    pub(super) lanes: i32,
    pub(super) weight_type: i32,
    pub(super) eps: f32,
    pub(super) padding: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PartialSums {
    pub(super) partials: Address,
    pub(super) out: Address,
    pub(super) parts: i32,
    pub(super) width: i32,
}

/// Contiguous rows to add up in order; the term at `place` is in `sum` already.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SumInOrder {
    pub(super) parts: Address,
    pub(super) sum: Address,
    pub(super) width: i64,
    pub(super) count: i32,
    pub(super) place: i32,
}

/// A (batch, token, head, channel) tensor whose channels are adjacent; strides in elements.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Heads {
    pub(super) data: Address,
    pub(super) batch: i64,
    pub(super) token: i64,
    pub(super) head: i64,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Rope {
    pub(super) x: Heads,
    pub(super) dy: Heads,
    pub(super) out: Heads,
    pub(super) cos: Address,
    pub(super) sin: Address,
    pub(super) weight: Address,
    pub(super) partials: Address,
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
pub(super) struct SwiGlu {
    pub(super) gate: Address,
    pub(super) up: Address,
    pub(super) dy: Address,
    pub(super) out: Address,
    pub(super) dup: Address,
    pub(super) y: Address,
    pub(super) len: i64,
    pub(super) columns: i64,
    pub(super) gate_row: i64,
    pub(super) up_row: i64,
    pub(super) out_row: i64,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct CheckIds {
    pub(super) ids: Address,
    pub(super) places: Address,
    pub(super) status: Address,
    pub(super) limit: i64,
    pub(super) ignored: i64,
    pub(super) ignores: i32,
    pub(super) len: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SortIds {
    pub(super) ids: Address,
    pub(super) order: Address,
    pub(super) sorted_ids: Address,
    pub(super) sorted_order: Address,
    pub(super) counts: Address,
    pub(super) len: i32,
    pub(super) shift: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Embedding {
    pub(super) from: Address,
    pub(super) ids: Address,
    pub(super) order: Address,
    pub(super) starts: Address,
    pub(super) pieces: Address,
    pub(super) out: Address,
    pub(super) row_stride: i64,
    pub(super) column_stride: i64,
    pub(super) len: i32,
    pub(super) rows: i32,
    pub(super) width: i32,
    pub(super) lanes: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct CrossEntropy {
    pub(super) logits: Address,
    pub(super) gradient: Address,
    pub(super) targets: Address,
    pub(super) status: Address,
    pub(super) dloss: Address,
    pub(super) losses: Address,
    pub(super) lse: Address,
    pub(super) rows: i32,
    pub(super) classes: i32,
    pub(super) lanes: i32,
    pub(super) z_loss: f32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Scale {
    pub(super) from: Address,
    pub(super) out: Address,
    pub(super) dloss: Address,
    pub(super) status: Address,
    pub(super) len: i64,
    pub(super) accumulate: i32,
    pub(super) padding: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SumOfSquares {
    pub(super) x: Address,
    pub(super) partials: Address,
    pub(super) out: Address,
    pub(super) len: i64,
    pub(super) parts: i32,
    pub(super) vector: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct AdamW {
    pub(super) weights: Address,
    pub(super) mean: Address,
    pub(super) square: Address,
    pub(super) gradient: Address,
    pub(super) sum_of_squares: Address,
    pub(super) copy: Address,
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
    RmsNorm: "rms_norm",
    PartialSums: "partial_sums",
    SumInOrder: "partial_sums",
    Rope: "rope",
    SwiGlu: "swiglu",
    CheckIds: "ids",
    SortIds: "ids",
    Embedding: "embedding",
    CrossEntropy: "cross_entropy",
    Scale: "cross_entropy",
    SumOfSquares: "adamw",
    AdamW: "adamw",
}

const _: () = {
    assert!(size_of::<RmsNorm>() == 80 && offset_of!(RmsNorm, rows) == 56 && offset_of!(RmsNorm, eps) == 72);
    assert!(size_of::<PartialSums>() == 24);
    assert!(size_of::<SumInOrder>() == 32 && offset_of!(SumInOrder, count) == 24);
    assert!(size_of::<Heads>() == 32);
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
