//! Copies of heads between tensors with different strides.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, InplaceOp2, Layout, Result, Tensor};

use super::support::{argument_error, shape_error, shapes_of, supported};
use crate::dtype::unsupported_dtype;
use crate::launch::Launch;

const NAME: &str = "copy-heads";

/// `out = x`, both (batch, sequence, heads, head_dim) of one type: f32, f16 or bf16.
///
/// `out` and `x` may be views with any strides, as long as channels are adjacent: for example some heads of a tensor
/// with more heads, or some tokens of a longer sequence. The function gathers or concatenates heads in one pass. On a
/// GPU it moves 16 bytes at a time if all heads are aligned to 16 bytes.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_sage::ops::copy_heads;
///
/// // `x` has two tokens, four heads and one channel. The second and the third head are copied.
/// let x = Tensor::arange(0f32, 8., &Device::Cpu)?.reshape((1, 2, 4, 1))?;
/// let out = Tensor::zeros((1, 2, 2, 1), DType::F32, &Device::Cpu)?;
/// copy_heads(&out, &x.narrow(2, 1, 2)?)?;
/// assert_eq!(out.flatten_all()?.to_vec1::<f32>()?, [1., 2., 5., 6.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// When shapes, types or devices differ, channels are not adjacent, `out` is broadcast, or both tensors share memory.
pub fn copy_heads(out: &Tensor, x: &Tensor) -> Result<()> {
    if out.rank() != 4 || out.dims() != x.dims() || out.dtype() != x.dtype() {
        return Err(shape_error(
            "copy_heads: the tensors do not fit together",
            shapes_of(&[("x", x), ("out", out)]),
            "two tensors of one shape (batch, sequence, heads, head_dim) and one type",
            "`narrow` the larger one",
        ));
    }
    if out.elem_count() == 0 {
        return Ok(());
    }
    let adjacent = |tensor: &Tensor| tensor.dims()[3] == 1 || tensor.stride()[3] == 1;
    let broadcast = out.dims().iter().zip(out.stride()).any(|(&extent, &stride)| extent > 1 && stride == 0);
    if !adjacent(x) || !adjacent(out) || broadcast {
        return Err(shape_error(
            "copy_heads does not support these strides",
            format!("strides {:?} of x, {:?} of out", x.stride(), out.stride()),
            "channels of stride 1, and an output that is not broadcast",
            "call `contiguous()` on x; `Tensor::zeros` makes a suitable `out`",
        ));
    }
    if share_storage(out, x) {
        return Err(argument_error(
            "copy_heads: input and output share memory",
            shapes_of(&[("x", x), ("out", out)]),
            "two separate tensors",
            "copy the input: `x.copy()`",
        ));
    }
    supported(NAME, &[out, x])?;
    out.inplace_op2(&x.detach(), &CopyHeads)
}

/// Whether `a` and `b` are views of one storage, which an op cannot lock for writing and reading at once.
fn share_storage(a: &Tensor, b: &Tensor) -> bool {
    let ((a, _), (b, _)) = (a.storage_and_layout(), b.storage_and_layout());
    std::ptr::eq(&raw const *a, &raw const *b)
}

pub(crate) struct CopyHeads;

impl InplaceOp2 for CopyHeads {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        out: &mut CpuStorage,
        layout: &Layout,
        x: &CpuStorage,
        x_layout: &Layout,
    ) -> Result<()> {
        match (out, x) {
            (CpuStorage::F32(out), CpuStorage::F32(x)) => copy(out, layout, x, x_layout),
            (CpuStorage::F16(out), CpuStorage::F16(x)) => copy(out, layout, x, x_layout),
            (CpuStorage::BF16(out), CpuStorage::BF16(x)) => copy(out, layout, x, x_layout),
            (out, _) => return Err(unsupported_dtype(NAME, out.dtype()).into()),
        }
        Ok(())
    }

    fn cuda_fwd(
        &self,
        out: &mut CudaStorage,
        layout: &Layout,
        x: &CudaStorage,
        x_layout: &Layout,
    ) -> Result<()> {
        self.launch([(&*out, layout), (x, x_layout)])
    }
}

/// For each (batch, token, head), in row-major order: the index of its first channel in the storage.
fn heads(layout: &Layout) -> impl Iterator<Item = usize> + '_ {
    let (dims, strides) = (layout.dims(), layout.stride());
    let tokens = (0..dims[0])
        .flat_map(move |batch| (0..dims[1]).map(move |token| batch * strides[0] + token * strides[1]));
    tokens.flat_map(move |at| (0..dims[2]).map(move |head| layout.start_offset() + at + head * strides[2]))
}

fn copy<T: Copy>(out: &mut [T], layout: &Layout, x: &[T], x_layout: &Layout) {
    let channels = layout.dims()[3];
    for (to, from) in heads(layout).zip(heads(x_layout)) {
        out[to..to + channels].copy_from_slice(&x[from..from + channels]);
    }
}
