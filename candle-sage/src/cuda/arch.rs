//! The architectures that this build has kernels for, and their differences.

use super::compiled::{ARCHITECTURES, NVFP4_FAMILIES, PTX};
use super::plan::Target;
use crate::error::{Error, Result};

/// The kernels that a device runs: machine code of its major version, for the highest architecture that is
/// not above the device's, or else PTX.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Architecture {
    /// The number of the kernels' own architecture.
    code: u32,
    /// The device's compute capability, as such a number.
    device: u32,
}

impl Architecture {
    /// The kernels for a device of this compute capability.
    ///
    /// # Errors
    /// When the build has neither machine code nor PTX that the device can run.
    pub(super) fn of(major: u32, minor: u32) -> Result<Self> {
        let device = major * 10 + minor;
        let native = ARCHITECTURES.iter().filter(|&&arch| arch / 10 == major && arch <= device).max();
        match native {
            Some(&code) => Ok(Self { code, device }),
            None if device >= PTX => Ok(Self { code: PTX, device }),
            None => Err(Error::unsupported("the GPU is too old, or this build has no kernels for it")
                .got(format!("compute capability {major}.{minor}"))
                .allowed(format!("machine code for {ARCHITECTURES:?}, PTX for {PTX} and later"))
                .hint(
                    "Ampere (8.0) is the oldest; build without CANDLE_SAGE_CUDA_ARCHS for all architectures",
                )),
        }
    }

    /// Whether it has FP4 products: data-centre Blackwell, family 10, and consumer Blackwell, family 12. A
    /// compiler that knows no families has made code for their first members alone.
    pub(super) fn has_nvfp4(self) -> bool {
        match self.code {
            100 => self.device == 100 || NVFP4_FAMILIES && self.device == 103,
            120 => self.device == 120 || NVFP4_FAMILIES,
            _ => false,
        }
    }

    /// The target whose plans its kernels have.
    pub(super) fn target(self) -> Target {
        match self.code {
            80 => Target::Sm80,
            90 => Target::Sm90,
            100 => Target::Sm100,
            _ => Target::Sm86,
        }
    }

    /// One of [`ARCHITECTURES`], by its number.
    #[cfg(test)]
    pub(super) fn from_number(number: u32) -> Self {
        Self { code: number, device: number }
    }
}

impl std::fmt::Display for Architecture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "sm_{}", self.code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_get_the_code_of_their_major_version_or_ptx() {
        let of = |major, minor| Architecture::of(major, minor).map(|a| a.code);
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

    #[test]
    fn fp4_products_are_those_of_the_families_that_code_was_made_for() {
        let has = |code, device| Architecture { code, device }.has_nvfp4();
        assert!(has(100, 100) && has(120, 120) && !has(90, 90) && !has(100, 101) && !has(PTX, 110));
        assert_eq!((has(100, 103), has(120, 121)), (NVFP4_FAMILIES, NVFP4_FAMILIES));
    }
}
