//! The compiled kernels: loading them, once per device, and launching them.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use candle_core::Result;
use cudarc::driver::sys::{CUdevice_attribute, CUfunction_attribute};
use cudarc::driver::{
    CudaContext, CudaFunction, CudaModule, CudaStream, DeviceRepr, LaunchConfig, PushKernelArg,
};
use cudarc::nvrtc::Ptx;

use super::arch::Architecture;
use super::compiled::FAMILIES;
use super::driver::DriverResult;
use super::memory::Memory;

/// A device with a stream, ready for launches.
#[derive(Debug, Clone)]
pub(crate) struct Gpu {
    /// candle's device, if the stream is candle's.
    #[cfg(feature = "cuda")]
    pub(super) device: Option<candle_core::CudaDevice>,
    pub(super) stream: Arc<CudaStream>,
    pub(super) memory: Memory,
    /// If true, nothing is launched or written: only the memory that an operation needs is counted.
    pub(super) dry: bool,
    known: Arc<DeviceProperties>,
}

/// Properties of a device, which are read from the driver once per context. Reading them at each launch would slow down
/// small models, whose launches take only a few microseconds.
#[derive(Debug)]
pub(crate) struct DeviceProperties {
    pub(super) architecture: Architecture,
    /// Size of the L2 cache.
    pub(super) cache_bytes: usize,
    pub(super) multiprocessors: usize,
    modules: Mutex<HashMap<&'static str, Arc<CudaModule>>>,
    functions: RwLock<HashMap<String, CudaFunction>>,
}

impl std::ops::Deref for Gpu {
    type Target = DeviceProperties;

    fn deref(&self) -> &DeviceProperties {
        &self.known
    }
}

/// The size of a launch: thread blocks, threads per block, and bytes of dynamic shared memory per block.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grid {
    pub(super) blocks: (u32, u32, u32),
    pub(super) threads: (u32, u32, u32),
    pub(super) shared_bytes: usize,
}

impl Grid {
    /// Thread blocks and threads in one dimension, without dynamic shared memory.
    pub(super) fn line(blocks: usize, threads: usize) -> Self {
        Self { blocks: (blocks as u32, 1, 1), threads: (threads as u32, 1, 1), shared_bytes: 0 }
    }
}

impl DeviceProperties {
    fn new(context: &Arc<CudaContext>) -> Result<Self> {
        let (major, minor) = context.compute_capability().w()?;
        let attribute = |name| context.attribute(name).map(|value| value.max(0) as usize).w();
        Ok(Self {
            architecture: Architecture::of(major as u32, minor as u32)?,
            cache_bytes: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
            multiprocessors: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            modules: Mutex::default(),
            functions: RwLock::default(),
        })
    }

    /// The properties of a context, queried at the first call.
    fn of(context: &Arc<CudaContext>) -> Result<Arc<Self>> {
        // An entry of `ALL` keeps its context alive, so that no other context gets the same address.
        type All = Vec<(Arc<CudaContext>, Arc<DeviceProperties>)>;
        static ALL: RwLock<All> = RwLock::new(Vec::new());
        let find =
            |all: &All| all.iter().find(|(own, _)| Arc::ptr_eq(own, context)).map(|(_, known)| known.clone());
        if let Some(known) = find(&ALL.read().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(known);
        }
        let mut all = ALL.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = find(&all) {
            return Ok(known);
        }
        let known = Arc::new(Self::new(context)?);
        all.push((context.clone(), known.clone()));
        Ok(known)
    }
}

impl Gpu {
    /// candle's device, with candle's stream.
    #[cfg(feature = "cuda")]
    pub(crate) fn new(device: &candle_core::CudaDevice) -> Result<Self> {
        let stream = device.cuda_stream();
        let known = DeviceProperties::of(stream.context())?;
        Ok(Self { device: Some(device.clone()), stream, memory: Memory::Driver, dry: false, known })
    }

    /// The GPU of a stream that another library owns. `dry`: no kernel is launched, and no GPU memory is written.
    pub(super) fn foreign(stream: Arc<CudaStream>, memory: Memory, dry: bool) -> Result<Self> {
        // The library that owns the stream may call from a thread without this context.
        stream.context().bind_to_thread().w()?;
        let known = DeviceProperties::of(stream.context())?;
        Ok(Self {
            #[cfg(feature = "cuda")]
            device: None,
            stream,
            memory,
            dry,
            known,
        })
    }

    /// Launches a kernel of a family (a `.cu` file) with one argument. An empty grid is not launched.
    ///
    /// # Safety
    /// All addresses in `params` must point to live allocations on this device, as large as the kernel expects for the
    /// shape in `params`. `kernel` and `grid` must match `params`.
    pub(super) unsafe fn launch<P: DeviceRepr>(
        &self,
        family: &str,
        kernel: &str,
        grid: Grid,
        params: &P,
    ) -> Result<()> {
        if self.dry || grid.blocks.0 == 0 || grid.blocks.1 == 0 || grid.blocks.2 == 0 {
            return Ok(());
        }
        let function = self.function(family, kernel, grid.shared_bytes)?;
        let mut launch = self.stream.launch_builder(&function);
        launch.arg(params);
        let config = LaunchConfig {
            grid_dim: grid.blocks,
            block_dim: grid.threads,
            shared_mem_bytes: grid.shared_bytes as u32,
        };
        // SAFETY: the caller vouches for the argument and the grid.
        unsafe { launch.launch(config) }
            .w()
            .map_err(|e| e.context(format!("launching {kernel} with {grid:?} failed")))?;
        Ok(())
    }

    fn function(&self, family: &str, kernel: &str, shared_bytes: usize) -> Result<CudaFunction> {
        if let Some(function) = self.functions.read().unwrap_or_else(PoisonError::into_inner).get(kernel) {
            return Ok(function.clone());
        }
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let (name, image) = FAMILIES
            .iter()
            .find(|(name, _)| *name == family)
            .ok_or_else(|| candle_core::Error::Msg(format!("no kernel family {family} in this build")))?;
        let module = match modules.get(name) {
            Some(module) => module.clone(),
            None => {
                let module = self.stream.context().load_module(Ptx::from_binary(image.to_vec())).w()?;
                modules.insert(name, module.clone());
                module
            }
        };
        let function = module.load_function(kernel).w()?;
        // The default limit is 48 KiB per thread block, including static shared memory.
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        function.set_attribute(attribute, shared_bytes as i32).w()?;
        let mut functions = self.functions.write().unwrap_or_else(PoisonError::into_inner);
        functions.insert(kernel.to_string(), function.clone());
        Ok(function)
    }
}

#[cfg(test)]
mod tests {
    use crate::cuda::compiled::RESOURCES;

    /// The numbers before `what` in ptxas's output, each with the line "Compiling entry function .." of its kernel.
    fn reported(what: &str) -> Vec<(&'static str, u32)> {
        let mut kernel = "";
        let mut found = Vec::new();
        for line in RESOURCES.lines() {
            if line.contains("Compiling entry function") {
                kernel = line.trim();
            }
            let Some(end) = line.find(what) else { continue };
            let number = line[..end].trim_end().rsplit(' ').next().and_then(|n| n.parse().ok());
            found.push((kernel, number.expect("a number")));
        }
        assert!(!found.is_empty(), "ptxas reported no {what}");
        found
    }

    /// In some attention kernels ptxas spills a few values from registers to memory, depending on the version of ptxas
    /// and the architecture. Spilled values stay in the L1 cache. Spilling an accumulator (512 bytes per thread) would
    /// be too slow. Kernels other than attention have no reason to spill. SageBwd's backward for head_dim 128 on Hopper
    /// spills the most, because dK and matmuls in flight occupy most of its registers.
    #[test]
    fn no_kernel_keeps_its_accumulators_in_memory() {
        const SOME_VALUES: u32 = 128;
        const AND_PRODUCTS_UNDER_WAY: u32 = 160;
        for (kernel, bytes) in reported("bytes spill stores") {
            let under_way = ["'attn_bwd_sagebwd_f16_128'", "'attn_bwd_sagebwd_bf16_128'"];
            let allowed = if kernel.contains("sm_90a") && under_way.iter().any(|name| kernel.contains(name)) {
                AND_PRODUCTS_UNDER_WAY
            } else if kernel.contains("attn_") {
                SOME_VALUES
            } else {
                0
            };
            assert!(bytes <= allowed, "{kernel}: {bytes}");
        }
    }

    /// ptxas serializes all asynchronous matmuls of a kernel, or adds waits, if it cannot track an accumulator, and
    /// reports this only as information (C7510 to C7517).
    #[test]
    fn products_of_a_warpgroup_stay_asynchronous() {
        let lost: Vec<&str> = RESOURCES.lines().filter(|line| line.contains("(C751")).collect();
        assert!(lost.is_empty(), "{}", lost.join("\n"));
    }

    /// The table `plans.def` reserves 1 KiB of a thread block's shared memory for variables of a size fixed at compile
    /// time.
    #[test]
    fn static_shared_memory_of_attention_kernels_fits_with_their_plans() {
        for (kernel, bytes) in reported("bytes smem") {
            assert!(bytes <= 1024 || !kernel.contains("attn_"), "{kernel}: {bytes}");
        }
    }
}
