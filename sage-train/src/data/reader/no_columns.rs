//! A build without the feature `parquet`, which cannot read such files.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::AtomicU64;

use candle_sage::{Error, Result};

use super::{Bad, EachUntil};

/// Says what the build lacks.
pub(super) fn parquet(
    path: &Path,
    _: File,
    _: &str,
    _: Bad<'_>,
    _: &AtomicU64,
    _: &mut EachUntil<'_>,
) -> Result<()> {
    Err(Error::new("this build does not read parquet")
        .got(path.display())
        .allowed(".txt, .jsonl")
        .hint("leave --no-default-features out of the build, or add --features parquet"))
}
