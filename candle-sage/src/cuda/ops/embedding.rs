//! Embedding on the GPU: the rows of a table that ids name.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result};

use super::Checked;
use super::ids::{Ids, sort};
use super::params::{self, launch};
use super::tensor::{Dense, Float, Packs, Team, count, start, start_of};
use crate::cuda::Operand;
use crate::cuda::kernels::{Gpu, Grid};
use crate::cuda::tensor::address;

const NAME: &str = "embedding";

/// Threads of a block, and ids of a piece, as in `kernels/embedding.cu`.
const THREADS: usize = 256;
const PIECE: usize = 32;

/// [`forward`] without waiting for the check of the ids.
pub(crate) fn rows(table: Operand<'_>, ids: Operand<'_>) -> Result<CudaStorage> {
    Ok(gather(table, ids)?.0)
}

/// Checked ids, for the backward.
#[derive(Debug)]
pub(crate) struct Saved(Ids);

impl Saved {
    /// Ids for a backward alone, without waiting for their check.
    pub(crate) fn new(ids: Operand<'_>, rows: usize) -> Result<Self> {
        let gpu = Gpu::new(ids.0.device())?;
        Ok(Self(Ids::new(&gpu, NAME, &Dense::new(ids, &gpu)?, rows, None)?))
    }
}

/// The rows, (ids, width), and what the check of the ids found.
pub(crate) fn forward(table: Operand<'_>, ids: Operand<'_>) -> Result<(CudaStorage, Saved, Checked)> {
    let gpu = Gpu::new(table.0.device())?;
    let (out, places) = gather(table, ids)?;
    let checked = places.checked(&gpu, &Dense::new(ids, &gpu)?)?;
    Ok((out, Saved(places), checked))
}

/// The rows; NaN for ids that are not in the table. The table is read in place.
fn gather(table: Operand<'_>, ids: Operand<'_>) -> Result<(CudaStorage, Ids)> {
    let gpu = Gpu::new(table.0.device())?;
    let float = Float::of(NAME, table.0)?;
    let (rows, width) = table.1.shape().dims2()?;
    let len = ids.1.shape().elem_count();
    let ids = Dense::new(ids, &gpu)?;
    let places = Ids::new(&gpu, NAME, &ids, rows, None)?;
    let out = float.alloc(&gpu, len * width)?;
    let (row_stride, column_stride) = (table.1.stride()[0], table.1.stride()[1]);
    let from = start(table, &gpu)?;
    let packs = match column_stride {
        1 => Packs::of(float, &[from], &[row_stride, width]),
        _ => Packs::single(float),
    };
    let team = Team::of(width / packs.elements(), 1, THREADS);
    let params = params::Embedding {
        from,
        ids: places.places(&gpu),
        out: start_of(&out, &gpu)?,
        row_stride: row_stride as i64,
        column_stride: column_stride as i64,
        len: count("ids", len)?,
        width: count("columns", width)?,
        lanes: team.lanes as i32,
        ..Default::default()
    };
    launch(&gpu, &packs.kernel("embedding_fwd"), team.grid(len, usize::MAX), &params)?;
    Ok((out, places))
}

/// The gradient of the table, (rows, width), summed in an order that the ids alone decide.
pub(crate) fn backward(saved: &Saved, dout: Operand<'_>, rows: usize, width: usize) -> Result<CudaStorage> {
    let gpu = Gpu::new(dout.0.device())?;
    let float = Float::of(NAME, dout.0)?;
    let len = dout.1.shape().elem_count() / width;
    let dout = Dense::new(dout, &gpu)?;
    let sorted = sort(&gpu, &saved.0, rows)?;
    let starts = gpu.alloc::<u32>(rows + 1)?;
    let pieces = gpu.alloc::<f32>(len / PIECE * width)?;
    let out = float.alloc(&gpu, rows * width)?;
    let from = dout.start(&gpu)?;
    let packs = Packs::of(float, &[from], &[width]);
    let team = Team::of(width / packs.elements(), 1, THREADS);
    let params = params::Embedding {
        from,
        ids: address(&sorted.ids, &gpu),
        order: address(&sorted.order, &gpu),
        starts: address(&starts, &gpu),
        pieces: address(&pieces, &gpu),
        out: start_of(&out, &gpu)?,
        len: count("ids", len)?,
        rows: count("rows", rows)?,
        width: count("columns", width)?,
        lanes: team.lanes as i32,
        ..Default::default()
    };
    launch(&gpu, "embedding_starts", Grid::line((rows + 1).div_ceil(THREADS), THREADS as u32), &params)?;
    launch(&gpu, &packs.kernel("embedding_pieces"), team.grid(len / PIECE, usize::MAX), &params)?;
    launch(&gpu, &packs.kernel("embedding_bwd"), team.grid(rows, usize::MAX), &params)?;
    Ok(out)
}
