//! Checks that the user's attention settings apply to the chosen kind of attention.

use candle_sage::{Error, Result, Scheme};
use toml::Table;

use super::of_attention;
use crate::model::Sla2Config;
use crate::settings::{Attn, Settings};

/// Checks that every attention setting in `typed` applies to the attention that `attn`, `scheme` and `sla2` describe.
///
/// # Errors
/// When a setting applies only to another kind of attention.
pub fn check_own(
    typed: &Settings,
    attn: Attn,
    scheme: Option<Scheme>,
    sla2: Option<&Sla2Config>,
) -> Result<()> {
    let table = Table::try_from(typed).unwrap_or_default();
    let own = Attn::settings_of(scheme, sla2);
    let dense = scheme.is_some() && sla2.is_none();
    let idle = |key: &&String| {
        let means_something = matches!(key.as_str(), "attn" | "eval-attn")
            || dense && *key == "attn-layers"
            || own.iter().any(|(name, _)| name == key);
        let of_another = of_attention(key) && !means_something;
        of_another && !(sla2.is_some() && key.starts_with("sla2-"))
    };
    let Some(key) = table.keys().find(idle) else { return Ok(()) };
    let mut settings: Vec<&str> = own.iter().map(|(name, _)| *name).collect();
    settings.retain(|name| !name.starts_with("tile"));
    Err(Error::new(format!("--{key} is not a setting of this attention"))
        .got(format!("--{key} with --attn {attn}"))
        .allowed(if settings.is_empty() {
            "nothing: this attention has no settings".into()
        } else {
            settings.join(", ")
        })
        .hint("leave it out, or choose an --attn that has this setting"))
}
