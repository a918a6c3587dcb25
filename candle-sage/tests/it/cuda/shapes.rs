//! Attention on a GPU with different lengths, heads, head_dims and strides, and with packed documents.

use candle_core::{DType, Device, Result, Tensor};
use candle_sage::{Int8Products, KeyMean, Packing, Scheme, Selection, Smoothing};

use super::{all, check_against, run, sage};
use crate::support::{Case, gpu, pattern};

#[test]
#[ignore = "needs a GPU"]
fn lengths() -> Result<()> {
    let lengths = [
        (1, 1),
        (63, 63),
        (64, 64),
        (127, 127),
        (128, 128),
        (129, 129),
        (1000, 1000),
        (113, 203),
        (203, 113),
        (1023, 1024),
        (1, 300),
        (300, 1),
    ];
    for (seed, lens) in lengths.into_iter().enumerate() {
        for causal in [false, true] {
            for d in [64, 128] {
                let mut case = Case::new(1, lens, (2, 2), d, causal);
                run(&format!("{lens:?}, causal {causal}, d {d}"), &mut case, &all(), seed as u64)?;
            }
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn a_long_sequence() -> Result<()> {
    let mut case = Case::new(1, (4096, 4096), (1, 1), 64, true);
    run("4096", &mut case, &all(), 1)
}

#[test]
#[ignore = "needs a GPU"]
fn head_layouts() -> Result<()> {
    for (heads, batch) in [((4, 4), 2), ((4, 2), 2), ((6, 1), 1), ((8, 2), 3)] {
        for d in [64, 128] {
            let mut case = Case::new(batch, (150, 150), heads, d, true);
            run(&format!("heads {heads:?}, batch {batch}, d {d}"), &mut case, &all(), 2)?;
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn head_dims_are_padded_inside() -> Result<()> {
    for d in [8, 24, 33, 40, 63, 72, 80, 96, 97, 127] {
        for causal in [false, true] {
            let mut case = Case::new(2, (100, 130), (2, 1), d, causal);
            run(&format!("d {d}, causal {causal}"), &mut case, &all(), 3)?;
        }
    }
    Ok(())
}
/// Unquantized attention above 128 channels, where each thread block of the backward computes a part of the channels.
#[test]
#[ignore = "needs a GPU"]
fn large_heads() -> Result<()> {
    check_large_heads(&[Scheme::Unquantized])
}

/// SageBwd above 128 channels, with S as the only INT8 matmul. Only Hopper has these kernels.
#[test]
#[ignore = "needs a GPU"]
fn large_heads_in_int8() -> Result<()> {
    let scores = sage().products(Int8Products::SCORES);
    let sampled = scores.key_mean(KeyMean::Sample(64));
    check_large_heads(&[scores.into(), scores.smoothing(Smoothing::None).into(), sampled.into()])
}

/// Checks head_dims above 128: lengths, groups, documents, strides that prevent vector loads, reproducible gradients,
/// and selections in which a key block's list of query blocks is so long that it is split among thread blocks.
fn check_large_heads(schemes: &[Scheme]) -> Result<()> {
    for d in [129, 136, 160, 192, 255, 256] {
        let long = if d == 256 { 700 } else { 300 };
        for (lens, causal) in [((1, 1), true), ((100, 130), false), ((203, 113), true), ((long, long), true)]
        {
            let mut case = Case::new(2, lens, (2, 1), d, causal);
            run(&format!("{lens:?}, d {d}, causal {causal}"), &mut case, schemes, d as u64)?;
        }
        let mut case = Case::new(1, (500, 500), (2, 1), d, true);
        case.packing = Some(Packing::self_attention(vec![0, 1, 64, 64, 193, 450, 500]));
        run(&format!("packed, d {d}"), &mut case, schemes, 4)?;
    }
    schemes.iter().try_for_each(|&scheme| check_lists_of_large_heads(scheme))
}

fn check_lists_of_large_heads(scheme: Scheme) -> Result<()> {
    let device = gpu();
    let mut case = Case::new(1, (2500, 2500), (2, 1), 256, true);
    case.draw(1.0, 1);
    case.round_to(DType::BF16)?;
    let selection = Selection::from_lists(&case.shape(), (128, 128), &Device::Cpu, |at| {
        (0..at.candidates).filter(|&block| block % 7 == 0 || block + 1 == at.candidates).collect()
    })?;
    let listed = case.attention(scheme).select(&selection);
    let (exact, cpu) =
        (case.exact_over(&pattern(&selection)), case.run_on(&Device::Cpu, &listed, DType::BF16)?);
    let on_gpu = case.attention(scheme).select(&selection.to_device(&device)?);
    let repeated = [false, true, true]
        .map(|deterministic| case.run_on(&device, &on_gpu.clone().deterministic(deterministic), DType::BF16));
    let [any_order, first, second] = repeated;
    check_against("lists, d 256", scheme, DType::BF16, &any_order?, [&exact, &cpu], 2500);
    let (first, second) = (first?, second?);
    check_against("lists in order, d 256", scheme, DType::BF16, &first, [&exact, &cpu], 2500);
    assert_eq!(first, second, "gradients over lists repeat");
    let dense = case.attention(scheme).deterministic(true);
    assert_eq!(
        case.run_on(&device, &dense, DType::BF16)?,
        case.run_on(&device, &dense, DType::BF16)?,
        "gradients repeat"
    );
    Ok(())
}
/// At least 144 work items (a work item is one tile of one head): on a GPU of up to 143 multiprocessors, some thread
/// blocks process several items. Some queries see no key.
#[test]
#[ignore = "needs a GPU"]
fn more_work_than_multiprocessors() -> Result<()> {
    for d in [64, 128] {
        let mut case = Case::new(3, (700, 500), (12, 4), d, true);
        run(&format!("700 x 500, 36 heads, d {d}"), &mut case, &all(), 11)?;
        let mut case = Case::new(1, (1200, 1200), (12, 4), d, true);
        case.packing = Some(Packing::self_attention(vec![0, 3, 500, 501, 600, 1200]));
        run(&format!("packed, 12 heads, d {d}"), &mut case, &all(), 12)?;
    }
    Ok(())
}
#[test]
#[ignore = "needs a GPU"]
fn packed_documents() -> Result<()> {
    for d in [64, 128] {
        let mut case = Case::new(1, (500, 500), (2, 1), d, true);
        case.packing = Some(Packing::self_attention(vec![0, 1, 64, 64, 193, 450, 500]));
        run(&format!("packed, d {d}"), &mut case, &all(), 4)?;
        let mut case = Case::new(1, (300, 400), (2, 2), d, false);
        case.packing = Some(Packing::new(vec![0, 10, 10, 200, 300], vec![0, 100, 130, 130, 400]));
        run(&format!("packed with different lengths, d {d}"), &mut case, &all(), 5)?;
    }
    Ok(())
}
/// Inputs with any strides give the results of contiguous inputs.
#[test]
#[ignore = "needs a GPU"]
fn strided_inputs() -> Result<()> {
    let device = gpu();
    let attention = |scheme| candle_sage::Attention::new(scheme).causal(true).deterministic(true);
    for scheme in all() {
        // Heads before tokens; strided channels; a view that is not aligned to 16 bytes; one head broadcast to all.
        let base = Tensor::randn(0f32, 1., (2, 3, 70, 64), &device)?.to_dtype(DType::BF16)?;
        let apart = Tensor::randn(0f32, 1., (2, 64, 3, 70), &device)?.to_dtype(DType::BF16)?;
        let wide = Tensor::randn(0f32, 1., (2, 70, 3, 71), &device)?.to_dtype(DType::BF16)?;
        let one = Tensor::randn(0f32, 1., (2, 70, 1, 64), &device)?.to_dtype(DType::BF16)?;
        let views = [
            base.transpose(1, 2)?,
            apart.permute((0, 3, 2, 1))?,
            wide.narrow(3, 5, 64)?,
            one.broadcast_as((2, 70, 3, 64))?,
        ];
        for (n, x) in views.iter().enumerate() {
            let plain = x.force_contiguous()?;
            let run = |x: &Tensor| -> Result<Vec<Vec<f32>>> {
                let (out, vjp) = attention(scheme).vjp(x, &views[(n + 1) % 4], x)?;
                let grads = vjp.apply(x)?;
                let all = [vec![out], grads.to_vec()].concat();
                all.iter().map(|t| t.to_dtype(DType::F32)?.flatten_all()?.to_vec1()).collect()
            };
            assert!(run(x)? == run(&plain)?, "{scheme}, view {n}");
        }
    }
    Ok(())
}
