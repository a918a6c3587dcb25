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

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;
    use crate::config::Config;
    use crate::settings::Settings;

    fn parameters() -> Parameters {
        let config = Config::resolve(Settings::default()).expect("defaults");
        Parameters::init(&config.model, 0, &Device::Cpu).expect("parameters")
    }

    /// The gradients of a loss that sees all parameters but `left_out`, and one of them times `factor`.
    fn grads(parameters: &Parameters, left_out: usize, factor: f64) -> GradStore {
        let mut loss =
            Var::zeros((), candle_core::DType::F32, &Device::Cpu).expect("zero").as_tensor().clone();
        for (n, (_, var)) in parameters.iter().enumerate().filter(|(n, _)| *n != left_out) {
            let sum = var.sum_all().expect("a sum");
            let term = if n == 3 { (sum * factor).expect("a product") } else { sum };
            loss = (loss + term).expect("a sum");
        }
        loss.backward().expect("gradients")
    }

    #[test]
    fn a_missing_gradient_and_a_nan_are_named() {
        let parameters = parameters();
        let mut gradients = Gradients::default();
        let error = gradients.add(&parameters, &grads(&parameters, 5, 1.0)).expect_err("one is missing");
        assert_eq!(error, "model.layers.0.self_attn.o_proj.weight received no gradient");
        let mut gradients = Gradients::default();
        gradients.add(&parameters, &grads(&parameters, usize::MAX, f64::NAN)).expect("all there");
        let error = gradients.norm(&parameters).expect_err("NaN");
        assert_eq!(error, "the gradient of model.layers.0.self_attn.k_proj.weight is not finite");
    }

    #[test]
    fn micro_batches_add_up() {
        let parameters = parameters();
        let mut gradients = Gradients::default();
        for _ in 0..3 {
            gradients.add(&parameters, &grads(&parameters, usize::MAX, 1.0)).expect("all there");
        }
        let count: u64 = parameters.iter().map(|(spec, _)| spec.len()).sum();
        let norm = gradients.norm(&parameters).expect("finite");
        assert!((norm - 3.0 * (count as f64).sqrt()).abs() < 1e-6 * norm);
    }
}
