//! Attention over candle's tensors.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Layout, Result, Storage, StorageRef, Tensor};

use super::address::{Address, address, address_at, first_index};
use super::call::{Problem, Selected};
use super::candle::strided;
use super::floats::start;
use super::kernels::Gpu;
use super::memory::Purpose;
use super::selection::{check_blocks, lists_at};
use super::{
    Completed, OnGpu, OutputGradient, params, run_backward, run_forward, with_scheme, write_log_sum_exps,
};
use crate::error::Error;
use crate::launch::{Launch, Operand};
use crate::ops::attention::{AttentionOp, BackwardInputs, CompletedOnGpu, GradientsOnGpu, ScoreMod};
use crate::selection::{Blocks, Selection};
use crate::shape::AttentionShape;

/// Borrows an optional tensor of one f32 number per query head.
struct PerHead<'a>(Option<(StorageRef<'a>, &'a Layout)>);

impl<'a> PerHead<'a> {
    fn new(numbers: Option<&'a Tensor>) -> Self {
        Self(numbers.map(Tensor::storage_and_layout))
    }

    /// The tensor's address, or null.
    fn address(&self, gpu: &Gpu) -> Result<Address<'_>> {
        match &self.0 {
            None => Ok(Address::default()),
            Some((storage, layout)) => match &**storage {
                Storage::Cuda(storage) => start((storage, *layout), gpu),
                _ => Err(Error::new("the sinks or ALiBi slopes are not on the query's device")
                    .hint("move them with `to_device`")
                    .into()),
            },
        }
    }
}

/// A soft cap and `ALiBi` slopes.
struct Modifier<'a> {
    softcap: f32,
    slopes: PerHead<'a>,
}

impl<'a> Modifier<'a> {
    fn new(score_mod: &'a ScoreMod) -> Self {
        Self { softcap: score_mod.softcap, slopes: PerHead::new(score_mod.alibi_slopes.as_ref()) }
    }

    fn params(&self, heads: usize, gpu: &Gpu) -> Result<params::ScoreMod<'_>> {
        let alibi_slopes = self.slopes.address(gpu)?;
        Ok(params::ScoreMod { alibi_slopes, softcap: self.softcap, heads: heads as i32 })
    }
}

/// Borrows the lists of a selection.
pub(super) struct SelectionLists<'a> {
    storage: StorageRef<'a>,
    layout: &'a Layout,
    blocks: &'a Blocks,
}

impl<'a> SelectionLists<'a> {
    pub(super) fn new(selection: &'a Selection) -> Result<Self> {
        check_blocks(selection.blocks())?;
        let (storage, layout) = selection.lists().storage_and_layout();
        Ok(Self { storage, layout, blocks: selection.blocks() })
    }

    /// The selection, for a [`Problem`].
    pub(super) fn selected(&self, gpu: &Gpu) -> Result<Selected<'_>> {
        Ok(Selected { lists: self.lists(gpu)?, blocks: self.blocks })
    }

    pub(super) fn lists(&self, gpu: &Gpu) -> Result<params::Lists<'_>> {
        let (_, _, stride) = self.layout.shape().dims3()?;
        let Storage::Cuda(storage) = &*self.storage else {
            return Err(Error::new("the selection is not on the query's device")
                .hint("`Selection::to_device` copies the selection")
                .into());
        };
        let seen = address_at(storage.as_cuda_slice::<u32>()?, first_index(self.layout), gpu)?;
        Ok(lists_at(seen, self.blocks, stride))
    }
}

/// Borrows the tensors that a call reads in addition to query, key and value.
struct OptionalInputs<'a> {
    op: &'a AttentionOp,
    seen: Option<SelectionLists<'a>>,
    sinks: PerHead<'a>,
    score_mod: Option<Modifier<'a>>,
}

impl<'a> OptionalInputs<'a> {
    fn new(op: &'a AttentionOp) -> Result<Self> {
        Ok(Self {
            op,
            seen: op.selection.as_ref().map(SelectionLists::new).transpose()?,
            sinks: PerHead::new(op.sinks.as_ref()),
            score_mod: op.score_mod.as_ref().map(Modifier::new),
        })
    }

    fn problem<'b>(&'b self, gpu: &'b Gpu, [q, k, v]: [Operand<'b>; 3]) -> Result<Problem<'b>> {
        let op = self.op;
        let score_mod = self.score_mod.as_ref();
        Ok(Problem {
            gpu,
            scheme: &op.scheme,
            shape: &op.shape,
            softmax_scale: op.softmax_scale,
            deterministic: op.deterministic,
            q: strided(q, gpu)?,
            k: strided(k, gpu)?,
            v: strided(v, gpu)?,
            selected: self.seen.as_ref().map(|seen| seen.selected(gpu)).transpose()?,
            sinks: self.sinks.address(gpu)?,
            score_mod: score_mod.map(|of| of.params(op.shape.query_heads(), gpu)).transpose()?,
        })
    }
}

/// The `bool` of the arguments: whether the forward keeps the state for its backward.
impl Launch<([Operand<'_>; 3], bool), (CudaStorage, Option<Box<dyn CompletedOnGpu>>)> for AttentionOp {
    fn launch(
        &self,
        (inputs, keep): ([Operand<'_>; 3], bool),
    ) -> Result<(CudaStorage, Option<Box<dyn CompletedOnGpu>>)> {
        fn run<S: OnGpu>(
            scheme: S,
            problem: &Problem<'_>,
            keep: bool,
        ) -> Result<(CudaStorage, Option<Box<dyn CompletedOnGpu>>)> {
            let (out, completed) = run_forward(scheme, problem, keep)?;
            Ok((out.storage(problem.gpu), completed.map(|completed| Box::new(completed) as _)))
        }
        let (gpu, others) = (Gpu::new(inputs[0].0.device())?, OptionalInputs::new(self)?);
        let problem = others.problem(&gpu, inputs)?;
        with_scheme!(&self.scheme, |scheme| run(scheme, &problem, keep))
    }
}

impl<'a, S: OnGpu> Launch<BackwardInputs<'a>, GradientsOnGpu> for Completed<S> {
    fn launch(&self, (op, [q, k, v, out, dout], dlse): BackwardInputs<'a>) -> Result<GradientsOnGpu> {
        let (gpu, others) = (Gpu::new(q.0.device())?, OptionalInputs::new(op)?);
        let problem = others.problem(&gpu, [q, k, v])?;
        let output = OutputGradient {
            out: strided(out, &gpu)?,
            dout: strided(dout, &gpu)?,
            dlse: dlse.map(|dlse| start(dlse, &gpu)).transpose()?.unwrap_or_default(),
        };
        let (gradients, dsinks) = run_backward(self, &problem, &output)?;
        Ok((gradients.map(|gradient| gradient.storage(&gpu)), dsinks.map(|dsinks| gpu.storage(dsinks))))
    }
}

impl<'a, S: OnGpu> Launch<(&'a AttentionShape, Operand<'a>), CudaStorage> for Completed<S> {
    fn launch(&self, (shape, out): (&'a AttentionShape, Operand<'a>)) -> Result<CudaStorage> {
        let gpu = Gpu::new(out.0.device())?;
        let count = shape.batch() * shape.query_heads() * shape.query_len();
        let lse = gpu.alloc_for::<f32>(Purpose::Output, count)?;
        write_log_sum_exps(self, &gpu, shape, address(&lse, &gpu))?;
        Ok(gpu.storage(lse))
    }
}

impl<S: OnGpu> CompletedOnGpu for Completed<S> {}
