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
            return forward_plan_sm90("full_precision", d, 2, visits);
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

    fn keep(&self, (): ()) {}

    fn before_backward(
        &self,
        call: &Call<'_>,
        plan: &Plan,
        (): &(),
        past: &Past<'_>,
        params: &mut params::Backward,
    ) -> Result<()> {
        call.set_backward_maps(plan, true, past.dout.1, params)?;
        launch_delta(call, params)
    }
}

/// Hopper's forward of 16-bit operands: so many `tiles` of K, and then of V, at a time.
pub(super) fn forward_plan_sm90(name: &'static str, d: usize, tiles: usize, visits: Visits) -> Plan {
    let row_bytes = 2 * d;
    let stages = match (d, tiles) {
        (64, _) => 8,
        (_, 2) => 4,
        _ => 6,
    };
    let plan = plan::forward_sm90(name, visits.groups(d), row_bytes, (stages, tiles * TILE * row_bytes));
    Plan { mapped: true, ..plan }
}

/// What a backward of 16-bit operands keeps in shared memory beside them, in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Extra {
    /// A key: what S is made from besides.
    pub(super) of_key: usize,
    /// A tile of queries: what S is made from besides.
    pub(super) of_tile: usize,
    /// A tile of queries: values of its queries beyond log-sum-exp and delta.
    pub(super) of_values: usize,
    /// A warp.
    pub(super) of_warp: usize,
}

/// The backward of 16-bit operands: K and V; stages of Q and dO with log-sum-exp and delta; two slots of dS.
pub(super) fn backward_plan(name: &'static str, d: usize, architecture: Architecture, extra: Extra) -> Plan {
    let row_bytes = 2 * d;
    let keys = |keys: usize| keys * (2 * row_bytes + extra.of_key) + keys / 16 * extra.of_warp;
    let stage = 2 * TILE * row_bytes + extra.of_tile;
    if architecture.has_roles() {
        // Two slots of dS, and dQ on its way.
        let shared_bytes =
            |stages| keys(KEYS_SM90) + stages * (stage + 1024) + 2 * KEYS_SM90 * TILE * 2 + TILE * d * 4;
        return match d {
            64 => plan::backward_roles(name, row_bytes, 5, shared_bytes(5)),
            _ => plan::backward_consumers(name, row_bytes, 2, shared_bytes(2)),
        };
    }
    let stage = stage + 2 * TILE * 4 + extra.of_values;
    plan::backward_sm80(name, architecture, row_bytes, |rows, stages| {
        keys(rows) + stages * stage + 2 * rows * TILE * 2
    })
}

/// Makes `D = rowsum(dO o O)` of what `params.out` and `params.dout` are.
pub(super) fn launch_delta(call: &Call<'_>, params: &params::Backward) -> Result<()> {
    let kernel = call.kernel("prepare_full_precision");
    call.gpu.launch_backward("quantize", &kernel, Grid::line(call.query_tiles(), 256), params)
}
