//! Tests that a call writes every element of its buffers, and nothing beyond their ends.

use candle_core::{DType, Result, Storage, Tensor};
use cudarc::driver::DeviceSlice;

use super::device;
use super::inputs::{Inputs, cases};
use crate::cuda::address::{Address, address_at};
use crate::cuda::tensor::{Output, Strided};
use crate::cuda::{OnGpu, OutputGradient, Problem, guard, run_backward, run_forward, with_scheme};
use crate::scheme::{
    AttnQat, Granularity, Int8Products, SageBwd, Scheme, Smoothing, ValueGroups, ValueScale,
};
use crate::selection::Selection;
use crate::shape::Packing;

fn schemes() -> [Scheme; 11] {
    let all = [
        Scheme::Unquantized,
        SageBwd::default().into(),
        SageBwd::default().products(Int8Products::FORWARD_AND_S).into(),
        SageBwd::default().products(Int8Products::SCORES).into(),
        AttnQat::default().into(),
        AttnQat::default().smoothing(Smoothing::K).value_groups(ValueGroups::HeadDim).into(),
        AttnQat::default().value_scale(ValueScale::Head).into(),
        AttnQat::default().matched_recomputation(false).high_precision_output(false).into(),
        SageBwd { smoothing: Smoothing::Qk, granularity: Granularity::Tile, ..SageBwd::default() }.into(),
        SageBwd::default().smoothing(Smoothing::Kv).into(),
        AttnQat::default().smoothing(Smoothing::Kv).into(),
    ];
    assert!(Scheme::contains_all(&all));
    all
}

/// Calls `run_forward` and `run_backward`, which in tests check that no kernel wrote past a buffer. Then checks that
/// all results are written.
fn run(inputs: &Inputs, scheme: &Scheme, deterministic: bool) -> Result<()> {
    fn both<S: OnGpu>(scheme: S, problem: &Problem<'_>, dout: Strided<'_>) -> Result<[Output; 4]> {
        let (out, completed) = run_forward(scheme, problem, true)?;
        let completed = completed.expect("a forward that keeps its state");
        let of_out = Strided { view: out.view(problem.gpu), ..problem.q };
        let output = OutputGradient { out: of_out, dout, dlse: Address::NULL };
        let ([dq, dk, dv], _) = run_backward(&completed, problem, &output)?;
        Ok([dq, dk, dv, out])
    }
    inputs.with(deterministic, |problem, dout| {
        let results = with_scheme!(scheme, |scheme| both(scheme, problem, dout))?;
        let dims = [inputs.shape.query_dims(), inputs.shape.key_dims(), inputs.shape.key_dims()];
        for (result, dims) in results.into_iter().zip(dims.into_iter().chain([inputs.shape.query_dims()])) {
            let none = candle_core::op::BackpropOp::none();
            let t = Tensor::from_storage(Storage::Cuda(result.storage(problem.gpu)), dims, none, false);
            let sum = t.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()?;
            assert!(sum.is_finite(), "{:?}, {scheme}: something was not written", inputs.shape);
        }
        Ok(())
    })
}

/// Buffers are filled with NaN before the kernels run, and a canary follows each buffer.
#[test]
#[ignore = "needs a GPU"]
fn kernels_fill_their_buffers_and_no_more() -> Result<()> {
    for (lens, heads, d, packing) in cases() {
        for dtype in [DType::BF16, DType::F16] {
            for scheme in &schemes() {
                for deterministic in [false, true] {
                    run(&Inputs::new(lens, heads, d, packing.clone(), dtype)?, scheme, deterministic)?;
                }
            }
        }
    }
    Ok(())
}

/// `kernels_fill_their_buffers_and_no_more` with selections, and with heads above 128 channels.
#[test]
#[ignore = "needs a GPU"]
fn kernels_over_lists_fill_their_buffers_and_no_more() -> Result<()> {
    let packing = Packing::self_attention(vec![0, 1, 70, 70, 700]);
    for (lens, d, packing) in [
        ((900, 900), 64, None),
        ((600, 600), 128, None),
        ((700, 700), 40, Some(packing)),
        ((400, 400), 256, None),
    ] {
        let mut inputs = Inputs::new(lens, (2, 1), d, packing, DType::BF16)?;
        inputs.selection = Some(Selection::from_lists(&inputs.shape, (128, 128), &device(), |at| {
            vec![0; at.candidates.min(1)]
        })?);
        for scheme in schemes().iter().take(if d > 128 { 1 } else { usize::MAX }) {
            for deterministic in [false, true] {
                run(&inputs, scheme, deterministic)?;
            }
        }
    }
    let large = Inputs::new((300, 290), (2, 1), 200, None, DType::F16)?;
    run(&large, &Scheme::Unquantized, false)
}

#[test]
#[ignore = "needs a GPU"]
fn addresses_lie_inside_of_their_memory() -> Result<()> {
    let gpu = super::gpu();
    let slice = gpu.alloc::<f32>(8)?;
    let start = address_at(&slice, 0, &gpu)?.number();
    assert_eq!(address_at(&slice, slice.len(), &gpu)?.number(), start + 4 * slice.len() as u64);
    assert!(address_at(&slice, slice.len() + 1, &gpu).is_err());
    guard::check(&gpu)
}
