//! Whether shards are what their sidecars say, to the byte: found out beside the training, some of them at each start.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use candle_sage::{Error, Result};

use super::shard::{Compared, Shard};
use super::{Dataset, Tokens};
use crate::during;

/// Bytes that are read at a start, at least one shard: a reader of a second or two.
const MOST: u64 = 2 << 30;

/// How long the end of a run waits for what is left of it.
const PATIENCE: Duration = Duration::from_secs(10);

/// Shards that a thread is hashing, one after the other.
#[derive(Debug)]
pub struct Verification(Option<Receiver<Compared>>);

impl Verification {
    /// Begins with the shard that the clock picks: other starts verify others.
    ///
    /// # Errors
    /// When there can be no thread for it.
    pub fn start(data: &Dataset) -> Result<Self> {
        let sources = data.train.sources().chain(data.validation.sources());
        // A shard may be both trained and validated on.
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

    /// What was found so far: shards that could not be read. Training holds files of its own open, so these are no reason to stop.
    ///
    /// # Errors
    /// When a shard is not what its sidecar says.
    pub fn look(&self) -> Result<Vec<Error>> {
        sorted(self.0.iter().flat_map(Receiver::try_iter))
    }

    /// What is found in the end, if it comes soon.
    ///
    /// # Errors
    /// As [`Verification::look`].
    pub fn end(&self) -> Result<Vec<Error>> {
        let Some(receiver) = &self.0 else { return Ok(Vec::new()) };
        let until = Instant::now() + PATIENCE;
        let next = || receiver.recv_timeout(until.saturating_duration_since(Instant::now())).ok();
        sorted(std::iter::from_fn(next))
    }
}

/// The errors of files that could not be read, or that of one that is another.
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
