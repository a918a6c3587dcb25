//! Tensors of any float type on the device, and how a kernel's threads divide a tensor's rows.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, DType, Layout, Result};
use half::{bf16, f16};

use crate::cuda::address::{Address, address, address_at, first_index};
use crate::cuda::buffer::Buffer;
use crate::cuda::compiled::constants::elements_group::ROW_THREADS;
use crate::cuda::compiled::constants::partial_sums::SIDE;
use crate::cuda::compiled::kernel;
use crate::cuda::kernels::{Gpu, Grid};
use crate::cuda::params::{self, launch};
use crate::dtype::unsupported_dtype;
use crate::error::Error;
use crate::launch::Operand;

/// The element types of the ops. `Type` in `kernels/include/sage/elements/pack.cuh` has the same numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Float {
    F32 = 0,
    F16 = 1,
    BF16 = 2,
}

impl Float {
    pub(super) fn of(op: &str, storage: &CudaStorage) -> Result<Self> {
        Self::of_dtype(op, storage.dtype())
    }

    pub(super) fn of_dtype(op: &str, dtype: DType) -> Result<Self> {
        match dtype {
            DType::F32 => Ok(Self::F32),
            DType::F16 => Ok(Self::F16),
            DType::BF16 => Ok(Self::BF16),
            other => Err(unsupported_dtype(op, other).into()),
        }
    }

    /// The type's name inside kernels' names.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
        }
    }

    pub(super) fn bytes(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }

    /// A new tensor of `len` elements, uninitialized.
    pub(super) fn alloc(self, gpu: &Gpu, len: usize) -> Result<CudaStorage> {
        Ok(match self {
            Self::F32 => gpu.storage(gpu.alloc::<f32>(len)?),
            Self::F16 => gpu.storage(gpu.alloc::<f16>(len)?),
            Self::BF16 => gpu.storage(gpu.alloc::<bf16>(len)?),
        })
    }
}

/// How many elements form a *pack*, which a thread moves at once: 16 bytes of elements if all rows start at multiples
/// of 16 bytes, otherwise one element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Packs {
    float: Float,
    vector: bool,
}

impl Packs {
    /// Threads move packs of 16 bytes if all `starts` and `strides` are multiples of 16 bytes, otherwise single
    /// elements. `starts`: the tensors' addresses. `strides`: the distances between rows and the lengths of rows, in
    /// elements.
    pub(super) fn of(float: Float, starts: &[Address<'_>], strides: &[usize]) -> Self {
        let aligned = starts.iter().all(|start| start.is_multiple_of(16));
        Self { float, vector: aligned && strides.iter().all(|n| (n * float.bytes()).is_multiple_of(16)) }
    }

    /// Single elements, whatever the alignment.
    pub(super) fn single(float: Float) -> Self {
        Self { float, vector: false }
    }

    pub(super) fn elements(self) -> usize {
        if self.vector { 16 / self.float.bytes() } else { 1 }
    }

    /// A kernel's full name.
    pub(super) fn kernel(self, what: &str) -> String {
        format!("{what}_{}_{}", self.float.name(), if self.vector { "vector" } else { "single" })
    }
}

/// The number of threads per row (lanes), and of rows per thread block. The number of lanes is a power of two: up to 32
/// lanes with several rows per thread block, or more lanes with one row per thread block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RowThreads {
    pub(super) lanes: usize,
    pub(super) rows: usize,
}

impl RowThreads {
    /// The threads for rows of `packs` packs. A row of up to 32 packs has one lane per pack. A longer row has one lane
    /// per `each` packs, but at least 32 lanes. The number of lanes is rounded up to a power of two, and then limited
    /// to `most`.
    pub(super) fn of(packs: usize, each: usize, most: usize) -> Self {
        let lanes = if packs <= 32 { packs.max(1) } else { packs.div_ceil(each).max(32) };
        let lanes = lanes.next_power_of_two().min(most);
        Self { lanes, rows: if lanes <= 32 { ROW_THREADS / lanes } else { 1 } }
    }

    /// A grid of at most `most` thread blocks for `rows`.
    pub(super) fn grid(self, rows: usize, most: usize) -> Grid {
        Grid::line(rows.div_ceil(self.rows).min(most), self.lanes * self.rows)
    }
}

/// A grid for `len` elements: blocks of `threads` threads, one pack (see [`Packs`]) per thread.
pub(super) fn elementwise(len: usize, packs: Packs, threads: usize) -> Grid {
    elementwise_of(len, packs.elements(), threads)
}

/// A grid for `len` elements: blocks of `threads` threads, `each` elements per thread.
pub(super) fn elementwise_of(len: usize, each: usize, threads: usize) -> Grid {
    Grid::line(len.div_ceil(each).div_ceil(threads), threads)
}

/// `n` as an i32 for kernels. At most half of the largest i32, so that a loop's index that steps beyond `n` cannot
/// overflow.
///
/// # Errors
/// When the number is too large.
pub(super) fn count(what: &str, n: usize) -> Result<i32> {
    i32::try_from(n).ok().filter(|&n| n <= i32::MAX / 2).ok_or_else(|| {
        Error::new(format!("too many {what} for one launch"))
            .got(n)
            .allowed(format!("up to {}", i32::MAX / 2))
            .hint("split the tensors into several calls")
            .into()
    })
}

/// The address of the storage's element `index`, or of the storage's end if `index` is the number of elements.
pub(super) fn element<'a>(storage: &'a CudaStorage, index: usize, gpu: &Gpu) -> Result<Address<'a>> {
    match storage.dtype() {
        DType::F32 => address_at(storage.as_cuda_slice::<f32>()?, index, gpu),
        DType::F64 => address_at(storage.as_cuda_slice::<f64>()?, index, gpu),
        DType::F16 => address_at(storage.as_cuda_slice::<f16>()?, index, gpu),
        DType::BF16 => address_at(storage.as_cuda_slice::<bf16>()?, index, gpu),
        DType::U8 => address_at(storage.as_cuda_slice::<u8>()?, index, gpu),
        DType::U32 => address_at(storage.as_cuda_slice::<u32>()?, index, gpu),
        DType::I64 => address_at(storage.as_cuda_slice::<i64>()?, index, gpu),
        other => Err(unsupported_dtype("an op on CUDA", other).into()),
    }
}

/// The address at which a tensor starts.
pub(super) fn start<'a>((storage, layout): Operand<'a>, gpu: &Gpu) -> Result<Address<'a>> {
    element(storage, first_index(layout), gpu)
}

/// The address at which a new contiguous tensor starts.
pub(super) fn start_of<'a>(storage: &'a CudaStorage, gpu: &Gpu) -> Result<Address<'a>> {
    element(storage, 0, gpu)
}

/// A contiguous tensor: the given tensor, or a copy.
#[derive(Debug)]
pub(super) struct Dense<'a> {
    given: &'a CudaStorage,
    copied: Option<CudaStorage>,
    layout: Layout,
}

impl<'a> Dense<'a> {
    pub(super) fn new((storage, layout): Operand<'a>, gpu: &Gpu) -> Result<Self> {
        if layout.is_contiguous() {
            return Ok(Self { given: storage, copied: None, layout: layout.clone() });
        }
        fn room<T: candle_core::cuda_backend::CudaDType + cudarc::driver::DeviceRepr>(
            gpu: &Gpu,
            len: usize,
        ) -> Result<CudaStorage> {
            Ok(gpu.storage(gpu.alloc::<T>(len)?))
        }
        let len = layout.shape().elem_count();
        let mut copy = match storage.dtype() {
            DType::F32 => room::<f32>(gpu, len)?,
            DType::F16 => room::<f16>(gpu, len)?,
            DType::BF16 => room::<bf16>(gpu, len)?,
            DType::U8 => room::<u8>(gpu, len)?,
            DType::U32 => room::<u32>(gpu, len)?,
            DType::I64 => room::<i64>(gpu, len)?,
            other => return Err(unsupported_dtype("an op on CUDA", other).into()),
        };
        storage.copy_strided_src(&mut copy, 0, layout)?;
        Ok(Self { given: storage, copied: Some(copy), layout: Layout::contiguous(layout.shape()) })
    }

    pub(super) fn operand(&self) -> Operand<'_> {
        (self.copied.as_ref().unwrap_or(self.given), &self.layout)
    }

    pub(super) fn start(&self, gpu: &Gpu) -> Result<Address<'_>> {
        start(self.operand(), gpu)
    }
}

/// The largest number of thread blocks that a sum over rows is split into: four times the number of multiprocessors of
/// an H100. The number is the same on every device, and so is the order of additions.
pub(super) const PARTS: usize = 528;

/// Sums each column of `partials`, (parts, width), in a fixed order.
pub(super) fn partial_sums(
    gpu: &Gpu,
    partials: &Buffer<f32>,
    parts: usize,
    width: usize,
    float: Float,
) -> Result<CudaStorage> {
    let out = float.alloc(gpu, width)?;
    let params = params::PartialSums {
        partials: address(partials, gpu),
        out: start_of(&out, gpu)?,
        parts: parts as i32,
        width: width as i32,
    };
    let grid = Grid {
        blocks: (width.div_ceil(SIDE) as u32, 1, 1),
        threads: (SIDE as u32, SIDE as u32, 1),
        shared_bytes: 0,
    };
    launch(gpu, &format!("{}_{}", kernel!("partial_sums"), float.name()), grid, &params)?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_cover_their_rows() {
        for packs in 0..5000 {
            let RowThreads { lanes, rows } = RowThreads::of(packs, 4, 512);
            assert!(lanes.is_power_of_two() && lanes <= 512);
            assert!((lanes * rows).is_multiple_of(32), "{packs}: whole warps");
            assert!(lanes > 32 || lanes * 4 >= packs, "{packs}: a warp keeps its row in registers");
            assert!(lanes == 1 || lanes < packs * 2, "{packs}: {lanes} lanes");
        }
    }
}
