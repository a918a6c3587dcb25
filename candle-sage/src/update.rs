//! The settings of a parameter update: plain numbers, which both the CPU and the GPU implementation read.

/// One step of AdamW (Adam with decoupled weight decay, arXiv 1711.05101), with clipping by the global
/// gradient norm.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_sage::ops::{AdamW, sum_of_squares};
///
/// let mut settings = AdamW::new(0.1);
/// (settings.weight_decay, settings.decayed) = (0.1, 1);
/// // Weights, of which the first decays, and their two moments.
/// let state = Tensor::new(&[[1f32, 1.], [0., 0.], [0., 0.]], &Device::Cpu)?;
/// let gradient = Tensor::zeros(2, DType::F32, &Device::Cpu)?;
/// for step in 1..=2 {
///     settings.step = step;
///     settings.step(&state, &gradient, &sum_of_squares(&gradient)?, None)?;
/// }
/// let weights = state.get(0)?.to_vec1::<f32>()?;
/// assert!((weights[0] - 0.99 * 0.99).abs() < 1e-6 && weights[1] == 1.0);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay rate of the first moment, the running mean of the gradient.
    pub beta1: f64,
    /// Decay rate of the second moment, the running mean of the squared gradient.
    pub beta2: f64,
    /// Added to the square root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay: each step multiplies a decayed weight by `1 - lr weight_decay`.
    pub weight_decay: f64,
    /// Number of parameters that decay, counted from the first.
    pub decayed: usize,
    /// Number of the step, counted from 1.
    pub step: u64,
    /// Factor of the gradient: 1 / (number of micro-batches whose gradients were summed).
    pub gradient_factor: f64,
    /// Largest allowed norm of `gradient * gradient_factor`; a gradient with a larger norm is scaled down to
    /// it. `None` does not clip.
    pub clip: Option<f64>,
}

/// Factors of an update that depend only on the settings and the step's number:
/// `rate = lr / (1 - beta1^step)`, `root = 1 / (1 - beta2^step)`, `keep = 1 - lr weight_decay`.
pub(crate) struct Factors {
    pub(crate) rate: f32,
    pub(crate) root: f32,
    pub(crate) keep: f32,
}

impl AdamW {
    /// The first step with a learning rate: betas .9 and .95, epsilon 1e-8, no weight decay and no clipping.
    pub const fn new(lr: f64) -> Self {
        Self {
            lr,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.0,
            decayed: 0,
            step: 1,
            gradient_factor: 1.0,
            clip: None,
        }
    }

    pub(crate) fn factors(&self) -> Factors {
        let corrected = |beta: f64| 1.0 - beta.powf(self.step as f64);
        Factors {
            rate: (self.lr / corrected(self.beta1)) as f32,
            root: (1.0 / corrected(self.beta2)) as f32,
            keep: (1.0 - self.lr * self.weight_decay) as f32,
        }
    }
}
