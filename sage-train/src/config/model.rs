//! The settings of the model and of its attention, resolved: tables `[model]`, `[attention]` and `[sla2]`.

use candle_sage::{Result, Scheme};

use crate::checks::{above_zero, in_range, need};
use crate::model::{LlamaConfig, Sla2Config};
use crate::settings::{Preset, Settings, Switch};

/// The model that settings describe, checked.
///
/// # Errors
/// When a setting is out of range, or two do not fit together.
pub(super) fn resolve(preset: Preset, s: &Settings, sla2: Option<Sla2Config>) -> Result<LlamaConfig> {
    let heads = need(s.heads);
    let model = LlamaConfig {
        vocab: model_vocab(preset, need(s.vocab_size).0 as usize),
        layers: need(s.layers),
        width: need(s.width),
        heads,
        key_heads: s.key_heads.unwrap_or(heads),
        head_dim: need(s.head_dim),
        ffn: need(s.ffn),
        context: need(s.context).0 as usize,
        rope_base: need(s.rope_base),
        norm_eps: above_zero("norm-eps", need(s.norm_eps))?,
        qk_norm: need(s.qk_norm) == Switch::On,
        init_std: need(s.init_std),
        scheme: need(s.attn).scheme(s).map(|scheme| scheme_of_blocks(scheme, sla2.as_ref())),
        sla2,
        z_loss: in_range("z-loss", need(s.z_loss), 0.0, 1.0)?,
        recompute: need(s.recompute),
        deterministic: need(s.deterministic) == Switch::On,
    };
    model.validate()?;
    Ok(model)
}

/// On small blocks SageBwd has smaller tiles.
fn scheme_of_blocks(scheme: Scheme, sla2: Option<&Sla2Config>) -> Scheme {
    match (scheme, sla2) {
        (Scheme::SageBwd(sage), Some(sla2)) => {
            sage.tile_q(sage.tile_q.min(sla2.block)).tile_k(sage.tile_k.min(sla2.block)).into()
        }
        (scheme, _) => scheme,
    }
}

/// Rows of the embedding: the paper's is padded to a multiple of 128 for the sake of GPUs.
fn model_vocab(preset: Preset, vocab_size: usize) -> usize {
    if preset == Preset::Paper325m { vocab_size.next_multiple_of(128) } else { vocab_size }
}
