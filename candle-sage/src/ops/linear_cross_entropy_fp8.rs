//! Cross-entropy from FP8 hidden states and an FP8 output matrix, with the gradient of the logits in FP8.

use std::sync::OnceLock;

use candle_core::{CpuStorage, CudaStorage, DType, Device, InplaceOp1, Layout, Result, Tensor};

use super::cross_entropy::CrossEntropy;
use super::fp8::Fp8Matrix;
use super::fp8_linear::Fp8Linear;
use super::linear_cross_entropy::check_into;
use super::support::{
    cpu_storage, cuda_tensor, f32_tensor, f32_values_mut, ids, no_forward, run_twice, shape_error, supported,
    with_cuda,
};
use crate::cpu::product::Mat;
use crate::launch::Launch;

const NAME: &str = "linear-cross-entropy-fp8";

/// [`linear_cross_entropy_into`](super::linear_cross_entropy_into) with all three matmuls in FP8:
///
/// ```text
/// logits  = q(hidden) q(weight)^T                                  q: rounded to FP8
/// dhidden = q(dlogits) q(weight),  dweight += q(dlogits)^T q(hidden)
/// ```
///
/// `hidden` is (rows, width), `weight` (classes, width), each with both copies
/// ([`Fp8Copies::Both`](super::Fp8Copies::Both)). The returned gradient of `hidden` has the type `dtype`. On a GPU
/// the logits have this type too. The loss and `dweight` are f32. The scale of the logits' gradient is computed from
/// `factor / rows`, not from the elements: each element is a number between -1 and 1, times `factor / rows`. (With a
/// z-loss the numbers can be larger; numbers beyond 1.75 saturate.) The logits' gradient has the format
/// `linear.gradient`. Prefer E5M2: probabilities are small, and E4M3 flushes probabilities below `2^-18` to zero.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_sage::fp8::Fp8Format::{E4M3, E5M2};
/// use candle_sage::ops::{CrossEntropy, Fp8Copies, Fp8Linear, Fp8Matrix, linear_cross_entropy_into_fp8};
///
/// let quantized = |x: &Tensor| Fp8Matrix::quantize(x, E4M3, Fp8Copies::Both);
/// let hidden = quantized(&Tensor::ones((16, 32), DType::F32, &Device::Cpu)?)?;
/// let weight = quantized(&Tensor::zeros((64, 32), DType::F32, &Device::Cpu)?)?;
/// let (targets, dweight) = (Tensor::zeros(16, DType::U32, &Device::Cpu)?, Tensor::zeros((64, 32), DType::F32, &Device::Cpu)?);
/// let linear = Fp8Linear::default().gradient(E5M2);
/// let (loss, dhidden) = linear_cross_entropy_into_fp8(
///     &dweight, &hidden, &weight, &targets, CrossEntropy::default(), 1.0, linear, DType::F32,
/// )?;
/// assert!((loss.to_scalar::<f32>()? - 64f32.ln()).abs() < 1e-5);
/// assert_eq!(dhidden.dims(), [16, 32]);
/// // The target's class: 1/64 - 1, rounded to two bits of mantissa.
/// assert!((dweight.get(0)?.get(0)?.to_scalar::<f32>()? + 1.0).abs() < 0.02);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As [`linear_cross_entropy_into`](super::linear_cross_entropy_into) and [`Fp8Matrix::product`].
#[allow(
    clippy::too_many_arguments,
    reason = "the arguments of `linear_cross_entropy_into`, and two for the matmuls"
)]
pub fn linear_cross_entropy_into_fp8(
    dweight: &Tensor,
    hidden: &Fp8Matrix,
    weight: &Fp8Matrix,
    targets: &Tensor,
    settings: CrossEntropy,
    factor: f64,
    linear: Fp8Linear,
    dtype: DType,
) -> Result<(Tensor, Tensor)> {
    let ((rows, width), (classes, inputs)) = (hidden.dims(), weight.dims());
    if width != inputs || targets.dims() != [rows] {
        return Err(shape_error(
            "linear_cross_entropy_into_fp8: the inputs do not match",
            format!("hidden {:?}, weight {:?}, targets {:?}", hidden.dims(), weight.dims(), targets.dims()),
            "hidden (rows, width), weight (classes, width), targets (rows)",
            "flatten batch and sequence first: `flatten(0, 1)`",
        ));
    }
    check_into(dweight, &[classes, width], settings)?;
    supported(NAME, &[dweight, hidden.rows()?, weight.rows()?, targets])?;
    let op = LinearIntoFp8 {
        operands: [hidden.clone(), hidden.t(), weight.clone(), weight.t()],
        targets: targets.clone(),
        settings,
        linear,
        dtype,
        factor: factor as f32 / rows as f32,
        made: OnceLock::new(),
    };
    dweight.inplace_op1(&op)?;
    op.made.into_inner().ok_or_else(|| no_forward().into())
}

/// An in-place op on the weight's gradient: adds this op's gradient of the weight to it, and stores the loss and the
/// hidden states' gradient in `made`.
#[allow(dead_code, reason = "kernels read some of it")]
pub(crate) struct LinearIntoFp8 {
    /// `hidden`, its transpose, `weight`, its transpose.
    pub(crate) operands: [Fp8Matrix; 4],
    targets: Tensor,
    pub(crate) settings: CrossEntropy,
    pub(crate) linear: Fp8Linear,
    pub(crate) dtype: DType,
    /// `factor` of [`linear_cross_entropy_into_fp8`], divided by the number of rows of `hidden`.
    pub(crate) factor: f32,
    made: OnceLock<(Tensor, Tensor)>,
}

impl LinearIntoFp8 {
    /// The scale of the logits' gradient.
    pub(crate) fn scale(&self) -> f32 {
        let size = if self.factor == 0.0 { 1.0 } else { self.factor.abs() };
        self.linear.gradient.scale(1.75) * size
    }
}

impl InplaceOp1 for LinearIntoFp8 {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, dweight: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let [hidden, _, weight, _] = &self.operands;
        let values = |matrix: &Fp8Matrix| matrix.dequantize()?.flatten_all()?.to_vec1::<f32>();
        let ((rows, width), (classes, _)) = (hidden.dims(), weight.dims());
        let (hidden, weight) = (values(hidden)?, values(weight)?);
        let targets = {
            let (storage, layout) = self.targets.storage_and_layout();
            ids(NAME, cpu_storage(&storage, NAME)?, layout)?
        };
        let mut dhidden = vec![0.0; hidden.len()];
        let dweight = f32_values_mut(NAME, dweight, layout)?;
        let (scale, format) = (self.scale(), self.linear.gradient);
        let rounded = |x: f32| format.round(x / scale) * scale;
        let loss = self.settings.pass(
            &hidden,
            Mat::new(&weight, classes, width),
            &targets,
            self.factor * rows as f32,
            [&mut *dhidden, dweight],
            Some(&rounded),
        )?;
        let dhidden = f32_tensor(dhidden, (rows, width), self.dtype)?;
        self.made.set((Tensor::new(loss, &Device::Cpu)?, dhidden)).map_err(|made| run_twice(made).into())
    }

    fn cuda_fwd(&self, dweight: &mut CudaStorage, layout: &Layout) -> Result<()> {
        let [hidden, hidden_t, weight, weight_t] = &self.operands;
        let operands = [
            hidden.rows()?,
            hidden_t.rows()?,
            weight.rows()?,
            weight_t.rows()?,
            hidden.scale(),
            weight.scale(),
            &self.targets,
        ];
        let [loss, dhidden] = with_cuda(NAME, operands, |inputs| self.launch(((&*dweight, layout), inputs)))?;
        let made = (cuda_tensor(loss, ()), cuda_tensor(dhidden, hidden.dims()));
        self.made.set(made).map_err(|made| run_twice(made).into())
    }
}
