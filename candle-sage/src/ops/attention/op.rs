//! The custom op of one attention call, with its backward.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp3, DType, Device, Layout, Result, Shape, Tensor};

use super::NAME;
use super::score_mod::ScoreMod;
use crate::cpu::view::{View, to_storage};
use crate::cpu::{self, Problem};
use crate::error::{Error, REPORT};
use crate::launch::{Launch, Operand};
use crate::ops::support::{cpu_storage, cuda_tensor, f32_tensor, run_twice, with_cuda};
use crate::scheme::Scheme;
use crate::selection::{Lists, Selection};
use crate::shape::{AttentionShape, Dims};

/// The op of one call. Every call creates a new op, because the op stores the call's state.
pub(crate) struct AttentionOp {
    pub(crate) scheme: Scheme,
    pub(crate) shape: AttentionShape,
    pub(crate) softmax_scale: f32,
    #[allow(dead_code, reason = "only kernels ask for it: on the CPU results never vary")]
    pub(crate) deterministic: bool,
    pub(crate) selection: Option<Selection>,
    /// A soft cap, `ALiBi`, or both.
    pub(crate) score_mod: Option<ScoreMod>,
    /// The sinks' logits: (query heads), contiguous, f32, on the query's device.
    pub(crate) sinks: Option<Tensor>,
    /// `None` if no backward will read it.
    pub(in crate::ops) saved: Option<Arc<Saved>>,
}

/// The state that a call keeps for its backward.
#[derive(Default)]
pub(in crate::ops) struct Saved {
    /// Set by the forward.
    pub(in crate::ops) completed: OnceLock<Completed>,
    /// The gradient of the log-sum-exps, stored by `LogSumExp`'s backward for attention's backward, which runs later.
    pub(in crate::ops) dlse: Mutex<Option<Tensor>>,
    /// The gradient of the sinks, stored by attention's backward for `WithSinks` and `AttentionVjp`.
    pub(in crate::ops) dsinks: Mutex<Option<Tensor>>,
}

/// An op; its query, key, value, output and the output's gradient; the gradient of the log-sum-exps.
pub(crate) type BackwardInputs<'a> = (&'a AttentionOp, [Operand<'a>; 5], Option<Operand<'a>>);

/// The gradients of query, key and value, and of the sinks if there are any.
pub(crate) type GradientsOnGpu = ([CudaStorage; 3], Option<CudaStorage>);

/// A completed forward on a GPU, with the state for the backward. The first `Launch` computes the gradients, the second
/// computes the log-sum-exps of the forward's logits.
pub(crate) trait CompletedOnGpu:
    for<'a> Launch<BackwardInputs<'a>, GradientsOnGpu>
    + for<'a> Launch<(&'a AttentionShape, Operand<'a>), CudaStorage>
    + Send
    + Sync
{
}

pub(in crate::ops) enum Completed {
    Cpu(Box<dyn cpu::CompletedForward>),
    Cuda(Box<dyn CompletedOnGpu>),
}

type Gradients = (Option<Tensor>, Option<Tensor>, Option<Tensor>);

fn shape_of((batch, sequence, heads, head_dim): Dims) -> Shape {
    Shape::from((batch, sequence, heads, head_dim))
}

impl AttentionOp {
    fn save(&self, completed: Completed) -> Result<()> {
        let Some(saved) = &self.saved else { return Ok(()) };
        saved.completed.set(completed).map_err(|completed| run_twice(completed).into())
    }

    fn leave_sink_gradient(&self, dsinks: Tensor) {
        if let Some(saved) = &self.saved {
            *saved.dsinks.lock().unwrap_or_else(PoisonError::into_inner) = Some(dsinks);
        }
    }

    /// The selection's lists of blocks, on the host. `None` without a selection.
    fn lists(&self) -> Result<Option<&Lists>> {
        self.selection.as_ref().map(Selection::host).transpose()
    }

    fn problem<'a>(&'a self, inputs: [View<'a>; 3]) -> Result<Problem<'a>> {
        let problem = Problem::new(&self.shape, self.softmax_scale, self.lists()?, inputs);
        let sinks = self.sinks.as_ref().map(Tensor::to_vec1).transpose()?.unwrap_or_default();
        let problem = problem.with_sinks(sinks);
        Ok(match &self.score_mod {
            Some(score_mod) => problem.with_score_mod(score_mod.on_cpu()?),
            None => problem,
        })
    }

    fn cpu_bwd(
        &self,
        completed: &dyn cpu::CompletedForward,
        tensors: [&Tensor; 5],
        dlse: Option<&Tensor>,
    ) -> Result<Gradients> {
        let dtype: DType = tensors[0].dtype();
        let guards = tensors.map(Tensor::storage_and_layout);
        let mut views = Vec::with_capacity(guards.len());
        for (storage, layout) in &guards {
            views.push(View::new(cpu_storage(storage, NAME)?, layout)?);
        }
        let &[q, k, v, out, dout] = views.as_slice() else { unreachable!("five tensors, five views") };
        let problem = self.problem([q, k, v])?;
        let dlse = dlse.map_or_else(|| Ok(Vec::new()), |dlse| dlse.flatten_all()?.to_vec1::<f32>())?;
        let output = cpu::OutputGradient { out: &out, dout: &dout, dlse: &dlse };
        let gradients = completed.backward(&problem, &output);
        if self.sinks.is_some() {
            self.leave_sink_gradient(Tensor::new(gradients.dsinks, &Device::Cpu)?);
        }
        let tensor = |values, dims| f32_tensor(values, shape_of(dims), dtype).map(Some);
        Ok((
            tensor(gradients.dq, self.shape.query_dims())?,
            tensor(gradients.dk, self.shape.key_dims())?,
            tensor(gradients.dv, self.shape.value_dims())?,
        ))
    }

    fn cuda_bwd(
        &self,
        completed: &dyn CompletedOnGpu,
        tensors: [&Tensor; 5],
        dlse: Option<&Tensor>,
    ) -> Result<Gradients> {
        let ([dq, dk, dv], dsinks) = with_cuda(NAME, tensors, |operands| match dlse {
            None => completed.launch((self, operands, None)),
            Some(dlse) => with_cuda(NAME, [dlse], |[dlse]| completed.launch((self, operands, Some(dlse)))),
        })?;
        if let Some(dsinks) = dsinks {
            self.leave_sink_gradient(cuda_tensor(dsinks, Shape::from(self.shape.query_heads())));
        }
        let tensor = |storage, dims| Some(cuda_tensor(storage, shape_of(dims)));
        Ok((
            tensor(dq, self.shape.query_dims()),
            tensor(dk, self.shape.key_dims()),
            tensor(dv, self.shape.value_dims()),
        ))
    }
}

impl CustomOp3 for AttentionOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let views = [View::new(q, q_layout)?, View::new(k, k_layout)?, View::new(v, v_layout)?];
        let problem = self.problem(views)?;
        let (out, completed) = cpu::forward(&self.scheme, &problem);
        self.save(Completed::Cpu(completed))?;
        let dtype = q.dtype();
        Ok((to_storage(out, dtype)?, shape_of(self.shape.output_dims())))
    }

    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_layout: &Layout,
        k: &CudaStorage,
        k_layout: &Layout,
        v: &CudaStorage,
        v_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let inputs = [(q, q_layout), (k, k_layout), (v, v_layout)];
        let (out, completed): (_, Option<Box<dyn CompletedOnGpu>>) =
            self.launch((inputs, self.saved.is_some()))?;
        if let Some(completed) = completed {
            self.save(Completed::Cuda(completed))?;
        }
        Ok((out, shape_of(self.shape.output_dims())))
    }

    fn bwd(&self, q: &Tensor, k: &Tensor, v: &Tensor, out: &Tensor, dout: &Tensor) -> Result<Gradients> {
        // Kernels load non-adjacent channels element by element, which is slow. `dout` may have such channels if
        // `Tensor::narrow` was applied to the output.
        let copied =
            (dout.device().is_cuda() && dout.stride()[3] != 1).then(|| dout.contiguous()).transpose()?;
        let dout = copied.as_ref().unwrap_or(dout);
        let saved = self.saved.as_deref();
        let dlse = saved.and_then(|saved| saved.dlse.lock().unwrap_or_else(PoisonError::into_inner).take());
        let (tensors, dlse) = ([q, k, v, out, dout], dlse.as_ref());
        match saved.and_then(|saved| saved.completed.get()) {
            Some(Completed::Cpu(completed)) => self.cpu_bwd(completed.as_ref(), tensors, dlse),
            Some(Completed::Cuda(completed)) => self.cuda_bwd(completed.as_ref(), tensors, dlse),
            None => Err(Error::new("the backward of attention needs a forward that kept its state")
                .hint(REPORT)
                .into()),
        }
    }
}
