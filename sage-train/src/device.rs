//! The device that a run computes on, its memory, and asynchronous transfers.

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

/// The kind of device that a model runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// The CPU, in f32
    Cpu,
    /// An NVIDIA GPU, in bf16 with f32 sums; a training run also keeps an f32 copy of its weights
    Cuda,
}

impl Default for DeviceKind {
    /// The GPU, if this build has kernels for one.
    fn default() -> Self {
        if cfg!(feature = "cuda") { Self::Cuda } else { Self::Cpu }
    }
}

impl std::fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        })
    }
}

impl DeviceKind {
    /// The element type of activations.
    pub fn dtype(self) -> DType {
        match self {
            Self::Cpu => DType::F32,
            Self::Cuda => DType::BF16,
        }
    }

    /// Checks that this build supports the device.
    ///
    /// # Errors
    /// When the device is a GPU and the build has no kernels for GPUs.
    pub fn check(self) -> Result<()> {
        if self == Self::Cuda && !cfg!(feature = "cuda") {
            return Err(Error::new("this build has no kernels for GPUs")
                .got("--device cuda")
                .allowed("--device cpu")
                .hint("build with `--features cuda`; it needs nvcc"));
        }
        Ok(())
    }

    /// Opens the device of process `local` of this machine: the GPU with that index, or the only GPU that the
    /// process may see. Memory that the program frees on a GPU stays in the driver's memory pool for the next step.
    ///
    /// # Errors
    /// When there is no such device.
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
                            .got(format!("{there} GPUs, and local rank {} (counted from 0)", local.index))
                            .allowed(format!("up to {there} ranks, one for each GPU"))
                            .hint(format!(
                                "--gpus {there}; CUDA_VISIBLE_DEVICES limits which GPUs may be used"
                            )));
                    }
                    _ => local.index,
                };
                let device = Device::new_cuda(number).map_err(during(failed())).map_err(|error| {
                    error.hint("check with nvidia-smi that a GPU and its driver are installed; --device cpu needs neither")
                })?;
                #[cfg(feature = "cuda")]
                memory::prepare(&device).map_err(during(failed()))?;
                Ok(device)
            }
        }
    }
}

/// Asynchronous readback of a training step's results. It also measures the step's time on the device.
#[derive(Debug)]
pub enum StepReadback {
    /// On the CPU the numbers are available immediately.
    Here {
        /// The numbers.
        numbers: Vec<f64>,
        /// When the step began.
        began: Instant,
        /// Seconds from the beginning to the mark.
        marked: f64,
        /// Seconds of the step.
        seconds: f64,
    },
    /// A GPU copies the numbers to page-locked memory. This memory is allocated once, because the allocation
    /// waits for all earlier work.
    #[cfg(feature = "cuda")]
    PageLocked(memory::ReadbackSlot),
}

impl StepReadback {
    /// Allocates the memory to read back `len` numbers.
    ///
    /// # Errors
    /// When memory is short.
    pub fn new(device: &Device, len: usize) -> candle_core::Result<Self> {
        match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => Ok(Self::PageLocked(memory::ReadbackSlot::new(device, len)?)),
            _ => Ok(Self::Here { numbers: vec![0.0; len], began: Instant::now(), marked: 0.0, seconds: 0.0 }),
        }
    }

    /// Starts the clock at this point of the device's work.
    ///
    /// # Errors
    /// When the device reports an error.
    pub fn begin(&mut self) -> candle_core::Result<()> {
        match self {
            Self::Here { began, .. } => *began = Instant::now(),
            #[cfg(feature = "cuda")]
            Self::PageLocked(letter) => letter.begin()?,
        }
        Ok(())
    }

    /// Records the time since [`Self::begin`] at this point of the device's work.
    ///
    /// # Errors
    /// When the device reports an error.
    pub fn mark(&mut self) -> candle_core::Result<()> {
        match self {
            Self::Here { began, marked, .. } => *marked = began.elapsed().as_secs_f64(),
            #[cfg(feature = "cuda")]
            Self::PageLocked(letter) => letter.mark()?,
        }
        Ok(())
    }

    /// Starts the readback of `tensor`, which is one-dimensional, in f64, and as long as the `len` of [`Self::new`].
    /// The clock that [`Self::begin`] started stops after the readback.
    ///
    /// # Errors
    /// When the tensor does not fit, or the device reports an error.
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

    /// Waits for the readback, but not for work that was launched after it. Returns the numbers, the seconds from
    /// [`Self::begin`] to [`Self::mark`], and the seconds from [`Self::begin`] to the end of the readback.
    ///
    /// # Errors
    /// When nothing was sent, or the device failed.
    pub fn open(&self) -> candle_core::Result<(Vec<f64>, [f64; 2])> {
        match self {
            Self::Here { numbers, marked, seconds, .. } => Ok((numbers.clone(), [*marked, *seconds])),
            #[cfg(feature = "cuda")]
            Self::PageLocked(letter) => letter.open(),
        }
    }
}

/// Memory of a GPU, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// In use now.
    pub used: u64,
    /// Peak use since [`reset_peak`].
    pub peak: u64,
}

/// The memory in use; `None` on the CPU.
///
/// # Errors
/// When the driver cannot report the memory.
pub fn memory(device: &Device) -> candle_core::Result<Option<Memory>> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => memory::of(device).map(Some),
        _ => Ok(None),
    }
}

/// Resets the peak of memory use.
///
/// # Errors
/// When the driver reports an error.
pub fn reset_peak(device: &Device) -> candle_core::Result<()> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => memory::reset_peak(device),
        _ => Ok(()),
    }
}

/// Page-locked memory for a step's results, and the device's memory pool, which serves every allocation on the device.
#[cfg(feature = "cuda")]
#[allow(unsafe_code)]
mod memory {
    use std::sync::Arc;

    use candle_core::cuda_backend::WrapErr;
    use candle_core::{CudaDevice, Device, Result, Storage, Tensor};
    use cudarc::driver::sys::{self, CUmemPool_attribute as Attribute};
    use cudarc::driver::{CudaEvent, CudaStream, PinnedHostSlice};

    /// Page-locked host memory, to which the GPU copies a step's results. Events measure the step's time, and show when
    /// the copy is complete.
    #[derive(Debug)]
    pub struct ReadbackSlot {
        stream: Arc<CudaStream>,
        host: PinnedHostSlice<f64>,
        began: CudaEvent,
        marked: Option<CudaEvent>,
        came: Option<CudaEvent>,
    }

    impl ReadbackSlot {
        pub(super) fn new(device: &CudaDevice, len: usize) -> Result<Self> {
            let stream = device.cuda_stream();
            // SAFETY: any bits are valid f64. `open` waits for the GPU's copy to this memory before reading it, and
            // `drop` waits for the copy before the memory is freed.
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
            let Some(came) = &self.came else { candle_core::bail!("no readback was started") };
            came.synchronize().w()?;
            let until =
                |event| Ok::<_, candle_core::Error>(f64::from(self.began.elapsed_ms(event).w()?) / 1e3);
            let marked = self.marked.as_ref().map_or(Ok(0.0), until)?;
            Ok((self.host.as_slice().w()?.to_vec(), [marked, until(came)?]))
        }
    }

    impl Drop for ReadbackSlot {
        /// A copy may still be in flight.
        fn drop(&mut self) {
            let _ = self.stream.synchronize();
        }
    }

    const TIMED: Option<sys::CUevent_flags> = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);

    fn pool(device: &CudaDevice) -> Result<sys::CUmemoryPool> {
        let mut pool = std::ptr::null_mut();
        let device = device.cuda_stream().context().cu_device();
        // SAFETY: the driver writes one handle to `pool`.
        unsafe { sys::cuDeviceGetDefaultMemPool(&mut pool, device).result().w()? };
        Ok(pool)
    }

    fn get(device: &CudaDevice, attribute: Attribute) -> Result<u64> {
        let mut value = 0u64;
        // SAFETY: each attribute that this file reads or sets is 64 bits wide, and `value` outlives the call.
        unsafe {
            sys::cuMemPoolGetAttribute(pool(device)?, attribute, (&raw mut value).cast()).result().w()?
        };
        Ok(value)
    }

    fn set(device: &CudaDevice, attribute: Attribute, mut value: u64) -> Result<()> {
        // SAFETY: as above.
        unsafe { sys::cuMemPoolSetAttribute(pool(device)?, attribute, (&raw mut value).cast()).result().w() }
    }

    pub(super) fn prepare(device: &Device) -> Result<()> {
        let device = device.as_cuda_device()?;
        // By default the pool returns its free memory to the driver at every synchronization, and then has to allocate
        // it again.
        set(device, Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX)?;
        // SAFETY: event tracking is needed only if cudarc has several streams. Here it has one, candle's.
        // ranks/nccl.rs makes another stream without cudarc, and synchronizes the two streams.
        unsafe { device.disable_event_tracking() };
        Ok(())
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
