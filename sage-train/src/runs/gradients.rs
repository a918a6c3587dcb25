//! What `probe --gradient` measured of a run, in the run's folder.

use std::path::Path;

use candle_sage::Result;

use super::optional;
use crate::metrics::GradientErrors;
use crate::{partial, writing};

/// File with a list of [`GradientErrors`].
pub(super) const GRADIENTS: &str = "gradients.json";

/// What was measured of the run in a folder.
pub(super) fn of(folder: &Path) -> Result<Vec<GradientErrors>> {
    Ok(optional(&folder.join(GRADIENTS))?.unwrap_or_default())
}

/// Adds what was measured of a run's gradient to its folder; a scheme that is measured again after the same step replaces the one before.
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
