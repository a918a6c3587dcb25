//! `sage-train` without a subcommand.

use std::path::{Path, PathBuf};
use std::thread::available_parallelism;
use std::time::Duration;

use candle_sage::{Error, Result};
use toml::Table;

use super::from_files::fill_from_files;
use super::print;
use super::resume::Resumed;
use super::several::{SeveralGpus, as_rank};
use super::sweep::{self, ResumeCommands};
use super::threads;
use super::typed::check_typed;
use crate::checkpoint;
use crate::checks::in_range;
use crate::config::{Change, Config};
use crate::data::{Batches, Dataset, Shares};
use crate::device::DeviceKind;
use crate::lock::Lock;
use crate::ranks::{ControlChannel, Rank, Role};
use crate::report::result_table;
use crate::runs::{self, Status, ending};
use crate::settings::{Attn, Preset, Settings};
use crate::sweep::{Limits, Spec};
use crate::train::{Origin, Stop};
use crate::{during, notify, partial, ranks, train};

/// The value of `--resume` that stands for the newest checkpoint of the run that `--name` names.
const AUTO: &str = "auto";

#[derive(Debug, clap::Args)]
pub(super) struct Train {
    /// TOML file with settings, such as a run's config.toml; flags override it. The `[[changes]]` tables, in which
    /// --resume records changed settings, are ignored
    #[arg(long, value_name = "FILE", help_heading = "Run")]
    config: Option<PathBuf>,
    /// Resume a run from its newest checkpoint (RUN: the run's folder), or from another checkpoint (RUN: the
    /// checkpoint's folder). Flags may change the run's length, learning rates, evaluation and logging, but not its
    /// model, data or batch size. `--resume auto --name NAME` resumes run NAME if it has a checkpoint and starts it
    /// otherwise, so that a restarted job can repeat its command
    #[arg(long, value_name = "RUN", help_heading = "Run", conflicts_with = "compare")]
    resume: Option<PathBuf>,
    /// With --resume RUN: continue in a new folder of this name, and do not change RUN. The weights, the optimizer's
    /// moments and the data order are kept. --attn may change between fpa, sagebwd and attn-qat, as in
    /// `--resume runs/a --new-name b --attn sagebwd`
    #[arg(long, value_name = "NAME", help_heading = "Run", requires = "resume")]
    new_name: Option<String>,
    /// Print the run's settings, the model's size, its estimated memory, and its time on an H100, and exit
    #[arg(long, help_heading = "Run")]
    dry_run: bool,
    #[command(flatten)]
    several: SeveralGpus,
    /// Do not train: write the run's training sequences, in training order, to a shard file for another program
    #[arg(long, value_name = "FILE", help_heading = "Run", conflicts_with_all = ["resume", "compare", "dry_run"])]
    write_batches: Option<PathBuf>,
    /// Compare these kinds of attention: one run for each kind and each value of --seed. The baseline is fpa if it is
    /// listed, else the first kind
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        value_name = "ATTN,ATTN",
        help_heading = "Run",
        conflicts_with = "attn"
    )]
    compare: Vec<Attn>,
    #[command(flatten)]
    pub(super) settings: Settings,
}

impl Train {
    pub(super) fn run(self, mut lists: Table) -> Result<()> {
        if self.config.is_some() && self.resume.as_deref().is_some_and(|run| run != Path::new(AUTO)) {
            return Err(Error::new("a resumed run already has settings")
                .got("--config with --resume")
                .allowed("--config without --resume, or with --resume auto")
                .hint("flags may change the length, learning rates, evaluation and logging of the run"));
        }
        if self.new_name.is_some() && self.resume.as_deref() == Some(Path::new(AUTO)) {
            return Err(Error::new("--new-name needs a run to continue from")
                .got("--new-name with --resume auto")
                .allowed("--resume RUN --new-name NAME")
                .hint("RUN may be a checkpoint: runs/a/checkpoints/step-00000250"));
        }
        if self.several.restarts > 0 && self.resume.as_deref() != Some(Path::new(AUTO)) {
            return Err(Error::new("--restarts needs --resume auto")
                .got("--restarts without --resume auto")
                .allowed("--restarts K --resume auto --name NAME")
                .hint("--resume auto continues from the newest checkpoint"));
        }
        let file = self.config.as_deref().map(Config::read_settings).transpose()?.unwrap_or_default();
        if let (Some(flag), Some(in_file)) = (self.settings.run.preset, file.run.preset)
            && flag != in_file
        {
            return Err(Error::new("the preset is given twice")
                .got(format!("{} as a flag, {} in the file", flag.name(), in_file.name()))
                .allowed("one preset")
                .hint(
                    "a saved config.toml contains every setting of its preset: leave --preset or --config out",
                ));
        }
        if !self.compare.is_empty() {
            let names = self.compare.iter().map(|attn| attn.to_string().into());
            lists.insert("attn".into(), toml::Value::Array(names.collect()));
        }
        if !lists.is_empty() {
            return self.sweep(file, &lists);
        }
        let stall = Duration::from_secs(in_range("stall-timeout", self.several.stall_timeout, 1, 1 << 20)?);
        let looks = self.dry_run || self.write_batches.is_some();
        if let Some(ranks @ 2..) = self.several.gpus
            && self.resume.is_none()
            && !looks
        {
            // Settings are checked before the ranks start: after the start, each rank would report the same error.
            let config = Config::resolve(fill_from_files(self.settings.clone().over(file.clone()))?)?;
            train::check_parallel(&config, ranks, self.several.context_parallel)?;
        }
        let role =
            if looks { Role::alone() } else { Role::take(self.several.gpus, self.several.restarts, stall)? };
        let (channel, local) = as_rank(role);
        let ended = self.train(file, &channel, local);
        // Each rank itself notices that the run diverged, was interrupted or has invalid settings. Only other errors
        // are sent to the other ranks.
        match ended {
            Ok(()) => {
                channel.leave(None);
                Ok(())
            }
            Err(stop @ (Stop::Diverged(_) | Stop::Interrupted(_) | Stop::Mistaken(_))) => {
                channel.leave(None);
                let error = Error::from(stop);
                if !channel.rank().is_first() {
                    // Rank 0 prints the reason.
                    ranks::end(super::exit_code(&error));
                }
                Err(error)
            }
            Err(Stop::Failed(error)) => {
                channel.leave(Some(&error));
                Err(error)
            }
        }
    }

    /// Trains, as one of the ranks that have connected.
    fn train(self, file: Settings, channel: &ControlChannel, local: Rank) -> std::result::Result<(), Stop> {
        let rank = channel.rank();
        // A resuming rank and a starting rank exchange different messages, so all ranks must resume or all must start.
        let begins = match self.resume.as_deref() {
            None => "a new run",
            Some(path) if path == Path::new(AUTO) => "--resume auto",
            Some(_) if self.new_name.is_some() => "--resume RUN --new-name NAME",
            Some(_) => "--resume RUN",
        };
        channel.agree("command", begins)?;
        if rank.is_first() {
            self.report_changes()?;
        }
        let typed = self.settings.clone();
        let (config, begin) = match self.resume.as_deref() {
            Some(path) if path == Path::new(AUTO) => resumed_config(self.settings, file, channel)?,
            Some(path) => {
                let branch = self.new_name.as_deref();
                let Resumed { config, found } = Resumed::open(path, self.settings, branch, rank)?;
                let found = Box::new(found);
                (config, if branch.is_some() { Origin::Branch(found) } else { Origin::Resume(found) })
            }
            None => (requested_config(self.settings, file, channel)?, Origin::New),
        };
        if !matches!(begin, Origin::Resume(_)) {
            agreed(check_typed(&typed, &config), channel)?;
            if rank.is_first() {
                train::check(&config, &begin)?;
            }
        }
        if self.dry_run {
            if !self.several.is_hypothetical()
                && let Err(error) = train::check_machine(&config)
            {
                notify(&format!("warning: {error}"));
            }
            let world = self.several.world(config.device == DeviceKind::Cuda, config.tokens_per_step())?;
            let ranks = world.mesh.rank().of;
            train::check_parallel(&config, ranks, world.mesh.context)?;
            let of_ranks = if ranks > 1 { config.of_ranks(world) } else { String::new() };
            let shares = Shares::planned(&config.data, config.tokens())?;
            let shares = shares.map_or(String::new(), |shares| format!("\n{shares}\n"));
            return Ok(print(&format!("{config}{of_ranks}{shares}"))?);
        }
        if let Some(path) = &self.write_batches {
            return Ok(write_batches(&config, path)?);
        }
        train::check_machine(&config)?;
        if channel.rank().of == 1 {
            self.several.warn_of_idle();
        }
        // The ranks of one machine share its cores.
        let share =
            || (local.of > 1).then(|| available_parallelism().map_or(1, usize::from).div_ceil(local.of));
        if let Some(threads) = config.threads.or_else(share) {
            threads::start(threads)?;
        }
        let outcome = train::run_as(&config, &begin, channel, self.several.parallel(local)?)?;
        if rank.is_first() {
            print(&result_table(&outcome))?;
        }
        Ok(())
    }

    /// If the `--config` file belongs to an earlier run, prints what the new run does not take over: the checkpoint
    /// that the earlier run started from, if any, and settings that were changed when the earlier run was resumed.
    fn report_changes(&self) -> Result<()> {
        let folder = self.config.as_deref().and_then(Path::parent);
        let branch = folder.map(runs::branch).transpose();
        // If `runs::branch` fails, only a warning is printed, because only the message below needs its result.
        if let Some(branch) =
            branch.inspect_err(|error| notify(&format!("warning: {error}"))).ok().flatten().flatten()
        {
            notify(&format!(
                "--config takes only the settings of a run, but the run of this file started from the \
                 weights of {} after step {}; to start from a checkpoint of {0}: --resume {0} --new-name \
                 NAME",
                branch.run, branch.step
            ));
        }
        for change in self.config.as_deref().map(Change::read).transpose()?.unwrap_or_default() {
            notify(&format!("--config ignores settings that were changed by a later --resume: {change}"));
        }
        Ok(())
    }

    /// Runs a sweep over every combination of the values in `lists`.
    fn sweep(self, file: Settings, lists: &Table) -> Result<()> {
        self.report_changes()?;
        let goes_on = "to continue a sweep, repeat its command with its --name";
        let alone =
            "each run of a sweep is one process: leave the flag out, or give one value for each setting";
        for (flag, given, hint) in [
            ("--resume", self.resume.is_some(), goes_on),
            ("--write-batches", self.write_batches.is_some(), "leave --write-batches out"),
            ("--gpus", self.several.gpus.is_some(), alone),
            ("--context-parallel", self.several.context_parallel != 1, alone),
        ] {
            if given {
                let lists = lists.keys().cloned().collect::<Vec<_>>().join(", ");
                return Err(Error::new(format!(
                    "{flag} is for one run, but a list of values makes several runs"
                ))
                .got(format!("a list for {lists}"))
                .allowed("one value for each setting")
                .hint(hint));
            }
        }
        let mut typed = self.settings.clone();
        let (name, preset) = (typed.run.name.take(), typed.run.preset.or(file.run.preset));
        let shared = Table::try_from(&file).map_err(during("cannot use the file's settings"))?;
        let spec = Spec { settings: shared, ..Spec::default() };
        let free = |config: &Config| match name {
            Some(name) => Ok(name),
            None => free_name(&config.out, preset.unwrap_or(Preset::Tiny)),
        };
        let sweep = sweep::plan(&spec, typed, lists, free)?;
        if self.dry_run {
            // The table shows only settings with several values. The first run's configuration shows the others.
            let first =
                sweep.runs.first().map_or(String::new(), |run| format!("\n{}:\n{}", run.name, run.config));
            let table = sweep::table(&spec, &sweep, None, 1, None);
            return print(&format!("{table}{first}"));
        }
        let name = sweep.folder.file_name().unwrap_or_default().to_string_lossy();
        let resume = format!("the same command with --name {name}");
        let commands = ResumeCommands { retry_hint: resume.clone(), resume };
        sweep::execute(&spec, &sweep, &Limits { jobs: 1, retry: true, ..Limits::default() }, &commands)
    }
}

/// The run requested by the flags and the settings file.
fn requested_config(
    typed: Settings,
    file: Settings,
    channel: &ControlChannel,
) -> std::result::Result<Config, Stop> {
    agreed(fill_from_files(typed.over(file)).and_then(Config::resolve), channel)
}

/// Returns `found`, after checking that it is `Ok` on all ranks or the same error on all ranks. Only rank 0 reports the
/// error.
fn agreed<T>(found: Result<T>, channel: &ControlChannel) -> std::result::Result<T, Stop> {
    let outcome =
        found.as_ref().err().map_or_else(|| "settings that can run".to_owned(), ToString::to_string);
    channel.agree("command", &outcome)?;
    found.map_err(Stop::Mistaken)
}

/// `--resume auto`: resumes the named run from its newest checkpoint, or starts the run if it has no checkpoint.
fn resumed_config(
    typed: Settings,
    file: Settings,
    channel: &ControlChannel,
) -> std::result::Result<(Config, Origin), Stop> {
    let asked = requested_config(typed, file, channel)?;
    let Some(name) = &asked.name else {
        return Err(Error::new("--resume auto needs the name of the run")
            .got("no --name")
            .allowed("--resume auto --name NAME")
            .hint("the same command starts the run and resumes it")
            .into());
    };
    let run = asked.out.join(name);
    // Rank 0 decides for all ranks whether to start or resume, before any rank creates or removes a file.
    let found = || -> Result<String> {
        Ok(match checkpoint::newest(&run) {
            Some(step) => format!("step {step}"),
            // An earlier start of the run ended before the first checkpoint.
            None if Lock::marks(&run) && !finished(&run)? => "again".into(),
            None => "new".into(),
        })
    };
    match channel.from_first("what there is of the run", &found()?).as_str() {
        "new" => Ok((asked, Origin::New)),
        "again" => Ok((asked, Origin::Restart)),
        _ => {
            let mut settings = asked.settings;
            (settings.run.name, settings.run.out) = (None, None);
            let Resumed { config, found } = Resumed::open(&run, settings, None, channel.rank())?;
            Ok((config, Origin::Resume(Box::new(found))))
        }
    }
}

/// Whether a run recorded that it finished or diverged.
fn finished(run: &Path) -> Result<bool> {
    let status = ending(run)?.map(|ending| ending.status);
    Ok(matches!(status, Some(Status::Finished | Status::Diverged)))
}

/// The first free name in `out` for a sweep's folder, such as `tiny-sweep-001`.
fn free_name(out: &Path, preset: Preset) -> Result<String> {
    let preset = preset.name();
    let mut numbered = (1..10_000).map(|n| format!("{preset}-sweep-{n:03}"));
    numbered.find(|name| !out.join(name).exists()).ok_or_else(|| {
        Error::new("no free number is left for the sweep's folder")
            .got(out.display())
            .allowed("fewer than 10,000 sweeps")
            .hint("choose another folder with --out or --name")
    })
}

fn write_batches(config: &Config, path: &Path) -> Result<()> {
    partial::check_free(path, "file", "--write-batches")?;
    let data = Dataset::load(&config.data, &|line| notify(line))?;
    let cut = config.data.cut(&data.tokenizer);
    let sequences = config.steps * (config.accumulation * config.micro_batch) as u64;
    let written = Batches::new(&data.train, cut).write(sequences, &data.tokenizer, path);
    if written.is_err() {
        let _ = std::fs::remove_file(path);
    }
    written
}
