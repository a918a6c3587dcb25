//! Linear layers. Weight gradients are accumulated in place, in f32.

use std::rc::Rc;

use candle_core::{Result, Tensor};
use candle_sage::ops::{self, CrossEntropy};

use super::operands::Operand;
use super::parameters::{Parameters, Weight};

/// The operands of a linear layer's matmuls: `y = x W^T`, `dx = dy W`, `dW = dy^T x`.
#[derive(Debug, Clone, Copy)]
pub struct Products<'a> {
    /// Index of the transformer layer in the model.
    pub layer: usize,
    /// Which matrix of the transformer layer: query-key-value, output, gate-up, down.
    pub name: &'static str,
    /// The input, (rows, inputs).
    pub x: &'a Tensor,
    /// The gradient of the output, (rows, outputs).
    pub dy: &'a Tensor,
    /// The weight, (outputs, inputs).
    pub weight: &'a Tensor,
}

/// Receives the operands of matmuls during the backward.
pub type ObserveProducts = dyn Fn(Products<'_>) -> Result<()>;

/// An observer of a linear layer. `observe` receives `layer` and `name` in [`Products`].
#[derive(Clone)]
pub(super) struct Observer {
    pub(super) observe: Rc<ObserveProducts>,
    pub(super) layer: usize,
    pub(super) name: &'static str,
}

impl std::fmt::Debug for Observer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Observer").finish_non_exhaustive()
    }
}

/// `y = x W^T` on rows, without bias. The type of `x` (`Operand`) determines the precision.
#[derive(Debug, Clone)]
pub(super) struct Linear {
    weight: Weight,
    observer: Option<Observer>,
}

impl Linear {
    /// A layer whose weight is the matrices `{at}.{name}.weight`, stacked along the rows. Its output is the matrices'
    /// outputs, concatenated along the columns.
    pub(super) fn new(parameters: &Parameters, at: &str, names: &[&str]) -> Result<Self> {
        let names: Vec<String> = names.iter().map(|name| format!("{at}.{name}.weight")).collect();
        Ok(Self::of(parameters.joined(&names)?))
    }

    pub(super) fn of(weight: Weight) -> Self {
        Self { weight, observer: None }
    }

    /// Sets the observer. In the backward it receives the operands of this layer's matmuls, unless they are in FP8.
    pub(super) fn observe(&mut self, observer: Observer) {
        self.observer = Some(observer);
    }

    /// Passes the operands of this layer's matmuls to the observer, if there is one. In attention's backward, a
    /// query-key layer and a value layer can replace the query-key-value layer. Then attention calls this method for
    /// the query-key-value layer.
    pub(super) fn show(&self, x: &Operand, dy: impl FnOnce() -> Result<Tensor>) -> Result<()> {
        match (&self.observer, x) {
            (Some(Observer { observe, layer, name }), Operand::Compute(x)) => {
                let (dy, weight) = (dy()?, self.weight.value()?);
                observe(Products { layer: *layer, name, x, dy: &dy, weight: &weight })
            }
            _ => Ok(()),
        }
    }

    /// (rows, inputs) -> (rows, outputs).
    pub(super) fn forward(&self, x: &Operand) -> Result<Tensor> {
        match x {
            Operand::Compute(x) => x.matmul(&self.weight.value()?.t()?),
            Operand::Fp8(x, settings) => {
                x.product(&self.weight.quantized()?, self.weight.dtype(), settings.sums[0])
            }
        }
    }

    /// The layer's outputs are logits. Returns their mean cross-entropy, and its gradient for the layer's input. Adds
    /// the gradient of the weight to the accumulated gradient.
    pub(super) fn cross_entropy(
        &self,
        x: &Operand,
        targets: &Tensor,
        settings: CrossEntropy,
    ) -> Result<(Tensor, Tensor)> {
        let gradient = self.weight.gradient()?;
        match x {
            Operand::Compute(x) => {
                ops::linear_cross_entropy_into(gradient, x, &self.weight.value()?, targets, settings, 1.0)
            }
            Operand::Fp8(x, linear) => ops::linear_cross_entropy_into_fp8(
                gradient,
                x,
                &self.weight.quantized()?,
                targets,
                settings,
                1.0,
                *linear,
                self.weight.dtype(),
            ),
        }
    }

    /// Adds the gradient of the weight to its accumulated gradient. Returns the gradient of the input.
    pub(super) fn backward(&self, x: &Operand, dy: &Operand) -> Result<Tensor> {
        self.backward_weight(x, dy)?;
        self.backward_input(dy)
    }

    /// As [`Linear::backward`], but adds the gradient of the input to `dx`.
    pub(super) fn backward_into(&self, dx: &Tensor, x: &Operand, dy: &Operand) -> Result<()> {
        self.backward_weight(x, dy)?;
        match dy {
            Operand::Compute(dy) => ops::product_into(dx, dy, &self.weight.value()?, 1.0, true),
            Operand::Fp8(dy, settings) => {
                dy.product_into(dx, &self.weight.quantized()?.t(), true, settings.sums[1])
            }
        }
    }

    /// Returns the gradient of the input. Does not compute the gradient of the weight.
    pub(super) fn backward_input(&self, dy: &Operand) -> Result<Tensor> {
        match dy {
            Operand::Compute(dy) => dy.matmul(&self.weight.value()?),
            Operand::Fp8(dy, settings) => {
                dy.product(&self.weight.quantized()?.t(), self.weight.dtype(), settings.sums[1])
            }
        }
    }

    /// Adds the gradient of the weight to its accumulated gradient. Does not compute the gradient of the input.
    pub(super) fn backward_weight(&self, x: &Operand, dy: &Operand) -> Result<()> {
        let add = self.weight.take_turn();
        let gradient = self.weight.gradient()?;
        match (x, dy) {
            (Operand::Compute(input), Operand::Compute(dy)) => {
                self.show(x, || Ok(dy.clone()))?;
                ops::product_into(gradient, &dy.t()?, input, 1.0, add)
            }
            (Operand::Fp8(x, settings), Operand::Fp8(dy, _)) => {
                dy.t().product_into(gradient, &x.t(), add, settings.sums[2])
            }
            (Operand::Compute(_), Operand::Fp8(..)) | (Operand::Fp8(..), Operand::Compute(_)) => {
                candle_core::bail!("the input and the gradient of a linear layer have different precisions")
            }
        }
    }
}

/// A vector that is added to the outputs of linear layers.
#[derive(Debug, Clone)]
pub(super) struct Bias(Weight);

impl Bias {
    /// The vectors `{at}.{name}.bias` of all `names`, concatenated.
    pub(super) fn new(parameters: &Parameters, at: &str, names: &[&str]) -> Result<Self> {
        let names: Vec<String> = names.iter().map(|name| format!("{at}.{name}.bias")).collect();
        parameters.joined(&names).map(Self)
    }

    /// Adds the bias to each row of `y`, (rows, outputs).
    pub(super) fn forward(&self, y: &Tensor) -> Result<Tensor> {
        y.broadcast_add(&self.0.value()?)
    }

    /// Accumulates the gradient of the bias: the sum of the rows of `dy`.
    pub(super) fn backward(&self, dy: &Tensor) -> Result<()> {
        let ones = Tensor::ones((1, dy.dim(0)?), dy.dtype(), dy.device())?;
        let add = self.0.take_turn();
        ops::product_into(&self.0.gradient()?.unsqueeze(0)?, &ones, dy, 1.0, add)
    }
}
