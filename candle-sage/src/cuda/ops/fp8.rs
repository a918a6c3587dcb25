//! Quantization to FP8 on the GPU, as a separate op and at the end of other ops.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result};

use super::swiglu::rows_of_swiglu;
use crate::cuda::address::{Address, address, address_at, address_if_any, first_index};
use crate::cuda::buffer::Buffer;
use crate::cuda::compiled::constants::quant_fp8_tile::{
    FP8_COLUMNS as COLUMNS, FP8_ROWS as ROWS, FP8_THREADS as THREADS,
};
use crate::cuda::compiled::kernel;
use crate::cuda::floats::{Dense, Float, PARTS, count, element, start};
use crate::cuda::kernels::{Gpu, Grid};
use crate::cuda::params::{self, launch};
use crate::error::Error;
use crate::fp8::Fp8Format;
use crate::launch::{Launch, Operand};
use crate::ops::fp8::{Fp8Copies, Quantize, QuantizeWith, Quantized, Transpose};
use crate::ops::fp8_fused::{SwiGluBackwardFp8, SwiGluFp8};
use crate::ops::fp8_scales::Fp8Site;
use crate::ops::fp8_scales::{DECAY, MARGIN, Rescale};

const NAME: &str = "fp8-quantize";

/// The FP8 values of a matrix, written by a kernel.
pub(super) struct Codes {
    rows: Option<Buffer<u8>>,
    columns: Option<Buffer<u8>>,
    /// The scale of the FP8 values.
    scale: Buffer<f32>,
    dims: (usize, usize),
}

impl Codes {
    pub(super) fn new(gpu: &Gpu, dims: (usize, usize), copies: Fp8Copies) -> Result<Self> {
        let alloc = |wanted: bool| wanted.then(|| gpu.alloc::<u8>(dims.0 * dims.1)).transpose();
        let (rows, columns) = (alloc(copies.has_rows())?, alloc(copies.has_columns())?);
        Ok(Self { rows, columns, scale: gpu.alloc(1)?, dims })
    }

    /// The parameters, without scale and largest value.
    fn params(&self, gpu: &Gpu, e5m2: bool) -> Result<params::Fp8Codes<'_>> {
        Ok(params::Fp8Codes {
            row_codes: address_if_any(self.rows.as_ref(), gpu),
            column_codes: address_if_any(self.columns.as_ref(), gpu),
            rows: count("rows", self.dims.0)?,
            columns: count("columns", self.dims.1)?,
            e5m2: i32::from(e5m2),
            ..Default::default()
        })
    }

    /// [`Codes::params`] with the address to which the kernel writes the scale that it uses.
    pub(super) fn params_of_scale(&self, gpu: &Gpu, e5m2: bool) -> Result<params::Fp8Codes<'_>> {
        Ok(params::Fp8Codes { used: address(&self.scale, gpu), ..self.params(gpu, e5m2)? })
    }

    /// [`Codes::params`] with the addresses in `state`. The kernel copies the scale to `used`, because the scale in the
    /// state may change while the quantized matrix is in use.
    fn params_at<'a>(&'a self, gpu: &Gpu, site: Fp8Site, state: &Site<'a>) -> Result<params::Fp8Codes<'a>> {
        let Site { scale, largest, saturated, .. } = *state;
        let used = address(&self.scale, gpu);
        Ok(params::Fp8Codes { scale, used, largest, saturated, ..self.params(gpu, site.e5m2)? })
    }

    /// Calls [`Codes::params_at`] with column `site.index` of `state`.
    pub(super) fn params_of_site<'a>(
        &'a self,
        gpu: &Gpu,
        site: Fp8Site,
        state: Operand<'a>,
    ) -> Result<params::Fp8Codes<'a>> {
        self.params_at(gpu, site, &Site::new(state, site.index, gpu)?)
    }

    pub(super) fn into_storages(self, gpu: &Gpu) -> Quantized<CudaStorage> {
        let storage = |codes: Buffer<u8>| gpu.storage(codes);
        Quantized {
            rows: self.rows.map(storage),
            columns: self.columns.map(storage),
            scale: gpu.storage(self.scale),
        }
    }

    /// A thread block for each tile.
    pub(super) fn grid(dims: (usize, usize)) -> Grid {
        let tiles = (dims.0.div_ceil(ROWS).max(1) as u32, dims.1.div_ceil(COLUMNS).max(1) as u32, 1);
        Grid { blocks: tiles, threads: (THREADS as u32, 1, 1), shared_bytes: 0 }
    }
}

/// The addresses of one matrix's column in the state of `Fp8Scales`, whose shape is (5, matrices).
struct Site<'a> {
    scale: Address<'a>,
    largest: Address<'a>,
    running: Address<'a>,
    saturated: Address<'a>,
    format: Address<'a>,
}

impl<'a> Site<'a> {
    fn new((storage, layout): Operand<'a>, index: usize, gpu: &Gpu) -> Result<Self> {
        let (first, (_, matrices)) = (first_index(layout), layout.shape().dims2()?);
        let row = |n: usize| element(storage, first + n * matrices + index, gpu);
        Ok(Self { scale: row(0)?, largest: row(1)?, running: row(2)?, saturated: row(3)?, format: row(4)? })
    }

    /// Launches the update of the scales of `count` matrices, beginning with this matrix.
    fn rescale(&self, gpu: &Gpu, count: usize) -> Result<()> {
        let params = params::Fp8Rescale {
            scale: self.scale,
            largest: self.largest,
            running: self.running,
            formats: self.format,
            count: count as i32,
            e5m2: 0,
            decay: DECAY,
            margin: MARGIN,
        };
        launch(gpu, kernel!("fp8_rescale"), Grid::line(count.div_ceil(THREADS), THREADS), &params)
    }
}

fn named(kernel: &str, float: Float) -> String {
    format!("{kernel}_{}", float.name())
}

pub(super) fn check_start(what: &str, starts: &[Address<'_>]) -> Result<()> {
    if starts.iter().all(|start| start.is_multiple_of(16)) {
        return Ok(());
    }
    Err(Error::unsupported(format!("{what} on CUDA needs tensors aligned to 16 bytes"))
        .got("a tensor that is not aligned to 16 bytes")
        .allowed("addresses that are multiples of 16")
        .hint("`force_contiguous()` makes an aligned copy")
        .into())
}

/// Finds the largest absolute value of a matrix.
pub(super) fn measure(
    gpu: &Gpu,
    float: Float,
    params: &params::Fp8Quantize<'_>,
    dims: (usize, usize),
) -> Result<()> {
    // A thread processes eight values at once.
    let blocks = (dims.0 * dims.1).div_ceil(THREADS * 8).min(2 * PARTS);
    launch(gpu, &named(kernel!("fp8_largest"), float), Grid::line(blocks, THREADS), params)
}

pub(super) fn quantize_matrix(
    gpu: &Gpu,
    float: Float,
    params: &params::Fp8Quantize<'_>,
    grid: Grid,
) -> Result<()> {
    launch(gpu, &named(kernel!("fp8_quantize"), float), grid, params)
}

impl Launch<[Operand<'_>; 2], Quantized<CudaStorage>> for Transpose {
    fn launch(&self, [x, scale]: [Operand<'_>; 2]) -> Result<Quantized<CudaStorage>> {
        let (gpu, dims) = (Gpu::new(x.0.device())?, x.1.shape().dims2()?);
        let codes = Codes::new(&gpu, dims, Fp8Copies::Columns)?;
        let params = params::Fp8Quantize {
            x: start(x, &gpu)?,
            // The format is not read.
            codes: params::Fp8Codes { scale: start(scale, &gpu)?, ..codes.params_of_scale(&gpu, false)? },
            columns: count("columns", dims.1)?,
            first_column: 0,
        };
        check_start("fp8-from-codes", &[params.x])?;
        launch(&gpu, kernel!("fp8_transpose"), Codes::grid(dims), &params)?;
        Ok(codes.into_storages(&gpu))
    }
}

impl Launch<Operand<'_>, Quantized<CudaStorage>> for Quantize {
    fn launch(&self, x: Operand<'_>) -> Result<Quantized<CudaStorage>> {
        let gpu = Gpu::new(x.0.device())?;
        let (float, dims) = (Float::of(NAME, x.0)?, x.1.shape().dims2()?);
        let x = Dense::new(x, &gpu)?;
        let codes = Codes::new(&gpu, dims, self.copies)?;
        let e5m2 = self.format == Fp8Format::E5M2;
        // The largest |x|, and the number of saturated values, which is not used.
        let seen = gpu.alloc_zeros::<u32>(2)?;
        let [largest, at_scale] = [address(&seen, &gpu), address(&codes.scale, &gpu)];
        let params = params::Fp8Quantize {
            x: x.start(&gpu)?,
            codes: params::Fp8Codes {
                scale: at_scale,
                largest,
                saturated: address_at(&seen, 1, &gpu)?,
                ..codes.params(&gpu, e5m2)?
            },
            columns: count("columns", dims.1)?,
            first_column: 0,
        };
        check_start(NAME, &[params.x])?;
        measure(&gpu, float, &params, dims)?;
        let rescale = params::Fp8Rescale {
            scale: at_scale,
            largest,
            count: 1,
            e5m2: i32::from(e5m2),
            ..Default::default()
        };
        launch(&gpu, kernel!("fp8_rescale"), Grid::line(1, THREADS), &rescale)?;
        quantize_matrix(&gpu, float, &params, Codes::grid(dims))?;
        Ok(codes.into_storages(&gpu))
    }
}

impl Launch<[Operand<'_>; 2], Quantized<CudaStorage>> for QuantizeWith {
    fn launch(&self, [x, state]: [Operand<'_>; 2]) -> Result<Quantized<CudaStorage>> {
        let gpu = Gpu::new(x.0.device())?;
        let (float, dims) = (Float::of(NAME, x.0)?, x.1.shape().dims2()?);
        let x = Dense::new(x, &gpu)?;
        let site = Site::new(state, self.scale.index, &gpu)?;
        let codes = Codes::new(&gpu, dims, self.op.copies)?;
        let params = params::Fp8Quantize {
            x: x.start(&gpu)?,
            codes: codes.params_at(&gpu, self.scale, &site)?,
            columns: count("columns", dims.1)?,
            first_column: 0,
        };
        check_start(NAME, &[params.x])?;
        if self.measure {
            measure(&gpu, float, &params, dims)?;
            site.rescale(&gpu, 1)?;
        }
        quantize_matrix(&gpu, float, &params, Codes::grid(dims))?;
        Ok(codes.into_storages(&gpu))
    }
}

/// Quantizes a contiguous matrix into the columns of `codes` from `first_column` on.
pub(super) fn quantize_columns(
    gpu: &Gpu,
    x: Operand<'_>,
    columns: usize,
    codes: params::Fp8Codes<'_>,
    first_column: usize,
) -> Result<()> {
    let float = Float::of(NAME, x.0)?;
    let x = Dense::new(x, gpu)?;
    let params = params::Fp8Quantize {
        x: x.start(gpu)?,
        codes,
        columns: count("columns", columns)?,
        first_column: count("columns", first_column)?,
    };
    check_start(NAME, &[params.x])?;
    let grid = Codes::grid((codes.rows as usize, columns));
    quantize_matrix(gpu, float, &params, grid)
}

impl Launch<Operand<'_>, ()> for Rescale {
    fn launch(&self, state: Operand<'_>) -> Result<()> {
        let gpu = Gpu::new(state.0.device())?;
        let (_, matrices) = state.1.shape().dims2()?;
        if matrices == 0 {
            return Ok(());
        }
        Site::new(state, 0, &gpu)?.rescale(&gpu, matrices)
    }
}

fn swiglu(
    gpu: &Gpu,
    kernel: &str,
    float: Float,
    dims: (usize, usize),
    params: &params::Fp8SwiGlu<'_>,
) -> Result<()> {
    let of = &params.of;
    check_start("swiglu in FP8", &[of.gate, of.up, of.dy])?;
    // The strides of rows, in bytes.
    if [of.gate_row, of.up_row].iter().any(|row| row * float.bytes() as i64 % 16 != 0) {
        return Err(Error::unsupported("swiglu in FP8 on CUDA needs rows aligned to 16 bytes")
            .got(format!("distances of {} (gate) and {} elements (up) between rows", of.gate_row, of.up_row))
            .allowed("distances that are multiples of 16 bytes: 4 elements in f32, 8 in f16 and bf16")
            .hint("`force_contiguous()` makes an aligned copy")
            .into());
    }
    launch(gpu, &named(kernel, float), Codes::grid(dims), params)
}

impl Launch<[Operand<'_>; 3], Quantized<CudaStorage>> for SwiGluFp8 {
    fn launch(&self, [gate, up, state]: [Operand<'_>; 3]) -> Result<Quantized<CudaStorage>> {
        let gpu = Gpu::new(gate.0.device())?;
        let (float, dims) = (Float::of("swiglu", gate.0)?, gate.1.shape().dims2()?);
        let [gate, up] = rows_of_swiglu([gate, up], &gpu)?;
        let codes = Codes::new(&gpu, dims, self.copies)?;
        let site = Site::new(state, self.scale.index, &gpu)?;
        let params = params::Fp8SwiGlu {
            of: params::SwiGlu { columns: dims.1 as i64, ..gate.params(&up, &gpu)? },
            codes: codes.params_at(&gpu, self.scale, &site)?,
            ..Default::default()
        };
        swiglu(&gpu, kernel!("swiglu_fp8_fwd"), float, dims, &params)?;
        Ok(codes.into_storages(&gpu))
    }
}

impl Launch<[Operand<'_>; 4], (Quantized<CudaStorage>, Option<Quantized<CudaStorage>>)>
    for SwiGluBackwardFp8
{
    fn launch(
        &self,
        [gate, up, dy, state]: [Operand<'_>; 4],
    ) -> Result<(Quantized<CudaStorage>, Option<Quantized<CudaStorage>>)> {
        let gpu = Gpu::new(gate.0.device())?;
        let (float, dims) = (Float::of("swiglu", gate.0)?, gate.1.shape().dims2()?);
        let dy = Dense::new(dy, &gpu)?;
        let [gate, up] = rows_of_swiglu([gate, up], &gpu)?;
        let codes = Codes::new(&gpu, (dims.0, 2 * dims.1), Fp8Copies::Both)?;
        let site = Site::new(state, self.scale.index, &gpu)?;
        let again = self.again.map(|again| {
            let codes = Codes::new(&gpu, dims, Fp8Copies::Columns)?;
            Ok::<_, candle_core::Error>((again, codes, Site::new(state, again.index, &gpu)?))
        });
        let again = again.transpose()?;
        let params = params::Fp8SwiGlu {
            of: params::SwiGlu { dy: dy.start(&gpu)?, columns: dims.1 as i64, ..gate.params(&up, &gpu)? },
            codes: codes.params_at(&gpu, self.scale, &site)?,
            again: match &again {
                Some((again, codes, site)) => codes.params_at(&gpu, *again, site)?,
                None => params::Fp8Codes::default(),
            },
        };
        swiglu(&gpu, kernel!("swiglu_fp8_bwd"), float, dims, &params)?;
        let again = again.map(|(_, codes, _)| codes.into_storages(&gpu));
        Ok((codes.into_storages(&gpu), again))
    }
}
