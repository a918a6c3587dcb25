//! The settings of table `[data]`.

use clap::Args;
use serde::{Deserialize, Serialize};

use super::Switch;
use super::layer::layer;
use super::source::{SourceSetting, one_or_more};
use crate::quantity::Quantity;

/// Table `[data]`: training and validation data, tokenizer, and sequence length.
#[derive(Debug, Clone, Default, PartialEq, Args, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct DataSettings {
    /// Training data: .txt, .md, .jsonl, .ndjson, .json, .csv (each also .gz, .zst), .parquet, or .bin shards of
    /// tokens; a folder or a 'pattern*' of them. May be repeated: sources are mixed in proportion to their sizes, or to
    /// WEIGHT if it is given [default: the built-in corpus]
    #[arg(long = "data", value_name = "PATH[=WEIGHT]")]
    #[serde(rename = "data", deserialize_with = "one_or_more")]
    pub sources: Option<Vec<SourceSetting>>,
    /// Validation data, in the formats of --data [default: the validation shards of --data; if it has no such shards, a
    /// fraction of it (--val-fraction)]
    #[arg(long, value_name = "PATH[=WEIGHT]")]
    #[serde(deserialize_with = "one_or_more")]
    pub val_data: Option<Vec<SourceSetting>>,
    /// Key of JSON lines (`a.b` is key b inside the object a), or column of CSV or parquet, that holds the text
    /// [default: text]
    #[arg(long, value_name = "NAME")]
    pub text_field: Option<String>,
    /// A tokenizer.json, its folder, or a model on the Hugging Face Hub that has one, e.g. gpt2
    /// [default: the shards' tokenizer; for text, a tokenizer trained on the text]
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<String>,
    /// The tokenizer's token that ends a document, e.g. `[SEP]` [default: the end-of-sequence token of
    /// tokenizer_config.json or config.json, or else a well-known end-of-text token of the vocabulary]
    #[arg(long, value_name = "TOKEN")]
    pub end_of_text: Option<String>,
    /// Let each token attend only to tokens of its document [default: off]
    #[arg(long, value_enum)]
    pub document_mask: Option<Switch>,
    /// Size of the built-in corpus in megabytes [default: 8]
    #[arg(long, value_name = "MB")]
    pub corpus_mb: Option<u64>,
    /// Fraction of the data kept for validation, unless the data has validation shards or --val-data is given [default:
    /// 0.05]
    #[arg(long, value_name = "FRACTION")]
    pub val_fraction: Option<f64>,
    /// Vocabulary size of the model. Without --tokenizer and shards, the run trains a byte-level BPE of this size on
    /// its data. With one of them, the default is instead the tokenizer's size, rounded up to a multiple of 64
    #[arg(long, value_name = "N")]
    pub vocab_size: Option<Quantity>,
    /// Tokens in a sequence
    #[arg(long, value_name = "N")]
    pub context: Option<Quantity>,
}

layer! {
    DataSettings:
    sources [Resumable Path NotList],
    val_data [Resumable Path NotList],
    text_field [NotList],
    tokenizer [Path NotList],
    end_of_text [NotList],
    document_mask, corpus_mb, val_fraction, vocab_size, context
}
