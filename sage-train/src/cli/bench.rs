//! The verb `bench`: measures speed.

use std::path::PathBuf;
use std::time::Duration;

use candle_sage::Result;
use clap::Subcommand;

use super::print;
use super::several::as_rank;
use crate::bench::{self, Row, links, sla2};
use crate::checks::in_range;
use crate::config::Config;
use crate::device::DeviceKind;
use crate::notify;
use crate::ranks::{ControlChannel, CopyEngines, Mesh, Rank, Ranks, Role, STALL, World};
use crate::runs::{check_output, write_output};
use crate::settings::{Preset, SchemeSetting, Settings};

/// What can be measured.
#[derive(Debug, Subcommand)]
pub(super) enum Bench {
    /// Measure the time of attention on random inputs, for a list of shapes
    Attention(BenchAttention),
    /// Measure the time of SLA2 and of dense attention, each unquantized (fpa) and in INT8 (sagebwd)
    Sla2(BenchSla2),
    /// Measure the bandwidth between GPUs, and the time of an optimizer step that exchanges gradients
    Links(BenchLinks),
}

impl Bench {
    pub(super) fn run(&self) -> Result<()> {
        match self {
            Self::Attention(attention) => attention.run(),
            Self::Sla2(sla2) => sla2.run(),
            Self::Links(links) => links.run(),
        }
    }
}

/// Pauses of the GPU between measurements.
#[derive(Debug, clap::Args)]
struct Pauses {
    /// Pause before each series of timed calls. A GPU under load is up to 20 % slower than in short bursts, so compare
    /// only times with the same --rest and --repeats. --rest 1 measures short bursts; --rest 0 with many --repeats
    /// measures the speed during training
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0)]
    rest: f64,
}

impl Pauses {
    fn duration(&self) -> Result<Duration> {
        Ok(Duration::from_secs_f64(in_range("rest", self.rest, 0.0, 3600.0)?))
    }
}

/// What to measure. Each result is the median time of several calls. Consecutive calls have different inputs. On a GPU,
/// times are measured with CUDA events. Times include quantization and smoothing.
#[derive(Debug, clap::Args)]
pub(super) struct BenchAttention {
    /// Shapes, such as `64:4096:1`. D: head_dim, or `192/128` for 192 in queries and keys and 128 in values. N: tokens.
    /// CAUSAL: 1 with a causal mask, 0 without. WINDOW: width of a sliding window, in tokens. On a GPU, a head_dim
    /// above 128 is supported only by `fpa` (compute capability 8.0, 9.0, 10.x) and `sagebwd:products=scores` (9.0)
    /// [default: causal, D 64 and 128, N 1024; on a GPU also N 8192 and 16384]
    #[arg(value_name = "D:N:CAUSAL[:WINDOW]")]
    rows: Vec<Row>,
    /// Schemes to measure, separated by semicolons. `:KEY=VALUE` changes a scheme's setting (`sage-train --help`,
    /// section Attention). Example: "fpa;sagebwd:smoothing=kv" [default: every scheme with default settings, and
    /// sagebwd with four other sets of settings; on a GPU, for a head_dim above 128: fpa and one set of sagebwd]
    #[arg(long, value_name = "SCHEME;..", value_delimiter = ';')]
    schemes: Vec<SchemeSetting>,
    /// Where to measure [default: cuda if this build has it]
    #[arg(long, value_enum)]
    device: Option<DeviceKind>,
    /// Tokens of a batch; a sequence with more tokens is a batch by itself [default: 16384; on the CPU one sequence]
    #[arg(long, value_name = "N")]
    total_tokens: Option<usize>,
    /// Channels of all heads together. The number of heads is width / head_dim
    #[arg(long, value_name = "N", default_value_t = 2048)]
    width: usize,
    /// Number of timed calls of the forward, and of forward + backward [default: 30; on the CPU 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    repeats: Option<u16>,
    /// Soft cap of the logits: each logit x becomes CAP * tanh(x / CAP). In Gemma 2, CAP is 50. Supported by `fpa`,
    /// `attn-qat` and `sagebwd:smoothing=none:products=scores` [default: no cap]
    #[arg(long, value_name = "CAP", default_value_t = 0.0, hide_default_value = true)]
    softcap: f64,
    /// ALiBi: from each logit, subtract a multiple of the distance between query and key
    #[arg(long)]
    alibi: bool,
    /// Add an attention sink to each head
    #[arg(long)]
    sinks: bool,
    #[command(flatten)]
    rest: Pauses,
    /// Also write the results as CSV
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
}

impl BenchAttention {
    fn run(&self) -> Result<()> {
        let rest = self.rest.duration()?;
        let device = self.device.unwrap_or_default().open(Rank::ALONE)?;
        let (repeats, total_tokens) = if device.is_cpu() { (3, 1) } else { (30, 16384) };
        let plan = bench::Plan {
            rows: if self.rows.is_empty() { bench::usual_rows(&device) } else { self.rows.clone() },
            schemes: self.schemes.iter().map(|SchemeSetting(scheme)| *scheme).collect(),
            device,
            total_tokens: self.total_tokens.unwrap_or(total_tokens),
            width: self.width,
            repeats: usize::from(self.repeats.unwrap_or(repeats)),
            rest,
            softcap: self.softcap,
            alibi: self.alibi,
            sinks: self.sinks,
        };
        self.csv.as_deref().map_or(Ok(()), |path| check_output(path, "csv"))?;
        print(&bench::table_head(&plan))?;
        let mut all = Vec::new();
        for &row in &plan.rows {
            bench::measure(&plan, row, &mut |measured| {
                print(&bench::table_line(&measured))?;
                all.push(measured);
                Ok(())
            })?;
        }
        match &self.csv {
            Some(path) => write_output(path, "csv", &bench::csv(&plan, &all)),
            None => Ok(()),
        }
    }
}

/// What to measure. Each result is the median time of several calls. Consecutive calls have different inputs. On a GPU,
/// times are measured with CUDA events. Times include quantization; SLA2's also include the router and the block lists.
#[derive(Debug, clap::Args)]
pub(super) struct BenchSla2 {
    /// Shapes, such as `128:16384:90%`. D: head_dim. N: tokens. SPARSITY: fraction of the causal (query, key) pairs
    /// outside the selected blocks [default: 128:4096:85%, 128:16384:90%, 128:32768:95% and 128:131072:95%]
    #[arg(value_name = "D:N:SPARSITY")]
    rows: Vec<sla2::Row>,
    /// Where to measure [default: cuda if this build has it]
    #[arg(long, value_enum)]
    device: Option<DeviceKind>,
    /// Tokens of a batch; a sequence with more tokens is a batch by itself
    #[arg(long, value_name = "N", default_value_t = 32768)]
    total_tokens: usize,
    /// Channels of all heads together. The number of heads is width / head_dim
    #[arg(long, value_name = "N", default_value_t = 1024)]
    width: usize,
    /// Number of timed calls for each reported time
    #[arg(long, value_name = "N", default_value_t = 15, value_parser = clap::value_parser!(u16).range(1..))]
    repeats: u16,
    #[command(flatten)]
    rest: Pauses,
}

impl BenchSla2 {
    fn run(&self) -> Result<()> {
        let rest = self.rest.duration()?;
        let plan = bench::Plan {
            device: self.device.unwrap_or_default().open(Rank::ALONE)?,
            rows: Vec::new(),
            schemes: Vec::new(),
            total_tokens: self.total_tokens,
            width: self.width,
            repeats: usize::from(self.repeats),
            rest,
            softcap: 0.0,
            alibi: false,
            sinks: false,
        };
        let rows = if self.rows.is_empty() { sla2::usual_rows() } else { self.rows.clone() };
        // The table's head is printed together with the first row, so that no error appears below an empty table.
        let mut head = Some(sla2::table_head(&plan));
        for row in rows {
            for measured in sla2::measure(&plan, row)? {
                head.take().map_or(Ok(()), |head| print(&head))?;
                print(&sla2::table_line(&measured))?;
            }
        }
        Ok(())
    }
}

/// What to measure. Reported times are medians of several calls. On a GPU, they are measured with CUDA events.
#[derive(Debug, clap::Args)]
pub(super) struct BenchLinks {
    /// Number of this machine's GPUs to use, if neither torchrun nor srun starts the processes [default: 2]
    #[arg(long, value_name = "N")]
    gpus: Option<usize>,
    /// Where to measure [default: cuda if this build has it]
    #[arg(long, value_enum)]
    device: Option<DeviceKind>,
    /// Preset of the model whose optimizer step is timed
    #[arg(long, value_enum, default_value = "325m")]
    preset: Preset,
    /// Whether the GPUs' copy engines (DMA units) transfer gradients and weights within a node
    #[arg(long, value_enum, value_name = "WHEN", default_value = "auto")]
    copy_engines: CopyEngines,
    /// Omit exchanges (all-to-all) of more than this size. The sizes are 4, 54.5, 206 and 1297 megabytes per GPU
    #[arg(long, value_name = "MB", default_value_t = 1300.0)]
    most: f64,
    /// Number of timed calls for each reported time
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..))]
    repeats: u16,
}

impl BenchLinks {
    fn run(&self) -> Result<()> {
        let gpus = if World::from_environment()?.is_some() { self.gpus } else { self.gpus.or(Some(2)) };
        let (words, local) = as_rank(Role::take(gpus, 0, STALL)?);
        let measured = self.measure(&words, local);
        words.leave(measured.as_ref().err());
        let measured = measured?;
        if words.rank().is_first() { print(&links::table(&measured)) } else { Ok(()) }
    }

    fn measure(&self, words: &ControlChannel, local: Rank) -> Result<links::Links> {
        words.agree("command", &format!("bench links, copy engines {:?}", self.copy_engines))?;
        let place = self.device.unwrap_or_default();
        let settings = Settings::with(|s| {
            s.run.preset = Some(self.preset);
            s.run.device = Some(place);
        });
        let config = Config::resolve(settings)?;
        let device = place.open(local)?;
        let mesh = Mesh::agree(words, local, 1)?;
        let ranks = Ranks::connect(words.clone(), mesh, self.copy_engines, &device)?;
        let repeats = usize::from(self.repeats);
        let say = |text: &str| {
            if words.rank().is_first() {
                notify(text);
            }
        };
        words.while_peers_wait("the links", || {
            links::measure(&config, &ranks, &device, repeats, self.most, &say)
        })
    }
}
