//! Prefetches batches on a thread, so that steps do not wait for them.

use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::Scope;

use candle_sage::{Error, Result};

use super::{Batches, Sequences};

/// Micro-batches in the queue.
const AHEAD: usize = 4;

/// The micro-batches of a run, in their order.
#[derive(Debug)]
pub struct Feed(Receiver<Result<Sequences>>);

impl Feed {
    /// Starts a thread. For each number in `firsts`, the thread makes a micro-batch of `micro_batch` consecutive
    /// sequences, beginning with the sequence that has this number. The thread ends when the feed is dropped.
    pub fn start<'scope>(
        scope: &'scope Scope<'scope, '_>,
        mut batches: Batches<'scope>,
        firsts: impl Iterator<Item = u64> + Send + 'scope,
        micro_batch: usize,
    ) -> Self {
        let (sender, receiver) = sync_channel(AHEAD);
        scope.spawn(move || {
            for first in firsts {
                if sender.send(batches.shuffled(first, micro_batch)).is_err() {
                    return;
                }
            }
        });
        Self(receiver)
    }

    /// The next micro-batch.
    ///
    /// # Errors
    /// When a shard cannot be read, an id is not in the vocabulary, or no micro-batch is left.
    pub fn next(&self) -> Result<Sequences> {
        self.0.recv().unwrap_or_else(|_| Err(Error::new("there are no more batches")))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Mixture, SequenceSplit, Tokens};
    use super::*;

    #[test]
    fn batches_come_in_order_from_anywhere_and_the_thread_ends() {
        let tokens = Mixture::new(vec![(Tokens::from((0..103).collect::<Vec<u32>>()), 1.0)]);
        let cut = SequenceSplit { context: 10, seed: 4, vocab: 2000, end_of_document: None };
        std::thread::scope(|scope| {
            for start in [0, 21] {
                let feed = Feed::start(scope, Batches::new(&tokens, cut), (start..).step_by(3), 3);
                let mut batches = Batches::new(&tokens, cut);
                for n in 0..20 {
                    assert_eq!(feed.next(), batches.shuffled(start + 3 * n, 3));
                }
            }
        });
    }
}
