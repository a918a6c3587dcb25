//! Why a run did not come to its end.

use candle_sage::Error;

use crate::runs::Status;

/// What ended a run before its last step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stop {
    /// A loss or a gradient was not finite, or too many updates were skipped as spikes.
    Diverged(Error),
    /// It was asked to stop, and was saved.
    Interrupted(Error),
    /// Anything else.
    Failed(Error),
}

impl Stop {
    /// The same, as the folder of the run says it.
    pub fn status(&self) -> Status {
        match self {
            Self::Diverged(_) => Status::Diverged,
            Self::Interrupted(_) => Status::Interrupted,
            Self::Failed(_) => Status::Failed,
        }
    }
}

impl std::fmt::Display for Stop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (Self::Diverged(error) | Self::Interrupted(error) | Self::Failed(error)) = self;
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
        let (Stop::Diverged(error) | Stop::Interrupted(error) | Stop::Failed(error)) = stop;
        error
    }
}
