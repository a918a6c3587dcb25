//! Asynchronous upload of token ids through page-locked memory. A copy from pageable memory would wait for
//! all earlier work, and the device would then be idle until its next launch.

use candle_core::{Device, Result, Tensor};

/// Uploads the ids and targets of micro-batches of one size.
#[derive(Debug)]
pub struct Upload {
    device: Device,
    dims: (usize, usize),
    #[cfg(feature = "cuda")]
    ring: Option<ring::Ring>,
}

impl Upload {
    /// Makes buffers for micro-batches of (sequences, context) ids. Up to `ahead` copies to the device may be pending.
    ///
    /// # Errors
    /// When memory is short.
    pub fn new(device: &Device, dims: (usize, usize), ahead: usize) -> Result<Self> {
        #[cfg(not(feature = "cuda"))]
        let _ = ahead;
        Ok(Self {
            device: device.clone(),
            dims,
            #[cfg(feature = "cuda")]
            ring: match device {
                Device::Cuda(cuda) => Some(ring::Ring::new(cuda, dims, ahead)?),
                _ => None,
            },
        })
    }

    /// Returns ids and targets on the device. On a GPU the next call overwrites the returned tensors, after all kernels
    /// that were launched earlier on the same stream.
    ///
    /// # Errors
    /// When `ids` or `targets` do not have a micro-batch's size, or the device reports an error.
    pub fn send(&mut self, ids: &[u32], targets: &[u32]) -> Result<[Tensor; 2]> {
        #[cfg(feature = "cuda")]
        if let Some(ring) = &mut self.ring {
            return ring.send(ids, targets);
        }
        let tensor = |ids: &[u32]| Tensor::from_slice(ids, self.dims, &self.device);
        Ok([tensor(ids)?, tensor(targets)?])
    }
}

#[cfg(feature = "cuda")]
#[allow(unsafe_code)]
mod ring {
    use std::sync::Arc;

    use candle_core::cuda_backend::WrapErr;
    use candle_core::{CudaDevice, DType, Device, Result, Storage, Tensor};
    use cudarc::driver::result::memcpy_htod_async;
    use cudarc::driver::{CudaEvent, CudaStream, DevicePtr, PinnedHostSlice};

    /// A ring of page-locked buffers, and one tensor on the device. Each upload overwrites this tensor. The kernels
    /// that read the previous upload finish first, because they are on the same stream.
    #[derive(Debug)]
    pub(super) struct Ring {
        stream: Arc<CudaStream>,
        /// The buffers, each with the event after which it may be overwritten.
        turns: Vec<(PinnedHostSlice<u32>, Option<CudaEvent>)>,
        next: usize,
        /// Ids and targets as one tensor of shape (2, sequences, context). `address` is its address.
        here: Tensor,
        address: u64,
    }

    impl Ring {
        pub(super) fn new(
            device: &CudaDevice,
            (rows, columns): (usize, usize),
            ahead: usize,
        ) -> Result<Self> {
            let stream = device.cuda_stream();
            let turn = || -> Result<_> {
                // SAFETY: any bits are valid ids, and `send` fills a buffer before it copies it.
                let memory =
                    unsafe { stream.context().alloc_pinned_with_flags(2 * rows * columns, 0) }.w()?;
                Ok((memory, None))
            };
            let turns = (0..ahead.max(1)).map(|_| turn()).collect::<Result<_>>()?;
            let here = Tensor::zeros((2, rows, columns), DType::U32, &Device::Cuda(device.clone()))?;
            let address = {
                let (storage, _) = here.storage_and_layout();
                let Storage::Cuda(storage) = &*storage else { candle_core::bail!("ids of another device") };
                storage.as_cuda_slice::<u32>()?.device_ptr(&stream).0
            };
            Ok(Self { stream, turns, next: 0, here, address })
        }

        pub(super) fn send(&mut self, ids: &[u32], targets: &[u32]) -> Result<[Tensor; 2]> {
            let turn = self.next;
            self.next = (turn + 1) % self.turns.len();
            let (memory, read) = &mut self.turns[turn];
            if let Some(read) = read.take() {
                read.synchronize().w()?;
            }
            let slice = memory.as_mut_slice().w()?;
            if slice.len() != ids.len() + targets.len() || ids.len() != targets.len() {
                candle_core::bail!(
                    "{} ids and {} targets for room of {}",
                    ids.len(),
                    targets.len(),
                    slice.len()
                );
            }
            slice[..ids.len()].copy_from_slice(ids);
            slice[ids.len()..].copy_from_slice(targets);
            // SAFETY: the tensor is as long as the slice, and the slice is not overwritten before the copy ends.
            unsafe { memcpy_htod_async(self.address, slice, self.stream.cu_stream()).w()? };
            *read = Some(self.stream.record_event(None).w()?);
            Ok([self.here.get(0)?, self.here.get(1)?])
        }
    }

    impl Drop for Ring {
        /// Copies may still be in flight.
        fn drop(&mut self) {
            let _ = self.stream.synchronize();
        }
    }
}
