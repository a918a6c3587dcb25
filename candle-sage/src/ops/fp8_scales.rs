//! Delayed scaling: a matrix that is quantized in every step gets a scale from its largest absolute values in earlier
//! steps.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Result, Tensor};

use super::support::{argument_error, shape_error, shapes_of, supported, with_cuda};
use crate::fp8::Fp8Format;
use crate::launch::Launch;

const NAME: &str = "fp8-scales";

/// Factor of the old `running` in the formula of [`Fp8Scales`].
pub(crate) const DECAY: f32 = 0.95;

/// Values up to this many times `running` (see [`Fp8Scales`]) do not saturate.
pub(crate) const MARGIN: f32 = 4.0;

/// Scales of several matrices that are quantized in every step (delayed scaling): a matrix is quantized in one pass
/// over memory, with a scale from earlier steps. The matrix's largest absolute value is recorded for later steps.
///
/// ```text
/// running = max(largest since the last `rescale`, 0.95 * running)
/// scale   = the least power of two with 4 * running <= scale * (largest value of the format)
/// ```
///
/// When a matrix is first quantized, `running` is this matrix's largest absolute value. Values beyond `scale`
/// times the largest value of the format saturate, and are counted. (Micikevicius et al., arXiv 2209.05433, section 4,
/// use a history of maxima.)
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_sage::fp8::Fp8Format::E4M3;
/// use candle_sage::ops::{Fp8Copies, Fp8Matrix, Fp8Scales};
///
/// let scales = Fp8Scales::new(&[E4M3], &Device::Cpu)?;
/// let quantize = |size: f64| {
///     let x = (Tensor::ones((16, 16), candle_core::DType::F32, &Device::Cpu)? * size)?;
///     Fp8Matrix::quantize_with(&x, Fp8Copies::Rows, &scales.at(0))
/// };
/// // 4 * 100 fits below 448, 4 * 200 below 2 * 448.
/// assert_eq!(quantize(100.0)?.scale().to_vec1::<f32>()?, [1.0]);
/// quantize(200.0)?;
/// scales.rescale()?;
/// assert_eq!(quantize(200.0)?.scale().to_vec1::<f32>()?, [2.0]);
/// assert_eq!(scales.take_saturated()?, 0);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Fp8Scales {
    formats: Vec<Fp8Format>,
    state: State,
    /// Whether each matrix has been quantized before.
    measured: Vec<AtomicBool>,
}

#[derive(Debug)]
enum State {
    Host(Mutex<Vec<Site>>),
    /// f32 (5, matrices): a row for each field of [`Site`], and a row of formats (1 for E5M2, 0 for E4M3). The elements
    /// of the row `saturated` are u32 numbers, stored bit for bit.
    Device(Tensor),
}

#[derive(Debug, Clone, Copy)]
struct Site {
    scale: f32,
    largest: f32,
    running: f32,
    saturated: u64,
}

/// The scale of one matrix of [`Fp8Scales`].
#[derive(Debug, Clone)]
pub struct Fp8Scale {
    all: Arc<Fp8Scales>,
    index: usize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The larger of two magnitudes; NaN is the largest.
fn larger(a: f32, b: f32) -> f32 {
    if a.to_bits() > b.to_bits() { a } else { b }
}

impl Site {
    fn rescale(&mut self, format: Fp8Format) {
        // An infinity or a NaN says nothing about the values of the next step.
        let seen = if self.largest.is_finite() { self.largest } else { 0.0 };
        self.running = seen.max(self.running * DECAY);
        self.scale = format.scale(self.running.min(1e37) * MARGIN);
        self.largest = 0.0;
    }
}

impl Fp8Scales {
    /// Scales of matrices. `formats` has the format of each matrix, `device` is the device of the matrices.
    ///
    /// # Errors
    /// When there is not enough memory.
    pub fn new(formats: &[Fp8Format], device: &Device) -> Result<Arc<Self>> {
        let state = if device.is_cuda() {
            let n = formats.len();
            let mut values = vec![0.0f32; 5 * n];
            values[..n].fill(1.0);
            for (value, format) in values[4 * n..].iter_mut().zip(formats) {
                *value = f32::from(u8::from(*format == Fp8Format::E5M2));
            }
            State::Device(Tensor::from_vec(values, (5, n), device)?)
        } else {
            let site = Site { scale: 1.0, largest: 0.0, running: 0.0, saturated: 0 };
            State::Host(Mutex::new(vec![site; formats.len()]))
        };
        let measured = formats.iter().map(|_| AtomicBool::new(false)).collect();
        Ok(Arc::new(Self { formats: formats.to_vec(), state, measured }))
    }

    /// The scale of matrix `index`.
    ///
    /// # Panics
    /// When `index` is not below the number of matrices.
    pub fn at(self: &Arc<Self>, index: usize) -> Fp8Scale {
        let n = self.formats.len();
        assert!(index < n, "matrix {index} is out of range: there are {n} matrices");
        Fp8Scale { all: self.clone(), index }
    }

    /// Ends a step: computes the scales of the next step from the recorded largest absolute values.
    ///
    /// # Errors
    /// When the device fails.
    pub fn rescale(&self) -> Result<()> {
        match &self.state {
            State::Host(sites) => {
                lock(sites).iter_mut().zip(&self.formats).for_each(|(site, format)| site.rescale(*format));
                Ok(())
            }
            State::Device(state) => {
                supported(NAME, &[state])?;
                with_cuda(NAME, [state], |[state]| Rescale.launch(state))
            }
        }
    }

    /// The largest absolute value of each matrix since the last step, in f32. If several processes train one model,
    /// replace these values by the maximum over the processes before [`rescale`](Self::rescale). On a GPU the tensor
    /// shares memory with this `Fp8Scales`.
    ///
    /// # Errors
    /// When there is not enough memory.
    pub fn largest(&self) -> Result<Tensor> {
        match &self.state {
            State::Host(sites) => {
                Tensor::new(lock(sites).iter().map(|site| site.largest).collect::<Vec<_>>(), &Device::Cpu)
            }
            State::Device(state) => state.get(1),
        }
    }

    /// Replaces the values that [`largest`](Self::largest) returns.
    ///
    /// # Errors
    /// When `largest` is not f32, or does not have one value per matrix.
    pub fn set_largest(&self, largest: &Tensor) -> Result<()> {
        if largest.dims() != [self.formats.len()] || largest.dtype() != DType::F32 {
            return Err(shape_error(
                "Fp8Scales: the largest values do not match the matrices",
                shapes_of(&[("largest", largest)]),
                &format!("f32 [{}]", self.formats.len()),
                "pass a tensor of the shape and type that `Fp8Scales::largest` returns",
            ));
        }
        match &self.state {
            State::Host(sites) => {
                let values = largest.to_vec1::<f32>()?;
                lock(sites).iter_mut().zip(values).for_each(|(site, largest)| site.largest = largest);
                Ok(())
            }
            State::Device(state) => state.slice_set(&largest.unsqueeze(0)?.contiguous()?, 0, 1),
        }
    }

    /// How many values have saturated since the last call of this function.
    ///
    /// # Errors
    /// When the device fails.
    pub fn take_saturated(&self) -> Result<u64> {
        match &self.state {
            State::Host(sites) => {
                Ok(lock(sites).iter_mut().map(|site| std::mem::take(&mut site.saturated)).sum())
            }
            State::Device(state) => {
                let row = state.get(3)?;
                let counts = row.force_contiguous()?.to_vec1::<f32>()?;
                state.slice_set(&row.zeros_like()?.unsqueeze(0)?, 0, 3)?;
                Ok(counts.into_iter().map(|count| u64::from(count.to_bits())).sum())
            }
        }
    }

    /// The scale and `running` (see [`Fp8Scales`]) of each matrix, for a checkpoint between two training steps. The
    /// scale is 0 if the matrix was never quantized.
    ///
    /// # Errors
    /// When the device fails.
    pub fn state(&self) -> Result<Vec<[f32; 2]>> {
        let mut values: Vec<[f32; 2]> = match &self.state {
            State::Host(sites) => lock(sites).iter().map(|site| [site.scale, site.running]).collect(),
            State::Device(state) => {
                let rows = state.force_contiguous()?.to_vec2::<f32>()?;
                rows[0].iter().zip(&rows[2]).map(|(&scale, &running)| [scale, running]).collect()
            }
        };
        for (value, measured) in values.iter_mut().zip(&self.measured) {
            if !measured.load(Ordering::Relaxed) {
                value[0] = 0.0;
            }
        }
        Ok(values)
    }

    /// Restores what [`state`](Self::state) returned.
    ///
    /// # Errors
    /// When the state has another number of matrices.
    pub fn restore(&self, state: &[[f32; 2]]) -> Result<()> {
        if state.len() != self.formats.len() {
            return Err(argument_error(
                "Fp8Scales: the state has another number of matrices",
                state.len(),
                &self.formats.len().to_string(),
                "restore the state of a model with the same matrices",
            ));
        }
        let scale = |[scale, _]: &[f32; 2]| if *scale == 0.0 { 1.0 } else { *scale };
        match &self.state {
            State::Host(sites) => {
                for (site, value) in lock(sites).iter_mut().zip(state) {
                    (site.scale, site.running) = (scale(value), value[1]);
                }
            }
            State::Device(all) => {
                let row = |values: Vec<f32>| Tensor::from_vec(values, (1, state.len()), all.device());
                all.slice_set(&row(state.iter().map(scale).collect())?, 0, 0)?;
                all.slice_set(&row(state.iter().map(|value| value[1]).collect())?, 0, 2)?;
            }
        }
        for (measured, [scale, _]) in self.measured.iter().zip(state) {
            measured.store(*scale != 0.0, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// The index of a matrix in [`Fp8Scales`](super::Fp8Scales), and whether its format is E5M2.
#[allow(dead_code, reason = "only kernels read it")]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fp8Site {
    pub(crate) index: usize,
    pub(crate) e5m2: bool,
}

impl Fp8Scale {
    /// The format of the matrix.
    pub fn format(&self) -> Fp8Format {
        self.all.formats[self.index]
    }

    /// Marks the matrix as quantized, and returns whether it was marked before.
    pub(super) fn swap_measured(&self) -> bool {
        self.all.measured[self.index].swap(true, Ordering::Relaxed)
    }

    /// Whether the matrix has a scale from an earlier quantization.
    pub(super) fn is_known(&self) -> bool {
        self.all.measured[self.index].load(Ordering::Relaxed)
    }

    pub(super) fn site(&self) -> Fp8Site {
        Fp8Site { index: self.index, e5m2: self.format() == Fp8Format::E5M2 }
    }

    /// The state on a GPU.
    pub(super) fn on_device(&self) -> Result<&Tensor> {
        match &self.all.state {
            State::Device(state) => Ok(state),
            State::Host(_) => Err(argument_error(
                "Fp8Scales were made for the CPU",
                "a matrix on a GPU",
                "matrices on the device of the scales",
                "make the scales with the GPU's device",
            )),
        }
    }

    /// Records the largest absolute value of a matrix, and returns the matrix's scale. `saturated` returns how many
    /// values saturate with a given scale.
    pub(super) fn on_host(&self, largest: f32, saturated: impl Fn(f32) -> u64) -> Result<f32> {
        let is_measured = self.swap_measured();
        let State::Host(sites) = &self.all.state else {
            return Err(argument_error(
                "Fp8Scales were made for a GPU",
                "a matrix on the CPU",
                "matrices on the device of the scales",
                "make the scales with Device::Cpu",
            ));
        };
        let mut sites = lock(sites);
        let site = &mut sites[self.index];
        if !is_measured {
            site.largest = larger(site.largest, largest);
            site.rescale(self.format());
        }
        site.largest = larger(site.largest, largest);
        site.saturated += saturated(site.scale);
        Ok(site.scale)
    }
}

/// Computes the scales of all matrices for the next step.
pub(crate) struct Rescale;
