//! Muon's passes over matrices on the GPU.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result};
use half::bf16;

use super::tensor::{Float, PARTS, count, element, start};
use crate::cuda::address::{Address, address, address_at, first_index};
use crate::cuda::compiled::constants::muon::{THREADS, V, V16};
use crate::cuda::compiled::kernel;
use crate::cuda::kernels::{Gpu, Grid};
use crate::cuda::params::{self, launch};
use crate::error::Error;
use crate::launch::{Launch, Operand};
use crate::ops::muon::{Direction, Polynomial, Update};

/// Blocks over `len` elements, a pack of `each` a thread and turn.
fn line(len: usize, each: usize) -> Grid {
    Grid::line(len.div_ceil(THREADS * each).clamp(1, PARTS), THREADS)
}

fn check_starts(starts: &[Address<'_>], len: usize) -> Result<()> {
    if starts.iter().all(|start| start.is_multiple_of(16)) && len.is_multiple_of(V16) {
        return Ok(());
    }
    Err(Error::unsupported("muon on CUDA moves 16 bytes at a time")
        .got(format!("a matrix of {len} elements"))
        .allowed("matrices that start on 16 bytes, of a multiple of 8 elements")
        .hint("leave gaps between matrices; AdamW takes any number of elements")
        .into())
}

impl Launch<[Operand<'_>; 3], CudaStorage> for Direction {
    fn launch(&self, [state, gradient, sum_of_squares]: [Operand<'_>; 3]) -> Result<CudaStorage> {
        let gpu = Gpu::new(state.0.device())?;
        let (_, parameters) = state.1.shape().dims2()?;
        let (count, rows, columns) = self.dims;
        let len = rows * columns;
        let directions = gpu.alloc::<bf16>(count * len)?;
        let partials = gpu.alloc::<f32>(PARTS)?;
        let first = first_index(state.1) + parameters;
        for (n, &at) in self.starts.iter().enumerate() {
            let direction = address_at(&directions, n * len, &gpu)?;
            let grid = line(len, V);
            let params = params::MuonMomentum {
                momentum: element(state.0, first + at, &gpu)?,
                gradient: element(gradient.0, first_index(gradient.1) + at, &gpu)?,
                sum_of_squares: start(sum_of_squares, &gpu)?,
                direction,
                partials: address(&partials, &gpu),
                len: len as i64,
                factor: self.settings.gradient_factor as f32,
                clip: self.settings.clip.map_or(f32::INFINITY, |clip| clip as f32),
                beta: self.settings.momentum as f32,
                nesterov: self.settings.nesterov.into(),
            };
            check_starts(&[params.momentum, params.gradient], len)?;
            launch(&gpu, kernel!("muon_momentum"), grid, &params)?;
            let params = params::MuonNormalize {
                direction,
                partials: address(&partials, &gpu),
                len: len as i64,
                parts: grid.blocks.0 as i32,
                padding: 0,
            };
            launch(&gpu, kernel!("muon_normalize"), line(len, V16), &params)?;
        }
        Ok(CudaStorage::wrap_cuda_slice(directions, gpu.device.clone()))
    }
}

/// The state, the directions and the sum of squares, and the 16-bit copy of the weights.
type Tensors<'a> = ([Operand<'a>; 3], Option<Operand<'a>>);

impl Launch<Tensors<'_>, ()> for Update<'_> {
    fn launch(&self, ([state, directions, sum_of_squares], copy): Tensors<'_>) -> Result<()> {
        let gpu = Gpu::new(state.0.device())?;
        let (_, rows, columns) = self.dims;
        let len = rows * columns;
        let [keep, rate] = self.settings.factors(rows, columns);
        for (n, &at) in self.starts.iter().enumerate() {
            let (copy, copy_type) = match copy {
                None => (Address::NULL, Float::F32),
                Some(copy) => (element(copy.0, first_index(copy.1) + at, &gpu)?, Float::of("muon", copy.0)?),
            };
            let params = params::MuonApply {
                weights: element(state.0, first_index(state.1) + at, &gpu)?,
                direction: element(directions.0, first_index(directions.1) + n * len, &gpu)?,
                sum_of_squares: start(sum_of_squares, &gpu)?,
                copy,
                len: len as i64,
                rate,
                keep,
                copy_type: copy_type as i32,
                padding: 0,
            };
            check_starts(&[params.weights, params.copy], len)?;
            launch(&gpu, kernel!("muon_apply"), line(len, V), &params)?;
        }
        Ok(())
    }
}

impl Launch<[Operand<'_>; 2], ()> for Polynomial {
    fn launch(&self, [y, x]: [Operand<'_>; 2]) -> Result<()> {
        let gpu = Gpu::new(y.0.device())?;
        let (len, (_, size, _)) = (y.1.shape().elem_count(), y.1.shape().dims3()?);
        let [a, b, c] = self.0;
        let (x, y) = (start(x, &gpu)?, start(y, &gpu)?);
        let params = params::MuonCombine { x, y, len: len as i64, size: count("rows", size)?, a, b, c };
        launch(
            &gpu,
            kernel!("muon_combine"),
            Grid::line(len.div_ceil(THREADS * V16).max(1), THREADS),
            &params,
        )
    }
}
