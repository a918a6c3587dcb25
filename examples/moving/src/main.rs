//! Moves Llama, Mistral, Qwen2, Gemma, Gemma 2 and BERT from candle-transformers to candle-sage, as docs/moving.md
//! describes. Compares each model before and after the move, with the same weights: the outputs, and the number of
//! weights that get no gradient.
//!
//! `cargo run --release -p moving`

mod bert;
mod model;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Activation, VarBuilder, VarMap};
use candle_sage::untrained;
use candle_transformers::models::{gemma, gemma2, llama, mistral, qwen2};

use model::{Family, Model, Move, Sizes};

/// Number of tokens in the prompt.
const PROMPT: usize = 24;
/// Number of tokens that are decoded after the prompt, one at a time.
const MORE: usize = 4;

/// Returns the next token's logits. Arguments: token ids, and the position of the first of these tokens.
type Forward = Box<dyn FnMut(&Tensor, usize) -> Result<Tensor>>;

fn llama_config(sizes: Sizes) -> llama::Config {
    llama::Config {
        hidden_size: sizes.width,
        intermediate_size: sizes.hidden,
        vocab_size: sizes.vocabulary,
        num_hidden_layers: sizes.layers,
        num_attention_heads: sizes.heads,
        num_key_value_heads: sizes.key_heads,
        use_flash_attn: false,
        rms_norm_eps: sizes.eps,
        rope_theta: sizes.base,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: None,
        max_position_embeddings: sizes.positions,
        tie_word_embeddings: false,
    }
}

fn mistral_config(sizes: Sizes) -> mistral::Config {
    mistral::Config {
        vocab_size: sizes.vocabulary,
        hidden_size: sizes.width,
        intermediate_size: sizes.hidden,
        num_hidden_layers: sizes.layers,
        num_attention_heads: sizes.heads,
        head_dim: None,
        num_key_value_heads: sizes.key_heads,
        hidden_act: Activation::Silu,
        max_position_embeddings: sizes.positions,
        rms_norm_eps: sizes.eps,
        rope_theta: f64::from(sizes.base),
        sliding_window: sizes.window,
        use_flash_attn: false,
    }
}

fn qwen2_config(sizes: Sizes) -> qwen2::Config {
    qwen2::Config {
        vocab_size: sizes.vocabulary,
        hidden_size: sizes.width,
        intermediate_size: sizes.hidden,
        num_hidden_layers: sizes.layers,
        num_attention_heads: sizes.heads,
        num_key_value_heads: sizes.key_heads,
        max_position_embeddings: sizes.positions,
        // The mask of candle-transformers' Qwen2 always has a window.
        sliding_window: sizes.positions,
        max_window_layers: sizes.layers,
        tie_word_embeddings: true,
        rope_theta: f64::from(sizes.base),
        rms_norm_eps: sizes.eps,
        use_sliding_window: false,
        hidden_act: Activation::Silu,
    }
}

fn gemma_config(sizes: Sizes) -> gemma::Config {
    gemma::Config {
        attention_bias: false,
        head_dim: sizes.head_dim,
        hidden_act: None,
        hidden_activation: Some(Activation::GeluPytorchTanh),
        hidden_size: sizes.width,
        intermediate_size: sizes.hidden,
        num_attention_heads: sizes.heads,
        num_hidden_layers: sizes.layers,
        num_key_value_heads: sizes.key_heads,
        rms_norm_eps: sizes.eps,
        rope_theta: f64::from(sizes.base),
        vocab_size: sizes.vocabulary,
        max_position_embeddings: sizes.positions,
    }
}

fn gemma2_config(sizes: Sizes) -> gemma2::Config {
    gemma2::Config {
        attention_bias: false,
        head_dim: sizes.head_dim,
        hidden_activation: Activation::GeluPytorchTanh,
        hidden_size: sizes.width,
        intermediate_size: sizes.hidden,
        num_attention_heads: sizes.heads,
        num_hidden_layers: sizes.layers,
        num_key_value_heads: sizes.key_heads,
        rms_norm_eps: sizes.eps,
        rope_theta: f64::from(sizes.base),
        vocab_size: sizes.vocabulary,
        final_logit_softcapping: sizes.softcaps.map(|(_, cap)| cap),
        attn_logit_softcapping: sizes.softcaps.map(|(cap, _)| cap),
        query_pre_attn_scalar: sizes.head_dim,
        sliding_window: None,
        max_position_embeddings: sizes.positions,
    }
}

/// The model of candle-transformers.
fn theirs(sizes: Sizes, vb: VarBuilder<'_>) -> Result<Forward> {
    let forward: Forward = match sizes.family {
        Family::Llama => {
            let config = llama_config(sizes);
            let model = llama::Llama::load(vb, &config)?;
            let mut cache = llama::Cache::new(true, DType::F32, &config, &Device::Cpu)?;
            Box::new(move |ids: &Tensor, position: usize| model.forward(ids, position, &mut cache))
        }
        Family::Qwen2 => {
            let mut model = qwen2::ModelForCausalLM::new(&qwen2_config(sizes), vb)?;
            Box::new(move |ids: &Tensor, position: usize| model.forward(ids, position))
        }
        Family::Mistral => {
            let mut model = mistral::Model::new(&mistral_config(sizes), vb)?;
            Box::new(move |ids: &Tensor, position: usize| model.forward(ids, position))
        }
        Family::Gemma2 => {
            let mut model = gemma2::Model::new(false, &gemma2_config(sizes), vb)?;
            Box::new(move |ids: &Tensor, position: usize| model.forward(ids, position))
        }
        Family::Gemma => {
            let mut model = gemma::Model::new(false, &gemma_config(sizes), vb)?;
            Box::new(move |ids: &Tensor, position: usize| model.forward(ids, position))
        }
    };
    Ok(forward)
}

/// Random numbers from -1 to 1 (SplitMix64), the same in every run.
struct Uniform(u64);

impl Uniform {
    fn draw(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// Fills every variable with random values: norm weights around 1, and matrices that preserve their input's variance.
fn fill(vars: &VarMap) -> Result<()> {
    let data = vars.data().lock().expect("no panic elsewhere");
    let mut named: Vec<(&String, &Var)> = data.iter().collect();
    named.sort_by(|a, b| a.0.cmp(b.0));
    let mut uniform = Uniform(42);
    for (name, var) in named {
        let (center, spread) = match (name.contains("norm"), var.dims()) {
            (true, _) => (1.0, 0.5),
            (false, [_, inputs]) => (0.0, (3.0 / *inputs as f32).sqrt()),
            (false, _) => (0.0, 0.5),
        };
        let values: Vec<f32> = (0..var.elem_count()).map(|_| center + spread * uniform.draw()).collect();
        var.set(&Tensor::from_vec(values, var.dims(), &Device::Cpu)?)?;
    }
    Ok(())
}

fn largest(x: &Tensor) -> Result<f32> {
    x.abs()?.max_all()?.to_scalar::<f32>()
}

/// Computes the largest difference between the logits of `ours` and `theirs`, divided by the largest logit of `theirs`,
/// for a prompt and for each token decoded after it. Returns the maximum of these ratios.
fn apart(ids: &Tensor, ours: &mut Model, mut theirs: Forward, sizes: Sizes) -> Result<f32> {
    let mut worst: f32 = 0.0;
    // candle-transformers' Mistral ignores its window during decoding.
    let more = if sizes.window.is_none() { MORE } else { 0 };
    for position in [0].into_iter().chain(PROMPT..PROMPT + more) {
        let next = ids.narrow(1, position, if position == 0 { PROMPT } else { 1 })?.contiguous()?;
        let got = ours.forward(&next, position, true)?.flatten_all()?;
        let expected = theirs(&next, position)?.flatten_all()?;
        worst = worst.max(largest(&(got - &expected)?)? / largest(&expected)?);
    }
    Ok(worst)
}

fn main() -> Result<()> {
    println!("{:<8}{:>14}{:>14}   weights without a gradient", "", "heads first", "whole layer");
    for family in [Family::Llama, Family::Mistral, Family::Qwen2, Family::Gemma, Family::Gemma2] {
        let (sizes, vars) = (Sizes::of(family), VarMap::new());
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
        // The first model creates the variables.
        drop(theirs(sizes, vb.clone())?);
        fill(&vars)?;
        let ids: Vec<u32> =
            (0..PROMPT + MORE).map(|n| (7 * n * n + 3 * n + 1) as u32 % sizes.vocabulary as u32).collect();
        let ids = Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?;
        let mut line = format!("{:<8}", format!("{family:?}").to_lowercase());
        let mut here = Vec::new();
        for made in [Move::HeadsFirst, Move::WholeLayer] {
            let mut ours = Model::new(sizes, made, vb.clone())?;
            let distance = apart(&ids, &mut ours, theirs(sizes, vb.clone())?, sizes)?;
            // Both models sum the same f32 products, in different orders, and round rotary angles differently.
            // The largest angle is 27, the last position: its rounding error is at most 27 * 2^-24 = 1.6e-6.
            assert!(distance < 5e-6, "{family:?}, {made:?}: logits are {distance:.1e} apart");
            line += &format!("{distance:>14.1e}");
            let loss = ours.forward(&ids, 0, false)?.sqr()?.mean_all()?;
            here = untrained(&vars, &loss.backward()?);
            assert!(here.is_empty(), "{family:?}, {made:?}: no gradient reaches {here:?}");
        }
        let loss = theirs(sizes, vb.clone())?(&ids, 0)?.sqr()?.mean_all()?;
        let there = untrained(&vars, &loss.backward()?);
        println!("{line}   {} of {}, there {}", here.len(), vars.all_vars().len(), there.len());
    }
    bert::compare()
}
