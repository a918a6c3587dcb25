//! A candle model with this crate's attention layer, trained on a task that needs attention: the last token is a
//! position, and the model predicts the token at this position.
//!
//! `cargo run --release -p candle-sage --example layer`

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{AdamW, Embedding, Optimizer, ParamsAdamW, VarBuilder, VarMap, embedding};
use candle_sage::nn::{FeedForward, Linear, RmsNorm, Rotary, SelfAttention, SelfAttentionConfig};
use candle_sage::ops::{CrossEntropy, RopeStyle, cross_entropy};
use candle_sage::{Attention, SageBwd};

const VOCAB: usize = 16;
const LEN: usize = 17;
const WIDTH: usize = 64;

struct Model {
    embedding: Embedding,
    norms: [RmsNorm; 2],
    attention: SelfAttention,
    mlp: FeedForward,
    head: Linear,
    rotary: Rotary,
}

impl Model {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        let config = SelfAttentionConfig::new(WIDTH, 4, 16).key_heads(2).qk_norm(1e-6);
        let int8 = Attention::new(SageBwd::default()).causal(true);
        Ok(Self {
            embedding: embedding(VOCAB, WIDTH, vb.pp("embedding"))?,
            norms: [RmsNorm::load(WIDTH, 1e-6, vb.pp("norm1"))?, RmsNorm::load(WIDTH, 1e-6, vb.pp("norm2"))?],
            attention: SelfAttention::load(config, int8, vb.pp("attention"))?,
            mlp: FeedForward::load(WIDTH, 128, vb.pp("mlp"))?,
            head: Linear::load(WIDTH, VOCAB, vb.pp("head"))?,
            rotary: Rotary::new(LEN, 16, 10_000.0, RopeStyle::Halves, vb.device())?,
        })
    }

    /// Logits of the last position.
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let x = self.embedding.forward(ids)?;
        let x = (&x + self.attention.forward(&self.norms[0].forward(&x)?, &self.rotary)?)?;
        let x = (&x + self.mlp.forward(&self.norms[1].forward(&x)?)?)?;
        self.head.forward(&x.narrow(1, LEN - 1, 1)?.squeeze(1)?)
    }
}

/// Sequences of random tokens, and an answer for each sequence: its token at the index given by its last token.
fn batch(count: usize) -> Result<(Tensor, Tensor)> {
    let draws = Tensor::rand(0f32, VOCAB as f32, (count, LEN), &Device::Cpu)?.to_dtype(DType::U32)?;
    let rows = draws.to_vec2::<u32>()?;
    let answers: Vec<u32> = rows.iter().map(|row| row[row[LEN - 1] as usize]).collect();
    Ok((draws, Tensor::from_vec(answers, count, &Device::Cpu)?))
}

fn main() -> Result<()> {
    let vars = VarMap::new();
    let model = Model::new(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
    let mut optimizer = AdamW::new(vars.all_vars(), ParamsAdamW { lr: 3e-3, ..Default::default() })?;
    for step in 0..=600 {
        let (ids, answers) = batch(128)?;
        let logits = model.forward(&ids)?;
        let loss = cross_entropy(&logits, &answers, CrossEntropy::default())?;
        if step % 100 == 0 {
            let right = logits.argmax(1)?.eq(&answers)?.to_dtype(DType::F32)?.mean_all()?;
            println!(
                "step {step:>3}: loss {:.3}, right {:.0} %",
                loss.to_scalar::<f32>()?,
                100.0 * right.to_scalar::<f32>()?
            );
        }
        let gradients = loss.backward()?;
        if step == 0 {
            // If an operator had no gradient, some weights would not train, but the loss would still fall.
            let untrained = candle_sage::untrained(&vars, &gradients);
            assert!(untrained.is_empty(), "no gradient reaches {untrained:?}");
        }
        optimizer.step(&gradients)?;
    }
    Ok(())
}
