//! `untrained` lists the variables without a gradient.

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{LayerNorm, VarBuilder, VarMap, embedding, layer_norm, linear};
use candle_sage::ops::{CrossEntropy, cross_entropy};
use candle_sage::{Attention, untrained};

type Norm = fn(&LayerNorm, &Tensor) -> Result<Tensor>;

/// A GPT of two blocks from candle-nn's modules, without a final norm, and its loss.
fn gpt(norm: Norm) -> Result<(VarMap, Tensor)> {
    let (vars, device) = (VarMap::new(), Device::Cpu);
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device);
    let ids = Tensor::new(&[[1u32, 4, 2, 3, 0, 2]], &device)?;
    let positions = Tensor::arange(0u32, 6, &device)?;
    let tokens = embedding(5, 32, vb.pp("wte"))?.forward(&ids)?;
    let mut x = tokens.broadcast_add(&embedding(6, 32, vb.pp("wpe"))?.forward(&positions)?)?;
    for block in 0..2 {
        let vb = vb.pp("h").pp(block);
        let y = norm(&layer_norm(32, 1e-5, vb.pp("ln_1"))?, &x)?;
        let qkv = linear(32, 96, vb.pp("c_attn"))?.forward(&y)?.reshape((1, 6, 3, 2, 16))?;
        let [q, k, v] = [0, 1, 2].map(|n| qkv.get_on_dim(2, n));
        let y = Attention::default().causal(true).apply(&q?, &k?, &v?)?.flatten_from(2)?;
        x = (x + linear(32, 32, vb.pp("c_proj"))?.forward(&y)?)?;
        let y = norm(&layer_norm(32, 1e-5, vb.pp("ln_2"))?, &x)?;
        let y = linear(32, 128, vb.pp("mlp.c_fc"))?.forward(&y)?.gelu()?;
        x = (x + linear(128, 32, vb.pp("mlp.c_proj"))?.forward(&y)?)?;
    }
    let logits = linear(32, 5, vb.pp("head"))?.forward(&x)?.flatten(0, 1)?;
    let targets = Tensor::new(&[4u32, 2, 3, 0, 2, 1], &device)?;
    Ok((vars, cross_entropy(&logits, &targets, CrossEntropy::default())?))
}

#[test]
fn layer_norm_of_candle_nn_leaves_8_of_28_weights_without_a_gradient() -> Result<()> {
    let (vars, loss) = gpt(|norm, x| norm.forward(x))?;
    assert_eq!(vars.all_vars().len(), 28);
    let expected = [
        "h.0.ln_1.bias",
        "h.0.ln_1.weight",
        "h.0.ln_2.bias",
        "h.0.ln_2.weight",
        "h.1.ln_1.bias",
        "h.1.ln_1.weight",
        "h.1.ln_2.bias",
        "h.1.ln_2.weight",
    ];
    assert_eq!(untrained(&vars, &loss.backward()?), expected);

    // The same formula in candle's operators.
    let (vars, loss) = gpt(|norm, x| {
        let bias = norm.bias().expect("a bias");
        candle_nn::ops::layer_norm_slow(x, norm.weight(), bias, norm.eps() as f32)
    })?;
    assert_eq!(untrained(&vars, &loss.backward()?), [""; 0]);
    Ok(())
}
