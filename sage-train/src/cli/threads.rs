//! The flag `--threads` of the verbs.

use candle_sage::Result;

use crate::checks::in_range;
use crate::config::MOST_THREADS;
use crate::during;

/// Threads of a verb.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(super) struct Threads {
    /// Number of CPU threads. It does not change computed values [default: all cores]
    #[arg(long, value_name = "N", global = true)]
    threads: Option<usize>,
}

impl Threads {
    /// Starts the thread pool, if a number of threads was given.
    pub(super) fn start(self) -> Result<()> {
        match self.threads {
            Some(threads) => start(in_range("threads", threads, 1, MOST_THREADS)?),
            None => Ok(()),
        }
    }
}

/// A verb's arguments with its threads.
#[derive(Debug, clap::Args)]
pub(super) struct OnThreads<A: clap::Args> {
    #[command(flatten)]
    arguments: A,
    #[command(flatten)]
    threads: Threads,
}

impl<A: clap::Args> OnThreads<A> {
    pub(super) fn start(self) -> Result<A> {
        self.threads.start()?;
        Ok(self.arguments)
    }
}

pub(super) fn start(threads: usize) -> Result<()> {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build_global()
        .map_err(during("cannot start threads"))
}
