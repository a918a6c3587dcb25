//! candle-transformers' BERT with trainable attention and trainable layer norms. It concatenates the texts of a
//! padded batch without their padding, instead of masking the padding.

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{Embedding, Linear, VarBuilder, VarMap, embedding, linear};
use candle_sage::nn::LayerNorm;
use candle_sage::ops::{Padding, pack_padded, unpack_padded};
use candle_sage::{Attention, untrained};
use candle_transformers::models::bert::{BertModel, Config};

use crate::{fill, largest};

struct Layer {
    /// Query, key and value.
    qkv: [Linear; 3],
    output: Linear,
    attended: LayerNorm,
    up: Linear,
    down: Linear,
    done: LayerNorm,
    heads: usize,
}

impl Layer {
    fn new(config: &Config, vb: &VarBuilder<'_>) -> Result<Self> {
        let (width, hidden, eps) = (config.hidden_size, config.intermediate_size, config.layer_norm_eps);
        let (attention, output) = (vb.pp("attention"), vb.pp("output"));
        let of = |name: &str| linear(width, width, attention.pp("self").pp(name));
        Ok(Self {
            qkv: [of("query")?, of("key")?, of("value")?],
            output: linear(width, width, attention.pp("output.dense"))?,
            attended: LayerNorm::load(width, eps, attention.pp("output.LayerNorm"))?,
            up: linear(width, hidden, vb.pp("intermediate.dense"))?,
            down: linear(hidden, width, output.pp("dense"))?,
            done: LayerNorm::load(width, eps, output.pp("LayerNorm"))?,
            heads: config.num_attention_heads,
        })
    }

    /// `x` is (1, tokens, width): packed texts.
    fn forward(&self, x: &Tensor, attention: &Attention) -> Result<Tensor> {
        let (batch, tokens, width) = x.dims3()?;
        let split = |map: &Linear| map.forward(x)?.reshape((batch, tokens, self.heads, width / self.heads));
        let [q, k, v] = &self.qkv;
        let out = attention.apply(&split(q)?, &split(k)?, &split(v)?)?.reshape(x.shape())?;
        let x = self.attended.forward(&(out.apply(&self.output)? + x)?)?;
        self.done.forward(&(x.apply(&self.up)?.gelu_erf()?.apply(&self.down)? + &x)?)
    }
}

struct Bert {
    words: Embedding,
    positions: Embedding,
    types: Embedding,
    norm: LayerNorm,
    layers: Vec<Layer>,
}

impl Bert {
    fn new(config: &Config, vb: &VarBuilder<'_>) -> Result<Self> {
        let (at, width) = (vb.pp("embeddings"), config.hidden_size);
        let layer = |n: usize| Layer::new(config, &vb.pp("encoder.layer").pp(n));
        Ok(Self {
            words: embedding(config.vocab_size, width, at.pp("word_embeddings"))?,
            positions: embedding(config.max_position_embeddings, width, at.pp("position_embeddings"))?,
            types: embedding(config.type_vocab_size, width, at.pp("token_type_embeddings"))?,
            norm: LayerNorm::load(width, config.layer_norm_eps, at.pp("LayerNorm"))?,
            layers: (0..config.num_hidden_layers).map(layer).collect::<Result<_>>()?,
        })
    }

    /// The last hidden states; padding gets zeros.
    fn forward(&self, ids: &Tensor, types: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let positions = Tensor::arange(0, ids.dim(1)? as u32, ids.device())?;
        let x = (self.words.forward(ids)? + self.types.forward(types)?)?;
        let x = x.broadcast_add(&self.positions.forward(&positions)?)?;
        let padding = Padding::from_mask(mask)?;
        let attention = Attention::default().packing(padding.packing());
        let mut x = pack_padded(&self.norm.forward(&x)?, &padding)?;
        for layer in &self.layers {
            x = layer.forward(&x, &attention)?;
        }
        unpack_padded(&x, &padding)
    }
}

/// Compares our BERT with candle-transformers' on a batch of two texts. The second text is padded.
pub(crate) fn compare() -> Result<()> {
    let config = Config {
        vocab_size: 96,
        hidden_size: 64,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        intermediate_size: 160,
        max_position_embeddings: 32,
        ..Config::default()
    };
    let (vars, (texts, tokens, left)) = (VarMap::new(), (2, 20, 13));
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let theirs = BertModel::load(vb.clone(), &config)?;
    fill(&vars)?;
    let ours = Bert::new(&config, &vb)?;
    let ids: Vec<u32> = (0..texts * tokens).map(|n| (7 * n * n + 3 * n + 1) as u32 % 96).collect();
    let ids = Tensor::from_vec(ids, (texts, tokens), &Device::Cpu)?;
    let types = ids.zeros_like()?;
    let mask: Vec<u32> = (0..texts * tokens).map(|n| u32::from(n < tokens + left)).collect();
    let mask = Tensor::from_vec(mask, (texts, tokens), &Device::Cpu)?;
    let seen = mask.unsqueeze(2)?.to_dtype(DType::F32)?;
    let got = ours.forward(&ids, &types, &mask)?;
    let expected = theirs.forward(&ids, &types, Some(&mask))?.broadcast_mul(&seen)?;
    let distance = largest(&(&got - &expected)?)? / largest(&expected)?;
    // The same f32 products, summed in a different order.
    assert!(distance < 5e-6, "BERT: hidden states are {distance:.1e} apart");
    let loss = |x: &Tensor| x.broadcast_mul(&seen)?.sqr()?.mean_all()?.backward();
    let here = untrained(&vars, &loss(&got)?);
    assert!(here.is_empty(), "BERT: no gradient reaches {here:?}");
    let there = untrained(&vars, &loss(&expected)?);
    println!(
        "{:<8}{distance:>14.1e}{:>14}   0 of {}, there {}",
        "bert",
        "",
        vars.all_vars().len(),
        there.len()
    );
    Ok(())
}
