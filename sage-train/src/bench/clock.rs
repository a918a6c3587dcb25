//! Measures the time and the peak memory of calls on a device. CUDA events measure the time on a GPU; the wall clock
//! measures it on a CPU.

#[cfg(feature = "cuda")]
use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::{Device, Result};

use crate::device::{memory, reset_peak};

/// Number of untimed calls at the start: they load modules and grow memory pools.
const WARM_UP: usize = 3;

pub(super) struct Clock {
    source: Source,
    device: Device,
    rest: Duration,
}

enum Source {
    Wall,
    #[cfg(feature = "cuda")]
    Events(Arc<cudarc::driver::CudaStream>),
}

impl Clock {
    /// A clock that pauses for `rest` before each series of timed calls.
    pub(super) fn new(device: &Device, rest: Duration) -> Result<Self> {
        let source = match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => Source::Events(device.cuda_stream()),
            _ => Source::Wall,
        };
        Ok(Self { source, device: device.clone(), rest })
    }

    /// The median time of `repeats` calls, in milliseconds. `call` receives the index of the call.
    pub(super) fn median(&self, repeats: usize, call: impl Fn(usize) -> Result<()>) -> Result<f64> {
        for n in 0..WARM_UP {
            call(n)?;
        }
        self.device.synchronize()?;
        std::thread::sleep(self.rest);
        let mut times = match &self.source {
            Source::Wall => (0..repeats)
                .map(|n| {
                    let start = Instant::now();
                    call(n)?;
                    Ok(start.elapsed().as_secs_f64() * 1e3)
                })
                .collect::<Result<Vec<f64>>>()?,
            #[cfg(feature = "cuda")]
            Source::Events(stream) => on_events(stream, repeats, call)?,
        };
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }
}

/// Peak memory during a call, in bytes, beyond the memory in use before the call. Not known on the CPU.
pub(super) fn peak_bytes(device: &Device, call: impl FnOnce() -> Result<()>) -> Result<Option<u64>> {
    device.synchronize()?;
    reset_peak(device)?;
    let before = memory(device)?;
    call()?;
    device.synchronize()?;
    Ok(memory(device)?.zip(before).map(|(after, before)| after.peak.saturating_sub(before.used)))
}

/// The device time of each call, between an event before the call and an event after it. The CPU does not wait between
/// calls.
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
