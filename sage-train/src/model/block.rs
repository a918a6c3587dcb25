//! A transformer block: attention and a feed-forward network, each with a norm before it and a residual
//! connection around it.

use std::rc::Rc;

use candle_core::{Result, Tensor};
use candle_sage::ops;

use super::attention::{Cached, Kept as AttentionKept, Observe, SelfAttention};
use super::config::{LlamaConfig, Recompute};
use super::layers::{Norm, Stream};
use super::linear::{Linear, ObserveProducts, Observer};
use super::operands::{Operand, Operands};
use super::parameters::Parameters;
use super::precision::OperandRole;
use super::rotary::Rotary;
use super::sla2::{Selected, Sla2Layer};
use crate::ranks::Group;

#[derive(Debug, Clone)]
pub(super) struct Block {
    attention: Option<(Norm, SelfAttention)>,
    mlp_norm: Norm,
    mlp: FeedForward,
    /// For training: converts inputs and output gradients of linear layers to the precision of their matmuls.
    operands: Operands,
    /// For validation: converts inputs of linear layers to the precision of their matmuls.
    pub(super) in_evaluation: Operands,
    recompute: Recompute,
}

/// Llama's feed-forward network: `W_down swiglu(W_gate x, W_up x)`.
#[derive(Debug, Clone)]
struct FeedForward {
    /// The gate and up projections in one matmul.
    gate_up: Linear,
    down: Linear,
}

/// What the forward keeps for the backward.
pub(super) enum Kept {
    Everything(Box<Inner>),
    /// The residual stream at the block's input; the backward recomputes the rest.
    Input(Stream),
}

pub(super) struct Inner {
    /// The residual stream at the block's input, the normalized stream, and what attention keeps for its backward.
    attention: Option<(Tensor, Operand, AttentionKept)>,
    /// The residual stream between attention and the feed-forward network, and the normalized stream.
    middle: (Tensor, Operand),
    /// The outputs of the gate and up projections, concatenated along the columns.
    gate_up: Tensor,
    /// `swiglu(gate, up)`. `None` if the backward recomputes it.
    hidden: Option<Operand>,
}

impl Block {
    pub(super) fn new(config: &LlamaConfig, parameters: &Parameters, layer: usize) -> Result<Self> {
        let at = |name: &str| format!("model.layers.{layer}.{name}");
        let norm = |name: &str| Norm::new(parameters, &format!("{}.weight", at(name)), config.norm_eps);
        let linear = |names: &[&str]| Linear::new(parameters, &at("mlp"), names);
        let attention = match config.scheme_of(layer) {
            None => None,
            Some(scheme) => {
                Some((norm("input_layernorm")?, SelfAttention::new(config, scheme, parameters, layer)?))
            }
        };
        Ok(Self {
            attention,
            mlp_norm: norm("post_attention_layernorm")?,
            mlp: FeedForward { gate_up: linear(&["gate_proj", "up_proj"])?, down: linear(&["down_proj"])? },
            operands: Operands::new(config, parameters, layer)?,
            in_evaluation: Operands::in_evaluation(config, layer),
            recompute: config.recompute,
        })
    }

    /// See [`SelfAttention::across`].
    pub(super) fn across(&mut self, group: &Group) {
        if let Some((_, attention)) = &mut self.attention {
            attention.across(group);
        }
    }

    /// Sets the observer. In the backward it receives the operands of the block's linear layers.
    pub(super) fn observe(&mut self, observe: &Rc<ObserveProducts>, layer: usize) {
        let attention = self.attention.iter_mut().flat_map(|(_, attention)| attention.linears());
        let FeedForward { gate_up, down } = &mut self.mlp;
        let mlp = [("gate-up", gate_up), ("down", down)];
        for (name, linear) in attention.chain(mlp) {
            linear.observe(Observer { observe: observe.clone(), layer, name });
        }
    }

    pub(super) fn sla2(&self) -> Option<&Sla2Layer> {
        self.attention.as_ref().and_then(|(_, attention)| attention.sla2.as_ref())
    }

    /// See [`SelfAttention::selected`].
    pub(super) fn selected(&self, stream: &Stream, rotary: &Rotary) -> Result<Option<Selected>> {
        let Some((norm, attention)) = &self.attention else { return Ok(None) };
        attention.selected(&Operand::Compute(norm.enter(stream)?.1), rotary)
    }

    /// The forward without a backward, for whole sequences or for tokens that follow the tokens in a cache.
    pub(super) fn forward(
        &self,
        mut stream: Stream,
        rotary: &Rotary,
        operands: &Operands,
        cached: Option<Cached<'_>>,
    ) -> Result<Stream> {
        if let Some((norm, attention)) = &self.attention {
            let (sum, normed) = norm.enter(&stream)?;
            let normed = operands.without_backward(normed, OperandRole::Normed)?;
            stream = Stream { sum, last: Some(attention.forward(&normed, rotary, operands, cached)?) };
        }
        let (sum, normed) = self.mlp_norm.enter(&stream)?;
        let normed = operands.without_backward(normed, OperandRole::MlpNormed)?;
        let [gate, up] = halves(&self.mlp.gate_up.forward(&normed)?)?;
        let hidden = operands.without_backward(ops::swiglu(&gate, &up)?, OperandRole::Hidden)?;
        Ok(Stream { sum, last: Some(self.mlp.down.forward(&hidden)?) })
    }

    /// The forward for training.
    pub(super) fn train(&self, stream: Stream, rotary: &Rotary) -> Result<(Stream, Kept)> {
        let (stream, inner) = self.inner(stream, rotary, self.recompute)?;
        let kept = match self.recompute {
            Recompute::None | Recompute::Rotary | Recompute::Attention => Kept::Everything(Box::new(inner)),
            Recompute::Block => {
                let sum = inner.attention.map_or(inner.middle.0, |(sum, ..)| sum);
                Kept::Input(Stream { sum, last: None })
            }
        };
        Ok((stream, kept))
    }

    fn inner(&self, mut stream: Stream, rotary: &Rotary, recompute: Recompute) -> Result<(Stream, Inner)> {
        let mut kept_attention = None;
        if let Some((norm, attention)) = &self.attention {
            let (sum, normed) = self.operands.normed(norm, &stream, OperandRole::Normed)?;
            let (out, kept) = attention.train(&normed, rotary, recompute)?;
            kept_attention = Some((sum.clone(), normed.kept(), kept));
            stream = Stream { sum, last: Some(out) };
        }
        let (sum, normed) = self.operands.normed(&self.mlp_norm, &stream, OperandRole::MlpNormed)?;
        let gate_up = self.mlp.gate_up.forward(&normed)?;
        let middle = (sum, normed.kept());
        let [gate, up] = halves(&gate_up)?;
        let hidden = self.operands.hidden(&gate, &up)?;
        let stream = Stream { sum: middle.0.clone(), last: Some(self.mlp.down.forward(&hidden)?) };
        let keep = matches!(recompute, Recompute::None | Recompute::Rotary);
        let hidden = (keep && self.operands.precision.keeps_hidden()).then_some(hidden.kept());
        Ok((stream, Inner { attention: kept_attention, middle, gate_up, hidden }))
    }

    /// Computes the weights' gradients. Takes the gradient of the block's output stream and returns the gradient of
    /// its input stream. Both gradients are given twice: as a tensor and as an operand of matmuls. The returned operand
    /// is for the backward of `before`, the preceding block.
    pub(super) fn backward(
        &self,
        kept: Kept,
        (dstream, dout): (Tensor, Operand),
        rotary: &Rotary,
        observe: Option<&mut Observe<'_>>,
        before: Option<&Self>,
    ) -> Result<(Tensor, Operand)> {
        let Inner { attention: kept_attention, middle: (sum, normed), gate_up, hidden } = match kept {
            Kept::Everything(inner) => *inner,
            Kept::Input(stream) => self.inner(stream, rotary, Recompute::None)?.1,
        };
        let mlp = &self.mlp;
        let dhidden = mlp.down.backward_input(&dout)?;
        let [gate, up] = halves(&gate_up)?;
        let (dgate_up, again) = self.operands.gated(&gate, &up, &dhidden, hidden.is_none())?;
        drop((gate_up, gate, up, dhidden));
        if let Some(hidden) = hidden.or(again) {
            mlp.down.backward_weight(&hidden, &dout)?;
        }
        drop(dout);
        let dnormed = mlp.gate_up.backward(&normed, &dgate_up)?;
        drop(normed);
        let (Some((norm, attention)), Some((attention_sum, normed, kept))) =
            (&self.attention, kept_attention)
        else {
            return Self::leave(before, &self.mlp_norm, &sum, &dnormed, Some(&dstream));
        };
        let (dstream, dout) = self.operands.stream_gradient(
            &self.mlp_norm,
            &sum,
            &dnormed,
            Some(&dstream),
            OperandRole::Output,
        )?;
        drop(sum);
        let dnormed = attention.backward(kept, &normed, &dout, rotary, observe)?;
        Self::leave(before, norm, &attention_sum, &dnormed, Some(&dstream))
    }

    /// The gradient of the stream that `norm` reads. The stream was written by block `before`, or by the embedding if
    /// `before` is `None`.
    pub(super) fn leave(
        before: Option<&Self>,
        norm: &Norm,
        sum: &Tensor,
        dnormed: &Tensor,
        dstream: Option<&Tensor>,
    ) -> Result<(Tensor, Operand)> {
        match before {
            Some(block) => block.operands.stream_gradient(norm, sum, dnormed, dstream, OperandRole::Down),
            None => {
                let dx = norm.backward(sum, dnormed, dstream)?;
                Ok((dx.clone(), Operand::Compute(dx)))
            }
        }
    }
}

/// Splits `both`, (rows, 2 width), into its left and right columns, each (rows, width).
fn halves(both: &Tensor) -> Result<[Tensor; 2]> {
    let width = both.dim(1)? / 2;
    Ok([both.narrow(1, 0, width)?, both.narrow(1, width, width)?])
}
