//! SLA2 with a cache against SLA2 over whole sequences.

use candle_core::{DType, Device, Result, Tensor};
use candle_sage::ops::{Alpha, Tail};
use candle_sage::sla2::Sla2Cache;
use candle_sage::{Packing, Router, Scheme, Sla2};

use crate::sla2::{some_router, tensors};
use crate::support::Case;

/// Decoding computes the same rows as the whole sequence, for any lengths of prompt and steps. The tail adds the same 200 tokens in
/// another order, and [`Tail::Complement`] subtracts the selected blocks: 200 roundings of 6e-8 of values of about 1 are 1e-5.
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
                    let at = cache.tokens();
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
    assert_eq!(cache.tokens(), 4);
    Ok(())
}
