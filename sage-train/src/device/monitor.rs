//! Power, clock and memory of the GPU, from the driver's library NVML.

use candle_core::Device;

/// The state of a GPU at one moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reading {
    /// Power, W.
    pub power: f64,
    /// Clock of the multiprocessors, MHz.
    pub clock: f64,
    /// Memory in use by all processes, GiB.
    pub memory: f64,
}

/// Reads the state of one GPU.
#[derive(Debug)]
pub struct Monitor {
    #[cfg(feature = "cuda")]
    nvml: Option<(nvml_wrapper::Nvml, String)>,
}

impl Monitor {
    /// A monitor of the device. A CPU, and a machine without NVML, have no readings.
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

    /// The state of the GPU now.
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

/// The UUID identifies a GPU for both NVML and CUDA, whose indices differ under `CUDA_VISIBLE_DEVICES`.
#[cfg(feature = "cuda")]
fn uuid(device: &Device) -> Option<String> {
    let Device::Cuda(device) = device else { return None };
    let bytes = device.cuda_stream().context().uuid().ok()?.bytes.map(|byte| byte as u8);
    let hex: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let part = |range: std::ops::Range<usize>| hex[range].concat();
    Some(format!("GPU-{}-{}-{}-{}-{}", part(0..4), part(4..6), part(6..8), part(8..10), part(10..16)))
}
