//! The verbs `data` and `corpus`.

use std::io::Write;
use std::path::PathBuf;

use candle_sage::Result;
use clap::Subcommand;

use super::print;
use crate::checks::in_range;
use crate::data::check::{Checked, check};
use crate::data::corpus::Corpus;
use crate::data::hub::recipes;
use crate::data::prepare::{Part, Plan, prepare, train_tokenizer};
use crate::data::recall::{self, Recall};
use crate::data::shard::Format;
use crate::data::{LEAST_ENTRIES, dropped_text};
use crate::partial;
use crate::quantity::{Quantity, counted, grouped};
use crate::{during, notify};

const INPUTS: &str = "Text: files, folders, patterns such as 'texts/*.txt', data sets on the Hugging Face Hub \
                      (hf:OWNER/NAME, hf:OWNER/NAME:PATTERN), or short names of data sets (tinystories, \
                      openwebtext, fineweb-edu)";

/// The subcommands of `data`.
#[derive(Debug, Subcommand)]
pub(super) enum Data {
    /// Tokenize text into shards. Training runs read them with little memory and do not tokenize again
    Prepare(Prepare),
    /// Train a byte-level BPE on text
    Tokenizer(TrainTokenizer),
    /// Check every shard of a folder: its hash must equal the one in its .bin.json file, and its token ids must be in
    /// the tokenizer's vocabulary
    Check {
        /// Folder of shards
        folder: PathBuf,
    },
    /// List the public data sets that have a short name, such as tinystories
    Recipes,
}

/// What to prepare.
#[derive(Debug, clap::Args)]
pub(super) struct Prepare {
    #[arg(value_name = "DATA", required = true, help = INPUTS)]
    inputs: Vec<String>,
    /// Folder to create: train_*.bin, val_*.bin, a .bin.json file for each, tokenizer.json and dataset.json
    #[arg(long, value_name = "DIR")]
    to: PathBuf,
    /// A tokenizer.json, its folder, or a model on the Hugging Face Hub that has one, e.g. gpt2 [default: a tokenizer
    /// trained on the text]
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<String>,
    /// With --tokenizer: the token that ends a document, e.g. '[SEP]' [default: the end-of-sequence token of
    /// tokenizer_config.json or config.json, or else a well-known end-of-text token of the vocabulary]
    #[arg(long, value_name = "TOKEN", requires = "tokenizer")]
    end_of_text: Option<String>,
    /// Vocabulary size of the tokenizer that is trained if --tokenizer is not given; 32k is 32,768
    #[arg(long, value_name = "N", default_value = "32k")]
    vocab_size: Quantity,
    /// Format of the shards [default: llmc-u16, or llmc-u32 for a vocabulary of more than 65,536 entries]
    #[arg(long, value_enum)]
    format: Option<Format>,
    /// Largest number of tokens in a shard
    #[arg(long, value_name = "N", default_value = "100_000_000")]
    shard_tokens: Quantity,
    /// Fraction of the documents kept for validation
    #[arg(long, value_name = "FRACTION", default_value_t = 0.005, conflicts_with = "val_data")]
    val_fraction: f64,
    /// Validation data, in the same forms as DATA. May be repeated. With it, no fraction of DATA is kept for validation
    #[arg(long, value_name = "VAL_DATA")]
    val_data: Vec<String>,
    /// Seed for the choice of validation documents
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Key of JSON lines (`a.b` is key b inside the object a), or column of CSV or parquet, that holds the text
    /// [default: `text`; for a data set with a short name, its text column]
    #[arg(long, value_name = "NAME")]
    text_field: Option<String>,
    /// Skip and count documents that cannot be read (invalid UTF-8 or JSON, no text). Without it, they are an error
    #[arg(long)]
    skip_bad: bool,
}

/// What to train on.
#[derive(Debug, clap::Args)]
pub(super) struct TrainTokenizer {
    #[arg(value_name = "DATA", required = true, help = INPUTS)]
    inputs: Vec<String>,
    /// File to create
    #[arg(long, value_name = "FILE")]
    to: PathBuf,
    /// Vocabulary size; 32k is 32,768
    #[arg(long, value_name = "N", default_value = "32k")]
    vocab_size: Quantity,
    /// Key of JSON lines (`a.b` is key b inside the object a), or column of CSV or parquet, that holds the text
    /// [default: `text`; for a data set with a short name, its text column]
    #[arg(long, value_name = "NAME")]
    text_field: Option<String>,
    /// Skip and count documents that cannot be read (invalid UTF-8 or JSON, no text). Without it, they are an error
    #[arg(long)]
    skip_bad: bool,
}

impl Data {
    pub(super) fn run(self) -> Result<()> {
        match self {
            Self::Prepare(arguments) => arguments.run(),
            Self::Tokenizer(arguments) => arguments.run(),
            Self::Check { folder } => {
                let Checked { shards, without_sidecar } = check(&folder)?;
                let bare = match without_sidecar {
                    0 => "each complete, with the hash that is in its .bin.json file".into(),
                    n => {
                        format!("each of the right length, {n} without a .bin.json file to compare with")
                    }
                };
                print(&format!("{}: {}, {bare}\n", folder.display(), counted(shards as u64, "shard")))
            }
            Self::Recipes => print(
                &recipes()
                    .map(|(name, recipe)| {
                        format!(
                            "{name}\n  {}\n  hf:{}:{}\n  {}; {}\n\n",
                            recipe.about, recipe.dataset, recipe.files, recipe.size, recipe.licence
                        )
                    })
                    .collect::<String>(),
            ),
        }
    }
}

fn vocab_size(entries: Quantity) -> Result<usize> {
    Ok(in_range("vocab-size", entries.0, LEAST_ENTRIES as u64, 1 << 24)? as usize)
}

impl Prepare {
    fn run(self) -> Result<()> {
        let plan = Plan {
            inputs: self.inputs,
            val_inputs: self.val_data,
            out: self.to,
            tokenizer: self.tokenizer,
            end_of_text: self.end_of_text,
            vocab_size: vocab_size(self.vocab_size)?,
            format: self.format,
            shard_tokens: in_range("shard-tokens", self.shard_tokens.0, 1024, u64::from(u32::MAX))?,
            val_fraction: in_range("val-fraction", self.val_fraction, 0.0, 0.9)?,
            seed: self.seed,
            text_field: self.text_field,
            skip_bad: self.skip_bad,
        };
        let started = std::time::Instant::now();
        let prepared = prepare(&plan)?;
        let seconds = started.elapsed().as_secs_f64();
        let row = |name: &str, part: &Part| {
            format!(
                "{name:<12} {:>15} {:>12} {:>9.1} {:>7}\n",
                grouped(part.tokens),
                grouped(part.documents),
                part.text_bytes as f64 / 1e6,
                part.shards.len()
            )
        };
        let bytes = prepared.train.text_bytes + prepared.validation.text_bytes;
        let skipped: u64 = prepared.files.iter().map(|file| file.skipped).sum();
        let of_files = prepared.files.iter().filter(|file| file.skipped > 0).count();
        let left_out = match skipped {
            0 => String::new(),
            n => format!(
                "{} of {} could not be read and were left out: see dataset.json\n",
                counted(n, "document"),
                counted(of_files as u64, "file")
            ),
        };
        let unknown = match prepared.unknown_tokens {
            0 => String::new(),
            n => format!("text that is not in the vocabulary: {}\n", counted(n, "token")),
        };
        // `token_bytes` is 0 if an earlier version of sage-train, which did not count it, tokenized the text.
        let token_bytes = prepared.train.token_bytes + prepared.validation.token_bytes;
        dropped_text(bytes, token_bytes)
            .filter(|_| token_bytes > 0)
            .iter()
            .for_each(|dropped| notify(dropped));
        print(&format!(
            "{:<12} {:>15} {:>12} {:>9} {:>7}\n{}{}{left_out}{unknown}\n\
             {} in {}, {} vocabulary entries, {seconds:.1} s, {:.1} MB/s\n\
             train on it: sage-train --data {}\n",
            "part",
            "tokens",
            "documents",
            "MB",
            "shards",
            row("training", &prepared.train),
            row("validation", &prepared.validation),
            plan.out.display(),
            prepared.format,
            grouped(prepared.vocab_size as u64),
            bytes as f64 / 1e6 / seconds,
            plan.out.display(),
        ))
    }
}

impl TrainTokenizer {
    fn run(self) -> Result<()> {
        partial::check_free(&self.to, "tokenizer", "--to")?;
        let entries = vocab_size(self.vocab_size)?;
        let tokenizer = train_tokenizer(&self.inputs, self.text_field.as_deref(), entries, self.skip_bad)?;
        partial::file(&self.to, |partial| tokenizer.save(partial))?;
        print(&format!("{}: {} entries\n", self.to.display(), grouped(tokenizer.vocab_size() as u64)))
    }
}

/// Smallest number of words of a `--recall` document.
const FEWEST_WORDS: usize = 50;

/// Checks the value of `--recall`: the number of words of a generated document for recall tests.
pub(super) fn recall_words(words: usize) -> Result<usize> {
    in_range("recall", words, FEWEST_WORDS, 1 << 20)
}

pub(super) fn write_corpus(megabytes: u64, seed: u64, recall: Option<usize>) -> Result<()> {
    let corpus = Corpus::new(seed);
    let recall = recall.map(recall_words).transpose()?.map(|words| Recall { words, seed });
    let mut out = std::io::stdout().lock();
    let (mut held, wanted) = (0, megabytes.saturating_mul(1_000_000));
    for number in 0.. {
        if held >= wanted {
            break;
        }
        let line = match recall {
            Some(recall) => serde_json::json!({ "text": recall::text(&recall.document(number)) }).to_string(),
            None => corpus.document(number),
        };
        held += line.len() as u64;
        match writeln!(out, "{line}") {
            // The reader has closed the pipe, as `head` does.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => return Ok(()),
            result => result.map_err(during("cannot write the corpus"))?,
        }
    }
    Ok(())
}
