//! The architectures for which this build has kernels.

use super::compiled::{ARCHITECTURES, NVFP4_FAMILIES, PTX};
use crate::error::{Error, Result};

/// The kernels that a device runs: those of the highest compiled architecture with the device's major version and at
/// most its minor version. Without such an architecture: PTX, which the driver compiles for the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Architecture {
    /// The compute capability that the kernels are compiled for, as 10 * major + minor.
    code: u32,
    /// The device's compute capability, also as 10 * major + minor.
    device: u32,
}

impl Architecture {
    /// The kernels for a device of this compute capability.
    ///
    /// # Errors
    /// When the build has neither machine code nor PTX that the device can run.
    pub(super) fn of(major: u32, minor: u32) -> Result<Self> {
        let device = major * 10 + minor;
        match code_for(device, ARCHITECTURES) {
            Some(code) => Ok(Self { code, device }),
            None => Err(Error::unsupported("the GPU is too old, or this build has no kernels for it")
                .got(format!("compute capability {major}.{minor}"))
                .allowed(format!("GPUs with machine code, {ARCHITECTURES:?} (80 is 8.0), or with PTX, {PTX} and later"))
                .hint(
                    "the oldest supported GPU is Ampere (8.0); unset CANDLE_SAGE_CUDA_ARCHS to build for all architectures",
                )),
        }
    }

    /// Whether the device has FP4 matmuls and this build has kernels for them. Family 10 (data-center Blackwell) and
    /// family 12 (consumer Blackwell) have FP4 matmuls. If nvcc is older than 12.9, the build has FP4 kernels only for
    /// devices 10.0 and 12.0.
    pub(super) fn has_nvfp4(self) -> bool {
        match self.code {
            100 => self.device == 100 || NVFP4_FAMILIES && self.device == 103,
            120 => self.device == 120 || NVFP4_FAMILIES,
            _ => false,
        }
    }

    pub(super) fn number(self) -> u32 {
        self.code
    }

    /// The architecture with a number of [`ARCHITECTURES`].
    #[cfg(test)]
    pub(super) fn from_number(number: u32) -> Self {
        Self { code: number, device: number }
    }
}

/// The highest of the architectures `built` that have the device's major version and are not above `device`.
/// Without such an architecture: PTX, or `None` for a device that is too old for PTX.
fn code_for(device: u32, built: &[u32]) -> Option<u32> {
    let native = built.iter().copied().filter(|arch| arch / 10 == device / 10 && *arch <= device).max();
    native.or((device >= PTX).then_some(PTX))
}

impl std::fmt::Display for Architecture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "sm_{}", self.code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::compiled::NVFP4;
    use crate::cuda::plan::TARGETS;

    #[test]
    fn devices_get_the_code_of_their_major_version_or_ptx() {
        let all: Vec<u32> =
            TARGETS.iter().flat_map(|(_, _, architectures)| *architectures).copied().collect();
        for (device, code) in [(87, 86), (90, 90), (103, 100), (121, 120), (110, PTX), (130, PTX)] {
            assert_eq!(code_for(device, &all), Some(code), "{device}");
        }
        assert_eq!((code_for(90, &[80]), code_for(86, &[90]), code_for(75, &all)), (Some(PTX), None, None));
        for &arch in ARCHITECTURES {
            assert_eq!(Architecture::of(arch / 10, arch % 10), Ok(Architecture::from_number(arch)));
        }
        assert!(Architecture::of(7, 5).is_err());
        assert!(all.contains(&PTX));
    }

    /// nvcc 12.9 and later (`NVFP4_FAMILIES`) support all architectures of `TARGETS`. If a later nvcc drops one, this
    /// test fails.
    #[test]
    fn every_architecture_of_the_table_is_built() {
        if option_env!("CANDLE_SAGE_CUDA_ARCHS").is_none() && NVFP4_FAMILIES {
            let mut all: Vec<u32> = TARGETS.iter().flat_map(|(_, _, all)| *all).copied().collect();
            all.sort_unstable();
            assert_eq!(ARCHITECTURES, all);
        }
    }

    #[test]
    fn fp4_products_are_those_of_the_families_that_code_was_made_for() {
        let has = |code, device| Architecture { code, device }.has_nvfp4();
        for number in TARGETS.iter().flat_map(|(_, _, architectures)| *architectures) {
            // Hopper only emulates FP4 matmuls, for tests.
            assert_eq!(has(*number, *number), NVFP4.1.contains(number) && *number != 90, "{number}");
        }
        assert!(has(100, 100) && has(120, 120) && !has(90, 90) && !has(100, 101) && !has(PTX, 110));
        assert_eq!((has(100, 103), has(120, 121)), (NVFP4_FAMILIES, NVFP4_FAMILIES));
    }
}
