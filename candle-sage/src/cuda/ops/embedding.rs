//! Embedding on the GPU.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result};

use super::ids::{Ids, sort};
use crate::cuda::address::address;
use crate::cuda::compiled::constants::embedding::{PIECE, THREADS};
use crate::cuda::compiled::kernel;
use crate::cuda::floats::{Dense, Float, Packs, RowThreads, count, start, start_of};
use crate::cuda::kernels::{Gpu, Grid};
use crate::cuda::params::{self, launch};
use crate::dtype::Checked;
use crate::launch::{Backward, Launch, Operand};
use crate::ops::embedding::{Embedding, Gradient, Rows};

const NAME: &str = "embedding";

/// Launches the lookup, and does not wait for the check of the ids.
impl Launch<[Operand<'_>; 2], CudaStorage> for Rows {
    fn launch(&self, [table, ids]: [Operand<'_>; 2]) -> Result<CudaStorage> {
        Ok(gather(table, ids)?.0)
    }
}

/// The rows of the table for the ids, the backward, and the result of the check that the ids are in range.
type Forward = (CudaStorage, Backward<1, CudaStorage>, Checked);

impl Launch<[Operand<'_>; 2], Forward> for Embedding {
    fn launch(&self, [table, ids]: [Operand<'_>; 2]) -> Result<Forward> {
        let gpu = Gpu::new(table.0.device())?;
        let (out, places) = gather(table, ids)?;
        let checked = places.checked(&gpu, &Dense::new(ids, &gpu)?)?;
        let (rows, _) = table.1.shape().dims2()?;
        Ok((out, Box::new(Saved { ids: places, rows }), checked))
    }
}

#[derive(Debug)]
struct Saved {
    ids: Ids,
    rows: usize,
}

/// Launches the gradient's kernels, and does not wait for the check of the ids.
impl Launch<[Operand<'_>; 2], CudaStorage> for Gradient {
    fn launch(&self, [ids, dout]: [Operand<'_>; 2]) -> Result<CudaStorage> {
        let gpu = Gpu::new(ids.0.device())?;
        let ids = Ids::new(&gpu, NAME, &Dense::new(ids, &gpu)?, self.rows, None)?;
        Saved { ids, rows: self.rows }.launch([dout])
    }
}

/// The rows of the table for the ids; NaN for ids that are not in the table. The table may have any strides.
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
    let team = RowThreads::of(width / packs.elements(), 1, THREADS);
    let params = params::Embedding {
        from,
        ids: places.places(0, &gpu)?,
        out: start_of(&out, &gpu)?,
        row_stride: row_stride as i64,
        column_stride: column_stride as i64,
        len: count("ids", len)?,
        width: count("columns", width)?,
        lanes: team.lanes as i32,
        ..Default::default()
    };
    launch(&gpu, &packs.kernel(kernel!("embedding_fwd")), team.grid(len, usize::MAX), &params)?;
    Ok((out, places))
}

/// The gradient of the table, (rows, width), summed in an order that depends only on the ids.
impl Launch<[Operand<'_>; 1], CudaStorage> for Saved {
    fn launch(&self, [dout]: [Operand<'_>; 1]) -> Result<CudaStorage> {
        let gpu = Gpu::new(dout.0.device())?;
        let float = Float::of(NAME, dout.0)?;
        let (rows, width) = (self.rows, dout.1.dims().last().copied().unwrap_or(1));
        let len = dout.1.shape().elem_count() / width;
        let dout = Dense::new(dout, &gpu)?;
        let sorted = sort(&gpu, &self.ids, rows)?;
        let starts = gpu.alloc::<u32>(rows + 1)?;
        let pieces = gpu.alloc::<f32>(len / PIECE * width)?;
        let out = float.alloc(&gpu, rows * width)?;
        let from = dout.start(&gpu)?;
        let packs = Packs::of(float, &[from], &[width]);
        let team = RowThreads::of(width / packs.elements(), 1, THREADS);
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
        launch(
            &gpu,
            kernel!("embedding_starts"),
            Grid::line((rows + 1).div_ceil(THREADS), THREADS),
            &params,
        )?;
        launch(
            &gpu,
            &packs.kernel(kernel!("embedding_pieces")),
            team.grid(len / PIECE, usize::MAX),
            &params,
        )?;
        launch(&gpu, &packs.kernel(kernel!("embedding_bwd")), team.grid(rows, usize::MAX), &params)?;
        Ok(out)
    }
}
