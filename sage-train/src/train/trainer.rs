//! One optimizer step after the other. A step is launched without waiting for anything, and its results are collected
//! later: on a GPU, when the next one is under way.

use candle_core::{DType, Device, Tensor};
use candle_sage::{Error, Result, ops};

use crate::config::Config;
use crate::data::{Batches, Dataset, Feed, Sequences};
use crate::device::{Mailbox, Monitor};
use crate::during;
use crate::metrics::Point;
use crate::model::{Input, Llama, LlamaConfig, Parameters, Snapshot};
use crate::train::guard::Limits;
use crate::train::stop::Stop;

/// The state that a step changes.
pub(super) struct Trainer<'a> {
    config: &'a Config,
    device: &'a Device,
    parameters: &'a Parameters,
    data: &'a Dataset,
    monitor: Monitor,
    pub(super) model: Llama,
    /// The same weights under the attention of `--eval-attn`.
    pub(super) under_eval_attn: Option<Llama>,
    /// 0, and NaN from the first step on whose loss or gradient is not finite: no update comes after.
    stop: Tensor,
    /// For the results of the steps under way, two at most: the loss of each micro-batch, the sum of squares of the
    /// gradient, and 0, or NaN where the update was skipped.
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
        data: &'a Dataset,
        parameters: &'a Parameters,
        device: &'a Device,
    ) -> candle_core::Result<Self> {
        let mut model = Llama::new(&config.model, parameters, device)?;
        if let Some(sla2) = &config.model.sla2 {
            // Where no step is left to do.
            model.set_stage(sla2.stage(config.steps - 1));
        }
        let under = |scheme| {
            Llama::new(&LlamaConfig { scheme: Some(scheme), ..config.model.clone() }, parameters, device)
        };
        Ok(Self {
            config,
            under_eval_attn: config.eval_scheme.map(under).transpose()?,
            device,
            parameters,
            data,
            monitor: Monitor::new(device),
            model,
            stop: Tensor::zeros((), DType::F64, device)?,
            mailboxes: [
                Mailbox::new(device, config.accumulation + 2)?,
                Mailbox::new(device, config.accumulation + 2)?,
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

    /// The weights, and the moments, as they are after the steps that were launched.
    pub(super) fn snapshot(&self, moments: bool) -> candle_core::Result<Snapshot> {
        self.parameters.snapshot(moments)
    }

    /// Batches of the run.
    pub(super) fn batches(&self) -> Batches<'a> {
        Batches::new(&self.data.train, self.config.data.cut(&self.data.tokenizer))
    }

    /// Launches an optimizer step. Whether loss and gradients are finite is decided where they are: if not nothing is
    /// updated, now or later. Beyond the limits this step alone updates nothing.
    pub(super) fn launch(&mut self, step: u64, limits: Option<Limits>, feed: &Feed) -> Result<Launched> {
        let lr = self.config.learning_rate.at(step);
        // Their thread has them ready: an error of theirs is told from one of the device here.
        let batches: Vec<Sequences> =
            (0..self.config.accumulation).map(|_| feed.next()).collect::<Result<_>>()?;
        let launched = self.launch_at(step, lr, limits, &batches);
        launched.map_err(|error| failed(error, &format!("step {}", step + 1)))
    }

    fn launch_at(
        &mut self,
        step: u64,
        lr: f64,
        limits: Option<Limits>,
        batches: &[Sequences],
    ) -> candle_core::Result<Launched> {
        let mailbox = (step % 2) as usize;
        if let Some(sla2) = &self.config.model.sla2 {
            self.model.set_stage(sla2.stage(step));
        }
        self.mailboxes[mailbox].begin()?;
        let losses = self.gradients(batches)?;
        let squares = ops::sum_of_squares(self.parameters.gradients()?)?;
        // A loss that is not finite, without such a gradient, stops as well. (One after the other: a reduction of candle's
        // sends its shape to the device, and waits for everything before.)
        for loss in &losses {
            self.stop = (&self.stop + (loss.to_dtype(DType::F64)? * 0.0)?)?;
        }
        self.stop = (&self.stop + (&squares * 0.0)?)?;
        let adamw = self.config.adamw.step(step + 1, lr, self.config.accumulation);
        let skip = self.skip(&losses, &squares, limits)?;
        self.parameters.update(adamw, &((&squares + &self.stop)? + &skip)?)?;
        let losses = Tensor::stack(&losses, 0)?.to_dtype(DType::F64)?;
        let results = Tensor::cat(&[losses, squares.unsqueeze(0)?, skip.unsqueeze(0)?], 0)?;
        self.mailboxes[mailbox].send(&results)?;
        Ok(Launched { step, lr, mailbox })
    }

    /// 0, or NaN beyond a limit: what lies above becomes 0, whose inverse is infinite. (No comparison of candle's, which
    /// would send its bound to the device, and wait.)
    fn skip(
        &self,
        losses: &[Tensor],
        squares: &Tensor,
        limits: Option<Limits>,
    ) -> candle_core::Result<Tensor> {
        let none = (&self.stop * 0.0)?;
        let Some(limits) = limits else { return Ok(none) };
        let micro_batches = losses.len() as f64;
        let mut sum = none;
        for loss in losses {
            sum = (sum + loss.to_dtype(DType::F64)?)?;
        }
        let below = |value: &Tensor, limit: f64| value.affine(-1.0, limit)?.relu()?.recip()? * 0.0;
        let most = limits.grad_norm * micro_batches;
        below(&sum, limits.loss * micro_batches)? + below(squares, most * most)?
    }

    /// The gradients of a step, and the losses of its micro-batches.
    fn gradients(&self, batches: &[Sequences]) -> candle_core::Result<Vec<Tensor>> {
        self.parameters.clear_gradients()?;
        let mut losses = Vec::with_capacity(batches.len());
        for sequences in batches {
            let batch = sequences.to_device(self.device)?;
            let input = Input { ids: &batch.ids, documents: batch.documents.as_ref() };
            losses.push(self.model.train(input, &batch.targets)?);
        }
        Ok(losses)
    }

    /// Waits for a step, and says how it went.
    pub(super) fn collect(&self, launched: Launched) -> std::result::Result<Point, Stop> {
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
            let micro_batch = self.config.micro_batch;
            let firsts =
                (0..accumulation as u64).map(|n| (step * accumulation as u64 + n) * micro_batch as u64);
            let again: Vec<Sequences> =
                firsts.map(|first| batches.shuffled(first, micro_batch)).collect::<Result<_>>()?;
            self.gradients(&again).map_err(failed)?;
            let culprit = self.parameters.first_non_finite().map_err(failed)?.unwrap_or("a parameter");
            return Err(stopped(
                format!("the gradient of {culprit} is not finite at step {}", step + 1),
                step,
            ));
        }
        let tokens_per_second = self.config.tokens_per_step() as f64 / seconds;
        let gpu = self.monitor.read();
        let flops = tokens_per_second * self.config.model.flops_per_token_at(step) as f64;
        Ok(Point {
            step: step + 1,
            tokens: (step + 1) * self.config.tokens_per_step(),
            loss: losses.iter().sum::<f64>() / accumulation as f64,
            grad_norm: squares.sqrt() / accumulation as f64,
            lr,
            tokens_per_second,
            skipped: results[accumulation + 1].is_nan(),
            gpu_watts: gpu.map(|gpu| gpu.power),
            gpu_mhz: gpu.map(|gpu| gpu.clock),
            gpu_gib: gpu.map(|gpu| gpu.memory),
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
fn stopped(what: String, step: u64) -> Stop {
    let error = Error::new(format!("stopped before the update: {what}"))
        .got(format!("{step} good steps"))
        .allowed("finite losses and gradients")
        .hint(STOP_HINT);
    Stop::Diverged(error)
}
