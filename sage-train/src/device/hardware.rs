//! A device's name, and the machine's free memory and GPUs.

use candle_core::Device;

/// The name of a device, for messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hardware(String);

impl Hardware {
    /// The name of `device`.
    pub fn of(device: &Device) -> Self {
        Self(match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                device.cuda_stream().context().name().unwrap_or_else(|_| "an NVIDIA GPU".into())
            }
            _ => cpu(),
        })
    }

    /// The version of a GPU's driver, on systems that report it.
    pub fn driver(device: &Device) -> Option<String> {
        let text =
            device.is_cuda().then(|| std::fs::read_to_string("/proc/driver/nvidia/version").ok())??;
        text.split_whitespace().find(|word| word.starts_with(|c: char| c.is_ascii_digit())).map(Into::into)
    }
}

impl std::fmt::Display for Hardware {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// The number of cores, and the processor's name on systems with `/proc/cpuinfo`.
fn cpu() -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let model = model.map_or("CPU", |(_, name)| name.trim());
    format!("{cores} cores of {model}")
}

/// Free memory of the machine in bytes, including free swap. In a container with a memory limit, at most the unused
/// bytes of the limit. `None` if the system does not report it.
pub fn free_memory() -> Option<u64> {
    let mut system = sysinfo::System::new();
    system.refresh_memory();
    let total = system.total_memory();
    if total == 0 {
        return None;
    }
    let free = system.available_memory() + system.free_swap();
    // In a container only the memory of programs counts as used, because the page cache is released on demand. Swap is
    // not added to the limit, because the container's share of the swap is unknown.
    let limits = system.cgroup_limits().filter(|limits| limits.total_memory < total);
    Some(limits.map_or(free, |limits| free.min(limits.total_memory.saturating_sub(limits.rss))))
}

/// The GPUs that a child process may be given, in the notation of `CUDA_VISIBLE_DEVICES`: the GPUs in this variable, or
/// all GPUs if the variable is not set.
pub fn gpus() -> Vec<String> {
    if let Ok(visible) = std::env::var("CUDA_VISIBLE_DEVICES") {
        return visible
            .split(',')
            .map(|name| name.trim().to_owned())
            .filter(|name| !name.is_empty())
            .collect();
    }
    #[cfg(feature = "cuda")]
    {
        let count = cudarc::driver::CudaContext::device_count().unwrap_or(0);
        (0..count).map(|n| n.to_string()).collect()
    }
    #[cfg(not(feature = "cuda"))]
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_memory_is_some_of_all() {
        let free = free_memory().expect("a system that says it");
        assert!(free > 64 << 20 && free < 1 << 46, "{free}");
    }
}
