//! Checks that a folder of shards is complete and unchanged.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_sage::{Error, Result};
use rayon::prelude::*;

use super::prepared::{LIST, Prepared};
use super::shard::Shard;
use super::source::{self, Source};
use super::tokenizer::Tokenizer;
use super::tokens::{Tokens, check_ids};

/// The result of [`check`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checked {
    /// Number of shards.
    pub shards: usize,
    /// Number of shards without a sidecar, so without a hash to compare with.
    pub without_sidecar: usize,
}

/// Checks that the shards listed in `dataset.json` exist. Then checks the hash, the tokenizer and the token ids of
/// every shard of the folder.
///
/// # Errors
/// When a shard is missing, does not match its sidecar, or contains an id that is not in the vocabulary.
pub fn check(folder: &Path) -> Result<Checked> {
    let Source::Shards(files) = source::find(folder, Path::new(""))? else {
        return Err(Error::new("no shards of tokens")
            .got(folder.display())
            .allowed("a folder of .bin files")
            .hint("`sage-train data prepare TEXT --to FOLDER` creates shards"));
    };
    check_listed(folder)?;
    let tokenizer = files.tokenizer.as_deref().map(Tokenizer::load).transpose()?;
    let all: Vec<&PathBuf> = files.train.iter().chain(&files.validation).collect();
    let bare = AtomicUsize::new(0);
    let each = all.par_iter().map(|path| {
        let shard = Shard::open(path)?;
        shard.check()?;
        bare.fetch_add(usize::from(shard.sidecar.is_none()), Ordering::Relaxed);
        let vocab = match (&tokenizer, &shard.sidecar) {
            (Some(tokenizer), _) => {
                shard.check_tokenizer(tokenizer)?;
                tokenizer.vocab_size()
            }
            (None, Some(sidecar)) => sidecar.vocab_size,
            (None, None) => return Ok(()),
        };
        let len = shard.len();
        Tokens::from(vec![shard])
            .each_chunk(len, &mut |start, tokens| check_ids(tokens, vocab, path.display(), start))
    });
    // Reports the first of several errors, so that the message does not depend on the threads.
    each.find_first(Result::is_err).unwrap_or(Ok(()))?;
    Ok(Checked { shards: all.len(), without_sidecar: bare.into_inner() })
}

/// Checks that all shards listed in the folder's `dataset.json` exist. A folder without a `dataset.json` passes.
///
/// # Errors
/// When a listed shard does not exist.
pub fn check_listed(folder: &Path) -> Result<()> {
    if !folder.join(LIST).exists() {
        return Ok(());
    }
    let Prepared { train, validation, .. } = Prepared::read(folder)?;
    let mut names = train.shards.iter().chain(&validation.shards);
    match names.find(|name| !folder.join(name).exists()) {
        None => Ok(()),
        Some(name) => Err(Error::new("a shard is missing")
            .got(format!("no {name} in {}", folder.display()))
            .allowed(format!("every shard that {LIST} lists"))
            .hint(format!(
                "copy the shard or prepare the data again; if you delete {LIST}, every shard in the folder is \
                 used"
            ))),
    }
}
