//! The linear attention of SLA2 (its tail) on the GPU: states that are summed along the sequence, and matmuls with
//! these states.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result};
use half::bf16;

use super::address::address;
use super::buffer::Buffer;
use super::call::Geometry;
use super::candle::view;
use super::compiled::constants::past_linear_block::THREADS;
use super::compiled::kernel;
use super::kernels::{Gpu, Grid};
use super::params::Linear;
use super::params::{View, launch};
use super::plan::{self, Plan, TILE, Visits};
use super::selection::check_blocks;
use super::tensor::{Element, Output};
use crate::launch::{Launch, Operand};
use crate::ops::past_linear::{Gradients, PastLinear};
use crate::shape::AttentionShape;

/// The number of chunks into which sequences of at most `longest` blocks of tokens are split, so that the launches take
/// the least time. With one chunk per sequence, all sequences together take `parts` thread blocks. A multiprocessor
/// runs one thread block at a time.
fn chunks(longest: usize, parts: usize, multiprocessors: usize) -> usize {
    // A step is the time that a thread block takes for one block of tokens. A wave is the thread blocks that run at the
    // same time. With several chunks per sequence, each wave takes one more step to write the sums of its chunks, and
    // the launch that adds these sums takes one step.
    let steps = |chunks: usize| {
        let waves = (parts * chunks).div_ceil(multiprocessors);
        let adding = if chunks > 1 { 1 + waves } else { 0 };
        waves * longest.div_ceil(chunks) + adding
    };
    (1..=longest.max(1)).min_by_key(|&chunks| steps(chunks)).unwrap_or(1)
}

/// State that the launches of a call share.
pub(super) struct Call<'a> {
    pub(super) gpu: Gpu,
    shape: &'a AttentionShape,
    element: Element,
    d: usize,
    geometry: Geometry,
    inputs: [Operand<'a>; 3],
    blocks: usize,
    chunks: usize,
    chunk_blocks: usize,
    /// Number of thread blocks among which the columns of a state are divided.
    split: usize,
    states: Buffer<bf16>,
    sums: Buffer<f32>,
    chunk_sums: Buffer<f32>,
    chunk_states: Buffer<bf16>,
}

impl<'a> Call<'a> {
    pub(super) fn new(op: &'a PastLinear, inputs: [Operand<'a>; 3]) -> Result<Self> {
        let (shape, blocks) = (&op.shape, op.selection.blocks());
        check_blocks(blocks)?;
        let gpu = Gpu::new(inputs[0].0.device())?;
        let (d, geometry) = (plan::small_head_dim(shape)?, Geometry::new(&gpu, shape)?);
        let heads = shape.key_heads() * geometry.segment_count();
        let (longest, _) = geometry.blocks();
        let plan = Plan::of("linear_scan_blocks", (d, d), gpu.architecture, Visits::Listed)?;
        let split = 2 * d / plan.row_bytes;
        // The number of sequences if each had `longest` blocks.
        let sequences = blocks.rows().div_ceil(longest.max(1));
        let chunks = chunks(longest, shape.key_heads() * sequences * split, gpu.multiprocessors);
        let chunk_blocks = longest.div_ceil(chunks);
        let chunks = longest.div_ceil(chunk_blocks.max(1));
        let count = shape.key_heads() * blocks.rows();
        let states = gpu.alloc::<bf16>(count * d * d)?; // or f16: both take 2 bytes
        let in_chunks = if chunks > 1 { heads * chunks } else { 0 };
        let (sums, chunk_sums) = (gpu.alloc::<f32>(count * d)?, gpu.alloc::<f32>(in_chunks * (d + 1) * d)?);
        let chunk_states = gpu.alloc::<bf16>(in_chunks * d * d)?;
        let (element, blocks) = (Element::of(inputs[0].0.dtype())?, blocks.rows());
        Ok(Self {
            gpu,
            shape,
            element,
            d,
            geometry,
            inputs,
            blocks,
            chunks,
            chunk_blocks,
            split,
            states,
            sums,
            chunk_sums,
            chunk_states,
        })
    }

    /// The parameters that all kernels need.
    pub(super) fn params(&self) -> Result<Linear<'_>> {
        let (gpu, [q, k, v]) = (&self.gpu, self.inputs);
        Ok(Linear {
            q: view(q, gpu)?,
            k: view(k, gpu)?,
            v: view(v, gpu)?,
            states: address(&self.states, gpu),
            sums: address(&self.sums, gpu),
            chunk_sums: address(&self.chunk_sums, gpu),
            chunk_states: address(&self.chunk_states, gpu),
            shape: self.geometry.shape(gpu),
            blocks: self.blocks as i32,
            chunks: self.chunks as i32,
            chunk_blocks: self.chunk_blocks as i32,
            ..Linear::default()
        })
    }

    /// Launches a kernel with a grid of `blocks` x segments (batch entries or documents) x `heads`.
    fn launch(&self, kernel: &str, blocks: usize, heads: usize, params: &Linear<'_>) -> Result<()> {
        let plan = Plan::of(kernel, (self.d, self.d), self.gpu.architecture, Visits::Listed)?;
        let grid = Grid {
            blocks: (blocks as u32, self.geometry.segment_count() as u32, heads as u32),
            shared_bytes: plan.shared_bytes,
            ..Grid::line(1, plan.threads)
        };
        launch(&self.gpu, &format!("{kernel}_{}_{}", self.element.name(), self.d), grid, params)
    }

    /// Computes the states H and z, which `kernels/past_linear.cu` defines. The states of a block of queries are sums
    /// over all keys before the block. With `params.backward`, the states of a block of keys are sums over all queries
    /// after the block.
    fn make_states(&self, params: &Linear<'_>) -> Result<()> {
        let heads = self.shape.key_heads();
        self.launch(kernel!("linear_scan_blocks"), self.chunks * self.split, heads, params)?;
        if self.chunks > 1 { self.add_chunks(heads, params) } else { Ok(()) }
    }

    /// For each chunk of a sequence: sums the states (`make_states`) of all earlier chunks or, with
    /// `params.backward`, of all later chunks.
    fn add_chunks(&self, heads: usize, params: &Linear<'_>) -> Result<()> {
        let values = (self.d + 1) * self.d;
        let lines = heads * self.geometry.segment_count();
        let grid =
            Grid { blocks: (values.div_ceil(THREADS) as u32, lines as u32, 1), ..Grid::line(1, THREADS) };
        launch(
            &self.gpu,
            &format!("{}_{}_{}", kernel!("linear_scan_chunks"), self.element.name(), self.d),
            grid,
            params,
        )
    }

    fn multiply(&self, kernel: &str, heads: usize, params: &Linear<'_>) -> Result<()> {
        let (longest, _) = self.geometry.blocks();
        self.launch(kernel, longest, heads, params)
    }

    /// Returns the output of the linear attention. With `params.mixture`, returns the weighted sum of this output and
    /// `params.sparse`, the output of attention to the selected blocks.
    pub(super) fn forward(&self, params: Linear<'_>) -> Result<CudaStorage> {
        let out = Output::for_candle(&self.gpu, self.element, self.shape.query_dims())?;
        let params = Linear { out: out.view(&self.gpu), ..params };
        self.make_states(&params)?;
        self.multiply(kernel!("linear_forward"), self.shape.query_heads(), &params)?;
        Ok(out.storage(&self.gpu))
    }

    /// Writes the gradients to `dq`, `dk` and `dv`, or adds them if `params.add` is 1. The forward's states are
    /// recomputed (`make_states`), not kept, since they can be as large as K.
    pub(super) fn backward(
        &self,
        params: Linear<'_>,
        dout: Operand<'_>,
        [dq, dk, dv]: [View<'_>; 3],
    ) -> Result<()> {
        let padded = self.shape.query_heads() * self.geometry.sizes.query_tiles as usize * TILE;
        let rows = self.gpu.alloc::<f32>(2 * padded)?;
        let (dout, rows) = (view(dout, &self.gpu)?, address(&rows, &self.gpu));
        let mut params = Linear { dout, dq, dk, dv, rows, ..params };
        self.make_states(&params)?;
        self.multiply(kernel!("linear_backward_queries"), self.shape.query_heads(), &params)?;
        params.backward = 1;
        self.make_states(&params)?;
        self.multiply(kernel!("linear_backward_keys"), self.shape.key_heads(), &params)
    }
}

/// The output, contiguous.
impl Launch<[Operand<'_>; 3], CudaStorage> for PastLinear {
    fn launch(&self, inputs: [Operand<'_>; 3]) -> Result<CudaStorage> {
        let call = Call::new(self, inputs)?;
        call.forward(call.params()?)
    }
}

/// The gradients of query, key and value, contiguous.
impl Launch<[Operand<'_>; 4], [CudaStorage; 3]> for Gradients<'_> {
    fn launch(&self, [q, k, v, dout]: [Operand<'_>; 4]) -> Result<[CudaStorage; 3]> {
        let shape = &self.0.shape;
        let call = Call::new(self.0, [q, k, v])?;
        let gpu = &call.gpu;
        let dq = Output::for_candle(gpu, call.element, shape.query_dims())?;
        let dk = Output::for_candle(gpu, call.element, shape.key_dims())?;
        let dv = Output::for_candle(gpu, call.element, shape.key_dims())?;
        call.backward(call.params()?, dout, [dq.view(gpu), dk.view(gpu), dv.view(gpu)])?;
        Ok([dq, dk, dv].map(|gradient| gradient.storage(gpu)))
    }
}

/// Adds the gradients of query, key and value to `dq`, `dk` and `dv` in place.
impl Launch<[Operand<'_>; 7], ()> for Gradients<'_> {
    fn launch(&self, [q, k, v, dout, dq, dk, dv]: [Operand<'_>; 7]) -> Result<()> {
        let call = Call::new(self.0, [q, k, v])?;
        let onto = [view(dq, &call.gpu)?, view(dk, &call.gpu)?, view(dv, &call.gpu)?];
        call.backward(Linear { add: 1, ..call.params()? }, dout, onto)
    }
}

#[cfg(test)]
mod tests {
    use super::chunks;

    #[test]
    fn chunks_fill_the_gpu() {
        // 128 thread blocks (the second argument times the result): at most one for each of the 132 multiprocessors.
        assert_eq!(chunks(32, 128, 132), 1);
        assert_eq!(chunks(32, 64, 132), 2);
        assert_eq!(chunks(128, 16, 132), 8);
        assert_eq!(chunks(256, 8, 132), 16);
        // Many heads fill the GPU without chunks.
        assert_eq!(chunks(32, 1000, 132), 1);
        // Short sequences, and no sequence.
        assert_eq!(chunks(1, 2, 132), 1);
        assert_eq!(chunks(3, 2, 132), 1);
        assert_eq!(chunks(0, 2, 132), 1);
    }
}
