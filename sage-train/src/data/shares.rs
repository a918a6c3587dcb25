//! The share of each source in a run's batches.

use std::collections::BTreeSet;
use std::fmt;

use candle_sage::Result;

use super::shard::Shard;
use super::source::{self, Source};
use super::{DataConfig, Mixture, reader, weights};
use crate::quantity::grouped;

/// The share of each source in a run's batches, and how often each source is read. `Display` prints it as a table.
#[derive(Debug, Clone, PartialEq)]
pub struct Shares {
    rows: Vec<Row>,
    /// Whether the `tokens` of any row is an estimate.
    estimated: bool,
}

#[derive(Debug, Clone, PartialEq)]
struct Row {
    name: String,
    tokens: u64,
    share: f64,
    epochs: f64,
}

/// Approximate bytes of English text in a token, for vocabularies of 32,000 to 128,000 entries.
const BYTES_PER_TOKEN: u64 = 4;

impl Shares {
    /// The share of each source in the batches of a run of `run_tokens` tokens.
    pub fn of(config: &DataConfig, train: &Mixture, run_tokens: u64) -> Self {
        let tokens = train.sources().map(super::Tokens::len).collect();
        Self::new(config, tokens, train.shares(), run_tokens, false)
    }

    /// As [`Self::of`], but without reading any text: the number of tokens in a text file is estimated from the file's
    /// size. `None` for the built-in corpus.
    ///
    /// # Errors
    /// When a source cannot be found, or a shard cannot be read.
    pub fn planned(config: &DataConfig, run_tokens: u64) -> Result<Option<Self>> {
        let (mut tokens, mut estimated) = (Vec::new(), false);
        let (mut seen, mut held_out) = (BTreeSet::new(), BTreeSet::new());
        for source in &config.val_sources {
            source::check_once(source::find(&source.path, &config.out)?.files(), &mut held_out)?;
        }
        for source in &config.sources {
            let mut found = source::find(&source.path, &config.out)?;
            found.hold_out(&held_out, &source.path)?;
            source::check_once(found.files(), &mut seen)?;
            let (all, has_validation) = match found {
                Source::Text(files) => {
                    estimated = true;
                    let bytes: u64 = files.iter().map(|file| reader::estimated_bytes(file)).sum();
                    (bytes / BYTES_PER_TOKEN, false)
                }
                Source::Shards(files) => {
                    let lens = files.train.iter().map(|file| Shard::open(file).map(|shard| shard.len()));
                    (lens.sum::<Result<u64>>()?, !files.validation.is_empty())
                }
            };
            let kept =
                if has_validation || !config.val_sources.is_empty() { 0.0 } else { config.val_fraction };
            tokens.push(all - (all as f64 * kept) as u64);
        }
        if tokens.is_empty() {
            return Ok(None);
        }
        let by_size = || tokens.iter().map(|&n| n as f64).collect();
        let weights: Vec<f64> = weights(&config.sources).unwrap_or_else(by_size);
        let all: f64 = weights.iter().sum();
        let shares = weights.iter().map(|weight| weight / all.max(f64::MIN_POSITIVE)).collect();
        Ok(Some(Self::new(config, tokens, shares, run_tokens, estimated)))
    }

    fn new(
        config: &DataConfig,
        tokens: Vec<u64>,
        shares: Vec<f64>,
        run_tokens: u64,
        estimated: bool,
    ) -> Self {
        let name = |n: usize| {
            config.sources.get(n).map_or("built-in corpus".into(), |source| source.path.display().to_string())
        };
        let row = |(n, (tokens, share)): (usize, (u64, f64))| {
            let epochs = run_tokens as f64 * share / tokens.max(1) as f64;
            Row { name: name(n), tokens, share, epochs }
        };
        Self { rows: tokens.into_iter().zip(shares).enumerate().map(row).collect(), estimated }
    }
}

impl fmt::Display for Shares {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = if self.estimated { "~" } else { "" };
        let wide = self.rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0).max(6);
        write!(f, "{:<wide$} {:>16} {:>9} {:>8}", "source", "training tokens", "share", "epochs")?;
        for Row { name, tokens, share, epochs } in &self.rows {
            let (tokens, share) = (format!("{mark}{}", grouped(*tokens)), format!("{:.2} %", 100.0 * share));
            write!(f, "\n{name:<wide$} {tokens:>16} {share:>9} {:>8}", format!("{mark}{epochs:.2}"))?;
        }
        Ok(())
    }
}
