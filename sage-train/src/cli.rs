//! The command line.

mod attending;
mod bench;
mod data;
mod from_files;
mod help;
mod lists;
mod model;
mod probe;
mod report;
mod resume;
mod several;
mod sweep;
mod tasks;
mod threads;
mod train;
mod typed;

use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::path::Path;

use candle_sage::{Error, Result};
use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use toml::Table;

use crate::checks::in_range;
use crate::settings::Settings;
use crate::{notify, printable};

use bench::Bench;
use data::{Data, write_corpus};
use lists::ExpandedCommand;
use model::{Eval, Export, Sample};
use probe::Probe;
use report::ReportArguments;
use sweep::SweepArguments;
use threads::{OnThreads, Threads};
use train::Train;

const EXAMPLES: &str = "Examples:
  sage-train                                         train on the built-in corpus, a few minutes
  sage-train --compare fpa,sagebwd,none              compare INT8, unquantized and no attention
  sage-train --attn fpa,sagebwd --seed 1,2,3         a sweep: every combination of the lists
  sage-train sweep paper-mini --jobs 4               the SageBwd paper's runs on a small model
  sage-train report runs/paper-mini                  compare the sweep's runs in one HTML file
  sage-train --data book.txt --preset mini           train on your text
  sage-train --preset 325m --data web.jsonl.zst --dry-run
                                                     estimate time and memory of the paper's run
  sage-train --preset 325m --data web.jsonl.zst --tokens-per-step 256k --steps 300000
                                                     the paper's run with small batches
  sage-train data prepare tinystories --tokenizer gpt2 --to stories
                                                     tokenize a dataset into shards, once
  sage-train --preset 325m --data stories            train on the shards
  sage-train --resume runs/tiny-sagebwd-001          resume an interrupted run
  sage-train sample runs/tiny-sagebwd-001 'Once'     generate text
  sage-train export runs/tiny-sagebwd-001 --to hf    export for Hugging Face transformers
  sage-train probe runs/tiny-sagebwd-001             INT8 errors on the tensors of a trained model
  sage-train bench attention 64:4096:1               speed of attention on this machine
  sage-train --config runs/tiny-sagebwd-001/config.toml --seed 1
                                                     repeat a run with another seed";

/// Pre-train a small Llama with low-bit or unquantized attention, and compare the results.
///
/// Without arguments: a 1M-parameter model with INT8 SageBwd attention on the built-in corpus. Every
/// setting is also a key of a TOML file (--config); a flag overrides the file, and the file overrides the preset. Each
/// run gets a separate folder with its settings, metrics, loss plot, weights and log.
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
    /// Settings for which a list of values was typed.
    #[arg(skip)]
    lists: Table,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Generate the built-in corpus, and write it to standard output
    Corpus {
        /// Megabytes of text to write, rounded up to whole documents
        #[arg(long, value_name = "MB", default_value_t = 8)]
        megabytes: u64,
        /// Seed of the corpus
        #[arg(long, default_value_t = 0)]
        seed: u64,
        /// Instead of the corpus, write JSON lines for `sage-train --data`, with one document per line. A document has
        /// at least WORDS words, states numbers, and later asks for them. `eval --recall` measures how often a model
        /// recalls a number
        #[arg(long, value_name = "WORDS")]
        recall: Option<usize>,
    },
    /// Measure the speed of attention (dense and SLA2), and of links between GPUs
    Bench {
        #[command(subcommand)]
        what: Bench,
        #[command(flatten)]
        threads: Threads,
    },
    /// Prepare data: tokenize text into shards, train tokenizers
    Data {
        #[command(subcommand)]
        what: Data,
        #[command(flatten)]
        threads: Threads,
    },
    /// Generate text with a trained model
    #[command(allow_negative_numbers = true)]
    Sample(OnThreads<Sample>),
    /// Evaluate a trained model: loss, perplexity and bits per byte, or its score on a task such as HellaSwag
    Eval(OnThreads<Eval>),
    /// Export a trained model for Hugging Face transformers
    Export(OnThreads<Export>),
    /// Measure the error of low-bit attention: on the tensors of a trained model (layer by layer) or on random tensors
    Probe(Box<OnThreads<Probe>>),
    /// Run many runs that differ in some settings; finished runs are skipped and interrupted runs resumed
    ///
    /// Flags override the settings in the sweep's file. If a flag has a list of values, such as `--seed 1-5`, this list
    /// replaces the file's list.
    Sweep(Box<SweepArguments>),
    /// Compare runs in one HTML file: losses, differences with confidence intervals, speed
    #[command(allow_negative_numbers = true)]
    Report(ReportArguments),
}

/// The second of two existing paths after `--data`, which show that the shell expanded a pattern.
fn second_path(words: &[OsString]) -> Option<&Path> {
    let exists = |word: &OsString| Path::new(word).exists();
    let three = words.windows(3).find(|three| three[0] == "--data" && three[1..].iter().all(exists))?;
    Some(Path::new(&three[2]))
}

/// The exit code of a command that ended with an error: 2 if a flag, a setting or a file cannot be used (clap
/// returns 2 for an unknown flag too), and 1 for a failure during the work. After a signal, it is 128 plus the signal's
/// number, which is what shells report.
pub fn exit_code(error: &Error) -> u8 {
    match (crate::signals::received(), error.kind()) {
        (Some(signal), _) => 128 + signal,
        (None, candle_sage::ErrorKind::Invalid) => 2,
        (None, _) => 1,
    }
}

impl Cli {
    /// Parses the command line. A list of values for a setting turns the command into a sweep.
    pub fn typed() -> Self {
        let typed = ExpandedCommand::new(std::env::args_os().collect());
        let parse = |words: &[OsString]| Self::parse_words(words);
        let read = || {
            let cli = parse(&typed.words)?;
            let lists = typed.tables(|words| parse(words).map(Self::into_settings))?;
            Ok::<_, clap::Error>(Self { lists, ..cli })
        };
        read().unwrap_or_else(|error| {
            let verb = typed.words.get(1).and_then(|word| word.to_str());
            let known = if error.kind() == ErrorKind::InvalidSubcommand && verb == Some("train") {
                Error::new("there is no command `train`: training is the default")
                    .got("sage-train train")
                    .allowed("sage-train with settings")
                    .hint(
                        "leave `train` out: sage-train --data book.txt; sage-train --help lists all settings",
                    )
            } else if let Some(path) = second_path(&typed.words).filter(|_| error.use_stderr()) {
                Error::new("--data takes one path")
                    .got(format!("a second path: {}", path.display()))
                    .allowed("one --data PATH for each source")
                    .hint("quote a pattern, so that the shell does not expand it: --data 'texts/*.txt'")
            } else {
                error.exit()
            };
            notify(&format!("error: {known}"));
            std::process::exit(2)
        })
    }

    fn parse_words(words: &[OsString]) -> std::result::Result<Self, clap::Error> {
        let matches = help::with_defaults(Self::command()).try_get_matches_from(words)?;
        Self::from_arg_matches(&matches).map_err(|error| error.format(&mut Self::command()))
    }

    fn into_settings(self) -> Settings {
        match self.verb {
            Some(Verb::Sweep(sweep)) => sweep.settings,
            _ => self.train.settings,
        }
    }

    /// Executes the command.
    ///
    /// # Errors
    /// Every error of the command, ready to be printed.
    pub fn run(self) -> Result<()> {
        match self.verb {
            Some(Verb::Corpus { megabytes, seed, recall }) => {
                write_corpus(in_range("megabytes", megabytes, 1, 1 << 20)?, seed, recall)
            }
            Some(Verb::Bench { what, threads }) => threads.start().and_then(|()| what.run()),
            Some(Verb::Data { what, threads }) => threads.start().and_then(|()| what.run()),
            Some(Verb::Sample(sample)) => sample.start()?.run(),
            Some(Verb::Eval(eval)) => eval.start()?.run(),
            Some(Verb::Export(export)) => export.start()?.run(),
            Some(Verb::Probe(probe)) => probe.start()?.run(),
            Some(Verb::Sweep(sweep)) => sweep.run(self.lists),
            Some(Verb::Report(report)) => report.run(),
            None => self.train.run(self.lists),
        }
    }
}

/// Prints to standard output; a closed pipe is not an error. For a terminal, [`printable`] escapes characters that act
/// on the terminal; a file or a pipe gets the text unchanged.
fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let text = if out.is_terminal() { printable(text) } else { text.into() };
    match out.write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Error::failed("cannot write the result").got(error))
        }
        _ => Ok(()),
    }
}
