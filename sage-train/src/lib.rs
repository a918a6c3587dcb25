//! Pre-training of small Llamas with low-bit attention, and fair comparison with full precision.
//!
//! Read it as water: `cli -> config -> data -> model -> candle-sage`, and gradients back through
//! `optim`; `train` holds the loop. Nothing lower knows anything above it.

pub mod cli;
pub mod config;
pub mod data;
pub mod model;
pub mod optim;
pub mod quantity;
pub mod report;
pub mod settings;
pub mod train;

pub use candle_sage::{Error, Result};

/// Turns an error of a library into one of ours, saying what was being done.
pub(crate) fn during<E: std::fmt::Display>(what: impl Into<String>) -> impl FnOnce(E) -> Error {
    let what = what.into();
    move |error| Error::new(what).got(error)
}
