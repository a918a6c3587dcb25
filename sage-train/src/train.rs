//! The training loop.

mod evaluate;
mod progress;
mod run_dir;
mod sample;

use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use candle_sage::{Error, Result, ops};

use crate::config::Config;
use crate::data::{Batches, Dataset, files};
use crate::metrics::{Outcome, Point};
use crate::model::{Llama, Parameters};
use crate::quantity::grouped;
use crate::report::loss_plot;
use crate::{during, writing};

use evaluate::{Evaluation, evaluate};
use progress::Progress;
use run_dir::RunDir;

/// Checks what can be checked before anything long begins: that the data exists, and that the run's
/// folder can. [`run`] finds the same mistakes, but later.
///
/// # Errors
/// When it does not, or cannot.
pub fn check(config: &Config) -> Result<()> {
    if let Some(path) = &config.data.path {
        files(path, &config.out)?;
    }
    let parent = config.out.ancestors().find(|folder| folder.exists());
    if let Some(parent) = parent.filter(|parent| !parent.is_dir()) {
        return Err(Error::new(format!("cannot make the folder {}", config.out.display()))
            .got(format!("{} is a file", parent.display()))
            .allowed("a folder, or a new name for one")
            .hint("--out names the folder that runs go to"));
    }
    RunDir::check_free(config)
}

/// Trains as the config says, in a new folder.
///
/// # Errors
/// When data, folder or settings cannot be used, and when a loss or gradient is not finite. In that
/// case nothing is updated any more, and the folder keeps the metrics, their plot, the reason, and the
/// weights of the last validation.
pub fn run(config: &Config) -> Result<Outcome> {
    let device = config.device.open()?;
    let started = Instant::now();
    let mut progress = Progress::new(config.steps);
    let data = Dataset::load(&config.data, &|line| progress.say(line))?;
    let parameters = Parameters::init(&config.model, config.seed, &device, config.device.dtype())
        .map_err(during("cannot make the model"))?;
    let folder = RunDir::create(config)?;
    progress.log_to(folder.log()?);
    progress.say(&format!("{config}"));
    progress.say(&format!(
        "{} documents, {:.1} MB, {} training and {} validation tokens, {:.2} epochs, unigram entropy {:.3} nats",
        data.documents,
        data.bytes as f64 / 1e6,
        grouped(data.train.len() as u64),
        grouped(data.validation.len() as u64),
        (config.tokens_per_step() * config.steps) as f64 / data.train.len() as f64,
        data.unigram_entropy,
    ));
    folder.write("config.toml", &config.to_toml())?;
    data.tokenizer.save(&folder.path().join("tokenizer.json"))?;

    let trainer =
        Trainer::new(config, &data, &parameters, &device).map_err(during("cannot make the model"))?;
    let mut run = Run { config, data: &data, folder, progress, trainer, points: Vec::new(), started };
    match run.train() {
        Ok(training_seconds) => run.finish(training_seconds),
        Err(error) => {
            run.progress.note(&format!("error: {error}"));
            // The reason of the stop is what the caller needs to hear, not a plot that failed as well.
            if !run.points.is_empty() {
                let _ = run.plot();
            }
            Err(error)
        }
    }
}

/// A run under way.
struct Run<'a> {
    config: &'a Config,
    data: &'a Dataset,
    folder: RunDir,
    progress: Progress,
    trainer: Trainer<'a>,
    points: Vec<Point>,
    started: Instant,
}

impl Run<'_> {
    /// All steps; returns the seconds that they took, validation not counted.
    fn train(&mut self) -> Result<f64> {
        let (config, mut seconds) = (self.config, 0.0);
        self.progress.start();
        for step in 0..config.steps {
            let clock = Instant::now();
            let mut point = self.trainer.step(step)?;
            let took = clock.elapsed().as_secs_f64();
            seconds += took;
            point.tokens_per_second = config.tokens_per_step() as f64 / took;
            let flops = point.tokens_per_second * config.model.flops_per_token() as f64;
            point.mfu = config.peak_flops.map(|peak| flops / peak);
            let due = config.eval_every > 0 && (step + 1) % config.eval_every == 0;
            if due || step + 1 == config.steps {
                let Evaluation { loss, bits_per_byte } = self.trainer.evaluate(self.data)?;
                if !loss.is_finite() {
                    self.record(point)?;
                    return Err(Error::new(format!(
                        "stopped: the validation loss is {loss} after step {}",
                        step + 1
                    ))
                    .got("an update that broke the model")
                    .allowed("a finite loss")
                    .hint(STOP_HINT));
                }
                (point.val_loss, point.val_bits_per_byte) = (Some(loss), Some(bits_per_byte));
                self.save_weights()?;
            }
            self.record(point)?;
        }
        self.progress.finish();
        Ok(seconds)
    }

    /// Keeps and shows what a step measured.
    fn record(&mut self, mut point: Point) -> Result<()> {
        point.seconds = self.started.elapsed().as_secs_f64();
        self.folder.append_metrics(&point)?;
        self.progress.step(&point);
        self.points.push(point);
        Ok(())
    }

    /// Writes the results.
    fn finish(self, training_seconds: f64) -> Result<Outcome> {
        let config = self.config;
        self.plot()?;
        if config.sample_tokens > 0 {
            let trainer = &self.trainer;
            let text = sample::sample(&trainer.model, &self.data.tokenizer, config, trainer.device)?;
            self.folder.write("sample.txt", &text)?;
            self.progress.say(&format!("sample:\n{text}"));
        }
        let last = self.points.last().expect("at least one step");
        Ok(Outcome {
            folder: self.folder.path().to_owned(),
            attn: config.attn,
            val_loss: last.val_loss.expect("the last step is validated"),
            val_bits_per_byte: last.val_bits_per_byte.expect("the last step is validated"),
            unigram_entropy: self.data.unigram_entropy,
            tokens_per_second: (config.tokens_per_step() * config.steps) as f64 / training_seconds,
            points: self.points,
        })
    }

    fn plot(&self) -> Result<()> {
        let curve = (self.config.attn.to_string(), self.points.as_slice());
        self.folder.write("loss.svg", &loss_plot(&[curve], Some(self.data.unigram_entropy))?)
    }

    /// Weights with a finite validation loss, in the place of the last ones. Under another name first:
    /// whenever the run is cut off, the folder has whole weights.
    fn save_weights(&self) -> Result<()> {
        let path = self.folder.path().join("model.safetensors");
        let partial = path.with_extension("partial");
        self.trainer.parameters.save(&partial).map_err(writing(&partial))?;
        std::fs::rename(&partial, &path).map_err(writing(&path))
    }
}

/// The state that a step changes.
struct Trainer<'a> {
    config: &'a Config,
    device: &'a Device,
    parameters: &'a Parameters,
    model: Llama,
    batches: Batches<'a>,
}

impl<'a> Trainer<'a> {
    fn new(
        config: &'a Config,
        data: &'a Dataset,
        parameters: &'a Parameters,
        device: &'a Device,
    ) -> candle_core::Result<Self> {
        Ok(Self {
            config,
            device,
            parameters,
            model: Llama::new(&config.model, parameters, device)?,
            batches: Batches::new(&data.train, config.model.context, config.seed),
        })
    }

    /// One optimizer step. Nothing is waited for but its end: whether loss and gradients are finite is decided where
    /// they are, and if not nothing is updated.
    fn step(&mut self, step: u64) -> Result<Point> {
        let accumulation = self.config.accumulation;
        let lr = self.config.learning_rate.at(step);
        let failed = |error| failed(error, &format!("step {}", step + 1));
        self.parameters.clear_gradients().map_err(failed)?;
        let losses = (0..accumulation)
            .map(|micro| self.micro_batch(step, micro))
            .collect::<candle_core::Result<Vec<Tensor>>>()
            .map_err(failed)?;
        let update = || -> candle_core::Result<(Vec<f32>, f64)> {
            let losses = Tensor::stack(&losses, 0)?;
            // 0, or NaN where a loss is not finite, which stops the update.
            let stop = (losses.sum_all()? * 0.0)?.to_dtype(DType::F64)?;
            let squares = ops::sum_of_squares(self.parameters.gradients()?)?;
            let adamw = self.config.adamw.step(step + 1, lr, accumulation);
            self.parameters.update(adamw, &(&squares + stop)?)?;
            Ok((losses.to_vec1()?, squares.to_scalar::<f64>()?))
        };
        let (losses, squares) = update().map_err(failed)?;
        for (micro, loss) in losses.iter().enumerate().filter(|(_, loss)| !loss.is_finite()) {
            let at = format!("step {}, micro-batch {} of {accumulation}", step + 1, micro + 1);
            return Err(stopped(format!("the loss is {loss} at {at}"), step));
        }
        if !squares.is_finite() {
            let culprit = self.parameters.first_non_finite().map_err(failed)?.unwrap_or("a parameter");
            return Err(stopped(
                format!("the gradient of {culprit} is not finite at step {}", step + 1),
                step,
            ));
        }
        Ok(Point {
            step: step + 1,
            tokens: (step + 1) * self.config.tokens_per_step(),
            loss: losses.iter().map(|&loss| f64::from(loss)).sum::<f64>() / accumulation as f64,
            grad_norm: squares.sqrt() / accumulation as f64,
            lr,
            ..Point::default()
        })
    }

    /// Adds the gradients of a micro-batch; returns its loss.
    fn micro_batch(&mut self, step: u64, micro: usize) -> candle_core::Result<Tensor> {
        let Config { accumulation, micro_batch, .. } = *self.config;
        let first = (step * accumulation as u64 + micro as u64) * micro_batch as u64;
        let batch = self.batches.shuffled(first, micro_batch, self.device)?;
        self.model.train(&batch.ids, &batch.targets)
    }

    fn evaluate(&self, data: &Dataset) -> Result<Evaluation> {
        evaluate(&self.model, data, self.config, self.device)
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

const STOP_HINT: &str = "a lower --lr, a longer --warmup-steps or --qk-norm on";

/// A run that must not go on.
fn stopped(what: String, step: u64) -> Error {
    Error::new(format!("stopped before the update: {what}"))
        .got(format!("{step} good steps"))
        .allowed("finite losses and gradients")
        .hint(STOP_HINT)
}
