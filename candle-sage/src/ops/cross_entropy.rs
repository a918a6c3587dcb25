//! Cross-entropy from logits.

use std::sync::OnceLock;

use candle_core::{CpuStorage, CudaStorage, CustomOp2, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

use super::support::{
    cpu_storage, cuda_tensor, f32_tensor, f32_values, ids, no_forward, run_twice, shape_error, shapes_of,
    supported, with_cuda, with_f32,
};
use crate::cpu::ops::cross_entropy::{log_sum_exp, mean_loss, row_loss, to_gradient};
use crate::dtype::Checked;
use crate::error::Error;
use crate::launch::{Backward, Launch};

const NAME: &str = "cross-entropy";

/// Settings of a cross-entropy.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_sage::ops::{CrossEntropy, cross_entropy};
///
/// let logits = Tensor::zeros((2, 4), DType::F32, &Device::Cpu)?;
/// let targets = Tensor::new(&[1i64, -100], &Device::Cpu)?;
/// let settings = CrossEntropy::default().ignore_id(-100).z_loss(1e-4);
/// let loss = cross_entropy(&logits, &targets, settings)?.to_scalar::<f32>()?;
/// // Four classes have equal logits, and one target counts.
/// let expected = 4f32.ln() + 1e-4 * 4f32.ln().powi(2);
/// assert!((loss - expected).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[non_exhaustive]
pub struct CrossEntropy {
    /// Targets with this id are ignored (PyTorch's default is -100). `None`: all targets count.
    pub ignore_id: Option<i64>,
    /// Rows of logits that [`linear_cross_entropy`](crate::ops::linear_cross_entropy) computes at a time. `None`: as
    /// many as fit in 64 MiB, on a GPU in 256 MiB.
    pub chunk_rows: Option<usize>,
    /// The z-loss: `z_loss * logsumexp(logits[n])^2` is added to the loss of each target, so that logits do not drift
    /// (PaLM, arXiv 2204.02311, section 5, sets `z_loss` to 1e-4). 0 adds nothing.
    pub z_loss: f32,
}

impl CrossEntropy {
    /// Sets [`CrossEntropy::ignore_id`]: an id, or `None`.
    #[must_use]
    pub fn ignore_id(self, id: impl Into<Option<i64>>) -> Self {
        Self { ignore_id: id.into(), ..self }
    }

    /// Sets [`CrossEntropy::chunk_rows`]: a number of rows, or `None`.
    #[must_use]
    pub fn chunk_rows(self, rows: impl Into<Option<usize>>) -> Self {
        Self { chunk_rows: rows.into(), ..self }
    }

    /// Sets [`CrossEntropy::z_loss`].
    #[must_use]
    pub fn z_loss(self, weight: f32) -> Self {
        Self { z_loss: weight, ..self }
    }
}

/// The mean of `logsumexp(logits[n]) - logits[n][target[n]]` over the targets that are not ignored, in nats, plus the
/// [z-loss](CrossEntropy::z_loss).
///
/// `logits` is (rows, classes) in f32, f16 or bf16, `targets` is (rows) in u8, u32 or i64; the result is an f32 scalar.
/// The logits receive the gradient `((1 + 2 * z_loss * logsumexp) * softmax - onehot) / count`, where `count` is the
/// number of targets that are not ignored. The forward stores one f32 per row for the backward. For a language model
/// prefer [`linear_cross_entropy`](crate::ops::linear_cross_entropy), which never stores all logits. On a GPU the check
/// of the targets waits for the device.
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use candle_sage::ops::{CrossEntropy, cross_entropy};
///
/// let logits = Var::zeros((2, 2), DType::F32, &Device::Cpu)?;
/// let targets = Tensor::new(&[0u32, 1], &Device::Cpu)?;
/// let loss = cross_entropy(&logits, &targets, CrossEntropy::default())?;
/// assert!((loss.to_scalar::<f32>()? - 2f32.ln()).abs() < 1e-6);
/// let gradients = loss.backward()?;
/// let dlogits = gradients.get(&logits).unwrap().to_vec2::<f32>()?;
/// assert!((dlogits[0][0] + 0.25).abs() < 1e-6 && (dlogits[0][1] - 0.25).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// When the shapes do not match, a target is not a class, or all targets are ignored.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor, settings: CrossEntropy) -> Result<Tensor> {
    let fits = matches!(*logits.dims(), [n, classes] if targets.dims() == [n] && classes > 0);
    if !fits {
        return Err(shape_error(
            "cross_entropy: logits and targets do not match",
            shapes_of(&[("logits", logits), ("targets", targets)]),
            "logits (rows, classes), targets (rows)",
            "flatten batch and sequence first: `flatten(0, 1)`",
        ));
    }
    supported(NAME, &[logits, targets])?;
    logits.apply_op2(targets, LogitsOp { settings, saved: OnceLock::new() })
}

/// The class of each row (`None` if the row's target is ignored), and the number of targets that are not ignored.
pub(super) fn classes(
    targets: &[i64],
    classes: usize,
    settings: CrossEntropy,
) -> Result<(Vec<Option<usize>>, usize)> {
    let counts = |target: i64| settings.ignore_id != Some(target);
    let bad = targets.iter().copied().find(|&t| counts(t) && !(0..classes as i64).contains(&t));
    let out: Vec<_> = targets.iter().map(|&target| counts(target).then_some(target as usize)).collect();
    let counted = out.iter().flatten().count();
    verdict(Checked { bad, counted }, targets.len(), classes)?;
    Ok((out, counted))
}

fn not_a_class(target: i64, classes: usize) -> Error {
    Error::new("cross_entropy: a target is not a class")
        .got(target)
        .allowed(format!("0 to {}", classes - 1))
        .hint("set `ignore_id` when some targets should not count")
}

fn none_counts(targets: usize) -> Error {
    Error::new("cross_entropy: every target is ignored")
        .got(format!("{targets} targets, all ignored"))
        .allowed("at least one target that is not ignored")
        .hint("skip the batch")
}

pub(super) fn verdict(checked: Checked, targets: usize, classes: usize) -> Result<()> {
    match checked {
        Checked { bad: Some(target), .. } => Err(not_a_class(target, classes).into()),
        Checked { counted: 0, .. } => Err(none_counts(targets).into()),
        _ => Ok(()),
    }
}

pub(crate) struct LogitsOp {
    pub(crate) settings: CrossEntropy,
    saved: OnceLock<Saved>,
}

enum Saved {
    /// The log-sum-exp of each row.
    Cpu(Vec<f32>),
    Cuda(Backward<2, CudaStorage>),
}

impl CustomOp2 for LogitsOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        logits: &CpuStorage,
        logits_layout: &Layout,
        targets: &CpuStorage,
        targets_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (_, width) = logits_layout.shape().dims2()?;
        let logits = f32_values(NAME, logits, logits_layout)?;
        let (targets, counted) = classes(&ids(NAME, targets, targets_layout)?, width, self.settings)?;
        let lse: Vec<f32> = logits.par_chunks(width).map(log_sum_exp).collect();
        let rows = targets.iter().zip(logits.chunks_exact(width)).zip(&lse);
        let loss = mean_loss(
            rows.filter_map(|((t, row), &lse)| t.map(|t| row_loss(lse, row[t], self.settings.z_loss))),
            counted,
        );
        self.saved.set(Saved::Cpu(lse)).map_err(run_twice)?;
        Ok((CpuStorage::F32(vec![loss]), Shape::from(())))
    }

    fn cuda_fwd(
        &self,
        logits: &CudaStorage,
        logits_layout: &Layout,
        targets: &CudaStorage,
        targets_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let (rows, classes) = logits_layout.shape().dims2()?;
        let (loss, saved, checked) = self.launch([(logits, logits_layout), (targets, targets_layout)])?;
        verdict(checked, rows, classes)?;
        self.saved.set(Saved::Cuda(saved)).map_err(run_twice)?;
        Ok((loss, Shape::from(())))
    }

    fn bwd(
        &self,
        logits: &Tensor,
        targets: &Tensor,
        _loss: &Tensor,
        dloss: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let lse = match self.saved.get().ok_or_else(no_forward)? {
            Saved::Cpu(lse) => lse,
            Saved::Cuda(saved) => {
                let grad = with_cuda(NAME, [logits, dloss], |operands| saved.launch(operands))?;
                return Ok((Some(cuda_tensor(grad, logits.shape())), None));
            }
        };
        let (_, width) = logits.dims2()?;
        let ids = {
            let (storage, layout) = targets.storage_and_layout();
            ids(NAME, cpu_storage(&storage, NAME)?, layout)?
        };
        let (targets, counted) = classes(&ids, width, self.settings)?;
        let factor = dloss.to_scalar::<f32>()? / counted as f32;
        let z_loss = self.settings.z_loss;
        let grad = with_f32(NAME, [logits], |[logits]| {
            let mut grad = logits.to_vec();
            grad.par_chunks_mut(width).zip(lse).zip(&targets).for_each(
                |((row, &lse), target)| match *target {
                    Some(target) => to_gradient(row, lse, target, factor, z_loss),
                    None => row.fill(0.0),
                },
            );
            Ok(grad)
        })?;
        Ok((Some(f32_tensor(grad, logits.shape(), logits.dtype())?), None))
    }
}
