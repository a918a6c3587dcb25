//! Time and memory of calls on a device: CUDA events where there are, else the wall clock.

#[cfg(feature = "cuda")]
use std::sync::Arc;
use std::time::Instant;

use candle_core::{Device, Result};

/// Calls before the clock starts: modules are loaded, memory pools grow.
const WARM_UP: usize = 3;

pub(super) enum Clock {
    Wall,
    #[cfg(feature = "cuda")]
    Events(Arc<cudarc::driver::CudaStream>),
}

impl Clock {
    pub(super) fn new(device: &Device) -> Result<Self> {
        match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => Ok(Self::Events(device.cuda_stream())),
            _ => Ok(Self::Wall),
        }
    }

    /// The median of `repeats` calls, in milliseconds; `call` gets the number of the call.
    pub(super) fn median(&self, repeats: usize, call: impl Fn(usize) -> Result<()>) -> Result<f64> {
        for n in 0..WARM_UP {
            call(n)?;
        }
        let mut times = match self {
            Self::Wall => (0..repeats)
                .map(|n| {
                    let start = Instant::now();
                    call(n)?;
                    Ok(start.elapsed().as_secs_f64() * 1e3)
                })
                .collect::<Result<Vec<f64>>>()?,
            #[cfg(feature = "cuda")]
            Self::Events(stream) => on_events(stream, repeats, call)?,
        };
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }

    /// The most memory in use at once during a call, beyond what was in use before.
    pub(super) fn peak_bytes(&self, call: impl FnOnce() -> Result<()>) -> Result<Option<usize>> {
        match self {
            Self::Wall => {
                drop(call);
                Ok(None)
            }
            #[cfg(feature = "cuda")]
            Self::Events(stream) => pool::peak(stream, call),
        }
    }
}

/// Calls follow each other without a wait, as in training: between two events lies the time of the device.
#[cfg(feature = "cuda")]
fn on_events(
    stream: &Arc<cudarc::driver::CudaStream>,
    repeats: usize,
    call: impl Fn(usize) -> Result<()>,
) -> Result<Vec<f64>> {
    use candle_core::cuda_backend::WrapErr;
    let event = || stream.record_event(Some(cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT)).w();
    let mut pairs = Vec::with_capacity(repeats);
    for n in 0..repeats {
        let start = event()?;
        call(n)?;
        pairs.push((start, event()?));
    }
    stream.synchronize().w()?;
    pairs.iter().map(|(start, end)| Ok(f64::from(start.elapsed_ms(end).w()?))).collect()
}

/// The device's memory pool, which every allocation comes from, keeps its own high-water mark.
#[cfg(feature = "cuda")]
#[allow(unsafe_code)]
mod pool {
    use candle_core::Result;
    use candle_core::cuda_backend::WrapErr;
    use cudarc::driver::{CudaStream, sys};

    const USED: sys::CUmemPool_attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT;
    const HIGH: sys::CUmemPool_attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH;

    pub(super) fn peak(stream: &CudaStream, call: impl FnOnce() -> Result<()>) -> Result<Option<usize>> {
        let mut pool = std::ptr::null_mut();
        // SAFETY: plain queries of the driver; `pool` and the values outlive the calls.
        unsafe {
            sys::cuDeviceGetDefaultMemPool(&mut pool, stream.context().cu_device()).result().w()?;
            stream.synchronize().w()?;
            let mut zero = 0u64;
            sys::cuMemPoolSetAttribute(pool, HIGH, (&raw mut zero).cast()).result().w()?;
            let get = |attribute| {
                let mut value = 0u64;
                sys::cuMemPoolGetAttribute(pool, attribute, (&raw mut value).cast()).result().w()?;
                candle_core::Result::Ok(value as usize)
            };
            let before = get(USED)?;
            call()?;
            stream.synchronize().w()?;
            Ok(Some(get(HIGH)?.saturating_sub(before)))
        }
    }
}
