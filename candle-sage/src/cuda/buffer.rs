//! Memory on the device, allocated and freed in the order of a stream.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use candle_core::cuda_backend::{CudaDType, WrapErr};
use candle_core::{CudaStorage, Result};
use cudarc::driver::{CudaStream, DevicePtr, DeviceRepr, DeviceSlice, SyncOnDrop, ValidAsZeroBits, result};

use super::kernels::Gpu;

/// Memory for elements of one type. It is not cudarc's `CudaSlice`, which creates two events at each allocation, for other streams to
/// wait for: a buffer never leaves its stream, and what is returned to candle becomes a `CudaSlice` there ([`Gpu::storage`]).
#[derive(Debug)]
pub(super) struct Buffer<T> {
    at: u64,
    len: usize,
    stream: Arc<CudaStream>,
    elements: PhantomData<fn() -> T>,
}

impl<T> DeviceSlice<T> for Buffer<T> {
    fn len(&self) -> usize {
        self.len
    }

    fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }
}

impl<T> DevicePtr<T> for Buffer<T> {
    fn device_ptr<'a>(&'a self, _: &'a CudaStream) -> (u64, SyncOnDrop<'a>) {
        (self.at, SyncOnDrop::Record(None))
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        let context = self.stream.context();
        // SAFETY: allocated in `Gpu::alloc`, and freed once. Work of the stream that uses it was issued before. cudarc reports the error
        // at its next call.
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

/// Elements to allocate for `len`: at least one, and in this crate's own tests a canary behind them.
fn room(len: usize, element_bytes: usize) -> usize {
    let behind = if cfg!(test) { CANARY_BYTES.div_ceil(element_bytes) } else { 0 };
    (len + behind).max(1)
}

/// Size of the canary behind every allocation in this crate's own tests, which no kernel may change.
pub(super) const CANARY_BYTES: usize = 256;

impl Gpu {
    /// Memory without the tests' guard.
    fn unguarded<T: DeviceRepr>(&self, len: usize) -> Result<Buffer<T>> {
        let (context, len) = (self.stream.context(), room(len, size_of::<T>()));
        context.bind_to_thread().w()?;
        let bytes = len * size_of::<T>();
        // SAFETY: a kernel writes the elements before any is read; none has a destructor.
        let at = unsafe {
            if context.has_async_alloc() {
                result::malloc_async(self.stream.cu_stream(), bytes)
            } else {
                result::malloc_sync(bytes)
            }
        };
        Ok(Buffer { at: at.w()?, len, stream: self.stream.clone(), elements: PhantomData })
    }

    /// Uninitialized memory for `len` elements. (At least one: an empty allocation has no address.)
    pub(super) fn alloc<T: DeviceRepr>(&self, len: usize) -> Result<Buffer<T>> {
        let buffer = self.unguarded(len)?;
        #[cfg(test)]
        super::guard::watch(self, buffer.at, len * size_of::<T>(), false)?;
        Ok(buffer)
    }

    /// Memory for `len` zeros.
    pub(super) fn alloc_zeros<T: DeviceRepr + ValidAsZeroBits>(&self, len: usize) -> Result<Buffer<T>> {
        let buffer = self.unguarded::<T>(len)?;
        // SAFETY: the allocation has so many bytes.
        unsafe {
            result::memset_d8_async(buffer.at, 0, buffer.len * size_of::<T>(), self.stream.cu_stream())
        }
        .w()?;
        #[cfg(test)]
        super::guard::watch(self, buffer.at, len * size_of::<T>(), true)?;
        Ok(buffer)
    }

    /// candle's storage of a buffer that all kernels have written.
    pub(super) fn storage<T: CudaDType + DeviceRepr>(&self, buffer: Buffer<T>) -> CudaStorage {
        let buffer = ManuallyDrop::new(buffer);
        // SAFETY: the allocation has the length, and only the slice frees it. `ManuallyDrop` leaks a reference to the stream of the
        // buffer, which is dropped here.
        let slice = unsafe {
            drop(std::ptr::read(&raw const buffer.stream));
            self.stream.upgrade_device_ptr::<T>(buffer.at, buffer.len)
        };
        CudaStorage::wrap_cuda_slice(slice, self.device.clone())
    }
}
