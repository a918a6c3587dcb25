//! Cross-entropy, from logits or directly from hidden states and the output matrix.

use std::sync::OnceLock;

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, CustomOp3, InplaceOp3, Layout, Result, Shape, Tensor};
use multiversion::multiversion;
use rayon::prelude::*;

use super::support::{
    cpu_storage, f32_tensor, f32_values, f32_values_mut, ids, shape_error, supported, with_f32,
};
#[cfg(feature = "cuda")]
use super::support::{cuda_tensor, with_cuda};
use crate::cpu::lanes;
use crate::cpu::product::{Mat, product_parallel};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::Error;

const NAME: &str = "cross-entropy";
const LINEAR: &str = "linear-cross-entropy";

/// Settings of a cross-entropy.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[non_exhaustive]
pub struct CrossEntropy {
    /// Targets with this id do not count (PyTorch's default is -100). `None`: all targets count.
    pub ignore_id: Option<i64>,
    /// Rows of logits that [`linear_cross_entropy`] computes at a time. `None`: as many as fit 64 MiB, on a
    /// GPU 256 MiB.
    pub chunk_rows: Option<usize>,
    /// The z-loss: `z_loss * logsumexp(logits[n])^2` is added to the loss of each target, which keeps logits
    /// from drifting (PaLM, arXiv 2204.02311, section 5, with 1e-4). 0 adds nothing.
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

/// Mean over the targets of `logsumexp(logits[n]) - logits[n][target[n]]`, in nats, and of the z-loss.
///
/// `logits` is (rows, classes) in f32, f16 or bf16, `targets` is (rows) in u8, u32 or i64; the result is an
/// f32 scalar. The logits receive the gradient `((1 + 2 z_loss logsumexp) softmax - onehot) / targets that
/// count`. The forward keeps one f32 per row. For a language model prefer [`linear_cross_entropy`], which
/// never holds all logits. On a GPU the check of the targets waits for the device.
///
/// # Errors
/// When the shapes do not match, a target is not a class, or no target counts.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor, settings: CrossEntropy) -> Result<Tensor> {
    let fits = matches!(*logits.dims(), [n, classes] if targets.dims() == [n] && classes > 0);
    if !fits {
        return Err(shape_error(
            "cross_entropy: logits and targets do not match",
            (logits.dims(), targets.dims()),
            "logits (rows, classes), targets (rows)",
            "flatten batch and sequence first: `flatten(0, 1)`",
        ));
    }
    supported(NAME, &[logits, targets])?;
    logits.apply_op2(targets, LogitsOp { settings, saved: OnceLock::new() })
}

/// [`cross_entropy`] of `hidden weight^T`, without ever holding all logits.
///
/// `hidden` is (rows, width), `weight` (classes, width) in f32, f16 or bf16, `targets` (rows); the result is
/// an f32 scalar. Logits are computed and used [`CrossEntropy::chunk_rows`] at a time. When an input is
/// tracked the forward also computes its gradient, chunk by chunk, so that logits are computed only once; the
/// backward multiplies it by the loss's gradient. On the CPU all of it is f32; on a GPU logits and products
/// have the element type of the inputs, which must be one, and everything else is f32.
///
/// # Errors
/// As [`cross_entropy`].
pub fn linear_cross_entropy(
    hidden: &Tensor,
    weight: &Tensor,
    targets: &Tensor,
    settings: CrossEntropy,
) -> Result<Tensor> {
    check_linear(hidden, weight, targets, settings)?;
    let wanted = [hidden.track_op(), weight.track_op()];
    let tracked = wanted.contains(&true);
    let op = LinearOp { settings, wanted, saved: OnceLock::new() };
    if tracked {
        hidden.apply_op3(weight, targets, op)
    } else {
        hidden.apply_op3_no_bwd(weight, targets, &op)
    }
}

/// The loss of [`linear_cross_entropy`] and both gradients at once, outside candle's graph, for training
/// loops that do not use it. Returns the loss, an f32 scalar, and the gradient of `factor * loss` for the
/// hidden states, in their type; the weight's gradient is added to `dweight`, contiguous (classes, width) in
/// f32.
///
/// All targets count. On a GPU it does not wait for the device: a target that is no class makes the loss NaN.
///
/// # Errors
/// As [`linear_cross_entropy`], and when `dweight` does not fit or `ignore_id` is set; on a GPU a target that
/// is no class is no error.
pub fn linear_cross_entropy_into(
    dweight: &Tensor,
    hidden: &Tensor,
    weight: &Tensor,
    targets: &Tensor,
    settings: CrossEntropy,
    factor: f64,
) -> Result<(Tensor, Tensor)> {
    check_linear(hidden, weight, targets, settings)?;
    super::support::check_sum("linear_cross_entropy_into", dweight, weight.dims())?;
    if settings.ignore_id.is_some() {
        return Err(shape_error(
            "linear_cross_entropy_into: all targets count",
            settings.ignore_id,
            "no ignore_id",
            "linear_cross_entropy takes one",
        ));
    }
    supported(LINEAR, &[dweight, hidden, weight])?;
    let op = LinearInto { targets: targets.clone(), settings, factor: factor as f32, made: OnceLock::new() };
    dweight.inplace_op3(&hidden.detach(), &weight.detach(), &op)?;
    op.made.into_inner().ok_or_else(|| no_forward().into())
}

fn check_linear(hidden: &Tensor, weight: &Tensor, targets: &Tensor, settings: CrossEntropy) -> Result<()> {
    let fits = match (hidden.dims(), weight.dims()) {
        (&[n, width], &[classes, w]) => width == w && classes > 0 && targets.dims() == [n],
        _ => false,
    };
    if !fits {
        return Err(shape_error(
            "linear_cross_entropy: the inputs do not match",
            (hidden.dims(), weight.dims(), targets.dims()),
            "hidden (rows, width), weight (classes, width), targets (rows)",
            "flatten batch and sequence first: `flatten(0, 1)`",
        ));
    }
    if settings.chunk_rows == Some(0) {
        return Err(shape_error(
            "linear_cross_entropy: chunk_rows is out of range",
            0,
            "1 and up",
            "leave it out",
        ));
    }
    supported(LINEAR, &[hidden, weight, targets])
}

/// The class of each row, `None` where the target does not count, and the number of targets that count.
fn classes(targets: &[i64], classes: usize, settings: CrossEntropy) -> Result<(Vec<Option<usize>>, usize)> {
    let mut out = Vec::with_capacity(targets.len());
    for &target in targets {
        let ignored = settings.ignore_id == Some(target);
        if !ignored && !(0..classes as i64).contains(&target) {
            return Err(not_a_class(target, classes).into());
        }
        out.push((!ignored).then_some(target as usize));
    }
    let counted = out.iter().flatten().count();
    if counted == 0 {
        return Err(none_counts(out.len()).into());
    }
    Ok((out, counted))
}

fn not_a_class(target: i64, classes: usize) -> Error {
    Error::new("cross_entropy: a target is not a class")
        .got(target)
        .allowed(format!("0 to {}", classes - 1))
        .hint("set `ignore_id` when some targets should not count")
}

fn none_counts(targets: usize) -> Error {
    Error::new("cross_entropy: no target counts")
        .got(format!("{targets} targets, all ignored"))
        .allowed("at least one target")
        .hint("skip the batch")
}

/// The error, if any, that a GPU's check of the targets found.
#[cfg(feature = "cuda")]
fn verdict(checked: cuda::ops::Checked, targets: usize, classes: usize) -> Result<()> {
    match checked {
        cuda::ops::Checked { bad: Some(target), .. } => Err(not_a_class(target, classes).into()),
        cuda::ops::Checked { counted: 0, .. } => Err(none_counts(targets).into()),
        _ => Ok(()),
    }
}

fn run_twice<T>(_: T) -> Error {
    Error::new("a cross-entropy op value was run twice")
}

fn no_forward() -> Error {
    Error::new("cross-entropy has no forward to go back from")
}

/// The natural log-sum-exp of a row.
#[multiversion(targets = "simd")]
fn log_sum_exp(row: &[f32]) -> f32 {
    let max = lanes::max(row);
    let mut sum = 0.0;
    for chunk in row.chunks(256) {
        let mut terms = [0.0; 256];
        for (term, x) in terms.iter_mut().zip(chunk) {
            *term = lanes::exp2((x - max) * std::f32::consts::LOG2_E);
        }
        sum += lanes::sum(&terms[..chunk.len()]);
    }
    max + sum.ln()
}

/// Turns a row of logits into `factor * ((1 + 2 z_loss lse) softmax(row) - onehot(target))`.
#[multiversion(targets = "simd")]
fn to_gradient(row: &mut [f32], lse: f32, target: usize, factor: f32, z_loss: f32) {
    let raised = factor * (1.0 + 2.0 * z_loss * lse);
    for x in row.iter_mut() {
        *x = raised * lanes::exp2((*x - lse) * std::f32::consts::LOG2_E);
    }
    row[target] -= factor;
}

/// The loss of a row, from its log-sum-exp and the logit of its target.
fn row_loss(lse: f32, picked: f32, settings: CrossEntropy) -> f32 {
    lse - picked + settings.z_loss * lse * lse
}

/// The mean of the losses, summed in row order in f64.
fn mean_loss(losses: impl Iterator<Item = f32>, counted: usize) -> f32 {
    (losses.map(f64::from).sum::<f64>() / counted as f64) as f32
}

struct LogitsOp {
    settings: CrossEntropy,
    saved: OnceLock<Saved>,
}

/// What a forward from logits keeps for its backward, by the device on which it ran.
enum Saved {
    /// The log-sum-exp of each row.
    Cpu(Vec<f32>),
    #[cfg(feature = "cuda")]
    Cuda(cuda::ops::cross_entropy::Saved),
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
            rows.filter_map(|((t, row), &lse)| t.map(|t| row_loss(lse, row[t], self.settings))),
            counted,
        );
        self.saved.set(Saved::Cpu(lse)).map_err(run_twice)?;
        Ok((CpuStorage::F32(vec![loss]), Shape::from(())))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        logits: &CudaStorage,
        logits_layout: &Layout,
        targets: &CudaStorage,
        targets_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let (rows, classes) = logits_layout.shape().dims2()?;
        let (loss, saved, checked) = cuda::ops::cross_entropy::forward(
            (logits, logits_layout),
            (targets, targets_layout),
            self.settings.ignore_id,
            self.settings.z_loss,
        )?;
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
        #[cfg_attr(
            not(feature = "cuda"),
            expect(clippy::infallible_destructuring_match, reason = "one device")
        )]
        let lse = match self.saved.get().ok_or_else(no_forward)? {
            Saved::Cpu(lse) => lse,
            #[cfg(feature = "cuda")]
            Saved::Cuda(saved) => {
                let grad = with_cuda(NAME, [logits, dloss], |[logits, dloss]| {
                    cuda::ops::cross_entropy::backward(saved, logits, dloss)
                })?;
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

/// What a linear forward keeps for its backward, by the device on which it ran.
enum LinearSaved {
    Cpu(UnitGradients),
    #[cfg(feature = "cuda")]
    Cuda(Box<cuda::ops::cross_entropy::LinearSaved>),
}

/// Gradients for a loss's gradient of 1; empty where none is wanted.
struct UnitGradients {
    hidden: Vec<f32>,
    weight: Vec<f32>,
}

struct LinearOp {
    settings: CrossEntropy,
    /// Whether the hidden states and the weight are tracked. Nothing is computed for the gradient of an
    /// untracked one.
    wanted: [bool; 2],
    saved: OnceLock<LinearSaved>,
}

/// Bytes of logits that are held at once.
const CPU_BYTES: usize = 64 << 20;
#[cfg(feature = "cuda")]
const GPU_BYTES: usize = 256 << 20;

impl CrossEntropy {
    /// Rows of logits to compute at a time, if logits may take `bytes`.
    fn rows_at_once(self, classes: usize, element: usize, bytes: usize) -> usize {
        self.chunk_rows.unwrap_or((bytes / element / classes).max(1))
    }
}

#[cfg(feature = "cuda")]
impl CrossEntropy {
    fn on_gpu(self, classes: usize, element: usize) -> cuda::ops::cross_entropy::Linear {
        cuda::ops::cross_entropy::Linear {
            ignored: self.ignore_id,
            chunk_rows: self.rows_at_once(classes, element, GPU_BYTES),
            z_loss: self.z_loss,
        }
    }
}

/// One pass over the chunks of logits on the CPU. It returns the mean loss, and writes the gradients times
/// `factor` to the slices that are not empty; the weight's gradient is added to what its slice holds.
fn linear_pass(
    hidden: &[f32],
    weight: Mat<'_>,
    [outputs, width]: [usize; 2],
    targets: &[i64],
    settings: CrossEntropy,
    factor: f32,
    [dhidden, dweight]: [&mut [f32]; 2],
) -> Result<f32> {
    let rows = targets.len();
    let (targets, counted) = classes(targets, outputs, settings)?;
    let chunk = settings.rows_at_once(outputs, size_of::<f32>(), CPU_BYTES).min(rows);
    let mut logits = vec![0.0; chunk * outputs];
    let mut losses = vec![0.0; rows];
    let wanted = !dhidden.is_empty() || !dweight.is_empty();
    let factor = factor / counted as f32;
    for start in (0..rows).step_by(chunk) {
        let end = (start + chunk).min(rows);
        let inputs = Mat::new(&hidden[start * width..end * width], end - start, width);
        let logits = &mut logits[..(end - start) * outputs];
        product_parallel(logits, inputs, weight.t(), 1.0, false);
        let rows = logits.par_chunks_mut(outputs).zip(&mut losses[start..end]).zip(&targets[start..end]);
        rows.for_each(|((row, loss), target)| {
            let Some(target) = *target else {
                row.fill(0.0);
                return;
            };
            let lse = log_sum_exp(row);
            *loss = row_loss(lse, row[target], settings);
            if wanted {
                to_gradient(row, lse, target, factor, settings.z_loss);
            }
        });
        let dlogits = Mat::new(logits, end - start, outputs);
        if !dhidden.is_empty() {
            product_parallel(&mut dhidden[start * width..end * width], dlogits, weight, 1.0, false);
        }
        if !dweight.is_empty() {
            product_parallel(dweight, dlogits.t(), inputs, 1.0, true);
        }
    }
    Ok(mean_loss(losses.into_iter(), counted))
}

impl CustomOp3 for LinearOp {
    fn name(&self) -> &'static str {
        LINEAR
    }

    fn cpu_fwd(
        &self,
        hidden: &CpuStorage,
        hidden_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
        targets: &CpuStorage,
        targets_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (rows, width) = hidden_layout.shape().dims2()?;
        let (outputs, _) = weight_layout.shape().dims2()?;
        let hidden = f32_values(LINEAR, hidden, hidden_layout)?;
        let weight = f32_values(LINEAR, weight, weight_layout)?;
        let targets = ids(LINEAR, targets, targets_layout)?;
        let weight = Mat::new(&weight, outputs, width);
        let [hidden_wanted, weight_wanted] = self.wanted;
        let mut gradients = UnitGradients {
            hidden: vec![0.0; if hidden_wanted { rows * width } else { 0 }],
            weight: vec![0.0; if weight_wanted { outputs * width } else { 0 }],
        };
        let into = [&mut *gradients.hidden, &mut *gradients.weight];
        let loss = linear_pass(&hidden, weight, [outputs, width], &targets, self.settings, 1.0, into)?;
        if hidden_wanted || weight_wanted {
            self.saved.set(LinearSaved::Cpu(gradients)).map_err(run_twice)?;
        }
        Ok((CpuStorage::F32(vec![loss]), Shape::from(())))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        hidden: &CudaStorage,
        hidden_layout: &Layout,
        weight: &CudaStorage,
        weight_layout: &Layout,
        targets: &CudaStorage,
        targets_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let (rows, _) = hidden_layout.shape().dims2()?;
        let (classes, _) = weight_layout.shape().dims2()?;
        let (loss, saved, checked) = cuda::ops::cross_entropy::linear_forward(
            (hidden, hidden_layout),
            (weight, weight_layout),
            (targets, targets_layout),
            self.settings.on_gpu(classes, hidden.dtype().size_in_bytes()),
            self.wanted,
        )?;
        verdict(checked, rows, classes)?;
        if self.wanted.contains(&true) {
            self.saved.set(LinearSaved::Cuda(Box::new(saved))).map_err(run_twice)?;
        }
        Ok((loss, Shape::from(())))
    }

    fn bwd(
        &self,
        hidden: &Tensor,
        weight: &Tensor,
        _targets: &Tensor,
        _loss: &Tensor,
        dloss: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        #[cfg_attr(
            not(feature = "cuda"),
            expect(clippy::infallible_destructuring_match, reason = "one device")
        )]
        let unit = match self.saved.get().ok_or_else(no_forward)? {
            LinearSaved::Cpu(unit) => unit,
            #[cfg(feature = "cuda")]
            LinearSaved::Cuda(saved) => {
                let [dhidden, dweight] = with_cuda(LINEAR, [dloss], |[dloss]| {
                    cuda::ops::cross_entropy::linear_backward(saved, dloss)
                })?;
                return Ok((
                    dhidden.map(|grad| cuda_tensor(grad, hidden.shape())),
                    dweight.map(|grad| cuda_tensor(grad, weight.shape())),
                    None,
                ));
            }
        };
        let factor = dloss.to_scalar::<f32>()?;
        let scaled = |unit: &[f32], like: &Tensor| {
            f32_tensor(unit.iter().map(|x| x * factor).collect(), like.shape(), like.dtype())
        };
        let [hidden_wanted, weight_wanted] = self.wanted;
        Ok((
            hidden_wanted.then(|| scaled(&unit.hidden, hidden)).transpose()?,
            weight_wanted.then(|| scaled(&unit.weight, weight)).transpose()?,
            None,
        ))
    }
}

/// Adds the weight's gradient in place, and leaves the other results, the loss and the gradient of the hidden
/// states, in `made`.
struct LinearInto {
    targets: Tensor,
    settings: CrossEntropy,
    factor: f32,
    made: OnceLock<(Tensor, Tensor)>,
}

impl InplaceOp3 for LinearInto {
    fn name(&self) -> &'static str {
        LINEAR
    }

    fn cpu_fwd(
        &self,
        dweight: &mut CpuStorage,
        dweight_layout: &Layout,
        hidden: &CpuStorage,
        hidden_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<()> {
        let (outputs, width) = weight_layout.shape().dims2()?;
        let dtype = hidden.dtype();
        let hidden = f32_values(LINEAR, hidden, hidden_layout)?;
        let weight = f32_values(LINEAR, weight, weight_layout)?;
        let targets = {
            let (storage, layout) = self.targets.storage_and_layout();
            ids(LINEAR, cpu_storage(&storage, LINEAR)?, layout)?
        };
        let mut dhidden = vec![0.0; hidden.len()];
        let dweight = f32_values_mut(LINEAR, dweight, dweight_layout)?;
        let matrix = Mat::new(&weight, outputs, width);
        let into = [&mut *dhidden, dweight];
        let size = [outputs, width];
        let loss = linear_pass(&hidden, matrix, size, &targets, self.settings, self.factor, into)?;
        let loss = Tensor::new(loss, &candle_core::Device::Cpu)?;
        let dhidden = f32_tensor(dhidden, hidden_layout.shape(), dtype)?;
        self.made.set((loss, dhidden)).map_err(|made| run_twice(made).into())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        dweight: &mut CudaStorage,
        dweight_layout: &Layout,
        hidden: &CudaStorage,
        hidden_layout: &Layout,
        weight: &CudaStorage,
        weight_layout: &Layout,
    ) -> Result<()> {
        let (classes, _) = weight_layout.shape().dims2()?;
        let settings = self.settings.on_gpu(classes, hidden.dtype().size_in_bytes());
        let [loss, dhidden] = with_cuda(LINEAR, [&self.targets], |[targets]| {
            cuda::ops::cross_entropy::linear_into(
                (dweight, dweight_layout),
                (hidden, hidden_layout),
                (weight, weight_layout),
                targets,
                settings,
                self.factor,
            )
        })?;
        let made = (cuda_tensor(loss, ()), cuda_tensor(dhidden, hidden_layout.shape()));
        self.made.set(made).map_err(|made| run_twice(made).into())
    }
}
