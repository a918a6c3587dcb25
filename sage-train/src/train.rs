//! The training loop.

pub mod checkpoint;
pub mod guard;
mod parallel;
mod progress;
mod run_dir;
mod stop;
mod trainer;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use candle_core::Device;
use candle_sage::{Error, Result};

use crate::config::Config;
use crate::data::{Dataset, Feed, source};
use crate::device::{Hardware, Place, free_memory, memory, reset_peak};
use crate::evaluate::{Evaluation, Extent, evaluate};
use crate::hf;
use crate::lock::Lock;
use crate::metrics::{Outcome, Point};
use crate::model::{Llama, Parameters, Snapshot};
use crate::probe::probe_weights;
use crate::quantity::gib;
use crate::ranks::{Group, Mesh, Ranks, Words};
use crate::report::loss_plot;
use crate::runs::{CONFIG, ENDING, Ending, STARTS, Start, Status};
use crate::sample::{Sampling, sample};
use crate::signals::Second;
use crate::{during, partial, signals, tell, writing};

use checkpoint::{Belongs, Checkpoints, Found};
use guard::Recent;
pub use parallel::{Overlap, Parallel, check_parallel};
use progress::Progress;
use run_dir::{RunDir, write_json};
pub use stop::Stop;
use trainer::{Asked, STOP_HINT, Trainer};

/// Checks what can be checked before anything long begins: that the data exists, and that the run's
/// folder can. [`run`] finds the same mistakes, but later.
///
/// # Errors
/// When it does not, or cannot.
pub fn check(config: &Config, begin: &Begin) -> Result<()> {
    for source in &config.data.sources {
        source::find(&source.path, &config.out)?;
    }
    let parent = config.out.ancestors().find(|folder| folder.exists());
    if let Some(parent) = parent.filter(|parent| !parent.is_dir()) {
        return Err(Error::new(format!("cannot make the folder {}", config.out.display()))
            .got(format!("{} is a file", parent.display()))
            .allowed("a folder, or a new name for one")
            .hint("--out names the folder that runs go to"));
    }
    if matches!(begin, Begin::New) { RunDir::check_free(config) } else { Ok(()) }
}

/// What a run begins with.
#[derive(Debug)]
pub enum Begin {
    /// Nothing: its folder is made.
    New,
    /// Nothing, in the folder that its name says: it was ended there before its first checkpoint.
    Again,
    /// A checkpoint, in the folder of its run.
    From(Box<Found>),
}

impl Begin {
    fn found(&self) -> Option<&Found> {
        match self {
            Self::From(found) => Some(found),
            Self::New | Self::Again => None,
        }
    }
}

/// Trains as the config says, in this process alone.
///
/// # Errors
/// As [`run_as`].
pub fn run(config: &Config, begin: &Begin) -> std::result::Result<Outcome, Stop> {
    run_as(config, begin, &Words::alone(), Parallel::ALONE)
}

/// Trains as one of the ranks that have met, in the way that `parallel` says. Rank 0 writes the run's folder, and all have
/// the outcome.
///
/// # Errors
/// When data, folder or settings cannot be used, and when a loss or gradient is not finite. In that
/// case nothing is updated any more, and the folder keeps the metrics, their plot, the reason, and the
/// weights of the last validation. When the run is interrupted by a signal: it is saved then.
pub fn run_as(
    config: &Config,
    begin: &Begin,
    words: &Words,
    parallel: Parallel,
) -> std::result::Result<Outcome, Stop> {
    let (rank, resumed) = (words.rank(), begin.found());
    if resumed.is_none() && rank.is_first() {
        try_out(config)?;
    }
    check_parallel(config, rank.of, parallel.context)?;
    words.agree("settings", &said(config, resumed, parallel))?;
    let device = config.device.open(parallel.local)?;
    let ranks = Ranks::connect(words.clone(), parallel.mesh(words)?, &device)?;
    let started = Instant::now();
    let mut progress = Progress::new(config.steps, rank);
    // Until the first step there is nothing to save, and a signal ends the program as it does any other.
    let data = load(config, words, &progress)?;
    let fingerprint = data.fingerprint()?;
    words.agree("data", &fingerprint)?;
    let first = resumed.map_or(0, |found| found.about.step);
    if let Some(found) = resumed {
        found.check_newest()?;
        if found.about.data != fingerprint {
            return Err(Error::new("the data is not what the run was trained on")
                .got(format!("data {fingerprint:.12}"))
                .allowed(format!("{:.12}, as in the checkpoint", found.about.data))
                .hint("has a file been added or changed since? Hidden files and byte-order marks are no data any more. A new run on other data: --init-from")
                .into());
        }
        if first > config.steps {
            return Err(Error::new("the run is longer already")
                .got(format!("a checkpoint after step {first}, --steps {}", config.steps))
                .allowed(format!("at least {first} steps"))
                .hint(format!("--resume {} --steps {}", found.run.display(), 2 * first))
                .into());
        }
    }
    let parameters = parameters(config, resumed, &device, ranks.mesh())?;
    let (folder, points) = open_folder(config, begin, words)?;
    signals::watch(Second::Ends)?;
    progress.log_to(folder.log(rank)?);
    progress.say(&format!("run: {}", folder.path().display()));
    if let Some(found) = resumed {
        tell_of_course(found, config, &progress);
    }
    if first > 0 {
        progress.say(&match first == config.steps {
            true => format!("all {first} steps are done; --steps makes the run longer"),
            false => format!("resumed after step {first}"),
        });
    }
    progress.say(&format!("{config}"));
    progress.say(&format!(
        "{}, {:.2} epochs, unigram entropy {:.3} nats",
        data.summary,
        config.tokens() as f64 / data.train.len() as f64,
        data.unigram_entropy,
    ));
    folder.write(CONFIG, &config.to_toml())?;
    folder.remove(ENDING)?;
    if rank.is_first() {
        let path = folder.path().join(ENDING);
        words.at_end(move |why| {
            let _ = write_json(&path, &Ending { status: Status::Failed, reason: Some(why.into()) });
        });
    }
    let hardware = Hardware::of(&device);
    let start = Start::now(config, &data, fingerprint.clone(), &hardware, (first, rank));
    folder.add_json(STARTS, start)?;
    if rank.is_first() {
        partial::file(&folder.path().join("tokenizer.json"), |partial| data.tokenizer.save(partial))?;
    }
    let belongs = Belongs { data: fingerprint, settings: config.identity() };
    let checkpoints = Checkpoints::new(folder.path(), belongs, config.checkpoints, words.clone())?;
    words.wait("folder is ready")?;

    let trainer = Trainer::new(config, &data, &parameters, (&device, &ranks), parallel.overlap)
        .map_err(during("cannot make the model"))?;
    // Time goes on where it stopped.
    let before = Duration::from_secs_f64(points.last().map_or(0.0, |point: &Point| point.seconds.max(0.0)));
    let mut run = Run {
        config,
        data: &data,
        ranks: &ranks,
        folder,
        progress,
        trainer,
        points,
        checkpoints,
        first,
        unsaved: None,
        started,
        before,
    };
    let path = run.folder.path().to_owned();
    let ended = match run.train() {
        Ok(training_seconds) => run.finish(training_seconds),
        Err(stop) => {
            run.progress.note(&format!("error: {stop}"));
            // A checkpoint may be under way.
            if let Err(unsaved) = words.aside("the last checkpoint", || run.checkpoints.wait()) {
                run.progress.say(&format!("warning: {unsaved}"));
            }
            // The reason of the stop is what the caller needs to hear, not a plot that failed as well.
            if !run.points.is_empty() {
                let _ = run.plot();
            }
            Err(stop)
        }
    };
    let ending = match &ended {
        Ok(_) => Ending { status: Status::Finished, reason: None },
        Err(stop) => Ending { status: stop.status(), reason: Some(stop.to_string()) },
    };
    // How it ended is known: that it cannot be written down does not change it.
    if rank.is_first()
        && let Err(error) = write_json(&path.join(ENDING), &ending)
    {
        tell(&format!("warning: {error}"));
    }
    ended
}

/// What ranks must agree on before anything long begins.
fn said(config: &Config, resumed: Option<&Found>, parallel: Parallel) -> String {
    let step = resumed.map_or("a new run".into(), |found| format!("after step {}", found.about.step));
    // Where the data lies is a machine's own; what it is, is compared when it is read.
    let own = |key: &str| matches!(key, "data" | "tokenizer" | "init-from");
    let settings = config.identity().into_iter().filter(|(key, _)| !own(key));
    let settings = settings.map(|(key, value)| format!("{key} = {value}"));
    // What decides when all validate and save.
    let (checkpoints, eval) = (config.checkpoints.every, config.eval_every);
    let rest = format!(
        "device = {}\neval-every = {eval}\nprobe-every = {}\ncheckpoint-every = {checkpoints}\ncontext-parallel = {}\noverlap = {:?}\npiece-mb = {:?}",
        config.device, config.probe_every, parallel.context, parallel.overlap, parallel.piece,
    );
    settings.chain([rest, step]).collect::<Vec<_>>().join("\n")
}

/// Rank 0 goes before: what it makes of the text, the others find.
fn load(config: &Config, words: &Words, progress: &Progress) -> Result<Dataset> {
    let load = || words.aside("reading the data", || Dataset::load(&config.data, &|line| progress.say(line)));
    let first = words.rank().is_first().then(load).transpose()?;
    words.wait("data is read")?;
    first.map_or_else(load, Ok)
}

/// Rank 0 makes or opens the run's folder; the others read there.
fn open_folder(config: &Config, begin: &Begin, words: &Words) -> Result<(RunDir, Vec<Point>)> {
    let first = begin.found().map_or(0, |found| found.about.step);
    if words.rank().is_first() {
        let opened = match begin {
            Begin::From(found) => RunDir::reopen(&found.run, first, None)?,
            Begin::New => (RunDir::create(config)?, Vec::new()),
            Begin::Again => {
                let path = config.out.join(config.name.as_deref().unwrap_or_default());
                RunDir::reopen(&path, 0, Some(Lock::run(&path)?))?
            }
        };
        words.from_first("folder", &opened.0.path().to_string_lossy())?;
        return Ok(opened);
    }
    let path = PathBuf::from(words.from_first("folder", "")?);
    RunDir::look_on(path, first)
}

/// Checks what a plan needs not have: a device, and memory for what can be reckoned beforehand, which is the built-in corpus
/// with its tokens, and on a CPU the model.
///
/// # Errors
/// When this build or this machine lacks it.
pub fn check_machine(config: &Config) -> Result<()> {
    config.device.check()?;
    let corpus = if config.data.sources.is_empty() { 2 * config.data.corpus_bytes } else { 0 };
    let model = if config.device == Place::Cpu { config.memory().total() } else { 0 };
    let needed = corpus.saturating_add(model);
    match free_memory() {
        Some(free) if needed > free => {
            Err(Error::new("this machine has not the memory for the run")
                .got(format!(
                    "about {:.1} GiB: text and tokens {:.1}, model {:.1}",
                    gib(needed),
                    gib(corpus),
                    gib(model)
                ))
                .allowed(format!("{:.1} GiB, which are free", gib(free)))
                .hint("--corpus-mb, --micro-batch, --context and --recompute block make it smaller; shards (data prepare) are not held"))
        }
        _ => Ok(()),
    }
}

/// Checks that the folder of runs can be written, or made, before anything long begins.
fn try_out(config: &Config) -> Result<()> {
    let there =
        config.out.ancestors().find(|folder| folder.is_dir()).filter(|folder| !folder.as_os_str().is_empty());
    let there = there.unwrap_or(Path::new("."));
    let probe = there.join(format!(".sage-train-tries.{}", std::process::id()));
    std::fs::write(&probe, "").and_then(|()| std::fs::remove_file(&probe)).map_err(writing(&config.out))
}

/// Says that the learning rate's course is not the one that was begun.
fn tell_of_course(found: &Found, config: &Config, progress: &Progress) {
    let then = found.about.settings.as_ref();
    let steps = then.and_then(|then| then.get("steps")?.parse::<u64>().ok());
    if let Some(steps) = steps.filter(|steps| *steps != config.steps) {
        progress.say(&format!(
            "the run was planned for {steps} steps: from here on the learning rate takes the course of a run of {}",
            config.steps
        ));
    }
}

/// From a checkpoint, from another's folder, or drawn.
fn parameters(config: &Config, resumed: Option<&Found>, device: &Device, mesh: Mesh) -> Result<Parameters> {
    let dtype = config.device.dtype();
    match (resumed, &config.init_from) {
        (Some(found), _) => found.restore(config, device, dtype, mesh),
        (None, Some(folder)) => hf::load(folder, &config.model, device, dtype, Some(mesh)),
        (None, None) => Parameters::init(&config.model, config.weights_seed, mesh, device, dtype),
    }
}

/// Updates in a row that may be skipped: what lasts longer is no spike, and nothing would be learned any more.
const MOST_SKIPPED: usize = 64;

/// A run under way.
struct Run<'a> {
    config: &'a Config,
    data: &'a Dataset,
    ranks: &'a Ranks,
    /// Before the folder, whose lock it needs to the end.
    checkpoints: Checkpoints,
    folder: RunDir,
    progress: Progress,
    trainer: Trainer<'a>,
    points: Vec<Point>,
    /// The step that it begins with, from 0.
    first: u64,
    /// Why the last validation's weights could not be written.
    unsaved: Option<Error>,
    started: Instant,
    /// What it took up to there.
    before: Duration,
}

impl Run<'_> {
    /// All steps; returns the seconds that they took, validation not counted.
    fn train(&mut self) -> std::result::Result<f64, Stop> {
        self.progress.start(self.first);
        let batches = self.trainer.batches();
        let unknown = "cannot measure memory";
        reset_peak(self.trainer.device()).map_err(during(unknown))?;
        let firsts = self.trainer.firsts(self.first);
        let seconds = std::thread::scope(|scope| {
            self.steps(&Feed::start(scope, batches, firsts, self.config.micro_batch))
        })?;
        self.progress.finish();
        if let Some(memory) = memory(self.trainer.device()).map_err(during(unknown))? {
            self.progress.say(&format!("most GPU memory in use at once: {:.1} GiB", gib(memory.peak)));
        }
        Ok(seconds)
    }

    fn steps(&mut self, feed: &Feed) -> std::result::Result<f64, Stop> {
        let config = self.config;
        // A GPU gets its next step before the results of the last one are looked at.
        let ahead = self.trainer.runs_ahead();
        let alone = self.ranks.rank().of == 1;
        // Where each began with files of its own, these must have been the same.
        self.trainer.check_weights(self.first)?;
        let (mut aside, mut under_way) = (Duration::ZERO, None);
        let started = Instant::now();
        let mut saved_at = started;
        for step in self.first..config.steps {
            let doing = format!("step {} of {}", step + 1, config.steps);
            signals::doing(&doing);
            self.ranks.words().doing(&doing);
            let limits = config.skip_spikes.and_then(|z| Some(Recent::before(step, &self.points)?.limits(z)));
            let late = config.checkpoints.within.is_some_and(|within| saved_at.elapsed() >= within);
            let asks = Asked { signal: signals::received(), save: late && self.ranks.rank().is_first() };
            let launched = self.trainer.launch(step, limits, asks, feed);
            let mut asked = Asked::default();
            // What the last step came to is kept, whatever became of this one.
            if let Some(last) = under_way.take() {
                let (point, heard) = self.trainer.collect(last)?;
                self.record(point)?;
                asked = heard;
            }
            under_way = Some(launched?);
            // One process need not hear what it asks; of several all hear it with the results of one step.
            if alone {
                asked = Asked { signal: signals::received(), ..asks };
            }
            let last = step + 1 == config.steps;
            let due = |every: u64| last || (every > 0 && (step + 1).is_multiple_of(every));
            let probes = config.probe_every > 0 && due(config.probe_every);
            let validates = probes || due(config.eval_every);
            let saves = |asked: Asked| due(config.checkpoints.every) || asked != Asked::default();
            let collects = validates || saves(asked) || !ahead;
            let Some(launched) = under_way.take_if(|_| collects) else { continue };
            let (mut point, heard) = self.trainer.collect(launched)?;
            if !alone {
                asked = asked.or(heard);
            }
            let (saves, signal) = (saves(asked), asked.signal);
            let collected = Instant::now();
            if validates {
                self.validate(&mut point)?;
            }
            self.record(point)?;
            if probes && self.ranks.rank().is_first() {
                let words = self.ranks.words();
                words.aside("a probe", || self.probe(step + 1));
            }
            if saves {
                self.trainer.check_weights(step + 1)?;
                self.checkpoint(step + 1);
                saved_at = Instant::now();
            }
            if let Some(signal) = signal.filter(|_| !last) {
                signals::hear_of(signal);
                self.ranks.words().aside("the last checkpoint", || self.checkpoints.wait())?;
                return Err(Stop::Interrupted(self.interrupted(signal, step + 1)));
            }
            aside += collected.elapsed();
        }
        Ok((started.elapsed() - aside).as_secs_f64())
    }

    /// Starts to write a checkpoint. That the one before was not written is no reason to stop.
    fn checkpoint(&mut self, step: u64) {
        // However slow the disk is, the other ranks wait for it.
        if let Err(error) = self.ranks.words().aside("a checkpoint", || self.checkpoints.wait()) {
            self.progress.say(&format!("warning: {error}"));
        }
        // A rank that cannot says so with the others: a checkpoint is of all or of none.
        let copy = || self.trainer.state().map_err(during("cannot copy the weights"));
        let synced = self.ranks.words().aside("a checkpoint", || self.folder.sync());
        let state = synced.and_then(|()| copy());
        self.checkpoints.save(step, state);
    }

    fn interrupted(&self, signal: u8, step: u64) -> Error {
        Error::new(format!("interrupted, and saved after step {step} of {}", self.config.steps))
            .got(format!("signal {signal}"))
            .hint(format!("go on: sage-train --resume {}", self.folder.path().display()))
    }

    /// Validates, and keeps the weights.
    fn validate(&mut self, point: &mut Point) -> std::result::Result<(), Stop> {
        let (config, data) = (self.config, self.data);
        let measure = |model: &Llama| {
            let cut = config.data.cut(&data.tokenizer);
            let extent = Extent { tokens: config.eval_tokens, batch: config.micro_batch };
            let here = (self.trainer.device(), self.ranks);
            evaluate(model, &data.validation, cut, &data.tokenizer, extent, here, &mut |_, _| {})
        };
        let Evaluation { loss, bits_per_byte, .. } = measure(&self.trainer.model)?;
        if let Some(model) = &self.trainer.under_eval_attn {
            // One that is not finite is a result, and no reason to stop: training does not use it.
            point.eval_attn_loss = Some(measure(model)?.loss).filter(|loss| loss.is_finite());
        }
        if !loss.is_finite() {
            self.record(point.clone())?;
            return Err(Stop::Diverged(
                Error::new(format!("stopped: the validation loss is {loss} after step {}", point.step))
                    .got("an update that broke the model")
                    .allowed("a finite loss")
                    .hint(STOP_HINT),
            ));
        }
        (point.val_loss, point.val_bits_per_byte) = (Some(loss), Some(bits_per_byte));
        // Room for them may come back before the end; then they must be there.
        let weights = self.weights()?;
        self.unsaved = self.save_weights(weights).err();
        if let Some(error) = &self.unsaved {
            self.progress.say(&format!("warning: {error}"));
        }
        Ok(())
    }

    /// Measures attention's errors with the weights that the validation kept. That it cannot is no reason to stop.
    fn probe(&mut self, step: u64) {
        if self.config.model.scheme.is_none() || self.unsaved.is_some() {
            return;
        }
        let (weights, data) = (self.folder.path().join("model.safetensors"), self.data);
        let probed = probe_weights(self.config, &weights, (&data.validation, &data.tokenizer), step);
        if let Err(error) = probed.and_then(|probed| self.folder.append_probe(&probed)) {
            self.progress.say(&format!("warning: {error}"));
        }
    }

    /// Keeps and shows what a step measured.
    fn record(&mut self, mut point: Point) -> std::result::Result<(), Stop> {
        point.seconds = (self.before + self.started.elapsed()).as_secs_f64();
        if let Some(recent) = Recent::before(point.step - 1, &self.points) {
            let (loss, grad_norm) = recent.scores(point.loss, point.grad_norm);
            (point.loss_z, point.grad_norm_z) = (Some(loss), Some(grad_norm));
        }
        if point.skipped {
            self.progress.say(&format!(
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
                    .hint("what stays up is no spike: --resume with a higher --skip-spikes; or, where one was kept, go on from an earlier checkpoint with a lower --lr"),
            ));
        }
        self.progress.step(&point);
        self.points.push(point);
        Ok(())
    }

    /// Writes the results.
    fn finish(mut self, training_seconds: f64) -> std::result::Result<Outcome, Stop> {
        let config = self.config;
        if self.ranks.rank().is_first() {
            self.ranks.words().aside("the sample", || self.show())?;
        }
        let words = self.ranks.words();
        let saved = words.aside("the last checkpoint", || self.checkpoints.wait());
        self.unsaved.take().map_or(saved, Err)?;
        let mut last = self.points.last().expect("at least one step").clone();
        if last.val_loss.is_none() {
            // Nothing was left to do but this: the run was interrupted right at its end.
            self.validate(&mut last)?;
            self.unsaved.take().map_or(Ok(()), Err)?;
            self.points.pop();
            self.points.push(last.clone());
            self.folder.rewrite_metrics(&self.points)?;
        } else if self.first == config.steps {
            // The weights that are there may be those of another end.
            let weights = self.weights()?;
            self.save_weights(weights)?;
        }
        let steps = config.steps - self.first;
        let tokens_per_second = match steps {
            // Nothing was left to do.
            0 => last.tokens_per_second,
            _ => (config.tokens_per_step() * steps) as f64 / training_seconds,
        };
        Ok(Outcome {
            folder: self.folder.path().to_owned(),
            attn: config.attn,
            val_loss: last.val_loss.expect("the last step is validated"),
            val_bits_per_byte: last.val_bits_per_byte.expect("the last step is validated"),
            unigram_entropy: self.data.unigram_entropy,
            tokens_per_second,
            points: std::mem::take(&mut self.points),
        })
    }

    /// The plot of the losses, and a sample of text.
    fn show(&self) -> Result<()> {
        self.plot()?;
        let config = self.config;
        if config.sample_tokens > 0 {
            let (trainer, tokenizer) = (&self.trainer, &self.data.tokenizer);
            let sampling = Sampling { seed: config.seed, ..Sampling::default() };
            let (context, tokens) = (config.model.context, config.sample_tokens);
            let model = trainer.model.clone().across(&Group::alone());
            let text = sample(&model, tokenizer, context, "", tokens, &sampling, trainer.device())?;
            self.folder.write("sample.txt", &text)?;
            self.progress.say(&format!("sample:\n{text}"));
        }
        Ok(())
    }

    fn plot(&self) -> Result<()> {
        let plot = loss_plot(&self.config.attn.to_string(), &self.points, self.data.unigram_entropy)?;
        self.folder.write("loss.svg", &plot)
    }

    /// All weights as they are now, where they are to be written: every rank must come here.
    fn weights(&self) -> Result<Option<Snapshot>> {
        self.trainer.weights().map_err(during("cannot copy the weights"))
    }

    /// Weights with a finite validation loss, in the place of the last ones: whenever the run is cut off, the folder has
    /// whole weights.
    fn save_weights(&self, weights: Option<Snapshot>) -> Result<()> {
        let Some(weights) = weights else { return Ok(()) };
        let save = |partial: &Path| weights.save(partial).map(drop).map_err(writing(partial));
        let path = self.folder.path().join("model.safetensors");
        self.ranks.words().aside("the weights", || partial::file(&path, save))
    }
}
