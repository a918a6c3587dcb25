//! Decoding with a cache against the forward over whole sequences.

use candle_core::{DType, Device, Result, Tensor};
use candle_sage::{SageBwd, Scheme};
use sage_train::model::{Llama, LlamaConfig, Stage, Windows};

use super::{LIMIT, batch, config, drawn, relative, with_sla2};

/// Decodes a prompt and then single tokens with a cache. The logits after each token agree with the logits of a forward
/// over the whole sequence.
#[test]
fn decoding_with_the_past_kept_is_the_whole_again() -> Result<()> {
    let device = &Device::Cpu;
    let int8 = Scheme::from(SageBwd::default());
    for (scheme, qk_norm) in [(None, false), (Some(Scheme::Unquantized), true), (Some(int8), false)] {
        let rope_scaling = Some("4,1,4,16".parse().expect("a scaling"));
        let (untied, qkv_bias) = (qk_norm, !qk_norm);
        let windows = Some(Windows { tokens: 7, pattern: "SSL".parse().expect("a pattern") });
        let softcap = (scheme == Some(Scheme::Unquantized)).then_some(1.5);
        let config =
            LlamaConfig { scheme, qk_norm, rope_scaling, untied, qkv_bias, windows, softcap, ..config() };
        let parameters = drawn(&config, device, DType::F32)?;
        let whole = Llama::new(&config, &parameters, device)?;
        // The whole sequence in unquantized attention, the scheme of the tokens after the prompt.
        let exact = LlamaConfig { scheme: scheme.map(|_| Scheme::Unquantized), ..config.clone() };
        let exact = Llama::new(&exact, &parameters, device)?;
        let ids = batch(&config, device)?.0.narrow(0, 0, 1)?.contiguous()?;
        let first = |len| ids.narrow(1, 0, len)?.contiguous();
        let mut past = whole.past(config.context, Scheme::Unquantized).expect("dense attention");
        let prompt = whole.next_logits_after(&mut past, &first(17)?)?;
        assert_eq!(relative(&prompt, &whole.next_logits(&first(17)?)?)?, 0.0);
        // With INT8, `whole` computes the prompt's attention in INT8, and `exact` does not, so their results differ.
        let limit = if scheme == Some(int8) { 0.05 } else { LIMIT };
        for len in 18..=40 {
            let next = ids.narrow(1, len - 1, 1)?.contiguous()?;
            let logits = whole.next_logits_after(&mut past, &next)?;
            let error = relative(&logits, &exact.next_logits(&first(len)?)?)?;
            assert!(error < limit, "{scheme:?}, {len} tokens: {error}");
        }
        assert_eq!(past.tokens(), 40);
        let more = Tensor::zeros((1, config.context), DType::U32, device)?;
        let error = whole.next_logits_after(&mut past, &more).expect_err("no angles").to_string();
        assert!(error.contains("longer than the model's context"), "{error}");
    }
    following_numerics_are_those_that_were_asked_for(device)?;
    let sparse = with_sla2();
    let parameters = drawn(&sparse, device, DType::F32)?;
    let mut model = Llama::new(&sparse, &parameters, device)?;
    // With SLA2: a prompt that ends inside a block, then tokens up to the third block.
    let mut past = model.past(48, Scheme::Unquantized).expect("a router's selection has a cache");
    let ids = batch(&sparse, device)?.0.narrow(0, 0, 1)?.contiguous()?;
    for (len, tokens) in [(17, 17), (18, 1), (33, 15), (40, 7)] {
        let new = ids.narrow(1, len - tokens, tokens)?.contiguous()?;
        let logits = model.next_logits_after(&mut past, &new)?;
        let error = relative(&logits, &model.next_logits(&ids.narrow(1, 0, len)?.contiguous()?)?)?;
        assert!(error < LIMIT, "{len} tokens: {error}");
    }
    assert!(model.past(48, Scheme::from(SageBwd::default())).is_none());
    model.set_stage(Stage::Dense);
    assert!(model.past(48, Scheme::from(SageBwd::default())).is_some());
    Ok(())
}

/// After an INT8 prompt, computes the logits of one more token with INT8 and with unquantized attention. These differ,
/// and the INT8 logits are close to those of an INT8 forward over the whole sequence.
fn following_numerics_are_those_that_were_asked_for(device: &Device) -> Result<()> {
    let int8 = Scheme::from(SageBwd::default());
    let config = LlamaConfig { scheme: Some(int8), ..config() };
    let parameters = drawn(&config, device, DType::F32)?;
    let model = Llama::new(&config, &parameters, device)?;
    let ids = batch(&config, device)?.0.narrow(0, 0, 1)?.contiguous()?;
    let logits = |following| -> Result<Tensor> {
        let mut past = model.past(1, following).expect("dense attention");
        model.next_logits_after(&mut past, &ids.narrow(1, 0, 17)?.contiguous()?)?;
        model.next_logits_after(&mut past, &ids.narrow(1, 17, 1)?.contiguous()?)
    };
    let (exact, low) = (logits(Scheme::Unquantized)?, logits(int8)?);
    let whole = model.next_logits(&ids.narrow(1, 0, 18)?.contiguous()?)?;
    let (moved, error) = (relative(&low, &exact)?, relative(&low, &whole)?);
    // Each layer adds at most the error of INT8 attention (about 0.01).
    assert!(moved > 1e-6 && error < 0.05, "{moved} {error}");
    Ok(())
}
