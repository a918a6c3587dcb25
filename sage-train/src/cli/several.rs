//! The flags for training on several GPUs.

use candle_sage::{Error, Result};

use crate::checks::in_range;
use crate::config::several::{Cluster, LINK, NETWORK};
use crate::notify;
use crate::quantity::Quantity;
use crate::ranks::{ControlChannel, CopyEngines, Mesh, Rank, Role};
use crate::train::{Overlap, Parallel};

/// How a run is divided among several GPUs. The division changes results only through the order of sums.
#[derive(Debug, clap::Args)]
pub(super) struct SeveralGpus {
    /// Number of GPUs of this machine to train on, with one process each (with --device cpu: number of processes). The
    /// sequences of a step do not depend on this number. Instead of --gpus, torchrun or srun can start the processes
    /// [default: 1]
    #[arg(long, value_name = "N", help_heading = "Several GPUs", conflicts_with_all = ["write_batches"])]
    pub(super) gpus: Option<usize>,
    /// Number of GPUs of a node that share each sequence (Ulysses context parallelism)
    #[arg(long, value_name = "C", help_heading = "Several GPUs", default_value_t = 1)]
    pub(super) context_parallel: usize,
    /// When gradients are exchanged between GPUs
    #[arg(long, value_enum, value_name = "WHEN", help_heading = "Several GPUs", default_value = "auto")]
    pub(super) overlap: Overlap,
    /// Whether the GPUs' copy engines (DMA units) transfer gradients and weights within a node, so that kernels can use
    /// all multiprocessors; no effect with one GPU per node
    #[arg(long, value_enum, value_name = "WHEN", help_heading = "Several GPUs", default_value = "auto")]
    pub(super) copy_engines: CopyEngines,
    /// Size of a transfer of gradients, in megabytes [default: 680, or 200 for transfers during the backward
    /// (--overlap)]
    #[arg(long, value_name = "MB", help_heading = "Several GPUs")]
    pub(super) piece_mb: Option<f64>,
    /// With --dry-run: number of GPUs to plan for [default: --gpus]
    #[arg(
        long,
        value_name = "N",
        help_heading = "Several GPUs",
        requires = "dry_run",
        conflicts_with = "gpus"
    )]
    ranks: Option<usize>,
    /// With --dry-run and --ranks: number of GPUs in each node
    #[arg(long, value_name = "G", help_heading = "Several GPUs", requires = "ranks", default_value_t = 8)]
    ranks_per_node: usize,
    /// With --dry-run: assumed bandwidth between a GPU and the other GPUs of its node, in GB/s per direction
    #[arg(long, value_name = "GB/S", help_heading = "Several GPUs", requires = "dry_run", default_value_t = LINK / 1e9)]
    link_rate: f64,
    /// With --dry-run: assumed bandwidth between a GPU and other nodes, in GB/s per direction
    #[arg(long, value_name = "GB/S", help_heading = "Several GPUs", requires = "dry_run", default_value_t = NETWORK / 1e9)]
    network_rate: f64,
    /// With --dry-run: assumed tokens per second of one GPU in forward and backward, without the optimizer's update
    /// [default: the rate at 40 % of an H100's peak]
    #[arg(long, value_name = "TOKENS/S", help_heading = "Several GPUs", requires = "dry_run")]
    gpu_rate: Option<Quantity>,
    /// How many times to restart the run after a process was killed or stalled (--stall-timeout); needs --gpus and
    /// --resume auto
    #[arg(long, value_name = "K", help_heading = "Several GPUs", requires = "gpus", default_value_t = 0)]
    pub(super) restarts: u32,
    /// Seconds without progress after which a process counts as stalled. The run then ends, or restarts (--restarts)
    #[arg(long, value_name = "SECONDS", help_heading = "Several GPUs", default_value_t = 120)]
    pub(super) stall_timeout: u64,
}

impl SeveralGpus {
    /// How the ranks share a step. `local` is this rank among the ranks of its machine.
    pub(super) fn parallel(&self, local: Rank) -> Result<Parallel> {
        let piece = self.piece_mb.map(|mb| in_range("piece-mb", mb, 0.001, 1e6)).transpose()?;
        let piece = piece.map(|mb| (mb * 1e6 / 4.0) as usize);
        let (context, overlap, engines) = (self.context_parallel, self.overlap, self.copy_engines);
        Ok(Parallel { local, context, overlap, piece, engines })
    }

    /// Warns of flags that have no effect because the run has one process. They are not an error, so that one command
    /// line works for any number of GPUs.
    pub(super) fn warn_of_idle(&self) {
        let given = [
            ("overlap", self.overlap != Overlap::Auto),
            ("copy-engines", self.copy_engines != CopyEngines::Auto),
            ("piece-mb", self.piece_mb.is_some()),
        ];
        for (flag, _) in given.into_iter().filter(|(_, given)| *given) {
            notify(&format!(
                "warning: --{flag} has no effect with one process: there are no gradients to exchange"
            ));
        }
    }

    /// Whether a dry run plans for machines other than this one.
    pub(super) fn is_hypothetical(&self) -> bool {
        self.ranks.is_some()
    }

    /// The cluster that a dry run plans for. Its ranks are GPUs, or processes on a CPU. `tokens`: tokens of a step on
    /// all ranks together. The plan uses the GPUs' copy engines, unless `--copy-engines` disables them.
    pub(super) fn world(&self, on_gpus: bool, tokens: u64) -> Result<Cluster> {
        let (of, on_node) = match self.ranks {
            Some(ranks) => (in_range("ranks", ranks, 1, 1 << 20)?, self.ranks_per_node.min(ranks)),
            None => {
                let gpus = in_range("gpus", self.gpus.unwrap_or(1), 1, 1024)?;
                (gpus, gpus)
            }
        };
        let equal_nodes = on_node != 0 && of.is_multiple_of(on_node);
        if !equal_nodes || !on_node.is_multiple_of(self.context_parallel.max(1)) {
            if self.ranks.is_none() {
                return Err(Error::new("the GPUs cannot be divided into groups of --context-parallel")
                    .got(format!("--gpus {of} --context-parallel {}", self.context_parallel))
                    .allowed("a --context-parallel that divides --gpus")
                    .hint("--gpus 4 --context-parallel 2"));
            }
            let what = match equal_nodes {
                true => "the ranks of a node cannot be divided into groups of --context-parallel",
                false => "the ranks cannot be divided into equal nodes",
            };
            return Err(Error::new(what)
                .got(format!(
                    "--ranks {of}, --ranks-per-node {on_node}, --context-parallel {}",
                    self.context_parallel
                ))
                .allowed("nodes with equal numbers of ranks, divisible into groups of --context-parallel")
                .hint("--ranks 64 --ranks-per-node 8"));
        }
        let rate = |name: &str, rate: f64| Ok::<_, Error>(1e9 * in_range(name, rate, 0.001, 1e6)?);
        let mesh = Mesh {
            replica: Rank { index: 0, of: of / on_node },
            context: self.context_parallel,
            engines: on_gpus && on_node > 1 && self.copy_engines != CopyEngines::Off,
            ..Mesh::node(Rank { index: 0, of: on_node })
        };
        let mesh = self.parallel(Rank::ALONE)?.plan(mesh, tokens);
        Ok(Cluster {
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

/// The connection to the other ranks, and the local rank (the rank within this machine). A launcher exits here with the
/// exit code of its ranks. It prints no message, because the ranks have printed their messages.
pub(super) fn as_rank(role: Role) -> (ControlChannel, Rank) {
    match role {
        Role::Launcher(code) => std::process::exit(code),
        Role::Rank { channel, local } => (channel, local),
    }
}
