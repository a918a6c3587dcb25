//! The arguments of the kernels for selections, their router, the linear tail and the mixture, byte for byte
//! as in `kernels/include/sage/params/sla2.cuh`.

use std::mem::{offset_of, size_of};

use super::{Address, Forward, Lists, Shape, View, kernel_params};

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::cuda) struct Users {
    pub(in crate::cuda) lists: Lists,
    pub(in crate::cuda) users: Address,
    pub(in crate::cuda) first_users: Address,
    pub(in crate::cuda) counts: Address,
    pub(in crate::cuda) shape: Shape,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::cuda) struct Choose {
    pub(in crate::cuda) scores: Address,
    pub(in crate::cuda) lists: Lists,
    pub(in crate::cuda) shape: Shape,
    pub(in crate::cuda) columns: i32,
    pub(in crate::cuda) most: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::cuda) struct Pool {
    pub(in crate::cuda) x: View,
    pub(in crate::cuda) means: Address,
    pub(in crate::cuda) shape: Shape,
    pub(in crate::cuda) query: i32,
    pub(in crate::cuda) heads: i32,
    pub(in crate::cuda) pool: i32,
    pub(in crate::cuda) blocks: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::cuda) struct Mass {
    pub(in crate::cuda) forward: Forward,
    pub(in crate::cuda) mass: Address,
    pub(in crate::cuda) query_blocks: i32,
    pub(in crate::cuda) columns: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::cuda) struct Mixture {
    pub(in crate::cuda) theta: Address,
    pub(in crate::cuda) parts: Address,
    pub(in crate::cuda) lists: Lists,
    pub(in crate::cuda) by_count: i32,
    pub(in crate::cuda) padding: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::cuda) struct Linear {
    pub(in crate::cuda) q: View,
    pub(in crate::cuda) k: View,
    pub(in crate::cuda) v: View,
    pub(in crate::cuda) out: View,
    pub(in crate::cuda) dout: View,
    pub(in crate::cuda) dq: View,
    pub(in crate::cuda) dk: View,
    pub(in crate::cuda) dv: View,
    pub(in crate::cuda) sparse: View,
    pub(in crate::cuda) states: Address,
    pub(in crate::cuda) sums: Address,
    pub(in crate::cuda) chunk_sums: Address,
    pub(in crate::cuda) rows: Address,
    pub(in crate::cuda) mixture: Mixture,
    pub(in crate::cuda) shape: Shape,
    pub(in crate::cuda) blocks: i32,
    pub(in crate::cuda) chunks: i32,
    pub(in crate::cuda) chunk_blocks: i32,
    pub(in crate::cuda) backward: i32,
    pub(in crate::cuda) add: i32,
    pub(in crate::cuda) padding: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::cuda) struct Blend {
    pub(in crate::cuda) sparse: View,
    pub(in crate::cuda) tail: View,
    pub(in crate::cuda) out: View,
    pub(in crate::cuda) dtail: View,
    pub(in crate::cuda) dout: View,
    pub(in crate::cuda) dtheta: Address,
    pub(in crate::cuda) mixture: Mixture,
    pub(in crate::cuda) shape: Shape,
}

kernel_params! {
    Users: "selection",
    Choose: "selection",
    Pool: "selection",
    Mass: "selection",
    Linear: "past_linear",
    Blend: "blend",
}

const _: () = {
    assert!(size_of::<Users>() == 120 && offset_of!(Users, shape) == 64);
    assert!(size_of::<Choose>() == 112 && offset_of!(Choose, shape) == 48);
    assert!(size_of::<Pool>() == 128 && offset_of!(Pool, shape) == 56);
    assert!(size_of::<Mass>() == 896 && offset_of!(Mass, mass) == 832);
    assert!(size_of::<Mixture>() == 64 && offset_of!(Mixture, by_count) == 56);
    assert!(size_of::<Linear>() == 608 && offset_of!(Linear, states) == 432);
    assert!(offset_of!(Linear, mixture) == 464 && offset_of!(Linear, shape) == 528);
    assert!(size_of::<Blend>() == 368);
    assert!(offset_of!(Blend, mixture) == 248 && offset_of!(Blend, shape) == 312);
};
