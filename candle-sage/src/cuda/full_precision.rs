//! Full precision on the GPU: inputs as they are, and delta before the backward.

use candle_core::Result;

use super::arch::Architecture;
use super::call::Call;
use super::kernels::Grid;
use super::plan::{self, KEYS_SM90, Plan, TILE};
use super::{OnGpu, Past, Visits, params};

/// See [`crate::scheme::Scheme::FullPrecision`].
#[derive(Debug, Clone, Copy)]
pub(super) struct FullPrecision;

impl OnGpu for FullPrecision {
    type Operands = ();
    type Kept = ();
    type Scratch = ();

    fn forward_plan(&self, d: usize, architecture: Architecture, visits: Visits) -> Plan {
        let row_bytes = 2 * d;
        if architecture.has_roles() {
            return forward_plan_sm90("full_precision", d, visits);
        }
        let threads = 128;
        // Two values for each of four rows a thread, where registers are short and there is room.
        let state_is_shared = d == 128 && architecture.shared_bytes() > 98 * 1024;
        let state = if state_is_shared { threads * 32 } else { 0 };
        plan::forward_sm80("full_precision", threads, row_bytes, state)
    }

    fn backward_plan(&self, d: usize, architecture: Architecture) -> Plan {
        backward_plan("full_precision", d, architecture, Extra::default())
    }

    fn before_forward(&self, _: &Call<'_>, _: bool, _: &mut params::Forward) -> Result<()> {
        Ok(())
    }

    fn keep((): ()) {}

    fn before_backward(
        &self,
        call: &Call<'_>,
        plan: &Plan,
        (): &(),
        past: &Past<'_>,
        params: &mut params::Backward,
    ) -> Result<()> {
        let q = params.q;
        call.set_tensor_maps(plan, Some((&q, call.problem.q.1)), past.dout.1, params)?;
        launch_delta(call, params)
    }
}

/// Hopper's forward of 16-bit operands: a stage is a tile of K and one of V.
pub(super) fn forward_plan_sm90(name: &'static str, d: usize, visits: Visits) -> Plan {
    let row_bytes = 2 * d;
    let stages = if d == 64 { 4 } else { 3 };
    plan::forward_sm90(name, visits.groups(d), row_bytes, (stages, 2 * TILE * row_bytes))
}

/// What a backward of 16-bit operands keeps in shared memory beside them, in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Extra {
    /// A stage: values of a tile's queries beyond log-sum-exp and delta.
    pub(super) of_stage: usize,
    /// A warp.
    pub(super) of_warp: usize,
}

/// The backward of 16-bit operands: K and V; stages of Q and dO with log-sum-exp and delta; two slots of dS.
pub(super) fn backward_plan(name: &'static str, d: usize, architecture: Architecture, extra: Extra) -> Plan {
    let row_bytes = 2 * d;
    let ds = |keys: usize| 2 * keys * TILE * 2;
    if architecture.has_roles() {
        let stages = if d == 64 { 5 } else { 3 };
        let stage = (2 * TILE * row_bytes + 2 * TILE * 4 + extra.of_stage).next_multiple_of(1024);
        let warps = KEYS_SM90 / 16;
        let shared_bytes = 2 * KEYS_SM90 * row_bytes
            + stages * stage
            + ds(KEYS_SM90)
            + plan::dq_staging_sm90(d)
            + warps * extra.of_warp;
        return plan::backward_sm90(name, row_bytes, stages, shared_bytes);
    }
    let stage = 2 * TILE * row_bytes + 2 * TILE * 4 + extra.of_stage;
    plan::backward_sm80(name, architecture, row_bytes, |keys, stages| {
        2 * keys * row_bytes + stages * stage + ds(keys) + keys / 16 * extra.of_warp
    })
}

/// Makes `D = rowsum(dO o O)` of what `params.out` and `params.dout` are.
pub(super) fn launch_delta(call: &Call<'_>, params: &params::Backward) -> Result<()> {
    let kernel = call.kernel("prepare_full_precision");
    call.gpu.launch_backward("quantize", &kernel, Grid::line(call.query_tiles(), 256), params)
}
