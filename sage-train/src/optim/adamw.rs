//! AdamW (arXiv 1711.05101), in place, three passes over each parameter.

use candle_core::{CpuStorage, DType, InplaceOp2, InplaceOp3, Layout, Result, Tensor, Var};
use rayon::prelude::*;

/// Settings that stay the same for a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWConfig {
    /// Decay of the mean of gradients.
    pub beta1: f64,
    /// Decay of the mean of squared gradients.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay of the parameters that are marked for it.
    pub weight_decay: f64,
}

/// Moments of a list of parameters.
#[derive(Debug)]
pub struct AdamW {
    config: AdamWConfig,
    slots: Vec<Slot>,
    step: i32,
}

#[derive(Debug)]
struct Slot {
    var: Var,
    decays: bool,
    mean: Tensor,
    square: Tensor,
}

impl AdamW {
    /// For parameters, each with whether it decays.
    ///
    /// # Errors
    /// When moments cannot be allocated.
    pub fn new(config: AdamWConfig, parameters: impl IntoIterator<Item = (Var, bool)>) -> Result<Self> {
        let slots = parameters
            .into_iter()
            .map(|(var, decays)| {
                let zeros = || Tensor::zeros(var.dims(), DType::F32, var.device());
                Ok(Slot { mean: zeros()?, square: zeros()?, var, decays })
            })
            .collect::<Result<_>>()?;
        Ok(Self { config, slots, step: 0 })
    }

    /// One update with the gradients times `factor`, which does the averaging and the clipping.
    ///
    /// # Errors
    /// When a gradient does not have its parameter's shape.
    pub fn step(&mut self, gradients: &[Tensor], factor: f64, lr: f64) -> Result<()> {
        self.step += 1;
        let AdamWConfig { beta1, beta2, eps, weight_decay } = self.config;
        for (slot, gradient) in self.slots.iter().zip(gradients) {
            slot.mean.inplace_op2(
                gradient,
                &Moment { beta: beta1 as f32, factor: factor as f32, square: false },
            )?;
            slot.square
                .inplace_op2(gradient, &Moment { beta: beta2 as f32, factor: factor as f32, square: true })?;
            let update = Update {
                rate: (lr / (1.0 - beta1.powi(self.step))) as f32,
                root: (1.0 / (1.0 - beta2.powi(self.step))) as f32,
                eps: eps as f32,
                keep: if slot.decays { (1.0 - lr * weight_decay) as f32 } else { 1.0 },
            };
            slot.var.as_tensor().inplace_op3(&slot.mean, &slot.square, &update)?;
        }
        Ok(())
    }
}

/// Elements that one task takes.
const SPAN: usize = 32 * 1024;

/// The elements of a contiguous f32 tensor.
fn values<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&storage.as_slice::<f32>()?[start..end]),
        None => candle_core::bail!("the optimizer needs contiguous tensors"),
    }
}

fn values_mut<'a>(storage: &'a mut CpuStorage, layout: &Layout) -> Result<&'a mut [f32]> {
    match (storage, layout.contiguous_offsets()) {
        (CpuStorage::F32(values), Some((start, end))) => Ok(&mut values[start..end]),
        _ => candle_core::bail!("the optimizer needs contiguous f32 tensors"),
    }
}

/// `m = beta m + (1 - beta) g`, with g the gradient times `factor`, or its square.
struct Moment {
    beta: f32,
    factor: f32,
    square: bool,
}

impl InplaceOp2 for Moment {
    fn name(&self) -> &'static str {
        "adamw-moment"
    }

    fn cpu_fwd(
        &self,
        moment: &mut CpuStorage,
        layout: &Layout,
        gradient: &CpuStorage,
        gradient_layout: &Layout,
    ) -> Result<()> {
        let gradient = values(gradient, gradient_layout)?;
        let moment = values_mut(moment, layout)?;
        moment.par_chunks_mut(SPAN).zip(gradient.par_chunks(SPAN)).for_each(|(moment, gradient)| {
            for (m, g) in moment.iter_mut().zip(gradient) {
                let g = g * self.factor;
                let g = if self.square { g * g } else { g };
                *m = self.beta * *m + (1.0 - self.beta) * g;
            }
        });
        Ok(())
    }
}

/// `p = keep p - rate m / (sqrt(root v) + eps)`.
struct Update {
    rate: f32,
    root: f32,
    eps: f32,
    keep: f32,
}

impl InplaceOp3 for Update {
    fn name(&self) -> &'static str {
        "adamw-update"
    }

    fn cpu_fwd(
        &self,
        parameter: &mut CpuStorage,
        layout: &Layout,
        mean: &CpuStorage,
        mean_layout: &Layout,
        square: &CpuStorage,
        square_layout: &Layout,
    ) -> Result<()> {
        let (mean, square) = (values(mean, mean_layout)?, values(square, square_layout)?);
        let moments = mean.par_chunks(SPAN).zip(square.par_chunks(SPAN));
        values_mut(parameter, layout)?.par_chunks_mut(SPAN).zip(moments).for_each(|(p, (m, v))| {
            for ((p, m), v) in p.iter_mut().zip(m).zip(v) {
                *p = self.keep * *p - self.rate * m / ((self.root * v).sqrt() + self.eps);
            }
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    /// Five steps against the published recurrence in f64; f32 keeps 1e-6.
    #[test]
    fn follows_the_recurrence() -> Result<()> {
        let config = AdamWConfig { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
        let start = [0.5f32, -1.0, 2.0];
        let vars = [true, false].map(|decays| (Var::new(&start, &Device::Cpu).expect("a var"), decays));
        let mut adamw = AdamW::new(config, vars.clone())?;
        let mut expected = [start.map(f64::from); 2];
        let mut moments = [[[0f64; 2]; 3]; 2];
        for step in 1..=5 {
            let gradient = [0.1f32, -20.0, 1e-3].map(|g| g * step as f32);
            let tensor = Tensor::new(&gradient, &Device::Cpu)?;
            adamw.step(&[tensor.clone(), tensor], 0.5, 0.01)?;
            for n in 0..2 {
                for c in 0..3 {
                    let g = 0.5 * f64::from(gradient[c]);
                    let [m, v] = &mut moments[n][c];
                    *m = 0.9 * *m + 0.1 * g;
                    *v = 0.95 * *v + 0.05 * g * g;
                    let update =
                        (*m / (1.0 - 0.9f64.powi(step))) / ((*v / (1.0 - 0.95f64.powi(step))).sqrt() + 1e-8);
                    let decay = if n == 0 { 1.0 - 0.01 * 0.1 } else { 1.0 };
                    expected[n][c] = decay * expected[n][c] - 0.01 * update;
                }
            }
        }
        for n in 0..2 {
            for (got, expected) in vars[n].0.to_vec1::<f32>()?.iter().zip(expected[n]) {
                assert!((f64::from(*got) - expected).abs() < 1e-6, "{got} {expected}");
            }
        }
        Ok(())
    }
}
