//! Matmuls that can add to their output, by cuBLAS on candle's own stream.
#![allow(unsafe_code)]

use candle_core::backend::BackendStorage;
use candle_core::{Layout, Result};
use cudarc::cublas::{result, sys};

use super::address::Address;
use super::floats::{Float, start};
use super::kernels::Gpu;
use crate::error::Error;
use crate::launch::{Launch, Operand};
use crate::ops::accumulate::ProductInto;

/// The output of a matmul: contiguous (rows, columns).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Out<'a> {
    pub(crate) at: Address<'a>,
    pub(crate) float: Float,
}

/// cuBLAS's operation and leading dimension for a matrix whose rows or columns are contiguous.
fn leading(layout: &Layout) -> Result<(sys::cublasOperation_t, i32)> {
    let (rows, cols) = layout.shape().dims2()?;
    let &[row, col] = layout.stride() else { unreachable!("two dimensions") };
    let (operation, distance, least) = if col == 1 || cols == 1 {
        (sys::cublasOperation_t::CUBLAS_OP_N, if rows == 1 { cols } else { row }, cols)
    } else if row == 1 || rows == 1 {
        (sys::cublasOperation_t::CUBLAS_OP_T, if cols == 1 { rows } else { col }, rows)
    } else {
        (sys::cublasOperation_t::CUBLAS_OP_N, 0, 1)
    };
    if distance < least || i32::try_from(distance).is_err() {
        return Err(Error::shape("a matmul does not support these strides")
            .got(format!("{:?} with strides {:?}", layout.dims(), layout.stride()))
            .allowed("adjacent elements in rows or in columns, no overlap")
            .hint("call `contiguous()` on the matrix")
            .into());
    }
    Ok((operation, distance.max(1) as i32))
}

/// `out = alpha a b + beta out`, with `a` (rows, inner) and `b` (inner, columns) of the same type. Sums are in f32.
pub(crate) fn gemm(
    gpu: &Gpu,
    out: Out<'_>,
    a: Operand<'_>,
    b: Operand<'_>,
    [alpha, beta]: [f32; 2],
) -> Result<()> {
    let ((rows, inner), (b_inner, cols)) = (a.1.shape().dims2()?, b.1.shape().dims2()?);
    let float = Float::of("a matmul", a.0)?;
    if inner != b_inner || Float::of("a matmul", b.0)? != float || ![float, Float::F32].contains(&out.float) {
        return Err(Error::shape("the matrices of a matmul do not match")
            .got(format!(
                "a {:?} {:?}, b {:?} {:?}, an output of {:?}",
                a.1.dims(),
                float,
                b.1.dims(),
                b.0.dtype(),
                out.float
            ))
            .allowed("a (rows, inner) and b (inner, columns) of one type; an output of this type or f32")
            .hint("transpose a matrix, or convert it with `to_dtype`")
            .into());
    }
    if rows == 0 || cols == 0 {
        return Ok(());
    }
    let [(op_a, lda), (op_b, ldb)] = [leading(a.1)?, leading(b.1)?];
    let of = |float| match float {
        Float::F32 => sys::cudaDataType_t::CUDA_R_32F,
        Float::F16 => sys::cudaDataType_t::CUDA_R_16F,
        Float::BF16 => sys::cudaDataType_t::CUDA_R_16BF,
    };
    let int = |n: usize| super::floats::count("rows or columns", n);
    let (at_a, at_b) = (start(a, gpu)?, start(b, gpu)?);
    // SAFETY: the type [`Address`] guarantees that all addresses are inside borrowed, and therefore live, allocations.
    // `a` and `b` are as large as their layouts. [`Address`] does not guarantee the size and the element type of `out`;
    // the caller vouches for them. cuBLAS is column-major: it computes the transposed matmul.
    let status = unsafe {
        result::gemm_ex(
            *gpu.device().cublas_handle().handle(),
            op_b,
            op_a,
            int(cols)?,
            int(rows)?,
            int(inner)?,
            (&raw const alpha).cast(),
            at_b.number() as *const _,
            of(float),
            ldb,
            at_a.number() as *const _,
            of(float),
            lda,
            (&raw const beta).cast(),
            out.at.number() as *mut _,
            of(out.float),
            int(cols)?,
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
        )
    };
    status.map_err(|e| {
        candle_core::Error::Msg(format!("cuBLAS' matmul of {rows} x {inner} x {cols} failed: {e}"))
    })
}

/// [`gemm`] into a contiguous tensor.
impl Launch<[Operand<'_>; 3], ()> for ProductInto {
    fn launch(&self, [out, a, b]: [Operand<'_>; 3]) -> Result<()> {
        let gpu = &Gpu::new(out.0.device())?;
        let to = Out { at: start(out, gpu)?, float: Float::of("a matmul", out.0)? };
        gemm(gpu, to, a, b, [self.factor, if self.add { 1.0 } else { 0.0 }])
    }
}
