//! Rotary positions and QK-norm, applied in one pass, with their backward.

use candle_core::{Device, Result, Tensor};
use candle_sage::ops::{self, Fp8Matrix, Fp8Scale, QkNormRopeGrad, RopeStyle};
use candle_sage::shape::Packing;

use super::config::LlamaConfig;
use super::layers::Norm;
use super::sla2_config::Stage;

/// What attention needs for a sequence in addition to Q, K and V: the tables of rotary angles, the packed documents,
/// and the stage (dense or sparse attention).
#[derive(Debug, Clone)]
pub(super) struct Rotary {
    pub(super) cos: Tensor,
    sin: Tensor,
    pub(super) documents: Option<Packing>,
    pub(super) stage: Stage,
}

impl Rotary {
    pub(super) fn new(config: &LlamaConfig, device: &Device) -> Result<Self> {
        let (len, head_dim, base) = (config.context, config.head_dim, config.rope_base);
        let (cos, sin) = match config.rope_scaling {
            None => ops::rope_tables(len, head_dim, base, device)?,
            Some(scaling) => ops::rope_tables_llama3(len, head_dim, base, scaling.into(), device)?,
        };
        Ok(Self { cos, sin, documents: None, stage: Stage::Sparse })
    }

    /// The number of positions that the tables hold: the model's context.
    pub(super) fn positions(&self) -> usize {
        self.cos.dims()[0]
    }

    /// The tables for sequences of `len` tokens from `position` on. The angles need not restart at the first token of
    /// each document, because attention depends only on position differences.
    pub(super) fn narrow(
        &self,
        position: usize,
        len: usize,
        documents: Option<&Packing>,
        stage: Stage,
    ) -> Result<Self> {
        let (cos, sin) = (self.cos.narrow(0, position, len)?, self.sin.narrow(0, position, len)?);
        Ok(Self { cos, sin, documents: documents.cloned(), stage })
    }

    pub(super) fn forward(&self, x: &Tensor, norm: Option<&Norm>) -> Result<Tensor> {
        let (cos, sin) = (&self.cos, &self.sin);
        match norm {
            Some(norm) => ops::qk_norm_rope(x, &norm.weight.value()?, cos, sin, norm.eps, RopeStyle::Halves),
            None => ops::rope(x, cos, sin, RopeStyle::Halves),
        }
    }

    /// Returns the gradients of query and key, concatenated along the heads. Accumulates the gradients of the norms'
    /// weights.
    pub(super) fn backward(
        &self,
        x: [&Tensor; 2],
        norms: Option<&[Norm; 2]>,
        dy: [&Tensor; 2],
    ) -> Result<Tensor> {
        let (cos, sin) = (&self.cos, &self.sin);
        let Some(norms) = norms else {
            return ops::rope_backward(&dy, cos, sin, RopeStyle::Halves);
        };
        let weights = weights(norms)?;
        let all = gradients(x, &weights, dy);
        let (dx, dweights) = ops::qk_norm_rope_backward(&all, [cos, sin], norms[0].eps, RopeStyle::Halves)?;
        add_gradients(norms, &dweights)?;
        Ok(dx)
    }

    /// As [`Rotary::backward`], but returns the gradients in FP8, concatenated with `dvalue`, the gradient of value.
    pub(super) fn backward_fp8(
        &self,
        x: [&Tensor; 2],
        norms: &[Norm; 2],
        dy: [&Tensor; 2],
        dvalue: &Tensor,
        scale: &Fp8Scale,
    ) -> Result<Fp8Matrix> {
        let weights = weights(norms)?;
        let (all, tables, eps) = (gradients(x, &weights, dy), [&self.cos, &self.sin], norms[0].eps);
        let (dx, dweights) =
            ops::qk_norm_rope_backward_fp8(&all, Some(dvalue), tables, eps, RopeStyle::Halves, scale)?;
        add_gradients(norms, &dweights)?;
        Ok(dx)
    }
}

fn weights([query, key]: &[Norm; 2]) -> Result<[Tensor; 2]> {
    Ok([query.weight.value()?, key.weight.value()?])
}

fn gradients<'a>(
    x: [&'a Tensor; 2],
    weights: &'a [Tensor; 2],
    dy: [&'a Tensor; 2],
) -> [QkNormRopeGrad<'a>; 2] {
    [0, 1].map(|n| QkNormRopeGrad { x: x[n], weight: &weights[n], dout: dy[n] })
}

fn add_gradients(norms: &[Norm; 2], dweights: &[Tensor]) -> Result<()> {
    norms.iter().zip(dweights).try_for_each(|(norm, dweight)| ops::add_into(norm.weight.gradient()?, dweight))
}
