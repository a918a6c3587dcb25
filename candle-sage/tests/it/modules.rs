//! The `nn` modules: every parameter gets a gradient, and attention sees the past only.

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use candle_sage::nn::{FeedForward, Linear, RmsNorm, Rotary, SelfAttention, SelfAttentionConfig};
use candle_sage::ops::RopeStyle;
use candle_sage::{Attention, SageBwd, Scheme};

fn block(scheme: Scheme, qk_norm: bool) -> Result<(VarMap, Tensor)> {
    let device = Device::Cpu;
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device);
    let config = SelfAttentionConfig {
        width: 48,
        heads: 4,
        key_heads: 2,
        head_dim: 16,
        qk_norm_eps: qk_norm.then_some(1e-6),
    };
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
    for (scheme, qk_norm, count) in [(Scheme::FullPrecision, false, 9), (SageBwd::default().into(), true, 11)]
    {
        let (vars, out) = block(scheme, qk_norm)?;
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

#[test]
fn a_later_token_changes_nothing_before_it() -> Result<()> {
    let device = Device::Cpu;
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &device);
    let config =
        SelfAttentionConfig { width: 32, heads: 2, key_heads: 1, head_dim: 16, qk_norm_eps: Some(1e-6) };
    let rotary = Rotary::new(24, 16, 10000.0, RopeStyle::Halves, &device)?;
    let x = Tensor::randn(0f32, 1., (1, 24, 32), &device)?;
    let other = Tensor::cat(&[&x.narrow(1, 0, 23)?, &Tensor::randn(0f32, 1., (1, 1, 32), &device)?], 1)?;
    for causal in [true, false] {
        let attention = Attention::new(Scheme::FullPrecision).causal(causal);
        let layer = SelfAttention::load(config, attention, vb.pp(causal))?;
        let head = |x: &Tensor| -> Result<Vec<f32>> {
            layer.forward(x, &rotary)?.narrow(1, 0, 23)?.flatten_all()?.to_vec1()
        };
        assert_eq!(head(&x)? == head(&other)?, causal);
    }
    Ok(())
}
