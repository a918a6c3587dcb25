//! `copy_heads` between views with different strides: it writes all elements of the output view, and no others.

use candle_core::{DType, Device, Result, Tensor};
use candle_sage::ops::copy_heads;

/// Whole numbers below 255, which are exact in f16 and bf16. They repeat after 255 elements.
fn numbers(dims: (usize, usize, usize, usize), dtype: DType, device: &Device) -> Result<Tensor> {
    let (a, b, c, d) = dims;
    let all = (0..a * b * c * d).map(|n| ((n * 97) % 255) as f32).collect();
    Tensor::from_vec(all, dims, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)
}

fn values(x: &Tensor) -> Result<Vec<f32>> {
    x.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}

/// Copies some tokens and heads of a tensor into a larger tensor.
fn copies(device: &Device, dtype: DType) -> Result<()> {
    for (batch, tokens, heads, channels) in [
        (1, 1, 1, 1),
        (2, 5, 3, 8),
        (1, 300, 2, 64),
        (3, 7, 4, 20),
        (2, 65, 1, 128),
        (1, 9, 5, 3),
        (2, 1100, 2, 8),
    ] {
        for (token, head) in [(0, 0), (2, 1), (1, 3)] {
            let x = numbers((batch, tokens + 3, heads + 4, channels), dtype, device)?;
            let part = x.narrow(1, token, tokens)?.narrow(2, head, heads)?;
            let out =
                Tensor::full(-1f32, (batch, tokens + 2, heads + 1, channels), device)?.to_dtype(dtype)?;
            copy_heads(&out.narrow(1, 1, tokens)?.narrow(2, 1, heads)?, &part)?;
            let inside = out.narrow(1, 1, tokens)?.narrow(2, 1, heads)?;
            let what = format!("{batch} {tokens} {heads} {channels}, from {token} {head}, {dtype:?}");
            assert_eq!(values(&inside)?, values(&part)?, "{what}");
            // Copied values are not negative, so elements that are still -1 were not written.
            let untouched = values(&out)?.iter().filter(|&&x| x == -1.0).count();
            assert_eq!(untouched, out.elem_count() - part.elem_count(), "{what}");
            // `turned` has heads before tokens. `one` is a broadcast head.
            let turned = Tensor::zeros((batch, heads, tokens, channels), dtype, device)?;
            copy_heads(&turned.transpose(1, 2)?, &part)?;
            assert_eq!(values(&turned.transpose(1, 2)?)?, values(&part)?, "{what}");
            let one = part.narrow(2, 0, 1)?.broadcast_as((batch, tokens, heads, channels))?;
            copy_heads(&turned.transpose(1, 2)?, &one)?;
            assert_eq!(values(&turned.transpose(1, 2)?)?, values(&one)?, "{what}");
        }
    }
    // Rows whose size is a multiple of 16 bytes, in a tensor that is not aligned to 16 bytes.
    let x = numbers((1, 1, 1, 4 * 64 + 3), dtype, device)?.flatten_all()?.narrow(0, 3, 256)?;
    let out = Tensor::zeros((1, 4, 1, 64), dtype, device)?;
    copy_heads(&out, &x.reshape((1, 4, 1, 64))?)?;
    assert_eq!(values(&out)?, values(&x)?);
    copy_heads(&Tensor::zeros((1, 4, 0, 8), dtype, device)?, &Tensor::zeros((1, 4, 0, 8), dtype, device)?)?;
    copy_heads(&out.narrow(1, 0, 0)?, &x.reshape((1, 4, 1, 64))?.narrow(1, 0, 0)?)
}

#[test]
fn heads_arrive() -> Result<()> {
    [DType::F32, DType::F16, DType::BF16].into_iter().try_for_each(|dtype| copies(&Device::Cpu, dtype))
}

#[test]
#[cfg(feature = "cuda")]
#[ignore = "needs a GPU"]
fn heads_arrive_on_cuda() -> Result<()> {
    let device = crate::support::gpu();
    [DType::F32, DType::F16, DType::BF16].into_iter().try_for_each(|dtype| copies(&device, dtype))
}

#[test]
fn messages() -> Result<()> {
    let zeros = |dims: [usize; 4], dtype| Tensor::zeros(&dims, dtype, &Device::Cpu);
    let x = zeros([1, 2, 3, 4], DType::F32)?;
    let pair = zeros([2, 2, 3, 4], DType::F32)?;
    let integers = zeros([1, 2, 3, 4], DType::U32)?;
    for (wrong, expected) in [
        (copy_heads(&pair, &x), "do not fit together"),
        (copy_heads(&zeros([1, 2, 3, 4], DType::F16)?, &x), "do not fit together"),
        (copy_heads(&x.get(0)?, &x.get(0)?), "do not fit together"),
        (
            copy_heads(&zeros([1, 2, 4, 3], DType::F32)?.transpose(2, 3)?, &x),
            "does not support these strides",
        ),
        (
            copy_heads(&zeros([1, 2, 1, 4], DType::F32)?.broadcast_as((1, 2, 3, 4))?, &x),
            "does not support these strides",
        ),
        (copy_heads(&pair.narrow(0, 0, 1)?, &pair.narrow(0, 1, 1)?), "share memory"),
        (copy_heads(&integers.copy()?, &integers), "u32"),
    ] {
        let message = wrong.expect_err("a mistake").to_string();
        assert!(message.contains(expected) && message.contains("hint:"), "{message}");
    }
    Ok(())
}
