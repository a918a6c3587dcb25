//! FP8 matmuls, by cuBLASLt on candle's own stream.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result};
use cudarc::cublaslt::{result, sys};
use cudarc::driver::CudaContext;

use super::address::{Address, address};
use super::floats::{Float, start, start_of};
use super::kernels::Gpu;
use crate::error::Error;
use crate::fp8::Fp8Format;
use crate::launch::{Launch, Operand};
use crate::ops::fp8::{Fp8Product, Fp8ProductInto, Fp8Sums};

const NAME: &str = "an FP8 matmul";

/// Size of cuBLASLt's workspace in bytes, as NVIDIA recommends for Hopper.
const WORKSPACE: usize = 32 << 20;

/// The lowest compute capability with FP8 units, times ten.
const LEAST_CAPABILITY: u32 = 89;

/// The key of a cached algorithm: dimensions, row strides, formats, kind of accumulators, type of the result, whether
/// the matmul adds to the result's old values, and the alignments of `b`, `a` and the result.
type Key = ([usize; 3], [usize; 2], [Fp8Format; 2], Fp8Sums, Float, bool, [u32; 3]);

/// cuBLASLt's handle for a device, and the algorithms that it chose.
struct Products {
    handle: sys::cublasLtHandle_t,
    algorithms: HashMap<Key, sys::cublasLtMatmulAlgo_t>,
}

// SAFETY: any thread may use a cuBLASLt handle, and a mutex guards this value.
unsafe impl Send for Products {}

impl std::fmt::Debug for Products {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Products").field("algorithms", &self.algorithms.len()).finish_non_exhaustive()
    }
}

fn failed(what: &str) -> impl Fn(result::CublasError) -> candle_core::Error {
    let what = what.to_owned();
    move |error| candle_core::Error::Msg(format!("cuBLASLt cannot {what}: {error}"))
}

impl Products {
    fn new(gpu: &Gpu) -> Result<Self> {
        let (major, minor) = gpu.stream.context().compute_capability().map_err(candle_core::Error::wrap)?;
        let capability = (10 * major + minor) as u32;
        if capability < LEAST_CAPABILITY {
            return Err(Error::unsupported("this GPU has no FP8 units")
                .got(format!("compute capability {major}.{minor}"))
                .allowed("8.9 (Ada), 9.0 (Hopper) and later")
                .hint("16-bit matmuls run on every GPU; the CPU supports FP8 matmuls")
                .into());
        }
        let handle = result::create_handle().map_err(failed("start"))?;
        Ok(Self { handle, algorithms: HashMap::new() })
    }
}

/// Owns the descriptors of a matmul and of its matrices.
struct Described {
    product: sys::cublasLtMatmulDesc_t,
    /// The layouts of `b`, `a` and the result: cuBLASLt is column-major, and computes the transposed result.
    layouts: [sys::cublasLtMatrixLayout_t; 3],
}

impl Drop for Described {
    fn drop(&mut self) {
        // SAFETY: the descriptors were created for this value, and are destroyed only here.
        unsafe {
            let _ = result::destroy_matmul_desc(self.product);
            for layout in self.layouts {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}

impl Described {
    fn new(
        ([m, n, k], [row_a, row_b]): ([usize; 3], [usize; 2]),
        op: &Fp8Product,
        out: Float,
        scales: [Address<'_>; 2],
    ) -> Result<Self> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let kind = |format| match format {
            Fp8Format::E4M3 => sys::cudaDataType::CUDA_R_8F_E4M3,
            Fp8Format::E5M2 => sys::cudaDataType::CUDA_R_8F_E5M2,
        };
        let out = match out {
            Float::F32 => sys::cudaDataType::CUDA_R_32F,
            Float::F16 => sys::cudaDataType::CUDA_R_16F,
            Float::BF16 => sys::cudaDataType::CUDA_R_16BF,
        };
        let layout = |kind, rows: usize, columns: usize, distance: usize| {
            result::create_matrix_layout(kind, rows as u64, columns as u64, distance as i64)
                .map_err(failed("describe a matrix"))
        };
        let [of_a, of_b] = op.formats.map(kind);
        let layouts = [layout(of_b, k, n, row_b)?, layout(of_a, k, m, row_a)?, layout(out, n, m, n)?];
        let product = result::create_matmul_desc(
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            sys::cudaDataType::CUDA_R_32F,
        )
        .map_err(failed("describe a matmul"))?;
        let described = Self { product, layouts };
        let transposed = cudarc::cublas::sys::cublasOperation_t::CUBLAS_OP_T;
        let fast = match op.sums {
            Fp8Sums::Fast => 1i8,
            Fp8Sums::F32 => 0,
        };
        let [of_a, of_b] = scales.map(Address::number);
        let set = |attribute, value: *const c_void, bytes| {
            // SAFETY: `product` is alive, and `value` points to the attribute's value, which has `bytes` bytes.
            unsafe { result::set_matmul_desc_attribute(product, attribute, value, bytes) }
                .map_err(failed("describe a matmul"))
        };
        set(
            Attribute::CUBLASLT_MATMUL_DESC_TRANSA,
            (&raw const transposed).cast(),
            size_of_val(&transposed),
        )?;
        set(Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, (&raw const fast).cast(), size_of_val(&fast))?;
        set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, (&raw const of_b).cast(), size_of_val(&of_b))?;
        set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, (&raw const of_a).cast(), size_of_val(&of_a))?;
        Ok(described)
    }

    /// The algorithm that cuBLASLt considers the fastest. `b`, `a` and `out` are alignments in bytes.
    fn algorithm(
        &self,
        handle: sys::cublasLtHandle_t,
        [b, a, out]: [u32; 3],
        shape: &str,
    ) -> Result<sys::cublasLtMatmulAlgo_t> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = result::create_matmul_pref().map_err(failed("choose an algorithm"))?;
        let set = |attribute, value: *const c_void, bytes| {
            // SAFETY: the preference is alive, and `value` points to `bytes` bytes that hold the attribute's type.
            unsafe { result::set_matmul_pref_attribute(preference, attribute, value, bytes) }
        };
        let workspace = WORKSPACE;
        let limit = Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let aligned = [
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &b),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &a),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &out),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &out),
        ];
        let ready = set(limit, (&raw const workspace).cast(), size_of_val(&workspace)).and_then(|()| {
            let mut each = aligned.into_iter();
            each.try_for_each(|(attribute, bytes)| {
                set(attribute, std::ptr::from_ref(bytes).cast(), size_of_val(bytes))
            })
        });
        let found = ready.and_then(|()| {
            let [b, a, out] = self.layouts;
            // SAFETY: all descriptions are alive.
            unsafe { result::get_matmul_algo_heuristic(handle, self.product, b, a, out, out, preference) }
        });
        // SAFETY: created above, and destroyed once.
        let _ = unsafe { result::destroy_matmul_pref(preference) };
        Ok(found.map_err(failed(&format!("choose an algorithm for an FP8 matmul of {shape}")))?.algo)
    }
}

/// `out = of_a of_b a b^T + beta out`, where `of_a` is the scale of `a`, and `of_b` the scale of `b`. `a` is (m, k),
/// `b` is (n, k), and `out` is (m, n). `out` is contiguous; `a` and `b` may have gaps between their rows.
pub(super) fn product(
    gpu: &Gpu,
    op: &Fp8Product,
    (out, float, beta): (Address<'_>, Float, f32),
    [a, b, of_a, of_b]: [Operand<'_>; 4],
) -> Result<()> {
    let ((m, k), (n, _)) = (a.1.shape().dims2()?, b.1.shape().dims2()?);
    // cuBLASLt uses the calling thread's current device.
    gpu.stream.context().bind_to_thread().map_err(candle_core::Error::wrap)?;
    let scales = [start(of_a, gpu)?, start(of_b, gpu)?];
    let (at_a, at_b) = (start(a, gpu)?, start(b, gpu)?);
    let distances = [a, b].map(|(_, layout)| layout.stride()[0]);
    let described = Described::new(([m, n, k], distances), op, float, scales)?;
    // One entry per context, created at its first matmul. An entry keeps its context alive, so that no other context
    // gets the same address.
    static ALL: Mutex<Vec<(Arc<CudaContext>, Products)>> = Mutex::new(Vec::new());
    let (mut all, context) = (ALL.lock().unwrap_or_else(PoisonError::into_inner), gpu.stream.context());
    let known = all.iter().position(|(own, _)| Arc::ptr_eq(own, context));
    let at = match known {
        Some(at) => at,
        None => {
            all.push((context.clone(), Products::new(gpu)?));
            all.len() - 1
        }
    };
    let products = &mut all[at].1;
    let shape = format!("{m} x {k} x {n}");
    let alignment = [at_b, at_a, out].map(|at| 1 << at.number().trailing_zeros().min(8));
    if alignment.iter().any(|&bytes| bytes < 16) {
        return Err(Error::unsupported("FP8 matmuls on CUDA need aligned matrices")
            .got(format!("{shape}, not aligned to 16 bytes"))
            .allowed("matrices that start at multiples of 16 bytes")
            .hint("`force_contiguous()` copies a view")
            .into());
    }
    let key = ([m, n, k], distances, op.formats, op.sums, float, beta != 0.0, alignment);
    let algorithm = match products.algorithms.get(&key) {
        Some(algorithm) => *algorithm,
        None => {
            let chosen = described.algorithm(products.handle, alignment, &shape)?;
            products.algorithms.insert(key, chosen);
            chosen
        }
    };
    let (alpha, [of_b, of_a, of_out]) = (1.0f32, described.layouts);
    // Each call has its own workspace, because calls of other host threads may run concurrently on other streams.
    let workspace = gpu.alloc::<u8>(WORKSPACE)?;
    let [a, b] = [at_a, at_b].map(|at| at.number() as *const c_void);
    let out = out.number() as *mut c_void;
    // SAFETY: the memory at `a`, `b` and `out` is borrowed. The layouts of `a` and `b` stay inside their memory, and
    // `out` has m x n elements. Memory is freed in the stream's order, so after the matmul.
    let done = unsafe {
        result::matmul(
            products.handle,
            described.product,
            (&raw const alpha).cast(),
            (&raw const beta).cast(),
            b,
            of_b,
            a,
            of_a,
            out,
            of_out,
            out,
            of_out,
            &raw const algorithm,
            address(&workspace, gpu).number() as *mut c_void,
            WORKSPACE,
            gpu.stream.cu_stream().cast(),
        )
    };
    done.map_err(failed(&format!("compute an FP8 matmul of {shape}")))
}

impl Launch<[Operand<'_>; 4], CudaStorage> for Fp8Product {
    fn launch(&self, operands: [Operand<'_>; 4]) -> Result<CudaStorage> {
        let gpu = Gpu::new(operands[0].0.device())?;
        let float = Float::of_dtype(NAME, self.dtype)?;
        let (m, n) = (operands[0].1.shape().dims2()?.0, operands[1].1.shape().dims2()?.0);
        let out = float.alloc(&gpu, m * n)?;
        product(&gpu, self, (start_of(&out, &gpu)?, float, 0.0), operands)?;
        Ok(out)
    }
}

impl Launch<[Operand<'_>; 5], ()> for Fp8ProductInto {
    fn launch(&self, [out, a, b, of_a, of_b]: [Operand<'_>; 5]) -> Result<()> {
        let gpu = Gpu::new(out.0.device())?;
        let to =
            (start(out, &gpu)?, Float::of_dtype(NAME, self.product.dtype)?, if self.add { 1.0 } else { 0.0 });
        product(&gpu, &self.product, to, [a, b, of_a, of_b])
    }
}
