//! The verb that measures speed.

use std::path::PathBuf;

use candle_sage::Result;
use clap::Subcommand;

use super::print;
use crate::bench::{self, Row};
use crate::device::Place;
use crate::writing;

/// What can be measured.
#[derive(Debug, Subcommand)]
pub(super) enum Bench {
    /// Attention on rows of shapes, with random inputs
    Attention(BenchAttention),
}

impl Bench {
    pub(super) fn run(&self) -> Result<()> {
        let Self::Attention(attention) = self;
        attention.run()
    }
}

/// What to measure. Every time is the median of calls that take inputs in turn; on a GPU between CUDA events. All
/// quantization and smoothing is inside.
#[derive(Debug, clap::Args)]
pub(super) struct BenchAttention {
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
