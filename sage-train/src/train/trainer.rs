//! One optimizer step after the other. A step is launched without waiting for anything, and its results are collected
//! later: on a GPU, when the next one is under way.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_sage::{Error, Result, ops};

use crate::config::Config;
use crate::data::{Batches, Feed, Sequences};
use crate::device::Mailbox;
use crate::during;
use crate::metrics::Point;
use crate::model::{Llama, Parameters};

/// The state that a step changes.
pub(super) struct Trainer<'a> {
    config: &'a Config,
    device: &'a Device,
    parameters: &'a Parameters,
    tokens: &'a [u32],
    pub(super) model: Llama,
    /// 0, and NaN from the first step on whose loss or gradient is not finite: no update comes after.
    stop: Tensor,
    /// For the results of the steps under way, two at most: the loss of each micro-batch, then the sum of squares of the
    /// gradient.
    mailboxes: [Mailbox; 2],
}

/// A step under way: where its results will be.
pub(super) struct Launched {
    step: u64,
    lr: f64,
    /// The place of its results.
    mailbox: usize,
}

impl<'a> Trainer<'a> {
    pub(super) fn new(
        config: &'a Config,
        tokens: &'a [u32],
        parameters: &'a Parameters,
        device: &'a Device,
    ) -> candle_core::Result<Self> {
        Ok(Self {
            config,
            device,
            parameters,
            tokens,
            model: Llama::new(&config.model, parameters, device)?,
            stop: Tensor::zeros((), DType::F64, device)?,
            mailboxes: [
                Mailbox::new(device, config.accumulation + 1)?,
                Mailbox::new(device, config.accumulation + 1)?,
            ],
        })
    }

    pub(super) fn device(&self) -> &'a Device {
        self.device
    }

    /// Whether a step takes its course without this thread.
    pub(super) fn runs_ahead(&self) -> bool {
        self.device.is_cuda()
    }

    /// Writes the weights as they are after the steps that were launched.
    pub(super) fn save(&self, path: &Path) -> candle_core::Result<()> {
        self.parameters.save(path)
    }

    /// Batches of the run.
    pub(super) fn batches(&self) -> Batches<'a> {
        Batches::new(self.tokens, self.config.model.context, self.config.seed)
    }

    /// Launches an optimizer step. Whether loss and gradients are finite is decided where they are: if not nothing is
    /// updated, now or later.
    pub(super) fn launch(&mut self, step: u64, feed: &Feed) -> Result<Launched> {
        let lr = self.config.learning_rate.at(step);
        let launched = self.launch_at(step, lr, feed);
        launched.map_err(|error| failed(error, &format!("step {}", step + 1)))
    }

    fn launch_at(&mut self, step: u64, lr: f64, feed: &Feed) -> candle_core::Result<Launched> {
        let mailbox = (step % 2) as usize;
        self.mailboxes[mailbox].begin()?;
        let losses = self.gradients(|| feed.next())?;
        let squares = ops::sum_of_squares(self.parameters.gradients()?)?;
        // A loss that is not finite, without such a gradient, stops as well. (One after the other: a reduction of candle's
        // sends its shape to the device, and waits for everything before.)
        for loss in &losses {
            self.stop = (&self.stop + (loss.to_dtype(DType::F64)? * 0.0)?)?;
        }
        self.stop = (&self.stop + (&squares * 0.0)?)?;
        let adamw = self.config.adamw.step(step + 1, lr, self.config.accumulation);
        self.parameters.update(adamw, &(&squares + &self.stop)?)?;
        let losses = Tensor::stack(&losses, 0)?.to_dtype(DType::F64)?;
        let results = Tensor::cat(&[losses, squares.unsqueeze(0)?], 0)?;
        self.mailboxes[mailbox].send(&results)?;
        Ok(Launched { step, lr, mailbox })
    }

    /// The gradients of a step, and the losses of its micro-batches.
    fn gradients(&self, mut next: impl FnMut() -> Option<Sequences>) -> candle_core::Result<Vec<Tensor>> {
        self.parameters.clear_gradients()?;
        let mut losses = Vec::with_capacity(self.config.accumulation);
        for _ in 0..self.config.accumulation {
            let Some(sequences) = next() else { candle_core::bail!("no more batches come") };
            let batch = sequences.to_device(self.device)?;
            losses.push(self.model.train(&batch.ids, &batch.targets)?);
        }
        Ok(losses)
    }

    /// Waits for a step, and says how it went.
    pub(super) fn collect(&self, launched: Launched) -> Result<Point> {
        let Launched { step, lr, mailbox } = launched;
        let accumulation = self.config.accumulation;
        let failed = |error| failed(error, &format!("step {}", step + 1));
        let (results, seconds) = self.mailboxes[mailbox].open().map_err(failed)?;
        let (losses, squares) = (&results[..accumulation], results[accumulation]);
        if let Some((micro, loss)) = losses.iter().enumerate().find(|(_, loss)| !loss.is_finite()) {
            let at = format!("step {}, micro-batch {} of {accumulation}", step + 1, micro + 1);
            return Err(stopped(format!("the loss is {loss} at {at}"), step));
        }
        if !squares.is_finite() {
            // The next step may be under way, but it changed no weight: these are the gradients again.
            let mut batches = self.batches();
            let mut first = step * (accumulation * self.config.micro_batch) as u64;
            let again = || {
                let sequences = batches.shuffled(first, self.config.micro_batch);
                first += self.config.micro_batch as u64;
                Some(sequences)
            };
            self.gradients(again).map_err(failed)?;
            let culprit = self.parameters.first_non_finite().map_err(failed)?.unwrap_or("a parameter");
            return Err(stopped(
                format!("the gradient of {culprit} is not finite at step {}", step + 1),
                step,
            ));
        }
        let tokens_per_second = self.config.tokens_per_step() as f64 / seconds;
        let flops = tokens_per_second * self.config.model.flops_per_token() as f64;
        Ok(Point {
            step: step + 1,
            tokens: (step + 1) * self.config.tokens_per_step(),
            loss: losses.iter().sum::<f64>() / accumulation as f64,
            grad_norm: squares.sqrt() / accumulation as f64,
            lr,
            tokens_per_second,
            mfu: self.config.peak_flops.map(|peak| flops / peak),
            ..Point::default()
        })
    }
}

/// An error of the device.
fn failed(error: candle_core::Error, at: &str) -> Error {
    let memory = error.to_string().contains("OUT_OF_MEMORY");
    let error = during(at)(error);
    if memory {
        return error.hint(
            "the GPU's memory is full: halve --micro-batch, or --recompute attention, or --recompute block; --dry-run \
             estimates",
        );
    }
    error
}

pub(super) const STOP_HINT: &str = "a lower --lr, a longer --warmup-steps or --qk-norm on";

/// A run that must not go on.
fn stopped(what: String, step: u64) -> Error {
    Error::new(format!("stopped before the update: {what}"))
        .got(format!("{step} good steps"))
        .allowed("finite losses and gradients")
        .hint(STOP_HINT)
}
