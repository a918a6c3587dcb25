//! What was typed.

mod bench;
mod data;
mod lists;
mod model;
mod probe;
mod report;
mod resume;
mod sweep;

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::thread::available_parallelism;
use std::time::Duration;

use candle_sage::{Error, Result};
use clap::{Parser, Subcommand};
use toml::Table;

use crate::checks::in_range;
use crate::config::several::{LINK, NETWORK, World};
use crate::config::{Config, of_attention};
use crate::data::{Batches, Dataset, known_tokenizer};
use crate::lock::Lock;
use crate::quantity::Quantity;
use crate::ranks::{Mesh, Rank, Role, Words};
use crate::report::result_table;
use crate::runs::{Run, Status};
use crate::settings::{Attn, Preset, Settings};
use crate::sweep::{Limits, Spec};
use crate::train::{Begin, Overlap, Parallel, Stop, checkpoint};
use crate::{during, hf, partial, ranks, signals, tell, train};

use bench::Bench;
use data::{Data, write_corpus};
use lists::Typed;
use model::{Eval, Export, Sample};
use probe::Probe;
use report::Reporting;
use resume::Resumed;
use sweep::{Again, Sweeping};

/// What `--resume` takes in the place of a folder.
const AUTO: &str = "auto";

const EXAMPLES: &str = "Examples:
  sage-train                                         train on the built-in corpus, about a minute
  sage-train --compare fpa,sagebwd,none              what INT8 costs, what attention is worth
  sage-train --attn fpa,sagebwd --seed 1,2,3         lists are a sweep: every combination, with intervals
  sage-train sweep paper-mini --jobs 4               the paper's matrix, small; the same command goes on
  sage-train report runs/paper-mini                  losses, differences, intervals: one HTML file
  sage-train --data book.txt --preset mini           train on your text
  sage-train --preset 325m --data web.jsonl.zst --dry-run
                                                     what the paper's run would take
  sage-train --preset 325m --data web.jsonl.zst --tokens-per-step 256k --steps 300000
                                                     the paper's run with small batches
  sage-train data prepare tinystories --tokenizer gpt2 --to stories
  sage-train --preset 325m --data stories            text to shards, once; then train on them
  sage-train --resume runs/tiny-sagebwd-001          go on where a run was interrupted
  sage-train sample runs/tiny-sagebwd-001 'Once'     let the model write
  sage-train export runs/tiny-sagebwd-001 --to hf    for transformers
  sage-train probe runs/tiny-sagebwd-001             the error of INT8 on the tensors of a trained model
  sage-train bench attention 64:4096:1               how fast attention is here
  sage-train --config runs/tiny-sagebwd-001/config.toml --seed 1
                                                     a run again, with another seed";

/// Pre-train a small Llama with low-bit attention, and compare it with full precision.
///
/// Without arguments: a 1M-parameter model with INT8 SageBwd attention on the built-in corpus. Every
/// setting is also a key of a TOML file (--config); a flag wins over the file, the file over the
/// preset. Each run gets a folder of its own with its settings, metrics, loss plot, weights and log.
#[derive(Debug, Parser)]
#[command(
    name = "sage-train",
    version,
    after_help = EXAMPLES,
    args_conflicts_with_subcommands = true,
    args_override_self = true,
    allow_negative_numbers = true
)]
pub struct Cli {
    #[command(subcommand)]
    verb: Option<Verb>,
    #[command(flatten)]
    train: Train,
    /// Lists of values that were typed for a setting.
    #[arg(skip)]
    lists: Table,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Write the built-in corpus to standard output
    Corpus {
        /// Megabytes, at least
        #[arg(long, value_name = "MB", default_value_t = 8)]
        megabytes: u64,
        /// Seed; run N trains on corpus N
        #[arg(long, default_value_t = 0)]
        seed: u64,
    },
    /// Measure the speed of attention: full precision and SageBwd, forward and backward
    Bench {
        #[command(subcommand)]
        what: Bench,
    },
    /// Prepare data: text to shards of tokens, tokenizers
    Data {
        #[command(subcommand)]
        what: Data,
    },
    /// Let a trained model write
    Sample(Sample),
    /// Loss, perplexity and bits a byte of a trained model, or its score on HellaSwag
    Eval(Eval),
    /// Write a trained model as transformers loads it
    Export(Export),
    /// Measure the error of low-bit attention: on the tensors of a trained model, layer by layer, or on random ones
    Probe(Box<Probe>),
    /// Run many runs that differ in some settings: planned, skipped where finished, resumed where cut off
    Sweep(Box<Sweeping>),
    /// Compare runs: losses, differences with their intervals, speed, in one HTML file
    Report(Reporting),
}

#[derive(Debug, clap::Args)]
struct Train {
    /// Settings from a TOML file; flags win over it
    #[arg(long, value_name = "FILE", help_heading = "Run")]
    config: Option<PathBuf>,
    /// Go on with a run from its newest checkpoint, or from the one that is named; flags may change how long it goes and
    /// how it is watched, not what it is. `auto`, with --name: go on with that run, or begin it: the same command as often as
    /// a job is started
    #[arg(long, value_name = "RUN", help_heading = "Run", conflicts_with = "compare")]
    resume: Option<PathBuf>,
    /// Print what would run, and stop
    #[arg(long, help_heading = "Run")]
    dry_run: bool,
    #[command(flatten)]
    several: Several,
    /// Write the sequences that the run would be taught, in their order, as a shard of documents, and stop: another
    /// program can be taught the same
    #[arg(long, value_name = "FILE", help_heading = "Run", conflicts_with_all = ["resume", "compare", "dry_run"])]
    write_batches: Option<PathBuf>,
    /// Train once with each attention, and compare with fpa, or the first: `--attn` with a list, as any setting may have one
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
    settings: Settings,
}

/// What has to do with several GPUs: how a run goes, not what it is.
#[derive(Debug, clap::Args)]
struct Several {
    /// Train with so many GPUs of this machine (with --device cpu: processes), each in a process of its own; a step and its
    /// batches stay what they are. torchrun and srun start such processes too
    #[arg(long, value_name = "N", help_heading = "Several GPUs", conflicts_with_all = ["write_batches"])]
    gpus: Option<usize>,
    /// So many neighbouring GPUs have each sequence together: contexts that do not fit one
    #[arg(long, value_name = "C", help_heading = "Several GPUs", default_value_t = 1)]
    context_parallel: usize,
    /// When gradients travel between GPUs
    #[arg(long, value_enum, value_name = "WHEN", help_heading = "Several GPUs", default_value = "auto")]
    overlap: Overlap,
    /// Megabytes of gradient that travel at once, at least [default: 680, or 200 beside the backward]
    #[arg(long, value_name = "MB", help_heading = "Several GPUs")]
    piece_mb: Option<f64>,
    /// With --dry-run: plan for so many GPUs [default: those of --gpus]
    #[arg(
        long,
        value_name = "N",
        help_heading = "Several GPUs",
        requires = "dry_run",
        conflicts_with = "gpus"
    )]
    ranks: Option<usize>,
    /// With --dry-run: GPUs of a node
    #[arg(long, value_name = "G", help_heading = "Several GPUs", requires = "ranks", default_value_t = 8)]
    ranks_per_node: usize,
    /// With --dry-run: GB/s between GPUs of a node, each way
    #[arg(long, value_name = "GB/S", help_heading = "Several GPUs", requires = "dry_run", default_value_t = LINK / 1e9)]
    link_rate: f64,
    /// With --dry-run: GB/s between nodes, each way, of each GPU
    #[arg(long, value_name = "GB/S", help_heading = "Several GPUs", requires = "dry_run", default_value_t = NETWORK / 1e9)]
    network_rate: f64,
    /// With --dry-run: tokens a second of one GPU between updates [default: at 40 % of an H100's peak]
    #[arg(long, value_name = "TOKENS/S", help_heading = "Several GPUs", requires = "dry_run")]
    gpu_rate: Option<Quantity>,
    /// Begin again so often when a process was lost; takes --gpus and --resume auto
    #[arg(long, value_name = "K", help_heading = "Several GPUs", requires = "gpus", default_value_t = 0)]
    restarts: u32,
    /// A process that makes no progress for so long is given up, and the run with it
    #[arg(long, value_name = "SECONDS", help_heading = "Several GPUs", default_value_t = 120)]
    stall_timeout: u64,
}

impl Several {
    /// What a dry run plans for.
    fn world(&self) -> Result<World> {
        let shape = || Error::new("ranks do not divide into nodes");
        let (of, on_node) = match self.ranks {
            Some(ranks) => (in_range("ranks", ranks, 1, 1 << 20)?, self.ranks_per_node.min(ranks)),
            None => (self.gpus.unwrap_or(1), self.gpus.unwrap_or(1)),
        };
        if on_node == 0
            || !of.is_multiple_of(on_node)
            || !on_node.is_multiple_of(self.context_parallel.max(1))
        {
            return Err(shape()
                .got(format!(
                    "--ranks {of}, --ranks-per-node {on_node}, --context-parallel {}",
                    self.context_parallel
                ))
                .allowed("nodes of equally many ranks, which groups of --context-parallel divide")
                .hint("--ranks 64 --ranks-per-node 8"));
        }
        let rate = |name: &str, rate: f64| Ok::<_, Error>(1e9 * in_range(name, rate, 0.001, 1e6)?);
        let mesh = Mesh {
            replica: Rank { index: 0, of: of / on_node },
            context: self.context_parallel,
            ..Mesh::node(Rank { index: 0, of: on_node })
        };
        Ok(World {
            mesh,
            link: rate("link-rate", self.link_rate)?,
            network: rate("network-rate", self.network_rate)?,
            gpu: self
                .gpu_rate
                .map(|rate| in_range("gpu-rate", rate.0, 1, 1 << 40))
                .transpose()?
                .map(|n| n as f64),
        })
    }
}

impl Cli {
    /// What was typed. A list of values for a setting makes a sweep of it.
    pub fn typed() -> Self {
        let typed = Typed::new(std::env::args_os().collect());
        let parse = |words: &[OsString]| Self::try_parse_from(words);
        let read = || {
            let cli = parse(&typed.words)?;
            let lists = typed.tables(|words| parse(words).map(Self::into_settings))?;
            Ok::<_, clap::Error>(Self { lists, ..cli })
        };
        read().unwrap_or_else(|error| error.exit())
    }

    fn into_settings(self) -> Settings {
        match self.verb {
            Some(Verb::Sweep(sweep)) => sweep.settings,
            _ => self.train.settings,
        }
    }

    /// Does what was typed.
    ///
    /// # Errors
    /// Whatever goes wrong, ready to be printed.
    pub fn run(self) -> Result<()> {
        match self.verb {
            Some(Verb::Corpus { megabytes, seed }) => write_corpus(megabytes, seed),
            Some(Verb::Bench { what }) => what.run(),
            Some(Verb::Data { what }) => what.run(),
            Some(Verb::Sample(sample)) => sample.run(),
            Some(Verb::Eval(eval)) => eval.run(),
            Some(Verb::Export(export)) => export.run(),
            Some(Verb::Probe(probe)) => probe.run(),
            Some(Verb::Sweep(sweep)) => sweep.run(self.lists),
            Some(Verb::Report(report)) => report.run(),
            None => self.train.run(self.lists),
        }
    }
}

impl Train {
    fn run(self, mut lists: Table) -> Result<()> {
        if self.config.is_some() && self.resume.as_deref().is_some_and(|run| run != Path::new(AUTO)) {
            return Err(Error::new("a run that goes on has its own settings")
                .got("--config with --resume")
                .allowed("one of them; --config with --resume auto")
                .hint("flags may change how long the run goes and how it is watched"));
        }
        if self.several.restarts > 0 && self.resume.as_deref() != Some(Path::new(AUTO)) {
            return Err(Error::new("a run cannot begin again by itself")
                .got("--restarts without --resume auto")
                .allowed("--restarts K --resume auto --name NAME")
                .hint("--resume auto goes on from the newest checkpoint"));
        }
        let file = self.config.as_deref().map(Config::read_settings).transpose()?.unwrap_or_default();
        if let (Some(flag), Some(in_file)) = (self.settings.preset, file.preset)
            && flag != in_file
        {
            return Err(Error::new("the preset is given twice")
                .got(format!("{flag:?} as a flag, {in_file:?} in the file"))
                .allowed("one preset")
                .hint(
                    "a saved config.toml holds every setting of its preset: leave --preset or --config out",
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
        let role =
            if looks { Role::alone() } else { Role::take(self.several.gpus, self.several.restarts, stall)? };
        let (words, local) = as_rank(role);
        let ended = self.train(file, &words, local);
        // What all have agreed on ends all of them; an error of one is told to the others.
        match ended {
            Ok(()) => {
                words.leave(None);
                Ok(())
            }
            Err(stop @ (Stop::Diverged(_) | Stop::Interrupted(_))) => {
                words.leave(None);
                if !words.rank().is_first() {
                    // Rank 0 tells it.
                    ranks::end(signals::received().map_or(1, |signal| 128 + signal));
                }
                Err(stop.into())
            }
            Err(Stop::Failed(error)) => {
                words.leave(Some(&error));
                Err(error)
            }
        }
    }

    /// Trains, as one of the ranks that have met.
    fn train(self, file: Settings, words: &Words, local: Rank) -> std::result::Result<(), Stop> {
        let rank = words.rank();
        let typed = self.settings.clone();
        let (config, begin) = match self.resume.as_deref() {
            Some(path) if path == Path::new(AUTO) => again(self.settings, file, words)?,
            Some(path) => {
                let Resumed { config, found } = Resumed::open(path, self.settings, rank)?;
                (config, Begin::From(Box::new(found)))
            }
            None => (Config::resolve(settle(self.settings.over(file))?)?, Begin::New),
        };
        if !matches!(begin, Begin::From(_)) {
            check_typed(&typed, &config)?;
            if rank.is_first() {
                train::check(&config, &begin)?;
            }
        }
        if self.dry_run {
            if let Err(error) = train::check_machine(&config) {
                tell(&format!("warning: {error}"));
            }
            let world = self.several.world()?;
            let ranks = world.mesh.rank().of;
            train::check_parallel(&config, ranks, world.mesh.context)?;
            let of_ranks = if ranks > 1 { config.of_ranks(world) } else { String::new() };
            return Ok(print(&format!("{config}{of_ranks}"))?);
        }
        if let Some(path) = &self.write_batches {
            return Ok(write_batches(&config, path)?);
        }
        train::check_machine(&config)?;
        // Processes of one machine share its cores.
        let share =
            || (local.of > 1).then(|| available_parallelism().map_or(1, usize::from).div_ceil(local.of));
        if let Some(threads) = config.threads.or_else(share) {
            rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build_global()
                .map_err(during("cannot start threads"))?;
        }
        let Several { context_parallel: context, overlap, piece_mb, .. } = self.several;
        let piece = piece_mb.map(|mb| in_range("piece-mb", mb, 0.001, 1e6)).transpose()?;
        let piece = piece.map(|mb| (mb * 1e6 / 4.0) as usize);
        let outcome = train::run_as(&config, &begin, words, Parallel { local, context, overlap, piece })?;
        if rank.is_first() {
            print(&result_table(&outcome))?;
        }
        Ok(())
    }

    /// Lists of values: every combination of them, in a folder of their own.
    fn sweep(self, file: Settings, lists: &Table) -> Result<()> {
        for (flag, given) in [
            ("--resume", self.resume.is_some()),
            ("--write-batches", self.write_batches.is_some()),
            ("--gpus", self.several.gpus.is_some()),
        ] {
            if given {
                return Err(Error::new("a list of values is many runs")
                    .got(format!(
                        "{flag}, and a list for {}",
                        lists.keys().cloned().collect::<Vec<_>>().join(", ")
                    ))
                    .allowed("one value for each setting")
                    .hint("a sweep goes on when its command is given again with its --name"));
            }
        }
        let typed = Settings { name: None, ..self.settings.clone() };
        let (name, preset) = (self.settings.name.clone(), typed.preset.or(file.preset));
        let shared = Table::try_from(&file).map_err(during("cannot use the file's settings"))?;
        let spec = Spec { settings: shared, ..Spec::default() };
        let free = |config: &Config| match name {
            Some(name) => Ok(name),
            None => free_name(&config.out, preset.unwrap_or(Preset::Tiny)),
        };
        let sweep = sweep::plan(&spec, typed, lists, free)?;
        if self.dry_run {
            let text: Vec<String> =
                sweep.runs.iter().map(|run| format!("{}\n{}", run.name, run.config)).collect();
            return print(&text.join("\n"));
        }
        let name = sweep.folder.file_name().unwrap_or_default().to_string_lossy();
        let goes_on = format!("the same command with --name {name}");
        let again = Again { retries: goes_on.clone(), goes_on };
        sweep::carry_out(&spec, &sweep, &Limits { jobs: 1, retry: true, ..Limits::default() }, &again)
    }
}

/// The others, and which this is on its machine. A process that started ranks ends as they did: they have said why.
fn as_rank(role: Role) -> (Words, Rank) {
    match role {
        Role::Launcher(code) => std::process::exit(code),
        Role::Rank { words, local } => (words, local),
    }
}

/// `--resume auto`: from the newest checkpoint of the run that is named, or from its beginning.
fn again(typed: Settings, file: Settings, words: &Words) -> Result<(Config, Begin)> {
    let asked = Config::resolve(settle(typed.over(file))?)?;
    let Some(name) = &asked.name else {
        return Err(Error::new("--resume auto does not know which run")
            .got("no --name")
            .allowed("--resume auto --name NAME")
            .hint("a run that is there goes on, another begins: the same command for both"));
    };
    let run = asked.out.join(name);
    // Rank 0 looks for all, before anybody makes or removes something.
    let found = || match checkpoint::newest(&run) {
        Some(step) => format!("step {step}"),
        // Begun by this program, and ended before anything was saved.
        None if Lock::marks(&run) && !finished(&run) => "again".into(),
        None => "new".into(),
    };
    match words.from_first("what there is of the run", &found())?.as_str() {
        "new" => Ok((asked, Begin::New)),
        "again" => Ok((asked, Begin::Again)),
        _ => {
            let settings = Settings { name: None, out: None, ..asked.settings };
            let Resumed { config, found } = Resumed::open(&run, settings, words.rank())?;
            Ok((config, Begin::From(Box::new(found))))
        }
    }
}

/// Whether a run's folder says that all steps were done.
fn finished(run: &Path) -> bool {
    Run::read(run).is_ok_and(|run| run.ending.is_some_and(|ending| ending.status == Status::Finished))
}

/// Checks that what was typed has a part in the run.
fn check_typed(typed: &Settings, config: &Config) -> Result<()> {
    let table = Table::try_from(typed).unwrap_or_default();
    let own = config.attn.own_settings(config.model.scheme, config.model.sla2.as_ref());
    let idle = |key: &&String| {
        let of_another = !matches!(key.as_str(), "attn" | "eval-attn")
            && of_attention(key)
            && !own.iter().any(|(name, _)| name == key);
        of_another && !(config.model.sla2.is_some() && key.starts_with("sla2-"))
    };
    if let Some(key) = table.keys().find(idle) {
        let mut settings: Vec<&str> = own.iter().map(|(name, _)| *name).collect();
        settings.retain(|name| !name.starts_with("tile"));
        return Err(Error::new(format!("--{key} is no setting of this attention"))
            .got(format!("--{key} with --attn {}", config.attn))
            .allowed(if settings.is_empty() {
                "none: it has no settings".into()
            } else {
                settings.join(", ")
            })
            .hint("leave it out, or name the attention that has it: --attn"));
    }
    if typed.data.is_some() && typed.corpus_mb.is_some() {
        return Err(Error::new("the built-in corpus has no part in this run")
            .got("--corpus-mb with --data")
            .allowed("one of them")
            .hint("--corpus-mb is the size of the corpus that a run without --data reads"));
    }
    Ok(())
}

/// The next free number for the folder of a sweep.
fn free_name(out: &Path, preset: Preset) -> Result<String> {
    let preset = clap::ValueEnum::to_possible_value(&preset);
    let preset = preset.as_ref().map_or("", |value| value.get_name());
    let mut numbered = (1..10_000).map(|n| format!("{preset}-sweep-{n:03}"));
    numbered.find(|name| !out.join(name).exists()).ok_or_else(|| {
        Error::new("there is no number left for the sweep's folder")
            .got(out.display())
            .allowed("fewer than 10,000 sweeps")
            .hint("--out or --name names another folder")
    })
}

fn write_batches(config: &Config, path: &Path) -> Result<()> {
    partial::check_free(path, "file", "--write-batches")?;
    let data = Dataset::load(&config.data, &|line| tell(line))?;
    let cut = config.data.cut(&data.tokenizer);
    let sequences = config.steps * (config.accumulation * config.micro_batch) as u64;
    let written = Batches::new(&data.train, cut).write(sequences, &data.tokenizer, path);
    if written.is_err() {
        let _ = std::fs::remove_file(path);
    }
    written
}

/// Fills in what files say: the shape of a model to begin with, and the size of a vocabulary that exists.
fn settle(mut settings: Settings) -> Result<Settings> {
    if let Some(folder) = settings.init_from.clone() {
        settings = settings.over(hf::settings(&folder)?);
    }
    if settings.vocab_size.is_none()
        && let Some(tokenizer) = known_tokenizer(&settings)?
    {
        // Rows of the embedding in whole packs: GPUs take several times as long over odd ones.
        settings.vocab_size = Some(Quantity(tokenizer.vocab_size().next_multiple_of(64) as u64));
    }
    Ok(settings)
}

/// Prints to standard output; a closed pipe is not an error.
fn print(text: &str) -> Result<()> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Error::new("cannot write the result").got(error))
        }
        _ => Ok(()),
    }
}
