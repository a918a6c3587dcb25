//! Quantization to FP8 on the GPU.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result};

use super::tensor::{Dense, Float, PARTS, count, start_of};
use crate::cuda::address::{Address, address};
use crate::cuda::compiled::constants::fp8::{COLUMNS, ROWS, THREADS, V};
use crate::cuda::compiled::kernel;
use crate::cuda::kernels::{Gpu, Grid};
use crate::cuda::params::{self, launch};
use crate::error::Error;
use crate::fp8::Fp8Format;
use crate::launch::{Launch, Operand};
use crate::ops::fp8::{Quantize, Quantized};

const NAME: &str = "fp8-quantize";

impl Launch<Operand<'_>, Quantized<CudaStorage>> for Quantize {
    fn launch(&self, x: Operand<'_>) -> Result<Quantized<CudaStorage>> {
        let gpu = Gpu::new(x.0.device())?;
        let float = Float::of(NAME, x.0)?;
        let (rows, columns) = x.1.shape().dims2()?;
        let x = Dense::new(x, &gpu)?;
        let codes = |wanted: bool| {
            let codes = wanted.then(|| gpu.alloc::<u8>(rows * columns)).transpose()?;
            Ok::<_, candle_core::Error>(
                codes.map(|codes| CudaStorage::wrap_cuda_slice(codes, gpu.device.clone())),
            )
        };
        let (own, turned) = (codes(self.copies.has_rows())?, codes(self.copies.has_columns())?);
        let place = |codes| -> Result<Address<'_>> {
            match codes {
                Some(codes) => start_of(codes, &gpu),
                None => Ok(Address::NULL),
            }
        };
        let largest = gpu.alloc_zeros::<u32>(1)?;
        let scale = Float::F32.alloc(&gpu, 1)?;
        let params = params::Fp8Quantize {
            x: x.start(&gpu)?,
            row_codes: place(own.as_ref())?,
            column_codes: place(turned.as_ref())?,
            largest: address(&largest, &gpu),
            scale: start_of(&scale, &gpu)?,
            rows: count("rows", rows)?,
            columns: count("columns", columns)?,
            e5m2: i32::from(self.format == Fp8Format::E5M2),
            ..Default::default()
        };
        if !params.x.is_multiple_of(16) {
            return Err(Error::unsupported("quantizing to FP8 on CUDA moves 16 bytes at a time")
                .got(format!("a matrix {rows} x {columns} that starts between them"))
                .allowed("a tensor that starts on 16 bytes")
                .hint("`force_contiguous()` copies it")
                .into());
        }
        let name = |kernel: &str| format!("{kernel}_{}", float.name());
        let blocks = (rows * columns).div_ceil(THREADS * V).min(2 * PARTS);
        launch(&gpu, &name(kernel!("fp8_largest")), Grid::line(blocks, THREADS), &params)?;
        let tiles = (rows.div_ceil(ROWS).max(1) as u32, columns.div_ceil(COLUMNS).max(1) as u32, 1);
        let grid = Grid { blocks: tiles, threads: (THREADS as u32, 1, 1), shared_bytes: 0 };
        launch(&gpu, &name(kernel!("fp8_quantize")), grid, &params)?;
        Ok(Quantized { rows: own, columns: turned, scale })
    }
}
