//! Conversions between candle and the kernels: candle's tensors as kernel parameters, and kernels' results as candle's
//! storage.
#![allow(unsafe_code)]

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaDType;
use candle_core::{CudaDevice, CudaStorage, Result};
use cudarc::driver::DeviceRepr;
use half::{bf16, f16};

use super::address::{address_at, first_index};
use super::buffer::Buffer;
use super::kernels::Gpu;
use super::memory::Purpose;
use super::params::View;
use super::tensor::{Element, Output, Strided};
use crate::error::Error;
use crate::launch::Operand;
use crate::shape::Dims;

impl Gpu {
    /// Converts a buffer to candle's storage.
    pub(super) fn storage<T: CudaDType + DeviceRepr>(&self, buffer: Buffer<T>) -> CudaStorage {
        let (at, len) = buffer.leak();
        // SAFETY: the allocation at `at` has at least `len` elements, and only `slice` frees it.
        let slice = unsafe { self.stream.upgrade_device_ptr::<T>(at, len) };
        CudaStorage::wrap_cuda_slice(slice, self.device().clone())
    }

    pub(super) fn device(&self) -> &CudaDevice {
        self.device.as_ref().expect("operators of candle set the device")
    }
}

impl Output {
    /// A new contiguous tensor for candle, uninitialized.
    pub(super) fn for_candle(gpu: &Gpu, element: Element, dims: Dims) -> Result<Self> {
        Self::new(gpu, Purpose::Output, element, dims)
    }

    pub(super) fn storage(self, gpu: &Gpu) -> CudaStorage {
        match self.element {
            Element::F16 => gpu.storage(self.buffer.cast::<f16>()),
            Element::BF16 => gpu.storage(self.buffer.cast::<bf16>()),
        }
    }
}

/// A candle tensor as attention's operand.
pub(super) fn strided<'a>((storage, layout): Operand<'a>, gpu: &Gpu) -> Result<Strided<'a>> {
    let (&[batch, token, head, channel], &[b, t, h, c]) = (layout.dims(), layout.stride()) else {
        return Err(Error::shape("attention needs tensors of four dimensions")
            .got(format!("{:?}", layout.dims()))
            .allowed("(batch, sequence, heads, head_dim)")
            .hint("add a dimension of 1 with `unsqueeze`")
            .into());
    };
    let (element, first) = (Element::of(storage.dtype())?, first_index(layout));
    let data = match element {
        Element::F16 => address_at(storage.as_cuda_slice::<f16>()?, first, gpu),
        Element::BF16 => address_at(storage.as_cuda_slice::<bf16>()?, first, gpu),
    }?;
    Ok(Strided::new(data, element, [batch, token, head, channel], [b, t, h, c]))
}

/// The kernels' view of a candle tensor.
pub(super) fn view<'a>(operand: Operand<'a>, gpu: &Gpu) -> Result<View<'a>> {
    Ok(strided(operand, gpu)?.view)
}
