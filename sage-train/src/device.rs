//! Where a run computes, and how much memory that has.

use candle_core::{DType, Device};
use candle_sage::{Error, Result};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::during;

/// Where something runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// The CPU, in f32
    Cpu,
    /// The first NVIDIA GPU, in bf16 with f32 sums and weights
    Cuda,
}

impl Default for Place {
    /// The GPU, if this build has kernels for one.
    fn default() -> Self {
        if cfg!(feature = "cuda") { Self::Cuda } else { Self::Cpu }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        })
    }
}

impl Place {
    /// What activations are computed in.
    pub fn dtype(self) -> DType {
        match self {
            Self::Cpu => DType::F32,
            Self::Cuda => DType::BF16,
        }
    }

    /// Checks that this build can go there.
    ///
    /// # Errors
    /// When it has no kernels for GPUs.
    pub fn check(self) -> Result<()> {
        if self == Self::Cuda && !cfg!(feature = "cuda") {
            return Err(Error::new("this build has no kernels for GPUs")
                .got("--device cuda")
                .allowed("--device cpu")
                .hint("build with `--features cuda`; it needs nvcc"));
        }
        Ok(())
    }

    /// The device. Memory that a GPU frees is kept for the next step.
    ///
    /// # Errors
    /// When there is none.
    pub fn open(self) -> Result<Device> {
        self.check()?;
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Cuda => {
                let device =
                    Device::new_cuda(0).map_err(during("cannot use the first GPU")).map_err(|error| {
                        error.hint("is there one, and its driver? --device cpu needs neither")
                    })?;
                #[cfg(feature = "cuda")]
                memory::keep_what_is_freed(&device).map_err(during("cannot use the first GPU"))?;
                Ok(device)
            }
        }
    }
}

/// Bytes of a GPU's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// In use now.
    pub used: u64,
    /// Most in use at once since [`reset_peak`].
    pub peak: u64,
}

/// What is in use; `None` on the CPU.
///
/// # Errors
/// When the driver does not say.
pub fn memory(device: &Device) -> candle_core::Result<Option<Memory>> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => memory::of(device).map(Some),
        _ => Ok(None),
    }
}

/// Begins a new peak.
///
/// # Errors
/// When the driver does not take it.
pub fn reset_peak(device: &Device) -> candle_core::Result<()> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => memory::reset_peak(device),
        _ => Ok(()),
    }
}

/// The device's memory pool, which every allocation comes from, keeps the books.
#[cfg(feature = "cuda")]
#[allow(unsafe_code)]
mod memory {
    use candle_core::cuda_backend::WrapErr;
    use candle_core::{CudaDevice, Device, Result};
    use cudarc::driver::sys::{self, CUmemPool_attribute as Attribute};

    fn pool(device: &CudaDevice) -> Result<sys::CUmemoryPool> {
        let mut pool = std::ptr::null_mut();
        let device = device.cuda_stream().context().cu_device();
        // SAFETY: a query of the driver that fills in `pool`.
        unsafe { sys::cuDeviceGetDefaultMemPool(&mut pool, device).result().w()? };
        Ok(pool)
    }

    fn get(device: &CudaDevice, attribute: Attribute) -> Result<u64> {
        let mut value = 0u64;
        // SAFETY: these attributes are 64 bits, and `value` outlives the call.
        unsafe {
            sys::cuMemPoolGetAttribute(pool(device)?, attribute, (&raw mut value).cast()).result().w()?
        };
        Ok(value)
    }

    fn set(device: &CudaDevice, attribute: Attribute, mut value: u64) -> Result<()> {
        // SAFETY: as above.
        unsafe { sys::cuMemPoolSetAttribute(pool(device)?, attribute, (&raw mut value).cast()).result().w() }
    }

    /// Without this the pool gives everything back whenever the host waits, and has to ask for it again.
    pub(super) fn keep_what_is_freed(device: &Device) -> Result<()> {
        set(device.as_cuda_device()?, Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX)
    }

    pub(super) fn of(device: &CudaDevice) -> Result<super::Memory> {
        Ok(super::Memory {
            used: get(device, Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
            peak: get(device, Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?,
        })
    }

    pub(super) fn reset_peak(device: &CudaDevice) -> Result<()> {
        set(device, Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0)
    }
}
