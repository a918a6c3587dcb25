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
    /// Only the first `decayed` elements of the weights decay.
    pub decayed: usize,
    /// Number of the step, counted from 1.
    pub step: u64,
    /// Factor of the gradient: 1 / (number of micro-batches whose gradients were summed).
    pub gradient_factor: f64,
    /// Largest allowed norm of `gradient * gradient_factor`; a gradient with a larger norm is scaled down to this norm.
    /// `None` does not clip.
    pub clip: Option<f64>,
}

/// The number by which to multiply a gradient with squared norm `sum_of_squares`: `factor`, or less if the product's
/// norm would exceed `clip`. `None` if `factor` times the gradient's norm is not finite.
pub(crate) fn clipped(factor: f64, clip: Option<f64>, sum_of_squares: f64) -> Option<f32> {
    let norm = factor * sum_of_squares.sqrt();
    let clipped = clip.map_or(1.0, |clip| if norm > clip { clip / norm } else { 1.0 });
    norm.is_finite().then_some((factor * clipped) as f32)
}

/// Factors of an update that depend only on the settings and the step's number:
/// `rate = lr / (1 - beta1^step)`, `root = 1 / (1 - beta2^step)`, `keep = 1 - lr weight_decay`.
pub(crate) struct Factors {
    pub(crate) rate: f32,
    pub(crate) root: f32,
    pub(crate) keep: f32,
}

impl AdamW {
    /// Settings with learning rate `lr`, betas .9 and .95, epsilon 1e-8, no weight decay and no clipping. `step` is 1.
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

/// The polynomials that make the singular values of a matrix about 1: five odd polynomials of degree 5, applied one
/// after the other to the matrix divided by its Frobenius norm (Newton-Schulz iterations).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Orthogonalization {
    /// The optimal polynomials for singular values that are .001 to 1 after division by the Frobenius norm. Such values
    /// become .85 to 1.12 (Polar Express, arXiv 2505.16932).
    #[default]
    PolarExpress,
    /// The same polynomial five times. Singular values that are .003 to 1 after division by the Frobenius norm become
    /// .68 to 1.2 (Muon as first published, by K. Jordan).
    Quintic,
}

impl Orthogonalization {
    /// The polynomials `a x + b x^3 + c x^5`, as `[a, b, c]`, in the order of application.
    pub(crate) fn polynomials(self) -> [[f32; 3]; 5] {
        match self {
            Self::PolarExpress => {
                let best = [
                    [8.287_212_018_145_63, -23.595_886_519_098_837, 17.300_387_312_530_933],
                    [4.107_059_111_542_203, -2.947_849_916_737_910_6, 0.544_843_108_292_660_1],
                    [3.948_690_853_482_294_6, -2.908_902_115_962_949, 0.551_819_139_437_013_7],
                    [3.318_419_657_370_601_5, -2.488_488_024_314_874, 0.510_048_940_123_72],
                    [2.300_652_019_954_817, -1.668_903_984_574_749_3, 0.418_807_311_952_567_3],
                ];
                // To allow for rounding errors, each polynomial except the last divides its argument by 1.01. The first
                // divides by 1.01 twice: its argument was divided by its Frobenius norm, which may be rounded down.
                let margins = [1.01 * 1.01, 1.01, 1.01, 1.01, 1.0];
                std::array::from_fn(|n| {
                    let (polynomial, margin): ([f64; 3], f64) = (best[n], margins[n]);
                    std::array::from_fn(|i| (polynomial[i] / margin.powi(2 * i as i32 + 1)) as f32)
                })
            }
            Self::Quintic => [[3.4445, -4.7750, 2.0315]; 5],
        }
    }
}

/// The scale of a matrix's step: the step is the learning rate times this scale times the orthogonal direction, whose
/// singular values are about 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MuonScale {
    /// `0.2 sqrt(max(rows, columns))`: the step has the root mean square of an AdamW step, so that AdamW's learning
    /// rates carry over (arXiv 2502.16982, section 2.2).
    #[default]
    AdamW,
    /// `sqrt(max(1, rows / columns))`, as first published.
    Original,
}

/// One step of Muon: each matrix moves along its momentum, after the momentum's singular values are made about 1 (K.
/// Jordan, 2024; arXiv 2502.16982). If `beta2` is set, the rows of the step are divided by their running root mean
/// square (NorMuon). Muon is for the matrices of hidden layers; embeddings, output matrices and vectors need another
/// optimizer, such as [`AdamW`].
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_sage::ops::{Muon, MuonMatrix, sum_of_squares};
///
/// // A matrix of 2 x 3, and its momentum.
/// let state = Tensor::zeros((2, 6), DType::F32, &Device::Cpu)?;
/// let gradient = Tensor::new(&[3f32, 0., 0., 0., 0.01, 0.], &Device::Cpu)?;
/// let matrices = [MuonMatrix { at: 0, rows: 2, columns: 3 }];
/// Muon::new(0.1).step(&state, &gradient, &sum_of_squares(&gradient)?, &matrices, None, None)?;
/// let step = state.get(0)?.to_vec1::<f32>()?;
/// // Elements 0 and 4 both move by about 0.1 * 0.2 * sqrt(3), though one gradient is 300 times the other.
/// assert!((step[0] / -0.0346 - 1.0).abs() < 0.16 && (step[4] / -0.0346 - 1.0).abs() < 0.16);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Muon {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay rate of the momentum, the running mean of the gradient.
    pub momentum: f64,
    /// Nesterov momentum: the step is along `b m + (1 - b) g` instead of the running mean `m`, with the gradient `g`
    /// and the decay rate `b`.
    pub nesterov: bool,
    /// Decoupled weight decay: each step multiplies a weight by `1 - lr weight_decay`.
    pub weight_decay: f64,
    /// NorMuon (arXiv 2510.05491): the decay rate of the running mean square of each row of the orthogonalized matrix.
    /// Each row is divided by the root of its running mean square, so that all neurons move about equally far. Then the
    /// matrix is scaled to the norm that it had before this division. `None` does not normalize rows.
    pub beta2: Option<f64>,
    /// See [`Orthogonalization`].
    pub orthogonalization: Orthogonalization,
    /// See [`MuonScale`].
    pub scale: MuonScale,
    /// Factor of the gradient: 1 / (number of micro-batches whose gradients were summed).
    pub gradient_factor: f64,
    /// Largest allowed norm of `gradient * gradient_factor`, as in [`AdamW`].
    pub clip: Option<f64>,
}

/// Muon's [`directions`](crate::ops::Muon::directions) are multiplied by this factor before they are orthogonalized.
/// Otherwise the squares of small elements could become zero in bf16 or f32.
pub(crate) const DIRECTION_UNIT: f32 = (1 << 24) as f32;

/// The settings that [`directions`](crate::ops::Muon::directions) uses: see the fields of [`Muon`].
pub(crate) struct MomentumPass {
    pub(crate) beta: f32,
    pub(crate) nesterov: bool,
    pub(crate) gradient_factor: f64,
    pub(crate) clip: Option<f64>,
}

impl Muon {
    /// A step with this learning rate: momentum .95 with Nesterov, no [NorMuon](Self::beta2), no weight decay and no
    /// clipping.
    pub const fn new(lr: f64) -> Self {
        Self {
            lr,
            momentum: 0.95,
            nesterov: true,
            weight_decay: 0.0,
            beta2: None,
            orthogonalization: Orthogonalization::PolarExpress,
            scale: MuonScale::AdamW,
            gradient_factor: 1.0,
            clip: None,
        }
    }

    pub(crate) fn momentum_pass(&self) -> MomentumPass {
        // The settings after `clip` are used by `Muon::orthogonalize`, `Muon::normalize_rows` and `Muon::factors`.
        let Self {
            momentum,
            nesterov,
            gradient_factor,
            clip,
            lr: _,
            weight_decay: _,
            beta2: _,
            orthogonalization: _,
            scale: _,
        } = *self;
        MomentumPass { beta: momentum as f32, nesterov, gradient_factor, clip }
    }

    /// The two factors in a matrix's update: `1 - lr weight_decay` for the weights, `lr scale` for the orthogonal
    /// direction.
    pub(crate) fn factors(&self, (rows, columns): (usize, usize)) -> [f32; 2] {
        // `Muon::directions`, `Muon::orthogonalize` and `Muon::normalize_rows` use the other settings.
        let Self {
            lr,
            weight_decay,
            scale,
            momentum: _,
            nesterov: _,
            beta2: _,
            orthogonalization: _,
            gradient_factor: _,
            clip: _,
        } = *self;
        let (rows, columns) = (rows as f64, columns as f64);
        let scale = match scale {
            MuonScale::AdamW => 0.2 * rows.max(columns).sqrt(),
            MuonScale::Original => (rows / columns).max(1.0).sqrt(),
        };
        [(1.0 - lr * weight_decay) as f32, (lr * scale) as f32]
    }
}
