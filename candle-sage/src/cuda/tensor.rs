//! Tensors of attention on the device: element types, strides and tensor maps.
#![allow(unsafe_code)]

use candle_core::{DType, Result};
use cudarc::driver::sys;

use super::address::{Address, address};
use super::buffer::Buffer;
use super::driver::DriverResult;
use super::kernels::Gpu;
use super::memory::Purpose;
use super::params::{TensorMap, View};
use super::plan::TILE;
use crate::error::Error;
use crate::shape::Dims;

/// The 16-bit types that the matrix instructions support.
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
            other => Err(Error::unsupported("attention on CUDA does not support this element type")
                .got(other.as_str())
                .allowed("f16, bf16")
                .hint("convert with `to_dtype(DType::BF16)`; f32 runs on the CPU")
                .into()),
        }
    }

    /// The type's name inside kernels' names.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::BF16 => "bf16",
        }
    }
}

/// A (batch, token, head, channel) tensor of 16-bit elements with any strides, in device memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Strided<'a> {
    pub(super) view: View<'a>,
    pub(super) dims: [usize; 4],
    pub(super) element: Element,
}

impl<'a> Strided<'a> {
    pub(super) fn new(data: Address<'a>, element: Element, dims: [usize; 4], strides: [usize; 4]) -> Self {
        let [batch, token, head, channel] = strides;
        let vector = channel == 1
            && data.is_multiple_of(16)
            && [batch, token, head, dims[3]].iter().all(|n| (n * ELEMENT_BYTES).is_multiple_of(16));
        let [batch, token, head, channel] = strides.map(|stride| stride as i64);
        let view = View { data, batch, token, head, channel, vector: vector.into(), mapped: 0 };
        Self { view, dims, element }
    }
}

/// A contiguous tensor that a call allocates.
#[derive(Debug)]
pub(super) struct Output {
    pub(super) buffer: Buffer<u16>,
    pub(super) element: Element,
    dims: [usize; 4],
}

impl Output {
    /// An uninitialized tensor.
    pub(super) fn new(gpu: &Gpu, purpose: Purpose, element: Element, dims: Dims) -> Result<Self> {
        let dims = [dims.0, dims.1, dims.2, dims.3];
        Ok(Self { buffer: gpu.alloc_for(purpose, dims.iter().product())?, element, dims })
    }

    pub(super) fn view(&self, gpu: &Gpu) -> View<'_> {
        let [_, tokens, heads, channels] = self.dims;
        let strides = [tokens * heads * channels, heads * channels, channels, 1];
        Strided::new(address(&self.buffer, gpu), self.element, self.dims, strides).view
    }
}

const ELEMENT_BYTES: usize = 2;

/// Bytes of a swizzled row in shared memory, as in `attention/panels.cuh`.
const SWIZZLED_BYTES: usize = 128;

/// The description of a (batch, token, head, channel) tensor for TMA, the hardware that copies tiles. TMA copies tiles
/// of 64 tokens and 64 channels, swizzled (permuted) as in `kernels/include/sage/layout/swizzle.cuh`. `None` if TMA
/// does not support the tensor's alignment or strides, for example the stride 0 of a broadcast tensor.
pub(super) fn tensor_map<'a>(
    view: View<'a>,
    [batch, tokens, heads, head_dim]: [usize; 4],
    element: Element,
) -> Result<Option<TensorMap<'a>>> {
    // The innermost dimension, with a stride of one element, comes first. The stride of a dimension of extent 1 has no
    // effect, but must be valid.
    let extents = [head_dim, tokens, heads, batch].map(|n| n as u64);
    let strides = [(view.token, tokens), (view.head, heads), (view.batch, batch)]
        .map(|(stride, extent)| if extent == 1 { 16 } else { stride * ELEMENT_BYTES as i64 });
    let fits = strides.iter().all(|stride| (1..1 << 40).contains(stride))
        && extents.iter().all(|n| (1..=u64::from(u32::MAX)).contains(n));
    if view.vector == 0 || !fits {
        return Ok(None);
    }
    let strides = strides.map(|n| n as u64);
    let mut map = TensorMap::default();
    // SAFETY: the map has the size and alignment of a CUtensorMap. For rank 4 the arrays have 4 extents, 3 strides, 4
    // box sizes and 4 element strides. The call does not access the tensor's memory.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            (&raw mut map).cast(),
            match element {
                Element::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                Element::BF16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            },
            4,
            view.data.number() as *mut _,
            extents.as_ptr(),
            strides.as_ptr(),
            [(SWIZZLED_BYTES / ELEMENT_BYTES) as u32, TILE as u32, 1, 1].as_ptr(),
            [1; 4].as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()
    .w()?;
    Ok(Some(map))
}
