//! What was typed.

mod bench;
mod data;
mod model;
mod resume;

use std::io::Write;
use std::path::{Path, PathBuf};

use candle_sage::{Error, Result};
use clap::{Parser, Subcommand};

use crate::config::Config;
use crate::data::{Batches, Dataset, known_tokenizer};
use crate::metrics::Outcome;
use crate::quantity::Quantity;
use crate::report::{comparison, loss_plot};
use crate::settings::{Attn, Settings};
use crate::{during, hf, partial, tell, train, writing};

use bench::Bench;
use data::{Data, write_corpus};
use model::{Eval, Export, Probe, Sample};
use resume::Resumed;

const EXAMPLES: &str = "Examples:
  sage-train                                         train on the built-in corpus, about a minute
  sage-train --compare fpa,sagebwd,none              what INT8 costs, what attention is worth
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
    /// Measure the error of SageBwd on the real tensors of a trained model, layer by layer
    Probe(Probe),
}

#[derive(Debug, clap::Args)]
struct Train {
    /// Settings from a TOML file; flags win over it
    #[arg(long, value_name = "FILE", help_heading = "Run")]
    config: Option<PathBuf>,
    /// Go on with a run from its newest checkpoint, or from the one that is named; flags may change how long it goes and
    /// how it is watched, not what it is
    #[arg(long, value_name = "RUN", help_heading = "Run", conflicts_with_all = ["config", "compare"])]
    resume: Option<PathBuf>,
    /// Print what would run, and stop
    #[arg(long, help_heading = "Run")]
    dry_run: bool,
    /// Write the sequences that the run would be taught, in their order, as a shard of documents, and stop: another
    /// program can be taught the same
    #[arg(long, value_name = "FILE", help_heading = "Run", conflicts_with_all = ["resume", "compare", "dry_run"])]
    write_batches: Option<PathBuf>,
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
            Some(Verb::Bench { what }) => what.run(),
            Some(Verb::Data { what }) => what.run(),
            Some(Verb::Sample(sample)) => sample.run(),
            Some(Verb::Eval(eval)) => eval.run(),
            Some(Verb::Export(export)) => export.run(),
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
        let (config, found) = match &self.resume {
            Some(path) => {
                let Resumed { config, found } = Resumed::open(path, self.settings)?;
                (config, Some(found))
            }
            None => (Config::resolve(settle(self.settings.over(file))?)?, None),
        };
        let runs = match self.compare.as_slice() {
            [] => vec![config.clone()],
            attns => comparison_runs(&config, attns)?,
        };
        if found.is_none() {
            runs.iter().try_for_each(train::check)?;
        }
        if self.dry_run {
            return print(&runs.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"));
        }
        if let Some(path) = &self.write_batches {
            return write_batches(&config, path);
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
            match train::run(run, found.as_ref()) {
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

/// Prints to standard output; a closed pipe is not an error.
fn print(text: &str) -> Result<()> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Error::new("cannot write the result").got(error))
        }
        _ => Ok(()),
    }
}
