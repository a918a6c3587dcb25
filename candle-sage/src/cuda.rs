//! Attention on NVIDIA GPUs: the kernels of `kernels/`, launched on candle's own stream.
//!
//! As on the CPU, `forward` and `backward` are the same for all schemes, and what a scheme does besides is in the file
//! of its name. The only place with `unsafe`, besides the CPU's matrix product.

mod arch;
mod attn_qat;
pub(crate) mod blend;
mod call;
mod compiled;
mod full_precision;
pub(crate) mod gemm;
#[cfg(test)]
mod guard;
mod kernels;
pub(crate) mod ops;
mod params;
pub(crate) mod past_linear;
mod plan;
pub(crate) mod route;
mod sagebwd;
mod selection;
#[cfg(test)]
mod selftest;
mod tensor;

use std::fmt::Debug;

use call::Call;
pub(crate) use call::{Operand, Problem};
use candle_core::{CudaStorage, Result};
use cudarc::driver::CudaSlice;
use full_precision::FullPrecision;
use kernels::Grid;
use plan::{Plan, TILE, Visits};
use selection::{Users, lists};
use tensor::address;

use crate::scheme::Scheme;

/// A scheme on a GPU: one implementation each, in the file of its name. It names its kernels; `plan` says how they run.
trait OnGpu: Debug + Send + Sync + 'static {
    /// What the forward's kernel reads besides the inputs.
    type Operands;
    /// What the forward keeps for the backward besides the log-sum-exp.
    type Kept: Debug + Send + Sync + 'static;
    /// What the backward's kernel reads besides the inputs, freed when it was launched.
    type Scratch;

    /// The forward's kernel, as the table of plans has it.
    fn forward_kernel(&self) -> &'static str;
    /// The backward's.
    fn backward_kernel(&self) -> &'static str;

    /// Launches what goes before the forward's kernel, and adds to its `params`. `keep`: a backward will follow.
    fn before_forward(
        &self,
        call: &Call<'_>,
        keep: bool,
        params: &mut params::Forward,
    ) -> Result<Self::Operands>;

    /// What is left of the operands after a forward that keeps its state.
    fn keep(&self, operands: Self::Operands) -> Self::Kept;

    /// Launches what goes before the backward's kernel, delta among it, and adds to its `params`.
    fn before_backward(
        &self,
        call: &Call<'_>,
        plan: &Plan,
        kept: &Self::Kept,
        past: &Past<'_>,
        params: &mut params::Backward,
    ) -> Result<Self::Scratch>;
}

/// The forward's output, and the gradient that came back.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Past<'a> {
    pub(crate) out: Operand<'a>,
    pub(crate) dout: Operand<'a>,
}

/// A forward that ran: its scheme with what that kept. There is no other way to a backward, so that the two always fit.
pub(crate) trait Ran: Debug + Send + Sync {
    /// Gradients of query, key and value, without gaps.
    fn backward(&self, problem: &Problem<'_>, past: &Past<'_>) -> Result<[CudaStorage; 3]>;
}

#[derive(Debug)]
struct Pair<S: OnGpu> {
    scheme: S,
    /// Minus the base-2 log-sum-exp, (query heads, padded query).
    minus_lse2: CudaSlice<f32>,
    kept: S::Kept,
}

impl<S: OnGpu> Ran for Pair<S> {
    fn backward(&self, problem: &Problem<'_>, past: &Past<'_>) -> Result<[CudaStorage; 3]> {
        run_backward(self, problem, past)
    }
}

/// Computes the output, (batch, query, query heads, head_dim) without gaps, and what a backward needs if `keep`.
pub(crate) fn forward(
    scheme: &Scheme,
    problem: &Problem<'_>,
    keep: bool,
) -> Result<(CudaStorage, Option<Box<dyn Ran>>)> {
    match *scheme {
        Scheme::FullPrecision => run_forward(FullPrecision, problem, keep),
        Scheme::SageBwd(settings) => run_forward(settings, problem, keep),
        Scheme::AttnQat(settings) => run_forward(settings, problem, keep),
    }
}

/// The kernels of a scheme, forward and backward, for tests without a GPU.
#[cfg(test)]
fn kernels_of(scheme: &Scheme) -> [&'static str; 2] {
    fn of<S: OnGpu>(scheme: S) -> [&'static str; 2] {
        [scheme.forward_kernel(), scheme.backward_kernel()]
    }
    match *scheme {
        Scheme::FullPrecision => of(FullPrecision),
        Scheme::SageBwd(settings) => of(settings),
        Scheme::AttnQat(settings) => of(settings),
    }
}

fn run_forward<S: OnGpu>(
    scheme: S,
    problem: &Problem<'_>,
    keep: bool,
) -> Result<(CudaStorage, Option<Box<dyn Ran>>)> {
    let call = Call::new(problem)?;
    let lists = problem.selection.map(|selection| lists(selection, &call.gpu)).transpose()?;
    let visits = if lists.is_some() { Visits::Listed } else { Visits::Every };
    let plan = Plan::of(scheme.forward_kernel(), call.d, call.gpu.architecture, visits)?;
    let (out, out_view) = call.output(problem.shape.query_dims())?;
    let minus_lse2 = keep.then(|| call.gpu.alloc::<f32>(call.query_tiles() * TILE)).transpose()?;
    // K and V of a query head.
    let keys = 2 * call.shape.key_len as usize * plan.row_bytes / problem.shape.group();
    let mut params = params::Forward {
        q: call.view(problem.q)?,
        k: call.view(problem.k)?,
        v: call.view(problem.v)?,
        out: out_view,
        minus_lse2: minus_lse2.as_ref().map_or(0, |lse2| address(lse2, &call.gpu)),
        shape: call.shape_sharing(plan, keys, problem.shape.query_heads()),
        lists: lists.unwrap_or_default(),
        ..params::Forward::default()
    };
    let operands = scheme.before_forward(&call, keep, &mut params)?;
    call.set_forward_maps(plan, &mut params)?;
    let mut blocks = call.segment_count()
        * problem.shape.query_heads()
        * (call.shape.query_len as usize).div_ceil(plan.rows);
    let scheduler_counter = plan.persistent().then(|| call.gpu.alloc_zeros::<i32>(1)).transpose()?;
    if let Some(scheduler_counter) = &scheduler_counter {
        params.scheduler_counter = address(scheduler_counter, &call.gpu);
        // In this crate's own tests two, so that small cases have blocks with several pieces of work.
        blocks = blocks.min(if cfg!(test) { 2 } else { call.gpu.multiprocessors });
    }
    let grid = Grid { shared_bytes: plan.shared_bytes, ..Grid::line(blocks, plan.threads) };
    let kernel = call.kernel(&plan.name(visits));
    call.gpu.launch_forward(plan.family, &kernel, grid, &params)?;
    #[cfg(test)]
    guard::check(&call.gpu)?;
    let ran = minus_lse2.map(|minus_lse2| {
        let kept = scheme.keep(operands);
        Box::new(Pair { scheme, minus_lse2, kept }) as Box<dyn Ran>
    });
    Ok((out, ran))
}

fn run_backward<S: OnGpu>(ran: &Pair<S>, problem: &Problem<'_>, past: &Past<'_>) -> Result<[CudaStorage; 3]> {
    let call = Call::new(problem)?;
    let gpu = &call.gpu;
    let users = problem.selection.map(|selection| Users::new(selection, gpu)).transpose()?;
    let visits = if users.is_some() { Visits::Listed } else { Visits::Every };
    let plan = Plan::of(ran.scheme.backward_kernel(), call.d, gpu.architecture, visits)?;
    let minus_delta = gpu.alloc::<f32>(call.query_tiles() * TILE)?;
    let dq_accum = gpu.alloc_zeros::<f32>(call.query_tiles() * TILE * call.d)?;
    // A counter for each tile of queries, and the scheduler_counter.
    let dq_semaphore = problem.deterministic.then(|| gpu.alloc_zeros::<i32>(call.query_tiles() + 1)).transpose()?;
    let (dk, dk_view) = call.output(problem.shape.key_dims())?;
    let (dv, dv_view) = call.output(problem.shape.key_dims())?;
    // Sums of dQ in f32, dO and Q in 16 bit (with SageBwd codes of both, as many bytes or more) of all queries of a key head.
    let shared = call.shape.query_len as usize * problem.shape.group() * call.d * 9;
    let mut params = params::Backward {
        q: call.view(problem.q)?,
        k: call.view(problem.k)?,
        v: call.view(problem.v)?,
        out: call.view(past.out)?,
        dout: call.view(past.dout)?,
        dk: dk_view,
        dv: dv_view,
        minus_lse2: address(&ran.minus_lse2, gpu),
        minus_delta: address(&minus_delta, gpu),
        dq_accum: address(&dq_accum, gpu),
        dq_semaphore: dq_semaphore.as_ref().map_or(0, |dq_semaphore| address(dq_semaphore, gpu)),
        shape: call.shape_sharing(plan, shared, problem.shape.key_heads()),
        dq_parts: plan.dq_parts() as i32,
        lists: users.as_ref().map_or(params::Lists::default(), |users| users.params),
        ..params::Backward::default()
    };
    let scratch = ran.scheme.before_backward(&call, plan, &ran.kept, past, &mut params)?;
    let blocks =
        call.segment_count() * problem.shape.key_heads() * (call.shape.key_len as usize).div_ceil(plan.rows);
    let grid = Grid { shared_bytes: plan.shared_bytes, ..Grid::line(blocks, plan.threads) };
    let kernel = call.kernel(&plan.name(visits));
    gpu.launch_backward(plan.family, &kernel, grid, &params)?;
    #[cfg(test)]
    guard::check(gpu)?;
    // Freed before dQ is made: this is where memory peaks.
    drop(scratch);
    let (dq, dq_view) = call.output(problem.shape.query_dims())?;
    params.dq = dq_view;
    let tiles = (call.shape.query_len as usize).div_ceil(TILE);
    let grid = Grid::line(tiles * problem.shape.query_heads() * call.segment_count(), 256);
    gpu.launch_backward(plan.family, &call.kernel("finish_dq"), grid, &params)?;
    #[cfg(test)]
    guard::check(gpu)?;
    Ok([dq, dk, dv])
}
