//! Tests that the rounded operands of Attn-QAT's matmuls equal the CPU's operands.

use candle_core::{DType, Result};

use super::inputs::{Inputs, cases, inputs_of};
use crate::cpu::quantize::{channel_mean, subtract_mean};
use crate::cuda::attn_qat::Rounded;
use crate::cuda::plan::TILE;
use crate::cuda::tensor::Element;
use crate::cuda::{Call, OnGpu, Problem, guard};
use crate::nvfp4::{Axis, Packed, head_factor};
use crate::scheme::{AttnQat, Smoothing, ValueGroups, ValueScale};

/// Q, K and V, as Attn-QAT's matmuls read them, have the same bits as on the CPU.
#[test]
#[ignore = "needs a GPU"]
fn rounded_operands_are_the_cpus_to_the_bit() -> Result<()> {
    for (lens, heads, d, packing) in cases() {
        for dtype in [DType::BF16, DType::F16] {
            for settings in [
                AttnQat::default(),
                AttnQat::default().smoothing(Smoothing::K).value_groups(ValueGroups::HeadDim),
                AttnQat::default().smoothing(Smoothing::Kv),
                AttnQat::default().smoothing(Smoothing::Kv).value_groups(ValueGroups::HeadDim),
                AttnQat::default().value_scale(ValueScale::Head),
                AttnQat::default().smoothing(Smoothing::Kv).value_scale(ValueScale::Head),
            ] {
                let inputs = Inputs::new(lens, heads, d, packing.clone(), dtype)?;
                inputs.with(false, |problem, _| compare_rounded(&inputs, problem, &settings))?;
            }
        }
    }
    Ok(())
}

fn compare_rounded(inputs: &Inputs, problem: &Problem<'_>, settings: &AttnQat) -> Result<()> {
    let call = Call::new(problem)?;
    let (shape, d) = (&inputs.shape, inputs.shape.head_dim());
    let operands = settings.operands(&call, false)?;
    let mut forward = inputs_of(&call)?;
    OnGpu::before_forward(settings, &call, &operands, &mut forward)?;
    guard::check(call.gpu)?;
    let Rounded::Values(rounded) = &operands.rounded else { unreachable!("16-bit matmuls") };
    let dims = [shape.query_dims(), shape.key_dims(), shape.key_dims()];
    for (n, (output, dims)) in rounded.iter().zip(dims).enumerate() {
        let bits = call.gpu.device().clone_dtoh(&output.buffer)?;
        let value = |bits: &u16| match output.element {
            Element::BF16 => half::bf16::from_bits(*bits).to_f32(),
            Element::F16 => half::f16::from_bits(*bits).to_f32(),
        };
        let got: Vec<f32> = bits.iter().map(value).collect();
        let along_tokens = n == 2 && settings.value_groups == ValueGroups::Tokens;
        let axis = if along_tokens { Axis::Rows } else { Axis::Channels };
        for segment in shape.segments() {
            let tokens = if n == 0 { segment.query.clone() } else { segment.key.clone() };
            for head in 0..dims.2 {
                let mut rows = inputs.rows(n, dims.2, head, tokens.clone());
                let largest = rows.iter().fold(0f32, |most, x| most.max(x.abs()));
                let scaled = n == 2 && settings.value_scale == ValueScale::Head;
                let factor = if scaled { head_factor(largest) } else { 1.0 };
                if n == 1 && settings.smoothing.of_keys() || n == 2 && settings.smoothing.of_values() {
                    let mean = channel_mean(&rows, d, TILE);
                    subtract_mean(&mut rows, &mean);
                }
                rows.iter_mut().for_each(|x| *x *= factor);
                let expected = Packed::new(&rows, d, axis).rows(0..tokens.len());
                let expected: Vec<f32> = expected.into_iter().map(|x| x / factor).collect();
                for (i, token) in tokens.clone().enumerate() {
                    let got = &got[(token * dims.2 + head) * d..][..d];
                    assert_eq!(
                        got,
                        &expected[i * d..(i + 1) * d],
                        "tensor {n}, token {token}, head {head}, {settings}"
                    );
                }
            }
        }
    }
    Ok(())
}
