//! Tests that SageBwd's INT8 values and scales of Q, K, V and dO are the same on the GPU as on the CPU.

use candle_core::{DType, Result};

use super::inputs::{Inputs, cases, inputs_of};
use super::token_of_slot;
use crate::cpu::lanes::abs_bits;
use crate::cpu::quantize::{Scale, TileCodes, channel_mean, code, subtract_mean, token_mean};
use crate::cuda::address::address;
use crate::cuda::plan::TILE;
use crate::cuda::tensor::Strided;
use crate::cuda::{Call, Problem, guard, params, sagebwd};
use crate::scheme::{Granularity, KeyMean, SageBwd, Smoothing};
use crate::shape::Segment;

/// The quantizer's INT8 values and scales have the same bits as on the CPU.
#[test]
#[ignore = "needs a GPU"]
fn codes_and_scales_are_the_cpus_to_the_bit() -> Result<()> {
    for (lens, heads, d, packing) in cases() {
        for dtype in [DType::BF16, DType::F16] {
            let inputs = Inputs::new(lens, heads, d, packing.clone(), dtype)?;
            let settings = [Smoothing::None, Smoothing::K, Smoothing::Qk, Smoothing::Kv]
                .into_iter()
                .flat_map(|smoothing| {
                    [Granularity::Vector, Granularity::Group(4), Granularity::Tile]
                        .map(|granularity| SageBwd { smoothing, granularity, ..SageBwd::default() })
                });
            let samples = [1, 64, 100].into_iter().flat_map(|count| {
                let sampled = SageBwd::default().key_mean(KeyMean::Sample(count));
                [sampled, sampled.smoothing(Smoothing::Kv)]
            });
            for settings in settings.chain(samples) {
                inputs.with(false, |problem, dout| compare_codes(&inputs, problem, dout, &settings))?;
            }
        }
    }
    Ok(())
}

/// The INT8 values and scales that `sagebwd::quantize` and `sagebwd::prepare` compute, copied to the host.
struct QuantizerResults {
    q: Vec<i8>,
    k: Vec<i8>,
    v_transposed: Vec<i8>,
    q_transposed: Vec<i8>,
    dout_transposed: Vec<i8>,
    q_dequant_scale: Vec<f32>,
    k_dequant_scale: Vec<f32>,
    v_dequant_scale: Vec<f32>,
    dout_dequant_scale: Vec<f32>,
}

impl QuantizerResults {
    fn of(call: &Call<'_>, dout: Strided<'_>, settings: &SageBwd) -> Result<Self> {
        let gpu = call.gpu;
        let operands = sagebwd::Operands::new(call, settings, true)?;
        sagebwd::quantize(call, &operands, &mut inputs_of(call)?)?;
        let minus_delta = gpu.alloc::<f32>(call.query_tiles() * TILE)?;
        let mut backward = params::Backward {
            out: call.problem.q.view,
            dout: dout.view,
            minus_delta: address(&minus_delta, gpu),
            shape: call.shape(),
            ..params::Backward::default()
        };
        let made = sagebwd::Transposed::new(call)?;
        sagebwd::prepare(call, settings, &operands.codes, &made, &mut backward)?;
        guard::check(gpu)?;
        let (v_codes, v_scales) = operands.v.as_ref().expect("V in INT8");
        let bytes = |slice| gpu.device().clone_dtoh(slice);
        let floats = |slice| gpu.device().clone_dtoh(slice);
        Ok(Self {
            q: bytes(&operands.codes.q)?,
            k: bytes(&operands.codes.k)?,
            v_transposed: bytes(v_codes)?,
            q_transposed: bytes(&made.q)?,
            dout_transposed: bytes(&made.dout)?,
            q_dequant_scale: floats(&operands.codes.q_dequant_scale)?,
            k_dequant_scale: floats(&operands.codes.k_dequant_scale)?,
            v_dequant_scale: floats(v_scales)?,
            dout_dequant_scale: floats(&made.dout_dequant_scale)?,
        })
    }
}

/// The memory layout of a tile's INT8 values.
#[derive(Clone, Copy, PartialEq)]
enum TileLayout {
    RowMajor,
    /// With permuted tokens.
    Transposed,
}

/// A tile as a kernel stores it, from `codes` (`d` INT8 values for each token): swizzled as in layout/swizzle.cuh, and
/// padded with zeros to `padded` channels.
fn tile(codes: &[i8], (d, padded): (usize, usize), lies: TileLayout) -> Vec<i8> {
    let width = if lies == TileLayout::Transposed { TILE } else { padded };
    let mut out = vec![0; TILE * padded];
    for (t, row) in codes.chunks(d).enumerate() {
        for (c, &code) in row.iter().enumerate() {
            let slot = (0..16).find(|&s| token_of_slot(s) == t % 16).expect("a slot");
            let (row, column) = if lies == TileLayout::Transposed { (c, t / 16 * 16 + slot) } else { (t, c) };
            let mask = if width == 64 { row / 2 % 4 } else { row % 8 };
            out[row * width + ((column / 16) ^ mask) * 16 + column % 16] = code;
        }
    }
    out
}

/// The CPU's INT8 values of a tile of dO, and the scale of each channel.
fn gradient_codes(grads: &[f32], d: usize, granularity: Granularity) -> (Vec<i8>, Vec<Scale>) {
    let group = granularity.vectors(d);
    let scales: Vec<Scale> = (0..d)
        .map(|c| {
            let first = c / group * group;
            let of_group = (first..(first + group).min(d))
                .flat_map(|c| grads.iter().skip(c).step_by(d))
                .map(|&x| abs_bits(x));
            Scale::of(of_group.max().unwrap_or(0))
        })
        .collect();
    let codes = grads.iter().enumerate().map(|(i, &x)| code(x, scales[i % d].quant) as i8).collect();
    (codes, scales)
}

/// Compares the results with the CPU's.
struct Comparison<'a> {
    inputs: &'a Inputs,
    call: &'a Call<'a>,
    settings: &'a SageBwd,
    written: QuantizerResults,
}

impl Comparison<'_> {
    fn same_codes(&self, what: &str, got: &[i8], at: usize, codes: &[i8], lies: TileLayout) {
        let (d, padded) = (self.inputs.shape.head_dim(), self.call.d);
        assert!(
            got[at * TILE * padded..][..TILE * padded] == tile(codes, (d, padded), lies),
            "{what}, tile {at}, {}",
            self.settings
        );
    }

    fn same_scale(&self, what: &str, got: f32, expected: f32) {
        assert_eq!(got.to_bits(), expected.to_bits(), "scale of {what}, {}", self.settings);
    }

    /// Compares the INT8 values and scales of Q and dO of a query head with the CPU's. `first` is the index of the
    /// segment's first tile among the head's tiles.
    fn queries(&self, segment: &Segment, head: usize, first: usize) {
        let (shape, written, d) = (&self.inputs.shape, &self.written, self.inputs.shape.head_dim());
        let mut rows = self.inputs.rows(0, shape.query_heads(), head, segment.query.clone());
        if self.settings.smoothing.of_queries() {
            for tile in rows.chunks_mut(TILE * d) {
                let mean = channel_mean(tile, d, TILE);
                subtract_mean(tile, &mean);
            }
        }
        let expected = TileCodes::new(&rows, d, TILE);
        let grads = self.inputs.rows(3, shape.query_heads(), head, segment.query.clone());
        let tiles = expected.codes.chunks(TILE * d).zip(grads.chunks(TILE * d));
        for (t, (codes, grads)) in tiles.enumerate() {
            let at = head * self.call.geometry.sizes.query_tiles as usize + first + t;
            self.same_codes("Q", &written.q, at, codes, TileLayout::RowMajor);
            self.same_codes("Q^T", &written.q_transposed, at, codes, TileLayout::Transposed);
            self.same_scale("Q", written.q_dequant_scale[at], expected.dequant_scale[t]);
            let (codes, scales) = gradient_codes(grads, d, self.settings.granularity);
            self.same_codes("dO^T", &written.dout_transposed, at, &codes, TileLayout::Transposed);
            for (c, scale) in scales.iter().enumerate() {
                self.same_scale("dO", written.dout_dequant_scale[at * self.call.d + c], scale.dequant);
            }
        }
    }

    /// Compares the INT8 values and scales of K and V of a key head with the CPU's. `first` is the index of the
    /// segment's first tile among the head's tiles.
    fn keys(&self, segment: &Segment, head: usize, first: usize) {
        let (shape, written, d) = (&self.inputs.shape, &self.written, self.inputs.shape.head_dim());
        let rows = |n: usize| self.inputs.rows(n, shape.key_heads(), head, segment.key.clone());
        let codes = |n: usize, smooth: bool| {
            let mut rows = rows(n);
            if smooth {
                let mean = token_mean(&rows, d, self.settings);
                subtract_mean(&mut rows, &mean);
            }
            TileCodes::new(&rows, d, TILE)
        };
        let smoothing = self.settings.smoothing;
        let (keys, values) = (codes(1, smoothing.of_keys()), codes(2, smoothing.of_values()));
        let tiles = keys.codes.chunks(TILE * d).zip(values.codes.chunks(TILE * d));
        for (t, (key, value)) in tiles.enumerate() {
            let at = head * self.call.geometry.sizes.key_tiles as usize + first + t;
            self.same_codes("K", &written.k, at, key, TileLayout::RowMajor);
            self.same_codes("V^T", &written.v_transposed, at, value, TileLayout::Transposed);
            self.same_scale("K", written.k_dequant_scale[at], keys.dequant_scale[t]);
            self.same_scale("V", written.v_dequant_scale[at], values.dequant_scale[t]);
        }
    }
}

fn compare_codes(
    inputs: &Inputs,
    problem: &Problem<'_>,
    dout: Strided<'_>,
    settings: &SageBwd,
) -> Result<()> {
    let (call, shape) = (Call::new(problem)?, &inputs.shape);
    let written = QuantizerResults::of(&call, dout, settings)?;
    let comparison = Comparison { inputs, call: &call, settings, written };
    let (mut first_query_tile, mut first_key_tile) = (0, 0);
    for segment in shape.segments() {
        for head in 0..shape.query_heads() {
            comparison.queries(&segment, head, first_query_tile);
        }
        for head in 0..shape.key_heads() {
            comparison.keys(&segment, head, first_key_tile);
        }
        first_query_tile += segment.query.len().div_ceil(TILE);
        first_key_tile += segment.key.len().div_ceil(TILE);
    }
    Ok(())
}
