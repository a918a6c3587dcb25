//! Power, clock and memory of the GPU, as its driver's library (NVML) gives them.

use candle_core::Device;

/// What a GPU draws and does at one moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reading {
    /// Watts.
    pub power: f64,
    /// Clock of the multiprocessors, MHz.
    pub clock: f64,
    /// Memory in use, by everybody, GiB.
    pub memory: f64,
}

/// Reads one GPU; nothing where there is no NVML.
#[derive(Debug)]
pub struct Monitor {
    #[cfg(feature = "cuda")]
    nvml: Option<(nvml_wrapper::Nvml, String)>,
}

impl Monitor {
    /// For a device. A CPU, and a machine without NVML, have no readings.
    pub fn new(device: &Device) -> Self {
        #[cfg(feature = "cuda")]
        {
            Self { nvml: uuid(device).and_then(|uuid| Some((nvml_wrapper::Nvml::init().ok()?, uuid))) }
        }
        #[cfg(not(feature = "cuda"))]
        {
            let _ = device;
            Self {}
        }
    }

    /// What the GPU does now.
    pub fn read(&self) -> Option<Reading> {
        #[cfg(feature = "cuda")]
        {
            let (nvml, uuid) = self.nvml.as_ref()?;
            let device = nvml.device_by_uuid(uuid.as_str()).ok()?;
            Some(Reading {
                power: f64::from(device.power_usage().ok()?) / 1e3,
                clock: f64::from(device.clock_info(nvml_wrapper::enum_wrappers::device::Clock::SM).ok()?),
                memory: crate::quantity::gib(device.memory_info().ok()?.used),
            })
        }
        #[cfg(not(feature = "cuda"))]
        None
    }
}

/// By this NVML and CUDA mean the same GPU, whatever `CUDA_VISIBLE_DEVICES` makes of their numbers.
#[cfg(feature = "cuda")]
fn uuid(device: &Device) -> Option<String> {
    let Device::Cuda(device) = device else { return None };
    let bytes = device.cuda_stream().context().uuid().ok()?.bytes.map(|byte| byte as u8);
    let hex: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let part = |range: std::ops::Range<usize>| hex[range].concat();
    Some(format!("GPU-{}-{}-{}-{}-{}", part(0..4), part(4..6), part(6..8), part(8..10), part(10..16)))
}
