//! Batches made ahead on a thread of their own, so that no step waits for them.

use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::Scope;

use super::{Batches, Sequences};

/// Micro-batches that are kept ready.
const AHEAD: usize = 4;

/// All micro-batches of a run in their order, from the first on.
#[derive(Debug)]
pub struct Feed(Receiver<Sequences>);

impl Feed {
    /// Starts the thread, which ends when the feed is dropped.
    pub fn start<'scope>(
        scope: &'scope Scope<'scope, '_>,
        mut batches: Batches<'scope>,
        micro_batch: usize,
    ) -> Self {
        let (sender, receiver) = sync_channel(AHEAD);
        scope.spawn(move || {
            for first in (0..).step_by(micro_batch) {
                if sender.send(batches.shuffled(first, micro_batch)).is_err() {
                    return;
                }
            }
        });
        Self(receiver)
    }

    /// The next one; `None` when the thread is gone.
    pub fn next(&self) -> Option<Sequences> {
        self.0.recv().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_come_in_order_and_the_thread_ends() {
        let tokens: Vec<u32> = (0..103).collect();
        std::thread::scope(|scope| {
            let feed = Feed::start(scope, Batches::new(&tokens, 10, 4), 3);
            let mut batches = Batches::new(&tokens, 10, 4);
            for n in 0..20 {
                assert_eq!(feed.next(), Some(batches.shuffled(3 * n, 3)));
            }
        });
    }
}
