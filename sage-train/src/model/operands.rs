//! The operands of linear layers' matmuls, and the scales of FP8 operands.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, Tensor};
use candle_sage::ops::{self, Fp8Copies, Fp8Linear, Fp8Matrix, Fp8Scale};

use super::LlamaConfig;
use super::layers::{Norm, Stream};
use super::parameters::Parameters;
use super::precision::{LinearPrecision, OperandRole, Scaling};

/// An operand of linear layers, (rows, columns).
#[derive(Debug, Clone)]
pub(super) enum Operand {
    Compute(Tensor),
    Fp8(Fp8Matrix, Fp8Linear),
}

impl Operand {
    pub(super) fn rows(&self) -> Result<usize> {
        match self {
            Self::Compute(x) => x.dim(0),
            Self::Fp8(x, _) => Ok(x.dims().0),
        }
    }

    /// Keeps only what is needed for the gradient of the weight. For an input in FP8, this is the transposed copy.
    pub(super) fn kept(self) -> Self {
        match self {
            Self::Compute(x) => Self::Compute(x),
            Self::Fp8(x, settings) => Self::Fp8(x.without_rows(), settings),
        }
    }
}

/// Makes the operands of a block.
#[derive(Debug, Clone)]
pub(super) struct Operands {
    pub(super) precision: LinearPrecision,
    /// The FP8 scales of the operands, indexed by [`OperandRole`]; empty without delayed scaling.
    scales: Arc<[Fp8Scale]>,
}

impl Operands {
    /// Operands for a layer in training.
    pub(super) fn new(config: &LlamaConfig, parameters: &Parameters, layer: usize) -> Result<Self> {
        let first = layer * OperandRole::COUNT;
        Self::with_scales(config.linear_of(layer), config, parameters, first..first + OperandRole::COUNT)
    }

    /// Operands for the output matrix in training. With delayed scaling, `scales` has one scale: the scale of the
    /// output matrix's input, at index `OperandRole::Normed`.
    pub(super) fn of_head(config: &LlamaConfig, parameters: &Parameters) -> Result<Self> {
        let first = config.layers * OperandRole::COUNT;
        Self::with_scales(config.linear_head, config, parameters, first..first + 1)
    }

    /// Operands for a layer's forwards outside of training.
    pub(super) fn in_evaluation(config: &LlamaConfig, layer: usize) -> Self {
        let is_low = config.linear_of(layer).is_low();
        let precision = if is_low { config.linear_in_evaluation } else { LinearPrecision::Compute };
        Self { precision, scales: Arc::default() }
    }

    /// Operands for forwards in the compute type.
    pub(super) fn in_compute_type() -> Self {
        Self { precision: LinearPrecision::Compute, scales: Arc::default() }
    }

    fn with_scales(
        precision: LinearPrecision,
        config: &LlamaConfig,
        parameters: &Parameters,
        places: Range<usize>,
    ) -> Result<Self> {
        let scales = match precision {
            LinearPrecision::Fp8(_, Scaling::Delayed) => {
                let scales = parameters.scales(config)?;
                places.map(|role| scales.at(role)).collect()
            }
            LinearPrecision::Compute | LinearPrecision::Fp8(_, Scaling::Current) => Arc::default(),
        };
        Ok(Self { precision, scales })
    }

    /// Whether the matmuls are in FP8.
    pub(super) fn in_fp8(&self) -> bool {
        match self.precision {
            LinearPrecision::Compute => false,
            LinearPrecision::Fp8(..) => true,
        }
    }

    /// The settings of FP8 and the scale of an operand; `None` without delayed scaling.
    pub(super) fn delayed(&self, role: OperandRole) -> Option<(Fp8Linear, &Fp8Scale)> {
        Some((self.precision.fp8()?.0, self.scale(role)?))
    }

    fn scale(&self, role: OperandRole) -> Option<&Fp8Scale> {
        self.scales.get(role as usize)
    }

    /// Makes an operand from `x`. In FP8, `copies` tells whether the matrix, its transpose, or both are stored.
    fn quantized(&self, x: Tensor, role: OperandRole, copies: Fp8Copies) -> Result<Operand> {
        let settings = match self.precision {
            LinearPrecision::Compute => return Ok(Operand::Compute(x)),
            LinearPrecision::Fp8(settings, _) => settings,
        };
        let matrix = match self.scale(role) {
            Some(scale) => Fp8Matrix::quantize_with(&x, copies, scale)?,
            None => Fp8Matrix::quantize(&x, role.format(settings), copies)?,
        };
        Ok(Operand::Fp8(matrix, settings))
    }

    /// Makes an operand from `x`, which is in the compute type.
    pub(super) fn of(&self, x: Tensor, role: OperandRole) -> Result<Operand> {
        self.quantized(x, role, Fp8Copies::Both)
    }

    /// As [`Operands::of`], for a forward without a backward.
    pub(super) fn without_backward(&self, x: Tensor, role: OperandRole) -> Result<Operand> {
        self.quantized(x, role, Fp8Copies::Rows)
    }

    /// Adds the previous layer's output to the residual stream. Returns the sum and the normalized sum.
    pub(super) fn normed(
        &self,
        norm: &Norm,
        stream: &Stream,
        role: OperandRole,
    ) -> Result<(Tensor, Operand)> {
        let Some((settings, scale)) = self.delayed(role) else {
            let (sum, normed) = norm.enter(stream)?;
            return Ok((sum, self.of(normed, role)?));
        };
        let (weight, last) = (&norm.weight.value()?, stream.last.as_ref());
        let (sum, normed) =
            ops::residual_rms_norm_fp8(&stream.sum, last, weight, norm.eps, Fp8Copies::Both, scale)?;
        Ok((sum, Operand::Fp8(normed, settings)))
    }

    /// The gradient of the residual stream at a norm's input, as [`Norm::backward`] computes it. Returned twice: in the
    /// compute type, and as the operand of the next matmul, which may be in FP8.
    pub(super) fn stream_gradient(
        &self,
        norm: &Norm,
        sum: &Tensor,
        dnormed: &Tensor,
        dstream: Option<&Tensor>,
        role: OperandRole,
    ) -> Result<(Tensor, Operand)> {
        let Some((settings, scale)) = self.delayed(role) else {
            let dx = norm.backward(sum, dnormed, dstream)?;
            return Ok((dx.clone(), self.of(dx, role)?));
        };
        let weight = &norm.weight.value()?;
        let ([dx, dweight], codes) =
            ops::rms_norm_backward_fp8(sum, weight, dnormed, dstream, norm.eps, scale)?;
        ops::add_into(norm.weight.gradient()?, &dweight)?;
        Ok((dx, Operand::Fp8(codes, settings)))
    }

    /// `swiglu(gate, up)`.
    pub(super) fn hidden(&self, gate: &Tensor, up: &Tensor) -> Result<Operand> {
        match self.delayed(OperandRole::Hidden) {
            Some((settings, scale)) => {
                Ok(Operand::Fp8(ops::swiglu_fp8(gate, up, Fp8Copies::Rows, scale)?, settings))
            }
            None => self.of(ops::swiglu(gate, up)?, OperandRole::Hidden),
        }
    }

    /// The gradient of gate and up, concatenated along the columns. If `again` is true, also `swiglu(gate, up)`, from
    /// which the gradient of the down projection's weight is computed.
    pub(super) fn gated(
        &self,
        gate: &Tensor,
        up: &Tensor,
        dhidden: &Tensor,
        again: bool,
    ) -> Result<(Operand, Option<Operand>)> {
        if let Some(((settings, scale), hidden)) =
            self.delayed(OperandRole::GateUp).zip(self.scale(OperandRole::Hidden))
        {
            let hidden = again.then_some(hidden);
            let (both, hidden) = ops::swiglu_backward_fp8(gate, up, dhidden, scale, hidden)?;
            return Ok((Operand::Fp8(both, settings), hidden.map(|hidden| Operand::Fp8(hidden, settings))));
        }
        let (both, hidden) = ops::swiglu_backward(gate, up, dhidden, again)?;
        let hidden = hidden.map(|hidden| self.quantized(hidden, OperandRole::Hidden, Fp8Copies::Columns));
        Ok((self.of(both, OperandRole::GateUp)?, hidden.transpose()?))
    }
}
