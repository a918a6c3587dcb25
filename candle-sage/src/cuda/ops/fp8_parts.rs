//! FP8 quantization of parts of a vector (ranges of its elements) on the GPU.

use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result};

use super::fp8::{Codes, check_start, measure, quantize_matrix};
use crate::cuda::address::{address, address_at, first_index};
use crate::cuda::compiled::constants::quant_fp8_tile::{FP8_COLUMNS as COLUMNS, FP8_THREADS as THREADS};
use crate::cuda::compiled::kernel;
use crate::cuda::floats::{Float, count, element, start};
use crate::cuda::kernels::{Gpu, Grid};
use crate::cuda::params::{self, launch};
use crate::fp8::Fp8Format;
use crate::launch::{Launch, Operand};
use crate::ops::fp8_parts::{FP8_PART, Largest, QuantizeParts, ScalesOf};

// The kernels read a part as a matrix of COLUMNS columns. Each thread processes values of four rows.
const _: () = assert!(FP8_PART.is_multiple_of(COLUMNS * 4));

/// The parts that are not empty, with their indices.
fn filled(parts: &[Range<usize>]) -> impl Iterator<Item = (usize, &Range<usize>)> {
    parts.iter().enumerate().filter(|(_, part)| !part.is_empty())
}

/// The parameters of a kernel that reads a part of `x` as a matrix, and the dimensions of this matrix.
fn of_part<'a>(
    x: Operand<'a>,
    part: &Range<usize>,
    codes: params::Fp8Codes<'a>,
    gpu: &Gpu,
) -> Result<(params::Fp8Quantize<'a>, (usize, usize))> {
    let dims = (part.len() / COLUMNS, COLUMNS);
    let codes = params::Fp8Codes { rows: count("rows", dims.0)?, columns: COLUMNS as i32, ..codes };
    let x = element(x.0, first_index(x.1) + part.start, gpu)?;
    Ok((params::Fp8Quantize { x, codes, columns: COLUMNS as i32, first_column: 0 }, dims))
}

impl Launch<Operand<'_>, CudaStorage> for Largest<'_> {
    fn launch(&self, x: Operand<'_>) -> Result<CudaStorage> {
        let gpu = Gpu::new(x.0.device())?;
        // Kernels compute the largest |x| from the bits of |x| as u32, which have the same order as |x|.
        let largest = gpu.alloc_zeros::<f32>(self.parts.len())?;
        for (n, part) in filled(self.parts) {
            let codes = params::Fp8Codes { largest: address_at(&largest, n, &gpu)?, ..Default::default() };
            let (params, dims) = of_part(x, part, codes, &gpu)?;
            check_start("fp8-largest", &[params.x])?;
            measure(&gpu, Float::F32, &params, dims)?;
        }
        Ok(gpu.storage(largest))
    }
}

impl Launch<Operand<'_>, CudaStorage> for ScalesOf {
    fn launch(&self, largest: Operand<'_>) -> Result<CudaStorage> {
        let gpu = Gpu::new(largest.0.device())?;
        let matrices = largest.1.shape().elem_count();
        let scales = gpu.alloc::<f32>(matrices)?;
        if matrices > 0 {
            let params = params::Fp8Rescale {
                scale: address(&scales, &gpu),
                largest: start(largest, &gpu)?,
                count: count("matrices", matrices)?,
                e5m2: i32::from(self.format == Fp8Format::E5M2),
                ..Default::default()
            };
            launch(&gpu, kernel!("fp8_rescale"), Grid::line(matrices.div_ceil(THREADS), THREADS), &params)?;
        }
        Ok(gpu.storage(scales))
    }
}

impl Launch<[Operand<'_>; 3], ()> for QuantizeParts<'_> {
    fn launch(&self, [codes, x, scales]: [Operand<'_>; 3]) -> Result<()> {
        let gpu = Gpu::new(codes.0.device())?;
        // The kernel reports the largest value and the number of saturated values, which are not used.
        let seen = gpu.alloc_zeros::<u32>(2)?;
        for (n, part) in filled(self.parts) {
            let written = params::Fp8Codes {
                row_codes: element(codes.0, first_index(codes.1) + part.start, &gpu)?,
                scale: element(scales.0, first_index(scales.1) + n, &gpu)?,
                largest: address(&seen, &gpu),
                saturated: address_at(&seen, 1, &gpu)?,
                e5m2: i32::from(self.format == Fp8Format::E5M2),
                ..Default::default()
            };
            let (params, dims) = of_part(x, part, written, &gpu)?;
            check_start("fp8-quantize-parts", &[params.x, params.codes.row_codes])?;
            quantize_matrix(&gpu, Float::F32, &params, Codes::grid(dims))?;
        }
        Ok(())
    }
}
