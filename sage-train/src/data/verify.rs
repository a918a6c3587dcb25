//! Verifies the hashes of shards on a thread during training. Each start of a run verifies only some of the shards.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use candle_sage::{Error, Result};

use super::shard::{Compared, Shard};
use super::{Dataset, Tokens};
use crate::during;

/// After this many bytes the thread reads no further shard. Reading 2 GiB takes one or two seconds.
const MOST: u64 = 2 << 30;

/// How long the end of a run waits for the verification.
const PATIENCE: Duration = Duration::from_secs(10);

/// A thread that hashes shards one after the other.
#[derive(Debug)]
pub struct Verification(Option<Receiver<Compared>>);

impl Verification {
    /// Starts the thread. The current time selects the first shard, because the thread may end before it has read all.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(data: &Dataset) -> Result<Self> {
        let sources = data.train.sources().chain(data.validation.sources());
        // A set, because a shard may be used for both training and validation.
        let shards: BTreeSet<(PathBuf, String)> =
            sources.flat_map(Tokens::shards).filter_map(Shard::hashed).collect();
        let mut shards = Vec::from_iter(shards);
        if shards.is_empty() {
            return Ok(Self(None));
        }
        let clock = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
        let first = clock % shards.len() as u128;
        shards.rotate_left(first as usize);
        let (sender, receiver) = channel();
        let work = move || {
            let mut read = 0;
            for (path, hash) in shards {
                // Sending fails when the run has ended.
                if read >= MOST || sender.send(Shard::compare(&path, &hash)).is_err() {
                    return;
                }
                read += path.metadata().map_or(0, |about| about.len());
            }
        };
        let started = std::thread::Builder::new().name("verify".into()).spawn(work);
        started.map_err(during("cannot verify the data"))?;
        Ok(Self(Some(receiver)))
    }

    /// The read errors that occurred since the last call. Callers only warn of them, because training itself reads the
    /// tokens that it needs.
    ///
    /// # Errors
    /// When a shard's hash differs from its sidecar's.
    pub fn new_problems(&self) -> Result<Vec<Error>> {
        sorted(self.0.iter().flat_map(Receiver::try_iter))
    }

    /// The errors that [`Verification::new_problems`] has not returned yet. Waits at most 10 s for the verification to
    /// end.
    ///
    /// # Errors
    /// As [`Verification::new_problems`].
    pub fn end(&self) -> Result<Vec<Error>> {
        let Some(receiver) = &self.0 else { return Ok(Vec::new()) };
        let until = Instant::now() + PATIENCE;
        let next = || receiver.recv_timeout(until.saturating_duration_since(Instant::now())).ok();
        sorted(std::iter::from_fn(next))
    }
}

/// Fails if the hash of a file differs. Otherwise returns the errors of files that could not be read.
fn sorted(all: impl Iterator<Item = Compared>) -> Result<Vec<Error>> {
    let mut unread = Vec::new();
    for compared in all {
        match compared {
            Compared::Same => {}
            Compared::Unread(error) => unread.push(error),
            Compared::Another(error) => return Err(error),
        }
    }
    Ok(unread)
}
