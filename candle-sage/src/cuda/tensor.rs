//! Tensors on the device: their addresses, element types and layouts.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, DType, Layout, Result};
use cudarc::driver::{CudaSlice, DevicePtr};
use half::{bf16, f16};

use super::kernels::Gpu;
use super::params::{Address, View};
use crate::error::Error;

/// The 16-bit types that the matrix instructions take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Element {
    F16,
    BF16,
}

impl Element {
    pub(super) fn of(dtype: DType) -> Result<Self> {
        match dtype {
            DType::F16 => Ok(Self::F16),
            DType::BF16 => Ok(Self::BF16),
            other => Err(Error::new("attention on CUDA does not take this element type")
                .got(other.as_str())
                .allowed("f16, bf16")
                .hint("convert with `to_dtype(DType::BF16)`; f32 runs on the CPU")
                .into()),
        }
    }

    /// As it stands in the names of kernels.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::BF16 => "bf16",
        }
    }

    /// A new tensor of `len` elements, not initialized.
    pub(super) fn alloc(self, gpu: &Gpu, len: usize) -> Result<CudaStorage> {
        Ok(match self {
            Self::F16 => CudaStorage::wrap_cuda_slice(gpu.alloc::<f16>(len)?, gpu.device.clone()),
            Self::BF16 => CudaStorage::wrap_cuda_slice(gpu.alloc::<bf16>(len)?, gpu.device.clone()),
        })
    }
}

/// The address of an allocation, for work that is launched on the device's own stream.
pub(super) fn address<T>(slice: &CudaSlice<T>, gpu: &Gpu) -> Address {
    slice.device_ptr(&gpu.stream).0
}

fn start_address(storage: &CudaStorage, gpu: &Gpu) -> Result<Address> {
    Ok(match Element::of(storage.dtype())? {
        Element::F16 => address(storage.as_cuda_slice::<f16>()?, gpu),
        Element::BF16 => address(storage.as_cuda_slice::<bf16>()?, gpu),
    })
}

const ELEMENT_BYTES: usize = 2;

/// A (batch, token, head, channel) tensor as kernels see it.
pub(super) fn view(storage: &CudaStorage, layout: &Layout, gpu: &Gpu) -> Result<View> {
    let (&[_, _, _, head_dim], &[batch, token, head, channel]) = (layout.dims(), layout.stride()) else {
        return Err(Error::new("attention takes tensors of four dimensions")
            .got(format!("{:?}", layout.dims()))
            .allowed("(batch, sequence, heads, head_dim)")
            .hint("add a dimension of 1 with `unsqueeze`")
            .into());
    };
    let data = start_address(storage, gpu)? + (layout.start_offset() * ELEMENT_BYTES) as u64;
    let vector = channel == 1
        && data.is_multiple_of(16)
        && [batch, token, head, head_dim].iter().all(|n| (n * ELEMENT_BYTES).is_multiple_of(16));
    Ok(View {
        data,
        batch: batch as i64,
        token: token as i64,
        head: head as i64,
        channel: channel as i64,
        vector: vector.into(),
        padding: 0,
    })
}
