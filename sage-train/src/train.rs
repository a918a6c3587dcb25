//! The training loop.

mod evaluate;
mod progress;
mod run_dir;
mod sample;
mod trainer;

use std::time::{Duration, Instant};

use candle_sage::{Error, Result};

use crate::config::Config;
use crate::data::{Dataset, Feed, files};
use crate::device::{memory, reset_peak};
use crate::metrics::{Outcome, Point};
use crate::model::Parameters;
use crate::quantity::grouped;
use crate::report::loss_plot;
use crate::{during, writing};

use evaluate::{Evaluation, evaluate};
use progress::Progress;
use run_dir::RunDir;
use trainer::{STOP_HINT, Trainer};

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
        Trainer::new(config, &data.train, &parameters, &device).map_err(during("cannot make the model"))?;
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
        self.progress.start();
        let batches = self.trainer.batches();
        let unknown = "cannot measure memory";
        reset_peak(self.trainer.device()).map_err(during(unknown))?;
        let seconds =
            std::thread::scope(|scope| self.steps(&Feed::start(scope, batches, self.config.micro_batch)))?;
        self.progress.finish();
        if let Some(memory) = memory(self.trainer.device()).map_err(during(unknown))? {
            let gib = memory.peak as f64 / f64::from(1 << 30);
            self.progress.say(&format!("most GPU memory in use at once: {gib:.1} GiB"));
        }
        Ok(seconds)
    }

    fn steps(&mut self, feed: &Feed) -> Result<f64> {
        let config = self.config;
        // A GPU gets its next step before the results of the last one are looked at.
        let ahead = self.trainer.runs_ahead();
        let (mut aside, mut under_way) = (Duration::ZERO, None);
        let started = Instant::now();
        for step in 0..config.steps {
            let launched = self.trainer.launch(step, feed);
            // What the last step came to is kept, whatever became of this one.
            if let Some(last) = under_way.take() {
                let point = self.trainer.collect(last)?;
                self.record(point)?;
            }
            under_way = Some(launched?);
            let due = config.eval_every > 0 && (step + 1) % config.eval_every == 0;
            let validates = due || step + 1 == config.steps;
            let Some(launched) = under_way.take_if(|_| validates || !ahead) else { continue };
            let mut point = self.trainer.collect(launched)?;
            let collected = Instant::now();
            if validates {
                self.validate(&mut point)?;
            }
            self.record(point)?;
            aside += collected.elapsed();
        }
        Ok((started.elapsed() - aside).as_secs_f64())
    }

    /// Validates, and keeps the weights.
    fn validate(&mut self, point: &mut Point) -> Result<()> {
        let Evaluation { loss, bits_per_byte } =
            evaluate(&self.trainer.model, self.data, self.config, self.trainer.device())?;
        if !loss.is_finite() {
            self.record(point.clone())?;
            return Err(Error::new(format!(
                "stopped: the validation loss is {loss} after step {}",
                point.step
            ))
            .got("an update that broke the model")
            .allowed("a finite loss")
            .hint(STOP_HINT));
        }
        (point.val_loss, point.val_bits_per_byte) = (Some(loss), Some(bits_per_byte));
        self.save_weights()
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
            let text = sample::sample(&trainer.model, &self.data.tokenizer, config, trainer.device())?;
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
        self.trainer.save(&partial).map_err(writing(&partial))?;
        std::fs::rename(&partial, &path).map_err(writing(&path))
    }
}
