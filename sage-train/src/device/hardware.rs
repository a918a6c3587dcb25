//! What computes, by its name.

use candle_core::Device;

/// A device, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hardware(String);

impl Hardware {
    /// Of a device.
    pub fn of(device: &Device) -> Self {
        Self(match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                device.cuda_stream().context().name().unwrap_or_else(|_| "an NVIDIA GPU".into())
            }
            _ => cpu(),
        })
    }
}

impl std::fmt::Display for Hardware {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// The number of cores, and whose they are where the system says it in a file.
fn cpu() -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let model = model.map_or("CPU", |(_, name)| name.trim());
    format!("{cores} cores of {model}")
}

/// Bytes of the machine's memory that are free, swap among them, or what a container leaves of them; none where the system does
/// not say it.
pub fn free_memory() -> Option<u64> {
    let mut system = sysinfo::System::new();
    system.refresh_memory();
    let total = system.total_memory();
    if total == 0 {
        return None;
    }
    let free = system.available_memory() + system.free_swap();
    // A container's pages of files are given back when memory is wanted: only what programs hold counts. Its swap is not known
    // for sure, and not counted.
    let limits = system.cgroup_limits().filter(|limits| limits.total_memory < total);
    Some(limits.map_or(free, |limits| free.min(limits.total_memory.saturating_sub(limits.rss))))
}

/// The GPUs that a child may be told to use, as `CUDA_VISIBLE_DEVICES` names them: those that it names now, or all that
/// there are.
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
