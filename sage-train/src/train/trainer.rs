//! Optimizer steps. A step is launched without waiting for the device, and its results are collected later; on a GPU
//! usually after the next step has been launched.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use candle_sage::{Error, Result};

use crate::config::Config;
use crate::data::{Batches, Dataset, Feed, Sequences};
use crate::device::{Monitor, StepReadback, Upload};
use crate::metrics::Point;
use crate::model::{
    BackwardObserver, Input, LayerDone, Llama, LlamaConfig, Parameters, Reduction, Snapshot, WeightCopies,
};
use crate::optim::OptimizerStep;
use crate::ranks::Ranks;
use crate::train::guard::Limits;
use crate::train::step_report::{Report, Requests};
use crate::train::stop::Stop;
use crate::{during, on_device, signals};

/// Largest number of micro-batches whose upload to the device may be incomplete at the same time.
const AHEAD: usize = 16;

/// The state that a step changes.
pub(super) struct Trainer<'a> {
    config: &'a Config,
    device: &'a Device,
    parameters: &'a Parameters,
    ranks: &'a Ranks,
    data: &'a Dataset,
    monitor: Monitor,
    pub(super) model: Llama,
    /// A model with the weights of `model` and the attention of `--eval-attn`.
    pub(super) under_eval_attn: Option<Llama>,
    /// 0, or NaN after a step whose loss or gradient was not finite. It is added to the squared gradient norm. If the
    /// sum is NaN, the device skips the update.
    stop: Tensor,
    /// Copy results from the device to the host: one for even steps, one for odd steps. The results of a step are the
    /// [`Report`]s of all ranks, and a number that is NaN if the update was skipped and otherwise 0.
    readbacks: [StepReadback; 2],
    upload: Upload,
    /// Seconds that this rank's forward and backward took in the last step whose results have arrived.
    busy: f64,
}

/// A step that was launched, and whose results have not arrived yet.
pub(super) struct Launched {
    step: u64,
    lr: f64,
    /// Index in `Trainer::readbacks` of the readback that receives the step's results.
    readback: usize,
}

impl<'a> Trainer<'a> {
    pub(super) fn new(
        config: &'a Config,
        data: &'a Dataset,
        parameters: &'a Parameters,
        (device, ranks): (&'a Device, &'a Ranks),
    ) -> candle_core::Result<Self> {
        let mut model = Llama::new(&config.model, parameters, device)?.across(ranks.context());
        if let Some(sla2) = &config.model.sla2 {
            // `launch_at` sets SLA2's stage for each step. Without steps left to do, the last step's stage is used.
            model.set_stage(sla2.stage(config.steps - 1));
        }
        let under = |scheme| {
            let config =
                LlamaConfig { scheme: Some(scheme), layer_schemes: BTreeMap::new(), ..config.model.clone() };
            Llama::new(&config, parameters, device).map(|model| model.across(ranks.context()))
        };
        let report = Report::of(config, ranks);
        let readback = || StepReadback::new(device, report.ranks() * report.len() + 1);
        Ok(Self {
            config,
            ranks,
            under_eval_attn: config.eval_scheme.map(under).transpose()?,
            device,
            parameters,
            data,
            monitor: Monitor::new(device),
            model,
            stop: Tensor::zeros((), DType::F64, device)?,
            readbacks: [readback()?, readback()?],
            upload: Upload::new(
                device,
                (config.micro_batch, config.model.context / ranks.mesh().context),
                AHEAD,
            )?,
            busy: 0.0,
        })
    }

    fn report(&self) -> Report {
        Report::of(self.config, self.ranks)
    }

    pub(super) fn device(&self) -> &'a Device {
        self.device
    }

    /// Whether a launched step runs asynchronously.
    pub(super) fn is_asynchronous(&self) -> bool {
        self.device.is_cuda()
    }

    /// On rank 0, a copy of all weights after the steps launched so far; `None` on the other ranks. All ranks must
    /// call this.
    pub(super) fn weights(&self) -> candle_core::Result<Option<Snapshot>> {
        self.parameters.weights(self.ranks)
    }

    /// Copies of all weights in the compute type, for forwards outside of training. All ranks must call this.
    pub(super) fn expand(&self) -> Result<WeightCopies<'a>> {
        self.parameters.expand(self.ranks).map_err(on_device("cannot convert the weights for the forward"))
    }

    pub(super) fn state(&self) -> candle_core::Result<Snapshot> {
        self.parameters.state()
    }

    pub(super) fn take_saturated(&self) -> candle_core::Result<Option<u64>> {
        self.parameters.take_saturated()
    }

    /// Checks that all ranks have the same weights.
    ///
    /// # Errors
    /// When a rank has other weights than rank 0; the error names the first such rank.
    pub(super) fn check_weights(&self, step: u64) -> Result<()> {
        if self.ranks.rank().of == 1 {
            return Ok(());
        }
        let own = self
            .parameters
            .checksums(self.ranks)
            .map_err(during("cannot compare the weights of the ranks"))?;
        let Some(rank) = other_than_first(&self.ranks.gather(&own, self.device)?) else { return Ok(()) };
        Err(Error::failed(format!("rank {rank} has other weights than rank 0 after step {step}"))
            .got("checksums that are not bit-identical")
            .allowed("the same weights on every rank")
            .hint(
                "memory or links of the rank's machine may be broken: continue without this machine from the \
                 previous checkpoint",
            ))
    }

    /// The indices of this rank's micro-batches in a step.
    fn own(&self) -> impl Iterator<Item = u64> + Send + use<> {
        let group = self.ranks.mesh().data();
        (group.index as u64..self.config.accumulation as u64).step_by(group.of)
    }

    /// The first sequence of each of this rank's micro-batches, from step `first` on.
    pub(super) fn first_sequences(&self, first: u64) -> impl Iterator<Item = u64> + Send + use<> {
        let (all, micro_batch) = (self.config.accumulation as u64, self.config.micro_batch as u64);
        let own: Vec<u64> = self.own().collect();
        (first..).flat_map(move |step| {
            let of_step = own.iter().map(move |n| (step * all + n) * micro_batch);
            of_step.collect::<Vec<_>>()
        })
    }

    pub(super) fn batches(&self) -> Batches<'a> {
        Batches::new(&self.data.train, self.config.data.cut(&self.data.tokenizer))
    }

    /// Launches an optimizer step. The device checks whether loss and gradients are finite; if not, neither this update
    /// nor any later update changes the weights. If loss or gradient norm is above `limits`, only this step's update is
    /// skipped. Returns `None`, with unchanged weights, if a signal arrived between two micro-batches; with several
    /// ranks a step always completes.
    pub(super) fn launch(
        &mut self,
        step: u64,
        limits: Option<Limits>,
        asked: Requests,
        feed: &Feed,
    ) -> Result<Option<Launched>> {
        let lr = self.config.learning_rate.at(step);
        // The batches are fetched first, so that an error of the thread that reads them is not reported as a device
        // error.
        let part = self.ranks.mesh().part();
        let batches: Vec<Sequences> =
            self.own().map(|_| Ok(feed.next()?.part(part))).collect::<Result<_>>()?;
        let launched = self.launch_at(step, lr, limits, asked, &batches);
        launched.map_err(|error| on_device(&format!("step {} failed", step + 1))(error))
    }

    fn launch_at(
        &mut self,
        step: u64,
        lr: f64,
        limits: Option<Limits>,
        asked: Requests,
        batches: &[Sequences],
    ) -> candle_core::Result<Option<Launched>> {
        let (readback, report) = ((step % 2) as usize, self.report());
        if let Some(sla2) = &self.config.model.sla2 {
            self.model.set_stage(sla2.stage(step));
        }
        self.readbacks[readback].begin()?;
        let mut reduction = Reduction::new(self.parameters, self.ranks);
        // A signal interrupts a step only if the run has one rank. With several ranks, each rank sends its request to
        // stop together with the results of a step, so that all ranks stop after the same step.
        let alone = self.ranks.rank().of == 1;
        let until = || alone && signals::received().is_some();
        let losses = self.gradients(
            batches,
            Some(&mut reduction).filter(|_| self.ranks.mesh().during_backward),
            until,
        )?;
        if losses.len() < batches.len() {
            return Ok(None);
        }
        self.readbacks[readback].mark()?;
        let squares = reduction.finish()?;
        let all = self.report_to_all(&losses, &squares, asked)?;
        let number = |place: usize| all.get(place);
        let parts = report.mesh.context;
        let mean = |places: Vec<usize>| -> candle_core::Result<Tensor> {
            let sum = places[1..].iter().try_fold(number(places[0])?, |sum, place| sum + number(*place)?)?;
            if parts == 1 { Ok(sum) } else { sum / parts as f64 }
        };
        let losses = report.places_of_losses().map(mean).collect::<candle_core::Result<Vec<_>>>()?;
        let mut squares = (&self.stop * 0.0)?;
        for place in report.places_of_squares() {
            squares = (squares + number(place)?)?;
        }
        // A non-finite loss stops the run even if its gradient is finite. The losses are added one by one:
        // candle's reductions copy their shape to the device, and this copy makes the CPU wait for all earlier work.
        for loss in &losses {
            self.stop = (&self.stop + (loss * 0.0)?)?;
        }
        self.stop = (&self.stop + (&squares * 0.0)?)?;
        let skip = self.skip(&losses, &squares, limits)?;
        let norm = ((&squares + &self.stop)? + &skip)?;
        let update = OptimizerStep { step: step + 1, lr, gradients: self.gradients_of_a_step() };
        let optimizer = self.config.optimizer;
        self.parameters.update(|shard| optimizer.update(update, shard, &norm), self.ranks)?;
        self.readbacks[readback].send(&Tensor::cat(&[all, skip.unsqueeze(0)?], 0)?)?;
        Ok(Some(Launched { step, lr, readback }))
    }

    /// Gathers each rank's [`Report`] for a step, in the order of the ranks.
    fn report_to_all(
        &self,
        losses: &[Tensor],
        squares: &Tensor,
        asked: Requests,
    ) -> candle_core::Result<Tensor> {
        let report = self.report();
        // `affine` passes a number as a kernel argument. A copy to the device would make the CPU wait.
        let zero = Tensor::zeros((), DType::F64, self.device)?;
        let number = |n: f64| zero.affine(0.0, n);
        let mut own =
            losses.iter().map(|loss| loss.to_dtype(DType::F64)).collect::<candle_core::Result<Vec<_>>>()?;
        while own.len() < report.losses() {
            own.push(number(0.0)?);
        }
        own.push(squares.clone());
        own.push(number(f64::from(asked.signal.unwrap_or(0)))?);
        own.push(number(f64::from(u8::from(asked.save)))?);
        own.push(number(self.busy)?);
        let own = Tensor::stack(&own, 0)?;
        if report.ranks() == 1 {
            return Ok(own);
        }
        let all = Tensor::zeros(report.ranks() * report.len(), DType::F64, self.device)?;
        let group = self.ranks.all();
        group.wait(group.gather(&own, &all)?)?;
        Ok(all)
    }

    /// 0, or NaN if the loss or the gradient norm is above its limit: `1 / relu(limit - x)` is infinite for a value x
    /// above the limit, and 0 times infinity is NaN. candle's comparisons are not used, because they copy the limit to
    /// the device, and the CPU would wait for the copy.
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
            sum = (sum + loss)?;
        }
        let below = |value: &Tensor, limit: f64| value.affine(-1.0, limit)?.relu()?.recip()? * 0.0;
        let most = limits.grad_norm * self.gradients_of_a_step() as f64;
        below(&sum, limits.loss * micro_batches)? + below(squares, most * most)?
    }

    /// The number of gradients that a step sums: one per micro-batch. If ranks share sequences, each rank's part of a
    /// micro-batch has its own gradient. Each gradient is the mean over the tokens of its micro-batch or part.
    fn gradients_of_a_step(&self) -> usize {
        self.config.accumulation * self.ranks.mesh().context
    }

    /// Computes the gradients of a step. Returns the losses of its micro-batches. Stops before the next micro-batch if
    /// `until` returns true. During the backward of the last micro-batch, `during_backward` gets each layer whose
    /// gradients are complete.
    fn gradients(
        &mut self,
        batches: &[Sequences],
        during_backward: Option<&mut Reduction<'_>>,
        until: impl Fn() -> bool,
    ) -> candle_core::Result<Vec<Tensor>> {
        self.parameters.clear_gradients()?;
        let mut losses = Vec::with_capacity(batches.len());
        let mut send_after = during_backward.map(|reduction| |layer| reduction.send_after(layer));
        for (n, sequences) in batches.iter().enumerate() {
            if n > 0 && until() {
                break;
            }
            let [ids, targets] = self.upload.send(sequences.ids(), sequences.targets())?;
            let input = Input { ids: &ids, documents: sequences.documents() };
            let layer_done = send_after.as_mut().filter(|_| n + 1 == batches.len());
            let layer_done = layer_done.map(|send_after| send_after as &mut LayerDone<'_>);
            let observer = BackwardObserver { layer_done, observe: None };
            losses.push(self.model.train_observed(input, &targets, observer)?);
            self.ranks.channel().tick();
        }
        Ok(losses)
    }

    /// Waits until a step has ended. Returns its results, and the requests (to stop or to save) of all ranks.
    pub(super) fn collect(&mut self, launched: Launched) -> std::result::Result<(Point, Requests), Stop> {
        let Launched { step, lr, readback } = launched;
        let (accumulation, report) = (self.config.accumulation, self.report());
        let (results, [busy, seconds]) = self.readbacks[readback]
            .open()
            .map_err(|error| on_device(&format!("step {} failed", step + 1))(error))?;
        self.busy = busy;
        let (skip, reports) = results.split_last().expect("at least one number");
        let losses = report.losses_of_all(reports);
        let squares: f64 = report.places_of_squares().fold(0.0, |sum, place| sum + reports[place]);
        if let Some((micro, loss)) = losses.iter().enumerate().find(|(_, loss)| !loss.is_finite()) {
            let at = format!("step {}, micro-batch {} of {accumulation}", step + 1, micro + 1);
            return Err(stopped(format!("the loss is {loss} at {at}"), step, self.config));
        }
        if !squares.is_finite() {
            let first_non_finite = self.first_non_finite(step)?;
            return Err(stopped(
                format!("the gradient of {first_non_finite} is not finite at step {}", step + 1),
                step,
                self.config,
            ));
        }
        let tokens_per_second = self.config.tokens_per_step() as f64 / seconds;
        let gpu = self.monitor.read();
        let slowest = report.slowest(reports);
        let flops = tokens_per_second * self.config.model.flops_per_token_at(step) as f64;
        let point = Point {
            step: step + 1,
            tokens: (step + 1) * self.config.tokens_per_step(),
            loss: losses.iter().sum::<f64>() / accumulation as f64,
            grad_norm: squares.sqrt() / self.gradients_of_a_step() as f64,
            lr,
            tokens_per_second,
            skipped: skip.is_nan(),
            gpu_watts: gpu.map(|gpu| gpu.power),
            gpu_mhz: gpu.map(|gpu| gpu.clock),
            gpu_gib: gpu.map(|gpu| gpu.memory),
            update_share: Some(1.0 - busy / seconds),
            slowest_rank: slowest.map(|(rank, _)| rank as u64),
            slowest_ratio: slowest.map(|(_, ratio)| ratio),
            mfu: self.config.peak_flops.map(|peak| flops / (peak * report.ranks() as f64)),
            ..Point::default()
        };
        Ok((point, report.asked(reports)))
    }

    /// The first parameter with a non-finite gradient, on the first rank that has such a parameter.
    fn first_non_finite(&mut self, step: u64) -> Result<String> {
        // Recomputes this rank's gradients of the step, without the reduction over ranks. The weights are unchanged:
        // the device has skipped this step's update. The next step may have been launched; its update is skipped too.
        let (mut batches, part) = (self.batches(), self.ranks.mesh().part());
        let first_sequences = self.first_sequences(step).take(self.own().count());
        let again: Vec<Sequences> = first_sequences
            .map(|first| Ok(batches.shuffled(first, self.config.micro_batch)?.part(part)))
            .collect::<Result<_>>()?;
        let mut find = || {
            self.gradients(&again, None, || false)?;
            self.parameters.first_non_finite()
        };
        let own = find().map_err(|error| on_device(&format!("step {} failed", step + 1))(error))?;
        let found = self.ranks.channel().share("gradient", own.unwrap_or(""));
        let first = found.iter().enumerate().find(|(_, name)| !name.is_empty());
        Ok(match first {
            None => "a parameter".into(),
            Some((_, name)) if found.len() == 1 => name.clone(),
            Some((rank, name)) => format!("{name}, of rank {rank},"),
        })
    }
}

/// The first index whose numbers are not bit-identical to the numbers at index 0.
fn other_than_first(all: &[Vec<f64>]) -> Option<usize> {
    let bits = |numbers: &[f64]| numbers.iter().map(|number| number.to_bits()).collect::<Vec<_>>();
    all.iter().position(|numbers| bits(numbers) != bits(&all[0]))
}

/// A hint: settings that may prevent divergence.
pub(super) fn stop_hint(config: &Config) -> String {
    let clip = config.optimizer.clip().is_none_or(|clip| clip > 1.0);
    let missing = [(clip, ", --clip 1"), (!config.model.qk_norm, ", --qk-norm on")];
    let missing = missing.iter().filter(|(missing, _)| *missing).map(|(_, flag)| *flag);
    format!("try a lower --lr, more --warmup-steps{}", missing.collect::<String>())
}

fn stopped(what: String, step: u64, config: &Config) -> Stop {
    let error = Error::new(format!("stopped before the update: {what}"))
        .got(format!("a number that is not finite, after {step} steps with finite numbers"))
        .allowed("finite losses and gradients")
        .hint(stop_hint(config));
    Stop::Diverged(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_weights_are_seen() {
        let same = vec![vec![1.0, f64::NAN]; 3];
        assert_eq!(other_than_first(&same), None);
        assert_eq!(
            other_than_first(&[same[0].clone(), same[0].clone(), vec![1.0 + 1e-15, f64::NAN]]),
            Some(2)
        );
    }
}
