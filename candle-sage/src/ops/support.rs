//! Functions that the operators share: CPU tensors as f32, tensors from f32 results, and checks of arguments.

use std::borrow::Cow;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, DType, Device, Layout, Result, Shape, Storage, Tensor};
use rayon::prelude::*;

use crate::dtype::{row_stride, unsupported_dtype};
use crate::error::{Error, REPORT};
use crate::launch::{HAS_KERNELS, HOW_TO_GET_KERNELS, Operand};
use crate::shape::Dims;

/// Number of elements of one parallel task.
pub(super) const SPAN: usize = 16 * 1024;

/// Checks that all inputs are on one device: the CPU, or an NVIDIA GPU if this build has kernels for GPUs.
pub(super) fn supported(op: &str, tensors: &[&Tensor]) -> Result<()> {
    let first = tensors[0].device();
    if let Some(other) = tensors.iter().find(|tensor| !tensor.device().same_device(first)) {
        return Err(Error::new(format!("{op}: inputs are on different devices"))
            .got(format!("{:?} and {:?}", first.location(), other.device().location()))
            .allowed("one device for all")
            .hint("move them with `to_device`")
            .into());
    }
    match first {
        Device::Cpu => Ok(()),
        Device::Cuda(_) if HAS_KERNELS => Ok(()),
        _ => Err(Error::unsupported(format!("{op} does not run on this device"))
            .got(format!("a tensor on {:?}", first.location()))
            .allowed(if HAS_KERNELS { "Device::Cpu, Device::Cuda" } else { "Device::Cpu" })
            .hint(HOW_TO_GET_KERNELS)
            .into()),
    }
}

fn other_device(op: &str, device: &'static str) -> candle_core::Error {
    Error::new(format!("{op}: inputs are on different devices"))
        .got(format!("an input that is not on {device}"))
        .allowed("one device for all")
        .hint("move them with `to_device`")
        .into()
}

fn cuda_storage<'a>(storage: &'a Storage, op: &str) -> Result<&'a CudaStorage> {
    match storage {
        Storage::Cuda(storage) => Ok(storage),
        _ => Err(other_device(op, "CUDA")),
    }
}

pub(super) fn cuda_tensor(storage: CudaStorage, shape: impl Into<Shape>) -> Tensor {
    Tensor::from_storage(Storage::Cuda(storage), shape, candle_core::op::BackpropOp::none(), false)
}

pub(super) fn cpu_storage<'a>(storage: &'a Storage, op: &str) -> Result<&'a CpuStorage> {
    match storage {
        Storage::Cpu(storage) => Ok(storage),
        _ => Err(other_device(op, "the CPU")),
    }
}

/// Calls `f` with the storages and layouts of CUDA tensors.
pub(super) fn with_cuda<const N: usize, T>(
    op: &str,
    tensors: [&Tensor; N],
    f: impl FnOnce([Operand<'_>; N]) -> Result<T>,
) -> Result<T> {
    with_all_cuda(op, &tensors, |operands| f(std::array::from_fn(|n| operands[n])))
}

/// As [`with_cuda`], for any number of tensors.
pub(super) fn with_all_cuda<T>(
    op: &str,
    tensors: &[&Tensor],
    f: impl FnOnce(&[Operand<'_>]) -> Result<T>,
) -> Result<T> {
    let guards: Vec<_> = tensors.iter().map(|tensor| tensor.storage_and_layout()).collect();
    let mut operands = Vec::with_capacity(guards.len());
    for (storage, layout) in &guards {
        operands.push((cuda_storage(storage, op)?, *layout));
    }
    f(&operands)
}

/// For each element, in row-major order: its offset in the storage.
fn offsets(layout: &Layout) -> Vec<usize> {
    offsets_of(layout.start_offset(), layout.dims(), layout.stride())
}

fn offsets_of(start: usize, dims: &[usize], strides: &[usize]) -> Vec<usize> {
    let mut offsets = vec![start];
    for (&extent, &stride) in dims.iter().zip(strides) {
        offsets = offsets.iter().flat_map(|at| (0..extent).map(move |i| at + i * stride)).collect();
    }
    offsets
}

/// The elements in row-major order, converted to f32. If the elements of each row are adjacent in memory, rows are
/// converted in parallel.
fn gather<T: Copy + Sync>(values: &[T], layout: &Layout, f: impl Fn(T) -> f32 + Sync) -> Vec<f32> {
    let (dims, strides) = (layout.dims(), layout.stride());
    match (dims, strides) {
        ([outer @ .., width], [outer_strides @ .., 1]) if *width > 0 => {
            let starts = offsets_of(layout.start_offset(), outer, outer_strides);
            let mut out = vec![0.0; starts.len() * width];
            let rows = out.par_chunks_mut(*width).with_min_len(SPAN.div_ceil(*width));
            rows.zip(&starts).for_each(|(out, &start)| {
                out.iter_mut().zip(&values[start..start + width]).for_each(|(out, &x)| *out = f(x));
            });
            out
        }
        _ => offsets(layout).into_iter().map(|i| f(values[i])).collect(),
    }
}

/// The elements of a float tensor as f32 in row-major order; borrowed if the tensor is contiguous and f32.
pub(super) fn f32_values<'a>(op: &str, storage: &'a CpuStorage, layout: &Layout) -> Result<Cow<'a, [f32]>> {
    fn convert<T: Copy + Sync>(values: &[T], layout: &Layout, f: impl Fn(T) -> f32 + Sync) -> Vec<f32> {
        match layout.contiguous_offsets() {
            Some((start, end)) => values[start..end].iter().map(|&x| f(x)).collect(),
            None => gather(values, layout, f),
        }
    }
    Ok(match storage {
        CpuStorage::F32(values) => match layout.contiguous_offsets() {
            Some((start, end)) => Cow::Borrowed(&values[start..end]),
            None => Cow::Owned(convert(values, layout, |x| x)),
        },
        CpuStorage::F16(values) => Cow::Owned(convert(values, layout, half::f16::to_f32)),
        CpuStorage::BF16(values) => Cow::Owned(convert(values, layout, half::bf16::to_f32)),
        other => return Err(unsupported_dtype(op, other.dtype()).into()),
    })
}

/// A CPU tensor as f32 rows of its last dimension. Borrows the data of an f32 tensor whose rows are contiguous and
/// begin at constant distances in memory. Copies any other tensor.
pub(super) struct Rows<'a> {
    values: Cow<'a, [f32]>,
    stride: usize,
}

impl<'a> Rows<'a> {
    pub(super) fn new(op: &str, storage: &'a CpuStorage, layout: &Layout) -> Result<Self> {
        let width = layout.dims().last().copied().unwrap_or(1);
        Ok(match (storage, row_stride(layout)) {
            (CpuStorage::F32(values), Some(stride)) => {
                Self { values: Cow::Borrowed(&values[layout.start_offset()..]), stride }
            }
            _ => Self { values: f32_values(op, storage, layout)?, stride: width },
        })
    }

    pub(super) fn part(&self, row: usize, columns: std::ops::Range<usize>) -> &[f32] {
        &self.values[row * self.stride..][columns]
    }
}

/// The elements of a contiguous f32 tensor, to be changed in place.
pub(super) fn f32_values_mut<'a>(
    op: &str,
    storage: &'a mut CpuStorage,
    layout: &Layout,
) -> Result<&'a mut [f32]> {
    match (storage, layout.contiguous_offsets()) {
        (CpuStorage::F32(values), Some((start, end))) => Ok(&mut values[start..end]),
        (storage, _) => Err(not_a_sum(op, storage.dtype(), layout.is_contiguous()).into()),
    }
}

fn not_a_sum(op: &str, dtype: DType, contiguous: bool) -> Error {
    Error::new(format!("{op}: the tensor to write to must be f32 and contiguous"))
        .got(format!("{}{}", dtype.as_str(), if contiguous { "" } else { ", not contiguous" }))
        .allowed("contiguous f32")
        .hint("`Tensor::zeros(dims, DType::F32, device)` makes one")
}

/// Checks that an op can add to a tensor in place: the tensor is f32, contiguous, and of shape `dims`.
pub(super) fn check_sum(op: &str, sum: &Tensor, dims: &[usize]) -> Result<()> {
    if sum.dims() != dims {
        return Err(shape_error(
            &format!("{op}: the tensor to write to has another shape"),
            shapes_of(&[("tensor", sum)]),
            &format!("{dims:?}"),
            "pass a tensor with the shape of the result",
        ));
    }
    if sum.dtype() != DType::F32 || !sum.is_contiguous() {
        return Err(not_a_sum(op, sum.dtype(), sum.is_contiguous()).into());
    }
    Ok(())
}

/// Calls `f` with the f32 elements of CPU tensors.
pub(super) fn with_f32<const N: usize, T>(
    op: &str,
    tensors: [&Tensor; N],
    f: impl FnOnce([&[f32]; N]) -> Result<T>,
) -> Result<T> {
    let guards = tensors.map(Tensor::storage_and_layout);
    let mut values = Vec::with_capacity(N);
    for (storage, layout) in &guards {
        values.push(f32_values(op, cpu_storage(storage, op)?, layout)?);
    }
    f(std::array::from_fn(|n| &*values[n]))
}

pub(super) fn f32_tensor(values: Vec<f32>, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
    Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)
}

/// The elements of an integer tensor in row-major order.
pub(super) fn ids(op: &str, storage: &CpuStorage, layout: &Layout) -> Result<Vec<i64>> {
    let index = offsets(layout);
    match storage {
        CpuStorage::U8(values) => Ok(index.iter().map(|&i| i64::from(values[i])).collect()),
        CpuStorage::U32(values) => Ok(index.iter().map(|&i| i64::from(values[i])).collect()),
        CpuStorage::I64(values) => Ok(index.iter().map(|&i| values[i]).collect()),
        other => Err(Error::new(format!("{op} does not support ids or targets of this type"))
            .got(other.dtype().as_str())
            .allowed("u8, u32, i64")
            .hint("convert with `to_dtype(DType::U32)`")
            .into()),
    }
}

/// Checks the tensors of an optimizer's update: the state with `rows` numbers per parameter, the gradient, its sum of
/// squares, and the 16-bit copy of the weights.
pub(super) fn check_update(
    op: &str,
    rows: usize,
    state: &Tensor,
    gradient: &Tensor,
    sum_of_squares: &Tensor,
    copy: Option<&Tensor>,
) -> Result<()> {
    let len = gradient.elem_count();
    let dense = state.is_contiguous() && gradient.is_contiguous() && copy.is_none_or(Tensor::is_contiguous);
    let copy_fits = copy.is_none_or(|copy| {
        copy.device().is_cuda() && copy.dims() == [len] && [DType::F16, DType::BF16].contains(&copy.dtype())
    });
    if state.dims() != [rows, len]
        || gradient.rank() != 1
        || sum_of_squares.rank() != 0
        || (state.dtype(), gradient.dtype(), sum_of_squares.dtype()) != (DType::F32, DType::F32, DType::F64)
        || !dense
        || !copy_fits
    {
        let mut all = vec![("state", state), ("gradient", gradient), ("sum of squares", sum_of_squares)];
        all.extend(copy.map(|copy| ("copy", copy)));
        return Err(shape_error(
            &format!("{op}: the tensors do not fit together"),
            shapes_of(&all),
            &format!(
                "state ({rows}, parameters) and gradient (parameters) in f32, sum of squares an f64 scalar; \
                 the optional copy (parameters) in f16 or bf16 on a GPU; all contiguous"
            ),
            "concatenate all parameters into one vector",
        ));
    }
    supported(op, &[state, gradient, sum_of_squares, copy.unwrap_or(state)])
}

/// The names, shapes and types of tensors, for an error: `x [2, 64] bf16, weight [32] f32`.
pub(crate) fn shapes_of(tensors: &[(&str, &Tensor)]) -> String {
    let one = |(name, x): &(&str, &Tensor)| format!("{name} {:?} {}", x.dims(), x.dtype().as_str());
    tensors.iter().map(one).collect::<Vec<_>>().join(", ")
}

pub(super) fn shape_error(
    what: &str,
    got: impl std::fmt::Display,
    allowed: &str,
    hint: &str,
) -> candle_core::Error {
    Error::shape(what).got(got).allowed(allowed).hint(hint).into()
}

/// An error about an argument; [`shape_error`] is for errors about shapes.
pub(super) fn argument_error(
    what: &str,
    got: impl std::fmt::Display,
    allowed: &str,
    hint: &str,
) -> candle_core::Error {
    Error::new(what).got(got).allowed(allowed).hint(hint).into()
}

pub(super) fn run_twice<T>(_: T) -> Error {
    Error::new("an op was applied twice").hint(REPORT)
}

pub(super) fn no_forward() -> Error {
    Error::new("the backward of an op ran before its forward").hint(REPORT)
}

pub(crate) fn dims4(name: &str, tensor: &Tensor) -> Result<Dims> {
    four(name, tensor, "(batch, sequence, heads, head_dim)")
}

/// A tensor (batch, heads, sequence, head_dim) as (batch, sequence, heads, head_dim), or back. Its elements are not
/// copied.
pub(crate) fn swap_heads(name: &str, tensor: &Tensor) -> Result<Tensor> {
    four(name, tensor, "(batch, heads, sequence, head_dim)")?;
    tensor.transpose(1, 2)
}

fn four(name: &str, tensor: &Tensor, allowed: &str) -> Result<Dims> {
    tensor.dims4().map_err(|_| {
        Error::shape(format!("{name} does not have four dimensions"))
            .got(format!("{:?}", tensor.dims()))
            .allowed(allowed)
            .hint("add a dimension of 1 with `unsqueeze`")
            .into()
    })
}

/// Checks that `x` has one number per query head, shape (heads), in any float type on `device`. Returns it in f32.
/// `hints[0]` is for a wrong shape, type or device. `hints[1]` is for a tensor that candle tracks, because it would get
/// no gradient.
pub(super) fn of_heads(
    what: &str,
    x: &Tensor,
    heads: usize,
    device: &Device,
    hints: [&str; 2],
) -> Result<Tensor> {
    let [misfit, tracked] = hints;
    if x.dims() != [heads] || !x.dtype().is_float() || !x.device().same_device(device) {
        return Err(Error::shape(format!("{what} do not fit the heads"))
            .got(format!("{:?} {:?} on {:?}", x.dims(), x.dtype(), x.device().location()))
            .allowed(format!(
                "[{heads}] in a float type on {:?}: a number for each query head",
                device.location()
            ))
            .hint(misfit)
            .into());
    }
    if x.track_op() {
        return Err(Error::unsupported(format!("{what} are tracked, and would get no gradient"))
            .got("a variable, or a tensor that depends on one")
            .allowed("a constant")
            .hint(tracked)
            .into());
    }
    x.to_dtype(DType::F32)?.contiguous()
}
