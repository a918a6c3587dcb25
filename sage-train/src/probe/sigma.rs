//! Measures the errors of an attention scheme on random tensors, as in Table 1 of arXiv 2603.02170.

use candle_core::{DType, Device, Tensor, Var};
use candle_sage::{Attention, Result, SageBwd, Scheme};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};
use serde::Serialize;

use super::anatomy::{Anatomy, Inputs, QuantizedParts};
use super::measures::Sums;
use super::sagebwd::SageBwdAnatomy;
use crate::during;
use crate::metrics::Distance;

/// The shape of the random tensors; attention is causal.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Tokens.
    pub tokens: usize,
    /// Heads, each an independent sample.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Seed of the values.
    pub seed: u64,
}

/// The errors at one sigma.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct SigmaRow {
    /// Standard deviation of Q and K; it is 1 for V and dO.
    pub sigma: f64,
    /// Errors of O, dQ, dK, dV.
    pub errors: [Distance; 4],
}

/// The errors of [`Attention`] with a scheme on a device, against exact attention in f64. Inputs are in f32 on the CPU
/// and in bf16 on a GPU.
///
/// # Errors
/// When the device does not support the shape, or memory is short.
pub fn sigma_table(scheme: Scheme, sigmas: &[f64], shape: Shape, device: &Device) -> Result<Vec<SigmaRow>> {
    let row = |&sigma: &f64| at(scheme, sigma, shape, device).map(|errors| SigmaRow { sigma, errors });
    sigmas.iter().map(row).collect::<candle_core::Result<_>>().map_err(during("cannot measure attention"))
}

fn at(scheme: Scheme, sigma: f64, shape: Shape, device: &Device) -> candle_core::Result<[Distance; 4]> {
    let Shape { tokens, heads, head_dim, seed } = shape;
    let dtype = if device.is_cpu() { DType::F32 } else { DType::BF16 };
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut draw = |sigma: f64| {
        let mut sample = || -> f64 { StandardNormal.sample(&mut rng) };
        let values: Vec<f64> = (0..tokens * heads * head_dim).map(|_| sigma * sample()).collect();
        // The values are rounded to the type of the inputs, so that exact and measured attention read the same values.
        Tensor::from_vec(values, (1, tokens, heads, head_dim), &Device::Cpu)?.to_dtype(dtype)
    };
    let tensors = [draw(sigma)?, draw(sigma)?, draw(1.0)?, draw(1.0)?];
    let var = |n: usize| Var::from_tensor(&tensors[n].to_device(device)?);
    let [q, k, v] = [var(0)?, var(1)?, var(2)?];
    let out = Attention::new(scheme).causal(true).apply(&q, &k, &v)?;
    let grads = (&out * &tensors[3].to_device(device)?)?.sum_all()?.backward()?;
    let grad =
        |var: &Var| grads.get(var).cloned().ok_or_else(|| candle_core::Error::Msg("no gradient".into()));
    let got = [out.detach(), grad(&q)?, grad(&k)?, grad(&v)?];
    let mut sums = [Sums::default(); 4];
    for head in 0..heads {
        let rows = |x: &Tensor| super::head_of(&x.to_device(&Device::Cpu)?, 0, head);
        let [q, k, v, dout] = &tensors;
        let inputs = Inputs { rows: [rows(q)?, rows(k)?, rows(v)?, rows(dout)?], tokens, head_dim };
        let exact = SageBwdAnatomy { settings: SageBwd::default(), token_scales: false };
        let exact = exact.compute(&inputs, QuantizedParts::None)?;
        let [dq, dk, dv] = &exact.gradients;
        for (n, exact) in [&exact.o, dq, dk, dv].into_iter().enumerate() {
            sums[n].add(Sums::of(&rows(&got[n])?, exact));
        }
    }
    Ok(sums.map(|sums| sums.distance()))
}
