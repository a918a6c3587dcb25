//! FP8 quantization of matrices that are sharded over several processes. A process quantizes its parts (ranges of
//! elements) with the scale of the whole matrix, so the FP8 values are the same as from [`Fp8Matrix::quantize`].
//!
//! [`Fp8Matrix::quantize`]: super::Fp8Matrix::quantize

use std::ops::Range;

use candle_core::{CpuStorage, CudaStorage, DType, InplaceOp1, Layout, Result, Tensor};

use super::fp8::largest_in;
use super::support::{
    argument_error, cpu_storage, cuda_tensor, f32_values, shape_error, supported, with_cuda,
};
use crate::fp8::Fp8Format;
use crate::launch::Launch;

const LARGEST: &str = "fp8-largest";
const SCALES: &str = "fp8-scales-of-largest";
const QUANTIZE: &str = "fp8-quantize-parts";

/// The parts passed to [`fp8_largest`] and [`fp8_quantize_parts`] must begin and end at multiples of this number.
pub const FP8_PART: usize = 256;

/// The largest absolute value of each part of `x`, a contiguous f32 vector. Returns an f32 tensor (parts). An empty
/// part gives 0, a part with a NaN gives NaN. Parts begin and end at multiples of [`FP8_PART`].
///
/// For sharded matrices (each process has one part of each matrix), pass the element-wise maximum of the results of all
/// processes to [`fp8_scales`].
///
/// # Errors
/// When `x` is not a contiguous f32 vector, or a part is out of bounds or not aligned to [`FP8_PART`].
pub fn fp8_largest(x: &Tensor, parts: &[Range<usize>]) -> Result<Tensor> {
    check_vector(LARGEST, x, DType::F32)?;
    check_parts(LARGEST, parts, x.elem_count())?;
    supported(LARGEST, &[x])?;
    if x.device().is_cuda() {
        let largest: CudaStorage = with_cuda(LARGEST, [x], |[x]| Largest { parts }.launch(x))?;
        return Ok(cuda_tensor(largest, parts.len()));
    }
    let (storage, layout) = x.storage_and_layout();
    let values = f32_values(LARGEST, cpu_storage(&storage, LARGEST)?, layout)?;
    Tensor::new(parts.iter().map(|part| largest_in(&values[part.clone()])).collect::<Vec<_>>(), x.device())
}

/// The scales of matrices, an f32 vector, computed from `largest`, the largest absolute value of each matrix. A scale
/// is the smallest power of two with which no value saturates, or 1 if the largest value is 0 or not finite.
///
/// # Errors
/// When `largest` is not a contiguous f32 vector.
pub fn fp8_scales(largest: &Tensor, format: Fp8Format) -> Result<Tensor> {
    check_vector(SCALES, largest, DType::F32)?;
    supported(SCALES, &[largest])?;
    let matrices = largest.elem_count();
    if largest.device().is_cuda() {
        let scales: CudaStorage =
            with_cuda(SCALES, [largest], |[largest]| ScalesOf { format }.launch(largest))?;
        return Ok(cuda_tensor(scales, matrices));
    }
    let scales = largest.to_vec1::<f32>()?.into_iter().map(|largest| format.scale(largest));
    Tensor::new(scales.collect::<Vec<_>>(), largest.device())
}

/// Writes the FP8 values of the parts of `x` to the same indices of `codes`: `codes = FP8(x / scale)`, rounded to
/// nearest even, saturating. `x` is a contiguous f32 vector, `codes` a contiguous u8 vector of the same length.
/// `scales` is a contiguous f32 vector with one scale for each part, from [`fp8_scales`]. Elements outside the parts do
/// not change. Parts begin and end at multiples of [`FP8_PART`].
///
/// # Errors
/// When a tensor has another type or length, or a part is out of bounds or not aligned to [`FP8_PART`].
pub fn fp8_quantize_parts(
    codes: &Tensor,
    x: &Tensor,
    parts: &[Range<usize>],
    scales: &Tensor,
    format: Fp8Format,
) -> Result<()> {
    check_vector(QUANTIZE, codes, DType::U8)?;
    check_vector(QUANTIZE, x, DType::F32)?;
    check_vector(QUANTIZE, scales, DType::F32)?;
    if codes.elem_count() != x.elem_count() || scales.elem_count() != parts.len() {
        return Err(shape_error(
            "fp8-quantize-parts: the tensors do not match",
            format!("{} FP8 values, {} scales", codes.elem_count(), scales.elem_count()),
            &format!("{} FP8 values, {} scales", x.elem_count(), parts.len()),
            "an FP8 value for each element of `x`, and a scale for each part",
        ));
    }
    check_parts(QUANTIZE, parts, x.elem_count())?;
    supported(QUANTIZE, &[codes, x, scales])?;
    codes.inplace_op1(&Quantize { x, parts, scales, format })
}

fn check_vector(op: &str, x: &Tensor, dtype: DType) -> Result<()> {
    if x.dtype() == dtype && x.rank() == 1 && x.is_contiguous() {
        return Ok(());
    }
    let strided = if x.is_contiguous() { "" } else { ", not contiguous" };
    Err(shape_error(
        &format!("{op} does not support this tensor"),
        format!("{:?} {:?}{strided}", x.dtype(), x.dims()),
        &format!("a contiguous {dtype:?} vector"),
        "FP8 values are U8, all other tensors F32; `flatten_all()` and `contiguous()` make a vector",
    ))
}

fn check_parts(op: &str, parts: &[Range<usize>], len: usize) -> Result<()> {
    let fits = |part: &&Range<usize>| {
        part.start <= part.end
            && part.end <= len
            && [part.start, part.end].iter().all(|n| n.is_multiple_of(FP8_PART))
    };
    let Some(part) = parts.iter().find(|part| !fits(part)) else { return Ok(()) };
    Err(argument_error(
        &format!("{op}: a part does not fit"),
        format!("{part:?}"),
        &format!("ranges within 0..{len} that begin and end at multiples of {FP8_PART}"),
        "matrices whose dimensions are multiples of 16 fit, if you store them without gaps",
    ))
}

#[allow(dead_code, reason = "only kernels read it")]
pub(crate) struct Largest<'a> {
    pub(crate) parts: &'a [Range<usize>],
}

#[allow(dead_code, reason = "only kernels read it")]
pub(crate) struct ScalesOf {
    pub(crate) format: Fp8Format,
}

struct Quantize<'a> {
    x: &'a Tensor,
    parts: &'a [Range<usize>],
    scales: &'a Tensor,
    format: Fp8Format,
}

/// [`fp8_quantize_parts`] on a GPU. Operands: the FP8 values, `x`, and the scales.
#[allow(dead_code, reason = "only kernels read it")]
pub(crate) struct QuantizeParts<'a> {
    pub(crate) parts: &'a [Range<usize>],
    pub(crate) format: Fp8Format,
}

impl InplaceOp1 for Quantize<'_> {
    fn name(&self) -> &'static str {
        QUANTIZE
    }

    fn cpu_fwd(&self, codes: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let (CpuStorage::U8(codes), Some((start, _))) = (codes, layout.contiguous_offsets()) else {
            candle_core::bail!("fp8-quantize-parts: checked before")
        };
        let (storage, layout) = self.x.storage_and_layout();
        let x = f32_values(QUANTIZE, cpu_storage(&storage, QUANTIZE)?, layout)?;
        for (part, scale) in self.parts.iter().zip(self.scales.to_vec1::<f32>()?) {
            let inverse = 1.0 / scale;
            for (code, x) in codes[start + part.start..start + part.end].iter_mut().zip(&x[part.clone()]) {
                *code = self.format.code(x * inverse);
            }
        }
        Ok(())
    }

    fn cuda_fwd(&self, codes: &mut CudaStorage, layout: &Layout) -> Result<()> {
        with_cuda(QUANTIZE, [self.x, self.scales], |[x, scales]| {
            QuantizeParts { parts: self.parts, format: self.format }.launch([(&*codes, layout), x, scales])
        })
    }
}
