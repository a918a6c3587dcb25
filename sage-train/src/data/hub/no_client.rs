//! A build without the feature `hub`, from which nothing can be fetched.

use std::convert::Infallible;
use std::path::PathBuf;

use candle_sage::{Error, Result};

use super::Named;

/// A client that does not exist.
#[derive(Debug)]
pub struct Hub(Infallible);

impl Hub {
    /// Says what the build lacks.
    ///
    /// # Errors
    /// Always.
    pub fn open() -> Result<Self> {
        Err(Error::new("this build cannot fetch anything from the Hugging Face Hub")
            .got("a build without the feature `hub`")
            .allowed("files on this machine")
            .hint("leave --no-default-features out of the build, or add --features hub"))
    }

    /// As of a client that exists.
    ///
    /// # Errors
    /// None: this build has no client.
    pub fn tokenizer(&self, _: &str) -> Result<PathBuf> {
        match self.0 {}
    }

    /// As of a client that exists.
    ///
    /// # Errors
    /// None: this build has no client.
    pub fn files(&self, _: &Named) -> Result<Vec<String>> {
        match self.0 {}
    }

    /// As of a client that exists.
    ///
    /// # Errors
    /// None: this build has no client.
    pub fn dataset_file(&self, _: &str, _: &str) -> Result<PathBuf> {
        match self.0 {}
    }
}
