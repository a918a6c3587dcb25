//! Views of 4-D tensors in f32, f16 or bf16, with any strides; the conversion of f32 results to these types.

use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Layout};
use half::{bf16, f16};

use crate::dtype::unsupported_dtype;
use crate::error::{Error, Result};
use crate::shape::Dims;

/// The elements of a tensor's storage.
#[derive(Debug, Clone, Copy)]
enum Elements<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    BF16(&'a [bf16]),
}

/// A (batch, sequence, heads, head_dim) tensor on the CPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View<'a> {
    elements: Elements<'a>,
    offset: usize,
    strides: [usize; 4],
    dims: Dims,
}

impl<'a> View<'a> {
    /// A view of a tensor.
    ///
    /// # Errors
    /// When the elements are not f32, f16 or bf16, or the tensor does not have four dimensions.
    pub(crate) fn new(storage: &'a CpuStorage, layout: &Layout) -> Result<Self> {
        let elements = match storage {
            CpuStorage::F32(values) => Elements::F32(values),
            CpuStorage::F16(values) => Elements::F16(values),
            CpuStorage::BF16(values) => Elements::BF16(values),
            other => return Err(unsupported_dtype("attention", other.dtype())),
        };
        let (&[b, s, h, d], &[sb, ss, sh, sd]) = (layout.dims(), layout.stride()) else {
            return Err(Error::shape("attention needs tensors of four dimensions")
                .got(format!("{:?}", layout.dims()))
                .allowed("(batch, sequence, heads, head_dim)")
                .hint("add a dimension of 1 with `unsqueeze`"));
        };
        Ok(Self { elements, offset: layout.start_offset(), strides: [sb, ss, sh, sd], dims: (b, s, h, d) })
    }

    pub(crate) fn contiguous(values: &'a [f32], dims: Dims) -> Self {
        let (_, s, h, d) = dims;
        Self { elements: Elements::F32(values), offset: 0, strides: [s * h * d, h * d, d, 1], dims }
    }

    pub(crate) fn head_dim(&self) -> usize {
        self.dims.3
    }

    pub(crate) fn is_f16(&self) -> bool {
        matches!(self.elements, Elements::F16(_))
    }

    /// Copies the vectors of one head as f32, one row per token.
    pub(crate) fn rows(&self, batch: usize, tokens: Range<usize>, head: usize) -> Vec<f32> {
        match self.elements {
            Elements::F32(values) => self.gather(values, batch, tokens, head, |x| x),
            Elements::F16(values) => self.gather(values, batch, tokens, head, f16::to_f32),
            Elements::BF16(values) => self.gather(values, batch, tokens, head, bf16::to_f32),
        }
    }

    fn gather<T: Copy>(
        &self,
        values: &[T],
        batch: usize,
        tokens: Range<usize>,
        head: usize,
        to_f32: impl Fn(T) -> f32,
    ) -> Vec<f32> {
        let [sb, ss, sh, sd] = self.strides;
        let d = self.head_dim();
        let mut rows = Vec::with_capacity(tokens.len() * d);
        for token in tokens {
            let start = self.offset + batch * sb + token * ss + head * sh;
            if sd == 1 {
                rows.extend(values[start..start + d].iter().map(|&x| to_f32(x)));
            } else {
                rows.extend((0..d).map(|c| to_f32(values[start + c * sd])));
            }
        }
        rows
    }
}

/// Rounds `values` to `dtype`.
///
/// # Errors
/// When `dtype` is not f32, f16 or bf16.
pub(crate) fn to_storage(values: Vec<f32>, dtype: DType) -> Result<CpuStorage> {
    match dtype {
        DType::F32 => Ok(CpuStorage::F32(values)),
        DType::F16 => Ok(CpuStorage::F16(values.into_iter().map(f16::from_f32).collect())),
        DType::BF16 => Ok(CpuStorage::BF16(values.into_iter().map(bf16::from_f32).collect())),
        other => Err(unsupported_dtype("attention", other)),
    }
}
