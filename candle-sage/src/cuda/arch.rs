//! The architectures that this build has kernels for, and their differences.

use super::compiled::{ARCHITECTURES, PTX};
use super::plan::Target;
use crate::error::{Error, Result};

/// The kernels that a device runs: machine code of its major version, for the highest architecture that is
/// not above the device's, or else PTX.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Architecture(u32);

impl Architecture {
    /// The kernels for a device of this compute capability.
    ///
    /// # Errors
    /// When the build has neither machine code nor PTX that the device can run.
    pub(super) fn of(major: u32, minor: u32) -> Result<Self> {
        let device = major * 10 + minor;
        let native = ARCHITECTURES.iter().filter(|&&arch| arch / 10 == major && arch <= device).max();
        match native {
            Some(&arch) => Ok(Self(arch)),
            None if device >= PTX => Ok(Self(PTX)),
            None => Err(Error::unsupported("the GPU is too old, or this build has no kernels for it")
                .got(format!("compute capability {major}.{minor}"))
                .allowed(format!("machine code for {ARCHITECTURES:?}, PTX for {PTX} and later"))
                .hint(
                    "Ampere (8.0) is the oldest; build without CANDLE_SAGE_CUDA_ARCHS for all architectures",
                )),
        }
    }

    /// Whether it has FP4 products: data-centre Blackwell, family 10, and consumer Blackwell, family 12.
    pub(super) fn has_nvfp4(self) -> bool {
        matches!(self.0, 100 | 120)
    }

    /// The target whose plans its kernels have.
    pub(super) fn target(self) -> Target {
        match self.0 {
            80 => Target::Sm80,
            90 => Target::Sm90,
            100 => Target::Sm100,
            _ => Target::Sm86,
        }
    }

    /// One of [`ARCHITECTURES`], by its number.
    #[cfg(test)]
    pub(super) fn from_number(number: u32) -> Self {
        Self(number)
    }
}

impl std::fmt::Display for Architecture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "sm_{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
