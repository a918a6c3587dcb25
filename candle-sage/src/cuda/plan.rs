//! How kernels run: the rows of the table of plans in `kernels/include/sage/params/plans.def`.

use super::arch::Architecture;
use crate::scheme::Scheme;
use crate::shape::AttentionShape;

/// `TILE`: the number of tokens in a tile. `SELECTION_BLOCK`: the number of tokens in a selection's block.
pub(super) use super::compiled::constants::attention_segment::{SELECTION_BLOCK, TILE};

/// The larger of the head_dims of keys and values, as padded inside the kernels: 64, 128, 192 (only unquantized
/// attention on Hopper), or 256.
pub(super) fn padded_head_dim(scheme: &Scheme, shape: &AttentionShape, architecture: Architecture) -> usize {
    match shape.widest() {
        129..=192 if *scheme == Scheme::Unquantized && architecture.target() == Target::Sm90 => 192,
        d => d.next_power_of_two().max(64),
    }
}

/// head_dim padded for kernels that support at most 128 channels.
#[cfg(feature = "cuda")]
pub(super) fn small_head_dim(shape: &AttentionShape) -> crate::error::Result<usize> {
    match shape.head_dim().next_power_of_two().max(64) {
        d @ ..=128 => Ok(d),
        _ => Err(crate::error::Error::unsupported("head_dim is out of range for this scheme or op on CUDA")
            .got(shape.head_dim())
            .allowed("8 to 128")
            .hint(
                "the CPU supports up to 256; so do unquantized attention and SageBwd's `scores` on some GPUs",
            )),
    }
}

impl Architecture {
    /// The target that contains this architecture: see `SAGE_TARGET` in `params/plans.def`.
    pub(super) fn target(self) -> Target {
        let own = TARGETS.iter().find(|(_, _, architectures)| architectures.contains(&self.number()));
        own.expect("kernels are compiled only for the architectures of targets").0
    }
}

#[cfg(test)]
impl Target {
    /// Bytes of shared memory that a plan may ask for.
    pub(super) fn shared_bytes(self) -> usize {
        let (_, kib, _) = TARGETS.iter().find(|(target, ..)| *target == self).expect("a row for each target");
        kib * 1024
    }
}

/// The tiles that a mainloop visits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Visits {
    /// All tiles that the mask allows.
    Every,
    /// The tiles of a window.
    Window,
    /// The tiles of a selection's blocks.
    Listed,
    /// In attention with a soft cap or `ALiBi`: the window's tiles, or without a window all tiles that the mask allows.
    ScoreMod,
}

impl Visits {
    /// The variant that stands for `self` in `params/plans.def`.
    fn planned(self) -> Self {
        match self {
            Visits::Every => Visits::Every,
            Visits::Window | Visits::Listed => Visits::Listed,
            Visits::ScoreMod => Visits::ScoreMod,
        }
    }

    /// Suffix of the names of kernels that visit these tiles.
    fn suffix(self) -> &'static str {
        match self {
            Visits::Every => "",
            Visits::Window => "_window",
            Visits::Listed => "_sparse",
            Visits::ScoreMod => "_score_mod",
        }
    }
}

/// Whether a mainloop copies tiles through tensor maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Maps {
    Unmapped,
    Mapped,
    /// Mapped only if V is in 16 bit.
    MappedIfWide,
}

/// What the host knows about a mainloop (an attention kernel's loop over tiles): see `SAGE_MAINLOOP` in `plans.def`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct MainloopProperties {
    maps: Maps,
    documents: bool,
    dq_parts: usize,
    channels: usize,
    persistent: bool,
}

/// A row of the table of plans, `kernels/include/sage/params/plans.def`: how one kernel runs.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// The `.cu` file of the kernel.
    pub(super) family: &'static str,
    /// Name of the kernel without the suffixes that [`Plan::entry`] adds.
    pub(super) kernel: &'static str,
    /// head_dim as padded inside the kernel.
    head_dim: usize,
    /// Number of channels of V as padded inside the kernel.
    value_dim: usize,
    targets: &'static [Target],
    visits: &'static [Visits],
    mainloop: Mainloop,
    /// Rows of a thread block: queries in the forward, keys in the backward.
    pub(super) rows: usize,
    pub(super) threads: usize,
    /// Bytes that one token of V (forward) or of K (backward) takes in shared memory, if V has `head_dim` channels.
    pub(super) row_bytes: usize,
    /// Pipeline stages: the buffers in shared memory into which tiles are loaded in turn. In Rust, only tests read this
    /// number.
    stages: usize,
    pub(super) shared_bytes: usize,
}

impl Plan {
    /// The plan of a kernel for queries and keys that are padded to `head_dim` channels. Of the plans with at least
    /// `value_dim` channels of V, it is the one with the fewest. Up to a `head_dim` of 128, the kernels of every
    /// scheme have plans for every architecture. Above 128, plans exist for unquantized attention (if thread blocks have
    /// enough shared memory) and, on Hopper, for SageBwd with only S in INT8.
    ///
    /// # Errors
    /// If the kernel has no such plan.
    pub(super) fn of(
        kernel: &str,
        (head_dim, value_dim): (usize, usize),
        architecture: Architecture,
        visits: Visits,
    ) -> candle_core::Result<&'static Self> {
        let target = architecture.target();
        let rows = PLANS.iter().filter(|plan| {
            plan.kernel == kernel
                && plan.head_dim == head_dim
                && plan.value_dim >= value_dim
                && plan.targets.contains(&target)
                && plan.visits.contains(&visits.planned())
        });
        rows.min_by_key(|plan| plan.value_dim).ok_or_else(|| {
            candle_core::Error::Msg(format!(
                "no plan for {kernel}, head_dim {head_dim}, values of {value_dim}, {target:?}, {visits:?}"
            ))
        })
    }

    /// The name of the kernel for an element type.
    pub(super) fn entry(&self, visits: Visits, element: &str) -> String {
        let Self { kernel, head_dim, value_dim, .. } = self;
        let values = if value_dim == head_dim { String::new() } else { format!("_{value_dim}") };
        format!("{kernel}{}_{element}_{head_dim}{values}", visits.suffix())
    }

    /// Whether the kernel uses tensor maps. `packed`: whether the call has packed documents.
    pub(super) fn mapped(&self, packed: bool) -> bool {
        let properties = self.mainloop.properties();
        let tiles = match properties.maps {
            Maps::Unmapped => false,
            Maps::Mapped => true,
            Maps::MappedIfWide => self.row_bytes == 2 * self.head_dim,
        };
        // If a packed document ends within a tile, a copy through a tensor map also reads rows of the next document.
        // Only kernels with the property `documents` handle such rows.
        tiles && (properties.documents || !packed)
    }

    /// Number of parts into which the channels of a tile of `dq_accum` are divided (`attention/dq_layout.cuh`).
    pub(super) fn dq_parts(&self) -> usize {
        self.mainloop.properties().dq_parts
    }

    /// Number of the backward's thread blocks that process the same keys. Each computes a part of the channels of dK,
    /// dV and dQ.
    pub(super) fn channel_parts(&self) -> usize {
        self.head_dim.div_ceil(self.mainloop.properties().channels)
    }

    /// Whether the kernel is persistent: one thread block per multiprocessor, which processes one tile after the other.
    pub(super) fn persistent(&self) -> bool {
        self.mainloop.properties().persistent
    }
}

/// The number of heads in a group whose thread blocks run concurrently. The thread blocks of a head share `bytes` of
/// data, and the L2 cache has `cache_bytes`. Let m be the largest number of heads whose data fits in half of the cache.
/// The result is the group size from m / 2 to m for which the last group lacks the fewest heads. The longest thread
/// blocks of a group start first, so multiprocessors finish evenly if the last group is full.
pub(super) fn heads_at_once(cache_bytes: usize, bytes: usize, heads: usize) -> usize {
    let heads = heads.max(1);
    let most = (cache_bytes / 2 / bytes.max(1)).clamp(1, heads);
    let lacking = |at_once: &usize| heads.next_multiple_of(*at_once) - heads;
    (most.div_ceil(2)..=most).rev().min_by_key(lacking).unwrap_or(most)
}

include!(concat!(env!("OUT_DIR"), "/plans.rs"));

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::cuda::compiled::{ARCHITECTURES, NVFP4, RESOURCES};
    use crate::cuda::kernels_of;
    use crate::scheme::{AttnQat, Int8Products, Products, SageBwd, Smoothing};
    use crate::shape::HEAD_DIM;

    /// The variants of [`Visits`] that every scheme supports.
    const OF_ALL_SCHEMES: [Visits; 3] = [Visits::Every, Visits::Window, Visits::Listed];

    fn schemes() -> [Scheme; 9] {
        let sage = |smoothing| SageBwd { smoothing, ..SageBwd::default() }.into();
        let with = |products| SageBwd { products, ..SageBwd::default() }.into();
        let qat = AttnQat::default();
        let all = [
            Scheme::Unquantized,
            sage(Smoothing::K),
            sage(Smoothing::Qk),
            qat.into(),
            qat.requantized_p(false).into(),
            qat.products(Products::Nvfp4).into(),
            with(Int8Products::FORWARD_AND_S),
            with(Int8Products::SCORES),
            with(Int8Products::FORWARD),
        ];
        assert!(Scheme::contains_all(&all));
        all
    }

    /// The widths to which heads of up to `most` channels are padded.
    fn widths(scheme: &Scheme, most: usize, architecture: Architecture) -> BTreeSet<usize> {
        let shape = |d| AttentionShape::new((1, 1, 1, d), (1, 1, 1, d), (1, 1, 1, d), false, None);
        let padded = |d| padded_head_dim(scheme, &shape(d).expect("a shape"), architecture);
        (*HEAD_DIM.start()..=most).map(padded).collect()
    }

    /// Plans exist for exactly the widths to which heads are padded.
    #[test]
    fn every_width_of_the_plans_is_used() {
        let used = |architecture: Architecture| {
            // 256 channels do not fit the shared memory of small GPUs.
            let is_small = architecture.target().shared_bytes() < 128 * 1024;
            widths(&Scheme::Unquantized, if is_small { 128 } else { *HEAD_DIM.end() }, architecture)
        };
        for architecture in ARCHITECTURES.iter().map(|number| Architecture::from_number(*number)) {
            let of_target = PLANS.iter().filter(|plan| plan.targets.contains(&architecture.target()));
            let widths: BTreeSet<_> = of_target.map(|plan| plan.head_dim.max(plan.value_dim)).collect();
            assert_eq!(widths, used(architecture), "{architecture:?}");
        }
    }

    /// The plans of a scheme's forward and backward.
    fn plans(scheme: &Scheme, d: usize, architecture: u32, visits: Visits) -> [&'static Plan; 2] {
        let architecture = Architecture::from_number(architecture);
        kernels_of(scheme).map(|kernel| Plan::of(kernel, (d, d), architecture, visits).expect("a plan"))
    }

    #[test]
    fn every_plan_fits_its_targets_and_is_unique() {
        for (n, plan) in PLANS.iter().enumerate() {
            for target in plan.targets {
                assert!(plan.shared_bytes <= target.shared_bytes(), "{target:?}: {plan:?}");
            }
            let twin = PLANS[..n].iter().find(|other| {
                (other.kernel, other.head_dim, other.value_dim)
                    == (plan.kernel, plan.head_dim, plan.value_dim)
                    && other.targets.iter().any(|target| plan.targets.contains(target))
                    && other.visits.iter().any(|visits| plan.visits.contains(visits))
            });
            assert_eq!(twin, None, "{plan:?}");
        }
    }

    /// The report of ptxas, CUDA's assembler, lists the compiled kernels of each architecture. Every plan's kernel is
    /// in the report.
    #[test]
    fn every_plan_is_one_of_a_kernel_that_was_compiled() {
        for plan in PLANS {
            for &number in ARCHITECTURES {
                let built = plan.family != NVFP4.0 || NVFP4.1.contains(&number);
                if !built || !plan.targets.contains(&Architecture::from_number(number).target()) {
                    continue;
                }
                let all = OF_ALL_SCHEMES.into_iter().chain([Visits::ScoreMod]);
                for visits in all.filter(|visits| plan.visits.contains(&visits.planned())) {
                    // The names of kernels without a mainloop have no suffix for `visits`.
                    let visits = if plan.mainloop == Mainloop::None { Visits::Every } else { visits };
                    for element in ["bf16", "f16"] {
                        let entry = format!("'{}' for 'sm_{number}", plan.entry(visits, element));
                        assert!(RESOURCES.contains(&entry), "{entry}");
                        // After the backward's kernel, `finish_dq` converts the f32 sums of dQ to 16 bit.
                        let finish = format!("'finish_dq_{element}_{}' for 'sm_{number}", plan.head_dim);
                        assert!(plan.family != "attn_bwd" || RESOURCES.contains(&finish), "{finish}");
                    }
                }
            }
        }
    }

    #[test]
    fn every_scheme_has_plans_for_every_architecture() {
        let all = || TARGETS.iter().flat_map(|(_, _, architectures)| *architectures);
        for (scheme, &number) in schemes().iter().flat_map(|scheme| all().map(move |number| (scheme, number)))
        {
            let architecture = Architecture::from_number(number);
            for d in widths(scheme, 128, architecture) {
                for visits in OF_ALL_SCHEMES {
                    let [forward, backward] = plans(scheme, d, number, visits);
                    if visits == Visits::Listed {
                        assert_eq!(forward.rows, SELECTION_BLOCK, "{number}: {forward:?}");
                        assert!(SELECTION_BLOCK.is_multiple_of(backward.rows), "{number}: {backward:?}");
                    }
                }
                let has = |kernel| Plan::of(kernel, (d, d), architecture, Visits::ScoreMod).is_ok();
                let both = kernels_of(scheme).into_iter().all(has);
                assert_eq!(both, scheme.supports_softcap_on_gpu(), "{number}: {scheme} {d}");
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
        use Mainloop::{
            BackwardSm80, BackwardSm90, BackwardSm90ChannelParts, BackwardSm90DqWarpgroup, ForwardSm80,
            ForwardSm90,
        };
        let [full, sage, general, ..] = &schemes();
        let mainloops = |scheme, d, number| plans(scheme, d, number, Visits::Every).map(|plan| plan.mainloop);
        for (number, of_large) in
            [(80, [ForwardSm80, BackwardSm80]), (90, [ForwardSm90, BackwardSm90ChannelParts])]
        {
            assert_eq!(mainloops(full, 256, number), of_large);
        }
        let scores = Scheme::from(SageBwd::default().products(Int8Products::SCORES));
        for (kernels, widths) in [
            (kernels_of(full), (192, 192)),
            (kernels_of(full), (192, 100)),
            (kernels_of(&scores), (256, 256)),
        ] {
            let [forward, backward] = kernels.map(|kernel| {
                Plan::of(kernel, widths, Architecture::from_number(90), Visits::Every).expect("a plan")
            });
            assert_eq!(forward.value_dim, widths.1.next_multiple_of(64));
            assert_eq!([forward.mainloop, backward.mainloop], [ForwardSm90, BackwardSm90ChannelParts]);
            assert!(forward.mapped(false) && backward.mapped(false));
            assert_eq!((backward.channel_parts(), backward.dq_parts()), (2, 1));
        }
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
            let [full, sage, scores] =
                [full, sage, &scores].map(|scheme| plans(scheme, d, 90, Visits::Every)[0]);
            // The forward uses tensor maps only if V is in 16 bit.
            assert!(full.mapped(false) && !sage.mapped(false) && scores.mapped(false));
            assert!(full.persistent() && sage.persistent() && scores.persistent());
        }
    }

    #[test]
    fn heads_share_half_of_the_cache() {
        assert_eq!(heads_at_once(50 << 20, 1 << 30, 64), 1);
        assert_eq!(heads_at_once(50 << 20, 1, 64), 64);
        assert_eq!(heads_at_once(50 << 20, 1, 0), 1);
        // Half of the L2 cache has room for 25 heads, so a group may have 13 (half of 25, rounded up) to 25 heads. Of
        // these numbers, only 16 divides 64.
        assert_eq!(heads_at_once(50 << 20, 1 << 20, 64), 16);
        // Half of the cache has room for 3 heads. Of the numbers from 3 / 2 to 3, only 2 divides 16.
        assert_eq!(heads_at_once(50 << 20, 8 << 20, 16), 2);
        // With 17 heads, groups of 2 and groups of 3 both leave the last group one head short. The larger groups win.
        assert_eq!(heads_at_once(50 << 20, 8 << 20, 17), 3);
    }
}
