//! Compares the model's hand-written backward with candle's autograd over the modules of `candle_sage::nn`.

mod cuda;
mod decoding;
mod parts;

use std::collections::HashMap;

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::VarBuilder;
use candle_sage::nn::{
    Biases, FeedForward, RmsNorm, Rotary, SelfAttention, SelfAttentionConfig, SparseLinearAttention,
};
use candle_sage::ops::{Alpha, CrossEntropy, RopeStyle, Tail, embedding, linear_cross_entropy};
use candle_sage::shape::Packing;
use candle_sage::{Attention, AttnQat, SageBwd, Scheme, Sla2};
use sage_train::config::Config;
use sage_train::model::{
    Choice, Input, Llama, LlamaConfig, Parameters, Recompute, Sla2Config, Stage, Training, Windows,
};
use sage_train::ranks::Ranks;
use sage_train::settings::Settings;

fn drawn(config: &LlamaConfig, device: &Device, dtype: DType) -> Result<Parameters> {
    let ranks = Ranks::alone();
    let training = Training::of_gradients(&ranks);
    Ok(Parameters::init(config.parameter_specs(), 7, training, device, dtype)?)
}

fn config() -> LlamaConfig {
    let config = Config::resolve(Settings::default()).expect("defaults").model;
    LlamaConfig {
        layers: 3,
        vocab: 300,
        width: 64,
        heads: 4,
        key_heads: 2,
        head_dim: 16,
        ffn: 96,
        context: 48,
        ..config
    }
}

/// Weight matrices with the same input, such as those of Q, K and V, are stored without padding between them, also if
/// their sizes are not multiples of the alignment.
#[test]
fn matrices_of_one_input_are_one() -> Result<()> {
    let config = LlamaConfig { width: 36, heads: 3, key_heads: 1, head_dim: 10, ffn: 7, ..config() };
    let parameters = drawn(&config, &Device::Cpu, DType::F32)?;
    let at = |name: &str| format!("model.layers.1.{name}.weight");
    let together = |names: &[&str]| -> Result<()> {
        let names: Vec<String> = names.iter().map(|name| at(name)).collect();
        let each = names.iter().map(|name| parameters.weight(name)?.value()).collect::<Result<Vec<_>>>()?;
        let (got, expected) = (parameters.joined(&names)?.value()?.clone(), Tensor::cat(&each, 0)?);
        assert_eq!(got.to_vec2::<f32>()?, expected.to_vec2::<f32>()?);
        Ok(())
    };
    together(&["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"])?;
    together(&["mlp.gate_proj", "mlp.up_proj"])?;
    assert!(parameters.joined(&[at("mlp.gate_proj"), at("mlp.down_proj")]).is_err());
    Ok(())
}

fn batch(config: &LlamaConfig, device: &Device) -> Result<(Tensor, Tensor)> {
    let ids = |shift: u32| {
        (0..2 * 40u32).map(|n| ((n + shift) * 37 + n / 7) % config.vocab as u32).collect::<Vec<_>>()
    };
    Ok((Tensor::from_vec(ids(0), (2, 40), device)?, Tensor::from_vec(ids(1), (2, 40), device)?))
}

/// Loss and gradients from candle's autograd.
fn graph(config: &LlamaConfig, parameters: &Parameters) -> Result<(f32, HashMap<String, Tensor>)> {
    let device = &Device::Cpu;
    let vars = parameters
        .specs()
        .iter()
        .map(|spec| Ok((spec.name.clone(), Var::from_tensor(&parameters.weight(&spec.name)?.value()?)?)))
        .collect::<Result<HashMap<_, _>>>()?;
    let tensors = vars.iter().map(|(name, var)| (name.clone(), var.as_tensor().clone())).collect();
    let vb = VarBuilder::from_tensors(tensors, DType::F32, device).pp("model");
    let (ids, targets) = batch(config, device)?;
    let table = vars["model.embed_tokens.weight"].as_tensor();
    let rotary = Rotary::new(config.context, config.head_dim, config.rope_base, RopeStyle::Halves, device)?;
    let mut x = embedding(table, &ids)?;
    for layer in 0..config.layers {
        let vb = vb.pp("layers").pp(layer);
        let norm = |name: &str| RmsNorm::load(config.width, config.norm_eps, vb.pp(name));
        if let Some(scheme) = config.scheme {
            let shape = SelfAttentionConfig::new(config.width, config.heads, config.head_dim)
                .key_heads(config.key_heads)
                .qk_norm(config.qk_norm.then_some(config.norm_eps))
                .biases(if config.qkv_bias { Biases::QueryKeyValue } else { Biases::None });
            let normed = norm("input_layernorm")?.forward(&x)?;
            let at = vb.pp("self_attn");
            let y = match &config.sla2 {
                None => {
                    let attention = Attention::new(scheme).causal(true);
                    SelfAttention::load(shape, attention, at)?.forward(&normed, &rotary)?
                }
                Some(sla2) => {
                    let op =
                        Sla2::new(scheme).blocks(sla2.blocks).block((sla2.block, sla2.block)).causal(true);
                    SparseLinearAttention::load(shape, op, at)?.forward(&normed, &rotary)?
                }
            };
            x = (&x + y)?;
        }
        let mlp = FeedForward::load(config.width, config.ffn, vb.pp("mlp"))?;
        x = (&x + mlp.forward(&norm("post_attention_layernorm")?.forward(&x)?)?)?;
    }
    let hidden = RmsNorm::load(config.width, config.norm_eps, vb.pp("norm"))?.forward(&x)?.flatten(0, 1)?;
    let output = if config.untied { vars["lm_head.weight"].as_tensor() } else { table };
    let loss = linear_cross_entropy(&hidden, output, &targets.flatten_all()?, CrossEntropy::default())?;
    let grads = loss.backward()?;
    let gradients =
        // A router has no gradient, because the selection is not differentiable.
        vars.iter().filter_map(|(name, var)| Some((name.clone(), grads.get(var)?.clone()))).collect();
    Ok((loss.to_scalar()?, gradients))
}

fn relative(got: &Tensor, expected: &Tensor) -> Result<f64> {
    let norm = |t: &Tensor| t.to_dtype(DType::F64)?.sqr()?.sum_all()?.to_scalar::<f64>();
    let (got, expected) = (got.to_device(&Device::Cpu)?, expected.to_device(&Device::Cpu)?);
    Ok((norm(&(got - &expected)?)? / norm(&expected)?).sqrt())
}

/// After three layers, the relative error of f32 sums in another order is at most 1e-5.
const LIMIT: f64 = 1e-5;

#[test]
fn gradients_are_those_of_the_graph() -> Result<()> {
    let sage = Some(SageBwd::default().into());
    let qat = Some(AttnQat::default().into());
    // Scheme, QK-norm, a separate output matrix, biases.
    let settings = [
        (Some(Scheme::Unquantized), true, false, false),
        (Some(Scheme::Unquantized), false, true, true),
        (sage, true, false, true),
        (qat, true, true, false),
        (None, true, false, false),
    ];
    for (scheme, qk_norm, untied, qkv_bias) in settings {
        for recompute in [Recompute::None, Recompute::Rotary, Recompute::Attention, Recompute::Block] {
            let config = LlamaConfig { scheme, qk_norm, untied, qkv_bias, recompute, ..config() };
            let parameters = drawn(&config, &Device::Cpu, DType::F32)?;
            let (expected_loss, expected) = graph(&config, &parameters)?;
            let model = Llama::new(&config, &parameters, &Device::Cpu)?;
            let (ids, targets) = batch(&config, &Device::Cpu)?;
            let loss = model.loss(&ids, &targets)?.to_scalar::<f32>()?;
            assert!((loss / expected_loss - 1.0).abs() < 1e-6, "{loss} {expected_loss}");
            // Twice, because gradients accumulate.
            for times in [1.0, 2.0] {
                assert_eq!(model.train(&ids, &targets)?.to_scalar::<f32>()?, loss);
                for (name, expected) in &expected {
                    let got = parameters.weight(name)?.gradient()?.clone();
                    let error = relative(&got, &(expected * times)?)?;
                    assert!(error < LIMIT, "{name} x {times}, {scheme:?}, {recompute:?}: {error:.1e}");
                }
            }
            // After a reset, gradients do not include the old sums.
            parameters.clear_gradients()?;
            model.train(&ids, &targets)?;
            for (name, expected) in &expected {
                let error = relative(&parameters.weight(name)?.gradient()?.clone(), expected)?;
                assert!(error < LIMIT, "{name} after a reset: {error:.1e}");
            }
        }
    }
    Ok(())
}

/// SLA2 with blocks of 16 tokens in sequences of 40: the third query block selects one of two candidates.
fn with_sla2() -> LlamaConfig {
    let sla2 = Sla2Config {
        blocks: 1,
        nearest: 0,
        block: 16,
        choice: Choice::Learned,
        tail: Some(Tail::Past),
        alpha: Alpha::Count,
        dense_steps: 0,
        router_steps: 0,
    };
    LlamaConfig { scheme: Some(Scheme::Unquantized), sla2: Some(sla2), ..config() }
}

#[test]
fn gradients_of_sla2_are_those_of_the_graph() -> Result<()> {
    for recompute in [Recompute::None, Recompute::Rotary, Recompute::Attention, Recompute::Block] {
        let config = LlamaConfig { recompute, ..with_sla2() };
        let parameters = drawn(&config, &Device::Cpu, DType::F32)?;
        let (expected_loss, expected) = graph(&config, &parameters)?;
        assert!(expected.contains_key("model.layers.0.self_attn.theta"));
        let model = Llama::new(&config, &parameters, &Device::Cpu)?;
        let (ids, targets) = batch(&config, &Device::Cpu)?;
        let loss = model.train(&ids, &targets)?.to_scalar::<f32>()?;
        assert!((loss / expected_loss - 1.0).abs() < 1e-6, "{loss} {expected_loss}");
        for (name, expected) in &expected {
            let error = relative(&parameters.weight(name)?.gradient()?.clone(), expected)?;
            assert!(error < LIMIT, "{name}, {recompute:?}: {error:.1e}");
        }
        // The router is the identity and gets no gradient. Dense attention has another loss than SLA2.
        let router = parameters.weight("model.layers.1.self_attn.q_router.weight")?;
        assert_eq!(router.gradient()?.abs()?.max_all()?.to_scalar::<f32>()?, 0.0);
        assert_eq!(
            router.value()?.get(1)?.to_vec2::<f32>()?,
            Tensor::eye(16, DType::F32, &Device::Cpu)?.to_vec2::<f32>()?
        );
        let mut dense = model.clone();
        dense.set_stage(Stage::Dense);
        assert!(dense.loss(&ids, &targets)?.to_scalar::<f32>()? != loss);
    }
    Ok(())
}

/// In [`Stage::Router`] the router and `theta` (which sets the weight of the selected blocks) receive gradients. The
/// loss and all other gradients are those of dense attention.
#[test]
fn the_routers_stage_is_dense_attention_that_teaches() -> Result<()> {
    let config = with_sla2();
    let (ids, targets) = batch(&config, &Device::Cpu)?;
    let run = |stage| -> Result<(f32, Vec<(String, Tensor)>)> {
        let parameters = drawn(&config, &Device::Cpu, DType::F32)?;
        let mut model = Llama::new(&config, &parameters, &Device::Cpu)?;
        model.set_stage(stage);
        let loss = model.train(&ids, &targets)?.to_scalar()?;
        let names = parameters.specs().iter().map(|spec| spec.name.clone());
        let gradients = names.map(|name| Ok((name.clone(), parameters.weight(&name)?.gradient()?.copy()?)));
        Ok((loss, gradients.collect::<Result<_>>()?))
    };
    let ((loss, gradients), (dense_loss, dense)) = (run(Stage::Router)?, run(Stage::Dense)?);
    assert_eq!(loss, dense_loss);
    for ((name, got), (_, dense)) in gradients.iter().zip(&dense) {
        let size = |t: &Tensor| t.abs()?.max_all()?.to_scalar::<f32>();
        if name.contains("router") || name.contains("theta") {
            assert!(size(got)? > 0.0 && size(dense)? == 0.0, "{name}");
        } else {
            assert_eq!(size(&(got - dense)?)?, 0.0, "{name}");
        }
    }
    Ok(())
}

/// The gradient of each layer's sinks equals fourth-order finite differences of the loss with steps of .1. Their
/// truncation error is below .01 of the gradient. Their rounding error is a few times 2^-24 times 8 (losses are below
/// 8), divided by .1.
#[test]
fn sinks_have_the_gradient_of_the_loss() -> Result<()> {
    let device = &Device::Cpu;
    for (packed, recompute) in [(false, Recompute::None), (true, Recompute::Rotary)] {
        let (scheme, softcap) = (Some(Scheme::Unquantized), Some(5.0));
        let config = LlamaConfig {
            scheme,
            softcap,
            sinks: true,
            init_std: 0.15,
            z_loss: 0.0,
            recompute,
            qk_norm: true,
            ..config()
        };
        let parameters = drawn(&config, device, DType::F32)?;
        let model = Llama::new(&config, &parameters, device)?;
        let (ids, targets) = batch(&config, device)?;
        let documents = packed.then(|| Packing::self_attention(vec![0, 5, 40, 50, 80]));
        let input = Input { ids: &ids, documents: documents.as_ref() };
        parameters.clear_gradients()?;
        model.train(input, &targets)?;
        for layer in 0..config.layers {
            let sinks = parameters.weight(&format!("model.layers.{layer}.self_attn.sinks"))?;
            let got = sinks.gradient()?.to_vec1::<f32>()?;
            let value = sinks.value()?;
            let loss_at = |head: usize, sink: f32| -> Result<f64> {
                value.slice_set(&Tensor::new(&[sink], device)?, 0, head)?;
                let loss = model.loss(input, &targets)?.to_scalar::<f32>()?;
                value.slice_set(&Tensor::new(&[0f32], device)?, 0, head)?;
                Ok(f64::from(loss))
            };
            for (head, got) in got.into_iter().enumerate() {
                let over =
                    |step: f32| Ok::<_, candle_core::Error>(loss_at(head, step)? - loss_at(head, -step)?);
                let expected = (8.0 * over(0.1)? - over(0.2)?) / 1.2;
                let error = (f64::from(got) - expected).abs();
                assert!(
                    error < 2e-5 + 0.01 * expected.abs(),
                    "layer {layer}, head {head}: {got:e}, {expected:e}"
                );
            }
        }
    }
    Ok(())
}

/// Packed documents in a sequence give the same loss and gradients as separate documents, with and without
/// recomputation.
fn documents_apart(device: &Device, dtype: DType, schemes: &[(Scheme, f64)]) -> Result<()> {
    for &(scheme, limit) in schemes {
        for recompute in [Recompute::None, Recompute::Block] {
            // In the second layer a window of 37 tokens hides the first tokens of the last document (62 tokens) from
            // its last tokens.
            let windows = Some(Windows { tokens: 37, pattern: "LS".parse().expect("a pattern") });
            let softcap = (scheme == Scheme::Unquantized).then_some(1.5);
            let config =
                LlamaConfig { scheme: Some(scheme), recompute, context: 100, windows, softcap, ..config() };
            let parameters = drawn(&config, device, dtype)?;
            let model = Llama::new(&config, &parameters, device)?;
            let tokens = |seed: u32| Tensor::from_iter((0..100u32).map(|n| (n * 31 + seed) % 250), device);
            let (ids, targets) = (tokens(3)?.unsqueeze(0)?, tokens(17)?.unsqueeze(0)?);
            let bounds = [0, 1, 38, 100];
            let names: Vec<String> = parameters.specs().iter().map(|spec| spec.name.clone()).collect();
            let gradients = || -> Result<Vec<Tensor>> {
                names.iter().map(|name| parameters.weight(name)?.gradient()?.copy()).collect()
            };
            let (mut loss, mut sums) = (0.0, None::<Vec<Tensor>>);
            for pair in bounds.windows(2) {
                let (start, len) = (pair[0], pair[1] - pair[0]);
                parameters.clear_gradients()?;
                let part = |t: &Tensor| t.narrow(1, start, len)?.contiguous();
                let share = len as f64 / 100.0;
                loss += share * f64::from(model.train(&part(&ids)?, &part(&targets)?)?.to_scalar::<f32>()?);
                let scaled = gradients()?.iter().map(|g| g * share).collect::<Result<Vec<_>>>()?;
                sums = Some(match sums {
                    None => scaled,
                    Some(sums) => sums.iter().zip(&scaled).map(|(a, b)| a + b).collect::<Result<_>>()?,
                });
            }
            parameters.clear_gradients()?;
            let documents = Packing::self_attention(bounds.to_vec());
            let input = Input { ids: &ids, documents: Some(&documents) };
            let got = f64::from(model.train(input, &targets)?.to_scalar::<f32>()?);
            assert!((got / loss - 1.0).abs() < limit, "{scheme:?}: {got} {loss}");
            assert!((f64::from(model.loss(input, &targets)?.to_scalar::<f32>()?) / loss - 1.0).abs() < limit);
            for ((name, got), expected) in names.iter().zip(gradients()?).zip(sums.expect("parts")) {
                let error = relative(&got, &expected)?;
                assert!(error < limit, "{name}, {scheme:?}, {recompute:?}: {error:.1e}");
            }
            // Attention across documents gives another loss.
            let across = f64::from(model.loss(&ids, &targets)?.to_scalar::<f32>()?);
            assert!((across / loss - 1.0).abs() > 1e-4, "{across} {loss}");
        }
    }
    Ok(())
}

#[test]
fn documents_in_a_sequence_are_as_good_as_alone() -> Result<()> {
    // Packed documents have other rotary angles than separate documents, so INT8 values round differently. The limit is
    // the error of INT8 itself: a few per cent of a gradient, and more for the gradient of q_norm, which is a small
    // difference of large sums.
    let sage = SageBwd::default().into();
    documents_apart(&Device::Cpu, DType::F32, &[(Scheme::Unquantized, LIMIT), (sage, 0.1)])
}

#[test]
fn the_z_loss_is_in_training_and_not_in_validation() -> Result<()> {
    let (plain, raised) = (config(), LlamaConfig { z_loss: 0.1, ..config() });
    let parameters = drawn(&plain, &Device::Cpu, DType::F32)?;
    let (ids, targets) = batch(&plain, &Device::Cpu)?;
    let losses = |config: &LlamaConfig| -> Result<(f32, f32)> {
        let model = Llama::new(config, &parameters, &Device::Cpu)?;
        Ok((model.train(&ids, &targets)?.to_scalar()?, model.loss(&ids, &targets)?.to_scalar()?))
    };
    let (plain, raised) = (losses(&plain)?, losses(&raised)?);
    assert_eq!((plain.0, plain.1), (plain.1, raised.1));
    // At initialization the log-sum-exp is close to the log-sum-exp of equal logits.
    let lse = f64::from(config().vocab as u32).ln();
    let expected = 0.1 * lse * lse;
    assert!((f64::from(raised.0 - plain.0) / expected - 1.0).abs() < 0.1, "{raised:?} {plain:?} {expected}");
    Ok(())
}

#[test]
fn a_gradient_that_is_not_finite_is_named() -> Result<()> {
    let config = config();
    let parameters = drawn(&config, &Device::Cpu, DType::F32)?;
    assert_eq!(parameters.first_non_finite()?, None);
    let name = "model.layers.1.mlp.up_proj.weight";
    let bad = Tensor::full(f32::NAN, (config.ffn, config.width), &Device::Cpu)?;
    candle_sage::ops::add_into(parameters.weight(name)?.gradient()?, &bad)?;
    assert_eq!(parameters.first_non_finite()?, Some(name));
    Ok(())
}
