//! How a kernel runs: the rows of the table of plans (`kernels/include/sage/params/plans.def`), which kernels are made from too.

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

/// What a plan is for: architectures whose blocks have as much shared memory and whose kernels have the same mainloops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    /// A100.
    Sm80,
    /// All that have the small memory: sm_86, sm_89, sm_120 and PTX.
    Sm86,
    /// Hopper.
    Sm90,
    /// B200.
    Sm100,
}

impl Target {
    /// Bytes of shared memory that a plan may ask for.
    pub(super) fn shared_bytes(self) -> usize {
        let (_, kib) = TARGETS.iter().find(|(target, _)| *target == self).expect("a row for each target");
        kib * 1024
    }
}

/// What a mainloop visits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Visits {
    /// All that the mask leaves.
    Every,
    /// The blocks of a selection.
    Listed,
}

impl Visits {
    /// How kernels that visit it are called.
    fn suffix(self) -> &'static str {
        match self {
            Visits::Every => "",
            Visits::Listed => "_sparse",
        }
    }
}

/// The mainloops of `kernels/include/sage/attention/mainloop`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mainloop {
    /// A loop of the kernel's own.
    None,
    ForwardSm80,
    /// Producer and consumers, persistent: one block a multiprocessor takes one tile of queries after the other.
    ForwardSm90,
    BackwardSm80,
    /// A producer, two consumers that keep dK and dV, and a warp that stores dQ.
    BackwardSm90,
    /// Two consumers for scores, dV and perhaps dK; the third warpgroup is the producer, and makes dQ.
    BackwardSm90DqWarpgroup,
}

/// A row of the table of plans, `kernels/include/sage/params/plans.def`: how one kernel runs.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// The `.cu` file of the kernel.
    pub(super) family: &'static str,
    /// The kernel, without what its visits, element type and head_dim add to its name.
    pub(super) kernel: &'static str,
    /// The width that heads are padded to.
    head_dim: usize,
    targets: &'static [Target],
    visits: &'static [Visits],
    mainloop: Mainloop,
    /// Of a block: queries in the forward, keys in the backward.
    pub(super) rows: usize,
    pub(super) threads: u32,
    /// Bytes of a row of K in shared memory, and of one of V.
    pub(super) row_bytes: usize,
    /// Buffers of the pipeline that tiles come through. The kernels' own affair: tests read it.
    #[cfg_attr(not(test), expect(dead_code, reason = "a column of the table that only kernels use"))]
    stages: usize,
    pub(super) shared_bytes: usize,
}

impl Plan {
    /// The plan of a kernel. Every kernel that a scheme can name has one for every target: a test goes through all.
    ///
    /// # Errors
    /// If the table has none.
    pub(super) fn of(
        kernel: &str,
        head_dim: usize,
        architecture: Architecture,
        visits: Visits,
    ) -> candle_core::Result<&'static Self> {
        let target = architecture.target();
        let mut rows = PLANS.iter().filter(|plan| {
            plan.kernel == kernel
                && plan.head_dim == head_dim
                && plan.targets.contains(&target)
                && plan.visits.contains(&visits)
        });
        rows.next().ok_or_else(|| {
            candle_core::Error::Msg(format!(
                "no plan for {kernel}, head_dim {head_dim}, {target:?}, {visits:?}"
            ))
        })
    }

    /// The kernel's name but for element type and head_dim.
    pub(super) fn name(&self, visits: Visits) -> String {
        format!("{}{}", self.kernel, visits.suffix())
    }

    /// Whether it takes tensor maps: the producers of Hopper's mainloops do, for operands in 16 bit.
    pub(super) fn mapped(&self) -> bool {
        match self.mainloop {
            Mainloop::ForwardSm90 => self.row_bytes == 2 * self.head_dim,
            Mainloop::BackwardSm90 | Mainloop::BackwardSm90DqWarpgroup => true,
            Mainloop::None | Mainloop::ForwardSm80 | Mainloop::BackwardSm80 => false,
        }
    }

    /// Whether a producer that copies by tensor maps ends with a document, so that packed ones may have them.
    pub(super) fn maps_documents(&self) -> bool {
        self.mainloop != Mainloop::BackwardSm90DqWarpgroup
    }

    /// Into how many parts the channels of dQ's sums are divided inside a tile: one for each consumer that makes them.
    pub(super) fn dq_parts(&self) -> usize {
        if self.mainloop == Mainloop::BackwardSm90 { 2 } else { 1 }
    }

    /// Whether one block a multiprocessor does all the work, piece by piece.
    pub(super) fn persistent(&self) -> bool {
        self.mainloop == Mainloop::ForwardSm90
    }

    /// Blocks that run together should read no more than what one of so many parts of the second-level cache holds.
    pub(super) fn cache_parts(&self) -> usize {
        if self.mainloop == Mainloop::ForwardSm90 { 8 } else { 2 }
    }
}

/// How many heads run side by side, when blocks of a head share `bytes` and the second-level cache holds `cache_bytes`:
/// as many as fit in one of so many `parts` of it. The long blocks of each come first, so that many heads at once end more
/// evenly.
pub(super) fn heads_at_once(cache_bytes: usize, parts: usize, bytes: usize, heads: usize) -> usize {
    (cache_bytes / parts / bytes.max(1)).clamp(1, heads.max(1))
}

include!(concat!(env!("OUT_DIR"), "/plans.rs"));

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::compiled::{ARCHITECTURES, RESOURCES};
    use crate::cuda::kernels_of;
    use crate::scheme::{AttnQat, Int8Products, Products, SageBwd, Scheme, Smoothing};

    const ALL: [u32; 6] = [80, 86, 89, 90, 100, 120];
    const BOTH: [Visits; 2] = [Visits::Every, Visits::Listed];

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

    /// The plans of a scheme's forward and backward.
    fn plans(scheme: &Scheme, d: usize, architecture: u32, visits: Visits) -> [&'static Plan; 2] {
        let architecture = Architecture::from_number(architecture);
        kernels_of(scheme).map(|kernel| Plan::of(kernel, d, architecture, visits).expect("a plan"))
    }

    #[test]
    fn every_plan_fits_its_targets_and_has_no_twin() {
        for (n, plan) in PLANS.iter().enumerate() {
            for target in plan.targets {
                assert!(plan.shared_bytes <= target.shared_bytes(), "{target:?}: {plan:?}");
            }
            let twin = PLANS[..n].iter().find(|other| {
                (other.kernel, other.head_dim) == (plan.kernel, plan.head_dim)
                    && other.targets.iter().any(|target| plan.targets.contains(target))
                    && other.visits.iter().any(|visits| plan.visits.contains(visits))
            });
            assert_eq!(twin, None, "{plan:?}");
        }
    }

    /// A scheme may name a kernel that nobody compiled: what ptxas reported has the entries of each architecture.
    #[test]
    fn every_plan_is_one_of_a_kernel_that_was_compiled() {
        for plan in PLANS {
            for &number in ARCHITECTURES {
                // The forward in FP4 products is built for what has them, and for Hopper.
                let built = plan.family != "attn_fwd_nvfp4" || [90, 120].contains(&number);
                if !built || !plan.targets.contains(&Architecture::from_number(number).target()) {
                    continue;
                }
                for visits in plan.visits {
                    // The router's and the tail's kernels visit lists alone, and have no other of the same name.
                    let visits = if plan.mainloop == Mainloop::None { Visits::Every } else { *visits };
                    for element in ["bf16", "f16"] {
                        let entry =
                            format!("'{}_{element}_{}' for 'sm_{number}", plan.name(visits), plan.head_dim);
                        assert!(RESOURCES.contains(&entry), "{entry}");
                    }
                }
            }
        }
    }

    #[test]
    fn every_scheme_has_plans_for_every_architecture() {
        for (scheme, number) in schemes().iter().flat_map(|scheme| ALL.map(|number| (scheme, number))) {
            for (d, visits) in [64, 128].into_iter().flat_map(|d| BOTH.map(|visits| (d, visits))) {
                let [forward, backward] = plans(scheme, d, number, visits);
                if visits == Visits::Listed {
                    assert_eq!(forward.rows, SELECTION_BLOCK, "{number}: {forward:?}");
                    assert!(SELECTION_BLOCK.is_multiple_of(backward.rows), "{number}: {backward:?}");
                }
            }
        }
    }

    #[test]
    fn large_memories_get_more_stages() {
        for scheme in &schemes() {
            let [_, hopper] = plans(scheme, 128, 90, Visits::Every);
            assert_eq!((hopper.rows, hopper.stages), (128, 2), "{hopper:?}");
            let [_, large] = plans(scheme, 128, 100, Visits::Every);
            assert_eq!((large.rows, large.stages, large.threads), (128, 2, 256), "{large:?}");
        }
        let rows_and_stages = |number| {
            let [_, backward] = plans(&schemes()[1], 128, number, Visits::Every);
            (backward.rows, backward.stages)
        };
        assert_eq!((rows_and_stages(80), rows_and_stages(89)), ((128, 1), (64, 1)));
    }

    #[test]
    fn hopper_has_mainloops_of_its_own() {
        use Mainloop::{BackwardSm80, BackwardSm90, BackwardSm90DqWarpgroup, ForwardSm80, ForwardSm90};
        let [full, sage, general, ..] = &schemes();
        let mainloops = |scheme, d, number| plans(scheme, d, number, Visits::Every).map(|plan| plan.mainloop);
        for (d, of_full) in [(64, BackwardSm90DqWarpgroup), (128, BackwardSm90)] {
            assert_eq!(mainloops(full, d, 90), [ForwardSm90, of_full]);
            assert_eq!(mainloops(sage, d, 90), [ForwardSm90, BackwardSm90DqWarpgroup]);
            for (scheme, number) in [(general, 90), (full, 80), (sage, 80), (sage, 100)] {
                assert_eq!(
                    mainloops(scheme, d, number),
                    [ForwardSm80, BackwardSm80],
                    "{scheme} {d} {number}"
                );
            }
            let [full, sage] = [full, sage].map(|scheme| plans(scheme, d, 90, Visits::Every)[0]);
            assert!(full.mapped() && !sage.mapped() && full.persistent() && sage.persistent());
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
