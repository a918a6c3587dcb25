//! Attention on NVIDIA GPUs: the kernels of `kernels/`, launched on candle's own stream.
//!
//! As on the CPU, `forward` and `backward` are the same for all schemes, and what a scheme does besides is in the file
//! of its name. The only place with `unsafe`, besides the CPU's matrix product.

pub(crate) mod gemm;
#[cfg(test)]
mod guard;
mod kernels;
pub(crate) mod ops;
mod params;
mod plan;
mod sagebwd;
#[cfg(test)]
mod selftest;
mod tensor;

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Layout, Result};
use cudarc::driver::CudaSlice;
pub(crate) use kernels::Gpu;
use kernels::Grid;
use plan::{Plan, TILE};
use sagebwd::Codes;
use tensor::{Element, address, tensor_map, view};

use crate::error::Error;
use crate::scheme::Scheme;
use crate::shape::AttentionShape;

/// One tensor: what candle hands to an op.
pub(crate) type Operand<'a> = (&'a CudaStorage, &'a Layout);

/// What a forward keeps for its backward.
#[derive(Debug)]
pub(crate) struct Saved {
    /// Minus the base-2 log-sum-exp, (query heads, padded query).
    minus_lse2: CudaSlice<f32>,
    /// Of Q and K; none in full precision.
    codes: Option<Codes>,
}

/// One attention call: what [`crate::cpu::Problem`] is on the CPU.
#[derive(Debug)]
pub(crate) struct Problem<'a> {
    pub(crate) shape: &'a AttentionShape,
    pub(crate) softmax_scale: f32,
    /// Gradients bit-equal over repeats, at some cost in time.
    pub(crate) deterministic: bool,
    pub(crate) q: Operand<'a>,
    pub(crate) k: Operand<'a>,
    pub(crate) v: Operand<'a>,
}

/// What all launches of a call share.
struct Call<'a> {
    gpu: Gpu,
    element: Element,
    /// head_dim as padded inside the kernels.
    d: usize,
    shape: params::Shape,
    problem: &'a Problem<'a>,
    /// The packed documents; keeps the memory behind `shape.segments`.
    _segments: Option<CudaSlice<params::Segment>>,
}

impl<'a> Call<'a> {
    fn new(problem: &'a Problem<'a>) -> Result<Self> {
        let shape = problem.shape;
        if problem.softmax_scale.is_nan() || problem.softmax_scale <= 0.0 {
            return Err(Error::new("softmax scale is out of range on CUDA")
                .got(problem.softmax_scale)
                .allowed("above 0")
                .hint("negate the query for a negative scale; the CPU takes any")
                .into());
        }
        let gpu = Gpu::new(problem.q.0.device())?;
        let (lengths, table, tiles) = segments(shape)?;
        let packed = !table.is_empty();
        let segments = packed.then(|| gpu.device.clone_htod(&table)).transpose()?;
        Ok(Self {
            element: Element::of(problem.q.0.dtype())?,
            d: plan::padded_head_dim(shape)?,
            shape: params::Shape {
                segments: segments.as_ref().map_or(0, |s| address(s, &gpu)),
                segment_count: if packed { table.len() } else { shape.batch() } as i32,
                query_len: lengths.0 as i32,
                key_len: lengths.1 as i32,
                query_heads: shape.query_heads() as i32,
                key_heads: shape.key_heads() as i32,
                head_dim: shape.head_dim() as i32,
                causal: shape.causal().into(),
                softmax_scale: problem.softmax_scale,
                query_tiles: tiles.0 as i32,
                key_tiles: tiles.1 as i32,
                ..params::Shape::default()
            },
            gpu,
            problem,
            _segments: segments,
        })
    }

    /// The shape, for a kernel whose blocks share `bytes` of each of `heads` heads.
    fn shape_sharing(&self, plan: &Plan, bytes: usize, heads: usize) -> params::Shape {
        let heads = heads * self.segment_count();
        let at_once = plan::heads_at_once(self.gpu.cache_bytes, plan.cache_parts, bytes, heads);
        params::Shape { heads_at_once: at_once as i32, ..self.shape }
    }

    fn segment_count(&self) -> usize {
        self.shape.segment_count as usize
    }
    /// Tiles of queries of all segments and heads.
    fn query_tiles(&self) -> usize {
        self.shape.query_tiles as usize * self.problem.shape.query_heads()
    }
    /// Tiles of keys of all segments and heads.
    fn key_tiles(&self) -> usize {
        self.shape.key_tiles as usize * self.problem.shape.key_heads()
    }

    /// A kernel's full name.
    fn kernel(&self, what: &str) -> String {
        format!("{what}_{}_{}", self.element.name(), self.d)
    }

    fn view(&self, (storage, layout): Operand<'_>) -> Result<params::View> {
        view(storage, layout, &self.gpu)
    }

    /// A new tensor without gaps, and the kernels' view of it.
    fn output(&self, dims: (usize, usize, usize, usize)) -> Result<(CudaStorage, params::View)> {
        let layout = Layout::contiguous(dims);
        let storage = self.element.alloc(&self.gpu, layout.shape().elem_count())?;
        let view = view(&storage, &layout, &self.gpu)?;
        Ok((storage, view))
    }
}

type Lengths = (usize, usize);

/// The longest segment, the table of packed documents (empty without packing), and the tiles of all segments.
fn segments(shape: &AttentionShape) -> Result<(Lengths, Vec<params::Segment>, Lengths)> {
    let segments = shape.segments();
    let tiles = |len: usize| len.div_ceil(TILE);
    let longest = segments.iter().fold((0, 0), |(q, k), s| (q.max(s.query.len()), k.max(s.key.len())));
    let mut table = Vec::with_capacity(segments.len());
    let mut total = (0, 0);
    for s in &segments {
        table.push(params::Segment {
            query_start: s.query.start as i32,
            query_len: s.query.len() as i32,
            key_start: s.key.start as i32,
            key_len: s.key.len() as i32,
            query_tile: total.0 as i32,
            key_tile: total.1 as i32,
        });
        total = (total.0 + tiles(s.query.len()), total.1 + tiles(s.key.len()));
    }
    // Tokens, tiles and blocks are counted in 32 bits; elements and bytes in 64.
    let blocks = segments.len() * tiles(longest.0.max(longest.1)) * shape.query_heads();
    let most = [
        shape.query_len(),
        shape.key_len(),
        blocks,
        total.0 * shape.query_heads(),
        total.1 * shape.query_heads(),
    ]
    .into_iter()
    .max()
    .unwrap_or(0);
    if most > i32::MAX as usize / 4 {
        return Err(Error::new("attention is too large for one launch")
            .got(format!(
                "{} segments, up to {} queries and {} keys, {} heads",
                segments.len(),
                longest.0,
                longest.1,
                shape.query_heads()
            ))
            .allowed("segments x heads x tiles of 64 tokens below 2^29")
            .hint("split the batch")
            .into());
    }
    if !shape.is_packed() {
        table.clear();
    }
    Ok((longest, table, total))
}

/// Computes the output, (batch, query, query heads, head_dim) without gaps, and what a backward needs if `keep`.
pub(crate) fn forward(
    scheme: &Scheme,
    problem: &Problem<'_>,
    keep: bool,
) -> Result<(CudaStorage, Option<Saved>)> {
    let call = Call::new(problem)?;
    let plan = plan::forward(scheme, call.d, call.gpu.architecture);
    let (out, out_view) = call.output(problem.shape.query_dims())?;
    let minus_lse2 = keep.then(|| call.gpu.alloc::<f32>(call.query_tiles() * TILE)).transpose()?;
    // K and V of a query head, as codes or in 16 bit.
    let element = if matches!(scheme, Scheme::FullPrecision) { 2 } else { 1 };
    let keys = 2 * call.shape.key_len as usize * call.d * element / problem.shape.group();
    let mut params = params::Forward {
        q: call.view(problem.q)?,
        k: call.view(problem.k)?,
        v: call.view(problem.v)?,
        out: out_view,
        minus_lse2: minus_lse2.as_ref().map_or(0, |lse2| address(lse2, &call.gpu)),
        shape: call.shape_sharing(&plan, keys, problem.shape.query_heads()),
        ..params::Forward::default()
    };
    let mut quantized = None;
    if let Scheme::SageBwd(settings) = scheme {
        let operands = sagebwd::quantize(&call, settings, &mut params)?;
        quantized = Some(operands);
    }
    let mut blocks = call.segment_count()
        * problem.shape.query_heads()
        * (call.shape.query_len as usize).div_ceil(plan.rows);
    let tickets = plan.takes_tickets.then(|| call.gpu.alloc_zeros::<i32>(1)).transpose()?;
    if let Some(tickets) = &tickets {
        params.tickets = address(tickets, &call.gpu);
        // In this crate's own tests two, so that small cases have blocks with several pieces of work.
        blocks = blocks.min(if cfg!(test) { 2 } else { call.gpu.multiprocessors });
    }
    let grid = Grid { shared_bytes: plan.shared_bytes, ..Grid::line(blocks, plan.threads) };
    let kernel = call.kernel(&format!("attn_fwd_{}", plan.name));
    call.gpu.launch_forward("attn_fwd_sm80", &kernel, grid, &params)?;
    #[cfg(test)]
    guard::check(&call.gpu)?;
    let saved =
        minus_lse2.map(|minus_lse2| Saved { minus_lse2, codes: quantized.map(sagebwd::Operands::keep) });
    Ok((out, saved))
}

/// Gradients of query, key and value, without gaps.
pub(crate) fn backward(
    scheme: &Scheme,
    problem: &Problem<'_>,
    saved: &Saved,
    out: Operand<'_>,
    dout: Operand<'_>,
) -> Result<[CudaStorage; 3]> {
    let call = Call::new(problem)?;
    let gpu = &call.gpu;
    let plan = plan::backward(scheme, call.d, gpu.architecture);
    let minus_delta = gpu.alloc::<f32>(call.query_tiles() * TILE)?;
    let dq_sums = gpu.alloc_zeros::<f32>(call.query_tiles() * TILE * call.d)?;
    // A counter for each tile of queries, and the tickets.
    let turns = problem.deterministic.then(|| gpu.alloc_zeros::<i32>(call.query_tiles() + 1)).transpose()?;
    let (dk, dk_view) = call.output(problem.shape.key_dims())?;
    let (dv, dv_view) = call.output(problem.shape.key_dims())?;
    // Sums of dQ in f32, dO and Q in 16 bit (with SageBwd codes of both, as many bytes or more) of all queries of a key head.
    let shared = call.shape.query_len as usize * problem.shape.group() * call.d * 9;
    let mut params = params::Backward {
        q: call.view(problem.q)?,
        k: call.view(problem.k)?,
        v: call.view(problem.v)?,
        out: call.view(out)?,
        dout: call.view(dout)?,
        dk: dk_view,
        dv: dv_view,
        minus_lse2: address(&saved.minus_lse2, gpu),
        minus_delta: address(&minus_delta, gpu),
        dq_sums: address(&dq_sums, gpu),
        turns: turns.as_ref().map_or(0, |turns| address(turns, gpu)),
        shape: call.shape_sharing(&plan, shared, problem.shape.key_heads()),
        ..params::Backward::default()
    };
    if plan.mapped && !problem.shape.is_packed() {
        let map = |view: &params::View, (_, layout): Operand<'_>| tensor_map(view, layout, call.element);
        // SageBwd has codes of Q, in memory of its own.
        let q = match scheme {
            Scheme::FullPrecision => map(&params.q, problem.q)?,
            Scheme::SageBwd(_) => Some(params::TensorMap::default()),
        };
        if let (Some(q), Some(dout)) = (q, map(&params.dout, dout)?) {
            params.dout.mapped = 1;
            (params.q_map, params.dout_map) = (q, dout);
        }
    }
    let operands = match (scheme, &saved.codes) {
        (Scheme::SageBwd(settings), Some(codes)) => {
            Some(sagebwd::prepare(&call, settings, codes, &mut params)?)
        }
        _ => {
            let kernel = call.kernel("prepare_full_precision");
            gpu.launch_backward("quantize", &kernel, Grid::line(call.query_tiles(), 256), &params)?;
            None
        }
    };
    let blocks =
        call.segment_count() * problem.shape.key_heads() * (call.shape.key_len as usize).div_ceil(plan.rows);
    let grid = Grid { shared_bytes: plan.shared_bytes, ..Grid::line(blocks, plan.threads) };
    let kernel = call.kernel(&format!("attn_bwd_{}", plan.name));
    gpu.launch_backward("attn_bwd_sm80", &kernel, grid, &params)?;
    #[cfg(test)]
    guard::check(gpu)?;
    // Freed before dQ is made: this is where memory peaks.
    drop(operands);
    let (dq, dq_view) = call.output(problem.shape.query_dims())?;
    params.dq = dq_view;
    let tiles = (call.shape.query_len as usize).div_ceil(TILE);
    let grid = Grid::line(tiles * problem.shape.query_heads() * call.segment_count(), 256);
    gpu.launch_backward("attn_bwd_sm80", &call.kernel("finish_dq"), grid, &params)?;
    #[cfg(test)]
    guard::check(gpu)?;
    Ok([dq, dk, dv])
}
