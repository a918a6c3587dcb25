//! Buffers on the device, with stream-ordered allocation.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::sync::Arc;

use candle_core::Result;
use cudarc::driver::{
    CudaStream, DevicePtr, DeviceRepr, DeviceSlice, SyncOnDrop, ValidAsZeroBits, result, sys,
};

use super::driver::DriverResult;
use super::kernels::Gpu;
use super::memory::{Memory, Purpose};
use crate::error::Error;

/// Device memory. Freed on drop if `owned`.
#[derive(Debug)]
struct Allocation {
    at: u64,
    owned: bool,
    stream: Arc<CudaStream>,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        let context = self.stream.context();
        // SAFETY: allocated in `Gpu::unguarded`, and freed once. All work that uses the memory was issued on this
        // stream before. `record_err` stores an error, which cudarc reports at its next call.
        let freed = unsafe {
            if context.has_async_alloc() {
                result::free_async(self.at, self.stream.cu_stream())
            } else {
                self.stream.synchronize().and_then(|()| result::free_sync(self.at))
            }
        };
        context.record_err(freed);
    }
}

/// Memory for elements of one type. This is not cudarc's `CudaSlice`, because that type creates two events per
/// allocation, so that other streams can wait for the memory. A buffer is used on only one stream. Results for candle
/// are converted to a `CudaSlice` (`Gpu::storage`).
#[derive(Debug)]
pub(super) struct Buffer<T> {
    allocation: Allocation,
    len: usize,
    elements: PhantomData<fn() -> T>,
}

impl<T> Buffer<T> {
    /// The buffer as elements of another type of the same size.
    #[cfg(feature = "cuda")]
    pub(super) fn cast<U>(self) -> Buffer<U> {
        const { assert!(size_of::<T>() == size_of::<U>()) };
        Buffer { allocation: self.allocation, len: self.len, elements: PhantomData }
    }

    /// The address and the number of elements. The memory is not freed.
    #[cfg(feature = "cuda")]
    pub(super) fn leak(mut self) -> (u64, usize) {
        self.allocation.owned = false;
        (self.allocation.at, self.len)
    }
}

impl<T> DeviceSlice<T> for Buffer<T> {
    fn len(&self) -> usize {
        self.len
    }

    fn stream(&self) -> &Arc<CudaStream> {
        &self.allocation.stream
    }
}

impl<T> DevicePtr<T> for Buffer<T> {
    fn device_ptr<'a>(&'a self, _: &'a CudaStream) -> (u64, SyncOnDrop<'a>) {
        (self.allocation.at, SyncOnDrop::Record(None))
    }
}

#[cfg(feature = "cuda")]
impl<T> cudarc::driver::DevicePtrMut<T> for Buffer<T> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (u64, SyncOnDrop<'a>) {
        self.device_ptr(stream)
    }
}

/// Number of elements to allocate for a buffer of `len` elements: never 0. This crate's own tests add a canary
/// ([`CANARY_BYTES`]).
fn allocated_len(len: usize, element_bytes: usize) -> usize {
    let behind = if cfg!(test) { CANARY_BYTES.div_ceil(element_bytes) } else { 0 };
    (len + behind).max(1)
}

/// In this crate's own tests, this number of bytes (the canary) follows each buffer. No kernel may change these bytes.
pub(super) const CANARY_BYTES: usize = 256;

impl Gpu {
    /// Uninitialized memory. This crate's own tests check its canary only if the caller calls `guard::watch`.
    fn unguarded<T: DeviceRepr>(&self, purpose: Purpose, len: usize) -> Result<Buffer<T>> {
        let len = allocated_len(len, size_of::<T>());
        let bytes = len * size_of::<T>();
        let (at, owned) = match &self.memory {
            Memory::Lent(lent) => (lent.take(purpose, bytes)?, false),
            Memory::Driver => {
                let context = self.stream.context();
                context.bind_to_thread().w()?;
                // SAFETY: a kernel writes the elements before they are read; elements have no destructor.
                let at = unsafe {
                    if context.has_async_alloc() {
                        result::malloc_async(self.stream.cu_stream(), bytes)
                    } else {
                        result::malloc_sync(bytes)
                    }
                };
                (at.w()?, true)
            }
        };
        let allocation = Allocation { at, owned, stream: self.stream.clone() };
        Ok(Buffer { allocation, len, elements: PhantomData })
    }

    /// Uninitialized memory for `len` elements, or for one if `len` is 0: an empty allocation has no address.
    pub(super) fn alloc_for<T: DeviceRepr>(&self, purpose: Purpose, len: usize) -> Result<Buffer<T>> {
        let buffer = self.unguarded(purpose, len)?;
        #[cfg(test)]
        super::guard::watch(self, buffer.allocation.at, len * size_of::<T>(), false)?;
        Ok(buffer)
    }

    /// Uninitialized scratch memory of `len` elements.
    pub(super) fn alloc<T: DeviceRepr>(&self, len: usize) -> Result<Buffer<T>> {
        self.alloc_for(Purpose::Scratch, len)
    }

    /// Scratch memory of `len` elements, filled with zeros.
    pub(super) fn alloc_zeros<T: DeviceRepr + ValidAsZeroBits>(&self, len: usize) -> Result<Buffer<T>> {
        let buffer = self.unguarded::<T>(Purpose::Scratch, len)?;
        if !self.dry {
            let (at, bytes) = (buffer.allocation.at, buffer.len * size_of::<T>());
            // SAFETY: the allocation has `bytes` bytes.
            unsafe { result::memset_d8_async(at, 0, bytes, self.stream.cu_stream()) }.w()?;
        }
        #[cfg(test)]
        super::guard::watch(self, buffer.allocation.at, len * size_of::<T>(), true)?;
        Ok(buffer)
    }

    /// A copy of `from`.
    pub(super) fn upload<T: DeviceRepr + 'static>(&self, from: &[T]) -> Result<Buffer<T>> {
        #[allow(unused_mut)]
        let mut buffer = self.unguarded::<T>(Purpose::Scratch, from.len())?;
        if self.dry || from.is_empty() {
            return Ok(buffer);
        }
        // While candle captures a CUDA graph, `memcpy_htod` copies from a cached device copy of `from`. A replay
        // therefore does not read `from`.
        #[cfg(feature = "cuda")]
        if let Some(device) = &self.device {
            device.memcpy_htod(from, &mut buffer)?;
            return Ok(buffer);
        }
        let capturing =
            self.stream.capture_status().w()? != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        if capturing {
            return Err(Error::unsupported(
                "packed documents are not supported while a CUDA graph is captured",
            )
            .got("lengths of documents, which a replay would read from freed memory")
            .allowed("calls without packed documents")
            .hint("give each document its own batch entry, padded to one length, or leave attention out of the graph")
            .into());
        }
        // SAFETY: the allocation has at least as many elements as `from`. `from` is not pinned, so the driver has read
        // `from` when the call returns.
        unsafe { result::memcpy_htod_async(buffer.allocation.at, from, self.stream.cu_stream()) }.w()?;
        Ok(buffer)
    }
}
