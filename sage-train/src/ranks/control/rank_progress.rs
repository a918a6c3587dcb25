//! The progress of a rank, as its heartbeats report it.

use std::time::{Duration, Instant};

/// Time without progress that is allowed during long work: tokenizing, reading and writing weights and checkpoints.
/// A disk or file system that hangs is detected only after this time.
const ASIDE: Duration = Duration::from_secs(6 * 3600);

/// The known progress of a rank.
#[derive(Debug, Clone)]
pub(super) struct RankProgress {
    /// When the rank's last heartbeat arrived.
    pub(super) heard: Instant,
    /// The current step, from 1; 0 before the first step.
    pub(super) step: u64,
    /// Number of the rank's progress reports: one for each batch of training or validation.
    pub(super) ticks: u64,
    /// The time of the last change of `step`, `ticks`, `doing` or `aside`.
    pub(super) since: Instant,
    pub(super) doing: String,
    /// Whether the current work may take long. If so, [`ASIDE`] limits the time without progress.
    pub(super) aside: bool,
    /// Whether the rank has left the run and sends no further messages.
    pub(super) left: bool,
}

impl RankProgress {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self {
            heard: now,
            step: 0,
            ticks: 0,
            since: now,
            doing: "starting".into(),
            aside: false,
            left: false,
        }
    }

    pub(super) fn record(&mut self, step: u64, ticks: u64, doing: String, aside: bool) {
        self.heard = Instant::now();
        if (step, ticks, &doing, aside) != (self.step, self.ticks, &self.doing, self.aside) {
            self.since = self.heard;
        }
        (self.step, self.ticks, self.doing, self.aside) = (step, ticks, doing, aside);
    }

    /// Whether the rank has made no progress for longer than allowed.
    pub(super) fn is_stalled(&self, limit: Duration) -> bool {
        self.since.elapsed() > if self.aside { ASIDE } else { limit }
    }

    /// The rank's activity and step, for messages.
    pub(super) fn place(&self) -> String {
        match self.step {
            0 => self.doing.clone(),
            _ if self.doing.starts_with("step ") => self.doing.clone(),
            step => format!("{} in step {step}", self.doing),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_has_its_step() {
        let mut progress = RankProgress::new();
        assert_eq!(progress.place(), "starting");
        progress.record(3, 0, "step 3 of 9".into(), false);
        assert_eq!(progress.place(), "step 3 of 9");
        progress.record(3, 0, "a checkpoint".into(), true);
        assert_eq!(progress.place(), "a checkpoint in step 3");
    }
}
