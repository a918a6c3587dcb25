//! Tests of [`ForeignAttention`]: its results equal those of [`Attention`](crate::Attention) bit by bit, and it needs
//! no more state and scratch memory than `forward_sizes` and `backward_scratch` say.
#![allow(unsafe_code)]

use candle_core::{DType, Result, Tensor};
use cudarc::driver::DevicePtr;

use super::inputs::{Inputs, cases};
use super::{device, gpu};
use crate::cuda::buffer::Buffer;
use crate::cuda::foreign::{
    ForeignAttention, ForeignLayout, Inputs as Addresses, Lent, ResultGradients, Results, Stream,
};
use crate::cuda::guard;
use crate::cuda::kernels::Gpu;
use crate::cuda::tensor::Strided;
use crate::ops::Attention;
use crate::scheme::{AttnQat, Int8Products, SageBwd, Scheme, Smoothing};
use crate::shape::Packing;

fn layout(x: Strided<'_>, dtype: DType) -> ForeignLayout {
    let strides = [x.view.batch, x.view.token, x.view.head, x.view.channel].map(|stride| stride as usize);
    ForeignLayout { dtype, dims: x.dims, strides }
}

fn number<T>(buffer: &Buffer<T>, gpu: &Gpu) -> u64 {
    buffer.device_ptr(&gpu.stream).0
}

/// Each f32 number as two 16-bit words.
fn halves(numbers: &[f32]) -> Vec<u16> {
    let halves = |x: &f32| [x.to_bits() as u16, (x.to_bits() >> 16) as u16];
    numbers.iter().flat_map(halves).collect()
}

fn dlse(len: usize) -> Vec<f32> {
    (0..len).map(|i| (i % 13) as f32 / 8.0 - 0.5).collect()
}

/// Calls [`ForeignAttention`]. Returns its output, gradients and, if the scheme supports them, log-sum-exps as 16-bit
/// words (two for each log-sum-exp).
fn lent(inputs: &Inputs, attention: &Attention, dtype: DType) -> Result<Vec<Vec<u16>>> {
    inputs.with(true, |problem, dout| {
        let gpu = problem.gpu;
        // SAFETY: candle's own stream.
        let stream = unsafe { Stream::new(0, gpu.stream.cu_stream() as u64) }?;
        let qkv = [problem.q, problem.k, problem.v];
        let call = ForeignAttention::new(attention.clone(), qkv.map(|x| layout(x, dtype)), true)?;
        let with_lse = attention.check_lse().is_ok();
        let call = if with_lse { call.with_lse()? } else { call };
        let addresses = Addresses { tensors: qkv.map(|x| x.view.data.number()), ..Addresses::default() };
        let words = |x: Strided<'_>| gpu.alloc::<u16>(x.dims.iter().product());
        let results = [words(problem.q)?, words(problem.q)?, words(problem.k)?, words(problem.v)?];
        let [out, dq, dk, dv] = results.each_ref().map(|buffer| number(buffer, gpu));
        let [_, queries, heads, _] = problem.q.dims;
        let (lse, given) = (gpu.alloc::<f32>(queries * heads)?, gpu.upload(&dlse(queries * heads))?);
        let results_at = Results { out, lse: number(&lse, gpu) };
        let sizes = call.forward_sizes(&stream)?;
        let needed = call.backward_scratch(&stream)?;
        let memory = [sizes.state, sizes.scratch, needed];
        let [state, scratch, second] = memory.map(|bytes| gpu.alloc::<u8>(bytes));
        let (state, scratch, second) = (state?, scratch?, second?);
        let [state, scratch, second] = [(&state, sizes.state), (&scratch, sizes.scratch), (&second, needed)]
            .map(|(buffer, bytes)| Lent { address: number(buffer, gpu), bytes });
        let dlse = if with_lse { number(&given, gpu) } else { 0 };
        let of_output = (dout.view.data.number(), layout(dout, dtype));
        let output = (out, ResultGradients { out: of_output, lse: dlse });
        // SAFETY: all memory is alive until `guard::check` has waited for the kernels.
        unsafe {
            call.forward(&stream, addresses, results_at, state, scratch)?;
            // A backward with too little scratch memory must fail. It may overwrite gradients, so the valid call is
            // last.
            let short = Lent { bytes: needed - 1, ..second };
            assert!(call.backward(&stream, addresses, output, state, ([dq, dk, dv], 0), short).is_err());
            call.backward(&stream, addresses, output, state, ([dq, dk, dv], 0), second)?;
        }
        guard::check(gpu)?;
        let count = |x: Strided<'_>| x.dims.iter().product::<usize>();
        let counts = [problem.q, problem.q, problem.k, problem.v].map(count);
        let read =
            |(buffer, count): (&Buffer<u16>, usize)| Ok(gpu.device().clone_dtoh(buffer)?[..count].to_vec());
        let mut all: Vec<_> = results.iter().zip(counts).map(read).collect::<Result<_>>()?;
        if with_lse {
            all.push(halves(&gpu.device().clone_dtoh(&lse)?[..queries * heads]));
        }
        Ok(all)
    })
}

/// The results of [`lent`], computed through candle.
fn candles(inputs: &Inputs, attention: &Attention) -> Result<Vec<Vec<u16>>> {
    let [q, k, v, dout] = &inputs.tensors[..] else { unreachable!("four tensors") };
    let (out, vjp) = attention.vjp(q, k, v)?;
    let (_, queries, heads, _) = q.dims4()?;
    let with_lse = attention.check_lse().is_ok();
    let dlse = Tensor::from_vec(dlse(queries * heads), (1, heads, queries), q.device())?;
    let [dq, dk, dv] = vjp.apply_with_lse(dout, with_lse.then_some(&dlse))?;
    let words = |x: Tensor| -> Result<Vec<u16>> {
        let x = x.flatten_all()?;
        Ok(match x.dtype() {
            DType::BF16 => x.to_vec1::<half::bf16>()?.into_iter().map(half::bf16::to_bits).collect(),
            _ => x.to_vec1::<half::f16>()?.into_iter().map(half::f16::to_bits).collect(),
        })
    };
    let mut all: Vec<_> = [out, dq, dk, dv].into_iter().map(words).collect::<Result<_>>()?;
    if with_lse {
        let lse = vjp.lse()?;
        // Checks the canaries before this function frees the buffers.
        guard::check(&gpu())?;
        all.push(halves(&lse.flatten_all()?.to_vec1()?));
    }
    Ok(all)
}

#[test]
#[ignore = "needs a GPU"]
fn foreign_memory_gives_the_same_bits() -> Result<()> {
    let schemes: [Scheme; 7] = [
        Scheme::Unquantized,
        SageBwd::default().into(),
        SageBwd::default().smoothing(Smoothing::Kv).into(),
        SageBwd::default().products(Int8Products::SCORES).into(),
        SageBwd::default().products(Int8Products::FORWARD).into(),
        AttnQat::default().into(),
        AttnQat::default().smoothing(Smoothing::K).into(),
    ];
    drop((device(), gpu()));
    for (lens, heads, d, packing) in cases() {
        for dtype in [DType::BF16, DType::F16] {
            for scheme in schemes {
                let inputs = Inputs::new(lens, heads, d, packing.clone(), dtype)?;
                let attention = Attention::new(scheme).causal(true).softmax_scale(0.125).deterministic(true);
                let attention = match packing.clone() {
                    Some(packing) => {
                        attention.packing(Packing::new(packing.cu_seqlens_q, packing.cu_seqlens_k))
                    }
                    None => attention,
                };
                let (lent, candles) = (lent(&inputs, &attention, dtype)?, candles(&inputs, &attention)?);
                assert!(lent == candles, "{lens:?} {heads:?} {d} {dtype:?} {scheme}");
            }
        }
    }
    Ok(())
}
