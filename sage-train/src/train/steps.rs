//! The loop over a run's steps, with validation, probes and checkpoints between steps.

use std::path::Path;
use std::time::{Duration, Instant};

use candle_sage::{Error, Result, Scheme};

use super::guard::Recent;
use super::progress::Progress;
use super::run_dir::RunDir;
use super::step_report::Requests;
use super::stop::Stop;
use super::trainer::{Trainer, stop_hint};
use crate::checkpoint::Checkpoints;
use crate::config::Config;
use crate::data::{Dataset, Feed, Verification};
use crate::device::{memory, reset_peak};
use crate::evaluate::{Evaluation, Extent, evaluate, selected};
use crate::metrics::{Outcome, Point};
use crate::model::{Llama, Snapshot, Stage};
use crate::probe::probe_weights;
use crate::quantity::gib;
use crate::ranks::{Group, Ranks};
use crate::report::loss_plot;
use crate::runs::usual_speed;
use crate::sample::{Sampling, Writer};
use crate::{during, partial, signals, writing};

/// Largest number of updates in a row that may be skipped as spikes. A loss or gradient norm that stays high for more
/// steps is not a spike.
const MOST_SKIPPED: usize = 64;

/// A rank is reported as slow if, in each of `SLOW.1` consecutive steps, its time is the longest and above `SLOW.0`
/// times the ranks' median time.
const SLOW: (f64, usize) = (1.1, 20);

/// A run in progress.
pub(super) struct Run<'a> {
    pub(super) config: &'a Config,
    pub(super) data: &'a Dataset,
    pub(super) ranks: &'a Ranks,
    /// Declared before `folder`, so that it is dropped first: a checkpoint that is being written needs the
    /// folder's lock.
    pub(super) checkpoints: Checkpoints,
    pub(super) folder: RunDir,
    pub(super) progress: Progress,
    pub(super) trainer: Trainer<'a>,
    pub(super) points: Vec<Point>,
    /// The first step of this process, from 0.
    pub(super) first: u64,
    /// The error, if the weights could not be saved at the last validation.
    pub(super) unsaved: Option<Error>,
    /// The thread that verifies shards; `None` on all ranks except rank 0.
    pub(super) verification: Option<Verification>,
    /// The rank that was last reported as slow.
    pub(super) slow: Option<u64>,
    pub(super) started: Instant,
    /// The run's duration in earlier processes.
    pub(super) before: Duration,
}

impl Run<'_> {
    pub(super) fn train(&mut self) -> std::result::Result<(), Stop> {
        self.progress.start(self.first);
        let batches = self.trainer.batches();
        let unknown = "cannot measure memory";
        reset_peak(self.trainer.device()).map_err(during(unknown))?;
        let first_sequences = self.trainer.first_sequences(self.first);
        std::thread::scope(|scope| {
            self.steps(&Feed::start(scope, batches, first_sequences, self.config.micro_batch))
        })?;
        self.progress.finish();
        if let Some(memory) = memory(self.trainer.device()).map_err(during(unknown))? {
            self.progress.print(&format!("peak GPU memory: {:.1} GiB", gib(memory.peak)));
        }
        Ok(())
    }

    fn steps(&mut self, feed: &Feed) -> std::result::Result<(), Stop> {
        let config = self.config;
        // On a GPU, step n + 1 is launched before the host reads the results of step n.
        let ahead = self.trainer.is_asynchronous();
        let alone = self.ranks.rank().of == 1;
        // Ranks may have read the initial weights from separate files, which must be equal.
        self.trainer.check_weights(self.first)?;
        let mut under_way = None;
        let (mut saved, mut saved_at) = (self.first, Instant::now());
        for step in self.first..config.steps {
            let doing = self.announce(step);
            let limits = config.skip_spikes.and_then(|z| Some(Recent::before(step, &self.points)?.limits(z)));
            let late = config.checkpoints.within.is_some_and(|within| saved_at.elapsed() >= within);
            let asks = Requests { signal: signals::received(), save: late && self.ranks.rank().is_first() };
            let launched = self.trainer.launch(step, limits, asks, feed);
            let mut asked = Requests::default();
            // The results of the step before are recorded even if the launch of this step failed.
            if let Some(last) = under_way.take() {
                let (point, heard) = self.trainer.collect(last)?;
                self.record(point)?;
                asked = heard;
            }
            under_way = launched?;
            if let Some(signal) = signals::received().filter(|_| under_way.is_none()) {
                // The signal interrupted this step, so the checkpoint contains the state before this step.
                if step != saved {
                    self.checkpoint(step);
                }
                self.checkpoints.wait()?;
                return Err(Stop::Interrupted(self.interrupted(signal, step)));
            }
            // A single process acts immediately on a request to stop or to save. Several ranks exchange requests
            // together with the results of a step, so that all ranks act on them after the same step.
            if alone {
                asked = Requests { signal: signals::received(), ..asks };
            }
            let last = step + 1 == config.steps;
            let due = |every: u64| last || (every > 0 && (step + 1).is_multiple_of(every));
            let probes = config.probe_every > 0 && due(config.probe_every);
            let validates = probes || due(config.eval_every);
            let saves = |asked: Requests| due(config.checkpoints.every) || asked != Requests::default();
            let collects = validates || saves(asked) || !ahead;
            let Some(launched) = under_way.take_if(|_| collects) else { continue };
            let (mut point, heard) = self.trainer.collect(launched)?;
            if !alone {
                asked = asked.or(heard);
            }
            if validates {
                signals::set_activity(&format!("the validation after {doing}"));
                self.validate(&mut point)?;
                if alone {
                    asked.signal = signals::received();
                }
            }
            let (saves, signal) = (saves(asked), asked.signal);
            self.record(point)?;
            if probes && self.ranks.rank().is_first() {
                let channel = self.ranks.channel();
                channel.while_peers_wait("a probe", || self.probe(step + 1));
            }
            if saves {
                self.trainer.check_weights(step + 1)?;
                self.checkpoint(step + 1);
                (saved, saved_at) = (step + 1, Instant::now());
            }
            if let Some(signal) = signal.filter(|_| !last) {
                signals::record_remote(signal);
                self.ranks.channel().while_peers_wait("the last checkpoint", || self.checkpoints.wait())?;
                return Err(Stop::Interrupted(self.interrupted(signal, step + 1)));
            }
        }
        Ok(())
    }

    /// Announces the start of a step to the signal handler and the other ranks. Returns the step's name.
    fn announce(&self, step: u64) -> String {
        let doing = format!("step {} of {}", step + 1, self.config.steps);
        let leaves_between = self.ranks.rank().of == 1 && self.config.accumulation > 1;
        signals::set_activity(&match leaves_between {
            true => format!("a micro-batch of {doing}"),
            false => doing.clone(),
        });
        self.ranks.channel().step(step + 1, &doing);
        doing
    }

    /// Starts to write a checkpoint. An error of the previous checkpoint is reported and does not stop the run.
    pub(super) fn checkpoint(&mut self, step: u64) {
        // This rank's disk may be slow: `while_peers_wait` lets the other ranks wait longer than usual.
        if let Err(error) = self.ranks.channel().while_peers_wait("a checkpoint", || self.checkpoints.wait())
        {
            self.progress.print(&format!("warning: {error}"));
        }
        // All ranks must call `save`, so a rank that cannot sync or copy passes its error to `save`. The next
        // `self.checkpoints.wait()` returns the error.
        let copy = || self.trainer.state().map_err(during("cannot copy the state for the checkpoint"));
        let synced = self.ranks.channel().while_peers_wait("a checkpoint", || self.folder.sync());
        let state = synced.and_then(|()| copy());
        self.checkpoints.save(step, state);
    }

    fn interrupted(&self, signal: u8, step: u64) -> Error {
        if step == 0 {
            return Error::new("interrupted in the first step: nothing was saved")
                .got(format!("signal {signal}"))
                .hint(match self.config.name.is_some() {
                    true => "the same command with --resume auto starts the run again",
                    false => "the same command starts the run again",
                });
        }
        Error::new(format!("interrupted, and saved after step {step} of {}", self.config.steps))
            .got(format!("signal {signal}"))
            .hint(format!("continue: sage-train --resume {}", self.folder.path().display()))
    }

    /// Validates, and writes the weights.
    fn validate(&mut self, point: &mut Point) -> std::result::Result<(), Stop> {
        let (config, data) = (self.config, self.data);
        let expanded = self.trainer.expand()?;
        let measure = |model: &Llama| {
            let cut = config.data.cut(&data.tokenizer);
            let extent = Extent { tokens: config.eval_tokens, batch: config.micro_batch };
            let here = (self.trainer.device(), self.ranks);
            evaluate(model, &data.validation, cut, &data.tokenizer, extent, here, &mut |_, _| {})
        };
        let Evaluation { loss, bits_per_byte, .. } = measure(&self.trainer.model)?;
        if let Some(model) = &self.trainer.under_eval_attn {
            // A non-finite loss is omitted and does not stop the run: training does not use the scheme of --eval-attn.
            point.eval_attn_loss = Some(measure(model)?.loss).filter(|loss| loss.is_finite());
        }
        if !loss.is_finite() {
            self.record(point.clone())?;
            return Err(Stop::Diverged(
                Error::new(format!("stopped: the validation loss is {loss} after step {}", point.step))
                    .got("outputs of the model that are not finite")
                    .allowed("a finite loss")
                    .hint(stop_hint(config)),
            ));
        }
        (point.val_loss, point.val_bits_per_byte) = (Some(loss), Some(bits_per_byte));
        point.fp8_saturated = self.count_saturated()?;
        if config.model.sla2.is_some() && self.ranks.rank().index == 0 {
            let cut = config.data.cut(&data.tokenizer);
            // Only this rank measures, so its model must not exchange heads with other ranks.
            let (model, device) = (self.trainer.model.clone().across(&Group::alone()), self.trainer.device());
            let look = || selected(&model, &data.validation, cut, device);
            let of =
                self.ranks.channel().while_peers_wait("the metrics of SLA2", look).unwrap_or_else(|error| {
                    self.progress.print(&format!("warning: {error}"));
                    None
                });
            point.sla2_sparsity = of.map(|selected| selected.sparsity);
            point.sla2_exact_weight = of.map(|selected| selected.exact_weight);
            point.sla2_mass_caught = of.map(|selected| selected.mass_caught);
            point.sla2_users_ratio = of.map(|selected| selected.users_ratio);
        }
        drop(expanded);
        // A failure to write the weights is only a warning here, because disk space may be freed later. At the end of
        // the run it is an error.
        let weights = self.weights()?;
        self.unsaved = self.save_weights(weights).err();
        if let Some(error) = &self.unsaved {
            self.progress.print(&format!("warning: {error}"));
        }
        Ok(())
    }

    /// How many values of FP8 operands have saturated since the last validation. If this count is higher than the
    /// last recorded count, the log reports both counts.
    fn count_saturated(&self) -> Result<Option<u64>> {
        let now = self.trainer.take_saturated().map_err(during("cannot count saturated values"))?;
        let before = self.points.iter().rev().find_map(|point| point.fp8_saturated).unwrap_or(0);
        if let Some(now) = now.filter(|now| *now > before) {
            self.progress.print(&format!(
                "{now} values of FP8 operands have saturated since the last validation, {before} in the interval \
                 before"
            ));
        }
        Ok(now)
    }

    /// Measures the errors of low-bit attention, with the weights that were saved at the last validation. A failure
    /// does not stop the run.
    fn probe(&mut self, step: u64) {
        if self.config.model.scheme.is_none() || self.unsaved.is_some() {
            return;
        }
        let (weights, data) = (self.folder.path().join("model.safetensors"), self.data);
        let probed = probe_weights(self.config, &weights, (&data.validation, &data.tokenizer), step);
        if let Err(error) = probed.and_then(|probed| self.folder.append_probe(&probed)) {
            self.progress.print(&format!("warning: {error}"));
        }
    }

    /// Warns of the shards that the thread of [`Verification`] could not read.
    fn warn_of_unread(&self, results: impl FnOnce(&Verification) -> Result<Vec<Error>>) -> Result<()> {
        for unread in self.verification.as_ref().map_or(Ok(Vec::new()), results)? {
            self.progress.print(&format!("warning: {unread}"));
        }
        Ok(())
    }

    /// Records and shows the results of a step.
    fn record(&mut self, mut point: Point) -> std::result::Result<(), Stop> {
        self.warn_of_unread(Verification::new_problems)?;
        point.seconds = (self.before + self.started.elapsed()).as_secs_f64();
        if let Some(recent) = Recent::before(point.step - 1, &self.points) {
            let (loss, grad_norm) = recent.scores(point.loss, point.grad_norm);
            (point.loss_z, point.grad_norm_z) = (Some(loss), Some(grad_norm));
        }
        if point.skipped {
            self.progress.print(&format!(
                "step {}: a spike, the update is skipped (loss {:.3}, norm {:.2})",
                point.step, point.loss, point.grad_norm
            ));
        }
        self.folder.append_metrics(&point)?;
        let here = self.points.iter().rev().take_while(|point| point.step > self.first);
        let skipped = here.take_while(|point| point.skipped).count();
        if point.skipped && skipped >= MOST_SKIPPED {
            return Err(Stop::Diverged(
                Error::new(format!("stopped: {} updates in a row were skipped as spikes", skipped + 1))
                    .got(format!("loss {:.3}, norm {:.2} at step {}", point.loss, point.grad_norm, point.step))
                    .allowed(format!("at most {MOST_SKIPPED} in a row"))
                    .hint("a lasting rise is not a spike: --resume with a higher --skip-spikes, or continue from an earlier checkpoint (if one was kept) with a lower --lr"),
            ));
        }
        self.progress.step(&point);
        if let Some(sla2) = &self.config.model.sla2
            && point.step < self.config.steps
            && sla2.stage(point.step) != sla2.stage(point.step - 1)
        {
            self.progress.print(match sla2.stage(point.step) {
                Stage::Sparse => "from here on attention sees only the selected blocks",
                Stage::Router | Stage::Dense => "from here on SLA2 is trained to match dense attention",
            });
        }
        self.points.push(point);
        if let Some((rank, ratio)) = slow_rank(&self.points).filter(|(rank, _)| self.slow != Some(*rank)) {
            self.slow = Some(rank);
            self.progress.print(&format!(
                "rank {rank} is slow: its gradients took at least {ratio:.2} times the median time of the ranks in each of {} steps in a row",
                SLOW.1
            ));
        }
        Ok(())
    }

    /// Writes the results.
    pub(super) fn finish(mut self) -> std::result::Result<Outcome, Stop> {
        let config = self.config;
        if self.first < config.steps {
            self.progress.print("training has finished; the last checkpoint is being saved");
        }
        self.warn_of_unread(Verification::end)?;
        let expanded = (config.sample_tokens > 0).then(|| self.trainer.expand()).transpose()?;
        if self.ranks.rank().is_first() {
            self.ranks.channel().while_peers_wait("the sample", || self.show())?;
        }
        drop(expanded);
        let channel = self.ranks.channel();
        let saved = channel.while_peers_wait("the last checkpoint", || self.checkpoints.wait());
        self.unsaved.take().map_or(saved, Err)?;
        let mut last = self.points.last().expect("at least one step").clone();
        if last.val_loss.is_none() {
            // The run was resumed at its last step, which has no validation loss: only the validation is left to do.
            self.validate(&mut last)?;
            self.unsaved.take().map_or(Ok(()), Err)?;
            self.points.pop();
            self.points.push(last.clone());
            self.folder.rewrite_metrics(&self.points)?;
        } else if self.first == config.steps {
            // `model.safetensors` may contain the weights of an earlier step.
            let weights = self.weights()?;
            self.save_weights(weights)?;
        }
        Ok(Outcome {
            folder: self.folder.path().to_owned(),
            attn: config.attn,
            val_loss: last.val_loss.expect("the last step is validated"),
            val_bits_per_byte: last.val_bits_per_byte.expect("the last step is validated"),
            unigram_entropy: self.data.unigram_entropy,
            // The speed is computed as in reports.
            tokens_per_second: usual_speed(config, &self.points).unwrap_or(0.0),
            points: std::mem::take(&mut self.points),
        })
    }

    /// Writes the plot of the losses and a sample of text.
    fn show(&self) -> Result<()> {
        self.plot()?;
        let config = self.config;
        if config.sample_tokens > 0 {
            let sampling = Sampling { seed: config.seed, ..Sampling::default() };
            let around = self.data.tokenizer.boundaries();
            let writer = Writer {
                special_tokens: false,
                model: &self.trainer.model.clone().across(&Group::alone()),
                following: Some(Scheme::Unquantized),
                tokenizer: &self.data.tokenizer,
                begin: Some(around.begin),
                ends: &around.ends,
                context: config.model.context,
                device: self.trainer.device(),
            };
            let text = writer.write("", config.sample_tokens, &sampling)?.text;
            self.folder.write("sample.txt", &text)?;
            self.progress.print(&match text.trim() {
                "" => "sample: empty, the first token ended the document".into(),
                _ => format!("sample:\n{text}"),
            });
        }
        Ok(())
    }

    pub(super) fn plot(&self) -> Result<()> {
        let plot = loss_plot(&self.config.attn.to_string(), &self.points, self.data.unigram_entropy)?;
        self.folder.write("loss.svg", &plot)
    }

    fn weights(&self) -> Result<Option<Snapshot>> {
        self.trainer.weights().map_err(during("cannot copy the weights"))
    }

    /// Writes weights to the run's `model.safetensors`. The file is replaced atomically, so it is complete whenever the
    /// run is interrupted.
    fn save_weights(&self, weights: Option<Snapshot>) -> Result<()> {
        let Some(weights) = weights else { return Ok(()) };
        let save = |partial: &Path| weights.save(partial).map(drop).map_err(writing(partial));
        let path = self.folder.path().join("model.safetensors");
        let write = || self.folder.check_there().and_then(|()| partial::file(&path, save));
        self.ranks.channel().while_peers_wait("the weights", write)
    }
}

/// The rank that was the slowest in each of the last `SLOW.1` steps, and the smallest `slowest_ratio` of these steps.
/// `None` without such a rank, or if the smallest ratio is at most `SLOW.0`.
fn slow_rank(points: &[Point]) -> Option<(u64, f64)> {
    let last = &points[points.len().checked_sub(SLOW.1)?..];
    let rank = last[0].slowest_rank?;
    let ratios = last.iter().map(|point| point.slowest_ratio.filter(|_| point.slowest_rank == Some(rank)));
    let least = ratios.collect::<Option<Vec<_>>>()?.into_iter().fold(f64::INFINITY, f64::min);
    (least > SLOW.0).then_some((rank, least))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_is_slow_for_long_is_named() {
        let steps = |count: usize, rank, ratio| {
            vec![Point { slowest_rank: Some(rank), slowest_ratio: Some(ratio), ..Point::default() }; count]
        };
        assert_eq!(slow_rank(&steps(19, 3, 1.3)), None);
        assert_eq!(slow_rank(&[steps(1, 2, 1.5), steps(20, 3, 1.3)].concat()), Some((3, 1.3)));
        assert_eq!(slow_rank(&[steps(19, 3, 1.3), steps(1, 2, 1.3)].concat()), None);
        assert_eq!(slow_rank(&[steps(19, 3, 1.3), steps(1, 3, 1.05)].concat()), None);
        assert_eq!(slow_rank(&vec![Point::default(); 30]), None);
    }
}
