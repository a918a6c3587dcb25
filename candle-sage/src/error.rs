//! The one error type: what was wrong, what was given, what is allowed, and what to do about it.

use std::fmt;

/// Something the caller asked for that cannot be done.
///
/// Printed, it reads as four short lines: the problem, what was given, what is allowed, and a hint.
/// Through candle's `Result` it arrives as that text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct Error {
    what: String,
    got: Option<String>,
    allowed: Option<String>,
    hint: Option<String>,
}

/// The result of everything in this crate that does not go through candle.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error about `what`, to be completed by the other methods.
    pub fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), got: None, allowed: None, hint: None }
    }

    /// Says what the caller gave.
    #[must_use]
    pub fn got(mut self, got: impl fmt::Display) -> Self {
        self.got = Some(got.to_string());
        self
    }

    /// Says what would have been accepted.
    #[must_use]
    pub fn allowed(mut self, allowed: impl fmt::Display) -> Self {
        self.allowed = Some(allowed.to_string());
        self
    }

    /// Says what to do next.
    #[must_use]
    pub fn hint(mut self, hint: impl fmt::Display) -> Self {
        self.hint = Some(hint.to_string());
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        let lines = [("got", &self.got), ("allowed", &self.allowed), ("hint", &self.hint)];
        for (label, text) in lines {
            if let Some(text) = text {
                write!(f, "\n  {:<9}{text}", format!("{label}:"))?;
            }
        }
        Ok(())
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        // Not `Error::wrap`, which appends a backtrace: these are mistakes to explain, not bugs to trace.
        candle_core::Error::Wrapped(Box::new(error))
    }
}
