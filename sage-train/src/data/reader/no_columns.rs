//! The Parquet reader of builds without the feature `parquet`. It always returns an error.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::AtomicU64;

use candle_sage::{Error, Result};

use super::{BadDocuments, EachUntil};

pub(super) fn parquet(
    path: &Path,
    _: File,
    _: &str,
    _: BadDocuments<'_>,
    _: &AtomicU64,
    _: &mut EachUntil<'_>,
) -> Result<()> {
    Err(Error::new("this build does not read parquet")
        .got(path.display())
        .allowed(match cfg!(feature = "zstd") {
            true => ".txt, .md, .jsonl, .ndjson, .json, .csv (each also .gz, .zst)",
            false => ".txt, .md, .jsonl, .ndjson, .json, .csv (each also .gz)",
        })
        .hint("build without --no-default-features, or with --features parquet"))
}
