//! The migrations in docs/moving.md that need only candle-nn give the same numbers as the code that they replace.
//! examples/moving has complete models.

use std::collections::BTreeSet;
use std::path::Path;

use candle_core::{D, Device, Module, Result, Tensor, Var};
use candle_nn::attention::AttnMask;
use candle_sage::nn::{RmsNorm, Rotary};
use candle_sage::ops::{self, RopeStyle};
use candle_sage::{Attention, ErrorKind};
use candle_sage::{flash_attn, flash_attn_varlen};

use crate::support::Normals;

/// Sums of at most 24 terms in another order differ by some units of 2^-24.
const F32: f32 = 2e-6;

/// Query, key and value, (batch, heads, sequence, head_dim), of 4 query and 2 key heads.
fn heads_first(batch: usize, queries: usize, keys: usize) -> Result<[Tensor; 3]> {
    let mut normals = Normals::new(7);
    let mut draw = |heads: usize, tokens: usize| {
        let values = normals.vec(batch * heads * tokens * 16, 1.0);
        Tensor::from_vec(values, (batch, heads, tokens, 16), &Device::Cpu)
    };
    Ok([draw(4, queries)?, draw(2, keys)?, draw(2, keys)?])
}

fn sequence_first(batch: usize, queries: usize, keys: usize) -> Result<[Tensor; 3]> {
    let [q, k, v] = heads_first(batch, queries, keys)?;
    Ok([q.transpose(1, 2)?, k.transpose(1, 2)?, v.transpose(1, 2)?])
}

/// Causal attention as in candle-transformers. Tensors are (batch, heads, sequence, head_dim).
fn composed(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let (batch, heads, queries, head_dim) = q.dims4()?;
    let (_, key_heads, keys, _) = k.dims4()?;
    let repeat = |x: &Tensor| {
        let shape = (batch, key_heads, heads / key_heads, keys, head_dim);
        x.unsqueeze(2)?.expand(shape)?.reshape((batch, heads, keys, head_dim))
    };
    let hidden = |i: usize, j: usize| if j + queries > i + keys { f32::NEG_INFINITY } else { 0.0 };
    let mask: Vec<f32> = (0..queries).flat_map(|i| (0..keys).map(move |j| hidden(i, j))).collect();
    let mask = Tensor::from_vec(mask, (queries, keys), &Device::Cpu)?;
    let scores = (q.matmul(&repeat(k)?.t()?.contiguous()?)? / (head_dim as f64).sqrt())?;
    candle_nn::ops::softmax(&scores.broadcast_add(&mask)?, D::Minus1)?.matmul(&repeat(v)?)
}

/// The largest `|a - b|`, divided by the largest `|b|`.
fn apart(a: &Tensor, b: &Tensor) -> Result<f32> {
    let most = |x: &Tensor| x.abs()?.max_all()?.to_scalar::<f32>();
    Ok(most(&(a - b)?)? / most(b)?)
}

#[test]
fn rotary_and_attention_take_heads_first() -> Result<()> {
    let [q, k, v] = heads_first(2, 24, 24)?;
    let (cos, sin) = ops::rope_tables(64, 16, 10_000.0, &Device::Cpu)?;
    let rope = |x: &Tensor| candle_nn::rotary_emb::rope(x, &cos.narrow(0, 5, 24)?, &sin.narrow(0, 5, 24)?);
    let expected = composed(&rope(&q)?, &rope(&k)?, &v)?;
    let attention = Attention::default().causal(true);
    let rotary = Rotary::from_tables(cos.clone(), sin.clone(), RopeStyle::Halves)?;
    let attend = |q: &Tensor, k: &Tensor| attention.apply_heads_first(q, k, &v);
    let moved = attend(&rotary.forward_heads_first(&q, 5)?, &rotary.forward_heads_first(&k, 5)?)?;
    assert!(apart(&moved, &expected)? < F32);
    // `forward` expects (batch, sequence, heads, head_dim): it rotates heads as if they were tokens, without an error.
    let wrong = attend(&rotary.forward(&q, 5)?, &rotary.forward(&k, 5)?)?;
    assert!(apart(&wrong, &expected)? > 0.1);

    let norm = RmsNorm::new(Tensor::from_vec(Normals::new(3).vec(16, 1.0), 16, &Device::Cpu)?, 1e-6);
    let fused = rotary.forward_normalized_heads_first(&q, &norm, 5)?;
    assert!(apart(&fused, &rope(&norm.forward(&q)?)?)? < F32);
    Ok(())
}

#[test]
fn tables_that_fit_the_other_order_are_an_error_that_names_it() -> Result<()> {
    let [q, _, _] = heads_first(1, 24, 24)?;
    let (cos, sin) = ops::rope_tables(24, 16, 10_000.0, &Device::Cpu)?;
    let refused = ops::rope(&q, &cos, &sin, RopeStyle::Halves).expect_err("4 rows are needed");
    assert!(refused.to_string().contains("Rotary::forward_heads_first"), "{refused}");
    assert_eq!(ErrorKind::of(&refused), ErrorKind::Shape);
    let rotary = Rotary::from_tables(cos, sin, RopeStyle::Halves)?;
    // From position 21, neither 4 nor 24 tokens fit the 24 rows of `cos` and `sin`: the error does not suggest
    // `forward_heads_first`.
    assert!(!rotary.forward(&q, 21).expect_err("past the tables").to_string().contains("heads_first"));
    // From position 1, 24 tokens exceed the 24 rows of `cos` and `sin`. If the 4 heads were the tokens, they would fit.
    let refused = rotary.forward_heads_first(&q, 1).expect_err("past the tables");
    assert!(
        refused
            .to_string()
            .contains("if the tensor is (batch, sequence, heads, head_dim), call `Rotary::forward`"),
        "{refused}"
    );
    Ok(())
}

#[test]
fn scaled_dot_product_attention_of_pytorch() -> Result<()> {
    for (queries, keys) in [(24, 24), (3, 24)] {
        let [q, k, v] = heads_first(2, queries, keys)?;
        let out = Attention::default().causal(true).apply_heads_first(&q, &k, &v)?;
        assert!(apart(&out, &composed(&q, &k, &v)?)? < F32);
    }
    Ok(())
}

#[test]
fn flash_attn_of_candle_nn_has_other_conventions() -> Result<()> {
    let theirs = |x: &[Tensor; 3], mask: AttnMask| {
        candle_nn::attention::flash_attn::<f32>(&x[0], &x[1], &x[2], 0.25, mask, None, None)
    };
    // With one sequence, query i of candle-nn sees keys up to i + kv_offset. `AttnMask::causal` has a kv_offset of 0.
    let one = sequence_first(1, 8, 24)?;
    let [q, k, v] = &one;
    let out = Attention::default().causal(true).apply(q, k, v)?;
    let at_the_end = theirs(&one, AttnMask::causal_with_offset(24 - 8))?;
    // candle-nn's `flash_attn` takes (batch, sequence, heads, head_dim) and returns (batch, heads, sequence, head_dim).
    assert_eq!((q.dims(), at_the_end.dims()), (&[1, 8, 4, 16][..], &[1, 4, 8, 16][..]));
    assert!(apart(&out, &at_the_end.transpose(1, 2)?)? < F32);
    assert!(apart(&out, &theirs(&one, AttnMask::causal())?.transpose(1, 2)?)? > 0.1);
    // With several sequences candle-nn aligns the mask at the bottom right and ignores `kv_offset`.
    let two = sequence_first(2, 8, 24)?;
    let out = flash_attn(&two[0], &two[1], &two[2], 0.25, true)?;
    assert!(apart(&out, &theirs(&two, AttnMask::causal())?.transpose(1, 2)?)? < F32);
    // candle-nn's function propagates no gradient.
    let tracked = [Var::from_tensor(q)?.into_inner(), k.clone(), v.clone()];
    assert!(!theirs(&tracked, AttnMask::causal())?.track_op());
    Ok(())
}

#[test]
fn varlen_takes_cumulative_lengths() -> Result<()> {
    let [q, k, v] = sequence_first(1, 12, 12)?;
    let [q, k, v] = [q.squeeze(0)?, k.squeeze(0)?, v.squeeze(0)?];
    let lengths = Tensor::new(&[0u32, 5, 12], &Device::Cpu)?;
    let out = flash_attn_varlen(&q, &k, &v, &lengths, &lengths, 7, 7, 0.25, true)?;
    // candle-nn's function takes lengths, not cumulative lengths, and the ALiBi slopes as the fourth argument.
    let each = Tensor::new(&[5u32, 7], &Device::Cpu)?;
    let theirs = candle_nn::attention::flash_attn_varlen_cpu(
        &q, &k, &v, None, &each, &each, 7, 7, 0.25, true, None, None,
    )?;
    assert!(apart(&out, &theirs)? < F32);
    Ok(())
}

#[test]
fn the_code_of_the_page_is_compiled() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let read = |path: &str| std::fs::read_to_string(root.join(path)).expect("a file of the repository");
    let sources = [
        "candle-sage/tests/it/moving.rs",
        "candle-sage/tests/it/padding.rs",
        "candle-sage/examples/layer.rs",
        "examples/moving/src/model.rs",
    ]
    .map(read);
    let compiled: BTreeSet<&str> = sources.iter().flat_map(|text| text.lines()).map(str::trim).collect();
    let page = read("docs/moving.md");
    let (mut inside, mut lines) = (false, 0);
    for line in page.lines().map(str::trim) {
        match line {
            "```rust" => inside = true,
            "```" => inside = false,
            line if inside && !line.is_empty() && !line.starts_with("//") => {
                assert!(compiled.contains(line), "docs/moving.md has code that is not compiled: {line}");
                lines += 1;
            }
            _ => {}
        }
    }
    assert!(lines >= 6, "{lines} lines of code");
}
