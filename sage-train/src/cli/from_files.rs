//! Fills in the settings that `--init-from` or an existing tokenizer determines.

use std::path::{Component, Path, PathBuf};

use candle_sage::{Error, Result};

use crate::config::Config;
use crate::data::{Tokenizer, known_tokenizer};
use crate::initial;
use crate::quantity::{Quantity, grouped};
use crate::settings::{Preset, Settings, Switch};

/// Checks that the tokenizer in the settings equals the initial weights' tokenizer. With another one, the token ids
/// would mean different text.
fn check_tokenizers(named: &Settings, of_weights: &Settings) -> Result<()> {
    let (Some(named), Some(own)) = (&named.data.tokenizer, &of_weights.data.tokenizer) else { return Ok(()) };
    let [named_as, own_as] = [named, own].map(|name| Tokenizer::named(name, None));
    if named_as?.hash() == own_as?.hash() {
        return Ok(());
    }
    Err(Error::new("the tokenizer is not the one that the weights were trained with")
        .got(format!("--tokenizer {named}"))
        .allowed(own.clone())
        .hint("leave --tokenizer out: the run then uses the tokenizer of --init-from"))
}

/// Checks that the embedding of the new run and the embedding in the initial weights have the same number of rows.
fn check_rows(folder: &Path, settings: &Settings, of_weights: &Settings) -> Result<()> {
    let (Some(now), Some(rows)) = (settings.data.vocab_size, of_weights.data.vocab_size) else {
        return Ok(());
    };
    let preset = settings.run.preset.unwrap_or(Preset::Tiny);
    let padded = Config::embedding_rows(preset, now.0 as usize) as u64;
    if padded == rows.0 {
        return Ok(());
    }
    let hint = match now == rows {
        true => {
            "presets from 40m on pad the vocabulary to a multiple of 128: use --preset mini, or leave \
             --preset out; --init-from sets the model's sizes"
        }
        false => "leave --vocab-size out: --init-from sets it",
    };
    Err(Error::new("the vocabulary does not fit the initial weights")
        .got(format!("an embedding of {} rows (--preset, --vocab-size)", grouped(padded)))
        .allowed(format!("{} rows, as in {}", grouped(rows.0), folder.display()))
        .hint(hint))
}

/// Fills in the settings that files determine: the model's shape from `--init-from`, and the vocabulary size from an
/// existing tokenizer.
pub(super) fn fill_from_files(mut settings: Settings) -> Result<Settings> {
    if let Some(folder) = settings.model.init_from.take() {
        // Saves `./runs/a` as `runs/a`: a report compares the `init-from` settings of its runs as text.
        let folder: PathBuf = folder.components().filter(|part| *part != Component::CurDir).collect();
        settings.model.init_from = Some(folder.clone());
        let told = initial::settings(&folder, settings.attention.attn)?;
        if settings.optimizer.init_moments == Some(Switch::On) {
            initial::check_moments(&folder)?;
        }
        check_tokenizers(&settings, &told)?;
        settings = settings.over(told.clone());
        check_rows(&folder, &settings, &told)?;
    }
    if settings.data.vocab_size.is_none()
        && let Some(tokenizer) = known_tokenizer(&settings)?
    {
        // The vocabulary is padded to a multiple of 64: GPUs compute logits several times more slowly if a row of
        // logits is not a multiple of 16 bytes.
        settings.data.vocab_size = Some(Quantity(tokenizer.vocab_size().next_multiple_of(64) as u64));
    }
    Ok(settings)
}
