//! Attention on a CPU: copies PyTorch tensors to candle tensors and back. The forward stores nothing; the backward
//! computes the forward again.

use candle_core::{DType, Device, Result, Tensor as Candle, WithDType};
use candle_sage::{Attention, AttentionShape, Selection};
use half::{bf16, f16};
use pyo3::prelude::*;

use super::{BLOCK, Others, Settings, Tensor, dtype, error};

/// A copy of contiguous memory.
///
/// # Safety
/// The memory at the address contains the elements of a tensor with these dimensions and this type.
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
/// The memory at the address has room for the tensor.
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

/// Reads a selection from an array of shape (key heads, blocks of queries, 1 + `width`). Each row has the number of
/// selected key blocks, then their indices.
///
/// # Safety
/// The memory at the address contains an array of this shape.
unsafe fn selection(shape: &AttentionShape, address: u64, width: usize) -> Result<Selection> {
    let rows: usize = shape.segments().iter().map(|segment| segment.query.len().div_ceil(BLOCK.0)).sum();
    let len = shape.key_heads() * rows * (1 + width);
    // SAFETY: the caller vouches for the memory.
    let numbers = unsafe { std::slice::from_raw_parts(address as *const u32, len) };
    let mut lists = numbers.chunks_exact(1 + width);
    // `from_lists` calls the closure once per row of `numbers`, in the order of the rows.
    Selection::from_lists(shape, BLOCK, &Device::Cpu, |at| {
        let list = lists.next().map_or(&[][..], |list| &list[1..=list[0] as usize]);
        list.iter().map(|&block| block as usize).filter(|&block| block < at.candidates).collect()
    })
}

/// Reads the inputs of a call, and adds its sinks, slopes and selection to `attention`.
///
/// # Safety
/// As [`read`].
unsafe fn call(
    attention: Attention,
    dtype: DType,
    inputs: [Tensor; 3],
    (sinks, slopes, (lists, width)): Others,
) -> Result<(Attention, [Candle; 3])> {
    let heads = inputs[0].1[2];
    // SAFETY: the caller vouches for the memory.
    let (of_heads, [q, k, v]) = unsafe {
        let of_heads = |at| (at != 0).then(|| read(at, &[heads], DType::F32)).transpose();
        ([of_heads(sinks)?, of_heads(slopes)?], inputs.map(|(at, dims, _)| read(at, &dims, dtype)))
    };
    let [sinks, slopes] = of_heads;
    let mut attention = attention;
    if let Some(sinks) = sinks {
        attention = attention.sinks(&sinks);
    }
    if let Some(slopes) = slopes {
        attention = attention.alibi(&slopes);
    }
    if lists != 0 {
        let [q, k, v] =
            inputs.map(|(_, [batch, sequence, heads, channels], _)| (batch, sequence, heads, channels));
        let shape = AttentionShape::new(q, k, v, attention.is_causal(), None)?;
        // SAFETY: as above.
        attention = attention.select(&unsafe { selection(&shape, lists, width) }?);
    }
    Ok((attention, [q?, k?, v?]))
}

/// Computes the output for contiguous inputs, and writes it to contiguous memory. If `lse` is not 0, also writes the
/// log-sum-exps, (batch, heads, sequence) in f32, to this address.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub(super) fn forward_cpu(
    py: Python<'_>,
    settings: &Settings,
    packing: Option<(Vec<usize>, Vec<usize>)>,
    element: &str,
    inputs: [Tensor; 3],
    others: Others,
    out: u64,
    lse: u64,
) -> PyResult<()> {
    let (attention, dtype) = (settings.packed(packing), dtype(element)?);
    // SAFETY: `_ops.py` passes the addresses and dimensions of tensors that it keeps alive.
    let run = || unsafe {
        let (attention, [q, k, v]) = call(attention, dtype, inputs, others)?;
        if lse == 0 {
            return write(&attention.apply(&q, &k, &v)?, out);
        }
        let (of_out, of_lse) = attention.apply_with_lse(&q, &k, &v)?;
        write(&of_out, out)?;
        write(&of_lse, lse)
    };
    py.detach(run).map_err(error)
}

/// Computes the gradients of query, key, value and any sinks, and writes them to contiguous memory. `dlse` is the
/// address of the log-sum-exps' gradient, or 0 if that gradient is zero.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub(super) fn backward_cpu(
    py: Python<'_>,
    settings: &Settings,
    packing: Option<(Vec<usize>, Vec<usize>)>,
    element: &str,
    inputs: [Tensor; 3],
    others: Others,
    dout: Tensor,
    dlse: u64,
    gradients: [u64; 3],
    dsinks: u64,
) -> PyResult<()> {
    let (attention, dtype) = (settings.packed(packing), dtype(element)?);
    // SAFETY: as in `forward_cpu`.
    let run = || unsafe {
        let (attention, [q, k, v]) = call(attention, dtype, inputs, others)?;
        let (_, vjp) = attention.vjp(&q, &k, &v)?;
        let [batch, sequence, heads, _] = dout.1;
        let dlse = (dlse != 0).then(|| read(dlse, &[batch, heads, sequence], DType::F32)).transpose()?;
        let results = vjp.apply_with_lse(&read(dout.0, &dout.1, dtype)?, dlse.as_ref())?;
        for (result, address) in results.iter().zip(gradients) {
            write(result, address)?;
        }
        vjp.sink_gradient().map_or(Ok(()), |gradient| write(&gradient, dsinks))
    };
    py.detach(run).map_err(error)
}
