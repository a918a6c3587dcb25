//! Token ids on the GPU: checked against the number of rows of the embedding table, and sorted.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, DType, Result};

use crate::cuda::address::{Address, address, address_at, address_if_any};
use crate::cuda::buffer::Buffer;
use crate::cuda::compiled::constants::ids::{DIGIT_BITS, THREADS, TILE};
use crate::cuda::compiled::kernel;
use crate::cuda::floats::{Dense, count};
use crate::cuda::kernels::{Gpu, Grid};
use crate::cuda::params::{self, launch};
use crate::dtype::Checked;
use crate::error::Error;

/// Ids as row numbers of a table.
#[derive(Debug)]
pub(super) struct Ids {
    places: Buffer<u32>,
    /// The result of the check of the ids: see `CheckIds` in `kernels/include/sage/params/ops.cuh`.
    status: Buffer<u32>,
    len: usize,
}

impl Ids {
    /// Launches the check that each id is below `limit` or equals `ignored`. [`Ids::checked`] reads the check's result.
    pub(super) fn new(
        gpu: &Gpu,
        op: &str,
        ids: &Dense<'_>,
        limit: usize,
        ignored: Option<i64>,
    ) -> Result<Self> {
        let (storage, layout) = ids.operand();
        let name = match storage.dtype() {
            DType::U8 => "u8",
            DType::U32 => "u32",
            DType::I64 => "i64",
            other => {
                return Err(Error::new(format!("{op} does not support ids or targets of this type"))
                    .got(other.as_str())
                    .allowed("u8, u32, i64")
                    .hint("convert with `to_dtype(DType::U32)`")
                    .into());
            }
        };
        let len = layout.shape().elem_count();
        let made = Self { places: gpu.alloc(len)?, status: gpu.alloc_zeros(2)?, len };
        let params = params::CheckIds {
            ids: ids.start(gpu)?,
            places: address(&made.places, gpu),
            status: address(&made.status, gpu),
            limit: limit as i64,
            ignored: ignored.unwrap_or_default(),
            ignores: ignored.is_some().into(),
            len: count("ids", len)?,
        };
        let grid = Grid::line(len.div_ceil(THREADS), THREADS);
        launch(gpu, &format!("{}_{name}", kernel!("check_ids")), grid, &params)?;
        Ok(made)
    }

    /// The address of id number `first` in `places`, which contains the ids as u32.
    pub(super) fn places(&self, first: usize, gpu: &Gpu) -> Result<Address<'_>> {
        address_at(&self.places, first, gpu)
    }

    pub(super) fn status(&self, gpu: &Gpu) -> Address<'_> {
        address(&self.status, gpu)
    }

    /// Reads the check's result, and so waits for all work that was launched before: callers call this function last.
    pub(super) fn checked(&self, gpu: &Gpu, ids: &Dense<'_>) -> Result<Checked> {
        let status = gpu.device().clone_dtoh(&self.status)?;
        let bad = match status[0] as usize {
            0 => None,
            from_the_end => Some(one(gpu, ids, self.len - from_the_end)?),
        };
        Ok(Checked { bad, counted: status[1] as usize })
    }
}

/// One id, read back from the device.
fn one(gpu: &Gpu, ids: &Dense<'_>, at: usize) -> Result<i64> {
    fn read<T>(gpu: &Gpu, storage: &CudaStorage, at: usize) -> Result<i64>
    where
        T: candle_core::cuda_backend::CudaDType + cudarc::driver::DeviceRepr + Into<i64> + Copy,
    {
        Ok(gpu.device().clone_dtoh(&storage.as_cuda_slice::<T>()?.slice(at..=at))?[0].into())
    }
    let (storage, layout) = ids.operand();
    let at = layout.start_offset() + at;
    match storage.dtype() {
        DType::U8 => read::<u8>(gpu, storage, at),
        DType::U32 => read::<u32>(gpu, storage, at),
        _ => read::<i64>(gpu, storage, at),
    }
}

/// Sorted ids, and the original position of each id.
#[derive(Debug)]
pub(super) struct Sorted {
    pub(super) ids: Buffer<u32>,
    pub(super) order: Buffer<u32>,
}

/// Sorts ids below `limit`, stably.
pub(super) fn sort(gpu: &Gpu, ids: &Ids, limit: usize) -> Result<Sorted> {
    let room = || -> Result<Sorted> { Ok(Sorted { ids: gpu.alloc(ids.len)?, order: gpu.alloc(ids.len)? }) };
    let tiles = ids.len.div_ceil(TILE);
    let counts = gpu.alloc::<u32>(tiles << DIGIT_BITS)?;
    let grid = Grid::line(tiles, THREADS);
    // The number of bits of `limit`. Valid ids are below `limit`. All bits of NO_PLACE (an invalid or ignored id) are
    // ones, so its lowest `bits` bits are at least `limit`, and it sorts last.
    let bits = (usize::BITS - limit.leading_zeros()) as usize;
    let mut sorted: Option<Sorted> = None;
    for pass in 0..bits.div_ceil(DIGIT_BITS).max(1) {
        let next = room()?;
        let params = params::SortIds {
            ids: address(sorted.as_ref().map_or(&ids.places, |last| &last.ids), gpu),
            order: address_if_any(sorted.as_ref().map(|last| &last.order), gpu),
            sorted_ids: address(&next.ids, gpu),
            sorted_order: address(&next.order, gpu),
            counts: address(&counts, gpu),
            len: ids.len as i32,
            shift: (pass * DIGIT_BITS) as i32,
        };
        launch(gpu, kernel!("count_digits"), grid, &params)?;
        launch(gpu, kernel!("place_digits"), grid, &params)?;
        sorted = Some(next);
    }
    sorted.map_or_else(room, Ok)
}
