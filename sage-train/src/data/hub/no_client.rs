//! The client of a build without the feature `hub`, which cannot download anything.

use std::convert::Infallible;
use std::path::PathBuf;

use candle_sage::{Error, Result};

use super::Named;

/// A client that cannot be constructed.
#[derive(Debug)]
pub struct Hub(Infallible);

impl Hub {
    /// Returns an error: this build lacks the feature `hub`.
    ///
    /// # Errors
    /// Always.
    pub fn open() -> Result<Self> {
        Err(Error::new("this build cannot fetch anything from the Hugging Face Hub")
            .got("a build without the feature `hub`")
            .allowed("files on this machine")
            .hint("build without --no-default-features, or with --features hub"))
    }

    /// Has the same signature as in a build with the feature `hub`.
    ///
    /// # Errors
    /// Cannot be called: this build cannot create a client.
    pub fn tokenizer(&self, _: &str) -> Result<PathBuf> {
        match self.0 {}
    }

    /// Has the same signature as in a build with the feature `hub`.
    ///
    /// # Errors
    /// Cannot be called: this build cannot create a client.
    pub fn files(&self, _: &Named) -> Result<Vec<String>> {
        match self.0 {}
    }

    /// Has the same signature as in a build with the feature `hub`.
    ///
    /// # Errors
    /// Cannot be called: this build cannot create a client.
    pub fn dataset_file(&self, _: &str, _: &str) -> Result<PathBuf> {
        match self.0 {}
    }
}
