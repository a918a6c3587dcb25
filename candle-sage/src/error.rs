//! The crate's error type: it says what is wrong, what the caller gave, what is allowed, and what to do about
//! it.

use std::fmt;

/// A request that the crate cannot fulfil.
///
/// It displays as up to four short lines: the problem, what was given, what is allowed, and a hint. A candle
/// error made from it displays the same text.
///
/// ```
/// use candle_sage::Error;
///
/// let error = Error::new("the batch is empty").got(0).allowed("1 or more").hint("read some text first");
/// assert_eq!(
///     error.to_string(),
///     "the batch is empty\n  got:     0\n  allowed: 1 or more\n  hint:    read some text first"
/// );
/// assert_eq!(candle_core::Error::from(error.clone()).to_string(), error.to_string());
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct Error {
    kind: ErrorKind,
    what: String,
    got: Option<String>,
    allowed: Option<String>,
    hint: Option<String>,
}

/// What kind of error an [`Error`] is.
///
/// ```
/// use candle_sage::{Error, ErrorKind};
///
/// assert_eq!(Error::new("a tile of 0").kind(), ErrorKind::Invalid);
/// assert_eq!(Error::unsupported("tiles of 32 on CUDA").kind(), ErrorKind::Unsupported);
/// assert_eq!(Error::new("no answer").with_kind(ErrorKind::Failed).kind(), ErrorKind::Failed);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An argument, a setting or the contents of a file are not what they must be.
    Invalid,
    /// What was asked for is well-formed, and this device or build cannot do it.
    Unsupported,
    /// The memory of the device is full.
    OutOfMemory,
    /// Something outside the program failed: a file, a connection, a device.
    Failed,
}

impl ErrorKind {
    /// The kind of an error that candle returned: of this crate's errors their own, [`ErrorKind::OutOfMemory`] if a GPU had no
    /// memory left, else [`ErrorKind::Failed`].
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_sage::{Attention, ErrorKind};
    ///
    /// // A head_dim of 4 is out of range.
    /// let x = Tensor::zeros((1, 3, 2, 4), DType::F32, &Device::Cpu)?;
    /// let error = Attention::default().apply(&x, &x, &x).unwrap_err();
    /// assert_eq!(ErrorKind::of(&error), ErrorKind::Invalid);
    /// assert_eq!(ErrorKind::of(&candle_core::Error::Msg("no such file".into())), ErrorKind::Failed);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn of(error: &candle_core::Error) -> Self {
        use candle_core::Error::{Context, WithBacktrace, WithPath};
        match error {
            Context { inner, .. } | WithBacktrace { inner, .. } | WithPath { inner, .. } => Self::of(inner),
            // An error of this crate, as `From` below hands it to candle.
            candle_core::Error::Io(error) => error
                .get_ref()
                .and_then(|error| error.downcast_ref::<Error>())
                .map_or(Self::Failed, Error::kind),
            #[cfg(feature = "cuda")]
            candle_core::Error::Cuda(error) if device_memory_is_full(&**error) => Self::OutOfMemory,
            _ => Self::Failed,
        }
    }
}

#[cfg(feature = "cuda")]
fn device_memory_is_full(error: &(dyn std::error::Error + 'static)) -> bool {
    use candle_core::cuda_backend::CudaError;
    use cudarc::driver::{DriverError, sys::CUresult};
    let driver = match error.downcast_ref::<CudaError>() {
        Some(CudaError::Cuda(driver)) => Some(driver),
        _ => error.downcast_ref::<DriverError>(),
    };
    driver.is_some_and(|error| error.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY)
}

/// The result of this crate's functions that do not return candle's `Result`.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error about `what`; the other methods add the details.
    pub fn new(what: impl Into<String>) -> Self {
        Self { kind: ErrorKind::Invalid, what: what.into(), got: None, allowed: None, hint: None }
    }

    /// Creates an error about something well-formed that this device or build cannot do:
    /// [`ErrorKind::Unsupported`].
    pub fn unsupported(what: impl Into<String>) -> Self {
        Self::new(what).with_kind(ErrorKind::Unsupported)
    }

    /// Sets what kind of error it is.
    #[must_use]
    pub fn with_kind(mut self, kind: ErrorKind) -> Self {
        self.kind = kind;
        self
    }

    /// What kind of error it is, for programs that act on it: the text is for people, and may change.
    pub fn kind(&self) -> ErrorKind {
        self.kind
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
        // Of candle's errors this one keeps the value, for `ErrorKind::of`, and adds neither text nor a backtrace: these are
        // mistakes to explain, not bugs to trace.
        candle_core::Error::Io(std::io::Error::other(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_kept_and_found_inside_other_errors() {
        assert_eq!(Error::new("a").got(1).hint("b").kind(), ErrorKind::Invalid);
        assert_eq!(Error::unsupported("a").allowed("b").kind(), ErrorKind::Unsupported);
        let own = candle_core::Error::from(Error::unsupported("a").hint("b"));
        assert_eq!(own.to_string(), "a\n  hint:    b");
        assert_eq!(ErrorKind::of(&own.context("c")), ErrorKind::Unsupported);
        let file = candle_core::Error::from(std::io::Error::from(std::io::ErrorKind::NotFound));
        assert_eq!(ErrorKind::of(&file), ErrorKind::Failed);
        let inner = candle_core::Error::Msg("a".into()).context("b");
        assert_eq!(ErrorKind::of(&inner), ErrorKind::Failed);
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn full_memory_of_a_gpu_is_known_by_its_code() {
        use cudarc::driver::{DriverError, sys::CUresult};
        let full = DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        let error = candle_core::Error::from(candle_core::cuda_backend::CudaError::Cuda(full));
        assert_eq!(ErrorKind::of(&error.context("a step")), ErrorKind::OutOfMemory);
    }
}
