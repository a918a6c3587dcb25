//! Errors of the CUDA driver as candle errors.

use candle_core::{Error, Result};
use cudarc::driver::DriverError;

/// The result of a call of the driver.
pub(super) trait DriverResult<T> {
    /// Wraps the error as candle does.
    fn w(self) -> Result<T>;
}

impl<T> DriverResult<T> for std::result::Result<T, DriverError> {
    fn w(self) -> Result<T> {
        self.map_err(|error| Error::Cuda(Box::new(error)).bt())
    }
}
