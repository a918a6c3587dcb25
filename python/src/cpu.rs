//! Attention on a CPU: copies PyTorch's tensors to candle's and back. The forward keeps nothing; the backward repeats it.

use candle_core::{DType, Device, Result, Tensor as Candle, WithDType};
use candle_sage::Attention;
use half::{bf16, f16};
use pyo3::prelude::*;

use super::{Settings, Tensor, dtype, error};

/// The addresses of sinks and slopes, (query heads) in f32; 0 without.
type OfHeads = (u64, u64);

/// A copy of contiguous memory.
///
/// # Safety
/// So many elements of the type are at the address.
unsafe fn read(address: u64, dims: &[usize], dtype: DType) -> Result<Candle> {
    unsafe fn values<T: WithDType>(address: u64, dims: &[usize]) -> Result<Candle> {
        let len = dims.iter().product();
        if len == 0 {
            return Candle::zeros(dims, T::DTYPE, &Device::Cpu);
        }
        // SAFETY: the caller vouches for the memory.
        let values = unsafe { std::slice::from_raw_parts(address as *const T, len) };
        Candle::from_slice(values, dims, &Device::Cpu)
    }
    // SAFETY: as above.
    unsafe {
        match dtype {
            DType::F16 => values::<f16>(address, dims),
            DType::BF16 => values::<bf16>(address, dims),
            _ => values::<f32>(address, dims),
        }
    }
}

/// Copies a tensor into contiguous memory.
///
/// # Safety
/// The memory has room for it.
unsafe fn write(from: &Candle, address: u64) -> Result<()> {
    unsafe fn values<T: WithDType>(from: &Candle, address: u64) -> Result<()> {
        let values = from.flatten_all()?.to_vec1::<T>()?;
        // SAFETY: the caller vouches for the memory.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), address as *mut T, values.len()) };
        Ok(())
    }
    // SAFETY: as above.
    unsafe {
        match from.dtype() {
            DType::F16 => values::<f16>(from, address),
            DType::BF16 => values::<bf16>(from, address),
            _ => values::<f32>(from, address),
        }
    }
}

/// The inputs, and the settings with sinks and slopes.
///
/// # Safety
/// As [`read`].
unsafe fn call(
    attention: Attention,
    dtype: DType,
    inputs: [Tensor; 3],
    (sinks, slopes): OfHeads,
) -> Result<(Attention, [Candle; 3])> {
    let heads = inputs[0].1[2];
    // SAFETY: the caller vouches for the memory.
    let (of_heads, [q, k, v]) = unsafe {
        let of_heads = |at| (at != 0).then(|| read(at, &[heads], DType::F32)).transpose();
        ([of_heads(sinks)?, of_heads(slopes)?], inputs.map(|(at, dims, _)| read(at, &dims, dtype)))
    };
    let [sinks, slopes] = of_heads;
    let attention = sinks.map_or(attention.clone(), |sinks| attention.sinks(&sinks));
    Ok((slopes.map_or(attention.clone(), |slopes| attention.alibi(&slopes)), [q?, k?, v?]))
}

/// Computes the output of contiguous inputs into contiguous memory.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub(super) fn forward_cpu(
    py: Python<'_>,
    settings: &Settings,
    packing: Option<(Vec<usize>, Vec<usize>)>,
    element: &str,
    inputs: [Tensor; 3],
    of_heads: OfHeads,
    out: u64,
) -> PyResult<()> {
    let (attention, dtype) = (settings.packed(packing), dtype(element)?);
    // SAFETY: `_ops.py` passes the addresses and dimensions of tensors that it holds.
    let run = || unsafe {
        let (attention, [q, k, v]) = call(attention, dtype, inputs, of_heads)?;
        write(&attention.apply(&q, &k, &v)?, out)
    };
    py.detach(run).map_err(error)
}

/// Computes the gradients of query, key and value, and with sinks theirs, into contiguous memory.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub(super) fn backward_cpu(
    py: Python<'_>,
    settings: &Settings,
    packing: Option<(Vec<usize>, Vec<usize>)>,
    element: &str,
    inputs: [Tensor; 3],
    of_heads: OfHeads,
    dout: Tensor,
    gradients: [u64; 3],
    dsinks: u64,
) -> PyResult<()> {
    let (attention, dtype) = (settings.packed(packing), dtype(element)?);
    // SAFETY: as in `forward_cpu`.
    let run = || unsafe {
        let (attention, [q, k, v]) = call(attention, dtype, inputs, of_heads)?;
        let (_, vjp) = attention.vjp(&q, &k, &v)?;
        let results = vjp.apply(&read(dout.0, &dout.1, dtype)?)?;
        for (result, address) in results.iter().zip(gradients) {
            write(result, address)?;
        }
        vjp.sink_gradient().map_or(Ok(()), |gradient| write(&gradient, dsinks))
    };
    py.detach(run).map_err(error)
}
