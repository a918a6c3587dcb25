//! Cross-entropy from logits on the GPU, and the launch of `to = factor * from` or `to += factor * from` (`Scaling`).

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result};

use super::ids::Ids;
use crate::cuda::address::{Address, address};
use crate::cuda::buffer::Buffer;
use crate::cuda::compiled::constants::cross_entropy::{BATCH, MAX_THREADS, SCALE_THREADS};
use crate::cuda::compiled::kernel;
use crate::cuda::floats::{Dense, Float, Packs, RowThreads, count, elementwise, start, start_of};
use crate::cuda::kernels::{Gpu, Grid};
use crate::cuda::params::{self, launch};
use crate::dtype::Checked;
use crate::launch::{self, Launch, Operand};
use crate::ops::CrossEntropy;
use crate::ops::accumulate::AddInto;
use crate::ops::cross_entropy::LogitsOp;

const NAME: &str = "cross-entropy";

/// The state for the backward from logits.
#[derive(Debug)]
struct Saved {
    targets: Ids,
    lse: Buffer<f32>,
    z_loss: f32,
}

/// One launch over a chunk of `rows` rows of logits. `first` is the number of the chunk's first row among all rows.
pub(super) struct Rows<'a> {
    pub(super) gpu: &'a Gpu,
    pub(super) float: Float,
    pub(super) targets: &'a Ids,
    pub(super) first: usize,
    pub(super) rows: usize,
    pub(super) classes: usize,
}

impl Rows<'_> {
    pub(super) fn launch(&self, what: &str, params: params::CrossEntropy<'_>) -> Result<()> {
        let packs = Packs::of(self.float, &[params.logits, params.gradient], &[self.classes]);
        let team = RowThreads::of(self.classes / packs.elements(), BATCH, MAX_THREADS);
        let params = params::CrossEntropy {
            targets: self.targets.places(self.first, self.gpu)?,
            status: self.targets.status(self.gpu),
            rows: count("rows", self.rows)?,
            classes: count("classes", self.classes)?,
            lanes: team.lanes as i32,
            ..params
        };
        launch(self.gpu, &packs.kernel(what), team.grid(self.rows, usize::MAX), &params)
    }
}

/// The mean loss over the targets that are not ignored: an f32 scalar.
pub(super) fn mean(gpu: &Gpu, losses: &Buffer<f32>, rows: usize, targets: &Ids) -> Result<CudaStorage> {
    let out = Float::F32.alloc(gpu, 1)?;
    let params = params::CrossEntropy {
        losses: address(losses, gpu),
        status: targets.status(gpu),
        gradient: start_of(&out, gpu)?,
        rows: count("rows", rows)?,
        ..Default::default()
    };
    launch(gpu, kernel!("mean_loss"), Grid::line(1, MAX_THREADS), &params)?;
    Ok(out)
}

/// The mean loss, the backward, and the result of checking that the targets are valid.
type Forward = (CudaStorage, launch::Backward<2, CudaStorage>, Checked);

impl Launch<[Operand<'_>; 2], Forward> for LogitsOp {
    fn launch(&self, [logits, targets]: [Operand<'_>; 2]) -> Result<Forward> {
        let CrossEntropy { ignore_id, z_loss, .. } = self.settings;
        let gpu = Gpu::new(logits.0.device())?;
        let float = Float::of(NAME, logits.0)?;
        let (rows, classes) = logits.1.shape().dims2()?;
        let (logits, ids) = (Dense::new(logits, &gpu)?, Dense::new(targets, &gpu)?);
        let targets = Ids::new(&gpu, NAME, &ids, classes, ignore_id)?;
        let (losses, lse) = (gpu.alloc::<f32>(rows)?, gpu.alloc::<f32>(rows)?);
        let params = params::CrossEntropy {
            logits: logits.start(&gpu)?,
            losses: address(&losses, &gpu),
            lse: address(&lse, &gpu),
            z_loss,
            ..Default::default()
        };
        Rows { gpu: &gpu, float, targets: &targets, first: 0, rows, classes }
            .launch(kernel!("cross_entropy_fwd"), params)?;
        let loss = mean(&gpu, &losses, rows, &targets)?;
        let checked = targets.checked(&gpu, &ids)?;
        Ok((loss, Box::new(Saved { targets, lse, z_loss }), checked))
    }
}

/// The gradient of the logits.
impl Launch<[Operand<'_>; 2], CudaStorage> for Saved {
    fn launch(&self, [logits, dloss]: [Operand<'_>; 2]) -> Result<CudaStorage> {
        let gpu = Gpu::new(logits.0.device())?;
        let float = Float::of(NAME, logits.0)?;
        let (rows, classes) = logits.1.shape().dims2()?;
        let (logits, dloss) = (Dense::new(logits, &gpu)?, Dense::new(dloss, &gpu)?);
        let out = float.alloc(&gpu, rows * classes)?;
        let params = params::CrossEntropy {
            logits: logits.start(&gpu)?,
            gradient: start_of(&out, &gpu)?,
            dloss: dloss.start(&gpu)?,
            lse: address(&self.lse, &gpu),
            z_loss: self.z_loss,
            ..Default::default()
        };
        let rows = Rows { gpu: &gpu, float, targets: &self.targets, first: 0, rows, classes };
        rows.launch(kernel!("cross_entropy_bwd"), params)?;
        Ok(out)
    }
}

/// `to = factor * from`, or `+=` with `accumulate`. The factor is `dloss` divided by the number of targets that are not
/// ignored, or 1 if `dloss` is null.
pub(super) struct Scaling<'a> {
    pub(super) from: (Float, Address<'a>),
    pub(super) to: (Float, Address<'a>),
    pub(super) len: usize,
    pub(super) dloss: Address<'a>,
    pub(super) status: Address<'a>,
    pub(super) accumulate: bool,
}

/// `to += from`, where `to` is contiguous and f32.
impl Launch<[Operand<'_>; 2], ()> for AddInto {
    fn launch(&self, [to, from]: [Operand<'_>; 2]) -> Result<()> {
        let gpu = &Gpu::new(to.0.device())?;
        let from = Dense::new(from, gpu)?;
        let scaling = Scaling {
            from: (Float::of("add_into", from.operand().0)?, from.start(gpu)?),
            to: (Float::F32, start(to, gpu)?),
            len: to.1.shape().elem_count(),
            dloss: Address::NULL,
            status: Address::NULL,
            accumulate: true,
        };
        scale(gpu, &scaling)
    }
}

pub(super) fn scale(gpu: &Gpu, scaling: &Scaling<'_>) -> Result<()> {
    let Scaling { from, to, len, dloss, status, accumulate } = *scaling;
    let params = params::Scale {
        from: from.1,
        out: to.1,
        dloss,
        status,
        len: len as i64,
        accumulate: accumulate.into(),
        padding: 0,
    };
    let narrow = if from.0 == Float::F32 { to.0 } else { from.0 };
    let packs = Packs::of(narrow, &[from.1, to.1], &[]);
    let kind = if packs.elements() == 1 { "single" } else { "vector" };
    let kernel = format!("scale_{}_to_{}_{kind}", from.0.name(), to.0.name());
    launch(gpu, &kernel, elementwise(len, packs, SCALE_THREADS), &params)
}
