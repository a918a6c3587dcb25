//! Where a run computes, and how much memory that has.

mod hardware;
mod monitor;
mod upload;

pub use hardware::{Hardware, free_memory, gpus};
pub use monitor::{Monitor, Reading};
pub use upload::Upload;

use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use candle_sage::{Error, Result};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::during;
use crate::ranks::Rank;

/// Where something runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// The CPU, in f32
    Cpu,
    /// An NVIDIA GPU, in bf16 with f32 sums and weights
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

    /// The device of a process that is `local` among those of this machine: its GPU has that number, unless it is the only
    /// one that the process may see. Memory that a GPU frees is kept for the next step.
    ///
    /// # Errors
    /// When there is none.
    pub fn open(self, local: Rank) -> Result<Device> {
        self.check()?;
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Cuda => {
                let failed = || format!("cannot use GPU {}", local.index);
                let number = match gpus().len() {
                    1 => 0,
                    there @ 2.. if local.index >= there => {
                        return Err(Error::new("this machine has fewer GPUs than ranks")
                            .got(format!("{there} GPUs, and local rank {}", local.index))
                            .allowed(format!("up to {there} ranks, one for each"))
                            .hint(format!("--gpus {there}; CUDA_VISIBLE_DEVICES says which may be used")));
                    }
                    _ => local.index,
                };
                let device = Device::new_cuda(number).map_err(during(failed())).map_err(|error| {
                    error.hint("is there one, and its driver? --device cpu needs neither")
                })?;
                #[cfg(feature = "cuda")]
                memory::keep_what_is_freed(&device).map_err(during(failed()))?;
                Ok(device)
            }
        }
    }
}

/// Where the numbers of a piece of work come to while the device works on, and how long it took there.
#[derive(Debug)]
pub enum Mailbox {
    /// On the CPU they are there at once.
    Here {
        /// The numbers.
        numbers: Vec<f64>,
        /// When the work began.
        began: Instant,
        /// How long it took to where it was marked.
        marked: f64,
        /// How long it took.
        seconds: f64,
    },
    /// A GPU writes them to page-locked memory. (To allocate that is to wait for everything: it is done once.)
    #[cfg(feature = "cuda")]
    PageLocked(memory::Letter),
}

impl Mailbox {
    /// For so many numbers.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(device: &Device, len: usize) -> candle_core::Result<Self> {
        match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => Ok(Self::PageLocked(memory::Letter::new(device, len)?)),
            _ => Ok(Self::Here { numbers: vec![0.0; len], began: Instant::now(), marked: 0.0, seconds: 0.0 }),
        }
    }

    /// Starts the clock, where the device is by then.
    ///
    /// # Errors
    /// When the device does not take it.
    pub fn begin(&mut self) -> candle_core::Result<()> {
        match self {
            Self::Here { began, .. } => *began = Instant::now(),
            #[cfg(feature = "cuda")]
            Self::PageLocked(letter) => letter.begin()?,
        }
        Ok(())
    }

    /// Marks a moment of the work: where the device is by then.
    ///
    /// # Errors
    /// When the device does not take it.
    pub fn mark(&mut self) -> candle_core::Result<()> {
        match self {
            Self::Here { began, marked, .. } => *marked = began.elapsed().as_secs_f64(),
            #[cfg(feature = "cuda")]
            Self::PageLocked(letter) => letter.mark()?,
        }
        Ok(())
    }

    /// Sends for an f64 tensor of one dimension, as long as the box, and stops the clock when it has come.
    ///
    /// # Errors
    /// When it is something else.
    pub fn send(&mut self, tensor: &Tensor) -> candle_core::Result<()> {
        match self {
            Self::Here { numbers, began, seconds, .. } => {
                *numbers = tensor.to_vec1()?;
                *seconds = began.elapsed().as_secs_f64();
            }
            #[cfg(feature = "cuda")]
            Self::PageLocked(letter) => letter.send(&tensor.contiguous()?)?,
        }
        Ok(())
    }

    /// Waits for what was sent for, and for nothing that was launched later: the numbers, and the seconds to the mark and to
    /// the end.
    ///
    /// # Errors
    /// When something went wrong on the way.
    pub fn open(&self) -> candle_core::Result<(Vec<f64>, [f64; 2])> {
        match self {
            Self::Here { numbers, marked, seconds, .. } => Ok((numbers.clone(), [*marked, *seconds])),
            #[cfg(feature = "cuda")]
            Self::PageLocked(letter) => letter.open(),
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
    use std::sync::Arc;

    use candle_core::cuda_backend::WrapErr;
    use candle_core::{CudaDevice, Device, Result, Storage, Tensor};
    use cudarc::driver::sys::{self, CUmemPool_attribute as Attribute};
    use cudarc::driver::{CudaEvent, CudaStream, PinnedHostSlice};

    /// Numbers in page-locked memory, and events on both sides of the work that they come from. (cudarc's own event is
    /// not recorded while a context has one stream.)
    #[derive(Debug)]
    pub struct Letter {
        stream: Arc<CudaStream>,
        host: PinnedHostSlice<f64>,
        began: CudaEvent,
        marked: Option<CudaEvent>,
        came: Option<CudaEvent>,
    }

    impl Letter {
        pub(super) fn new(device: &CudaDevice, len: usize) -> Result<Self> {
            let stream = device.cuda_stream();
            // SAFETY: any bits are an f64; `open` waits for the copy into them, and `drop` before they go.
            let host = unsafe { stream.context().alloc_pinned_with_flags(len, 0) }.w()?;
            let began = stream.record_event(TIMED).w()?;
            Ok(Self { stream, host, began, marked: None, came: None })
        }

        pub(super) fn mark(&mut self) -> Result<()> {
            self.marked = Some(self.stream.record_event(TIMED).w()?);
            Ok(())
        }

        pub(super) fn begin(&mut self) -> Result<()> {
            (self.marked, self.came) = (None, None);
            self.began = self.stream.record_event(TIMED).w()?;
            Ok(())
        }

        pub(super) fn send(&mut self, numbers: &Tensor) -> Result<()> {
            let (storage, layout) = numbers.storage_and_layout();
            let Storage::Cuda(storage) = &*storage else { candle_core::bail!("numbers of another device") };
            let at = layout.start_offset();
            let from = storage.as_cuda_slice::<f64>()?.slice(at..at + numbers.elem_count());
            self.stream.memcpy_dtoh(&from, &mut self.host).w()?;
            self.came = Some(self.stream.record_event(TIMED).w()?);
            Ok(())
        }

        pub(super) fn open(&self) -> Result<(Vec<f64>, [f64; 2])> {
            let Some(came) = &self.came else { candle_core::bail!("nothing was sent for") };
            came.synchronize().w()?;
            let until =
                |event| Ok::<_, candle_core::Error>(f64::from(self.began.elapsed_ms(event).w()?) / 1e3);
            let marked = self.marked.as_ref().map_or(Ok(0.0), until)?;
            Ok((self.host.as_slice().w()?.to_vec(), [marked, until(came)?]))
        }
    }

    impl Drop for Letter {
        /// A copy may be under way.
        fn drop(&mut self) {
            let _ = self.stream.synchronize();
        }
    }

    const TIMED: Option<sys::CUevent_flags> = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);

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
