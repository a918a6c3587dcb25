//! SageBwd on the GPU: its kernels, and the INT8 values and scales that they read.

use candle_core::Result;

use super::address::{address, address_if_any};
use super::buffer::Buffer;
use super::call::Call;
use super::compiled::constants::quant_tile::TILE_THREADS;
use super::compiled::constants::quantize::MEAN_THREADS;
use super::compiled::kernel;
use super::kernels::Grid;
use super::memory::Purpose;
use super::plan::{Plan, TILE};
use super::unquantized::{self, Unquantized};
use super::{OnGpu, OutputGradient, params};
use crate::error::Error;
use crate::scheme::{Granularity, Int8Products, KeyMean, SageBwd, Smoothing};

impl OnGpu for SageBwd {
    type Operands = Operands;
    type Kept = Kept;
    type Scratch = Option<Transposed>;

    fn forward_kernel(&self) -> &'static str {
        match self.smoothing {
            _ if !self.products.o => "attn_fwd_sagebwd_scores",
            Smoothing::Qk => "attn_fwd_sagebwd_qk",
            _ => "attn_fwd_sagebwd",
        }
    }

    fn backward_kernel(&self) -> &'static str {
        match self.products {
            Int8Products::FORWARD => unquantized::BACKWARD,
            Int8Products::FORWARD_AND_S | Int8Products::SCORES => "attn_bwd_sagebwd_s",
            // These settings have a separate kernel: their code would slow down the default kernel.
            _ if self.smoothing.of_queries() || self.granularity != Granularity::Vector => {
                "attn_bwd_sagebwd_general"
            }
            _ => "attn_bwd_sagebwd",
        }
    }

    fn operands(&self, call: &Call<'_>, keep: bool) -> Result<Operands> {
        Operands::new(call, self, keep)
    }

    fn before_forward<'p>(
        &self,
        call: &Call<'_>,
        operands: &'p Operands,
        params: &mut params::Forward<'p>,
    ) -> Result<()> {
        quantize(call, operands, params)
    }

    fn keep(&self, operands: Operands) -> Kept {
        match self.products {
            Int8Products::FORWARD => Kept::KeyMean(operands.codes.k_mean),
            _ => Kept::Codes(Box::new(operands.codes)),
        }
    }

    fn scratch(&self, call: &Call<'_>, _: &Kept) -> Result<Option<Transposed>> {
        (self.products == Int8Products::PAPER).then(|| Transposed::new(call)).transpose()
    }

    fn before_backward<'p>(
        &self,
        call: &Call<'_>,
        plan: &Plan,
        kept: &'p Kept,
        scratch: &'p Option<Transposed>,
        output: &OutputGradient<'_>,
        params: &mut params::Backward<'p>,
    ) -> Result<()> {
        match (kept, scratch) {
            (Kept::Codes(codes), Some(transposed)) => {
                // Q is read in INT8, without a tensor map.
                call.set_backward_maps(plan, false, output.dout, params)?;
                return prepare(call, self, codes, transposed, params);
            }
            (Kept::Codes(codes), None) => params.codes = codes.params(call),
            (Kept::KeyMean(mean), _) => params.codes.k_mean = address_if_any(mean.as_ref(), call.gpu),
        }
        Unquantized.before_backward(call, plan, &(), &(), output, params)
    }
}

/// Rejects settings that no kernel supports.
fn check_settings(settings: &SageBwd) -> crate::error::Result<()> {
    if settings.tile_q != TILE || settings.tile_k != TILE {
        return Err(Error::unsupported("SageBwd on CUDA supports one tile size")
            .got(format!("tile_q {}, tile_k {}", settings.tile_q, settings.tile_k))
            .allowed("64 for both")
            .hint("other sizes run on the CPU"));
    }
    match (settings.products, settings.smoothing) {
        (Int8Products::FORWARD_AND_S | Int8Products::SCORES, Smoothing::Qk) => {
            return Err(Error::unsupported("this smoothing is not supported with these products on CUDA")
                .got(format!("products {}, smoothing {}", settings.products, settings.smoothing))
                .allowed("scores: smoothing none, k; forward-and-s: none, k, kv; paper and forward: all")
                .hint("the CPU supports smoothing qk with every set of INT8 matmuls"));
        }
        (
            Int8Products::PAPER | Int8Products::FORWARD_AND_S | Int8Products::SCORES | Int8Products::FORWARD,
            _,
        ) => {}
        (other, _) => {
            return Err(Error::unsupported("this set of INT8 matmuls does not run on CUDA")
                .got(format!("products {other}"))
                .allowed("paper, forward-and-s, scores, forward")
                .hint("other sets run on the CPU"));
        }
    }
    match settings.granularity {
        Granularity::Group(size) if !size.is_power_of_two() => {
            Err(Error::unsupported("this scale granularity is not supported on CUDA")
                .got(settings.granularity)
                .allowed("vector, group-2, group-4, group-8, group-16, group-32, group-64, tile")
                .hint("other groups run on the CPU"))
        }
        _ => Ok(()),
    }
}

/// What the forward keeps for the backward's matmuls.
#[derive(Debug)]
pub(super) enum Kept {
    Codes(Box<Codes>),
    /// The mean that was subtracted from K. `None` without smoothing of K.
    KeyMean(Option<Buffer<f32>>),
}

/// The INT8 values and scales of Q and K, and the means that smoothing subtracts from Q and K. `k_mean` is
/// (head, segment, channel). The first dimensions of the other buffers are (head, tile), with tiles of 64 tokens.
#[derive(Debug)]
pub(super) struct Codes {
    pub(super) q: Buffer<i8>,
    pub(super) k: Buffer<i8>,
    pub(super) q_dequant_scale: Buffer<f32>,
    pub(super) k_dequant_scale: Buffer<f32>,
    /// `None` without smoothing of Q.
    q_mean: Option<Buffer<f32>>,
    /// `None` without smoothing of K.
    k_mean: Option<Buffer<f32>>,
}

/// The operands of the forward's kernel. V's INT8 values are freed after the forward.
pub(super) struct Operands {
    pub(super) codes: Codes,
    /// V's INT8 values and scales. `None` if `O = P V` is not an INT8 matmul.
    pub(super) v: Option<(Buffer<i8>, Buffer<f32>)>,
    /// `None` without smoothing of K, or if the mean is over a sample of the tokens (`KeyMean::Sample`).
    k_tile_sums: Option<Buffer<f32>>,
    key_mean: KeyMean,
    smooths_values: bool,
}

impl Operands {
    pub(super) fn new(call: &Call<'_>, settings: &SageBwd, keep: bool) -> Result<Self> {
        check_settings(settings)?;
        let (gpu, d) = (call.gpu, call.d);
        let (queries, keys) = (call.query_tiles(), call.key_tiles());
        let smoothing = settings.smoothing;
        // V's means and sums are stored after K's.
        let smoothed = 1 + usize::from(smoothing.of_values());
        let means = smoothed * call.segment_count() * call.problem.shape.key_heads() * d;
        // With `FORWARD`, the forward keeps only K's mean for the backward: see `SageBwd::keep`.
        let codes_for = Purpose::kept(keep && settings.products != Int8Products::FORWARD);
        let floats = |len| gpu.alloc_for(codes_for, len);
        let codes = Codes {
            q: gpu.alloc_for(codes_for, queries * TILE * d)?,
            k: gpu.alloc_for(codes_for, keys * TILE * d)?,
            q_dequant_scale: floats(queries)?,
            k_dequant_scale: floats(keys)?,
            q_mean: smoothing.of_queries().then(|| floats(queries * d)).transpose()?,
            k_mean: smoothing.of_keys().then(|| gpu.alloc_for(Purpose::kept(keep), means)).transpose()?,
        };
        let v = settings
            .products
            .o
            .then(|| Ok::<_, candle_core::Error>((gpu.alloc(keys * TILE * d)?, gpu.alloc(keys)?)));
        let v = v.transpose()?;
        let key_mean = settings.key_mean;
        let of_tiles = smoothing.of_keys() && key_mean == KeyMean::All;
        let k_tile_sums = of_tiles.then(|| gpu.alloc(smoothed * keys * d)).transpose()?;
        Ok(Self { codes, v, k_tile_sums, key_mean, smooths_values: smoothing.of_values() })
    }
}

/// Launches the quantization of Q, K and, if needed, V, and sets the addresses of the INT8 values in `params`.
pub(super) fn quantize<'p>(
    call: &Call<'_>,
    operands: &'p Operands,
    params: &mut params::Forward<'p>,
) -> Result<()> {
    let Operands { codes, v, k_tile_sums, key_mean, smooths_values } = operands;
    let gpu = call.gpu;
    params.codes = codes.params(call);
    params.codes.v_transposed = address_if_any(v.as_ref().map(|(codes, _)| codes), gpu);
    params.codes.v_dequant_scale = address_if_any(v.as_ref().map(|(_, scales)| scales), gpu);
    params.codes.k_tile_sums = address_if_any(k_tile_sums.as_ref(), gpu);
    params.smooth_values = (*smooths_values).into();
    if codes.k_mean.is_some() {
        match *key_mean {
            KeyMean::All => launch_means(call, params)?,
            KeyMean::Sample(count) => {
                params.key_sample = count as i32;
                gpu.launch_attention(
                    "quantize",
                    &call.kernel(kernel!("mean_of_sample")),
                    mean_grid(call, params),
                    params,
                )?;
            }
        }
    }
    // The thread blocks of V's tiles come last.
    let tiles = call.query_tiles() + call.key_tiles() * if v.is_some() { 2 } else { 1 };
    gpu.launch_attention(
        "quantize",
        &call.kernel(kernel!("quantize")),
        Grid::line(tiles, TILE_THREADS),
        params,
    )
}

impl Codes {
    fn params(&self, call: &Call<'_>) -> params::Codes<'_> {
        let gpu = call.gpu;
        params::Codes {
            q: address(&self.q, gpu),
            k: address(&self.k, gpu),
            q_dequant_scale: address(&self.q_dequant_scale, gpu),
            k_dequant_scale: address(&self.k_dequant_scale, gpu),
            q_mean: address_if_any(self.q_mean.as_ref(), gpu),
            k_mean: address_if_any(self.k_mean.as_ref(), gpu),
            ..params::Codes::default()
        }
    }
}

/// Launches kernels that compute the mean of K over tokens and, with `params.smooth_values`, that of V. `params.codes`
/// has the buffers for the means, and for the sums over each tile's tokens.
pub(super) fn launch_means(call: &Call<'_>, params: &params::Forward<'_>) -> Result<()> {
    let (gpu, smoothed) = (call.gpu, 1 + params.smooth_values as usize);
    let tiles = Grid::line(smoothed * call.key_tiles(), TILE_THREADS);
    gpu.launch_attention("quantize", &call.kernel(kernel!("sum_tiles")), tiles, params)?;
    gpu.launch_attention(
        "quantize",
        &format!("{}_{}", kernel!("mean_of_tiles"), call.d),
        mean_grid(call, params),
        params,
    )
}

/// The grid of a launch that computes means: one thread block for each head of K in each segment (batch entry or
/// document). If V is smoothed, also one for each head of V in each segment.
fn mean_grid(call: &Call<'_>, params: &params::Forward<'_>) -> Grid {
    let heads = call.problem.shape.key_heads() as u32 * (1 + params.smooth_values as u32);
    Grid { blocks: (call.segment_count() as u32, heads, 1), ..Grid::line(1, MEAN_THREADS) }
}

/// The buffers that the backward's kernel reads in addition to the forward's INT8 values.
pub(super) struct Transposed {
    pub(super) q: Buffer<i8>,
    pub(super) dout: Buffer<i8>,
    pub(super) dout_dequant_scale: Buffer<f32>,
}

impl Transposed {
    pub(super) fn new(call: &Call<'_>) -> Result<Self> {
        let (gpu, d, queries) = (call.gpu, call.d, call.query_tiles());
        Ok(Self {
            q: gpu.alloc(queries * TILE * d)?,
            dout: gpu.alloc(queries * TILE * d)?,
            dout_dequant_scale: gpu.alloc(queries * d)?,
        })
    }
}

/// Writes the addresses of `codes` (the forward's INT8 values) and `transposed` to `params`. Launches the kernel that
/// computes delta and fills `transposed`.
pub(super) fn prepare<'p>(
    call: &Call<'_>,
    settings: &SageBwd,
    codes: &'p Codes,
    transposed: &'p Transposed,
    params: &mut params::Backward<'p>,
) -> Result<()> {
    let gpu = call.gpu;
    params.codes = codes.params(call);
    params.q_transposed = address(&transposed.q, gpu);
    params.dout_transposed = address(&transposed.dout, gpu);
    params.dout_dequant_scale = address(&transposed.dout_dequant_scale, gpu);
    params.group = settings.granularity.vectors(TILE) as i32;
    // `call.d` includes the padding beyond head_dim. The padding is zero, so it changes no scale of dO.
    params.dout_group = match settings.granularity {
        Granularity::Tile => call.d,
        other => other.vectors(call.d),
    } as i32;
    let grid = Grid::line(call.query_tiles(), TILE_THREADS);
    gpu.launch_attention("quantize", &call.kernel(kernel!("prepare_sagebwd")), grid, params)
}
