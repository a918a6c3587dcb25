//! SLA2's router on the GPU: the means of blocks of queries or keys, the choice of the key blocks with the largest
//! scores, and the sums of dense attention's probabilities over blocks.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result};

use super::address::{address, address_at, first_index};
use super::call::Geometry;
use super::candle::view;
use super::compiled::constants::selection::{POOL_THREADS, WARPS};
use super::compiled::kernel;
use super::kernels::{Gpu, Grid};
use super::params::{self, launch};
use super::plan::{self, Plan, Visits};
use super::selection::{check_blocks, lists_at};
use super::tensor::Element;
use crate::launch::{Launch, Operand};
use crate::ops::route::{Choice, Mass, Means};

/// The op of `pool_queries` and `pool_keys` (`ops/route.rs`).
impl Launch<[Operand<'_>; 1], CudaStorage> for Means<'_> {
    fn launch(&self, [x]: [Operand<'_>; 1]) -> Result<CudaStorage> {
        let Self { shape, blocks, pool } = *self;
        check_blocks(blocks)?;
        let gpu = Gpu::new(x.0.device())?;
        plan::small_head_dim(shape)?;
        let geometry = Geometry::new(&gpu, shape)?;
        let count = if pool.is_some() { blocks.rows() } else { blocks.all_key_blocks() };
        let means = gpu.alloc::<f32>(blocks.key_heads * count * shape.head_dim())?;
        let params = params::Pool {
            x: view(x, &gpu)?,
            means: address(&means, &gpu),
            shape: geometry.shape(&gpu),
            query: pool.is_some().into(),
            heads: if pool.is_some() { shape.group() } else { 1 } as i32,
            pool: pool.unwrap_or(0).min(i32::MAX as usize) as i32,
            blocks: count as i32,
        };
        let grid = Grid { blocks: (count as u32, blocks.key_heads as u32, 1), ..Grid::line(1, POOL_THREADS) };
        let element = Element::of(x.0.dtype())?;
        launch(&gpu, &format!("{}_{}", kernel!("pool"), element.name()), grid, &params)?;
        Ok(gpu.storage(means))
    }
}

/// The lists of the selected blocks of keys, (key heads, blocks of queries, 1 + width). A row contains a list's
/// length, then the list.
impl Launch<[Operand<'_>; 1], CudaStorage> for Choice<'_> {
    fn launch(&self, [(storage, layout)]: [Operand<'_>; 1]) -> Result<CudaStorage> {
        let Self { shape, blocks, most, nearest, width } = *self;
        check_blocks(blocks)?;
        let gpu = Gpu::new(storage.device())?;
        let geometry = Geometry::new(&gpu, shape)?;
        // No kernel reads the entries after a list's end, but a copy of the whole tensor does, so they are zeroed.
        let lists = gpu.alloc_zeros::<u32>(blocks.key_heads * blocks.rows() * (1 + width))?;
        let params = params::Choose {
            scores: address_at(storage.as_cuda_slice::<f32>()?, first_index(layout), &gpu)?,
            lists: lists_at(address(&lists, &gpu), blocks, 1 + width),
            shape: geometry.shape(&gpu),
            columns: blocks.columns() as i32,
            most: most.min(i32::MAX as usize) as i32,
            nearest: nearest.min(most).min(i32::MAX as usize) as i32,
            padding: 0,
        };
        let grid = Grid {
            blocks: (blocks.rows().div_ceil(WARPS) as u32, blocks.key_heads as u32, 1),
            ..Grid::line(1, WARPS * 32)
        };
        launch(&gpu, kernel!("choose_blocks"), grid, &params)?;
        Ok(gpu.storage(lists))
    }
}

/// The attention mass of each block of queries on each block of keys that it may select: dense attention's
/// probabilities, summed over the queries and keys of the two blocks and over the query heads that share a key head.
/// Returns (key heads, query blocks, `blocks.columns()`).
impl Launch<[Operand<'_>; 2], CudaStorage> for Mass<'_> {
    fn launch(&self, [q, k]: [Operand<'_>; 2]) -> Result<CudaStorage> {
        let Self { shape, blocks, softmax_scale } = *self;
        check_blocks(blocks)?;
        let gpu = Gpu::new(q.0.device())?;
        let d = plan::small_head_dim(shape)?;
        let geometry = Geometry::new(&gpu, shape)?;
        let mass = gpu.alloc_zeros::<f32>(blocks.key_heads * blocks.rows() * blocks.columns())?;
        let (q, element) = (view(q, &gpu)?, Element::of(q.0.dtype())?);
        let k = view(k, &gpu)?;
        let params = params::Mass {
            forward: params::Forward {
                q,
                k,
                v: k,
                shape: params::Shape { softmax_scale, ..geometry.shape(&gpu) },
                ..params::Forward::default()
            },
            mass: address(&mass, &gpu),
            query_blocks: blocks.rows() as i32,
            columns: blocks.columns() as i32,
        };
        let (longest, _) = geometry.blocks();
        let plan = Plan::of("block_mass", (d, d), gpu.architecture, Visits::Listed)?;
        let grid = Grid {
            blocks: (longest as u32, geometry.segment_count() as u32, blocks.key_heads as u32),
            shared_bytes: plan.shared_bytes,
            ..Grid::line(1, plan.threads)
        };
        launch(&gpu, &format!("block_mass_{}_{d}", element.name()), grid, &params)?;
        Ok(gpu.storage(mass))
    }
}
