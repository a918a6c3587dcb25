//! Attention on NVIDIA GPUs: launches the kernels of `kernels/` on candle's stream, or on another library's stream
//! (`foreign`).
//!
//! As on the CPU, `forward` and `backward` are shared by all schemes; the code of one scheme is in the file with the
//! scheme's name. Apart from the CPU's matmul, only this module has `unsafe` code. The parameters of a kernel borrow
//! the memory that it reads and writes (`address.rs`), so the compiler checks that the memory is alive at every launch.

mod address;
mod arch;
mod attn_qat;
mod buffer;
mod call;
mod compiled;
mod driver;
pub mod foreign;
#[cfg(test)]
mod guard;
mod kernels;
mod memory;
mod params;
mod plan;
mod sagebwd;
mod selection;
mod sinks;
mod tensor;
mod unquantized;

// Modules that use candle's tensors.
#[cfg(feature = "cuda")]
mod attention;
#[cfg(feature = "cuda")]
mod blend;
#[cfg(feature = "cuda")]
mod candle;
#[cfg(feature = "cuda")]
mod floats;
#[cfg(feature = "cuda")]
mod gemm;
#[cfg(feature = "cuda")]
mod gemm_fp8;
#[cfg(feature = "cuda")]
mod mixture;
#[cfg(feature = "cuda")]
mod ops;
#[cfg(feature = "cuda")]
mod past_linear;
#[cfg(feature = "cuda")]
mod route;
#[cfg(all(test, feature = "cuda"))]
mod selftest;

use std::fmt::Debug;

use address::{Address, address, address_if_any};
use buffer::Buffer;
use call::{Call, Geometry, Problem};
use candle_core::Result;
use compiled::constants::attn_bwd::FINISH_THREADS;
use compiled::kernel;
use kernels::{Gpu, Grid};
use memory::Purpose;
use plan::{Plan, SELECTION_BLOCK, TILE};
use selection::InvertedLists;
use sinks::sink_gradient;
use tensor::{Output, Strided};
use unquantized::Unquantized;

use crate::shape::AttentionShape;

/// A scheme on a GPU. Each scheme implements this trait in the file with the scheme's name. The trait names the
/// scheme's kernels; the module `plan` defines how they run.
trait OnGpu: Debug + Send + Sync + 'static {
    /// Buffers that the forward's kernels read and write in addition to inputs and output.
    type Operands;
    /// State that the forward keeps for the backward in addition to the log-sum-exp.
    type Kept: Debug + Send + Sync + 'static;
    /// Buffers that the backward's kernel reads in addition to the inputs and `Kept`, freed after its launch.
    type Scratch;

    /// Name of the forward's kernel in `params/plans.def`.
    fn forward_kernel(&self) -> &'static str;
    /// Name of the backward's kernel in `params/plans.def`.
    fn backward_kernel(&self) -> &'static str;

    /// Allocates the forward's operands. `keep`: a backward will follow.
    fn operands(&self, call: &Call<'_>, keep: bool) -> Result<Self::Operands>;

    /// Launches the kernels that prepare the forward's operands, and sets the operands' addresses in `params`.
    fn before_forward<'p>(
        &self,
        call: &Call<'_>,
        operands: &'p Self::Operands,
        params: &mut params::Forward<'p>,
    ) -> Result<()>;

    /// Returns the operands that the backward needs.
    fn keep(&self, operands: Self::Operands) -> Self::Kept;

    fn scratch(&self, call: &Call<'_>, kept: &Self::Kept) -> Result<Self::Scratch>;

    /// Launches the kernels that prepare the backward's operands, including delta, and sets the operands' addresses
    /// in `params`.
    fn before_backward<'p>(
        &self,
        call: &Call<'_>,
        plan: &Plan,
        kept: &'p Self::Kept,
        scratch: &'p Self::Scratch,
        output: &OutputGradient<'_>,
        params: &mut params::Backward<'p>,
    ) -> Result<()>;
}

/// The forward's output, its gradient, and the gradient of the log-sum-exps.
#[derive(Debug, Clone, Copy)]
struct OutputGradient<'a> {
    out: Strided<'a>,
    dout: Strided<'a>,
    /// The gradient of the log-sum-exps, (batch, query heads, query) in f32, contiguous. Null: zeros.
    dlse: Address<'a>,
}

/// The gradients of query, key and value, and of the sinks if there are any.
type Gradients = ([Output; 3], Option<Buffer<f32>>);

/// A completed forward: its scheme, and the state that it kept for a backward. The backward takes both as one value, so
/// they always match.
#[derive(Debug)]
struct Completed<S: OnGpu> {
    scheme: S,
    /// Negated base-2 log-sum-exps, (query heads, queries). The queries of each batch entry or packed document are
    /// padded to whole tiles.
    minus_lse2: Buffer<f32>,
    kept: S::Kept,
}

/// Without `is_gradient`: `padded` contains the negated base-2 log-sum-exps, and the log-sum-exps are written to
/// `outside`. With `is_gradient`: `padded` contains the negated delta, to which the gradient of the log-sum-exps in
/// `outside` is added.
fn log_sum_exp(
    gpu: &Gpu,
    shape: params::Shape<'_>,
    of: &AttentionShape,
    padded: Address<'_>,
    outside: Address<'_>,
    is_gradient: bool,
) -> Result<()> {
    let grid = Grid::line(shape.query_tiles as usize * of.query_heads(), TILE);
    let sequence = of.query_len() as i64;
    let (is_gradient, padding) = (is_gradient.into(), 0);
    let params = params::LogSumExp { shape, padded, outside, sequence, is_gradient, padding };
    params::launch(gpu, kernel!("attention_log_sum_exp"), grid, &params)
}

/// Writes the log-sum-exps of a completed forward to `outside`, (batch, query heads, query) in f32, contiguous.
fn write_log_sum_exps<S: OnGpu>(
    completed: &Completed<S>,
    gpu: &Gpu,
    shape: &AttentionShape,
    outside: Address<'_>,
) -> Result<()> {
    let geometry = Geometry::new(gpu, shape)?;
    log_sum_exp(gpu, geometry.shape(gpu), shape, address(&completed.minus_lse2, gpu), outside, false)
}

/// Calls a generic function with the implementation of a scheme.
macro_rules! with_scheme {
    ($scheme:expr, $run:expr) => {
        match *$scheme {
            $crate::scheme::Scheme::Unquantized => $run($crate::cuda::Unquantized),
            $crate::scheme::Scheme::SageBwd(settings) => $run(settings),
            $crate::scheme::Scheme::AttnQat(settings) => $run(settings),
        }
    };
}
use with_scheme;

/// The names of a scheme's forward and backward kernel, for tests without a GPU.
#[cfg(test)]
fn kernels_of(scheme: &crate::scheme::Scheme) -> [&'static str; 2] {
    fn of<S: OnGpu>(scheme: S) -> [&'static str; 2] {
        [scheme.forward_kernel(), scheme.backward_kernel()]
    }
    with_scheme!(scheme, of)
}

/// Computes the output, contiguous (batch, query, query heads, value_dim), and with `keep` also the state for a
/// backward.
fn run_forward<S: OnGpu>(
    scheme: S,
    problem: &Problem<'_>,
    keep: bool,
) -> Result<(Output, Option<Completed<S>>)> {
    let call = Call::new(problem)?;
    let visits = call.visits();
    let plan = call.plan(scheme.forward_kernel(), visits)?;
    if keep {
        // If the backward has no kernel, the error is returned before anything is computed.
        call.plan(scheme.backward_kernel(), visits)?;
    }
    let out = call.tensor(Purpose::Output, problem.shape.output_dims())?;
    let minus_lse2 = keep.then(|| minus_lse2_of(&call)).transpose()?;
    // Bytes of K and V per query head: the query heads of a group share them.
    let keys = 2 * call.geometry.sizes.key_len as usize * plan.row_bytes / problem.shape.group();
    let operands = scheme.operands(&call, keep)?;
    let mut params = params::Forward {
        q: problem.q.view,
        k: problem.k.view,
        v: problem.v.view,
        out: out.view(call.gpu),
        minus_lse2: address_if_any(minus_lse2.as_ref(), call.gpu),
        shape: call.shape_sharing(keys, problem.shape.query_heads()),
        lists: problem.selected.map_or_else(|| call.window(), |selected| selected.lists),
        score_mod: problem.score_mod.unwrap_or_default(),
        sinks: problem.sinks,
        ..params::Forward::default()
    };
    scheme.before_forward(&call, &operands, &mut params)?;
    call.set_forward_maps(plan, &mut params)?;
    let mut blocks = call.segment_count()
        * problem.shape.query_heads()
        * (call.geometry.sizes.query_len as usize).div_ceil(plan.rows);
    let scheduler_counter = plan.persistent().then(|| call.gpu.alloc_zeros::<i32>(1)).transpose()?;
    if let Some(scheduler_counter) = &scheduler_counter {
        params.scheduler_counter = address(scheduler_counter, call.gpu);
        // At most two thread blocks in this crate's own tests, so that thread blocks of small cases process several
        // tiles.
        blocks = blocks.min(if cfg!(test) { 2 } else { call.gpu.multiprocessors });
    }
    let grid = Grid { shared_bytes: plan.shared_bytes, ..Grid::line(blocks, plan.threads) };
    let kernel = plan.entry(visits, call.element.name());
    call.gpu.launch_attention(plan.family, &kernel, grid, &params)?;
    #[cfg(test)]
    guard::check(call.gpu)?;
    let completed =
        minus_lse2.map(|minus_lse2| Completed { kept: scheme.keep(operands), scheme, minus_lse2 });
    Ok((out, completed))
}

fn minus_lse2_of(call: &Call<'_>) -> Result<Buffer<f32>> {
    call.gpu.alloc_for(Purpose::Kept, call.query_tiles() * TILE)
}

fn run_backward<S: OnGpu>(
    completed: &Completed<S>,
    problem: &Problem<'_>,
    output: &OutputGradient<'_>,
) -> Result<Gradients> {
    let call = Call::new(problem)?;
    let gpu = call.gpu;
    // A key block's list of query blocks, if it is long, can be split between thread blocks, which add to dK and dV in
    // any order. Lists are therefore not split if the result must be deterministic.
    let cut = (!problem.deterministic).then_some(call.d);
    let users = problem.selected.map(|selected| InvertedLists::new(&call, selected, cut)).transpose()?;
    let visits = call.visits();
    let plan = call.plan(completed.scheme.backward_kernel(), visits)?;
    let minus_delta = gpu.alloc::<f32>(call.query_tiles() * TILE)?;
    let dq_accum = gpu.alloc_zeros::<f32>(call.query_tiles() * TILE * call.d)?;
    // One counter for each tile of dQ: the number of thread blocks that added to the tile. The last element is the
    // number of thread blocks that have started.
    let dq_semaphore =
        problem.deterministic.then(|| gpu.alloc_zeros::<i32>(call.query_tiles() + 1)).transpose()?;
    let gradient = |dims| call.tensor(Purpose::Output, dims);
    let (dk, dv) = (gradient(problem.shape.key_dims())?, gradient(problem.shape.value_dims())?);
    // The bytes that all thread blocks of a key head access (Q, dO, dQ of its query heads): at most 9 per element of Q.
    // dQ takes 4 (f32). Q and dO together take 4 in 16 bit, or 5 with SageBwd: Q, Q^T, dO^T in INT8, and dO in 16 bit.
    let shared = call.geometry.sizes.query_len as usize * problem.shape.group() * call.d * 9;
    let given = params::Backward {
        q: problem.q.view,
        k: problem.k.view,
        v: problem.v.view,
        out: output.out.view,
        dout: output.dout.view,
        dk: dk.view(gpu),
        dv: dv.view(gpu),
        minus_lse2: address(&completed.minus_lse2, gpu),
        minus_delta: address(&minus_delta, gpu),
        dq_accum: address(&dq_accum, gpu),
        dq_semaphore: address_if_any(dq_semaphore.as_ref(), gpu),
        shape: call.shape_sharing(shared, problem.shape.key_heads()),
        dq_parts: plan.dq_parts() as i32,
        ..params::Backward::default()
    };
    let scratch = completed.scheme.scratch(&call, &completed.kept)?;
    let mut params = params::Backward {
        lists: match &users {
            Some(users) => users.lists(gpu),
            None => call.window(),
        },
        score_mod: problem.score_mod.unwrap_or_default(),
        cuts: users.as_ref().map(|users| users.cuts(gpu)).unwrap_or_default(),
        ..given
    };
    completed.scheme.before_backward(&call, plan, &completed.kept, &scratch, output, &mut params)?;
    if output.dlse != Address::NULL {
        log_sum_exp(gpu, call.shape(), problem.shape, params.minus_delta, output.dlse, true)?;
    }
    let dsinks = sink_gradient(&call, &params)?;
    let blocks = call.segment_count()
        * problem.shape.key_heads()
        * (call.geometry.sizes.key_len as usize).div_ceil(plan.rows)
        + users.as_ref().map_or(0, InvertedLists::more_blocks) * SELECTION_BLOCK.div_ceil(plan.rows);
    let blocks = blocks * plan.channel_parts();
    let grid = Grid { shared_bytes: plan.shared_bytes, ..Grid::line(blocks, plan.threads) };
    let kernel = plan.entry(visits, call.element.name());
    gpu.launch_attention(plan.family, &kernel, grid, &params)?;
    #[cfg(test)]
    guard::check(gpu)?;
    // `scratch` and `users` are freed before dQ is allocated, since memory use peaks here. The parameters of the last
    // kernel are made from `given`, which contains no address in `scratch` or `users`.
    drop(scratch);
    drop(users);
    let dq = call.tensor(Purpose::Output, problem.shape.query_dims())?;
    let params = params::Backward { dq: dq.view(gpu), ..given };
    let tiles = (call.geometry.sizes.query_len as usize).div_ceil(TILE);
    let grid = Grid::line(tiles * problem.shape.query_heads() * call.segment_count(), FINISH_THREADS);
    gpu.launch_attention(plan.family, &call.kernel(kernel!("finish_dq")), grid, &params)?;
    #[cfg(test)]
    guard::check(gpu)?;
    Ok(([dq, dk, dv], dsinks))
}
