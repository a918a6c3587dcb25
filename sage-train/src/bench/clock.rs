//! Time and memory of calls on a device: CUDA events on a GPU, otherwise the wall clock.

#[cfg(feature = "cuda")]
use std::sync::Arc;
use std::time::Instant;

use candle_core::{Device, Result};

use crate::device::{memory, reset_peak};

/// Number of calls before the timed ones, which load modules and grow memory pools.
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

    /// The median time of `repeats` calls, in milliseconds. `call` receives the index of the call.
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
}

/// Peak memory during a call, in bytes, beyond the memory in use before. Not known on the CPU.
pub(super) fn peak_bytes(device: &Device, call: impl FnOnce() -> Result<()>) -> Result<Option<u64>> {
    device.synchronize()?;
    reset_peak(device)?;
    let before = memory(device)?;
    call()?;
    device.synchronize()?;
    Ok(memory(device)?.zip(before).map(|(after, before)| after.peak.saturating_sub(before.used)))
}

/// Launches the calls without waiting between them, as in training; the time between two events is device
/// time.
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
