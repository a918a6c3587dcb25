//! How a kernel runs: tiles, threads and shared memory, from shape, scheme and architecture. Pure functions: printable,
//! and testable without a GPU.

use super::kernels::{ARCHITECTURES, PTX};
use crate::error::{Error, Result};
use crate::scheme::{Granularity, SageBwd, Scheme, Smoothing};
use crate::shape::AttentionShape;

/// Tokens that share a scale, and the unit of all padded buffers.
pub(super) const TILE: usize = 64;

/// The kernels that a device runs: the machine code of its own major version nearest below, else PTX.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Architecture(u32);

impl Architecture {
    /// For a device of this compute capability.
    pub(super) fn of(major: u32, minor: u32) -> Result<Self> {
        let device = major * 10 + minor;
        let native = ARCHITECTURES.iter().filter(|&&arch| arch / 10 == major && arch <= device).max();
        match native {
            Some(&arch) => Ok(Self(arch)),
            None if device >= PTX => Ok(Self(PTX)),
            None => Err(Error::new("the GPU is too old, or this build has no kernels for it")
                .got(format!("compute capability {major}.{minor}"))
                .allowed(format!("machine code for {ARCHITECTURES:?}, PTX for {PTX} and later"))
                .hint(
                    "Ampere (8.0) is the oldest; build without CANDLE_SAGE_CUDA_ARCHS for all architectures",
                )),
        }
    }

    /// Whether kernels run with a part for each warpgroup: on Hopper.
    fn has_roles(self) -> bool {
        self.0 == 90
    }

    /// Bytes of shared memory that a plan may ask for: `SHARED_KIB` of `kernels/include/sage/params/limits.cuh`.
    pub(super) fn shared_bytes(self) -> usize {
        1024 * match self.0 {
            80 => 162,
            90 | 100 => 226,
            _ => 98,
        }
    }
}

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

/// Rejects settings that the kernels do not have.
pub(super) fn check_settings(settings: &SageBwd) -> Result<()> {
    if settings.tile_q != TILE || settings.tile_k != TILE {
        return Err(Error::new("SageBwd on CUDA has tiles of one size")
            .got(format!("tile_q {}, tile_k {}", settings.tile_q, settings.tile_k))
            .allowed("64 for both")
            .hint("other sizes run on the CPU"));
    }
    match settings.granularity {
        Granularity::Group(size) if !size.is_power_of_two() => {
            Err(Error::new("this scale group does not run on CUDA")
                .got(settings.granularity)
                .allowed("vector, group-2, group-4, group-8, group-16, group-32, group-64, tile")
                .hint("other groups run on the CPU"))
        }
        _ => Ok(()),
    }
}

/// One kernel and how it is launched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    /// Without the element type.
    pub(super) name: &'static str,
    /// Queries of a block in the forward, keys in the backward.
    pub(super) rows: usize,
    pub(super) threads: u32,
    /// Buffers for tiles on their way.
    pub(super) stages: usize,
    pub(super) shared_bytes: usize,
    /// Whether it takes tensor maps.
    pub(super) mapped: bool,
    /// Whether one block a multiprocessor does all the work, piece by piece.
    pub(super) takes_tickets: bool,
    /// Blocks that run together read no more than what one of so many parts of the second-level cache holds.
    pub(super) cache_parts: usize,
}

impl Plan {
    /// As most are.
    fn new(name: &'static str, rows: usize, threads: usize, stages: usize, shared_bytes: usize) -> Self {
        let threads = threads as u32;
        Self {
            name,
            rows,
            threads,
            stages,
            shared_bytes,
            mapped: false,
            takes_tickets: false,
            cache_parts: 2,
        }
    }
}

/// The forward of `kernels/include/sage/attention/forward.cuh`.
pub(super) fn forward(scheme: &Scheme, d: usize, architecture: Architecture) -> Plan {
    let rows = 128;
    let (name, tile, mean) = match scheme {
        Scheme::FullPrecision => ("full_precision", 2 * d, 0),
        Scheme::SageBwd(settings) if settings.smoothing == Smoothing::Qk => ("sagebwd_qk", d, 2 * TILE * 4),
        Scheme::SageBwd(_) => ("sagebwd", d, 0),
    };
    if architecture.has_roles() && mean == 0 {
        return forward_with_roles(name, d, tile);
    }
    let threads = 128;
    // Two values for each of four rows a thread, where registers are short and there is room.
    let state_is_shared = match scheme {
        Scheme::FullPrecision => d == 128 && architecture.shared_bytes() > 98 * 1024,
        Scheme::SageBwd(_) => d == 64,
    };
    let state = if state_is_shared { threads * 32 } else { 0 };
    // Queries; two stages of a tile of K and one of V.
    let shared_bytes = rows * tile + 4 * TILE * tile + state + mean;
    Plan::new(name, rows, threads, 2, shared_bytes)
}

/// The forward of `kernels/include/sage/attention/forward_roles.cuh`: warpgroups with 64 queries each, of `row` bytes, and
/// one that fetches: queries of two blocks, and a tile of keys a stage, or two of codes with their scales.
fn forward_with_roles(name: &'static str, d: usize, row: usize) -> Plan {
    let (groups, stages) = if d == 64 { (3, 4) } else { (2, 3) };
    let rows = groups * 64;
    let stage = if row == d { 4 * TILE * row + 48 } else { 2 * TILE * row };
    let shared_bytes = 2 * rows * row + stages * stage;
    let threads = (groups + 1) * 128;
    Plan { takes_tickets: true, cache_parts: 8, ..Plan::new(name, rows, threads, stages, shared_bytes) }
}

/// The backward of `kernels/include/sage/attention/backward.cuh`: the largest plan that fits.
pub(super) fn backward(scheme: &Scheme, d: usize, architecture: Architecture) -> Plan {
    let (name, general) = match scheme {
        Scheme::FullPrecision => ("full_precision", false),
        Scheme::SageBwd(settings)
            if settings.smoothing != Smoothing::Qk && settings.granularity == Granularity::Vector =>
        {
            ("sagebwd", false)
        }
        // The same with the ablations, which cost the usual case some time.
        Scheme::SageBwd(_) => ("sagebwd_general", true),
    };
    if architecture.has_roles() && !general {
        return backward_with_roles(scheme, name, d);
    }
    let plans = [(128, 2), (128, 1), (64, 1)].map(|(rows, stages)| {
        let state = 2 * TILE * 4;
        let ds = 2 * rows * TILE * 2;
        let shared_bytes = match scheme {
            Scheme::FullPrecision => 2 * rows * 2 * d + stages * (2 * TILE * 2 * d + state) + ds,
            Scheme::SageBwd(_) => {
                let keys = 4 * rows * d;
                let stage = (5 * TILE * d + state + 4 * d).next_multiple_of(1024);
                let warps = rows / 16;
                let codes = if rows > TILE { 2 * warps * (1024 + 256) } else { 0 };
                let mean = if general { rows * 4 } else { 0 };
                keys + stages * stage + ds + codes + warps * 4 + mean
            }
        };
        Plan::new(name, rows, rows * 2, stages, shared_bytes)
    });
    let [.., smallest] = plans.clone();
    plans.into_iter().find(|plan| plan.shared_bytes <= architecture.shared_bytes()).unwrap_or(smallest)
}

/// The backward of `kernels/include/sage/attention/backward_roles.cuh`: two warpgroups for 128 keys, one for the sums.
fn backward_with_roles(scheme: &Scheme, name: &'static str, d: usize) -> Plan {
    let rows = 128;
    let ds = rows * TILE * 2;
    // dQ on its way.
    let staging = if d == 64 { TILE * d * 4 } else { 0 };
    let (stages, shared_bytes) = match scheme {
        Scheme::FullPrecision => {
            let stages = if d == 64 { 5 } else { 3 };
            (stages, 2 * rows * 2 * d + stages * (2 * TILE * 2 * d + 1024) + 2 * ds + staging)
        }
        Scheme::SageBwd(_) => {
            let stage = (5 * TILE * d + 2 * TILE * 4 + 4 * d + 4).next_multiple_of(1024);
            // At head_dim 128 codes for dK too, and less room for tiles.
            let (stages, codes) = if d == 64 { (5, 1) } else { (2, 2) };
            let scores = ds + 2 * (codes * rows * TILE + 1024);
            let units = rows / 16 * 4;
            (stages, 4 * rows * d + stages * stage + scores + staging + units)
        }
    };
    Plan { mapped: true, ..Plan::new(name, rows, 384, stages, shared_bytes) }
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

    fn schemes() -> Vec<Scheme> {
        let sage = |smoothing| SageBwd { smoothing, ..SageBwd::default() }.into();
        vec![Scheme::FullPrecision, sage(Smoothing::K), sage(Smoothing::Qk)]
    }

    #[test]
    fn every_plan_fits_its_architecture() {
        for arch in [80, 86, 89, 90, 100, 120].map(Architecture) {
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
    fn large_memories_get_more_stages() {
        for scheme in schemes() {
            let plan = backward(&scheme, 128, Architecture(90));
            let stages = if scheme == Scheme::FullPrecision { 3 } else { 2 };
            assert_eq!((plan.rows, plan.stages), (128, stages), "{plan:?}");
            let plan = backward(&scheme, 128, Architecture(100));
            assert_eq!((plan.rows, plan.stages, plan.threads), (128, 2, 256), "{plan:?}");
        }
        let sage = backward(&schemes()[1], 128, Architecture(80));
        assert_eq!((sage.rows, sage.stages), (128, 1));
        let sage = backward(&schemes()[1], 128, Architecture(89));
        assert_eq!((sage.rows, sage.stages), (64, 1));
    }

    #[test]
    fn hopper_has_warpgroups_with_parts() {
        let [full, sage, general] = <[Scheme; 3]>::try_from(schemes()).expect("three");
        let threads = |scheme, d, arch| backward(scheme, d, Architecture(arch)).threads;
        for d in [64, 128] {
            assert_eq!((threads(&full, d, 90), threads(&sage, d, 90)), (384, 384), "{d}");
            for (scheme, arch) in [(&general, 90), (&full, 80), (&sage, 80), (&sage, 100)] {
                assert_eq!(threads(scheme, d, arch), 256, "{scheme} {d} {arch}");
            }
            for (arch, rows) in [(80, 128), (90, if d == 64 { 192 } else { 128 }), (120, 128)] {
                assert_eq!(forward(&sage, d, Architecture(arch)).rows, rows, "{d} {arch}");
            }
        }
    }

    /// What the kernels' headers come to: SHARED_BYTES of each Numerics.
    #[test]
    fn hoppers_plans_are_what_the_kernels_lay_out() {
        let [full, sage, general] = <[Scheme; 3]>::try_from(schemes()).expect("three");
        let plan = |scheme, d| forward(scheme, d, Architecture(90));
        let bytes =
            |scheme, d| (plan(scheme, d).shared_bytes, backward(scheme, d, Architecture(90)).shared_bytes);
        assert_eq!(bytes(&full, 64), (114_688, 168_960));
        assert_eq!(bytes(&full, 128), (163_840, 199_680));
        assert_eq!(bytes(&sage, 64), (90_304, 191_520));
        assert_eq!(bytes(&sage, 128), (131_216, 202_784));
        for d in [64, 128] {
            assert!(
                plan(&full, d).takes_tickets
                    && plan(&sage, d).takes_tickets
                    && !plan(&general, d).takes_tickets
            );
            assert!(!forward(&sage, d, Architecture(80)).takes_tickets);
        }
    }

    #[test]
    fn heads_share_a_part_of_the_cache() {
        assert_eq!(heads_at_once(50 << 20, 2, 1 << 20, 64), 25);
        assert_eq!(heads_at_once(50 << 20, 8, 1 << 20, 64), 6);
        assert_eq!(heads_at_once(50 << 20, 2, 1 << 30, 64), 1);
        assert_eq!(heads_at_once(50 << 20, 2, 1, 64), 64);
    }

    #[test]
    fn devices_get_the_code_of_their_major_version_or_ptx() {
        let of = |major, minor| Architecture::of(major, minor).map(|a| a.0);
        if ARCHITECTURES.len() == 6 {
            assert_eq!(of(8, 7), Ok(86));
            assert_eq!(of(9, 0), Ok(90));
            assert_eq!(of(10, 3), Ok(100));
            assert_eq!(of(12, 1), Ok(120));
        }
        assert_eq!(of(11, 0), Ok(PTX));
        assert_eq!(of(13, 0), Ok(PTX));
        assert!(of(7, 5).is_err());
    }
}
