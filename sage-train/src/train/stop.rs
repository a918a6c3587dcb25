//! The errors that end a run.

use candle_sage::{Error, ErrorKind};

use crate::runs::Status;

/// The error that ended a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stop {
    /// A loss or a gradient was not finite, too many updates were skipped as spikes, or [`crate::runs::divergence`]
    /// found a divergence after the last step.
    Diverged(Error),
    /// A signal stopped the run. The run was saved, unless it was still in its first step.
    Interrupted(Error),
    /// All ranks found the same error in the settings before the run began.
    Mistaken(Error),
    /// Any other error.
    Failed(Error),
}

impl Stop {
    /// The status that the run's folder records.
    pub fn status(&self) -> Status {
        match self {
            Self::Diverged(_) => Status::Diverged,
            Self::Interrupted(_) => Status::Interrupted,
            Self::Mistaken(_) | Self::Failed(_) => Status::Failed,
        }
    }
}

impl std::fmt::Display for Stop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (Self::Diverged(error) | Self::Interrupted(error) | Self::Mistaken(error) | Self::Failed(error)) =
            self;
        error.fmt(f)
    }
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl From<Stop> for Error {
    fn from(stop: Stop) -> Self {
        match stop {
            // The user's settings were valid, so the error is not [`ErrorKind::Invalid`].
            Stop::Diverged(error) | Stop::Interrupted(error) => error.with_kind(ErrorKind::Failed),
            Stop::Mistaken(error) | Stop::Failed(error) => error,
        }
    }
}
