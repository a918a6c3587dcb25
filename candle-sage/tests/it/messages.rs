//! Error messages of calls that cannot be computed.

use std::collections::HashMap;

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use candle_sage::nn::{Linear, RmsNorm, Rotary, SelfAttention, SelfAttentionConfig};
use candle_sage::ops::{self, CrossEntropy};
use candle_sage::{
    Attention, AttnQat, ErrorKind, Granularity, KeyMean, Packing, Products, Router, SageBwd, Scheme, Sla2,
    Smoothing, ValueGroups, ValueScale,
};

fn zeros(dims: &[usize]) -> Tensor {
    Tensor::zeros(dims, DType::F32, &Device::Cpu).expect("zeros")
}

fn attend(attention: Attention, q: &[usize], k: &[usize], v: &[usize]) -> Result<Tensor> {
    attention.apply(&zeros(q), &zeros(k), &zeros(v))
}

/// A description of the call, and its result.
type Case = (&'static str, Result<Tensor>);

/// Dimensions that every scheme supports.
const GOOD: [usize; 4] = [1, 4, 2, 16];

fn plain() -> Attention {
    Attention::new(Scheme::Unquantized)
}

fn ids(ids: &[i64]) -> Tensor {
    Tensor::new(ids, &Device::Cpu).expect("ids")
}

fn attention() -> Vec<Case> {
    vec![
        ("a gradient of FP4 products", {
            let x = candle_core::Var::from_tensor(&zeros(&GOOD)).expect("a variable");
            Attention::new(AttnQat::default().products(Products::Nvfp4)).apply(&x, &x, &x)
        }),
        ("FP4 products of V by channels", {
            let settings = AttnQat::default().products(Products::Nvfp4).value_groups(ValueGroups::HeadDim);
            attend(Attention::new(settings), &GOOD, &GOOD, &GOOD)
        }),
        ("FP4 products of scaled V", {
            let settings = AttnQat::default().products(Products::Nvfp4).value_scale(ValueScale::Head);
            attend(Attention::new(settings), &GOOD, &GOOD, &GOOD)
        }),
        ("three dimensions", attend(plain(), &[4, 2, 16], &GOOD, &GOOD)),
        ("head_dim 0", attend(plain(), &[1, 4, 2, 0], &[1, 4, 2, 0], &[1, 4, 2, 0])),
        ("head_dim 512", attend(plain(), &[1, 4, 2, 512], &[1, 4, 2, 512], &[1, 4, 2, 512])),
        ("head_dim 4", attend(plain(), &[1, 4, 2, 4], &[1, 4, 2, 4], &[1, 4, 2, 4])),
        ("no tokens", attend(plain(), &[1, 0, 2, 16], &GOOD, &GOOD)),
        ("key and value differ", attend(plain(), &GOOD, &GOOD, &[1, 5, 2, 16])),
        ("batch differs", attend(plain(), &GOOD, &[2, 4, 2, 16], &[2, 4, 2, 16])),
        ("heads do not divide", attend(plain(), &[1, 4, 3, 16], &GOOD, &GOOD)),
        ("no query heads", attend(plain(), &[1, 4, 0, 16], &GOOD, &GOOD)),
        (
            "types differ",
            plain().apply(&zeros(&GOOD), &zeros(&GOOD), &zeros(&GOOD).to_dtype(DType::BF16).expect("bf16")),
        ),
        ("f64", {
            let x = zeros(&GOOD).to_dtype(DType::F64).expect("f64");
            plain().apply(&x, &x, &x)
        }),
        ("scale", attend(plain().softmax_scale(f64::NAN), &GOOD, &GOOD, &GOOD)),
    ]
}

fn packings_and_settings() -> Vec<Case> {
    let sage = SageBwd::default();
    vec![
        (
            "packing over two batches",
            attend(
                plain().packing(Packing::self_attention(vec![0, 4])),
                &[2, 4, 2, 16],
                &[2, 4, 2, 16],
                &[2, 4, 2, 16],
            ),
        ),
        (
            "packing that ends early",
            attend(plain().packing(Packing::self_attention(vec![0, 1, 3])), &GOOD, &GOOD, &GOOD),
        ),
        (
            "packing that falls",
            attend(plain().packing(Packing::self_attention(vec![0, 3, 2, 4])), &GOOD, &GOOD, &GOOD),
        ),
        (
            "packing of two kinds",
            attend(plain().packing(Packing::new(vec![0, 4], vec![0, 1, 4])), &GOOD, &GOOD, &GOOD),
        ),
        ("tile", attend(Attention::new(sage.tile_q(8)), &GOOD, &GOOD, &GOOD)),
        ("group", attend(Attention::new(sage.granularity(Granularity::Group(1))), &GOOD, &GOOD, &GOOD)),
        ("a mean of no keys", attend(Attention::new(sage.key_mean(KeyMean::Sample(0))), &GOOD, &GOOD, &GOOD)),
        ("a mean that is not subtracted", {
            let settings = sage.smoothing(Smoothing::None).key_mean(KeyMean::Sample(64));
            attend(Attention::new(settings), &GOOD, &GOOD, &GOOD)
        }),
        (
            "a mean's name",
            "sample-some".parse::<KeyMean>().map(|_| zeros(&[1])).map_err(candle_core::Error::from),
        ),
        ("nearest blocks without a mask", nearest(false, 4, 1)),
        ("more nearest blocks than blocks", nearest(true, 2, 3)),
    ]
}

fn nearest(causal: bool, blocks: usize, count: usize) -> Result<Tensor> {
    let x = zeros(&[1, 64, 2, 16]);
    let sla2 = Sla2::new(Scheme::Unquantized).block((16, 16)).causal(causal).blocks(blocks).nearest(count);
    sla2.select(&Router::new(2, 16, &Device::Cpu)?, &x, &x).map(|_| x)
}

fn widths_and_rotary_tables() -> Vec<Case> {
    vec![
        ("rms_norm", ops::rms_norm(&zeros(&[2, 3]), &zeros(&[2]), 1e-6)),
        ("swiglu", ops::swiglu(&zeros(&[2, 3]), &zeros(&[3, 2]))),
        ("rope", ops::rope(&zeros(&GOOD), &zeros(&[3, 8]), &zeros(&[3, 8]), Default::default())),
        ("rope tables", ops::rope_tables(4, 7, 1e4, &Device::Cpu).map(|(cos, _)| cos)),
        (
            "tracked rope tables",
            ops::rope(
                &zeros(&GOOD),
                &candle_core::Var::zeros((4, 8), DType::F32, &Device::Cpu).expect("a var"),
                &zeros(&[4, 8]),
                Default::default(),
            ),
        ),
        ("qk_norm_rope", {
            let table = zeros(&[4, 8]);
            ops::qk_norm_rope(&zeros(&GOOD), &zeros(&[8]), &table, &table, 1e-6, Default::default())
        }),
    ]
}

fn arguments() -> Vec<Case> {
    vec![
        ("an empty table", ops::embedding(&zeros(&[0, 2]), &ids(&[0]))),
        ("eps", ops::rms_norm(&zeros(&[2, 3]), &zeros(&[3]), f64::NAN)),
        (
            "chunk of nothing",
            ops::linear_cross_entropy(
                &zeros(&[2, 3]),
                &zeros(&[5, 3]),
                &ids(&[1, 1]),
                CrossEntropy::default().chunk_rows(Some(0)),
            ),
        ),
        ("past the rotary tables", {
            let rotary =
                candle_sage::nn::Rotary::new(4, 16, 1e4, Default::default(), &Device::Cpu).expect("tables");
            rotary.forward(&zeros(&[1, 3, 2, 16]), 2)
        }),
    ]
}

fn ids_and_targets() -> Vec<Case> {
    vec![
        ("embedding", ops::embedding(&zeros(&[3, 2]), &ids(&[0, 3]))),
        ("negative id", ops::embedding(&zeros(&[3, 2]), &ids(&[-1]))),
        ("float ids", ops::embedding(&zeros(&[3, 2]), &zeros(&[2]))),
        ("target", ops::cross_entropy(&zeros(&[2, 3]), &ids(&[0, 3]), CrossEntropy::default())),
        (
            "no target",
            ops::cross_entropy(&zeros(&[2, 3]), &ids(&[1, 1]), CrossEntropy::default().ignore_id(Some(1))),
        ),
        (
            "linear_cross_entropy",
            ops::linear_cross_entropy(
                &zeros(&[2, 3]),
                &zeros(&[5, 4]),
                &ids(&[1, 1]),
                CrossEntropy::default(),
            ),
        ),
    ]
}

fn linear(outputs: usize, inputs: usize) -> Linear {
    Linear::new(zeros(&[outputs, inputs]), None)
}

fn linear_maps() -> Vec<Case> {
    let builder = |tensors| VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu).pp("up_proj");
    let loaded = |vb: VarBuilder<'_>| Linear::load(2, 3, vb).map(|_| zeros(&[1]));
    let transposed = HashMap::from([("up_proj.weight".to_string(), zeros(&[2, 3]))]);
    let variables = VarMap::new();
    let varmap = || VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu).pp("up_proj");
    Linear::load(3, 2, varmap()).expect("a new variable");
    vec![
        ("a linear map of another width", linear(3, 2).forward(&zeros(&[4, 3]))),
        ("a linear map of a vector", Linear::new(zeros(&[3]), None).forward(&zeros(&[4, 3]))),
        ("a bias of another width", Linear::new(zeros(&[3, 2]), Some(zeros(&[2]))).forward(&zeros(&[4, 2]))),
        (
            "a linear map of another type",
            linear(3, 2).forward(&zeros(&[4, 2]).to_dtype(DType::BF16).expect("bf16")),
        ),
        ("a weight that is missing", loaded(builder(HashMap::new()))),
        ("a weight of another shape", loaded(builder(transposed))),
        ("a variable of another shape", loaded(varmap())),
    ]
}

const LAYER: SelfAttentionConfig = SelfAttentionConfig::new(32, 2, 16).key_heads(1);

fn maps() -> [Linear; 4] {
    [linear(32, 32), linear(16, 32), linear(16, 32), linear(32, 32)]
}

fn layers() -> Vec<Case> {
    let layer = |config, maps, norms| {
        SelfAttention::new(config, plain().causal(true), maps, norms).map(|_| zeros(&[1]))
    };
    let norm = |width| RmsNorm::new(zeros(&[width]), 1e-6);
    let [q, k, v, o] = maps();
    vec![
        ("a layer's maps in another order", layer(LAYER, [k, q, v, o], None)),
        ("a layer's norm of another width", layer(LAYER, maps(), Some((norm(16), norm(32))))),
        ("a layer of head_dim 512", layer(SelfAttentionConfig::new(32, 2, 512).key_heads(1), maps(), None)),
        ("a layer of head_dim 17", layer(SelfAttentionConfig::new(32, 2, 17).key_heads(1), maps(), None)),
    ]
}

fn layer_inputs() -> Vec<Case> {
    let layer = SelfAttention::new(LAYER, plain().causal(true), maps(), None).expect("a layer");
    let rotary = Rotary::new(8, 16, 1e4, Default::default(), &Device::Cpu).expect("tables");
    let mut cache = layer.cache(8);
    layer.forward_cached(&zeros(&[2, 3, 32]), &rotary, &mut cache).expect("a prompt");
    vec![
        ("a layer's input of another width", layer.forward(&zeros(&[1, 4, 16]), &rotary)),
        ("a layer's input of two dimensions", layer.forward(&zeros(&[4, 32]), &rotary)),
        (
            "an output that is heads first",
            layer.forward_with(&zeros(&[1, 4, 32]), &rotary, |q, _, _| q.transpose(1, 2)),
        ),
        ("a cache of another batch", layer.forward_cached(&zeros(&[1, 1, 32]), &rotary, &mut cache)),
        ("rotary embedding of three dimensions", rotary.forward_heads_first(&zeros(&[4, 2, 16]), 0)),
        (
            "heads first of three dimensions",
            plain().apply_heads_first(&zeros(&[4, 2, 16]), &zeros(&GOOD), &zeros(&GOOD)),
        ),
        ("heads first, past the rotary tables", rotary.forward(&zeros(&[1, 9, 3, 16]), 0)),
        (
            "heads first, other tables",
            ops::rope(&zeros(&[1, 2, 4, 16]), &zeros(&[4, 8]), &zeros(&[4, 8]), Default::default()),
        ),
    ]
}

#[test]
fn messages() {
    let groups = [
        attention(),
        packings_and_settings(),
        widths_and_rotary_tables(),
        arguments(),
        ids_and_targets(),
        linear_maps(),
        layers(),
        layer_inputs(),
    ];
    let mut text = String::new();
    for (name, result) in groups.into_iter().flatten() {
        let error = result.err().unwrap_or_else(|| panic!("{name} should have failed"));
        assert!(
            matches!(error, candle_core::Error::Wrapped(_)),
            "{name} is not an error of this crate: {error}"
        );
        let message = error.to_string();
        let whole = ["\n  got: ", "\n  allowed: ", "\n  hint: "].iter().all(|line| message.contains(line));
        assert!(whole, "{name} does not say what, got, allowed and hint: {message}");
        text += &format!("-- {name}\n{message}\n");
    }
    text += &format!("-- granularity\n{}\n", "rows".parse::<Granularity>().expect_err("not a granularity"));
    insta::assert_snapshot!(text);
}

#[test]
fn shapes_are_a_kind_of_error() {
    let kind = |result: Result<Tensor>| ErrorKind::of(&result.expect_err("an error"));
    assert_eq!(kind(attend(plain(), &GOOD, &[2, 4, 2, 16], &[2, 4, 2, 16])), ErrorKind::Shape);
    assert_eq!(kind(ops::rms_norm(&zeros(&[2, 3]), &zeros(&[2]), 1e-6)), ErrorKind::Shape);
    assert_eq!(kind(linear(3, 2).forward(&zeros(&[4, 3]))), ErrorKind::Shape);
    assert_eq!(kind(ops::rms_norm(&zeros(&[2, 3]), &zeros(&[3]), f64::NAN)), ErrorKind::Invalid);
    assert_eq!(kind(ops::rope_tables(4, 7, 1e4, &Device::Cpu).map(|(cos, _)| cos)), ErrorKind::Invalid);
}
