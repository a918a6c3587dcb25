//! Fills in settings that files determine, before a configuration is resolved.

use std::path::{Component, PathBuf};

use candle_sage::{Error, Result};

use crate::data::{Tokenizer, known_tokenizer};
use crate::initial;
use crate::quantity::Quantity;
use crate::settings::{Settings, Switch};

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

/// Fills in the settings that files determine: the model's shape from `--init-from`, and the vocabulary size from an
/// existing tokenizer.
pub(super) fn fill_from_files(mut settings: Settings) -> Result<Settings> {
    if let Some(folder) = settings.model.init_from.take() {
        // Reports compare the text of the path, so `./runs/a` is saved as `runs/a`.
        let folder: PathBuf = folder.components().filter(|part| *part != Component::CurDir).collect();
        settings.model.init_from = Some(folder.clone());
        let told = initial::settings(&folder, settings.attention.attn)?;
        if settings.optimizer.init_moments == Some(Switch::On) {
            initial::check_moments(&folder)?;
        }
        check_tokenizers(&settings, &told)?;
        settings = settings.over(told);
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
