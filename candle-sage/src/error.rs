//! The crate's error type: it says what is wrong, what the caller gave, what is allowed, and what to do about
//! it.

use std::fmt;

/// A request that the crate cannot fulfil.
///
/// It displays as up to four short lines: the problem, what was given, what is allowed, and a hint. A candle
/// error made from it displays the same text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct Error {
    what: String,
    got: Option<String>,
    allowed: Option<String>,
    hint: Option<String>,
}

/// The result of this crate's functions that do not return candle's `Result`.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error about `what`; the other methods add the details.
    pub fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), got: None, allowed: None, hint: None }
    }

    /// Adds what the caller gave.
    #[must_use]
    pub fn got(mut self, got: impl fmt::Display) -> Self {
        self.got = Some(got.to_string());
        self
    }

    /// Adds what would have been accepted.
    #[must_use]
    pub fn allowed(mut self, allowed: impl fmt::Display) -> Self {
        self.allowed = Some(allowed.to_string());
        self
    }

    /// Adds what to do next.
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
        // `Error::wrap` would append a backtrace, which does not help to explain a mistake in the arguments.
        candle_core::Error::Wrapped(Box::new(error))
    }
}
