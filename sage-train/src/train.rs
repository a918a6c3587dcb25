//! The training loop.

mod evaluate;
mod gradients;
mod metrics;
mod progress;
mod run_dir;
mod sample;

use std::path::PathBuf;
use std::time::Instant;

use candle_core::Device;
use candle_sage::{Error, Result};

use crate::config::Config;
use crate::data::{Batches, Dataset};
use crate::during;
use crate::model::{Llama, Parameters};
use crate::optim::AdamW;
use crate::report::loss_plot;
use crate::settings::Attn;

use evaluate::{Evaluation, evaluate};
use gradients::Gradients;
pub use metrics::Point;
use progress::Progress;
use run_dir::RunDir;

/// What a run came to.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The run's folder.
    pub folder: PathBuf,
    /// How it attended.
    pub attn: Attn,
    /// Validation loss at the end, nats a token.
    pub val_loss: f64,
    /// The same in bits per byte of text.
    pub val_bits_per_byte: f64,
    /// What frequencies of single tokens reach, nats a token.
    pub unigram_entropy: f64,
    /// Training speed without validation.
    pub tokens_per_second: f64,
    /// Seconds in all, reading the data included.
    pub seconds: f64,
    /// Every step.
    pub points: Vec<Point>,
}

/// Trains as the config says, in a new folder.
///
/// # Errors
/// When data, folder or settings cannot be used, and when a loss or gradient is not finite: then the
/// parameters stay as they were before that step, and the folder keeps what was measured until then.
pub fn run(config: &Config) -> Result<Outcome> {
    let device = Device::Cpu;
    let started = Instant::now();
    let mut progress = Progress::new(config.steps);
    std::fs::create_dir_all(&config.out)
        .map_err(during::<std::io::Error>(format!("cannot write to {}", config.out.display())))
        .map_err(|error| error.hint("--out names the folder that runs go to"))?;
    let data = Dataset::load(&config.data, &|line| progress.say(line))?;
    let parameters =
        Parameters::init(&config.model, config.seed, &device).map_err(during("cannot make the model"))?;
    let mut folder = RunDir::create(config)?;
    progress.log_to(folder.log()?);
    progress.say(&format!("{config}"));
    progress.say(&format!(
        "{} documents, {:.1} MB, {} training and {} validation tokens, unigram entropy {:.3} nats",
        data.documents,
        data.bytes as f64 / 1e6,
        crate::quantity::grouped(data.train.len() as u64),
        crate::quantity::grouped(data.validation.len() as u64),
        data.unigram_entropy,
    ));
    folder.write("config.toml", &config.to_toml())?;
    data.tokenizer.save(&folder.path().join("tokenizer.json"))?;

    let mut trainer =
        Trainer::new(config, &data, &parameters, &device).map_err(during("cannot make the model"))?;
    let mut points: Vec<Point> = Vec::new();
    let mut training_seconds = 0.0;
    progress.start();
    for step in 0..config.steps {
        let clock = Instant::now();
        let mut point = trainer.step(step)?;
        training_seconds += clock.elapsed().as_secs_f64();
        point.tokens_per_second = config.tokens_per_step() as f64 / clock.elapsed().as_secs_f64();
        point.mfu = config
            .peak_flops
            .map(|peak| point.tokens_per_second * config.model.flops_per_token() as f64 / peak);
        if (step + 1) % config.eval_every == 0 || step + 1 == config.steps {
            let Evaluation { loss, bits_per_byte } = trainer.evaluate(&data)?;
            (point.val_loss, point.val_bits_per_byte) = (Some(loss), Some(bits_per_byte));
        }
        point.seconds = started.elapsed().as_secs_f64();
        folder.append_metrics(&point)?;
        progress.step(&point);
        points.push(point);
    }
    progress.finish();

    let weights = folder.path().join("model.safetensors");
    parameters.save(&weights).map_err(during(format!("cannot write {}", weights.display())))?;
    folder.write(
        "loss.svg",
        &loss_plot(&[(config.attn.to_string(), points.as_slice())], Some(data.unigram_entropy))?,
    )?;
    if config.sample_tokens > 0 {
        let text = sample::sample(&trainer.eval_model, &data.tokenizer, config, &device)?;
        folder.write("sample.txt", &text)?;
        progress.say(&format!("sample:\n{text}"));
    }
    let last = points.last().expect("at least one step");
    Ok(Outcome {
        folder: folder.path().to_owned(),
        attn: config.attn,
        val_loss: last.val_loss.expect("the last step is validated"),
        val_bits_per_byte: last.val_bits_per_byte.expect("the last step is validated"),
        unigram_entropy: data.unigram_entropy,
        tokens_per_second: (config.tokens_per_step() * config.steps) as f64 / training_seconds,
        seconds: started.elapsed().as_secs_f64(),
        points,
    })
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
        let clip = self.config.clip.map_or(1.0, |limit| (limit / norm).min(1.0));
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

/// A run that must not go on.
fn stopped(what: String, step: u64) -> Error {
    Error::new(format!("stopped before the update: {what}"))
        .got(format!("{step} good steps"))
        .allowed("finite losses and gradients")
        .hint("a lower --lr, a longer --warmup-steps or --qk-norm on")
}
