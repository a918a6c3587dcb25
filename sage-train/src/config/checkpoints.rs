//! Resolves the checkpoint settings of table `[run]`.

use std::time::Duration;

use candle_sage::Result;

use crate::checks::{in_range, need};
use crate::settings::RunSettings;

/// Which checkpoints are written and kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckpointConfig {
    /// Steps between checkpoints; 0 saves only at the end.
    pub every: u64,
    /// The longest time between checkpoints.
    pub within: Option<Duration>,
    /// Number of newest checkpoints to keep.
    pub keep_last: usize,
    /// In addition to the newest, checkpoints at multiples of this number of steps are kept; 0 for none.
    pub keep_every: u64,
}

impl CheckpointConfig {
    /// Which checkpoints a run with these settings writes and keeps.
    ///
    /// # Errors
    /// When a setting is out of range.
    pub(super) fn resolve(s: &RunSettings) -> Result<Self> {
        let minutes = in_range("checkpoint-minutes", need(s.checkpoint_minutes), 0.0, 1e6)?;
        Ok(Self {
            every: s.checkpoint_every.unwrap_or(need(s.eval_every)).0,
            within: (minutes > 0.0).then(|| Duration::from_secs_f64(60.0 * minutes)),
            keep_last: in_range("keep-last", need(s.keep_last) as u64, 1, 1 << 20)? as usize,
            keep_every: need(s.keep_every).0,
        })
    }
}
