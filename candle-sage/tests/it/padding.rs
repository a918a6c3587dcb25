//! Padded batches as packed documents, in a model like BERT: outputs and gradients compared with masked attention.

use candle_core::{D, DType, Device, Module, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use candle_sage::nn::{LayerNorm, Linear};
use candle_sage::ops::{Padding, pack_padded, unpack_padded};
use candle_sage::{Attention, AttnQat, SageBwd, Scheme};

use crate::support::{Normals, f64s, relative_l2};

const HEADS: usize = 2;
const HEAD_DIM: usize = 16;
const WIDTH: usize = HEADS * HEAD_DIM;

/// A layer of BERT: attention to the whole text and a feed-forward network, each followed by a residual sum and a layer
/// norm.
struct Layer {
    query_key_value: Linear,
    output: Linear,
    up: Linear,
    down: Linear,
    norms: [LayerNorm; 2],
}

impl Layer {
    fn load(vb: &VarBuilder<'_>) -> Result<Self> {
        let linear = |name, inputs, outputs| Linear::load_with_bias(inputs, outputs, vb.pp(name));
        let norm = |name| LayerNorm::load(WIDTH, 1e-12, vb.pp(name));
        Ok(Self {
            query_key_value: linear("qkv", WIDTH, 3 * WIDTH)?,
            output: linear("output", WIDTH, WIDTH)?,
            up: linear("up", WIDTH, 48)?,
            down: linear("down", 48, WIDTH)?,
            norms: [norm("attention_norm")?, norm("norm")?],
        })
    }

    fn forward(&self, x: &Tensor, attend: impl Fn([&Tensor; 3]) -> Result<Tensor>) -> Result<Tensor> {
        let (batch, sequence, _) = x.dims3()?;
        let projected = self.query_key_value.forward(x)?.reshape((batch, sequence, 3 * HEADS, HEAD_DIM))?;
        let part = |n: usize| projected.narrow(2, n * HEADS, HEADS);
        let out = attend([&part(0)?, &part(1)?, &part(2)?])?.reshape((batch, sequence, WIDTH))?;
        let x = self.norms[0].forward(&(x + self.output.forward(&out)?)?)?;
        self.norms[1].forward(&(&x + self.down.forward(&self.up.forward(&x)?.gelu()?)?)?)
    }
}

/// Attention with a mask, (batch, sequence), from candle's operators.
fn masked([q, k, v]: [&Tensor; 3], mask: &Tensor) -> Result<Tensor> {
    let first = |x: &Tensor| x.transpose(1, 2)?.contiguous();
    let (q, k, v) = (first(q)?, first(k)?, first(v)?);
    let logits = (q.matmul(&k.t()?)? / (HEAD_DIM as f64).sqrt())?;
    let hidden = mask.to_dtype(DType::F32)?.affine(1e9, -1e9)?.unsqueeze(1)?.unsqueeze(1)?;
    candle_nn::ops::softmax(&logits.broadcast_add(&hidden)?, D::Minus1)?.matmul(&v)?.transpose(1, 2)
}

fn draw(normals: &mut Normals, dims: &[usize]) -> Result<Tensor> {
    Tensor::from_vec(normals.vec(dims.iter().product(), 1.0), dims, &Device::Cpu)
}

/// A packed batch has the same gradients, and the same outputs for real tokens, as the padded batch with a mask, up to
/// rounding. Padding is on the left, on the right, and over a whole row.
#[test]
fn a_packed_bert_is_the_padded_one() -> Result<()> {
    let masks: [&[u8]; 4] = [&[1, 1, 1, 0, 0, 0, 0], &[0, 0, 1, 1, 1, 1, 1], &[0; 7], &[1, 1, 1, 1, 1, 1, 1]];
    let mask = Tensor::new(masks.concat(), &Device::Cpu)?.reshape((4, 7))?;
    let padding = Padding::from_mask(&mask)?;
    assert_eq!((padding.tokens(), padding.packing().cu_seqlens_q), (15, vec![0, 3, 8, 8, 15]));
    let mut normals = Normals::new(51);
    let variables = VarMap::new();
    let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    let layers = [Layer::load(&vb.pp(0))?, Layer::load(&vb.pp(1))?];
    let x = Var::from_tensor(&draw(&mut normals, &[4, 7, WIDTH])?)?;
    let direction = draw(&mut normals, &[4, 7, WIDTH])?;
    let real = mask.to_dtype(DType::F32)?.unsqueeze(2)?;
    let direction = direction.broadcast_mul(&real)?;

    let attention = Attention::default().packing(padding.packing());
    let mut packed = pack_padded(&x, &padding)?;
    let mut padded = x.as_tensor().clone();
    for layer in &layers {
        packed = layer.forward(&packed, |[q, k, v]| attention.apply(q, k, v))?;
        padded = layer.forward(&padded, |all| masked(all, &mask))?;
    }
    let packed = unpack_padded(&packed, &padding)?;
    let padded = padded.broadcast_mul(&real)?;
    let flat = |x: &Tensor| Ok::<_, candle_core::Error>(f64s(&x.flatten_all()?.to_vec1::<f32>()?));
    assert!(relative_l2(&flat(&packed)?, &flat(&padded)?) < 1e-5);
    let gradients = [&packed, &padded].map(|out| (out * &direction)?.sum_all()?.backward());
    let [got, expected] = gradients;
    let (got, expected) = (got?, expected?);
    let all = variables.all_vars();
    assert_eq!(all.len(), 2 * 12);
    for variable in all.iter().chain([&x]) {
        let of =
            |gradients: &candle_core::backprop::GradStore| flat(gradients.get(variable).expect("a gradient"));
        let error = relative_l2(&of(&got)?, &of(&expected)?);
        // The bias of `query_key_value`. K's part of the bias shifts all logits of a query equally, so the gradient of
        // this part is rounding error.
        let vanishes = variable.dims() == [3 * WIDTH];
        assert!(error < if vanishes { 1e-4 } else { 1e-5 }, "{:?}: {error:e}", variable.dims());
    }
    Ok(())
}

/// In every scheme a text has the same output in a batch as alone.
#[test]
fn a_text_in_a_batch_is_as_good_as_alone() -> Result<()> {
    let lengths = [70usize, 0, 3, 100];
    let padding = Padding::from_lengths(&lengths, 100, &Device::Cpu)?;
    let mut normals = Normals::new(53);
    let mut input = || draw(&mut normals, &[4, 100, HEADS, HEAD_DIM]);
    let inputs = [input()?, input()?, input()?];
    for scheme in [Scheme::Unquantized, SageBwd::default().into(), AttnQat::default().into()] {
        let [q, k, v] = inputs.each_ref().map(|x| pack_padded(x, &padding));
        let out = Attention::new(scheme).packing(padding.packing()).apply(&q?, &k?, &v?)?;
        let out = unpack_padded(&out, &padding)?;
        for (row, length) in lengths.into_iter().enumerate().filter(|(_, length)| *length > 0) {
            let of = |x: &Tensor| x.narrow(0, row, 1)?.narrow(1, 0, length);
            let alone = Attention::new(scheme).apply(&of(&inputs[0])?, &of(&inputs[1])?, &of(&inputs[2])?)?;
            let bits = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
            assert_eq!(bits(&of(&out)?)?, bits(&alone)?, "{scheme}, {length} tokens");
            let rest = out.narrow(0, row, 1)?.narrow(1, length, 100 - length)?;
            assert_eq!(rest.sqr()?.sum_all()?.to_scalar::<f32>()?, 0.0);
        }
    }
    Ok(())
}

#[test]
fn what_does_not_fit_is_refused() -> Result<()> {
    let padding = Padding::from_lengths(&[2, 1], 3, &Device::Cpu)?;
    let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Device::Cpu);
    for (error, part) in [
        (pack_padded(&zeros(&[2, 4, 1])?, &padding).map(drop), "does not fit the padding"),
        (pack_padded(&zeros(&[2])?, &padding).map(drop), "does not fit the padding"),
        (unpack_padded(&zeros(&[1, 4, 2])?, &padding).map(drop), "do not fit the padding"),
        (Padding::from_lengths(&[4], 3, &Device::Cpu).map(drop), "longer than the sequence"),
        (Padding::from_lengths(&[0], 3, &Device::Cpu).map(drop), "all tokens are padding"),
        (Padding::from_mask(&zeros(&[2, 2])?).map(drop), "all tokens are padding"),
        (Padding::from_mask(&zeros(&[4])?).map(drop), "not a matrix"),
    ] {
        let error = error.expect_err(part).to_string();
        assert!(error.contains(part) && error.contains("hint:"), "{error}");
    }
    Ok(())
}
