//! The sum of gradients over micro-batches, checked before anything is updated.

use candle_core::Tensor;
use candle_core::backprop::GradStore;

use crate::model::Parameters;
use crate::optim::{AdamW, first_non_finite, global_norm};

/// One gradient for each parameter, in their order.
#[derive(Debug, Default)]
pub(super) struct Gradients(Vec<Tensor>);

impl Gradients {
    /// Adds a micro-batch's gradients.
    ///
    /// Several of candle's own operators end the graph without a word; so a parameter without a
    /// gradient is an error, in every micro-batch.
    pub(super) fn add(&mut self, parameters: &Parameters, grads: &GradStore) -> Result<(), String> {
        let mut sums = Vec::with_capacity(parameters.len());
        for (n, (spec, var)) in parameters.iter().enumerate() {
            let grad = grads.get(var).ok_or_else(|| format!("{} received no gradient", spec.name))?;
            sums.push(match self.0.get(n) {
                None => grad.contiguous(),
                Some(sum) => sum + grad,
            });
        }
        self.0 = sums.into_iter().collect::<candle_core::Result<_>>().map_err(|error| error.to_string())?;
        Ok(())
    }

    /// The norm of all gradients together; an error names the first that is not finite.
    pub(super) fn norm(&self, parameters: &Parameters) -> Result<f64, String> {
        let norm = global_norm(&self.0).map_err(|error| error.to_string())?;
        if norm.is_finite() {
            return Ok(norm);
        }
        let culprit = first_non_finite(&self.0).map_err(|error| error.to_string())?;
        let name = culprit
            .and_then(|n| parameters.iter().nth(n))
            .map_or("a parameter", |(spec, _)| spec.name.as_str());
        Err(format!("the gradient of {name} is not finite"))
    }

    /// Updates the parameters.
    pub(super) fn apply(&self, adamw: &mut AdamW, factor: f64, lr: f64) -> candle_core::Result<()> {
        adamw.step(&self.0, factor, lr)
    }
}
