//! The arguments of the kernels for selections, their router, the linear tail and the mixture, byte for byte
//! as in `kernels/include/sage/params/sla2.cuh`.

use std::mem::{offset_of, size_of};

use super::{Cuts, Forward, Lists, Shape, View, kernel_params};
use crate::cuda::address::Address;

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::cuda) struct Users<'a> {
    pub(in crate::cuda) lists: Lists<'a>,
    pub(in crate::cuda) users: Address<'a>,
    pub(in crate::cuda) first_users: Address<'a>,
    pub(in crate::cuda) counts: Address<'a>,
    pub(in crate::cuda) used: Address<'a>,
    pub(in crate::cuda) shape: Shape<'a>,
    pub(in crate::cuda) cuts: Cuts<'a>,
    pub(in crate::cuda) least_users: u32,
    pub(in crate::cuda) shares: i32,
    pub(in crate::cuda) most_slots: i32,
    pub(in crate::cuda) most_parts: i32,
    pub(in crate::cuda) slot_floats: i32,
    pub(in crate::cuda) slot_pieces: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::cuda) struct Choose<'a> {
    pub(in crate::cuda) scores: Address<'a>,
    pub(in crate::cuda) lists: Lists<'a>,
    pub(in crate::cuda) shape: Shape<'a>,
    pub(in crate::cuda) columns: i32,
    pub(in crate::cuda) most: i32,
    pub(in crate::cuda) nearest: i32,
    pub(in crate::cuda) padding: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::cuda) struct Pool<'a> {
    pub(in crate::cuda) x: View<'a>,
    pub(in crate::cuda) means: Address<'a>,
    pub(in crate::cuda) shape: Shape<'a>,
    pub(in crate::cuda) query: i32,
    pub(in crate::cuda) heads: i32,
    pub(in crate::cuda) pool: i32,
    pub(in crate::cuda) blocks: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::cuda) struct Mass<'a> {
    pub(in crate::cuda) forward: Forward<'a>,
    pub(in crate::cuda) mass: Address<'a>,
    pub(in crate::cuda) query_blocks: i32,
    pub(in crate::cuda) columns: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::cuda) struct Mixture<'a> {
    pub(in crate::cuda) theta: Address<'a>,
    pub(in crate::cuda) parts: Address<'a>,
    pub(in crate::cuda) lists: Lists<'a>,
    pub(in crate::cuda) by_count: i32,
    pub(in crate::cuda) padding: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::cuda) struct Linear<'a> {
    pub(in crate::cuda) q: View<'a>,
    pub(in crate::cuda) k: View<'a>,
    pub(in crate::cuda) v: View<'a>,
    pub(in crate::cuda) out: View<'a>,
    pub(in crate::cuda) dout: View<'a>,
    pub(in crate::cuda) dq: View<'a>,
    pub(in crate::cuda) dk: View<'a>,
    pub(in crate::cuda) dv: View<'a>,
    pub(in crate::cuda) sparse: View<'a>,
    pub(in crate::cuda) states: Address<'a>,
    pub(in crate::cuda) sums: Address<'a>,
    pub(in crate::cuda) chunk_sums: Address<'a>,
    pub(in crate::cuda) chunk_states: Address<'a>,
    pub(in crate::cuda) rows: Address<'a>,
    pub(in crate::cuda) mixture: Mixture<'a>,
    pub(in crate::cuda) shape: Shape<'a>,
    pub(in crate::cuda) blocks: i32,
    pub(in crate::cuda) chunks: i32,
    pub(in crate::cuda) chunk_blocks: i32,
    pub(in crate::cuda) backward: i32,
    pub(in crate::cuda) add: i32,
    pub(in crate::cuda) padding: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::cuda) struct Blend<'a> {
    pub(in crate::cuda) sparse: View<'a>,
    pub(in crate::cuda) tail: View<'a>,
    pub(in crate::cuda) out: View<'a>,
    pub(in crate::cuda) dtail: View<'a>,
    pub(in crate::cuda) dout: View<'a>,
    pub(in crate::cuda) dtheta: Address<'a>,
    pub(in crate::cuda) mixture: Mixture<'a>,
    pub(in crate::cuda) shape: Shape<'a>,
}

kernel_params! {
    Users<'_>: "selection",
    Choose<'_>: "selection",
    Pool<'_>: "selection",
    Mass<'_>: "selection",
    Linear<'_>: "past_linear",
    Blend<'_>: "blend",
}

const _: () = {
    assert!(size_of::<Users>() == 184 && offset_of!(Users, shape) == 72);
    assert!(offset_of!(Users, cuts) == 128);
    assert!(size_of::<Choose>() == 120 && offset_of!(Choose, shape) == 48);
    assert!(size_of::<Pool>() == 128 && offset_of!(Pool, shape) == 56);
    assert!(size_of::<Mass>() == 896 && offset_of!(Mass, mass) == 832);
    assert!(size_of::<Mixture>() == 64 && offset_of!(Mixture, by_count) == 56);
    assert!(size_of::<Linear>() == 616 && offset_of!(Linear, states) == 432);
    assert!(offset_of!(Linear, mixture) == 472 && offset_of!(Linear, shape) == 536);
    assert!(size_of::<Blend>() == 368);
    assert!(offset_of!(Blend, mixture) == 248 && offset_of!(Blend, shape) == 312);
};
