//! The `nn` modules: every parameter gets a gradient, and attention sees only the past.

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use candle_sage::nn::{
    Biases, FeedForward, KvCache, Linear, RmsNorm, Rotary, SelfAttention, SelfAttentionConfig,
};
use candle_sage::ops::{Llama3Scaling, RopeStyle, rope_tables, rope_tables_llama3};
use candle_sage::{Attention, SageBwd, Scheme};

fn block(scheme: Scheme, qk_norm: bool, biases: Biases) -> Result<(VarMap, Tensor)> {
    let device = Device::Cpu;
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device);
    let config =
        SelfAttentionConfig::new(48, 4, 16).key_heads(2).qk_norm(qk_norm.then_some(1e-6)).biases(biases);
    let attention = SelfAttention::load(config, Attention::new(scheme).causal(true), vb.pp("self_attn"))?;
    let norm = RmsNorm::load(48, 1e-6, vb.pp("norm"))?;
    let mlp = FeedForward::load(48, 100, vb.pp("mlp"))?;
    let head = Linear::load(48, 10, vb.pp("head"))?;
    let rotary = Rotary::new(32, 16, 10000.0, RopeStyle::Halves, &device)?;
    let x = Tensor::randn(0f32, 1., (2, 20, 48), &device)?;
    let x = (&x + attention.forward(&norm.forward(&x)?, &rotary)?)?;
    let x = (&x + mlp.forward(&x)?)?;
    let out = head.forward(&x)?;
    Ok((vars, out))
}

#[test]
fn every_parameter_gets_a_finite_gradient() -> Result<()> {
    let int8 = Scheme::from(SageBwd::default());
    // The layers of Llama, Qwen2, Qwen3, and Qwen3 with `attention_bias`.
    for (scheme, qk_norm, biases, count) in [
        (Scheme::Unquantized, false, Biases::None, 9),
        (int8, false, Biases::QueryKeyValue, 12),
        (int8, true, Biases::None, 11),
        (Scheme::Unquantized, true, Biases::All, 15),
    ] {
        let (vars, out) = block(scheme, qk_norm, biases)?;
        assert_eq!(out.dims(), [2, 20, 10]);
        let grads = out.sqr()?.mean_all()?.backward()?;
        let data = vars.data().lock().expect("no panic elsewhere");
        assert_eq!(data.len(), count, "{:?}", data.keys());
        for (name, var) in data.iter() {
            let grad = grads.get(var).unwrap_or_else(|| panic!("{name} has no gradient"));
            let size = grad.sqr()?.sum_all()?.to_scalar::<f32>()?;
            assert!(size.is_finite() && size > 0.0, "{name}: {size}");
        }
    }
    Ok(())
}

fn small(biases: Biases) -> SelfAttentionConfig {
    SelfAttentionConfig::new(32, 2, 16).key_heads(1).qk_norm(1e-6).biases(biases)
}

#[test]
fn a_later_token_changes_nothing_before_it() -> Result<()> {
    let device = Device::Cpu;
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &device);
    let config = small(Biases::None);
    let rotary = Rotary::new(24, 16, 10000.0, RopeStyle::Halves, &device)?;
    let x = Tensor::randn(0f32, 1., (1, 24, 32), &device)?;
    let other = Tensor::cat(&[&x.narrow(1, 0, 23)?, &Tensor::randn(0f32, 1., (1, 1, 32), &device)?], 1)?;
    for causal in [true, false] {
        let attention = Attention::new(Scheme::Unquantized).causal(causal);
        let layer = SelfAttention::load(config, attention, vb.pp(causal))?;
        let head = |x: &Tensor| -> Result<Vec<f32>> {
            layer.forward(x, &rotary)?.narrow(1, 0, 23)?.flatten_all()?.to_vec1()
        };
        assert_eq!(head(&x)? == head(&other)?, causal);
    }
    Ok(())
}

/// A layer with random weights and biases, rotary tables for 80 tokens, and an input of two sequences of 70 tokens.
fn decoder(attention: Attention, biases: Biases) -> Result<(SelfAttention, Rotary, Tensor)> {
    let (device, vars) = (Device::Cpu, VarMap::new());
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device);
    SelfAttention::load(small(biases), attention.clone(), vb.clone())?;
    for var in vars.all_vars() {
        var.set(&var.randn_like(0.0, 0.3)?)?;
    }
    let layer = SelfAttention::load(small(biases), attention, vb)?;
    let rotary = Rotary::new(80, 16, 10000.0, RopeStyle::Halves, &device)?;
    Ok((layer, rotary, Tensor::randn(0f32, 1., (2, 70, 32), &device)?))
}

/// The largest absolute difference, divided by the largest absolute value of `b`.
fn apart(a: &Tensor, b: &Tensor) -> Result<f32> {
    let most = |x: &Tensor| x.abs()?.max_all()?.to_scalar::<f32>();
    Ok(most(&(a - b)?)? / most(b)?)
}

#[test]
fn decoding_with_a_cache_is_the_forward_of_the_whole() -> Result<()> {
    for (biases, prompt) in [(Biases::None, 1), (Biases::QueryKeyValue, 33), (Biases::All, 66)] {
        let causal = Attention::new(Scheme::Unquantized).causal(true);
        let (layer, rotary, x) = decoder(causal, biases)?;
        let whole = layer.forward(&x, &rotary)?;
        // The cache has memory for fewer tokens than it receives, and grows. One step has two tokens.
        let mut cache = layer.cache(24);
        let mut outs = vec![layer.forward_cached(&x.narrow(1, 0, prompt)?, &rotary, &mut cache)?];
        let mut at = prompt;
        while at < 70 {
            let count = if at == prompt + 1 { 2 } else { 1 };
            outs.push(layer.forward_cached(&x.narrow(1, at, count)?, &rotary, &mut cache)?);
            at += count;
        }
        assert_eq!(cache.current_seq_len(), 70);
        // Sums of at most 70 terms in another order differ by some units of 2^-24.
        let error = apart(&Tensor::cat(&outs, 1)?, &whole)?;
        assert!(error < 2e-6, "{biases:?}, prompt of {prompt}: {error}");
        assert!(!outs[0].track_op());
    }
    Ok(())
}

#[test]
fn a_prompt_uses_the_layers_scheme_and_later_tokens_are_unquantized() -> Result<()> {
    let int8 = Attention::new(SageBwd::default()).causal(true);
    let (layer, rotary, x) = decoder(int8.clone(), Biases::None)?;
    let exact = |q: &Tensor, k: &Tensor, v: &Tensor| Attention::default().causal(true).apply(q, k, v);
    let exact = layer.forward_with(&x, &rotary, exact)?.narrow(1, 69, 1)?;
    let prompt = x.narrow(1, 0, 69)?;
    let last = |layer: &SelfAttention| -> Result<(Tensor, Tensor)> {
        let mut cache = layer.cache(70);
        let of_prompt = layer.forward_cached(&prompt, &rotary, &mut cache)?;
        Ok((of_prompt, layer.forward_cached(&x.narrow(1, 69, 1)?, &rotary, &mut cache)?))
    };
    let (of_prompt, by_default) = last(&layer)?;
    assert_eq!(apart(&of_prompt, &layer.forward(&prompt, &rotary)?)?, 0.0);
    assert!(apart(&by_default, &exact)? < 2e-6);
    // With `decoding(int8)` the last token uses INT8: its error is larger than errors of f32.
    let error = apart(&last(&layer.decoding(int8))?.1, &exact)?;
    assert!((1e-5..0.1).contains(&error), "{error}");
    Ok(())
}

#[test]
fn caches_that_cannot_be_right_are_refused() -> Result<()> {
    let (layer, rotary, x) = decoder(Attention::default(), Biases::None)?;
    let refused = layer.forward_cached(&x, &rotary, &mut layer.cache(70));
    insta::assert_snapshot!(refused.expect_err("not causal"));
    let (layer, rotary, x) = decoder(Attention::default().causal(true), Biases::None)?;
    // A cache along dimension 2, which is the sequence only in tensors with heads first.
    let refused = layer.forward_cached(&x, &rotary, &mut KvCache::new(2, 70));
    insta::assert_snapshot!(refused.expect_err("another dimension"));
    let mut cache = layer.cache(70);
    layer.forward_cached(&x, &rotary, &mut cache)?;
    let refused = layer.forward_cached(&x, &rotary, &mut cache);
    insta::assert_snapshot!(refused.expect_err("beyond the tables"));
    Ok(())
}

#[test]
fn llama_3_stretches_slow_angles() -> Result<()> {
    let scaling =
        Llama3Scaling { factor: 32.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_len: 8192 };
    let (base, head_dim) = (500_000.0, 64);
    let angle = |tables: (Tensor, Tensor), i: usize| -> Result<f64> {
        let at = |table: &Tensor| {
            Ok::<_, candle_core::Error>(f64::from(table.get(1)?.get(i)?.to_scalar::<f32>()?))
        };
        Ok(at(&tables.1)?.atan2(at(&tables.0)?))
    };
    let plain = rope_tables(2, head_dim, base, &Device::Cpu)?;
    let stretched = rope_tables_llama3(2, head_dim, base, scaling, &Device::Cpu)?;
    for i in 0..head_dim / 2 {
        let (before, after) = (angle(plain.clone(), i)?, angle(stretched.clone(), i)?);
        // Llama 3's authors describe the scaling in wavelengths.
        let wavelength = std::f64::consts::TAU / before;
        let expected = if wavelength < 8192.0 / 4.0 {
            before
        } else if wavelength > 8192.0 / 1.0 {
            before / 32.0
        } else {
            let smooth = (8192.0 / wavelength - 1.0) / (4.0 - 1.0);
            (1.0 - smooth) * before / 32.0 + smooth * before
        };
        // Sines and cosines are rounded to f32.
        assert!((after / expected - 1.0).abs() < 1e-6, "{i}: {after} {expected}");
    }
    assert!(rope_tables_llama3(2, 64, base, Llama3Scaling { factor: 0.0, ..scaling }, &Device::Cpu).is_err());
    Ok(())
}

/// Without a rotary embedding the order of earlier tokens does not affect the last token; with a rotary embedding it
/// does. `forward_cached` without a rotary embedding gives the same output as `forward`.
#[test]
fn positions_may_come_from_elsewhere() -> Result<()> {
    let device = Device::Cpu;
    for qk_norm in [None, Some(1e-6)] {
        let config = SelfAttentionConfig::new(32, 2, 16).qk_norm(qk_norm);
        let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &device);
        let layer = SelfAttention::load(config, Attention::default().causal(true), vb)?;
        let rotary = Rotary::new(8, 16, 10000.0, RopeStyle::Halves, &device)?;
        let x = Tensor::randn(0f32, 1., (1, 5, 32), &device)?;
        let turned = Tensor::cat(&[x.narrow(1, 2, 2)?, x.narrow(1, 0, 2)?, x.narrow(1, 4, 1)?], 1)?;
        let last = |x: &Tensor, rotary: Option<&Rotary>| layer.forward(x, rotary)?.narrow(1, 4, 1);
        let apart = |a: Tensor, b: Tensor| (a - b)?.abs()?.max_all()?.to_scalar::<f32>();
        assert!(apart(last(&x, None)?, last(&turned, None)?)? < 1e-5);
        assert!(apart(last(&x, Some(&rotary))?, last(&turned, Some(&rotary))?)? > 1e-4);
        let mut cache = layer.cache(8);
        layer.forward_cached(&x.narrow(1, 0, 4)?, None, &mut cache)?;
        let next = layer.forward_cached(&x.narrow(1, 4, 1)?, None, &mut cache)?;
        assert!(apart(next, last(&x, None)?)? < 1e-5);
    }
    Ok(())
}

/// Sequences of a batch that start at different positions have the same rotation and gradients as in batches of 1.
pub(crate) fn check_positions_by_batch(device: &Device) -> Result<()> {
    let rotary = Rotary::new(24, 16, 10000.0, RopeStyle::Halves, device)?;
    let norm = RmsNorm::new(Tensor::randn(1f32, 0.1, 16, device)?, 1e-6);
    let x = Var::randn(0f32, 1., (2, 5, 3, 16), device)?;
    let heads_first = x.transpose(1, 2)?;
    let starts = [7u32, 0];
    let rows: Vec<Vec<u32>> = starts.iter().map(|start| (*start..start + 5).collect()).collect();
    let positions = Tensor::new(rows, device)?;
    let at = rotary.at(&positions)?;
    let every = |rotary: &Rotary, x: &Tensor, heads_first: &Tensor, position: usize| -> Result<Vec<Tensor>> {
        Ok(vec![
            rotary.forward(x, position)?,
            rotary.forward_normalized(x, &norm, position)?,
            rotary.forward_heads_first(heads_first, position)?.transpose(1, 2)?,
            rotary.forward_normalized_heads_first(heads_first, &norm, position)?.transpose(1, 2)?,
        ])
    };
    // The call's position, 100, is ignored.
    let batch = every(&at, &x, &heads_first, 100)?;
    for (n, start) in starts.iter().enumerate() {
        let one = |x: &Tensor| x.narrow(0, n, 1);
        let alone = every(&rotary, &one(&x)?, &one(&heads_first)?, *start as usize)?;
        for (batch, alone) in batch.iter().zip(&alone) {
            let gradient = |out: &Tensor| -> Result<Tensor> {
                let gradients = out.sqr()?.sum_all()?.backward()?;
                one(gradients.get(&x).expect("a gradient"))
            };
            for (got, expected) in [(one(batch)?, alone.clone()), (gradient(batch)?, gradient(alone)?)] {
                assert_eq!((got - expected)?.abs()?.max_all()?.to_scalar::<f32>()?, 0.0);
            }
        }
    }
    Ok(())
}

#[test]
fn rotary_positions_by_batch() -> Result<()> {
    let device = Device::Cpu;
    check_positions_by_batch(&device)?;
    let rotary = Rotary::new(24, 16, 10000.0, RopeStyle::Halves, &device)?;
    let positions = Tensor::new(&[[7u32, 8, 9, 10, 11], [0, 1, 2, 3, 4]], &device)?;
    let at = rotary.at(&positions)?;
    let x = Tensor::zeros((2, 4, 3, 16), DType::F32, &device)?;
    let message = |result: Result<Rotary>| result.expect_err("positions that do not fit").to_string();
    assert!(message(rotary.at(&Tensor::new(&[[23i64, 24]], &device)?)).contains("below 24"));
    assert!(message(rotary.at(&Tensor::new(&[[-1i64, 0]], &device)?)).contains("-1 to 0"));
    assert!(message(rotary.at(&Tensor::new(&[1u32, 2], &device)?)).contains("(batch, sequence)"));
    assert!(message(at.at(&positions)).contains("itself made by `at`"));
    let other = at.forward(&x, 0).expect_err("other tokens").to_string();
    assert!(other.contains("batch 2, sequence 4"), "{other}");
    Ok(())
}
