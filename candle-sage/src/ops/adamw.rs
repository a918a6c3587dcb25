//! AdamW in one pass over all parameters, and the sum of squares of a gradient.

use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, InplaceOp3, Layout, Result, Shape, Tensor};

use super::support::{argument_error, check_update, f32_values, f32_values_mut, supported, with_cuda};
use crate::cpu::ops::adamw::{squares, step};
use crate::launch::{Launch, Operand};
pub use crate::update::AdamW;

const NAME: &str = "adamw";
const SQUARES: &str = "sum-of-squares";

/// The sum of squares of all elements of an f32 tensor: an f64 scalar. The sum runs in f64, so it is finite if all
/// elements are finite. The order of the additions does not depend on the number of threads.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_sage::ops::sum_of_squares;
///
/// let gradient = Tensor::new(&[3f32, 4.], &Device::Cpu)?;
/// assert_eq!(sum_of_squares(&gradient)?.to_scalar::<f64>()?, 25.0);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// When `x` is not f32.
pub fn sum_of_squares(x: &Tensor) -> Result<Tensor> {
    if x.dtype() != DType::F32 {
        return Err(argument_error(
            "sum_of_squares needs f32",
            x.dtype().as_str(),
            "f32",
            "convert with `to_dtype`",
        ));
    }
    supported(SQUARES, &[x])?;
    x.detach().apply_op1_no_bwd(&SumOfSquares)
}

pub(crate) struct SumOfSquares;

impl CustomOp1 for SumOfSquares {
    fn name(&self) -> &'static str {
        SQUARES
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let values = f32_values(SQUARES, x, layout)?;
        Ok((CpuStorage::F64(vec![squares(&values)]), Shape::from(())))
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        Ok((self.launch([(x, layout)])?, Shape::from(())))
    }
}

impl AdamW {
    /// Updates all parameters in one pass, in place and without waiting for the device:
    /// `g = gradient * gradient_factor`, clipped; `m = beta1 * m + (1 - beta1) g`; `v = beta2 * v + (1 - beta2) g^2`;
    /// `w = (1 - lr * weight_decay) w - lr * m' / (sqrt(v') + eps)`.
    /// Here `m' = m / (1 - beta1^step)` and `v' = v / (1 - beta2^step)`.
    ///
    /// `state` is contiguous (3, parameters) in f32: weights, m, v. `gradient` is (parameters) in f32, and
    /// `sum_of_squares` is the [`sum_of_squares`] of the gradient. On a GPU `copy` receives the new weights in f16 or
    /// bf16, for the model's forward and backward. When the gradient's norm is not finite, nothing changes.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_sage::ops::{AdamW, sum_of_squares};
    ///
    /// let mut settings = AdamW::new(0.1);
    /// settings.clip = Some(1.0);
    /// let state = Tensor::zeros((3, 2), DType::F32, &Device::Cpu)?;
    /// let gradient = Tensor::new(&[3f32, -4.], &Device::Cpu)?;
    /// settings.step(&state, &gradient, &sum_of_squares(&gradient)?, None)?;
    /// // The first step moves each weight by the learning rate, against the sign of its gradient.
    /// let weights = state.get(0)?.to_vec1::<f32>()?;
    /// assert!((weights[0] + 0.1).abs() < 1e-6 && (weights[1] - 0.1).abs() < 1e-6);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the tensors do not match, the step is 0 or a beta is out of range; on CUDA, when a tensor is not aligned to
    /// 16 bytes, or the number of parameters is not a multiple of 4.
    pub fn step(
        &self,
        state: &Tensor,
        gradient: &Tensor,
        sum_of_squares: &Tensor,
        copy: Option<&Tensor>,
    ) -> Result<()> {
        check_update(NAME, 3, state, gradient, sum_of_squares, copy)?;
        // The correction of the moments' bias divides by 1 - beta^step.
        let betas = [self.beta1, self.beta2];
        if self.step == 0 || betas.iter().any(|beta| !(0.0..1.0).contains(beta)) {
            return Err(argument_error(
                "adamw: a setting is out of range",
                format_args!("step {}, betas {} and {}", self.step, self.beta1, self.beta2),
                "steps from 1, betas of at least 0 and below 1",
                "the first step has the number 1",
            ));
        }
        state.inplace_op3(gradient, sum_of_squares, &Step { settings: self, copy })
    }
}

struct Step<'a> {
    settings: &'a AdamW,
    copy: Option<&'a Tensor>,
}

impl InplaceOp3 for Step<'_> {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        state: &mut CpuStorage,
        layout: &Layout,
        gradient: &CpuStorage,
        gradient_layout: &Layout,
        sum_of_squares: &CpuStorage,
        sum_layout: &Layout,
    ) -> Result<()> {
        let sum = sum_of_squares.as_slice::<f64>()?[sum_layout.start_offset()];
        let gradient = f32_values(NAME, gradient, gradient_layout)?;
        step(self.settings, sum, f32_values_mut(NAME, state, layout)?, &gradient);
        Ok(())
    }

    /// Writes to `self.copy` through a shared reference: candle passes only one mutable tensor to an in-place op.
    fn cuda_fwd(
        &self,
        state: &mut CudaStorage,
        layout: &Layout,
        gradient: &CudaStorage,
        gradient_layout: &Layout,
        sum_of_squares: &CudaStorage,
        sum_layout: &Layout,
    ) -> Result<()> {
        let all = [(&*state, layout), (gradient, gradient_layout), (sum_of_squares, sum_layout)];
        match self.copy {
            None => self.settings.launch((all, None::<Operand<'_>>)),
            Some(copy) => with_cuda(NAME, [copy], |[copy]| self.settings.launch((all, Some(copy)))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    const SETTINGS: AdamW = AdamW {
        lr: 0.01,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        decayed: 3,
        step: 1,
        gradient_factor: 0.5,
        clip: None,
    };

    /// Compares five steps with the published recurrence in f64: weights differ by less than 1e-6, moments by a
    /// relative 2e-6. (Moments are compared because weights do not reveal a wrong clip: an update hardly depends on the
    /// gradient's size.) The first three parameters have weight decay.
    #[test]
    fn follows_the_recurrence() -> Result<()> {
        let start = [0.5f32, -1.0, 2.0, 0.5, -1.0, 2.0];
        for clip in [None, Some(0.7)] {
            let state = Tensor::from_vec([&start[..], &[0.0; 12]].concat(), (3, 6), &Device::Cpu)?;
            let mut expected = start.map(f64::from);
            let mut moments = [[0f64; 2]; 6];
            for step in 1..=5 {
                let gradient = [0.1f32, -20.0, 1e-3, 0.1, -20.0, 1e-3].map(|g| g * step as f32);
                let tensor = Tensor::new(&gradient, &Device::Cpu)?;
                let sum = sum_of_squares(&tensor)?;
                AdamW { step, clip, ..SETTINGS }.step(&state, &tensor, &sum, None)?;
                let norm = 0.5 * gradient.iter().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
                let clipped = clip.map_or(1.0, |clip| (clip / norm).min(1.0));
                for c in 0..6 {
                    let g = 0.5 * f64::from(gradient[c]) * clipped;
                    let [m, v] = &mut moments[c];
                    *m = 0.9 * *m + 0.1 * g;
                    *v = 0.95 * *v + 0.05 * g * g;
                    let (m, v) =
                        (*m / (1.0 - 0.9f64.powi(step as i32)), *v / (1.0 - 0.95f64.powi(step as i32)));
                    let decay = if c < 3 { 1.0 - 0.01 * 0.1 } else { 1.0 };
                    expected[c] = decay * expected[c] - 0.01 * m / (v.sqrt() + 1e-8);
                }
            }
            let rows = state.to_vec2::<f32>()?;
            for (c, [m, v]) in moments.into_iter().enumerate() {
                let (got, expected) = (f64::from(rows[0][c]), expected[c]);
                assert!((got - expected).abs() < 1e-6, "{got} {expected}");
                for (got, expected) in [(rows[1][c], m), (rows[2][c], v)] {
                    let off = (f64::from(got) / expected - 1.0).abs();
                    assert!(off < 2e-6, "parameter {c}, clip {clip:?}: a moment is off by {off:e}");
                }
            }
        }
        Ok(())
    }

    /// Weight decay applies to exactly the first `decayed` parameters, for any value of `decayed`, also when several
    /// parallel tasks (of 32,768 parameters) share the work.
    #[test]
    fn exactly_the_first_parameters_decay() -> Result<()> {
        const LEN: usize = 3 * 32 * 1024 + 5;
        let gradient = Tensor::zeros(LEN, DType::F32, &Device::Cpu)?;
        let sum = sum_of_squares(&gradient)?;
        let kept = (1.0 - SETTINGS.lr * SETTINGS.weight_decay) as f32;
        for decayed in [0, 1, 32_767, 32_768, 32_769, 40_000, 65_536, 70_000, LEN - 1, LEN] {
            let state =
                Tensor::from_vec([vec![1f32; LEN], vec![0.0; 2 * LEN]].concat(), (3, LEN), &Device::Cpu)?;
            AdamW { decayed, ..SETTINGS }.step(&state, &gradient, &sum, None)?;
            let weights = state.get(0)?.to_vec1::<f32>()?;
            let first_kept = weights.iter().position(|&weight| weight != kept);
            assert_eq!(first_kept.unwrap_or(LEN), decayed);
            assert!(weights[decayed..].iter().all(|&weight| weight == 1.0), "{decayed} decay");
        }
        Ok(())
    }

    #[test]
    fn a_gradient_that_is_not_finite_changes_nothing() -> Result<()> {
        let state = Tensor::arange(0f32, 6., &Device::Cpu)?.reshape((3, 2))?;
        let before = state.to_vec2::<f32>()?;
        for bad in [f32::NAN, f32::INFINITY] {
            let gradient = Tensor::new(&[1f32, bad], &Device::Cpu)?;
            AdamW { decayed: 0, ..SETTINGS }.step(&state, &gradient, &sum_of_squares(&gradient)?, None)?;
            assert_eq!(state.to_vec2::<f32>()?, before);
        }
        // A setting that would cause a division by zero is an error, and the state does not change.
        let gradient = Tensor::ones(2, DType::F32, &Device::Cpu)?;
        for wrong in [AdamW { step: 0, ..SETTINGS }, AdamW { beta2: 1.0, ..SETTINGS }] {
            let error =
                wrong.step(&state, &gradient, &sum_of_squares(&gradient)?, None).expect_err("an error");
            assert!(error.to_string().contains("steps from 1"), "{error}");
            assert_eq!(state.to_vec2::<f32>()?, before);
        }
        Ok(())
    }

    #[test]
    fn squares_of_large_numbers_add_up() -> Result<()> {
        let x = Tensor::new(&[3e30f32, 4e30], &Device::Cpu)?;
        let norm = sum_of_squares(&x)?.to_scalar::<f64>()?.sqrt();
        assert!((norm / 5e30 - 1.0).abs() < 1e-6);
        Ok(())
    }
}
