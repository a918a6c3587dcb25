//! Tensors on the device: their addresses, element types and layouts.
#![allow(unsafe_code)]

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::WrapErr;
use candle_core::{CudaStorage, DType, Layout, Result};
use cudarc::driver::sys;
use half::{bf16, f16};

use super::address::{Address, address_at, first_index};
use super::kernels::Gpu;
use super::params::{TensorMap, View};
use crate::error::Error;
use crate::launch::Operand;
use crate::shape::Dims;

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
            other => Err(Error::unsupported("attention on CUDA does not take this element type")
                .got(other.as_str())
                .allowed("f16, bf16")
                .hint("convert with `to_dtype(DType::BF16)`; f32 runs on the CPU")
                .into()),
        }
    }

    /// The type in the names of kernels.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::BF16 => "bf16",
        }
    }

    /// A new tensor of `len` elements, uninitialized.
    pub(super) fn alloc(self, gpu: &Gpu, len: usize) -> Result<CudaStorage> {
        Ok(match self {
            Self::F16 => gpu.storage(gpu.alloc::<f16>(len)?),
            Self::BF16 => gpu.storage(gpu.alloc::<bf16>(len)?),
        })
    }
}

/// A new contiguous tensor, uninitialized.
#[derive(Debug)]
pub(super) struct Output {
    pub(super) storage: CudaStorage,
    layout: Layout,
}

impl Output {
    pub(super) fn new(gpu: &Gpu, element: Element, dims: Dims) -> Result<Self> {
        let layout = Layout::contiguous(dims);
        Ok(Self { storage: element.alloc(gpu, layout.shape().elem_count())?, layout })
    }

    /// The kernels' view of it.
    pub(super) fn view(&self, gpu: &Gpu) -> Result<View<'_>> {
        view((&self.storage, &self.layout), gpu)
    }
}

fn start<'a>((storage, layout): Operand<'a>, gpu: &Gpu) -> Result<Address<'a>> {
    let first = first_index(layout);
    match Element::of(storage.dtype())? {
        Element::F16 => address_at(storage.as_cuda_slice::<f16>()?, first, gpu),
        Element::BF16 => address_at(storage.as_cuda_slice::<bf16>()?, first, gpu),
    }
}

const ELEMENT_BYTES: usize = 2;

/// The kernels' view of a (batch, token, head, channel) tensor.
pub(super) fn view<'a>(operand: Operand<'a>, gpu: &Gpu) -> Result<View<'a>> {
    let (_, layout) = operand;
    let (&[_, _, _, head_dim], &[batch, token, head, channel]) = (layout.dims(), layout.stride()) else {
        return Err(Error::shape("attention takes tensors of four dimensions")
            .got(format!("{:?}", layout.dims()))
            .allowed("(batch, sequence, heads, head_dim)")
            .hint("add a dimension of 1 with `unsqueeze`")
            .into());
    };
    let data = start(operand, gpu)?;
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
        mapped: 0,
    })
}

/// The tensor map by which TMA copies tiles of 64 tokens and 64 channels from a (batch, token, head, channel)
/// tensor, swizzled as in `kernels/include/sage/layout/swizzle.cuh`. `None` where TMA cannot read the tensor:
/// when a stride is not a multiple of 16 bytes, or is 0 because the tensor is broadcast.
pub(super) fn tensor_map<'a>(
    view: View<'a>,
    dims: &[usize],
    element: Element,
) -> Result<Option<TensorMap<'a>>> {
    let &[batch, tokens, heads, head_dim] = dims else { return Ok(None) };
    // From the innermost dimension on, whose stride is one element. The stride of a dimension of extent 1 has
    // no effect, but must be valid.
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
    // SAFETY: the map has the size and alignment of a CUtensorMap; there are as many dims, strides (one
    // less), box sizes and steps as the rank says. The call reads nothing from `data`.
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
            [64, 64, 1, 1].as_ptr(),
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
