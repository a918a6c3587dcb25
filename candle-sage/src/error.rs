//! The crate's error type: the problem, what the caller passed, what is allowed, and a hint.

use std::fmt;
use std::sync::Arc;

/// The hint of an error that no call should be able to cause.
pub(crate) const REPORT: &str = "internal error: report it with the call's shapes and settings";

/// A request that the crate cannot carry out.
///
/// An error displays as up to four short lines: the problem, what was given, what is allowed, and a hint. Conversion
/// to candle's `candle_core::Error::Wrapped` does not change the text, and keeps the [`ErrorKind`]: see
/// [`ErrorKind::of`]. The alternate form, `{:#}`, names the kind first.
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
#[derive(Debug, Clone)]
pub struct Error(Box<Parts>);

/// The fields of an [`Error`], behind one pointer so that a `Result` is small.
#[derive(Debug, Clone)]
struct Parts {
    kind: ErrorKind,
    what: String,
    got: Option<String>,
    allowed: Option<String>,
    hint: Option<String>,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_ref().map(|source| &**source as _)
    }
}

/// Errors are equal if they have the same kind and text.
impl PartialEq for Error {
    fn eq(&self, other: &Self) -> bool {
        self.0.kind == other.0.kind && self.to_string() == other.to_string()
    }
}

impl Eq for Error {}

/// What kind of error an [`Error`] is.
///
/// ```
/// use candle_sage::{Error, ErrorKind};
///
/// assert_eq!(Error::new("a tile of 0").kind(), ErrorKind::Invalid);
/// assert_eq!(Error::shape("a key of another batch").kind(), ErrorKind::Shape);
/// assert_eq!(Error::unsupported("tiles of 32 on CUDA").kind(), ErrorKind::Unsupported);
/// assert_eq!(Error::new("no answer").with_kind(ErrorKind::Failed).kind(), ErrorKind::Failed);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An argument, a setting or the contents of a file are invalid.
    Invalid,
    /// Shapes of tensors do not match, or a dimension is out of range.
    Shape,
    /// The request is valid, but this device or build does not support it.
    Unsupported,
    /// The memory of the device is full.
    OutOfMemory,
    /// Something outside the program failed: a file, a connection, a device.
    Failed,
}

/// The text that `{:#}` prints before the kind of an [`Error`].
const MARK: &str = "candle_sage::Error, kind ";

impl ErrorKind {
    /// The kind of an error that candle returned. If `error` was converted from an [`Error`], this is the [`Error`]'s
    /// kind. Candle's errors about shapes are [`ErrorKind::Shape`]. When a GPU has no free memory, the kind is
    /// [`ErrorKind::OutOfMemory`]. Any other error is [`ErrorKind::Failed`].
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_sage::{Attention, ErrorKind};
    ///
    /// // A head_dim of 4 is out of range.
    /// let x = Tensor::zeros((1, 3, 2, 4), DType::F32, &Device::Cpu)?;
    /// let error = Attention::default().apply(&x, &x, &x).unwrap_err();
    /// assert_eq!(ErrorKind::of(&error), ErrorKind::Shape);
    /// assert_eq!(ErrorKind::of(&candle_core::Error::Msg("no such file".into())), ErrorKind::Failed);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn of(error: &candle_core::Error) -> Self {
        use candle_core::Error as Candle;
        match error {
            Candle::Context { inner, .. }
            | Candle::WithBacktrace { inner, .. }
            | Candle::WithPath { inner, .. } => Self::of(inner),
            // `context` of a `Result` wraps any error in this variant.
            Candle::WrappedContext { wrapped, .. } => {
                let own = wrapped.downcast_ref::<Error>().map(Error::kind);
                own.or_else(|| wrapped.downcast_ref::<Candle>().map(Self::of)).unwrap_or(Self::Failed)
            }
            // `From` below converts this crate's errors to this variant. Only their text remains: it contains the kind.
            Candle::Wrapped(error) => Self::read(&format!("{error:#}")),
            Candle::BroadcastIncompatibleShapes { .. }
            | Candle::DimOutOfRange { .. }
            | Candle::DuplicateDimIndex { .. }
            | Candle::EmptyTensor { .. }
            | Candle::NarrowInvalidArgs { .. }
            | Candle::OnlySingleDimension { .. }
            | Candle::ShapeMismatch { .. }
            | Candle::ShapeMismatchBinaryOp { .. }
            | Candle::ShapeMismatchCat { .. }
            | Candle::ShapeMismatchSplit { .. }
            | Candle::UnexpectedNumberOfDims { .. }
            | Candle::UnexpectedShape { .. } => Self::Shape,
            #[cfg(feature = "kernels")]
            Candle::Cuda(error) if device_memory_is_full(&**error) => Self::OutOfMemory,
            _ => Self::Failed,
        }
    }

    /// Reads the kind from `text`, an [`Error`] that was formatted with `{:#}`. Other texts have the kind
    /// [`ErrorKind::Failed`].
    fn read(text: &str) -> Self {
        let name = text.strip_prefix(MARK).and_then(|rest| rest.split(':').next());
        let all = [Self::Invalid, Self::Shape, Self::Unsupported, Self::OutOfMemory, Self::Failed];
        all.into_iter().find(|kind| name == Some(format!("{kind:?}").as_str())).unwrap_or(Self::Failed)
    }
}

#[cfg(feature = "kernels")]
fn device_memory_is_full(error: &(dyn std::error::Error + 'static)) -> bool {
    use cudarc::driver::{DriverError, sys::CUresult};
    let driver = error.downcast_ref::<DriverError>();
    #[cfg(feature = "cuda")]
    let driver = match error.downcast_ref::<candle_core::cuda_backend::CudaError>() {
        Some(candle_core::cuda_backend::CudaError::Cuda(driver)) => Some(driver),
        _ => driver,
    };
    driver.is_some_and(|error| error.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY)
}

/// The result of this crate's functions that do not return candle's `Result`.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Creates an error about an invalid argument, setting or file: [`ErrorKind::Invalid`]. Other methods add details.
    pub fn new(what: impl Into<String>) -> Self {
        Self(Box::new(Parts {
            kind: ErrorKind::Invalid,
            what: what.into(),
            got: None,
            allowed: None,
            hint: None,
            source: None,
        }))
    }

    /// Creates an error about a valid request that this device or build does not support: [`ErrorKind::Unsupported`].
    pub fn unsupported(what: impl Into<String>) -> Self {
        Self::new(what).with_kind(ErrorKind::Unsupported)
    }

    /// Creates an error about shapes that do not match, or a dimension out of range: [`ErrorKind::Shape`].
    pub fn shape(what: impl Into<String>) -> Self {
        Self::new(what).with_kind(ErrorKind::Shape)
    }

    /// Creates an error about a failure outside the program: [`ErrorKind::Failed`].
    pub fn failed(what: impl Into<String>) -> Self {
        Self::new(what).with_kind(ErrorKind::Failed)
    }

    /// Sets the kind of the error.
    #[must_use]
    pub fn with_kind(mut self, kind: ErrorKind) -> Self {
        self.0.kind = kind;
        self
    }

    /// The kind of the error. Programs should check the kind, because the text may change.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Adds what the caller passed.
    #[must_use]
    pub fn got(mut self, got: impl fmt::Display) -> Self {
        self.0.got = Some(got.to_string());
        self
    }

    /// Adds the cause of this error: the cause's text as `got`, the cause as [`source`](std::error::Error::source).
    ///
    /// ```
    /// use candle_sage::Error;
    ///
    /// let missing = std::fs::read("no such file").unwrap_err();
    /// let error = Error::failed("cannot read the weights").caused_by(missing);
    /// let source = std::error::Error::source(&error).expect("what caused it");
    /// assert!(source.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::NotFound));
    /// assert!(error.to_string().contains("got:"));
    /// ```
    #[must_use]
    pub fn caused_by(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        let source: Arc<dyn std::error::Error + Send + Sync> = source.into().into();
        self.0.got = Some(source.to_string());
        self.0.source = Some(source);
        self
    }

    /// Adds what would have been accepted.
    #[must_use]
    pub fn allowed(mut self, allowed: impl fmt::Display) -> Self {
        self.0.allowed = Some(allowed.to_string());
        self
    }

    /// Adds what to do next.
    #[must_use]
    pub fn hint(mut self, hint: impl fmt::Display) -> Self {
        self.0.hint = Some(hint.to_string());
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Parts { kind, what, got, allowed, hint, source: _ } = &*self.0;
        if f.alternate() {
            write!(f, "{MARK}{kind:?}: ")?;
        }
        f.write_str(what)?;
        let lines = [("got", got), ("allowed", allowed), ("hint", hint)];
        for (label, text) in lines {
            if let Some(text) = text {
                // `text` may be the message of another error, which can have several lines.
                write!(f, "\n  {:<9}{}", format!("{label}:"), text.replace('\n', "\n           "))?;
            }
        }
        Ok(())
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        // `Error::wrap` would add a backtrace, which only bugs need. These errors are not bugs of the crate.
        candle_core::Error::Wrapped(Box::new(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inner_message_is_indented() {
        let error = Error::failed("a").caused_by(Error::new("b").got(1).hint("c")).hint("d");
        let lines =
            ["a", "  got:     b", "             got:     1", "             hint:    c", "  hint:    d"];
        assert_eq!(error.to_string(), lines.join("\n"));
    }

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

    #[test]
    fn every_kind_crosses_candle_and_none_is_a_file_error() {
        let kinds = [
            ErrorKind::Invalid,
            ErrorKind::Shape,
            ErrorKind::Unsupported,
            ErrorKind::OutOfMemory,
            ErrorKind::Failed,
        ];
        for kind in kinds {
            let error = Error::new("a").got("b: c").with_kind(kind);
            let candle = candle_core::Error::from(error.clone());
            assert!(matches!(candle, candle_core::Error::Wrapped(_)));
            assert_eq!((candle.to_string(), ErrorKind::of(&candle)), (error.to_string(), kind));
            let own: Result<()> = Err(error);
            let wrapped = candle_core::Context::context(own, "d").unwrap_err();
            assert_eq!(ErrorKind::of(&wrapped), kind);
            let candle: candle_core::Result<()> = Err(candle);
            let wrapped = candle_core::Context::context(candle, "d").unwrap_err();
            assert_eq!(ErrorKind::of(&wrapped), kind);
        }
        // Another crate may wrap any text.
        let other = candle_core::Error::Wrapped(Box::new("Shape"));
        assert_eq!(ErrorKind::of(&other), ErrorKind::Failed);
    }

    #[test]
    fn errors_of_candle_about_shapes_are_of_that_kind() {
        use candle_core::{DType, Device, Tensor};
        let x = Tensor::zeros((2, 3), DType::F32, &Device::Cpu).expect("zeros");
        for error in [x.matmul(&x), x.reshape((4, 2)), x.narrow(0, 1, 2), &x + x.t().expect("a matrix")] {
            let error = error.expect_err("shapes that do not fit");
            assert_eq!(ErrorKind::of(&error), ErrorKind::Shape, "{error}");
        }
    }
}
