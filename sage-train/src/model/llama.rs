//! The whole model: embedding, blocks, final norm, output matrix and loss. The backward is hand-written instead of
//! derived by candle, so that it can free activations after their last use and add gradients in place.

use std::rc::Rc;

use candle_core::{Device, Result, Tensor};
use candle_sage::ops::{self, CrossEntropy};
use candle_sage::shape::Packing;

use super::attention::Observe;
use super::block::Block;
use super::config::LlamaConfig;
use super::layers::{Norm, Stream};
use super::linear::{Linear, ObserveProducts};
use super::operands::Operands;
use super::parameters::{Parameters, Weight};
use super::precision::OperandRole;
use super::rotary::Rotary;
use super::sla2::Selected;
use super::sla2_config::Stage;
use super::spec::{EMBEDDING, OUTPUT};
use crate::ranks::Group;

/// The model's input.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// Token ids, (batch, sequence).
    pub ids: &'a Tensor,
    /// The packed documents, if attention is confined to documents. They cover the whole
    /// sequences, even if `ids` has only this rank's part of each sequence.
    pub documents: Option<&'a Packing>,
}

impl<'a> From<&'a Tensor> for Input<'a> {
    fn from(ids: &'a Tensor) -> Self {
        Self { ids, documents: None }
    }
}

/// Callbacks during the backward.
#[derive(Default)]
pub struct BackwardObserver<'a, 'b> {
    /// Receives the operands of attention and the gradient of its output, last layer first.
    pub observe: Option<&'a mut Observe<'b>>,
    /// Called when the backward has finished a layer: the gradients of this layer's parameters and of all
    /// later layers are complete.
    pub layer_done: Option<&'a mut LayerDone<'b>>,
}

impl std::fmt::Debug for BackwardObserver<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch").finish_non_exhaustive()
    }
}

/// A callback that receives the index of each layer that the backward finishes.
pub type LayerDone<'a> = dyn FnMut(usize) -> Result<()> + 'a;

/// A Llama. Its weights are views of [`Parameters`].
#[derive(Debug, Clone)]
pub struct Llama {
    pub(super) embedding: Weight,
    pub(super) blocks: Vec<Block>,
    pub(super) norm: Norm,
    /// The output matrix: the embedding, unless the model has a separate output matrix.
    pub(super) output: Weight,
    /// For training: the output matrix as a linear layer, and the [`Operands`] of this layer.
    head: (Linear, Operands),
    pub(super) rotary: Rotary,
    z_loss: f32,
    pub(super) stage: Stage,
    /// Number of parts that a sequence is split into; this rank has one part.
    parts: usize,
}

impl Llama {
    /// Makes the model from the parameters that [`LlamaConfig::parameter_specs`] lists.
    ///
    /// # Errors
    /// When a parameter is missing.
    pub fn new(config: &LlamaConfig, parameters: &Parameters, device: &Device) -> Result<Self> {
        let blocks =
            (0..config.layers).map(|layer| Block::new(config, parameters, layer)).collect::<Result<_>>()?;
        let embedding = parameters.weight(EMBEDDING)?;
        let output = if config.untied { parameters.weight(OUTPUT)? } else { embedding.clone() };
        Ok(Self {
            head: (Linear::of(output.clone()), Operands::of_head(config, parameters)?),
            embedding,
            output,
            blocks,
            norm: Norm::new(parameters, "model.norm.weight", config.norm_eps)?,
            rotary: Rotary::new(config, device)?,
            z_loss: config.z_loss as f32,
            stage: Stage::Sparse,
            parts: 1,
        })
    }

    /// Turns this model into one that processes this rank's part of every sequence. A part consists of consecutive ids,
    /// equally many on every rank of the group. The model's losses cover only this part.
    pub fn across(mut self, group: &Group) -> Self {
        self.parts = group.rank().of;
        self.blocks.iter_mut().for_each(|block| block.across(group));
        self
    }

    /// Sets the observer. In the backward it receives the operands of each linear layer that is not in FP8. It does not
    /// receive those of the output matrix.
    pub fn observe_products(&mut self, observe: &Rc<ObserveProducts>) {
        self.blocks.iter_mut().enumerate().for_each(|(layer, block)| block.observe(observe, layer));
    }

    /// Sets the stage of SLA2; without effect if the model has no SLA2. A new model has [`Stage::Sparse`].
    pub fn set_stage(&mut self, stage: Stage) {
        self.stage = stage;
    }

    /// The residual stream before the first block, and the rotary angles for the input's sequence length.
    fn enter(&self, input: Input<'_>) -> Result<(Stream, Rotary)> {
        self.enter_at(input, 0)
    }

    /// As `enter`, for tokens that start at `position` in their sequence.
    pub(super) fn enter_at(
        &self,
        Input { ids, documents }: Input<'_>,
        position: usize,
    ) -> Result<(Stream, Rotary)> {
        let (_, sequence) = ids.dims2()?;
        let sum = ops::embedding_forward(&self.embedding.value()?, ids)?.flatten(0, 1)?;
        let rotary = self.rotary.narrow(position, sequence * self.parts, documents, self.stage)?;
        Ok((Stream { sum, last: None }, rotary))
    }

    /// The normalized hidden states for `input`, (batch, sequence) -> (batch * sequence, width).
    ///
    /// # Errors
    /// When an id is not in the vocabulary, or the sequence is longer than the context.
    pub fn hidden<'a>(&self, input: impl Into<Input<'a>>) -> Result<Tensor> {
        let operands = Operands::in_compute_type();
        self.hidden_with(input.into(), |_| &operands)
    }

    /// As [`Llama::hidden`]. `operands` determines the precision of each block's linear layers.
    fn hidden_with<'a>(
        &'a self,
        input: Input<'_>,
        operands: impl Fn(&'a Block) -> &'a Operands,
    ) -> Result<Tensor> {
        let (mut stream, rotary) = self.enter(input)?;
        for block in &self.blocks {
            stream = block.forward(stream, &rotary, operands(block), None)?;
        }
        Ok(self.norm.enter(&stream)?.1)
    }

    /// Statistics of SLA2's selections for `input`, averaged over layers; `None` without SLA2.
    ///
    /// # Errors
    /// As [`Llama::hidden`].
    pub fn selected<'a>(&self, input: impl Into<Input<'a>>) -> Result<Option<Selected>> {
        let (mut stream, rotary) = self.enter(input.into())?;
        let (operands, mut layers) = (Operands::in_compute_type(), Vec::new());
        for block in &self.blocks {
            layers.extend(block.selected(&stream, &rotary)?);
            stream = block.forward(stream, &rotary, &operands, None)?;
        }
        Ok(Selected::mean(&layers))
    }

    /// The logits of hidden states: (rows, width) -> (rows, vocab).
    ///
    /// # Errors
    /// When the device fails.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        hidden.matmul(&self.output.value()?.t()?)
    }

    /// Mean cross-entropy of `targets` under the logits of hidden states (rows, width), as an f32 scalar.
    ///
    /// # Errors
    /// When the device fails.
    pub fn loss_of(&self, hidden: &Tensor, targets: &Tensor) -> Result<Tensor> {
        ops::linear_cross_entropy(hidden, &self.output.value()?, targets, CrossEntropy::default())
    }

    /// Mean cross-entropy, as an f32 scalar. `targets` are the ids one position after those of `input`. Linear layers
    /// have the precision that the config sets for validation.
    ///
    /// # Errors
    /// As [`Llama::hidden`].
    pub fn loss<'a>(&self, input: impl Into<Input<'a>>, targets: &Tensor) -> Result<Tensor> {
        let hidden = self.hidden_with(input.into(), |block| &block.in_evaluation)?;
        self.loss_of(&hidden, &targets.flatten_all()?)
    }

    /// Returns the loss, including the z-loss if there is one. Accumulates the parameters' gradients of this loss.
    ///
    /// # Errors
    /// As [`Llama::hidden`], and when the parameters were not made for training.
    pub fn train<'a>(&self, input: impl Into<Input<'a>>, targets: &Tensor) -> Result<Tensor> {
        self.train_observed(input, targets, BackwardObserver::default())
    }

    /// As [`Llama::train`], with callbacks.
    ///
    /// # Errors
    /// As [`Llama::train`], and the errors of the callbacks.
    pub fn train_observed<'a>(
        &self,
        input: impl Into<Input<'a>>,
        targets: &Tensor,
        BackwardObserver { mut observe, mut layer_done }: BackwardObserver<'_, '_>,
    ) -> Result<Tensor> {
        let input = input.into();
        let ids = input.ids;
        let (mut stream, rotary) = self.enter(input)?;
        let mut kept = Vec::with_capacity(self.blocks.len());
        for block in &self.blocks {
            let (next, of_block) = block.train(stream, &rotary)?;
            stream = next;
            kept.push(of_block);
        }
        let (head, operands) = &self.head;
        let (sum, hidden) = operands.normed(&self.norm, &stream, OperandRole::Normed)?;
        drop(stream);
        let settings = CrossEntropy::default().z_loss(self.z_loss);
        let (loss, dhidden) = head.cross_entropy(&hidden, &targets.flatten_all()?, settings)?;
        drop(hidden);
        let mut dstream = Block::leave(self.blocks.last(), &self.norm, &sum, &dhidden, None)?;
        drop((sum, dhidden));
        for (layer, (block, kept)) in self.blocks.iter().zip(kept).enumerate().rev() {
            let before = layer.checked_sub(1).map(|before| &self.blocks[before]);
            dstream = block.backward(kept, dstream, &rotary, observe.as_deref_mut(), before)?;
            if let Some(layer_done) = &mut layer_done {
                layer_done(layer)?;
            }
        }
        let dstream = dstream.0.reshape((ids.dim(0)?, ids.dim(1)?, ()))?;
        let rows = self.embedding.value()?.dim(0)?;
        ops::add_into(self.embedding.gradient()?, &ops::embedding_backward(ids, &dstream, rows)?)?;
        Ok(loss)
    }

    /// Logits, (batch, vocab), of the token after the last token of `ids`.
    ///
    /// # Errors
    /// As [`Llama::hidden`].
    pub fn next_logits(&self, ids: &Tensor) -> Result<Tensor> {
        let (batch, sequence) = ids.dims2()?;
        let hidden = self.hidden(ids)?.reshape((batch, sequence, ()))?.narrow(1, sequence - 1, 1)?;
        self.logits(&hidden.squeeze(1)?.contiguous()?)
    }
}
