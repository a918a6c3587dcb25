//! SLA2 with a cache against SLA2 over whole sequences.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use candle_sage::nn::{Rotary, SelfAttentionConfig, SparseLinearAttention};
use candle_sage::ops::{Alpha, RopeStyle, Tail};
use candle_sage::{Packing, Router, SageBwd, Scheme, Sla2, Sla2Cache};

use crate::sla2::{some_router, tensors};
use crate::support::Case;

/// Calls with a cache give the outputs of one call for the whole sequence, for any lengths of prompt and steps.
/// With a cache, SLA2's tail sums over tokens in another order. Outputs near 1 may differ by 200 f32 roundings: 1e-5.
#[test]
fn a_cache_gives_the_rows_of_the_whole_sequence() -> Result<()> {
    let case = Case::new(2, (200, 200), (4, 2), 32, true);
    let [q, k, v] = tensors(&case)?;
    let router = some_router(2, 32)?;
    let theta = Tensor::new(&[2f32, 1.0, 0.0, -1.0], &Device::Cpu)?;
    let forms = [
        (Some(Tail::Past), Alpha::Count),
        (Some(Tail::Complement), Alpha::Constant),
        (Some(Tail::Complement), Alpha::Count),
        (None, Alpha::Count),
    ];
    for (tail, alpha) in forms {
        for (block, pool, count, nearest) in
            [((32, 32), 8, 2, 0), ((32, 16), 1, 3, 2), ((16, 64), 50, 1, 1), ((16, 16), 4, 0, 0)]
        {
            let sla2 = Sla2::new(Scheme::Unquantized).causal(true).softmax_scale(0.3);
            let sla2 = sla2.blocks(count).nearest(nearest).block(block).pool(pool).tail(tail).alpha(alpha);
            let whole = sla2.apply(&q, &k, &v, &sla2.select(&router, &q, &k)?, &theta)?;
            for steps in
                [&[1usize; 200][..], &[96, 1, 1, 40, 62], &[97, 103], &[31, 1, 32, 136], &[5, 190, 5]]
            {
                let mut cache = Sla2Cache::new(64);
                for &len in steps {
                    let at = cache.current_seq_len();
                    let [q, k, v] = [&q, &k, &v].map(|x| x.narrow(1, at, len));
                    let out = sla2.apply_cached(&router, [&q?, &k?, &v?], &theta, &mut cache)?;
                    let difference =
                        (out - whole.narrow(1, at, len)?)?.abs()?.max_all()?.to_scalar::<f32>()?;
                    assert!(difference < 1e-5, "{len} after {at}, {block:?}, {tail:?}: {difference:e}");
                }
            }
        }
    }
    Ok(())
}

/// The linear tail applies a softmax over channels to queries and keys. If these are large, nearly all weight is in one
/// channel. If the tail's sums were differences (all blocks minus selected blocks), rounding would lose the other
/// channels. Outputs are at most about 4, and their errors about 4e-6.
#[test]
fn large_keys_do_not_cancel_in_the_tail() -> Result<()> {
    let case = Case::new(1, (300, 300), (2, 1), 32, true);
    let [q, k, v] = tensors(&case)?;
    let (router, theta) = (some_router(1, 32)?, Tensor::new(&[1f32, -1.0], &Device::Cpu)?);
    for factor in [10.0, 200.0] {
        let (q, k) = ((&q * factor)?, (&k * factor)?);
        for tail in [Tail::Past, Tail::Complement] {
            let sla2 = Sla2::new(Scheme::Unquantized).block((16, 16)).blocks(2).causal(true).tail(Some(tail));
            let whole = sla2.apply(&q, &k, &v, &sla2.select(&router, &q, &k)?, &theta)?;
            let mut cache = Sla2Cache::new(64);
            for len in [[20].as_slice(), &[1; 280]].concat() {
                let at = cache.current_seq_len();
                let [q, k, v] = [&q, &k, &v].map(|x| x.narrow(1, at, len));
                let out = sla2.apply_cached(&router, [&q?, &k?, &v?], &theta, &mut cache)?;
                let difference = (out - whole.narrow(1, at, len)?)?.abs()?.max_all()?.to_scalar::<f32>()?;
                assert!(difference < 1e-4, "{factor} {tail:?} {at}: {difference:e}");
            }
        }
    }
    Ok(())
}

/// With a cache the prompt is computed with the scheme, and later tokens without quantization. The outputs have the
/// inputs' type, and are close to those of one call for the whole sequence.
#[test]
fn a_cache_has_the_types_and_schemes_of_the_op() -> Result<()> {
    let case = Case::new(1, (128, 128), (2, 1), 32, true);
    let inputs = tensors(&case)?;
    let (router, theta) = (some_router(1, 32)?, Tensor::new(&[1f32, -1.0], &Device::Cpu)?);
    for (scheme, dtype, limit) in
        [(SageBwd::default().into(), DType::F32, 0.2), (Scheme::Unquantized, DType::F16, 4e-3)]
    {
        let [q, k, v] = inputs.each_ref().map(|x| x.to_dtype(dtype));
        let (q, k, v) = (q?, k?, v?);
        let sla2 = Sla2::new(scheme).block((64, 64)).blocks(1).causal(true);
        let whole = sla2.apply(&q, &k, &v, &sla2.select(&router, &q, &k)?, &theta)?;
        let mut cache = Sla2Cache::new(64);
        for (at, len) in [(0, 64), (64, 1), (65, 63)] {
            let [q, k, v] = [&q, &k, &v].map(|x| x.narrow(1, at, len));
            let out = sla2.apply_cached(&router, [&q?, &k?, &v?], &theta, &mut cache)?;
            assert_eq!(out.dtype(), dtype);
            let difference = (out - whole.narrow(1, at, len)?)?.to_dtype(DType::F32)?.abs()?.max_all()?;
            let difference = difference.to_scalar::<f32>()?;
            assert!(difference < limit, "{scheme} {dtype:?} {at}: {difference:e}");
        }
    }
    Ok(())
}

/// A call with a cache rotates tokens by their positions in the sequence, not in the call. Its output has no gradient.
#[test]
fn a_layer_decodes_what_it_computes_at_once() -> Result<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let sla2 = Sla2::new(Scheme::Unquantized).block((16, 16)).blocks(1).causal(true);
    let layer = SparseLinearAttention::load(SelfAttentionConfig::new(32, 2, 16).key_heads(1), sla2, vb)?;
    let rotary = Rotary::new(80, 16, 10_000.0, RopeStyle::Halves, &Device::Cpu)?;
    let x = Tensor::randn(0f32, 1., (1, 80, 32), &Device::Cpu)?;
    let whole = layer.forward(&x, &rotary)?;
    let mut cache = layer.cache(16);
    for sequence in 0..2 {
        for len in [33, 1, 30, 16] {
            let at = cache.current_seq_len();
            let out = layer.forward_cached(&x.narrow(1, at, len)?, &rotary, &mut cache)?;
            assert!(!out.track_op());
            let difference = (out - whole.narrow(1, at, len)?)?.abs()?.max_all()?.to_scalar::<f32>()?;
            assert!(difference < 1e-5, "{len} after {at} of sequence {sequence}: {difference:e}");
        }
        cache.reset();
    }
    Ok(())
}

#[test]
fn what_does_not_fit_a_cache_is_an_error() -> Result<()> {
    let x = Tensor::ones((1, 4, 2, 8), DType::F32, &Device::Cpu)?;
    let (router, theta) = (Router::new(2, 8, &Device::Cpu)?, Tensor::zeros(2, DType::F32, &Device::Cpu)?);
    let sla2 = Sla2::new(Scheme::Unquantized).block((16, 16)).blocks(1);
    let message = |sla2: &Sla2, x: &Tensor, cache: &mut Sla2Cache| {
        let result = sla2.apply_cached(&router, [x, x, x], &theta, cache);
        result.expect_err("what does not fit").to_string()
    };
    let mut cache = Sla2Cache::new(4);
    assert!(message(&sla2, &x, &mut cache).contains("no causal mask"));
    let causal = sla2.causal(true);
    let packed = causal.clone().packing(Packing::self_attention(vec![0, 1, 4]));
    assert!(message(&packed, &x, &mut cache).contains("packed documents"));
    causal.apply_cached(&router, [&x, &x, &x], &theta, &mut cache)?;
    assert!(message(&causal, &x.repeat((2, 1, 1, 1))?, &mut cache).contains("batch 2"));
    assert!(message(&causal, &x.to_dtype(DType::F16)?, &mut cache).contains("F16"));
    let larger = causal.clone().block((32, 32));
    assert!(message(&larger, &x, &mut cache).contains("32"));
    assert_eq!(cache.current_seq_len(), 4);
    let value = x.narrow(1, 0, 2)?;
    let error = causal.apply_cached(&router, [&x, &x, &value], &theta, &mut cache).expect_err("two values");
    assert!(error.to_string().contains("of the new tokens do not match"), "{error}");
    let one = theta.narrow(0, 0, 1)?;
    let error = causal.apply_cached(&router, [&x, &x, &x], &one, &mut cache).expect_err("one theta");
    assert!(error.to_string().contains("theta"), "{error}");
    // Nothing was added by the calls that failed.
    assert_eq!(cache.current_seq_len(), 4);
    // A call with a router for another number of heads changes the cache before it fails.
    let other = Router::new(1, 8, &Device::Cpu)?;
    let mut cache = Sla2Cache::new(4);
    assert!(causal.apply_cached(&other, [&x, &x, &x], &theta, &mut cache).is_err());
    assert!(message(&causal, &x, &mut cache).contains("last call failed"));
    cache.reset();
    causal.apply_cached(&router, [&x, &x, &x], &theta, &mut cache)?;
    Ok(())
}
