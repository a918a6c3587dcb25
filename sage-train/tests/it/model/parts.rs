//! Tests a model with all optional parts, because the forwards of training, validation and decoding are separate code.

use candle_core::{DType, Device, Result};
use candle_sage::Scheme;
use sage_train::model::{LinearPrecision, Llama, LlamaConfig, Recompute, Windows};

use super::{LIMIT, batch, drawn, relative};

/// Sets every field without `..`, so that the compiler reports a new field that is missing here.
fn all_parts() -> LlamaConfig {
    LlamaConfig {
        vocab: 300,
        layers: 3,
        width: 64,
        heads: 4,
        key_heads: 2,
        head_dim: 16,
        ffn: 96,
        context: 48,
        rope_base: 1000.0,
        rope_scaling: Some("4,1,4,16".parse().expect("a scaling")),
        untied: true,
        qkv_bias: true,
        norm_eps: 1e-5,
        qk_norm: true,
        init_std: 0.05,
        linear: LinearPrecision::Compute,
        linear_compute_layers: [].into(),
        linear_head: LinearPrecision::Compute,
        linear_in_evaluation: LinearPrecision::Compute,
        scheme: Some(Scheme::Unquantized),
        layer_schemes: [].into(),
        windows: Some(Windows { tokens: 9, pattern: "SSL".parse().expect("a pattern") }),
        softcap: Some(1.5),
        sinks: true,
        // SLA2 supports no windows, soft caps or sinks, so other tests cover it.
        sla2: None,
        z_loss: 1e-3,
        recompute: Recompute::None,
        deterministic: true,
    }
}

/// Validation and training compute the same loss, and every parameter gets a gradient. Decoding with a cache computes
/// the same logits as a forward over the whole sequence.
#[test]
fn every_forward_has_every_part() -> Result<()> {
    let (config, device) = (all_parts(), &Device::Cpu);
    let parameters = drawn(&config, device, DType::F32)?;
    let model = Llama::new(&config, &parameters, device)?;
    let (ids, targets) = batch(&config, device)?;
    // The training loss contains the z-loss, the validation loss does not.
    let loss = model.loss(&ids, &targets)?.to_scalar::<f32>()?;
    let plain = LlamaConfig { z_loss: 0.0, ..config.clone() };
    let trained = Llama::new(&plain, &parameters, device)?.train(&ids, &targets)?.to_scalar::<f32>()?;
    assert!((loss / trained - 1.0).abs() < 1e-6, "{loss} in validation, {trained} in training");
    for spec in config.parameter_specs() {
        let gradient = parameters.weight(&spec.name)?.gradient()?.abs()?.max_all()?.to_scalar::<f32>()?;
        assert!(gradient > 0.0, "{} has no gradient", spec.name);
    }
    let ids = ids.narrow(0, 0, 1)?.contiguous()?;
    let mut past = model.past(config.context, Scheme::Unquantized).expect("dense attention");
    for len in 1..=40 {
        let next = ids.narrow(1, len - 1, 1)?.contiguous()?;
        let logits = model.next_logits_after(&mut past, &next)?;
        let error = relative(&logits, &model.next_logits(&ids.narrow(1, 0, len)?.contiguous()?)?)?;
        assert!(error < LIMIT, "{len} tokens: {error}");
    }
    Ok(())
}
