//! The training loop.

mod evaluate;
mod gradients;
mod progress;
mod run_dir;
mod sample;

use std::time::Instant;

use candle_core::Device;
use candle_sage::{Error, Result};

use crate::config::Config;
use crate::data::{Batches, Dataset, files};
use crate::metrics::{Outcome, Point};
use crate::model::{Llama, Parameters};
use crate::optim::{AdamW, clip_factor};
use crate::quantity::grouped;
use crate::report::loss_plot;
use crate::{during, writing};

use evaluate::{Evaluation, evaluate};
use gradients::Gradients;
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
    let device = Device::Cpu;
    let started = Instant::now();
    let mut progress = Progress::new(config.steps);
    let data = Dataset::load(&config.data, &|line| progress.say(line))?;
    let parameters =
        Parameters::init(&config.model, config.seed, &device).map_err(during("cannot make the model"))?;
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
            let text = sample::sample(&trainer.eval_model, &self.data.tokenizer, config, trainer.device)?;
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
    /// The same weights without a graph.
    eval_model: Llama,
    adamw: AdamW,
    batches: Batches<'a>,
}

impl<'a> Trainer<'a> {
    fn new(
        config: &'a Config,
        data: &'a Dataset,
        parameters: &'a Parameters,
        device: &'a Device,
    ) -> candle_core::Result<Self> {
        let decayed = parameters.iter().map(|(spec, var)| (var.clone(), spec.decays()));
        Ok(Self {
            config,
            device,
            parameters,
            model: Llama::load(&config.model, parameters.tracked(device), device)?,
            eval_model: Llama::load(&config.model, parameters.untracked(device), device)?,
            adamw: AdamW::new(config.adamw, decayed)?,
            batches: Batches::new(&data.train, config.model.context, config.seed),
        })
    }

    /// One optimizer step.
    fn step(&mut self, step: u64) -> Result<Point> {
        let Config { accumulation, micro_batch, .. } = *self.config;
        let mut gradients = Gradients::default();
        let mut total_loss = 0.0;
        for micro in 0..accumulation {
            let at = || format!("step {}, micro-batch {} of {accumulation}", step + 1, micro + 1);
            let first = (step * accumulation as u64 + micro as u64) * micro_batch as u64;
            let batch = self.batches.shuffled(first, micro_batch, self.device).map_err(during(at()))?;
            let loss = self.model.loss(&batch.ids, &batch.targets).map_err(during(at()))?;
            let value = f64::from(loss.to_scalar::<f32>().map_err(during(at()))?);
            if !value.is_finite() {
                return Err(stopped(format!("the loss is {value} at {}", at()), step));
            }
            total_loss += value;
            let grads = loss.backward().map_err(during(at()))?;
            gradients
                .add(self.parameters, &grads)
                .map_err(|what| stopped(format!("{what} at {}", at()), step))?;
        }
        let mean = 1.0 / accumulation as f64;
        let norm = mean
            * gradients
                .norm(self.parameters)
                .map_err(|what| stopped(format!("{what} at step {}", step + 1), step))?;
        let clip = clip_factor(norm, self.config.clip);
        let lr = self.config.learning_rate.at(step);
        gradients.apply(&mut self.adamw, mean * clip, lr).map_err(during(format!("step {}", step + 1)))?;
        Ok(Point {
            step: step + 1,
            tokens: (step + 1) * self.config.tokens_per_step(),
            loss: total_loss * mean,
            grad_norm: norm,
            lr,
            ..Point::default()
        })
    }

    fn evaluate(&self, data: &Dataset) -> Result<Evaluation> {
        evaluate(&self.eval_model, data, self.config, self.device)
    }
}

const STOP_HINT: &str = "a lower --lr, a longer --warmup-steps or --qk-norm on";

/// A run that must not go on.
fn stopped(what: String, step: u64) -> Error {
    Error::new(format!("stopped before the update: {what}"))
        .got(format!("{step} good steps"))
        .allowed("finite losses and gradients")
        .hint(STOP_HINT)
}
