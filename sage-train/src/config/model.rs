//! Resolves the settings of the model and of its attention: tables `[model]`, `[attention]` and `[sla2]`.

use std::collections::{BTreeMap, BTreeSet};

use candle_sage::{Error, Result, Scheme};

use crate::checks::{above_zero, in_range, need};
use crate::device::DeviceKind;
use crate::model::{LlamaConfig, Recompute, Sla2Config, Windows};
use crate::settings::{Preset, Settings, Switch};

/// The checked configuration of the model that the settings describe.
///
/// # Errors
/// When a setting is out of range, or two settings contradict each other.
pub(super) fn resolve(preset: Preset, s: &Settings, sla2: Option<Sla2Config>) -> Result<LlamaConfig> {
    let heads = need(s.model.heads);
    let layers = in_range("layers", need(s.model.layers), 1, 1000)?;
    let for_blocks = |scheme: Scheme| sla2.as_ref().map_or(scheme, |sla2| scheme.for_blocks(sla2.block));
    let scheme = need(s.attention.attn).scheme(s).map(for_blocks);
    let layer_schemes = layer_schemes(s, scheme, sla2.as_ref(), layers)?;
    let linear_compute_layers = match &s.linear.linear_bf16_layers {
        Some(list) if s.linear.precision().is_low() => list.resolve(layers)?,
        _ => BTreeSet::new(),
    };
    let model = LlamaConfig {
        vocab: model_vocab(preset, need(s.data.vocab_size).0 as usize),
        layers,
        width: need(s.model.width),
        heads,
        key_heads: s.model.key_heads.unwrap_or(heads),
        head_dim: need(s.model.head_dim),
        ffn: need(s.model.ffn),
        context: need(s.data.context).0 as usize,
        rope_base: need(s.model.rope_base),
        rope_scaling: s.model.rope_scaling,
        untied: s.model.untied == Some(Switch::On),
        // A model without attention has no query, key or value.
        qkv_bias: s.model.qkv_bias == Some(Switch::On) && scheme.is_some(),
        norm_eps: above_zero("norm-eps", need(s.model.norm_eps))?,
        qk_norm: need(s.attention.qk_norm) == Switch::On,
        init_std: need(s.model.init_std),
        linear: s.linear.precision(),
        linear_compute_layers,
        linear_head: s.linear.head_precision(),
        linear_in_evaluation: s.linear.precision_in_evaluation(),
        scheme,
        windows: windows(s, scheme, sla2.as_ref(), layers)?,
        // A soft cap and sinks, like windows, have no effect on a model without attention.
        softcap: s
            .model
            .softcap
            .filter(|cap| *cap != 0.0 && scheme.is_some())
            .map(|cap| above_zero("softcap", cap))
            .transpose()?,
        sinks: s.model.sinks == Some(Switch::On) && scheme.is_some(),
        layer_schemes,
        sla2,
        z_loss: in_range("z-loss", need(s.optimizer.z_loss), 0.0, 1.0)?,
        recompute: need(s.run.recompute),
        deterministic: need(s.run.deterministic) == Switch::On,
    };
    model.validate()?;
    check_logits(&model, None, s)?;
    if model.recompute == Recompute::Rotary && model.sla2.is_some() {
        return Err(Error::new("SLA2 cannot recompute only the rotary embedding")
            .got("--recompute rotary")
            .allowed("none, attention, block")
            .hint("--recompute attention saves more memory"));
    }
    Ok(model)
}

/// The layers whose scheme differs from the model's. Only models with dense attention can have such layers.
fn layer_schemes(
    s: &Settings,
    scheme: Option<Scheme>,
    sla2: Option<&Sla2Config>,
    layers: usize,
) -> Result<BTreeMap<usize, Scheme>> {
    let named = s.attention.attn_layers.as_ref().filter(|_| scheme.is_some() && sla2.is_none());
    let mut schemes = named.map_or_else(|| Ok(BTreeMap::new()), |named| named.resolve(layers))?;
    schemes.retain(|_, other| Some(*other) != scheme);
    Ok(schemes)
}

/// The sliding windows. With `--attn none`, `--window` is ignored.
fn windows(
    s: &Settings,
    scheme: Option<Scheme>,
    sla2: Option<&Sla2Config>,
    layers: usize,
) -> Result<Option<Windows>> {
    let pattern = s.model.window_pattern.clone();
    let Some(tokens) = s.model.window.filter(|_| scheme.is_some()) else {
        return match pattern {
            Some(pattern) if s.model.window.is_none() => {
                Err(Error::new("a pattern of windows without a window")
                    .got(format!("--window-pattern {pattern}"))
                    .allowed("--window-pattern only together with --window")
                    .hint("add the number of tokens, such as --window 1024, or leave --window-pattern out"))
            }
            _ => Ok(None),
        };
    };
    let windows = Windows {
        tokens: in_range("window", tokens.0 as usize, 1, 1 << 24)?,
        pattern: pattern.unwrap_or_default(),
    };
    if (0..layers).all(|layer| windows.of(layer).is_none()) {
        return Ok(None);
    }
    if sla2.is_some() {
        if tokens >= need(s.data.context) {
            return Ok(None);
        }
        return Err(Error::new("SLA2 does not support sliding windows")
            .got(format!("--window {tokens}"))
            .allowed("--window with dense attention")
            .hint("--window-pattern L disables windows; --attn sla2-window attends to the nearest blocks"));
    }
    Ok(Some(windows))
}

/// Checks that the model's attention supports the soft cap and the sinks, if they are set. `second` is the scheme of
/// `--eval-attn`, which must support them too.
pub(super) fn check_logits(model: &LlamaConfig, second: Option<Scheme>, s: &Settings) -> Result<()> {
    if !model.needs_logits() {
        return Ok(());
    }
    let cap = model.softcap.map(|cap| format!("--softcap {cap}"));
    let got: Vec<String> = cap.into_iter().chain(model.sinks.then(|| "--sinks on".into())).collect();
    let got = got.join(" ");
    if model.sla2.is_some() {
        return Err(Error::new("SLA2 does not support a soft cap or sinks")
            .got(got)
            .allowed("dense attention")
            .hint("use --attn fpa, or leave out --softcap and --sinks"));
    }
    let on_gpu = need(s.run.device) == DeviceKind::Cuda && model.softcap.is_some();
    let fits = |scheme: &Scheme| !on_gpu || scheme.supports_softcap_on_gpu();
    let mut schemes = model.layer_schemes.values().copied().chain(model.scheme).chain(second);
    match schemes.find(|scheme| scheme.smooths_keys() || !fits(scheme)) {
        None => Ok(()),
        Some(other) => Err(Error::new("this scheme does not support the given --softcap or --sinks")
            .got(format!("{got}, {other}"))
            .allowed("fpa; attn-qat without smoothing; sagebwd without smoothing (with a soft cap on a GPU: only with \
                      --products scores)")
            .hint("set --smoothing none, and for sagebwd --products scores; in --attn-layers and --eval-attn \
                   write sagebwd:smoothing=none:products=scores")),
    }
}

/// Number of rows of the embedding. Except in the two smallest presets, the vocabulary is padded to a multiple of 128,
/// which is faster on GPUs.
pub(super) fn model_vocab(preset: Preset, vocab_size: usize) -> usize {
    match preset {
        Preset::Tiny | Preset::Mini => vocab_size,
        Preset::Small40m | Preset::Small124m | Preset::Paper325m | Preset::Large1300m => {
            vocab_size.next_multiple_of(128)
        }
    }
}
