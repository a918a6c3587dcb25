//! SwiGLU on the GPU.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result};

use crate::cuda::address::Address;
use crate::cuda::compiled::constants::swiglu::THREADS;
use crate::cuda::compiled::kernel;
use crate::cuda::floats::{Dense, Float, Packs, element, elementwise, start, start_of};
use crate::cuda::kernels::Gpu;
use crate::cuda::params::{self, launch};
use crate::dtype::row_stride;
use crate::launch::{Launch, Operand};
use crate::ops::swiglu::{Gradients, SwiGlu};

const NAME: &str = "swiglu";

/// A tensor as rows of its last dimension: in place if the rows have a constant stride, otherwise a copy.
pub(super) struct Rows<'a> {
    given: Operand<'a>,
    copy: Option<Dense<'a>>,
    columns: usize,
    /// Stride of rows, in elements.
    stride: usize,
}

impl<'a> Rows<'a> {
    fn new(x: Operand<'a>, gpu: &Gpu) -> Result<Self> {
        let columns = x.1.dims().last().copied().unwrap_or(1);
        Ok(match row_stride(x.1) {
            Some(stride) => Self { given: x, copy: None, columns, stride },
            None => Self { given: x, copy: Some(Dense::new(x, gpu)?), columns, stride: columns },
        })
    }

    fn operand(&self) -> Operand<'_> {
        self.copy.as_ref().map_or(self.given, Dense::operand)
    }
}

pub(super) fn rows_of_swiglu<'a>([gate, up]: [Operand<'a>; 2], gpu: &Gpu) -> Result<[Rows<'a>; 2]> {
    Ok([Rows::new(gate, gpu)?, Rows::new(up, gpu)?])
}

impl Rows<'_> {
    /// The parameters, with `self` as the gate.
    pub(super) fn params<'a>(&'a self, up: &'a Rows<'_>, gpu: &Gpu) -> Result<params::SwiGlu<'a>> {
        Ok(params::SwiGlu {
            gate: start(self.operand(), gpu)?,
            up: start(up.operand(), gpu)?,
            len: self.operand().1.shape().elem_count() as i64,
            gate_row: self.stride as i64,
            up_row: up.stride as i64,
            ..Default::default()
        })
    }
}

/// The parameters for the rows of `gate` and `up`, and the number of elements that a thread processes.
fn problem<'a>(
    float: Float,
    [gate, up]: [&'a Rows<'_>; 2],
    others: &[Address<'a>],
    out_row: usize,
    gpu: &Gpu,
) -> Result<(params::SwiGlu<'a>, Packs)> {
    let (len, columns) = (gate.operand().1.shape().elem_count(), gate.columns);
    let of = gate.params(up, gpu)?;
    let starts = [&[of.gate, of.up], others].concat();
    // Rows without gaps between them are processed as one long row. Then a thread's 16 bytes may extend over two rows.
    let dense = [gate.stride, up.stride, out_row].iter().all(|&stride| stride == columns);
    let columns = if dense { len.max(1) } else { columns };
    let strides = if dense { vec![] } else { vec![columns, gate.stride, up.stride, out_row] };
    let params = params::SwiGlu { columns: columns as i64, out_row: out_row as i64, ..of };
    Ok((params, Packs::of(float, &starts, &strides)))
}

impl Launch<[Operand<'_>; 2], CudaStorage> for SwiGlu {
    fn launch(&self, [gate, up]: [Operand<'_>; 2]) -> Result<CudaStorage> {
        let gpu = Gpu::new(gate.0.device())?;
        let float = Float::of(NAME, gate.0)?;
        let len = gate.1.shape().elem_count();
        let (gate, up) = (Rows::new(gate, &gpu)?, Rows::new(up, &gpu)?);
        let out = float.alloc(&gpu, len)?;
        let (params, packs) = problem(float, [&gate, &up], &[], gate.columns, &gpu)?;
        let params = params::SwiGlu { out: start_of(&out, &gpu)?, ..params };
        launch(&gpu, &packs.kernel(kernel!("swiglu_fwd")), elementwise(len, packs, THREADS), &params)?;
        Ok(out)
    }
}

impl Launch<[Operand<'_>; 3], (CudaStorage, Option<CudaStorage>)> for Gradients {
    fn launch(&self, [gate, up, dy]: [Operand<'_>; 3]) -> Result<(CudaStorage, Option<CudaStorage>)> {
        let gpu = Gpu::new(gate.0.device())?;
        let float = Float::of(NAME, gate.0)?;
        let len = gate.1.shape().elem_count();
        let (gate, up, dy) = (Rows::new(gate, &gpu)?, Rows::new(up, &gpu)?, Dense::new(dy, &gpu)?);
        let both = float.alloc(&gpu, 2 * len)?;
        let y = self.again.then(|| float.alloc(&gpu, len)).transpose()?;
        let dy = dy.start(&gpu)?;
        let columns = gate.columns;
        let (out_row, distance) = if self.is_concatenated { (2 * columns, columns) } else { (columns, len) };
        let dgate = start_of(&both, &gpu)?;
        // If `len` is 0, `both` is empty, so `dup` must start at index 0. No kernel is launched then.
        let dup = element(&both, distance.min(len), &gpu)?;
        let (params, packs) = problem(float, [&gate, &up], &[dy, dup], out_row, &gpu)?;
        let params = params::SwiGlu {
            dy,
            out: dgate,
            dup,
            y: y.as_ref().map_or(Ok(Address::NULL), |y| start_of(y, &gpu))?,
            ..params
        };
        launch(&gpu, &packs.kernel(kernel!("swiglu_bwd")), elementwise(len, packs, THREADS), &params)?;
        Ok((both, y))
    }
}
