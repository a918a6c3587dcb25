//! candle-transformers' Qwen3 with trainable attention: the same configuration, weights and logits; then some training
//! steps with INT8 attention, and text generation with a cache.
//!
//! `cargo run --release -p qwen3` creates a small byte-level model with random weights.
//! `cargo run --release -p qwen3 -- FOLDER` loads Qwen3-0.6B, or another size, from the folder's config.json,
//! tokenizer.json and model.safetensors.

mod model;

use std::path::Path;

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use candle_sage::{Attention, SageBwd, Scheme, untrained};
use candle_transformers::models::qwen3::{Config, ModelForCausalLM};
use tokenizers::Tokenizer;

use model::Qwen3;

const TEXT: &str = "The keeper of the lighthouse wrote the weather into her book every evening: the wind, the clouds, \
                    the height of the waves, and which ships had passed. ";

/// Converts text to ids and back: with the tokenizer of the model's folder, or as bytes.
struct TextCodec(Option<Tokenizer>);

impl TextCodec {
    fn ids(&self, text: &str) -> Result<Vec<u32>> {
        match &self.0 {
            None => Ok(text.bytes().map(u32::from).collect()),
            Some(tokenizer) => {
                Ok(tokenizer.encode(text, false).map_err(candle_core::Error::wrap)?.get_ids().to_vec())
            }
        }
    }

    fn text(&self, ids: &[u32]) -> Result<String> {
        match &self.0 {
            None => {
                Ok(String::from_utf8_lossy(&ids.iter().map(|&id| id as u8).collect::<Vec<_>>()).into_owned())
            }
            Some(tokenizer) => tokenizer.decode(ids, true).map_err(candle_core::Error::wrap),
        }
    }
}

fn small() -> Config {
    Config {
        vocab_size: 256,
        hidden_size: 64,
        intermediate_size: 192,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        head_dim: 32,
        attention_bias: false,
        num_key_value_heads: 2,
        max_position_embeddings: 512,
        sliding_window: None,
        max_window_layers: 2,
        tie_word_embeddings: true,
        rope_theta: 1e6,
        rms_norm_eps: 1e-6,
        use_sliding_window: false,
        hidden_act: candle_nn::Activation::Silu,
    }
}

fn open(folder: Option<&Path>) -> Result<(Config, TextCodec)> {
    let Some(folder) = folder else { return Ok((small(), TextCodec(None))) };
    let config = std::fs::read(folder.join("config.json"))?;
    let config = serde_json::from_slice(&config).map_err(candle_core::Error::wrap)?;
    let tokenizer = Tokenizer::from_file(folder.join("tokenizer.json")).map_err(candle_core::Error::wrap)?;
    Ok((config, TextCodec(Some(tokenizer))))
}

/// Replaces the weights of a new model by the weights in a folder.
fn load(folder: &Path, vars: &VarMap) -> Result<()> {
    let file = folder.join("model.safetensors");
    let tensors = candle_core::safetensors::load(&file, &Device::Cpu)?;
    for (name, var) in vars.data().lock().expect("nobody panicked").iter() {
        let Some(tensor) = tensors.get(name) else { candle_core::bail!("no {name} in {}", file.display()) };
        var.set(&tensor.to_dtype(DType::F32)?)?;
    }
    Ok(())
}

fn greedy(
    prompt: &[u32],
    tokens: usize,
    mut next: impl FnMut(&[u32], usize) -> Result<Tensor>,
) -> Result<Vec<u32>> {
    let mut ids = prompt.to_vec();
    let mut seen = 0;
    while ids.len() < prompt.len() + tokens {
        let logits = next(&ids[seen..], seen)?;
        seen = ids.len();
        ids.push(logits.argmax(D::Minus1)?.to_scalar()?);
    }
    Ok(ids)
}

fn main() -> Result<()> {
    let folder = std::env::args().nth(1);
    let folder = folder.as_deref().map(Path::new);
    let device = Device::Cpu;
    let (config, words) = open(folder)?;
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device);

    // These two models and `theirs`, the model of candle-transformers, have the same weights.
    let int8 = Qwen3::new(&config, &Attention::new(SageBwd::default()).causal(true), vb.clone())?;
    let exact = Qwen3::new(&config, &Attention::new(Scheme::Unquantized).causal(true), vb.clone())?;
    if let Some(folder) = folder {
        load(folder, &vars)?;
    }
    let mut theirs = ModelForCausalLM::new(&config, vb)?;

    let prompt = words.ids(&TEXT[..60])?;
    let ours = exact.next(&prompt, &mut exact.caches(64), &device)?;
    let expected = theirs.forward(&Tensor::new(&prompt[..], &device)?.unsqueeze(0)?, 0)?.flatten_all()?;
    let most = |x: &Tensor| x.abs()?.max_all()?.to_scalar::<f32>();
    let apart = most(&(ours - &expected)?)? / most(&expected)?;
    println!("logits against candle-transformers: {apart:.1e} apart");
    assert!(apart < 1e-4, "the models are not the same");

    let all = vars.all_vars();
    let reached =
        |loss: &Tensor| -> Result<usize> { Ok(all.len() - untrained(&vars, &loss.backward()?).len()) };
    let ids = words.ids(&TEXT.repeat(2))?;
    let len = ids.len().min(256) - 1;
    let batch = |from: usize| Tensor::new(&ids[from..from + len], &device)?.unsqueeze(0);
    let (input, targets) = (batch(0)?, batch(1)?);
    theirs.clear_kv_cache();
    let their_logits = theirs.forward(&input, 0)?;
    let (here, there) = (reached(&int8.loss(&input, &targets)?)?, reached(&their_logits.sqr()?.mean_all()?)?);
    println!("gradients reach {here} of {} weights, {there} in candle-transformers", all.len());
    assert_eq!(here, all.len());

    let rate = if folder.is_some() { 1e-5 } else { 3e-3 };
    let mut optimizer = AdamW::new(all.clone(), ParamsAdamW { lr: rate, ..Default::default() })?;
    let steps = if folder.is_some() { 5 } else { 60 };
    for step in 0..=steps {
        let loss = int8.loss(&input, &targets)?;
        if step % (steps / 5) == 0 {
            println!("step {step:>3}  loss {:.4}", loss.to_scalar::<f32>()?);
        }
        optimizer.backward_step(&loss)?;
    }

    // By default the attention layers compute the tokens after the prompt without quantization.
    let mut caches = int8.caches(128);
    let start = std::time::Instant::now();
    let ours = greedy(&prompt, 60, |ids, _| int8.next(ids, &mut caches, &device))?;
    println!("{:.0} tokens/s: {}", 60.0 / start.elapsed().as_secs_f64(), words.text(&ours)?);

    // Compares the text of `exact` with the text of candle-transformers' model. Both models use the trained weights.
    theirs.clear_kv_cache();
    let mut caches = exact.caches(128);
    let expected = greedy(&prompt, 60, |ids, seen| {
        theirs.forward(&Tensor::new(ids, &device)?.unsqueeze(0)?, seen)?.flatten_all()
    })?;
    let ours = greedy(&prompt, 60, |ids, _| exact.next(ids, &mut caches, &device))?;
    println!("the same text from candle-transformers: {}", ours == expected);
    // With weights from `folder`, two tokens may be almost equally likely, so that `ours` and `expected` differ.
    assert!(folder.is_some() || ours == expected, "decoding is not the same");
    Ok(())
}
