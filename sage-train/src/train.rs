//! Training: how a run starts, and how it ends.

pub mod guard;
mod parallel;
mod progress;
mod run_dir;
mod step_report;
mod steps;
mod stop;
mod trainer;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use candle_core::Device;
use candle_sage::{Error, Result};
use toml::Table;

use crate::config::{Change, Config, Identity, as_text};
use crate::data::{Dataset, Shares, Verification, source};
use crate::device::{DeviceKind, Hardware, free_memory};
use crate::initial;
use crate::lock::Lock;
use crate::metrics::{Outcome, Point};
use crate::model::Parameters;
use crate::quantity::{gib, grouped};
use crate::ranks::{ControlChannel, Ranks};
use crate::runs::{CONFIG, ENDING, RunEnd, STARTS, Start, Status, divergence};
use crate::settings::{Role, has_role, keys_with};
use crate::signals::SecondSignal;
use crate::{during, notify, on_device, signals, writing};

use crate::checkpoint::{Checkpoints, FoundCheckpoint, Owner};
pub use parallel::{Overlap, Parallel, check_parallel};
use progress::Progress;
use run_dir::{RunDir, write_json};
use steps::Run;
pub use stop::Stop;
use trainer::{Trainer, stop_hint};

/// Checks, before any long work starts, that the data exists and that the run's folder can be made. [`run`] reports the
/// same errors, but later.
///
/// # Errors
/// When the data does not exist, or the folder cannot be made.
pub fn check(config: &Config, begin: &Origin) -> Result<()> {
    for source in config.data.all_sources() {
        source::find(&source.path, &config.out)?;
    }
    let parent = config.out.ancestors().find(|folder| folder.exists());
    if let Some(parent) = parent.filter(|parent| !parent.is_dir()) {
        return Err(Error::new(format!("cannot make the folder {}", config.out.display()))
            .got(format!("{} is a file", parent.display()))
            .allowed("an existing folder, or a path that does not exist yet")
            .hint("--out names the folder for runs"));
    }
    if matches!(begin, Origin::New | Origin::Branch(_)) { RunDir::check_free(config) } else { Ok(()) }
}

/// What a run starts from.
#[derive(Debug)]
pub enum Origin {
    /// From initial weights, in a new folder.
    New,
    /// From initial weights, in the existing folder of a run that ended before its first checkpoint.
    Restart,
    /// From a checkpoint. The run continues in its existing folder.
    Resume(Box<FoundCheckpoint>),
    /// From a checkpoint of another run; this run gets a new folder.
    Branch(Box<FoundCheckpoint>),
}

impl Origin {
    fn found(&self) -> Option<&FoundCheckpoint> {
        match self {
            Self::Resume(found) | Self::Branch(found) => Some(found),
            Self::New | Self::Restart => None,
        }
    }
}

/// Trains as the configuration says, in a single process.
///
/// # Errors
/// As [`run_as`].
pub fn run(config: &Config, begin: &Origin) -> std::result::Result<Outcome, Stop> {
    run_as(config, begin, &ControlChannel::alone(), Parallel::ALONE)
}

/// Trains as one of the connected ranks, in the way that `parallel` says. Rank 0 writes the run's folder; all
/// ranks return the outcome.
///
/// # Errors
/// When data, folder or settings cannot be used. When a loss or gradient is not finite: the folder keeps
/// the metrics, their plot, the reason, and the weights of the last validation. When a signal interrupts the run: the
/// completed steps are saved first.
pub fn run_as(
    config: &Config,
    begin: &Origin,
    channel: &ControlChannel,
    parallel: Parallel,
) -> std::result::Result<Outcome, Stop> {
    let (rank, resumed) = (channel.rank(), begin.found());
    if resumed.is_none() && rank.is_first() {
        try_out(config)?;
    }
    check_parallel(config, rank.of, parallel.context)?;
    channel.agree("settings", &compared_settings(config, resumed, parallel))?;
    let device = config.device.open(parallel.local)?;
    let ranks = parallel.connect(channel, &device, config.tokens_per_step())?;
    let started = Instant::now();
    let mut progress = Progress::new(config.steps, rank);
    // Before the call of `signals::watch` below there is nothing to save, and a signal ends the program in
    // the default way.
    let data = load(config, channel, &progress)?;
    let fingerprint = data.fingerprint()?;
    channel.agree("data", &fingerprint)?;
    resumed.map_or(Ok(()), |found| check_continues(found, begin, config, &fingerprint))?;
    let read = || parameters(config, resumed, &device, &ranks);
    let parameters = channel.while_peers_wait("reading the weights", read)?;
    let (folder, points) = open_folder(config, begin, channel)?;
    signals::watch(SecondSignal::Ends)?;
    progress.log_to(folder.log(rank)?);
    progress.print(&format!("run: {}", folder.path().display()));
    log_what_runs(config, resumed, &data, &progress);
    if rank.of > 1 {
        progress.print(&parallel::summary(ranks.mesh()));
    }
    let first = resumed.map_or(0, |found| found.manifest.step);
    no_ending_yet(&folder, channel)?;
    if rank.is_first() {
        write_settings(&folder, config, begin)?;
    }
    let begins_with = config.init_from.as_deref().filter(|_| resumed.is_none() && rank.is_first());
    let initial_weights = begins_with.map(initial::fingerprint).transpose()?;
    let hardware = Hardware::of(&device);
    let start = Start::now(config, &data, fingerprint.clone(), &hardware, (first, ranks.mesh()));
    let start = Start { initial_weights, ..start };
    add_start(&folder, start, &progress)?;
    if rank.is_first() {
        data.tokenizer.save_in(folder.path())?;
    }
    let belongs = Owner { data: fingerprint, settings: config.identity() };
    let checkpoints = Checkpoints::new(folder.path(), belongs, config.checkpoints, channel.clone())?;
    channel.wait("folder is ready");

    let trainer = Trainer::new(config, &data, &parameters, (&device, &ranks))
        .map_err(on_device("cannot make the model"))?;
    // The run's clock continues where the earlier processes stopped.
    let seconds = points.last().map_or(0.0, |point: &Point| point.seconds.max(0.0));
    let before =
        Duration::try_from_secs_f64(seconds).map_err(during("the run's metrics have an impossible time"))?;
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
        verification: rank.is_first().then(|| Verification::start(&data)).transpose()?,
        slow: None,
        started,
        before,
    };
    if matches!(begin, Origin::Branch(_)) {
        // With this checkpoint the new run can be resumed even if it stops early.
        run.checkpoint(first);
    }
    to_its_end(run, channel)
}

/// Writes the settings of a new run or of a branch. In the file of a resumed run, the settings of the first start
/// remain, and the changed settings are appended.
fn write_settings(folder: &RunDir, config: &Config, begin: &Origin) -> Result<()> {
    let Origin::Resume(found) = begin else { return folder.write(CONFIG, &config.to_toml()) };
    // If no step is left to train and --steps is unchanged, other changes have no effect, and nothing is written.
    if found.manifest.step == config.steps && planned_steps(found) == Some(config.steps) {
        return Ok(());
    }
    let path = folder.path().join(CONFIG);
    folder.write(CONFIG, &Change::listed(&path, config, found.manifest.step)?)
}

/// Checks that a run can continue from a checkpoint.
fn check_continues(
    found: &FoundCheckpoint,
    begin: &Origin,
    config: &Config,
    fingerprint: &str,
) -> Result<()> {
    // A branch overwrites nothing, so it may start from an older checkpoint.
    if !matches!(begin, Origin::Branch(_)) {
        found.check_newest()?;
    }
    if found.manifest.data != fingerprint {
        return Err(Error::new("the data is not what the run was trained on")
            .got(format!("data with fingerprint {fingerprint:.12}"))
            .allowed(format!("fingerprint {:.12}, as in the checkpoint", found.manifest.data))
            .hint("check whether files were added or changed; earlier versions of sage-train also read hidden files and byte-order marks; to train on other data, begin a new run with --init-from"));
    }
    let first = found.manifest.step;
    if first > config.steps {
        return Err(Error::new("the run already has more steps")
            .got(format!("a checkpoint after step {first}, --steps {}", config.steps))
            .allowed(format!("at least {first} steps"))
            .hint(match planned_steps(found).filter(|planned| *planned > first) {
                Some(planned) => {
                    format!(
                        "without --steps the run continues to step {planned}: --resume {}",
                        found.run.display()
                    )
                }
                None => format!("--resume {} --steps {}", found.run.display(), 2 * first),
            }));
    }
    if matches!(begin, Origin::Branch(_)) && first == config.steps {
        return Err(Error::new("the new run would begin after its last step")
            .got(format!("a checkpoint after step {first}, --steps {first}"))
            .allowed(format!("more than {first} steps, or an earlier checkpoint"))
            .hint(format!("--steps {}, or --resume {}/checkpoints/step-N", 2 * first, found.run.display())));
    }
    Ok(())
}

/// Reports the run's settings and data and, for a run that continues, the step at which it continues.
fn log_what_runs(config: &Config, resumed: Option<&FoundCheckpoint>, data: &Dataset, progress: &Progress) {
    if let Some(found) = resumed {
        log_changed_schedule(found, config, progress);
    }
    if let Some(branch) = &config.branch {
        progress.print(&format!("branched off {}: {branch}", branch.run));
    }
    let first = resumed.map_or(0, |found| found.manifest.step);
    if first > 0 {
        progress.print(&match first == config.steps {
            true => format!("all {first} steps are done; a higher --steps continues the run"),
            false => format!("resumed after step {first}"),
        });
    }
    progress.print(&format!("{config}"));
    let epochs = match data.train.sources().count() {
        1 => format!("{:.2} epochs, ", config.tokens() as f64 / data.train.len() as f64),
        _ => {
            progress.print(&Shares::of(&config.data, &data.train, config.tokens()).to_string());
            String::new()
        }
    };
    progress.print(&format!("{}, {epochs}unigram entropy {:.3} nats", data.summary, data.unigram_entropy));
    if data.validation.len() < config.eval_tokens {
        progress.print(&format!(
            "validation data is shorter than --eval-tokens {}: each validation uses all {} tokens",
            grouped(config.eval_tokens),
            grouped(data.validation.len())
        ));
    }
}

/// Removes the record of how an earlier start of the run ended. On rank 0, makes `channel` record a failure
/// before it ends the process.
fn no_ending_yet(folder: &RunDir, channel: &ControlChannel) -> Result<()> {
    folder.remove(ENDING)?;
    if channel.rank().is_first() {
        let (path, opened) = (folder.path().join(ENDING), folder.opened());
        channel.at_end(move |why| {
            if opened.is_none_or(|folder| folder.check().is_ok()) {
                let _ = write_json(&path, &RunEnd { status: Status::Failed, reason: Some(why.into()) });
            }
        });
    }
    Ok(())
}

/// Appends a start to the run's list of starts. Prints a message if losses and gradients are summed in another order
/// than after the previous start.
fn add_start(folder: &RunDir, start: Start, progress: &Progress) -> Result<()> {
    let before: Vec<Start> = folder.read_json(STARTS)?;
    if let Some(change) = before.last().and_then(|before| start.sums_otherwise(before)) {
        progress.print(&change);
    }
    folder.add_json(STARTS, start)
}

/// Trains, writes the results (after an error, the results so far), and records how the run ended.
fn to_its_end(mut run: Run<'_>, channel: &ControlChannel) -> std::result::Result<Outcome, Stop> {
    let (path, opened) = (run.folder.path().to_owned(), run.folder.opened());
    let (vocab, hint) = (run.config.model.vocab, stop_hint(run.config));
    let ended = match run.train() {
        // A run that reached its last step but has diverged writes all of its results, then ends with an error.
        Ok(()) => run.finish().and_then(|outcome| match divergence(&outcome.points, vocab) {
            Some(why) => Err(Stop::Diverged(
                Error::new("the run has diverged").got(why).allowed("a loss that falls").hint(hint),
            )),
            None => Ok(outcome),
        }),
        Err(stop) => {
            run.progress.note(&format!("error: {stop}"));
            // A checkpoint may still be in the process of being written.
            if let Err(unsaved) = channel.while_peers_wait("the last checkpoint", || run.checkpoints.wait()) {
                run.progress.print(&format!("warning: {unsaved}"));
            }
            // An error of the plot must not replace the reason for the stop, which the caller needs.
            if !run.points.is_empty() {
                let _ = run.plot();
            }
            Err(stop)
        }
    };
    // If the run's folder was removed after the last step, the run has failed.
    let there = opened.map_or(Ok(()), |folder| folder.check());
    let ended = ended.and_then(|outcome| there.clone().map(|()| outcome).map_err(Stop::Failed));
    let ending = match &ended {
        Ok(_) => RunEnd { status: Status::Finished, reason: None },
        Err(stop) => RunEnd { status: stop.status(), reason: Some(stop.to_string()) },
    };
    // A failure to write down how the run ended does not change how it ended.
    if channel.rank().is_first()
        && let Err(error) = there.and_then(|()| write_json(&path.join(ENDING), &ending))
    {
        notify(&format!("warning: {error}"));
    }
    ended
}

/// The text that all ranks must agree on before any long work starts.
fn compared_settings(config: &Config, resumed: Option<&FoundCheckpoint>, parallel: Parallel) -> String {
    let step = resumed.map_or("a new run".into(), |found| format!("after step {}", found.manifest.step));
    // Paths are left out, because they differ between machines. The ranks' data is compared after it is read.
    let mut settings: Identity = config.identity();
    settings.retain(|key, _| !has_role(key, Role::Path));
    let all = Table::try_from(&config.settings).expect("settings are plain values");
    for key in keys_with(Role::Together) {
        let value = all.get(&key).map_or("not set".into(), as_text);
        settings.insert(key, value);
    }
    // The resolved value: a rank may leave out --checkpoint-every if the others set it to its default.
    settings.insert("checkpoint-every".into(), config.checkpoints.every.to_string());
    let settings = settings.into_iter().map(|(key, value)| format!("{key} = {value}"));
    let rest = format!(
        "context-parallel = {}\noverlap = {:?}\npiece-mb = {:?}\ncopy-engines = {:?}",
        parallel.context, parallel.overlap, parallel.piece, parallel.engines,
    );
    settings.chain([rest, step]).collect::<Vec<_>>().join("\n")
}

/// Rank 0 loads first, because it tokenizes the text; the other ranks read its result.
fn load(config: &Config, channel: &ControlChannel, progress: &Progress) -> Result<Dataset> {
    let load = || {
        channel.while_peers_wait("reading the data", || {
            Dataset::load(&config.data, &|line| progress.print(line))
        })
    };
    let first = channel.rank().is_first().then(load).transpose()?;
    channel.wait("data is read");
    first.map_or_else(load, Ok)
}

/// Rank 0 makes or opens the run's folder; the other ranks open the folder only to read.
fn open_folder(config: &Config, begin: &Origin, channel: &ControlChannel) -> Result<(RunDir, Vec<Point>)> {
    let first = begin.found().map_or(0, |found| found.manifest.step);
    if channel.rank().is_first() {
        let opened = match begin {
            Origin::Resume(found) => RunDir::reopen(&found.run, first, None)?,
            Origin::New => (RunDir::create(config)?, Vec::new()),
            Origin::Branch(found) => RunDir::branch(config, &found.run, first)?,
            Origin::Restart => {
                let path = config.out.join(config.name.as_deref().unwrap_or_default());
                RunDir::reopen(&path, 0, Some(Lock::run(&path)?))?
            }
        };
        channel.from_first("folder", &opened.0.path().to_string_lossy());
        return Ok(opened);
    }
    let path = PathBuf::from(channel.from_first("folder", ""));
    RunDir::open_read_only(path, first)
}

/// Checks what a run needs and a plan (`--dry-run`) does not: the device, and enough CPU memory. Counts only the memory
/// of the built-in corpus, of its tokens and, if the device is the CPU, of the model.
///
/// # Errors
/// When this build or this machine lacks the device or the memory.
pub fn check_machine(config: &Config) -> Result<()> {
    config.device.check()?;
    let corpus = if config.data.sources.is_empty() { 2 * config.data.corpus_bytes } else { 0 };
    let model = if config.device == DeviceKind::Cpu { config.memory().total() } else { 0 };
    let needed = corpus.saturating_add(model);
    match free_memory() {
        Some(free) if needed > free => {
            Err(Error::new("this machine does not have enough memory for the run")
                .got(format!(
                    "about {:.1} GiB: text and tokens {:.1}, model {:.1}",
                    gib(needed),
                    gib(corpus),
                    gib(model)
                ))
                .allowed(format!("up to {:.1} GiB, the free memory", gib(free)))
                .hint("lower --corpus-mb, --micro-batch or --context, or add --recompute block; shards (data prepare) are not kept in memory"))
        }
        _ => Ok(()),
    }
}

/// Checks, before any long work starts, that the folder for runs can be made or written.
fn try_out(config: &Config) -> Result<()> {
    let there =
        config.out.ancestors().find(|folder| folder.is_dir()).filter(|folder| !folder.as_os_str().is_empty());
    let there = there.unwrap_or(Path::new("."));
    let probe = there.join(format!(".sage-train-tries.{}", std::process::id()));
    std::fs::write(&probe, "").and_then(|()| std::fs::remove_file(&probe)).map_err(writing(&config.out))
}

/// The number of steps that the run was planned for when the checkpoint was written.
fn planned_steps(found: &FoundCheckpoint) -> Option<u64> {
    found.manifest.settings.as_ref()?.get("steps")?.parse().ok()
}

fn log_changed_schedule(found: &FoundCheckpoint, config: &Config, progress: &Progress) {
    if let Some(steps) = planned_steps(found).filter(|steps| *steps != config.steps) {
        progress.print(&format!(
            "the run was planned for {steps} steps: from here on the learning rate follows the schedule of a run of {} steps",
            config.steps
        ));
    }
}

/// Parameters from a checkpoint, from a model's folder, or drawn at random.
fn parameters(
    config: &Config,
    resumed: Option<&FoundCheckpoint>,
    device: &Device,
    ranks: &Ranks,
) -> Result<Parameters> {
    let dtype = config.device.dtype();
    match (resumed, &config.init_from) {
        (Some(found), _) => found.restore(config, device, ranks),
        (None, Some(folder)) => initial::parameters(folder, config, (device, dtype), ranks),
        (None, None) => Parameters::init(
            config.model.parameter_specs(),
            config.weights_seed,
            config.training(ranks),
            device,
            dtype,
        ),
    }
}
