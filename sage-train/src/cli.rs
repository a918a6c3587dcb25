//! What was typed.

use std::io::Write;
use std::path::PathBuf;

use candle_sage::{Error, Result};
use clap::{Parser, Subcommand};

use crate::bench::{self, Row};
use crate::config::Config;
use crate::data::corpus::Corpus;
use crate::device::Place;
use crate::metrics::Outcome;
use crate::probe::{Probed, probe};
use crate::report::{comparison, layer_errors, loss_plot};
use crate::settings::{Attn, GranularitySetting, Settings, SmoothingSetting};
use crate::{during, tell, train, writing};

const EXAMPLES: &str = "Examples:
  sage-train                                         train on the built-in corpus, about a minute
  sage-train --compare fpa,sagebwd,none              what INT8 costs, what attention is worth
  sage-train --data book.txt --preset mini           train on your text
  sage-train --preset 325m --data web.jsonl.zst --dry-run
                                                     what the paper's run would take
  sage-train --preset 325m --data web.jsonl.zst --tokens-per-step 256k --steps 300000
                                                     the paper's run with small batches
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
#[command(name = "sage-train", version, after_help = EXAMPLES, args_conflicts_with_subcommands = true, args_override_self = true)]
pub struct Cli {
    #[command(subcommand)]
    verb: Option<Verb>,
    #[command(flatten)]
    train: Train,
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
    /// Measure the error of SageBwd on the real tensors of a trained model, layer by layer
    Probe(Probe),
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// Attention on rows of shapes, with random inputs
    Attention(BenchAttention),
}

/// What to measure. Every time is the median of calls that take inputs in turn; on a GPU between CUDA events. All
/// quantization and smoothing is inside.
#[derive(Debug, clap::Args)]
struct BenchAttention {
    /// Shapes: head_dim, tokens, 1 if causal [default: D 64 and 128, N 1024, 8192, 16384, causal]
    #[arg(value_name = "D:N:CAUSAL")]
    rows: Vec<Row>,
    /// Where to measure [default: cuda if this build has it]
    #[arg(long, value_enum)]
    device: Option<Place>,
    /// Tokens of all sequences together; a longer sequence runs alone
    #[arg(long, value_name = "N", default_value_t = 16384)]
    total_tokens: usize,
    /// Width of all heads together: heads = width / D
    #[arg(long, value_name = "N", default_value_t = 2048)]
    width: usize,
    /// Timed calls of each kind
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u16).range(1..))]
    repeats: u16,
    /// Also write the results as comma-separated values
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
}

/// What to probe.
#[derive(Debug, clap::Args)]
struct Probe {
    /// Folder of a run that has weights: from its first validation on
    run: PathBuf,
    /// Validation sequences to look at
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..))]
    sequences: u16,
    /// Token means subtracted before quantizing [default: the run's]
    #[arg(long, value_enum)]
    smoothing: Option<SmoothingSetting>,
    /// Vectors that share a scale in the backward [default: the run's]
    #[arg(long)]
    granularity: Option<GranularitySetting>,
}

#[derive(Debug, clap::Args)]
struct Train {
    /// Settings from a TOML file; flags win over it
    #[arg(long, value_name = "FILE", help_heading = "Run")]
    config: Option<PathBuf>,
    /// Print what would run, and stop
    #[arg(long, help_heading = "Run")]
    dry_run: bool,
    /// Train once with each attention, and compare with the first
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

impl Cli {
    /// Does what was typed.
    ///
    /// # Errors
    /// Whatever goes wrong, ready to be printed.
    pub fn run(self) -> Result<()> {
        match self.verb {
            Some(Verb::Corpus { megabytes, seed }) => write_corpus(megabytes, seed),
            Some(Verb::Bench { what: Bench::Attention(bench) }) => bench.run(),
            Some(Verb::Probe(probe)) => probe.run(),
            None => self.train.run(),
        }
    }
}

impl Train {
    fn run(self) -> Result<()> {
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
        let config = Config::resolve(self.settings.over(file))?;
        let runs = match self.compare.as_slice() {
            [] => vec![config.clone()],
            attns => comparison_runs(&config, attns)?,
        };
        runs.iter().try_for_each(train::check)?;
        if self.dry_run {
            return print(&runs.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"));
        }
        if let Some(threads) = config.threads {
            rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build_global()
                .map_err(during("cannot start threads"))?;
        }
        let mut outcomes = Vec::new();
        let mut result = Ok(());
        for run in &runs {
            match train::run(run) {
                Ok(outcome) => outcomes.push(outcome),
                // What is finished is still reported.
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        if outcomes.len() > 1 {
            let path = plot_together(&outcomes)?;
            tell(&format!("plot: {}", path.display()));
        }
        if !outcomes.is_empty() {
            print(&comparison(&outcomes))?;
        }
        result
    }
}

/// All curves in one plot, beside the first run's folder.
fn plot_together(outcomes: &[Outcome]) -> Result<PathBuf> {
    let curves: Vec<_> = outcomes.iter().map(|run| (run.attn.to_string(), run.points.as_slice())).collect();
    let mut name = outcomes[0].folder.clone().into_os_string();
    name.push(".compare.svg");
    let path = PathBuf::from(name);
    let plot = loss_plot(&curves, Some(outcomes[0].unigram_entropy))?;
    std::fs::write(&path, plot).map_err(writing(&path))?;
    Ok(path)
}

/// A run for each attention; a given name gets the attention behind it.
fn comparison_runs(config: &Config, attns: &[Attn]) -> Result<Vec<Config>> {
    let mut runs: Vec<Config> = Vec::new();
    for &attn in attns {
        if runs.iter().any(|run| run.attn == attn) {
            return Err(Error::new("an attention is compared with itself")
                .got(format!("{attn} twice"))
                .allowed("each of fpa, sagebwd, none once")
                .hint("runs with another --seed say how much is chance"));
        }
        let name = config.name.as_ref().map(|name| format!("{name}-{attn}"));
        runs.push(Config::resolve(Settings { attn: Some(attn), name, ..config.settings.clone() })?);
    }
    Ok(runs)
}

impl BenchAttention {
    fn run(&self) -> Result<()> {
        let device = self.device.unwrap_or_default().open()?;
        let plan = bench::Plan {
            device,
            rows: if self.rows.is_empty() { bench::usual_rows() } else { self.rows.clone() },
            total_tokens: self.total_tokens,
            width: self.width,
            repeats: usize::from(self.repeats),
        };
        print(&bench::table_head(&plan))?;
        let mut all = Vec::new();
        for &row in &plan.rows {
            for measured in bench::measure(&plan, row)? {
                print(&bench::table_line(&measured))?;
                all.push(measured);
            }
        }
        match &self.csv {
            Some(path) => std::fs::write(path, bench::csv(&all)).map_err(writing(path)),
            None => Ok(()),
        }
    }
}

impl Probe {
    fn run(&self) -> Result<()> {
        let settings =
            Settings { smoothing: self.smoothing, granularity: self.granularity, ..Settings::default() };
        let Probed { scheme, sequences, layers } = probe(&self.run, usize::from(self.sequences), settings)?;
        let title = format!("{} against full precision, {sequences} sequences, {scheme}", self.run.display());
        print(&layer_errors(&title, &layers))
    }
}

fn write_corpus(megabytes: u64, seed: u64) -> Result<()> {
    let corpus = Corpus::new(seed);
    let mut out = std::io::stdout().lock();
    let (mut held, wanted) = (0, megabytes.saturating_mul(1_000_000));
    for number in 0.. {
        if held >= wanted {
            break;
        }
        let document = corpus.document(number);
        held += document.len() as u64;
        match writeln!(out, "{document}") {
            // The reader has seen enough.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => return Ok(()),
            result => result.map_err(during("cannot write the corpus"))?,
        }
    }
    Ok(())
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
