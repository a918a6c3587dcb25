//! Collectives that run on the GPUs' copy engines (NCCL's zero-CTA policy), among the ranks of a node. These
//! collectives leave all multiprocessors to concurrent kernels. They need memory that NCCL has allocated and every rank
//! has registered.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::ops::Range;

use candle_core::cuda_backend::CudaDType;
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, DType, Device, Result, Storage, Tensor};
use cudarc::driver::sys;
use half::{bf16, f16};

use super::library::{BYTES, Collectives, Communicator, Config, Functions, Id, Stream};
use crate::ranks::mesh::Rank;

/// `NCCL_WIN_COLL_SYMMETRIC`: every rank registers memory of the same size.
const SYMMETRIC: c_int = 1;

/// NCCL's windows (registered ranges of memory) start and end at multiples of this many bytes.
const ALIGNMENT: usize = 4096;

/// The communicator of the ranks of a node, and the memory that is registered with NCCL.
pub(super) struct Engines {
    functions: Collectives,
    /// Never destroyed, like the communicator of [`super::Nccl`].
    communicator: Communicator,
    /// The addresses of registered memory.
    registered: RefCell<Vec<Range<u64>>>,
}

impl Engines {
    /// Creates the communicator. One rank of the node has made `id`, and all ranks of the node must call this.
    pub(super) fn connect(
        functions: Collectives,
        library: &Functions,
        id: Id,
        rank: Rank,
    ) -> candle_sage::Result<Self> {
        let (mut communicator, mut config) = (std::ptr::null_mut(), Config::zero_cta());
        // SAFETY: the caller's GPU is bound to this thread; the addresses are valid for the call.
        let made = unsafe {
            (functions.init_rank)(
                &raw mut communicator,
                rank.of as c_int,
                id,
                rank.index as c_int,
                &raw mut config,
            )
        };
        library.check("connect the GPUs of a node", made)?;
        Ok(Self { functions, communicator, registered: RefCell::default() })
    }

    /// Allocates and registers memory; all ranks of the node must call this with the same size. Returns `None` if ranks
    /// cannot reach each other's memory: NCCL 2.28 then sets `window` to an address outside GPU memory, and other
    /// versions leave it null.
    pub(super) fn allocate(&self, library: &Functions, bytes: usize) -> candle_sage::Result<Option<u64>> {
        let bytes = bytes.next_multiple_of(ALIGNMENT);
        let (mut at, mut window) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the functions write addresses to valid places; the memory is never freed.
        unsafe {
            library.check("allocate memory", (self.functions.allocate)(&raw mut at, bytes))?;
            let registered =
                (self.functions.register)(self.communicator, at, bytes, &raw mut window, SYMMETRIC);
            library.check("register memory", registered)?;
        }
        let at = at as u64;
        self.registered.borrow_mut().push(at..at + bytes as u64);
        Ok(is_on_gpu(window).then_some(at))
    }

    /// `len` zeros in memory that is registered with NCCL and never freed. `len` must be at least 1. All ranks of the
    /// node must call this with the same `len` and `dtype`.
    pub(super) fn zeros(
        &self,
        library: &Functions,
        len: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let Some(at) = self.allocate(library, len * dtype.size_in_bytes())? else {
            candle_core::bail!(
                "NCCL no longer shares memory among the ranks of the node; hint: --copy-engines off needs no shared memory"
            )
        };
        let Device::Cuda(device) = device else { candle_core::bail!("NCCL allocates only GPU memory") };
        let storage = match dtype {
            DType::F32 => wrap::<f32>(at, len, device),
            DType::BF16 => wrap::<bf16>(at, len, device),
            DType::F16 => wrap::<f16>(at, len, device),
            DType::U8 => wrap::<u8>(at, len, device),
            other => candle_core::bail!("ranks do not exchange {other:?}"),
        };
        let tensor = Tensor::from_storage(Storage::Cuda(storage), len, BackpropOp::none(), false);
        // A reference is leaked. Otherwise cudarc would free memory that it has not allocated.
        std::mem::forget(tensor.clone());
        tensor.zero_set()?;
        Ok(tensor)
    }

    /// Whether this memory was registered with NCCL.
    pub(super) fn hold(&self, (at, bytes): (u64, usize)) -> bool {
        let end = at + bytes as u64;
        self.registered.borrow().iter().any(|range| range.start <= at && end <= range.end)
    }

    /// Part `j` of `from` is sent to rank `j`, and part `i` of `into` is received from rank `i`.
    ///
    /// # Safety
    /// `from` and `into` must be registered with NCCL, and have a part of `bytes` bytes for each rank.
    pub(super) unsafe fn all_to_all(&self, from: u64, into: u64, bytes: usize, stream: Stream) -> c_int {
        let (from, into) = (from as *const c_void, into as *mut c_void);
        // SAFETY: the caller meets the conditions above.
        unsafe { (self.functions.all_to_all)(from, into, bytes, BYTES, self.communicator, stream) }
    }

    /// `part` is sent to every rank. `into` receives the tensors of all ranks in the order of the ranks.
    ///
    /// # Safety
    /// `part` and `into` must be registered with NCCL; `part` has `bytes` bytes, and `into` has as many for each rank.
    pub(super) unsafe fn all_gather(&self, part: u64, into: u64, bytes: usize, stream: Stream) -> c_int {
        let (part, into) = (part as *const c_void, into as *mut c_void);
        // SAFETY: the caller meets the conditions above.
        unsafe { (self.functions.all_gather)(part, into, bytes, BYTES, self.communicator, stream) }
    }
}

/// A candle storage of memory that candle has not allocated.
fn wrap<T: CudaDType>(at: u64, len: usize, device: &CudaDevice) -> CudaStorage {
    // SAFETY: the caller has allocated memory for `len` elements, and every bit pattern is a valid `T`.
    let slice = unsafe { device.cuda_stream().upgrade_device_ptr::<T>(at, len) };
    CudaStorage::wrap_cuda_slice(slice, device.clone())
}

/// Whether an address is in a GPU's memory.
fn is_on_gpu(at: *mut c_void) -> bool {
    let mut kind = 0u32;
    // SAFETY: the function writes 4 bytes, or fails for an address that CUDA does not know.
    let known = unsafe {
        sys::cuPointerGetAttribute(
            (&raw mut kind).cast(),
            sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            at as u64,
        )
    };
    known == sys::CUresult::CUDA_SUCCESS && kind == sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as u32
}
