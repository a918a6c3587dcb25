//! Matrices in FP8, and their matmuls.

use candle_core::{CpuStorage, CudaStorage, DType, Device, InplaceOp1, Layout, Result, Tensor};
use rayon::prelude::*;

use super::fp8_scales::{Fp8Scale, Fp8Site};
use super::support::{
    SPAN, argument_error, check_sum, cpu_storage, cuda_tensor, f32_tensor, f32_values, f32_values_mut,
    shape_error, supported, with_cuda,
};
use crate::cpu::product::{Mat, product_parallel};
use crate::fp8::{Fp8Format, largest_of};
use crate::launch::Launch;

const QUANTIZE: &str = "fp8-quantize";
const FROM_CODES: &str = "fp8-from-codes";
const PRODUCT: &str = "fp8-product";

/// The accumulators of an FP8 matmul on a GPU. The CPU always sums in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Fp8Sums {
    /// The tensor cores' own accumulators, which keep about 14 bits on Hopper (DeepSeek-V3, arXiv 2412.19437, section
    /// 3.3.2).
    #[default]
    Fast,
    /// f32 accumulators, to which partial sums of the tensor cores are added.
    F32,
}

/// Whether a matrix, its transpose, or both are stored. Hopper's FP8 matmuls need operands that are contiguous along
/// the summed dimension. So a matmul that sums over the row index needs the transpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fp8Copies {
    /// Only the matrix itself.
    Rows,
    /// Only the transpose.
    Columns,
    /// The matrix and its transpose.
    Both,
}

impl Fp8Copies {
    pub(crate) fn has_rows(self) -> bool {
        self != Self::Columns
    }

    pub(crate) fn has_columns(self) -> bool {
        self != Self::Rows
    }
}

/// A matrix of FP8 values with one scale; see [`crate::fp8`]. A code is the byte that stores an FP8 value.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_sage::fp8::Fp8Format::E4M3;
/// use candle_sage::ops::{Fp8Copies, Fp8Matrix, Fp8Sums};
///
/// let x = Tensor::randn(0f32, 1., (32, 64), &Device::Cpu)?;
/// let w = Tensor::randn(0f32, 1., (16, 64), &Device::Cpu)?;
/// let [x8, w8] = [Fp8Matrix::quantize(&x, E4M3, Fp8Copies::Rows)?, Fp8Matrix::quantize(&w, E4M3, Fp8Copies::Both)?];
/// let y = x8.product(&w8, DType::F32, Fp8Sums::Fast)?;
/// let error = (y - x.matmul(&w.t()?)?)?.sqr()?.mean_all()?.to_scalar::<f32>()?.sqrt();
/// assert!(error < 0.05 * 8., "{error}"); // the standard deviation of y is sqrt(64)
/// // The matmul for the gradient of x needs the transpose of w.
/// assert_eq!(w8.t().dims(), (64, 16));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Fp8Matrix {
    /// The codes, (rows, columns), and their transpose, (columns, rows).
    copies: [Option<Tensor>; 2],
    dims: (usize, usize),
    /// One f32. The FP8 value of a code, times this scale, is an element of the matrix.
    scale: Tensor,
    format: Fp8Format,
}

/// The numbers of rows and columns of an [`Fp8Matrix`] must be multiples of this number, as cuBLASLt requires.
pub const FP8_MULTIPLE: usize = 16;

impl Fp8Matrix {
    /// Quantizes a matrix (rows, columns) in f32, f16 or bf16. The scale is [`Fp8Format::scale`] of the largest
    /// absolute value. Both dimensions must be multiples of 16.
    ///
    /// # Errors
    /// When `x` is not a matrix, or a dimension is not a multiple of 16.
    pub fn quantize(x: &Tensor, format: Fp8Format, copies: Fp8Copies) -> Result<Self> {
        check_dims(QUANTIZE, x.dims())?;
        supported(QUANTIZE, &[x])?;
        let op = Quantize { format, copies };
        if x.device().is_cuda() {
            return with_cuda(QUANTIZE, [x], |[x]| {
                let quantized: Quantized<CudaStorage> = op.launch(x)?;
                Ok(quantized.into_matrix(format, x.1.shape().dims2()?, cuda_tensor))
            });
        }
        let (storage, layout) = x.storage_and_layout();
        let values = f32_values(QUANTIZE, cpu_storage(&storage, QUANTIZE)?, layout)?;
        let quantized = op.on_cpu(&values, layout.shape().dims2()?);
        Ok(quantized.into_matrix(format, x.dims2()?, from_cpu))
    }

    /// Quantizes a matrix as [`quantize`](Self::quantize) does, but with a scale from earlier steps, and in the format
    /// of this scale.
    ///
    /// # Errors
    /// As [`quantize`](Self::quantize), and when the scale is on another device.
    pub fn quantize_with(x: &Tensor, copies: Fp8Copies, scale: &Fp8Scale) -> Result<Self> {
        check_dims(QUANTIZE, x.dims())?;
        supported(QUANTIZE, &[x])?;
        let op = Quantize { format: scale.format(), copies };
        if x.device().is_cuda() {
            let state = scale.on_device()?;
            let op = QuantizeWith { op, scale: scale.site(), measure: !scale.swap_measured() };
            let codes = with_cuda(QUANTIZE, [x, state], |operands| op.launch(operands))?;
            return Ok(Self::of_codes(codes, x.dims2()?, scale.format()));
        }
        let (storage, layout) = x.storage_and_layout();
        let values = f32_values(QUANTIZE, cpu_storage(&storage, QUANTIZE)?, layout)?;
        let top = op.format.largest();
        let scale = scale.on_host(largest_in(&values), |scale| {
            values.par_iter().with_min_len(SPAN).filter(|x| x.abs() / scale > top).count() as u64
        })?;
        Ok(op.with_scale(&values, x.dims2()?, scale).into_matrix(op.format, x.dims2()?, from_cpu))
    }

    /// Makes a matrix from row-major `codes` (rows, columns) in u8 and their `scale` (1) in f32. The transpose is
    /// stored too ([`Fp8Copies::Both`]). The matrix itself shares memory with `codes`; the scale is copied.
    ///
    /// # Errors
    /// When the codes are not a contiguous u8 matrix with dimensions that are multiples of 16, or the scale is not one
    /// f32.
    pub fn from_codes(codes: &Tensor, scale: &Tensor, format: Fp8Format) -> Result<Self> {
        check_dims(FROM_CODES, codes.dims())?;
        supported(FROM_CODES, &[codes, scale])?;
        let is_contiguous = codes.is_contiguous();
        if codes.dtype() != DType::U8 || !is_contiguous || scale.dtype() != DType::F32 || scale.dims() != [1]
        {
            let strided = if is_contiguous { "" } else { ", not contiguous" };
            return Err(shape_error(
                "fp8-from-codes: `codes` or `scale` has the wrong type, shape or layout",
                format!("{:?}{strided}, and {:?} {:?}", codes.dtype(), scale.dtype(), scale.dims()),
                "contiguous U8, and F32 [1]",
                "pass what `codes` and `scale` of an `Fp8Matrix` return",
            ));
        }
        let dims = codes.dims2()?;
        let mut matrix = if codes.device().is_cuda() {
            let made = with_cuda(FROM_CODES, [codes, scale], |operands| Transpose.launch(operands))?;
            Self::of_codes(made, dims, format)
        } else {
            let turned = transposed(&codes.flatten_all()?.to_vec1()?, dims);
            let scale = CpuStorage::F32(scale.to_vec1()?);
            Quantized { rows: None, columns: Some(CpuStorage::U8(turned)), scale }
                .into_matrix(format, dims, from_cpu)
        };
        matrix.copies[0] = Some(codes.clone());
        Ok(matrix)
    }

    pub(super) fn of_codes(codes: Quantized<CudaStorage>, dims: (usize, usize), format: Fp8Format) -> Self {
        codes.into_matrix(format, dims, cuda_tensor)
    }

    /// Rows and columns.
    pub fn dims(&self) -> (usize, usize) {
        self.dims
    }

    /// The format of the codes.
    pub fn format(&self) -> Fp8Format {
        self.format
    }

    /// The codes in row-major order, u8 (rows, columns); `None` if the matrix has no row copy ([`Fp8Copies::Rows`]).
    pub fn codes(&self) -> Option<&Tensor> {
        self.copies[0].as_ref()
    }

    /// The scale, f32 (1): `element = value(code) * scale`.
    pub fn scale(&self) -> &Tensor {
        &self.scale
    }

    /// The transpose. Nothing is copied.
    #[must_use]
    pub fn t(&self) -> Self {
        let [rows, columns] = self.copies.clone();
        Self { copies: [columns, rows], dims: (self.dims.1, self.dims.0), ..self.clone() }
    }

    /// The matrix without its row copy ([`Fp8Copies::Rows`]), to free memory. Then only the matrix's transpose
    /// ([`t`](Self::t)) can be an operand of [`product`](Self::product).
    #[must_use]
    pub fn without_rows(self) -> Self {
        let [_, columns] = self.copies;
        Self { copies: [None, columns], ..self }
    }

    /// The elements, in f32.
    ///
    /// # Errors
    /// When the matrix has neither a row copy nor a transposed copy, or there is not enough memory.
    pub fn dequantize(&self) -> Result<Tensor> {
        let (is_turned, codes) = match &self.copies {
            [Some(codes), _] => (false, codes),
            [None, Some(codes)] => (true, codes),
            [None, None] => {
                return Err(argument_error(
                    "the FP8 matrix has neither a row copy nor a transposed copy of its values",
                    format!("a matrix {:?}", self.dims),
                    "one of these copies",
                    "`without_rows` keeps only the transposed copy: quantize with Fp8Copies::Columns or Both",
                ));
            }
        };
        let scale = self.scale.to_vec1::<f32>()?[0];
        let codes = codes.flatten_all()?.to_vec1::<u8>()?;
        let values: Vec<f32> = codes.par_iter().map(|&code| self.format.value(code) * scale).collect();
        let (rows, columns) = if is_turned { (self.dims.1, self.dims.0) } else { self.dims };
        let values = Tensor::from_vec(values, (rows, columns), &Device::Cpu)?;
        if is_turned { values.t()?.contiguous() } else { Ok(values) }?.to_device(self.scale.device())
    }

    /// `a b^T`, where `a` is `self`, (m, k), and `b` is (n, k): an (m, n) tensor of type `dtype` (f32, f16 or bf16).
    /// `a` and `b` need their row copies ([`Fp8Copies::Rows`]).
    ///
    /// # Errors
    /// When `a` and `b` have different numbers of columns, lack a row copy, or are both E5M2, and when the GPU has no
    /// FP8 units (compute capability below 8.9).
    pub fn product(&self, b: &Self, dtype: DType, sums: Fp8Sums) -> Result<Tensor> {
        let (m, n) = self.check_product(b)?;
        let op = Fp8Product { formats: [self.format, b.format], sums, dtype };
        let operands = [self.rows()?, b.rows()?, &self.scale, &b.scale];
        supported(PRODUCT, &operands)?;
        if self.scale.device().is_cuda() {
            let out: CudaStorage = with_cuda(PRODUCT, operands, |operands| op.launch(operands))?;
            return Ok(cuda_tensor(out, (m, n)));
        }
        let mut out = vec![0.0; m * n];
        self.product_on_cpu(b, &mut out, false)?;
        f32_tensor(out, (m, n), dtype)
    }

    /// `out += a b^T` if `add`, otherwise `out = a b^T`, with `a` and `b` as in [`product`](Self::product). `out` is
    /// contiguous (m, n), in f32 or, on a GPU, in f16 or bf16.
    ///
    /// # Errors
    /// As [`product`](Self::product), and when `out` has another shape, type or layout.
    pub fn product_into(&self, out: &Tensor, b: &Self, add: bool, sums: Fp8Sums) -> Result<()> {
        let (m, n) = self.check_product(b)?;
        let dtype = out.dtype();
        let in_16_bits = out.device().is_cuda() && [DType::F16, DType::BF16].contains(&dtype);
        if !(in_16_bits && out.dims() == [m, n] && out.is_contiguous()) {
            check_sum(PRODUCT, out, &[m, n])?;
        }
        supported(PRODUCT, &[out, self.rows()?, b.rows()?])?;
        out.inplace_op1(&ProductInto { a: self, b, add, sums, dtype })
    }

    fn check_product(&self, b: &Self) -> Result<(usize, usize)> {
        if self.dims.1 != b.dims.1 {
            return Err(shape_error(
                "FP8 matmul: the matrices do not match",
                format!("a {:?}, b {:?}", self.dims, b.dims),
                "(m, k) and (n, k), for a b^T",
                "transpose a matrix with `t()`",
            ));
        }
        if self.format == Fp8Format::E5M2 && b.format == Fp8Format::E5M2 {
            return Err(argument_error(
                "an FP8 matmul supports at most one operand in E5M2",
                format!("{:?} and {:?}", self.format, b.format),
                "E4M3 and E4M3, or E4M3 and E5M2",
                "quantize one operand as E4M3",
            ));
        }
        Ok((self.dims.0, b.dims.0))
    }

    /// The codes that a matmul reads.
    pub(super) fn rows(&self) -> Result<&Tensor> {
        self.copies[0].as_ref().ok_or_else(|| {
            argument_error(
                "the FP8 matrix has no row copy",
                format!("a matrix {:?}", self.dims),
                "Fp8Copies::Rows or Both",
                "before `t()`, quantize with Fp8Copies::Columns or Both: `t()` swaps the row copy and the transposed copy",
            )
        })
    }

    pub(super) fn product_on_cpu(&self, b: &Self, out: &mut [f32], add: bool) -> Result<()> {
        let values = |matrix: &Self| -> Result<Vec<f32>> {
            let codes = matrix.rows()?.flatten_all()?.to_vec1::<u8>()?;
            Ok(codes.par_iter().map(|&code| matrix.format.value(code)).collect())
        };
        let scale = |matrix: &Self| Ok::<f32, candle_core::Error>(matrix.scale.to_vec1::<f32>()?[0]);
        let (of_a, of_b) = (values(self)?, values(b)?);
        let (a, b_t) = (Mat::new(&of_a, self.dims.0, self.dims.1), Mat::new(&of_b, b.dims.0, b.dims.1).t());
        product_parallel(out, a, b_t, scale(self)? * scale(b)?, add);
        Ok(())
    }
}

pub(super) fn check_dims(op: &str, dims: &[usize]) -> Result<()> {
    if let [rows, columns] = dims
        && [rows, columns].iter().all(|&&n| n > 0 && n.is_multiple_of(FP8_MULTIPLE))
    {
        return Ok(());
    }
    Err(shape_error(
        &format!("{op}: FP8 matmuls do not support this shape"),
        format!("{dims:?}"),
        "matrices with dimensions that are positive multiples of 16",
        "flatten leading dimensions; use a 16-bit matmul for other sizes",
    ))
}

pub(super) fn from_cpu(storage: CpuStorage, dims: Vec<usize>) -> Tensor {
    Tensor::from_storage(candle_core::Storage::Cpu(storage), dims, candle_core::op::BackpropOp::none(), false)
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Quantize {
    pub(crate) format: Fp8Format,
    pub(crate) copies: Fp8Copies,
}

/// [`Quantize`] with a matrix's scale from the state of [`Fp8Scales`](super::Fp8Scales).
#[allow(dead_code, reason = "only kernels read it")]
#[derive(Debug, Clone, Copy)]
pub(crate) struct QuantizeWith {
    pub(crate) op: Quantize,
    pub(crate) scale: Fp8Site,
    /// Whether the scale is computed from the matrix, because [`Fp8Scales`](super::Fp8Scales) has no scale for it yet.
    pub(crate) measure: bool,
}

/// Copies a matrix of codes and its scale, and transposes the copy of the codes.
pub(crate) struct Transpose;

fn transposed(codes: &[u8], (rows, columns): (usize, usize)) -> Vec<u8> {
    let mut turned = vec![0; codes.len()];
    turned.par_chunks_mut(rows.max(1)).enumerate().for_each(|(column, turned)| {
        for (row, code) in turned.iter_mut().enumerate() {
            *code = codes[row * columns + column];
        }
    });
    turned
}

pub(super) fn largest_in(values: &[f32]) -> f32 {
    values.par_chunks(SPAN).map(largest_of).reduce(|| 0.0, |a, b| largest_of(&[a, b]))
}

/// The codes of a matrix (`rows`), the codes of its transpose (`columns`), and its scale.
pub(crate) struct Quantized<S> {
    pub(crate) rows: Option<S>,
    pub(crate) columns: Option<S>,
    pub(crate) scale: S,
}

impl<S> Quantized<S> {
    pub(super) fn into_matrix(
        self,
        format: Fp8Format,
        (rows, columns): (usize, usize),
        tensor: impl Fn(S, Vec<usize>) -> Tensor,
    ) -> Fp8Matrix {
        let own = self.rows.map(|codes| tensor(codes, vec![rows, columns]));
        let turned = self.columns.map(|codes| tensor(codes, vec![columns, rows]));
        let scale = tensor(self.scale, vec![1]);
        Fp8Matrix { copies: [own, turned], dims: (rows, columns), scale, format }
    }
}

impl Quantize {
    pub(super) fn on_cpu(self, values: &[f32], dims: (usize, usize)) -> Quantized<CpuStorage> {
        self.with_scale(values, dims, self.format.scale(largest_in(values)))
    }

    fn with_scale(self, values: &[f32], dims: (usize, usize), scale: f32) -> Quantized<CpuStorage> {
        let inverse = 1.0 / scale;
        let codes: Vec<u8> =
            values.par_iter().with_min_len(SPAN).map(|x| self.format.code(x * inverse)).collect();
        let turned = self.copies.has_columns().then(|| CpuStorage::U8(transposed(&codes, dims)));
        let rows = self.copies.has_rows().then_some(CpuStorage::U8(codes));
        Quantized { rows, columns: turned, scale: CpuStorage::F32(vec![scale]) }
    }
}

/// `a b^T` on a GPU. The operands of the launch are the FP8 codes of a and b, and their scales.
#[derive(Debug, Clone, Copy)]
#[allow(dead_code, reason = "only kernels read it")]
pub(crate) struct Fp8Product {
    pub(crate) formats: [Fp8Format; 2],
    pub(crate) sums: Fp8Sums,
    pub(crate) dtype: DType,
}

/// Adds `a b^T` to a tensor if `add`, otherwise overwrites the tensor with `a b^T`.
struct ProductInto<'a> {
    a: &'a Fp8Matrix,
    b: &'a Fp8Matrix,
    add: bool,
    sums: Fp8Sums,
    dtype: DType,
}

/// [`ProductInto`] on a GPU. Operands: the output, the codes of `ProductInto`'s `a` and `b`, and their scales.
#[allow(dead_code, reason = "only kernels read it")]
pub(crate) struct Fp8ProductInto {
    pub(crate) product: Fp8Product,
    pub(crate) add: bool,
}

impl InplaceOp1 for ProductInto<'_> {
    fn name(&self) -> &'static str {
        PRODUCT
    }

    fn cpu_fwd(&self, out: &mut CpuStorage, layout: &Layout) -> Result<()> {
        self.a.product_on_cpu(self.b, f32_values_mut(PRODUCT, out, layout)?, self.add)
    }

    fn cuda_fwd(&self, out: &mut CudaStorage, layout: &Layout) -> Result<()> {
        let Self { a, b, add, sums, dtype } = *self;
        let product = Fp8Product { formats: [a.format, b.format], sums, dtype };
        with_cuda(PRODUCT, [a.rows()?, b.rows()?, &a.scale, &b.scale], |[a, b, of_a, of_b]| {
            Fp8ProductInto { product, add }.launch([(&*out, layout), a, b, of_a, of_b])
        })
    }
}
