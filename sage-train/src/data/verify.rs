//! Whether shards are what their sidecars say, to the byte: found out beside the training, some of them at each start.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use candle_sage::Result;

use super::shard::Shard;
use super::{Dataset, Tokens};
use crate::during;

/// Bytes that are read at a start, at least one shard: a reader of a second or two.
const MOST: u64 = 2 << 30;

/// How long the end of a run waits for what is left of it.
const PATIENCE: Duration = Duration::from_secs(10);

/// Shards on their way through a hash.
#[derive(Debug)]
pub struct Verification(Option<Receiver<Result<()>>>);

impl Verification {
    /// Begins with another shard at each `turn`.
    ///
    /// # Errors
    /// When there can be no thread for it.
    pub fn start(data: &Dataset, turn: u64) -> Result<Self> {
        let sources = data.train.sources().chain(data.validation.sources());
        let mut shards: Vec<(PathBuf, String)> =
            sources.flat_map(Tokens::shards).filter_map(Shard::hashed).collect();
        // One may be both trained and validated on.
        shards.dedup();
        if shards.is_empty() {
            return Ok(Self(None));
        }
        let first = turn % shards.len() as u64;
        shards.rotate_left(first as usize);
        let (sender, receiver) = channel();
        let work = move || {
            let mut read = 0;
            for (path, hash) in shards {
                // Nobody listens to a run that has ended.
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

    /// What was found so far.
    ///
    /// # Errors
    /// When a shard is not what its sidecar says.
    pub fn look(&self) -> Result<()> {
        self.0.iter().flat_map(Receiver::try_iter).collect()
    }

    /// What is found in the end, if it comes soon.
    ///
    /// # Errors
    /// As [`Verification::look`].
    pub fn end(&self) -> Result<()> {
        let Some(receiver) = &self.0 else { return Ok(()) };
        let until = Instant::now() + PATIENCE;
        loop {
            match receiver.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(found) => found?,
                Err(RecvTimeoutError::Disconnected | RecvTimeoutError::Timeout) => return Ok(()),
            }
        }
    }
}
