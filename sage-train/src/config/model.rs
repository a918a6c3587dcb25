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
    let heads = need(s.model.heads);
    let model = LlamaConfig {
        vocab: model_vocab(preset, need(s.data.vocab_size).0 as usize),
        layers: need(s.model.layers),
        width: need(s.model.width),
        heads,
        key_heads: s.model.key_heads.unwrap_or(heads),
        head_dim: need(s.model.head_dim),
        ffn: need(s.model.ffn),
        context: need(s.data.context).0 as usize,
        rope_base: need(s.model.rope_base),
        norm_eps: above_zero("norm-eps", need(s.model.norm_eps))?,
        qk_norm: need(s.attention.qk_norm) == Switch::On,
        init_std: need(s.model.init_std),
        scheme: need(s.attention.attn).scheme(s).map(|scheme| scheme_of_blocks(scheme, sla2.as_ref())),
        sla2,
        z_loss: in_range("z-loss", need(s.optimizer.z_loss), 0.0, 1.0)?,
        recompute: need(s.run.recompute),
        deterministic: need(s.run.deterministic) == Switch::On,
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
