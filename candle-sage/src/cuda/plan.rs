//! How a kernel runs: tiles, threads and shared memory, from shape, scheme and architecture. Pure functions: printable,
//! and testable without a GPU.

use super::arch::Architecture;
use crate::error::{Error, Result};
use crate::shape::AttentionShape;

/// Tokens that share a scale, and the unit of all padded buffers.
pub(super) const TILE: usize = 64;

/// Tokens of a block of a selection.
pub(super) const SELECTION_BLOCK: usize = 128;

/// The width that head_dim is padded to inside the kernels.
pub(super) fn padded_head_dim(shape: &AttentionShape) -> Result<usize> {
    match shape.head_dim() {
        0..=64 => Ok(64),
        65..=128 => Ok(128),
        d => Err(Error::new("head_dim is out of range on CUDA")
            .got(d)
            .allowed("8 to 128")
            .hint("the CPU takes up to 256")),
    }
}

/// One kernel and how it is launched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    /// The `.cu` file of the kernel.
    pub(super) family: &'static str,
    /// The kernel, without the element type.
    pub(super) name: &'static str,
    /// Queries of a block in the forward, keys in the backward.
    pub(super) rows: usize,
    pub(super) threads: u32,
    /// Bytes of a row of K in shared memory, and of one of V.
    pub(super) row_bytes: usize,
    /// Buffers for tiles on their way.
    pub(super) stages: usize,
    pub(super) shared_bytes: usize,
    /// Whether it takes tensor maps.
    pub(super) mapped: bool,
    /// Of the channels: how the sums of dQ lie inside a tile. With two parts it is Hopper's walk with two consumers.
    pub(super) dq_parts: usize,
    /// Whether one block a multiprocessor does all the work, piece by piece.
    pub(super) takes_tickets: bool,
    /// Blocks that run together read no more than what one of so many parts of the second-level cache holds.
    pub(super) cache_parts: usize,
}

/// The forward of `kernels/include/sage/attention/forward.cuh`: Q, two stages of a tile of K and one of V, with `extra`
/// bytes.
pub(super) fn forward_sm80(name: &'static str, threads: usize, row_bytes: usize, extra: usize) -> Plan {
    let rows = 128;
    Plan {
        family: "attn_fwd_sm80",
        name,
        rows,
        threads: threads as u32,
        row_bytes,
        stages: 2,
        shared_bytes: (rows + 4 * TILE) * row_bytes + extra,
        mapped: false,
        dq_parts: 1,
        takes_tickets: false,
        cache_parts: 2,
    }
}

/// The forward of `kernels/include/sage/attention/forward_roles.cuh`: `groups` warpgroups with 64 queries each, of
/// `row_bytes`, and one that fetches: queries of two blocks, and stages of `stage` bytes.
pub(super) fn forward_sm90(
    name: &'static str,
    groups: usize,
    row_bytes: usize,
    (stages, stage): (usize, usize),
) -> Plan {
    let rows = groups * 64;
    Plan {
        family: "attn_fwd_sm80",
        name,
        rows,
        threads: (groups as u32 + 1) * 128,
        row_bytes,
        stages,
        shared_bytes: 2 * rows * row_bytes + stages * stage,
        mapped: false,
        dq_parts: 1,
        takes_tickets: true,
        cache_parts: 8,
    }
}

/// The backward of `kernels/include/sage/attention/backward.cuh`: the largest plan that fits, of so many
/// `shared_bytes(keys, stages)`.
pub(super) fn backward_sm80(
    name: &'static str,
    architecture: Architecture,
    row_bytes: usize,
    shared_bytes: impl Fn(usize, usize) -> usize,
) -> Plan {
    let plan = |(rows, stages): (usize, usize)| Plan {
        family: "attn_bwd_sm80",
        name,
        rows,
        threads: rows as u32 * 2,
        row_bytes,
        stages,
        shared_bytes: shared_bytes(rows, stages),
        mapped: false,
        dq_parts: 1,
        takes_tickets: false,
        cache_parts: 2,
    };
    let fits = |plan: &Plan| plan.shared_bytes <= architecture.shared_bytes();
    [(128, 2), (128, 1)].map(plan).into_iter().find(fits).unwrap_or_else(|| plan((64, 1)))
}

/// Keys of a block of Hopper's backwards.
pub(super) const KEYS_SM90: usize = 128;

/// The backward of `kernels/include/sage/attention/backward_roles.cuh`: two warpgroups for the keys, one for the sums.
pub(super) fn backward_roles(
    name: &'static str,
    row_bytes: usize,
    stages: usize,
    shared_bytes: usize,
) -> Plan {
    Plan {
        family: "attn_bwd_sm80",
        name,
        rows: KEYS_SM90,
        threads: 384,
        row_bytes,
        stages,
        shared_bytes,
        mapped: true,
        dq_parts: 1,
        takes_tickets: false,
        cache_parts: 2,
    }
}

/// The backward of `kernels/include/sage/attention/backward_consumers.cuh`: two warpgroups that keep 64 keys each, and add a part
/// of dQ each.
pub(super) fn backward_consumers(
    name: &'static str,
    row_bytes: usize,
    stages: usize,
    shared_bytes: usize,
) -> Plan {
    Plan { dq_parts: 2, ..backward_roles(name, row_bytes, stages, shared_bytes) }
}

/// How many heads run side by side, when blocks of a head share `bytes` and the second-level cache holds `cache_bytes`:
/// as many as fit in one of so many `parts` of it. The long blocks of each come first, so that many heads at once end more
/// evenly.
pub(super) fn heads_at_once(cache_bytes: usize, parts: usize, bytes: usize, heads: usize) -> usize {
    (cache_bytes / parts / bytes.max(1)).clamp(1, heads.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::{Visits, plans};
    use crate::scheme::{AttnQat, Int8Products, Products, SageBwd, Scheme, Smoothing};

    fn schemes() -> [Scheme; 8] {
        let sage = |smoothing| SageBwd { smoothing, ..SageBwd::default() }.into();
        let with = |products| SageBwd { products, ..SageBwd::default() }.into();
        let qat = AttnQat::default();
        [
            Scheme::FullPrecision,
            sage(Smoothing::K),
            sage(Smoothing::Qk),
            qat.into(),
            qat.requantized_p(false).into(),
            qat.products(Products::Nvfp4).into(),
            with(Int8Products::FORWARD_AND_S),
            with(Int8Products::FORWARD),
        ]
    }

    fn forward(scheme: &Scheme, d: usize, architecture: Architecture) -> Plan {
        let [forward, _] = plans(scheme, d, architecture, Visits::All);
        forward
    }
    fn backward(scheme: &Scheme, d: usize, architecture: Architecture) -> Plan {
        let [_, backward] = plans(scheme, d, architecture, Visits::All);
        backward
    }

    #[test]
    fn every_plan_fits_its_architecture() {
        for arch in [80, 86, 89, 90, 100, 120].map(Architecture::from_number) {
            for scheme in schemes() {
                for d in [64, 128] {
                    for plan in [forward(&scheme, d, arch), backward(&scheme, d, arch)] {
                        assert!(plan.shared_bytes <= arch.shared_bytes(), "{arch:?}: {plan:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_block_of_a_selection_is_one_of_the_forward_and_a_whole_number_of_the_backward() {
        for arch in [80, 86, 89, 90, 100, 120].map(Architecture::from_number) {
            for scheme in schemes() {
                for d in [64, 128] {
                    let [forward, backward] = plans(&scheme, d, arch, Visits::Listed);
                    assert_eq!(forward.rows, SELECTION_BLOCK, "{arch:?}: {forward:?}");
                    assert!(SELECTION_BLOCK.is_multiple_of(backward.rows), "{arch:?}: {backward:?}");
                    assert!(forward.shared_bytes.max(backward.shared_bytes) <= arch.shared_bytes());
                }
            }
        }
    }

    #[test]
    fn large_memories_get_more_stages() {
        for scheme in schemes() {
            let plan = backward(&scheme, 128, Architecture::from_number(90));
            assert_eq!((plan.rows, plan.stages), (128, 2), "{plan:?}");
            let plan = backward(&scheme, 128, Architecture::from_number(100));
            assert_eq!((plan.rows, plan.stages, plan.threads), (128, 2, 256), "{plan:?}");
        }
        let sage = backward(&schemes()[1], 128, Architecture::from_number(80));
        assert_eq!((sage.rows, sage.stages), (128, 1));
        let sage = backward(&schemes()[1], 128, Architecture::from_number(89));
        assert_eq!((sage.rows, sage.stages), (64, 1));
    }

    #[test]
    fn hopper_has_warpgroups_with_parts() {
        let [full, sage, general, ..] = schemes();
        let threads = |scheme, d, arch| backward(scheme, d, Architecture::from_number(arch)).threads;
        for d in [64, 128] {
            assert_eq!((threads(&full, d, 90), threads(&sage, d, 90)), (384, 384), "{d}");
            for (scheme, arch) in [(&general, 90), (&full, 80), (&sage, 80), (&sage, 100)] {
                assert_eq!(threads(scheme, d, arch), 256, "{scheme} {d} {arch}");
            }
            for (arch, rows) in [(80, 128), (90, if d == 64 { 192 } else { 128 }), (120, 128)] {
                assert_eq!(forward(&sage, d, Architecture::from_number(arch)).rows, rows, "{d} {arch}");
            }
        }
    }

    /// What the kernels' headers come to: SHARED_BYTES of each Numerics.
    #[test]
    fn hoppers_plans_are_what_the_kernels_lay_out() {
        let [full, sage, general, qat, .., with_s, _] = schemes();
        let plan = |scheme, d| forward(scheme, d, Architecture::from_number(90));
        let bytes = |scheme, d| {
            (plan(scheme, d).shared_bytes, backward(scheme, d, Architecture::from_number(90)).shared_bytes)
        };
        assert_eq!(bytes(&full, 64), (180_224, 168_960));
        assert_eq!(bytes(&full, 128), (196_608, 198_656));
        assert_eq!(bytes(&qat, 64), (114_688, 173_056));
        assert_eq!(bytes(&qat, 128), (163_840, 202_752));
        assert_eq!(bytes(&with_s, 64).1, 197_632);
        assert_eq!(bytes(&with_s, 128).1, 231_424);
        assert_eq!(bytes(&sage, 64), (90_304, 191_520));
        assert_eq!(bytes(&sage, 128), (131_216, 202_784));
        for d in [64, 128] {
            assert!(
                plan(&full, d).takes_tickets
                    && plan(&sage, d).takes_tickets
                    && !plan(&general, d).takes_tickets
            );
            assert!(!forward(&sage, d, Architecture::from_number(80)).takes_tickets);
        }
    }

    #[test]
    fn heads_share_a_part_of_the_cache() {
        assert_eq!(heads_at_once(50 << 20, 2, 1 << 20, 64), 25);
        assert_eq!(heads_at_once(50 << 20, 8, 1 << 20, 64), 6);
        assert_eq!(heads_at_once(50 << 20, 2, 1 << 30, 64), 1);
        assert_eq!(heads_at_once(50 << 20, 2, 1, 64), 64);
    }
}
