//! The file in a run's folder with the results of `probe --gradient`.

use std::path::Path;

use candle_sage::Result;

use super::optional;
use crate::metrics::GradientErrors;
use crate::{partial, writing};

/// File with a list of [`GradientErrors`].
pub(super) const GRADIENTS: &str = "gradients.json";

/// Reads the gradient errors from a run's folder.
pub(super) fn of(folder: &Path) -> Result<Vec<GradientErrors>> {
    Ok(optional(&folder.join(GRADIENTS))?.unwrap_or_default())
}

/// Adds results to a run's folder. A new result for the same scheme and step replaces the old result.
///
/// # Errors
/// When the file cannot be read or written.
pub fn add_gradients(folder: &Path, measured: &[GradientErrors]) -> Result<()> {
    let path = folder.join(GRADIENTS);
    let mut all = of(folder)?;
    all.retain(|old| measured.iter().all(|new| (&new.scheme, new.step) != (&old.scheme, old.step)));
    all.extend_from_slice(measured);
    let text = serde_json::to_string(&all).expect("plain numbers");
    partial::file(&path, |to| std::fs::write(to, &text).map_err(writing(to)))
}
