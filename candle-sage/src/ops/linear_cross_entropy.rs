//! Cross-entropy directly from hidden states and the output matrix, without a tensor of all logits.

use std::sync::OnceLock;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp3, InplaceOp3, Layout, Result, Shape, Tensor};

use super::cross_entropy::{CrossEntropy, classes, verdict};
use super::support::{
    argument_error, check_sum, cpu_storage, cuda_tensor, f32_tensor, f32_values, f32_values_mut, ids,
    no_forward, run_twice, shape_error, shapes_of, supported, with_cuda,
};
use crate::cpu::ops::cross_entropy::{Linear, linear_pass};
use crate::cpu::product::Mat;
use crate::launch::{Backward, Launch};

const LINEAR: &str = "linear-cross-entropy";

/// [`cross_entropy`](crate::ops::cross_entropy) of `hidden weight^T`, without storing all logits.
///
/// `hidden` is (rows, width) and `weight` (classes, width), both in f32, f16 or bf16. `targets` is (rows). The result
/// is an f32 scalar. Logits are computed and used in chunks of [`CrossEntropy::chunk_rows`] rows. For a tracked input
/// the forward also computes the gradient, chunk by chunk, so that logits are computed only once; the backward
/// multiplies this gradient by the loss's gradient. The CPU computes everything in f32. On a GPU `hidden` and
/// `weight` must have one element type, in which logits and matmuls are computed; the rest is computed in f32.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use candle_sage::ops::{CrossEntropy, cross_entropy, linear_cross_entropy};
///
/// let hidden = Var::randn(0f32, 1., (4, 8), &Device::Cpu)?;
/// let weight = Var::randn(0f32, 1., (16, 8), &Device::Cpu)?;
/// let targets = Tensor::new(&[3u32, 1, 4, 1], &Device::Cpu)?;
/// let loss = linear_cross_entropy(&hidden, &weight, &targets, CrossEntropy::default())?;
/// // The same as from logits.
/// let logits = hidden.matmul(&weight.t()?)?;
/// let expected = cross_entropy(&logits, &targets, CrossEntropy::default())?.to_scalar::<f32>()?;
/// assert!((loss.to_scalar::<f32>()? - expected).abs() < 1e-5);
/// assert_eq!(loss.backward()?.get(&weight).unwrap().dims(), weight.dims());
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As [`cross_entropy`](crate::ops::cross_entropy).
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

/// The loss of [`linear_cross_entropy`] and the inputs' gradients, for training loops that do not use candle's graph.
/// Returns the loss (an f32 scalar) and the gradient of `factor * loss` for `hidden` (in the type of `hidden`).
/// The gradient of `factor * loss` for `weight` is added to `dweight`, contiguous (classes, width) in f32.
///
/// On a GPU the function does not wait for the device: a target that is not a class makes the loss NaN.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_sage::ops::{CrossEntropy, linear_cross_entropy_into};
///
/// let hidden = Tensor::ones((2, 3), DType::F32, &Device::Cpu)?;
/// let weight = Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?;
/// let targets = Tensor::new(&[0u32, 0], &Device::Cpu)?;
/// let dweight = Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?;
/// let (loss, dhidden) =
///     linear_cross_entropy_into(&dweight, &hidden, &weight, &targets, CrossEntropy::default(), 1.0)?;
/// assert!((loss.to_scalar::<f32>()? - 2f32.ln()).abs() < 1e-6);
/// assert_eq!(dhidden.dims(), hidden.dims());
/// // Both classes have the probability 1/2, and the first is the target.
/// let of_target = dweight.get(0)?.to_vec1::<f32>()?;
/// assert!(of_target.iter().all(|x| (x + 0.5).abs() < 1e-6));
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As [`linear_cross_entropy`], and when `dweight` has another shape or type, or `ignore_id` is set; on a GPU a target
/// that is not a class is not an error.
pub fn linear_cross_entropy_into(
    dweight: &Tensor,
    hidden: &Tensor,
    weight: &Tensor,
    targets: &Tensor,
    settings: CrossEntropy,
    factor: f64,
) -> Result<(Tensor, Tensor)> {
    check_linear(hidden, weight, targets, settings)?;
    check_into(dweight, weight.dims(), settings)?;
    supported(LINEAR, &[dweight, hidden, weight])?;
    let op = LinearInto { targets: targets.clone(), settings, factor: factor as f32, made: OnceLock::new() };
    dweight.inplace_op3(&hidden.detach(), &weight.detach(), &op)?;
    op.made.into_inner().ok_or_else(|| no_forward().into())
}

/// Checks the settings, and the weight's gradient, to which the op adds in place.
pub(super) fn check_into(dweight: &Tensor, weight: &[usize], settings: CrossEntropy) -> Result<()> {
    check_sum("linear_cross_entropy_into", dweight, weight)?;
    if let Some(ignored) = settings.ignore_id {
        return Err(argument_error(
            "linear_cross_entropy_into does not support ignore_id",
            ignored,
            "None",
            "linear_cross_entropy supports ignore_id",
        ));
    }
    check_chunk(settings)
}

fn check_chunk(settings: CrossEntropy) -> Result<()> {
    if settings.chunk_rows != Some(0) {
        return Ok(());
    }
    Err(argument_error(
        "linear_cross_entropy: chunk_rows is out of range",
        0,
        "1 and up",
        "`None` chooses a size",
    ))
}

fn check_linear(hidden: &Tensor, weight: &Tensor, targets: &Tensor, settings: CrossEntropy) -> Result<()> {
    let fits = match (hidden.dims(), weight.dims()) {
        (&[n, width], &[classes, w]) => width == w && classes > 0 && targets.dims() == [n],
        _ => false,
    };
    if !fits {
        return Err(shape_error(
            "linear_cross_entropy: the inputs do not match",
            shapes_of(&[("hidden", hidden), ("weight", weight), ("targets", targets)]),
            "hidden (rows, width), weight (classes, width), targets (rows)",
            "flatten batch and sequence first: `flatten(0, 1)`",
        ));
    }
    check_chunk(settings)?;
    supported(LINEAR, &[hidden, weight, targets])
}

enum LinearSaved {
    Cpu(UnitGradients),
    Cuda(Backward<1, [Option<CudaStorage>; 2]>),
}

/// Gradients of the inputs if the loss's gradient is 1; empty for an untracked input.
struct UnitGradients {
    hidden: Vec<f32>,
    weight: Vec<f32>,
}

pub(crate) struct LinearOp {
    pub(crate) settings: CrossEntropy,
    /// Whether the hidden states and the weight are tracked. No gradient is computed for an untracked input.
    pub(crate) wanted: [bool; 2],
    saved: OnceLock<LinearSaved>,
}

/// The most bytes of a chunk of logits on the CPU, unless [`CrossEntropy::chunk_rows`] is set.
const CPU_BYTES: usize = 64 << 20;

impl CrossEntropy {
    /// The number of rows of logits to compute at a time: `chunk_rows`, or else as many as fit in `bytes`.
    pub(crate) fn rows_at_once(self, classes: usize, element: usize, bytes: usize) -> usize {
        self.chunk_rows.unwrap_or((bytes / element / classes).max(1))
    }

    pub(super) fn pass(
        self,
        hidden: &[f32],
        weight: Mat<'_>,
        targets: &[i64],
        factor: f32,
        gradients: [&mut [f32]; 2],
        rounded: Option<&(dyn Fn(f32) -> f32 + Sync)>,
    ) -> Result<f32> {
        let (outputs, width) = weight.dims();
        let (targets, counted) = classes(targets, outputs, self)?;
        let chunk_rows = self.rows_at_once(outputs, size_of::<f32>(), CPU_BYTES);
        let linear = Linear { targets: &targets, counted, chunk_rows, z_loss: self.z_loss, rounded };
        Ok(linear_pass(hidden, weight, [outputs, width], &linear, factor, gradients))
    }
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
        let loss = self.settings.pass(&hidden, weight, &targets, 1.0, into, None)?;
        if hidden_wanted || weight_wanted {
            self.saved.set(LinearSaved::Cpu(gradients)).map_err(run_twice)?;
        }
        Ok((CpuStorage::F32(vec![loss]), Shape::from(())))
    }

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
        let all = [(hidden, hidden_layout), (weight, weight_layout), (targets, targets_layout)];
        let (loss, saved, checked) = self.launch(all)?;
        verdict(checked, rows, classes)?;
        if self.wanted.contains(&true) {
            self.saved.set(LinearSaved::Cuda(saved)).map_err(run_twice)?;
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
        let unit = match self.saved.get().ok_or_else(no_forward)? {
            LinearSaved::Cpu(unit) => unit,
            LinearSaved::Cuda(saved) => {
                let [dhidden, dweight]: [Option<_>; 2] =
                    with_cuda(LINEAR, [dloss], |operands| saved.launch(operands))?;
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

/// Adds the output matrix's gradient to the op's first tensor, and stores the loss and the hidden states' gradient in
/// `made`.
pub(crate) struct LinearInto {
    targets: Tensor,
    pub(crate) settings: CrossEntropy,
    pub(crate) factor: f32,
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
        let loss = self.settings.pass(&hidden, matrix, &targets, self.factor, into, None)?;
        let loss = Tensor::new(loss, &candle_core::Device::Cpu)?;
        let dhidden = f32_tensor(dhidden, hidden_layout.shape(), dtype)?;
        self.made.set((loss, dhidden)).map_err(|made| run_twice(made).into())
    }

    fn cuda_fwd(
        &self,
        dweight: &mut CudaStorage,
        dweight_layout: &Layout,
        hidden: &CudaStorage,
        hidden_layout: &Layout,
        weight: &CudaStorage,
        weight_layout: &Layout,
    ) -> Result<()> {
        let (dweight, hidden) = ((&*dweight, dweight_layout), (hidden, hidden_layout));
        let weight = (weight, weight_layout);
        let [loss, dhidden] =
            with_cuda(LINEAR, [&self.targets], |[targets]| self.launch([dweight, hidden, weight, targets]))?;
        let made = (cuda_tensor(loss, ()), cuda_tensor(dhidden, hidden.1.shape()));
        self.made.set(made).map_err(|made| run_twice(made).into())
    }
}
