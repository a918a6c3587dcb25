//! Rotary position embedding on the GPU, alone or after an RMSNorm over each head.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, DType, Layout, Result};

use super::fp8::{Codes, quantize_columns};
use crate::cuda::address::{Address, address};
use crate::cuda::buffer::Buffer;
use crate::cuda::compiled::constants::quant_fp8_tile::{FP8_LINES, FP8_NEIGHBOURS, FP8_THREADS as THREADS};
use crate::cuda::compiled::constants::rope::MAX_THREADS;
use crate::cuda::compiled::kernel;
use crate::cuda::floats::{
    Dense, Float, PARTS, Packs, RowThreads, count, element, partial_sums, start, start_of,
};
use crate::cuda::kernels::{Gpu, Grid};
use crate::cuda::params::{self, launch};
use crate::error::Error;
use crate::launch::{Launch, Operand};
use crate::ops::RopeStyle;
use crate::ops::fp8::{Fp8Copies, Quantized};
use crate::ops::fp8_fused::QkNormRopeFp8;
use crate::ops::qk_norm_rope::{Gradients, QkNormRope};
use crate::ops::rope::Rope;

const NAME: &str = "rope";

/// The cosines and sines of the positions' angles, the sign of the angles, and which channels are rotated as a pair.
#[derive(Clone, Copy)]
struct Rotation<'a> {
    tables: [Operand<'a>; 2],
    direction: f32,
    style: RopeStyle,
}

/// A table of cosines or sines, contiguous and f32.
struct Table<'a> {
    dense: Dense<'a>,
    converted: Option<CudaStorage>,
}

impl<'a> Table<'a> {
    fn new(table: Operand<'a>, gpu: &Gpu) -> Result<Self> {
        Float::of(NAME, table.0)?;
        let converted = match table.0.dtype() {
            DType::F32 => None,
            _ => Some(table.0.to_dtype(table.1, DType::F32)?),
        };
        Ok(Self { dense: Dense::new(table, gpu)?, converted })
    }

    fn start(&self, gpu: &Gpu) -> Result<Address<'_>> {
        self.converted.as_ref().map_or_else(|| self.dense.start(gpu), |table| start_of(table, gpu))
    }
}

/// A (batch, sequence, heads, head_dim) tensor. If its channels are not adjacent, `copy` is a contiguous copy.
struct Heads<'a> {
    given: Operand<'a>,
    copy: Option<Dense<'a>>,
}

impl<'a> Heads<'a> {
    fn new(x: Operand<'a>, gpu: &Gpu) -> Result<Self> {
        let neighbours = x.1.stride().last() == Some(&1);
        Ok(Self { given: x, copy: if neighbours { None } else { Some(Dense::new(x, gpu)?) } })
    }

    fn operand(&self) -> Operand<'_> {
        self.copy.as_ref().map_or(self.given, Dense::operand)
    }

    fn strides(&self) -> [usize; 3] {
        let strides = self.operand().1.stride();
        [strides[0], strides[1], strides[2]]
    }

    fn params(&self, gpu: &Gpu) -> Result<params::Heads<'_>> {
        let [batch, token, head] = self.strides().map(|stride| stride as i64);
        Ok(params::Heads { data: start(self.operand(), gpu)?, batch, token, head })
    }
}

/// A new tensor for the results (outputs or gradients) of several input tensors, concatenated along the heads.
struct ConcatenatedHeads {
    storage: CudaStorage,
    tokens: usize,
    sequence: usize,
    heads: usize,
    head_dim: usize,
    /// The first head of each result.
    first: Vec<usize>,
}

impl ConcatenatedHeads {
    /// Allocates one tensor for all results. The results have the shapes of the tensors of `all`.
    fn new(gpu: &Gpu, all: &[Operand<'_>]) -> Result<Self> {
        let dims = all.iter().map(|x| x.1.shape().dims4()).collect::<Result<Vec<_>>>()?;
        let (batch, sequence, _, head_dim) = dims[0];
        let mut heads = 0;
        let mut first = Vec::with_capacity(all.len());
        for (_, _, of_result, _) in dims {
            first.push(heads);
            heads += of_result;
        }
        let storage = Float::of(NAME, all[0].0)?.alloc(gpu, batch * sequence * heads * head_dim)?;
        Ok(Self { storage, tokens: batch * sequence, sequence, heads, head_dim, first })
    }

    fn place(&self, result: usize, gpu: &Gpu) -> Result<params::Heads<'_>> {
        let (token, head) = ((self.heads * self.head_dim) as i64, self.head_dim as i64);
        // Without tokens the storage is empty, and no kernel writes to it.
        let first = if self.tokens == 0 { 0 } else { self.first[result] * self.head_dim };
        let data = element(&self.storage, first, gpu)?;
        Ok(params::Heads { data, batch: token * self.sequence as i64, token, head })
    }
}

/// The norm before the rotation.
struct Norm<'a> {
    weight: &'a Dense<'a>,
    eps: f32,
    /// In the backward: the output's gradient, and the buffer for partial sums of the gradient of `weight`.
    gradient: Option<(&'a Heads<'a>, &'a Buffer<f32>)>,
}

/// Where a result is written.
#[derive(Clone, Copy)]
enum Destination<'a> {
    Heads(params::Heads<'a>),
    /// FP8 values, from this column on.
    Fp8(params::Fp8Codes<'a>, usize),
}

fn run_fp8(gpu: &Gpu, what: &str, float: Float, packs: Packs, params: params::Fp8Rope<'_>) -> Result<()> {
    if packs.elements() == 1 {
        return Err(Error::unsupported(
            "qk_norm_rope_backward in FP8 on CUDA needs tensors aligned to 16 bytes",
        )
        .got("a tensor or a head that is not aligned to 16 bytes")
        .allowed("addresses and strides that are multiples of 16 bytes")
        .hint("`force_contiguous()` makes an aligned copy")
        .into());
    }
    let head_dim = 2 * params.of.half as usize;
    let rows = THREADS * FP8_LINES * FP8_NEIGHBOURS / head_dim;
    let tiles = (params.of.tokens as usize).div_ceil(rows) * params.of.heads as usize;
    let kernel = format!("{what}_{head_dim}_{}", float.name());
    launch(gpu, &kernel, Grid::line(tiles.min(PARTS), THREADS), &params)
}

fn run(
    gpu: &Gpu,
    what: &str,
    x: &Heads<'_>,
    rotation: Rotation<'_>,
    norm: Option<Norm<'_>>,
    out: Destination<'_>,
) -> Result<()> {
    let (storage, layout): (&CudaStorage, &Layout) = x.operand();
    let float = Float::of(NAME, storage)?;
    let (batch, sequence, heads, head_dim) = layout.shape().dims4()?;
    let half = head_dim / 2;
    let [cos, sin] = rotation.tables;
    let (cos, sin) = (Table::new(cos, gpu)?, Table::new(sin, gpu)?);
    let mut params = params::Rope {
        x: x.params(gpu)?,
        cos: cos.start(gpu)?,
        sin: sin.start(gpu)?,
        tokens: count("tokens", batch * sequence)?,
        sequence: count("tokens", sequence)?,
        heads: count("heads", heads)?,
        half: count("channels", half)?,
        interleaved: (rotation.style == RopeStyle::Interleaved).into(),
        direction: rotation.direction,
        ..Default::default()
    };
    // `Packs::of` checks the alignment of the strides. `half` is the distance between rows of the cos and sin
    // tables, and between the two halves of a head.
    let mut strides = vec![half];
    strides.extend(x.strides());
    if let Destination::Heads(out) = out {
        params.out = out;
        strides.extend([out.batch, out.token, out.head].map(|stride| stride as usize));
    }
    // Number of heads of a token that a group of lanes processes with the same angles: `HEADS` in `kernels/rope.cu`.
    let mut heads_at_once = 4;
    let mut most = usize::MAX;
    if let Some(Norm { weight, eps, gradient }) = norm {
        params.weight = weight.start(gpu)?;
        params.weight_type = Float::of(NAME, weight.operand().0)? as i32;
        params.eps = eps;
        if let Some((dy, partials)) = gradient {
            params.dy = dy.params(gpu)?;
            params.partials = address(partials, gpu);
            strides.extend(dy.strides());
            (heads_at_once, most) = (1, PARTS);
        }
    }
    let starts = [params.x.data, params.dy.data, params.out.data, params.cos, params.sin, params.weight];
    let packs = Packs::of(float, &starts, &strides);
    if let Destination::Fp8(codes, first_column) = out {
        return run_fp8(
            gpu,
            what,
            float,
            packs,
            params::Fp8Rope { of: params, codes, first_column: count("channels", first_column)?, padding: 0 },
        );
    }
    let pairs = half / packs.elements();
    if pairs > MAX_THREADS {
        return Err(Error::unsupported("head_dim of a rotary embedding is out of range on CUDA")
            .got(head_dim)
            .allowed(format!("up to {}", 2 * MAX_THREADS * packs.elements()))
            .hint("a contiguous input may have a higher limit; the CPU supports any even head_dim")
            .into());
    }
    let team = RowThreads::of(pairs, 1, MAX_THREADS);
    params.lanes = team.lanes as i32;
    let items = batch * sequence * heads.div_ceil(heads_at_once);
    count("heads of all tokens", items)?;
    launch(gpu, &packs.kernel(what), team.grid(items, most), &params)
}

/// The results are concatenated along the heads.
impl<'a> Launch<(&'a [Operand<'a>], [Operand<'a>; 2]), CudaStorage> for Rope {
    fn launch(&self, (all, tables): (&'a [Operand<'a>], [Operand<'a>; 2])) -> Result<CudaStorage> {
        let gpu = Gpu::new(all[0].0.device())?;
        let rotation = Rotation { tables, direction: self.direction, style: self.style };
        let out = ConcatenatedHeads::new(&gpu, all)?;
        for (n, &x) in all.iter().enumerate() {
            let to = Destination::Heads(out.place(n, &gpu)?);
            run(&gpu, kernel!("rope"), &Heads::new(x, &gpu)?, rotation, None, to)?;
        }
        Ok(out.storage)
    }
}

impl Launch<[Operand<'_>; 4], CudaStorage> for QkNormRope {
    fn launch(&self, [x, weight, cos, sin]: [Operand<'_>; 4]) -> Result<CudaStorage> {
        let gpu = Gpu::new(x.0.device())?;
        let rotation = Rotation { tables: [cos, sin], direction: 1.0, style: self.style };
        let norm = Norm { weight: &Dense::new(weight, &gpu)?, eps: self.eps, gradient: None };
        let out = ConcatenatedHeads::new(&gpu, &[x])?;
        run(
            &gpu,
            kernel!("qk_norm_rope_fwd"),
            &Heads::new(x, &gpu)?,
            rotation,
            Some(norm),
            Destination::Heads(out.place(0, &gpu)?),
        )?;
        Ok(out.storage)
    }
}

/// For each input: the input, its norm's weight and its output's gradient. Also the tables of cosines and sines.
type BackwardInputs<'a> = (&'a [[Operand<'a>; 3]], [Operand<'a>; 2]);

/// Returns the gradients of all inputs in one tensor, concatenated along the heads, and the gradient of the weight of
/// each input's norm.
impl<'a> Launch<BackwardInputs<'a>, (CudaStorage, Vec<CudaStorage>)> for Gradients {
    fn launch(&self, (all, tables): BackwardInputs<'a>) -> Result<(CudaStorage, Vec<CudaStorage>)> {
        let inputs: Vec<Operand<'_>> = all.iter().map(|&[x, ..]| x).collect();
        let gpu = Gpu::new(inputs[0].0.device())?;
        let out = ConcatenatedHeads::new(&gpu, &inputs)?;
        let weights = self.run(&gpu, (all, tables), kernel!("qk_norm_rope_bwd"), |n| {
            Ok(Destination::Heads(out.place(n, &gpu)?))
        })?;
        Ok((out.storage, weights))
    }
}

impl Gradients {
    /// Launches `kernel` once for each input, and returns the gradient of each input's norm weight. `written(n)` is the
    /// destination of the gradient of input `n`.
    fn run<'a>(
        &self,
        gpu: &Gpu,
        (all, tables): BackwardInputs<'a>,
        kernel: &str,
        written: impl Fn(usize) -> Result<Destination<'a>>,
    ) -> Result<Vec<CudaStorage>> {
        let rotation = Rotation { tables, direction: -1.0, style: self.style };
        let mut weights = Vec::with_capacity(all.len());
        for (n, &[x, weight, dy]) in all.iter().enumerate() {
            let width = weight.1.shape().elem_count();
            // Zeroed, because each thread block writes one row, and there may be fewer than PARTS thread blocks.
            let partials = gpu.alloc_zeros::<f32>(PARTS * width)?;
            let (dense, dy) = (Dense::new(weight, gpu)?, Heads::new(dy, gpu)?);
            let norm = Norm { weight: &dense, eps: self.eps, gradient: Some((&dy, &partials)) };
            run(gpu, kernel, &Heads::new(x, gpu)?, rotation, Some(norm), written(n)?)?;
            weights.push(partial_sums(gpu, &partials, PARTS, width, Float::of(NAME, weight.0)?)?);
        }
        Ok(weights)
    }
}

/// The inputs of [`Gradients`]; the gradient of the heads that are neither normalized nor rotated (the values); and the
/// tensor that contains the state of `Fp8Scales`.
type Fp8Inputs<'a> = (BackwardInputs<'a>, Option<Operand<'a>>, Operand<'a>);

impl<'a> Launch<Fp8Inputs<'a>, (Quantized<CudaStorage>, Vec<CudaStorage>)> for QkNormRopeFp8 {
    fn launch(
        &self,
        (inputs, through, state): Fp8Inputs<'a>,
    ) -> Result<(Quantized<CudaStorage>, Vec<CudaStorage>)> {
        let gpu = Gpu::new(state.0.device())?;
        let mut columns = vec![0];
        for x in inputs.0.iter().map(|[x, ..]| x).chain(&through) {
            let (_, _, heads, head_dim) = x.1.shape().dims4()?;
            columns.push(columns[columns.len() - 1] + heads * head_dim);
        }
        let (batch, sequence, ..) = inputs.0[0][0].1.shape().dims4()?;
        let codes = Codes::new(&gpu, (batch * sequence, columns[columns.len() - 1]), Fp8Copies::Both)?;
        let params = codes.params_of_site(&gpu, self.scale, state)?;
        let weights = self
            .gradients
            .run(&gpu, inputs, kernel!("qk_norm_rope_fp8"), |n| Ok(Destination::Fp8(params, columns[n])))?;
        if let Some(through) = through {
            let first = columns[inputs.0.len()];
            quantize_columns(&gpu, through, columns[columns.len() - 1] - first, params, first)?;
        }
        Ok((codes.into_storages(&gpu), weights))
    }
}
