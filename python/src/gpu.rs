//! Attention on a GPU: launches the kernels on PyTorch's stream, with memory that PyTorch has allocated.

use candle_core::DType;
use candle_sage::foreign::{ForeignAttention, ForeignLayout, Inputs, Lent, ResultGradients, Results, Stream};
use pyo3::prelude::*;

use super::{BLOCK, Others, Settings, dtype, error};

/// Dimensions, and strides in elements.
type Layout = ([usize; 4], [usize; 4]);

fn layout((dims, strides): Layout, dtype: DType) -> ForeignLayout {
    ForeignLayout { dtype, dims, strides }
}

/// Memory from its address and size in bytes.
fn lent((address, bytes): (u64, usize)) -> Lent {
    Lent { address, bytes }
}

/// An attention call that is prepared for tensors of one shape on one device.
#[pyclass(frozen)]
pub(super) struct Call {
    of: ForeignAttention,
    dtype: DType,
    device: usize,
    /// Bytes of the state that a forward stores.
    #[pyo3(get)]
    state: usize,
    /// Bytes that a forward uses while it runs.
    #[pyo3(get)]
    forward_scratch: usize,
    /// Bytes that a backward uses while it runs.
    #[pyo3(get)]
    backward_scratch: usize,
}

impl Call {
    fn stream(&self, handle: u64) -> PyResult<Stream> {
        // SAFETY: `_ops.py` passes PyTorch's current stream of this device. PyTorch uses the device's primary context.
        unsafe { Stream::new(self.device, handle) }.map_err(error)
    }
}

#[pymethods]
impl Call {
    /// `keep`: whether a backward will follow. `others`: whether the call has sinks, whether it has ALiBi slopes, and
    /// the capacity of each list of its selection, in blocks (`None`: no selection). `lse`: whether to return the
    /// log-sum-exps.
    #[new]
    #[allow(clippy::too_many_arguments)]
    fn new(
        settings: &Settings,
        packing: Option<(Vec<usize>, Vec<usize>)>,
        element: &str,
        inputs: [Layout; 3],
        others: (bool, bool, Option<usize>),
        keep: bool,
        lse: bool,
        device: usize,
    ) -> PyResult<Self> {
        let dtype = dtype(element)?;
        let of = ForeignAttention::new(settings.packed(packing), inputs.map(|x| layout(x, dtype)), keep);
        let mut of = of.map_err(error)?;
        if others.0 {
            of = of.with_sinks().map_err(error)?;
        }
        if others.1 {
            of = of.with_alibi();
        }
        if let Some(width) = others.2 {
            of = of.with_selection(BLOCK, width).map_err(error)?;
        }
        if lse {
            of = of.with_lse().map_err(error)?;
        }
        let mut call = Self { of, dtype, device, state: 0, forward_scratch: 0, backward_scratch: 0 };
        // Sizes are the same on every stream.
        let stream = call.stream(0)?;
        let sizes = call.of.forward_sizes(&stream).map_err(error)?;
        (call.state, call.forward_scratch) = (sizes.state, sizes.scratch);
        if keep {
            call.backward_scratch = call.of.backward_scratch(&stream).map_err(error)?;
        }
        Ok(call)
    }

    /// Launches a forward. It writes `state`, and it writes the output and any log-sum-exps to the addresses in
    /// `results`.
    #[allow(clippy::too_many_arguments)]
    fn forward(
        &self,
        py: Python<'_>,
        stream: u64,
        tensors: [u64; 3],
        others: Others,
        results: (u64, u64),
        state: (u64, usize),
        scratch: (u64, usize),
    ) -> PyResult<()> {
        let inputs = Inputs { tensors, sinks: others.0, alibi_slopes: others.1, lists: others.2.0 };
        let results = Results { out: results.0, lse: results.1 };
        let stream = self.stream(stream)?;
        // SAFETY: `_ops.py` passes the addresses of PyTorch tensors, each at least as large as this call needs. PyTorch
        // reuses their memory in stream order.
        py.detach(|| unsafe { self.of.forward(&stream, inputs, results, lent(state), lent(scratch)) })
            .map_err(error)
    }

    /// Launches a backward, which writes the gradients of query, key, value and any sinks. `dlse` is the address of the
    /// log-sum-exps' gradient, or 0 if that gradient is zero.
    #[allow(clippy::too_many_arguments)]
    fn backward(
        &self,
        py: Python<'_>,
        stream: u64,
        tensors: [u64; 3],
        others: Others,
        out: u64,
        dout: (u64, Layout),
        dlse: u64,
        state: (u64, usize),
        gradients: ([u64; 3], u64),
        scratch: (u64, usize),
    ) -> PyResult<()> {
        let inputs = Inputs { tensors, sinks: others.0, alibi_slopes: others.1, lists: others.2.0 };
        let given = ResultGradients { out: (dout.0, layout(dout.1, self.dtype)), lse: dlse };
        let (stream, output) = (self.stream(stream)?, (out, given));
        // SAFETY: as in `forward`; `state` and `out` come from the forward.
        py.detach(|| unsafe {
            self.of.backward(&stream, inputs, output, lent(state), gradients, lent(scratch))
        })
        .map_err(error)
    }
}
