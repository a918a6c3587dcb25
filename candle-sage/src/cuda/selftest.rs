//! Tests of the module's internals, on a GPU: primitives, codes to the bit, bounds of buffers.
#![allow(unsafe_code)]

mod nvfp4_products;

use candle_core::{DType, Device, Layout, Result, Storage, Tensor};
use cudarc::driver::DeviceRepr;

use super::kernels::{Gpu, Grid};
use super::params::{self, Address};
use super::plan::TILE;
use super::tensor::address;
use super::{Call, Operand, Past, Problem, sagebwd};
use crate::cpu::lanes::abs_bits;
use crate::cpu::quantize::{Scale, TileCodes, channel_mean, code, subtract_mean};
use crate::nvfp4::{self, Axis, Packed};
use crate::scheme::{AttnQat, Granularity, SageBwd, Scheme, Smoothing, ValueGroups};
use crate::shape::{AttentionShape, Packing};

fn device() -> Device {
    static GPU: std::sync::OnceLock<Device> = std::sync::OnceLock::new();
    GPU.get_or_init(|| Device::new_cuda(0).expect("a GPU")).clone()
}

fn gpu() -> Gpu {
    Gpu::new(device().as_cuda_device().expect("a GPU")).expect("a GPU")
}

/// Pseudo-random numbers, the same for the same seed.
fn numbers(seed: u64, len: usize) -> Vec<u64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
        })
        .collect()
}

fn codes(seed: u64, len: usize) -> Vec<i8> {
    numbers(seed, len).into_iter().map(|n| (n % 255) as i8).map(|c| c.max(-127)).collect()
}

/// Small whole numbers: their products are exact in bf16 and f32.
fn small(seed: u64, len: usize) -> Vec<half::bf16> {
    numbers(seed, len).into_iter().map(|n| half::bf16::from_f32((n % 17) as f32 - 8.0)).collect()
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    a: Address,
    b: Address,
    out: Address,
}
// SAFETY: plain data, the same in kernels/selftest.cu.
unsafe impl DeviceRepr for Params {}

/// Runs one warp of a kernel on two buffers.
fn run<A: DeviceRepr + Copy + 'static, X: DeviceRepr + Copy>(
    kernel: &str,
    a: &[A],
    b: &[A],
    len: usize,
) -> Result<Vec<X>> {
    run_threads(32, kernel, a, b, len)
}

fn run_threads<A: DeviceRepr + Copy + 'static, X: DeviceRepr + Copy>(
    threads: u32,
    kernel: &str,
    a: &[A],
    b: &[A],
    len: usize,
) -> Result<Vec<X>> {
    let gpu = gpu();
    let (a, b) = (gpu.device.clone_htod(a)?, gpu.device.clone_htod(b)?);
    let out = gpu.alloc::<X>(len)?;
    let params = Params { a: address(&a, &gpu), b: address(&b, &gpu), out: address(&out, &gpu) };
    // SAFETY: the kernels read up to 64 rows, and write `len` elements.
    unsafe { gpu.launch("selftest", kernel, Grid::line(1, threads), &params)? };
    super::guard::check(&gpu)?;
    Ok(gpu.device.clone_dtoh(&out)?[..len].to_vec())
}

#[test]
#[ignore = "needs a GPU"]
fn products_of_codes_are_exact() -> Result<()> {
    for (kernel, width) in [("selftest_codes_64", 64), ("selftest_codes_128", 128)] {
        let mut extremes = (codes(1, 16 * width), codes(2, 16 * width));
        // The largest possible sums: 127^2 per term.
        extremes.0[..width].fill(127);
        extremes.1[..width].fill(127);
        extremes.1[width..2 * width].fill(-127);
        let (a, b) = extremes;
        let got: Vec<i32> = run(kernel, &a, &b, 256)?;
        for (i, row) in a.chunks(width).enumerate() {
            for (j, column) in b.chunks(width).enumerate() {
                let sum: i32 = row.iter().zip(column).map(|(&x, &y)| i32::from(x) * i32::from(y)).sum();
                assert_eq!(got[i * 16 + j], sum, "{kernel} ({i}, {j})");
            }
        }
    }
    Ok(())
}

/// `wgmma` with its descriptors of swizzled rows and its fragments, in every form that the kernels use.
#[test]
#[ignore = "needs a Hopper GPU"]
fn products_of_a_warpgroup_are_exact() -> Result<()> {
    for width in [64, 128] {
        for (form, columns) in [
            ("shared", 32),
            ("shared", 64),
            ("shared", 128),
            ("registers", 32),
            ("registers", 64),
            ("unsigned", 64),
            ("unsigned", 128),
        ] {
            let (mut a, mut b) = (codes(5, 64 * width), codes(6, columns * width));
            // As an unsigned code -1 is 255.
            let (most, value): (i8, fn(i8) -> i32) =
                if form == "unsigned" { (-1, |x| i32::from(x as u8)) } else { (127, i32::from) };
            a[..width].fill(most);
            b[..width].fill(127);
            b[width..2 * width].fill(-127);
            let kernel = format!("selftest_group_{width}_{form}_{columns}");
            let got: Vec<i32> = run_threads(128, &kernel, &a, &b, 64 * columns)?;
            for (i, row) in a.chunks(width).enumerate() {
                for (j, column) in b.chunks(width).enumerate() {
                    let sum: i32 = row.iter().zip(column).map(|(&x, &y)| value(x) * i32::from(y)).sum();
                    assert_eq!(got[i * columns + j], sum, "{kernel} ({i}, {j})");
                }
            }
        }
    }
    let (a, b) = (small(7, 64 * 64), small(8, 64 * 64));
    let halves = |m: &[half::bf16]| m.iter().map(|x| half::f16::from_f32(x.to_f32())).collect::<Vec<_>>();
    let at = |m: &[half::bf16], turned: bool, i: usize, k: usize| {
        m[if turned { k * 64 + i } else { i * 64 + k }].to_f32()
    };
    for (form, columns, a_turned, b_turned) in [
        ("nn", 64, false, false),
        ("nt", 64, false, true),
        ("tt", 32, true, true),
        ("registers", 64, false, true),
    ] {
        let name = |dtype: &str| format!("selftest_group_{dtype}_{form}_{columns}");
        let bf16: Vec<f32> = run_threads(128, &name("bf16"), &a, &b, 64 * columns)?;
        let f16: Vec<f32> = run_threads(128, &name("f16"), &halves(&a), &halves(&b), 64 * columns)?;
        for i in 0..64 {
            for j in 0..columns {
                let sum: f32 = (0..64).map(|k| at(&a, a_turned, i, k) * at(&b, b_turned, j, k)).sum();
                let got = (bf16[i * columns + j], f16[i * columns + j]);
                assert_eq!(got, (sum, sum), "{form} ({i}, {j})");
            }
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn products_in_16_bit_from_both_layouts() -> Result<()> {
    for (kernel, a_turned, b_turned) in [
        ("selftest_16_nn", false, false),
        ("selftest_16_nt", false, true),
        ("selftest_16_tn", true, false),
        ("selftest_16_tt", true, true),
    ] {
        let (a, b) = (small(3, 64 * 64), small(4, 64 * 64));
        let got: Vec<f32> = run(kernel, &a, &b, 256)?;
        let at = |m: &[half::bf16], turned: bool, i: usize, k: usize| {
            if turned { m[k * 64 + 16 + i] } else { m[i * 64 + k] }.to_f32()
        };
        for i in 0..16 {
            for j in 0..16 {
                let sum: f32 = (0..64).map(|k| at(&a, a_turned, i, k) * at(&b, b_turned, j, k)).sum();
                assert_eq!(got[i * 16 + j], sum, "{kernel} ({i}, {j})");
            }
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn fragments_go_to_shared_memory_and_back() -> Result<()> {
    let a = codes(5, 16 * 128);
    assert_eq!(run::<i8, i8>("selftest_round_trip", &a, &a, 16 * 128)?, a);
    Ok(())
}

/// The token in a slot of 16: see `layout/permutation.cuh`.
fn token_of_slot(slot: usize) -> usize {
    8 * (slot / 2 % 2) + 2 * (slot / 4) + slot % 2
}

#[test]
#[ignore = "needs a GPU"]
fn packed_accumulators_meet_permuted_tokens() -> Result<()> {
    let (s, v) = (codes(6, 16 * 32), codes(7, 32 * 16));
    // V^T: (16 channels, 64 bytes), of which the first 32 bytes hold tokens.
    let mut turned = vec![0i8; 16 * 64];
    for channel in 0..16 {
        for slot in 0..32 {
            turned[channel * 64 + slot] = v[(slot / 16 * 16 + token_of_slot(slot % 16)) * 16 + channel];
        }
    }
    let got: Vec<i32> = run("selftest_permuted", &s, &turned, 256)?;
    for i in 0..16 {
        for c in 0..16 {
            let sum: i32 = (0..32).map(|t| i32::from(s[i * 32 + t]) * i32::from(v[t * 16 + c])).sum();
            assert_eq!(got[i * 16 + c], sum, "({i}, {c})");
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn conversions_round_ties_to_even() -> Result<()> {
    let mut x: Vec<f32> = numbers(8, 96).into_iter().map(|n| (n % 254_000) as f32 / 1000.0).collect();
    x.extend((0..32).map(|i| i as f32 * 8.0 + 0.5));
    // From 128 on these are unsigned codes.
    let got: Vec<u8> = run("selftest_conversions", &x, &x, 256)?;
    for (i, x) in x.iter().enumerate() {
        assert_eq!(got[i], x.round_ties_even() as u8, "codes of {x}");
        // This conversion goes through f16, whose spacing is at most 1/8: a value that close to a tie may go
        // either way.
        let distance = (f32::from(got[128 + i]) - x).abs();
        assert!(distance <= 0.5 + 1.0 / 16.0, "{} for {x}", got[128 + i]);
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn codes_over_powers_of_two_are_rounded() -> Result<()> {
    for start in [0, 128] {
        let x: Vec<u8> = (start..=start + 127).map(|code| if code == 255 { 254 } else { code }).collect();
        let got: Vec<u8> = run("selftest_smaller_codes", &x, &x, 10 * 128)?;
        for (i, got) in got.into_iter().enumerate() {
            let (power, code) = (i / 128, f64::from(x[i % 128]));
            let expected = if power > 8 { 0.0 } else { (code / 2f64.powi(power as i32) + 0.5).floor() };
            assert_eq!(f64::from(got), expected, "{code} over 2^{power}");
        }
    }
    Ok(())
}

/// Inputs of an attention call, on the GPU and as f32.
struct Inputs {
    shape: AttentionShape,
    tensors: Vec<Tensor>,
    values: Vec<Vec<f32>>,
}

impl Inputs {
    fn new(
        lens: (usize, usize),
        heads: (usize, usize),
        d: usize,
        packing: Option<Packing>,
        dtype: DType,
    ) -> Result<Self> {
        let dims = [(1, lens.0, heads.0, d), (1, lens.1, heads.1, d)];
        let shape = AttentionShape::new(dims[0], dims[1], dims[1], true, packing)?;
        let mut tensors = Vec::new();
        for (n, dims) in [dims[0], dims[1], dims[1], dims[0]].into_iter().enumerate() {
            let len = dims.0 * dims.1 * dims.2 * dims.3;
            // Channels and heads of different sizes, and a mean.
            let data: Vec<f32> = numbers(10 + n as u64, len)
                .into_iter()
                .enumerate()
                .map(|(i, x)| ((x % 2001) as f32 / 1000.0 - 1.0) * (1 + i % 7) as f32 + 0.3)
                .collect();
            tensors.push(Tensor::from_vec(data, dims, &Device::Cpu)?.to_dtype(dtype)?.to_device(&device())?);
        }
        let values = tensors
            .iter()
            .map(|t| t.to_dtype(DType::F32)?.flatten_all()?.to_vec1())
            .collect::<Result<_>>()?;
        Ok(Self { shape, tensors, values })
    }

    /// Calls `f` with the problem and the operands: query, key, value and output gradient.
    fn with<T>(
        &self,
        deterministic: bool,
        f: impl FnOnce(&Problem<'_>, &[Operand<'_>]) -> Result<T>,
    ) -> Result<T> {
        let guards: Vec<_> = self.tensors.iter().map(Tensor::storage_and_layout).collect();
        let operands: Vec<Operand<'_>> = guards
            .iter()
            .map(|(storage, layout)| match &**storage {
                Storage::Cuda(storage) => (storage, *layout),
                _ => unreachable!("tensors are on the GPU"),
            })
            .collect();
        let [q, k, v] = [operands[0], operands[1], operands[2]];
        let problem =
            Problem { shape: &self.shape, softmax_scale: 0.125, deterministic, q, k, v, selection: None };
        f(&problem, &operands)
    }

    /// Rows of one head of tensor `n`, for the tokens of `range`.
    fn rows(&self, n: usize, heads: usize, head: usize, range: std::ops::Range<usize>) -> Vec<f32> {
        let d = self.shape.head_dim();
        range.flat_map(|t| self.values[n][(t * heads + head) * d..][..d].to_vec()).collect()
    }
}

/// Lengths and heads of query and key, head_dim, packed documents.
type Case = ((usize, usize), (usize, usize), usize, Option<Packing>);

fn cases() -> Vec<Case> {
    let packing = Packing { cu_seqlens_q: vec![0, 1, 70, 70, 200], cu_seqlens_k: vec![0, 65, 130, 131, 190] };
    vec![
        ((1, 1), (1, 1), 64, None),
        ((63, 65), (2, 1), 64, None),
        ((130, 128), (2, 2), 128, None),
        ((200, 300), (4, 2), 40, None),
        ((129, 64), (3, 1), 97, None),
        ((200, 190), (2, 1), 64, Some(packing)),
        // More tiles than the kernel of the mean reads sums of at once.
        ((70, 4200), (1, 1), 64, None),
    ]
}

/// The quantizer gives the CPU's bits: codes, scales and means.
#[test]
#[ignore = "needs a GPU"]
fn codes_and_scales_are_the_cpus_to_the_bit() -> Result<()> {
    for (lens, heads, d, packing) in cases() {
        for dtype in [DType::BF16, DType::F16] {
            for smoothing in [Smoothing::None, Smoothing::K, Smoothing::Qk] {
                for granularity in [Granularity::Vector, Granularity::Group(4), Granularity::Tile] {
                    let inputs = Inputs::new(lens, heads, d, packing.clone(), dtype)?;
                    let settings = SageBwd { smoothing, granularity, ..SageBwd::default() };
                    inputs.with(false, |problem, operands| {
                        compare_codes(&inputs, problem, operands[3], &settings)
                    })?;
                }
            }
        }
    }
    Ok(())
}

/// The parameters of a forward before anything is prepared.
fn inputs_of(call: &Call<'_>) -> Result<params::Forward> {
    let Problem { q, k, v, .. } = *call.problem;
    let [q, k, v] = [call.view(q)?, call.view(k)?, call.view(v)?];
    Ok(params::Forward { q, k, v, shape: call.shape, ..params::Forward::default() })
}

fn compare_codes(
    inputs: &Inputs,
    problem: &Problem<'_>,
    dout: Operand<'_>,
    settings: &SageBwd,
) -> Result<()> {
    let call = Call::new(problem)?;
    let (gpu, shape, d, padded) = (&call.gpu, &inputs.shape, inputs.shape.head_dim(), call.d);
    let mut forward = inputs_of(&call)?;
    let operands = sagebwd::quantize(&call, settings, &mut forward)?;
    let minus_delta = gpu.alloc::<f32>(call.query_tiles() * TILE)?;
    let mut backward = params::Backward {
        out: call.view(problem.q)?,
        dout: call.view(dout)?,
        minus_delta: address(&minus_delta, gpu),
        shape: call.shape,
        ..params::Backward::default()
    };
    let made = sagebwd::prepare(&call, settings, &operands.codes, &mut backward)?;
    super::guard::check(gpu)?;

    let device = &gpu.device;
    let bytes = |slice| device.clone_dtoh(slice);
    let floats = |slice| device.clone_dtoh(slice);
    let (q, k, v) = (bytes(&operands.codes.q)?, bytes(&operands.codes.k)?, bytes(&operands.v.0)?);
    let (q_dequant_scale, k_dequant_scale) =
        (floats(&operands.codes.q_dequant_scale)?, floats(&operands.codes.k_dequant_scale)?);
    let v_dequant_scale = floats(&operands.v.1)?;
    let (q_turned, dout_turned) = (bytes(&made.q)?, bytes(&made.dout)?);
    let dout_dequant_scale = floats(&made.dout_dequant_scale)?;

    // The layout of a tile whose codes are rows of `d`: row-major, or transposed with permuted tokens;
    // 16-byte chunks of a row swizzled as in layout/swizzle.cuh; padding is zero.
    let lies = |codes: &[i8], turned: bool| -> Vec<i8> {
        let width = if turned { TILE } else { padded };
        let mut out = vec![0; TILE * padded];
        for (t, row) in codes.chunks(d).enumerate() {
            for (c, &code) in row.iter().enumerate() {
                let slot = (0..16).find(|&s| token_of_slot(s) == t % 16).expect("a slot");
                let (row, column) = if turned { (c, t / 16 * 16 + slot) } else { (t, c) };
                let mask = if width == 64 { row / 2 % 4 } else { row % 8 };
                out[row * width + ((column / 16) ^ mask) * 16 + column % 16] = code;
            }
        }
        out
    };
    let same = |what: &str, got: &[i8], at: usize, codes: &[i8], turned: bool| {
        assert!(
            got[at * TILE * padded..][..TILE * padded] == lies(codes, turned),
            "{what}, tile {at}, {settings}"
        );
    };
    let (mut q_start, mut k_start) = (0, 0);
    for segment in shape.segments() {
        for head in 0..shape.query_heads() {
            let mut rows = inputs.rows(0, shape.query_heads(), head, segment.query.clone());
            if settings.smoothing == Smoothing::Qk {
                for tile in rows.chunks_mut(TILE * d) {
                    let mean = channel_mean(tile, d, TILE);
                    subtract_mean(tile, &mean);
                }
            }
            let expected = TileCodes::new(&rows, d, TILE);
            let grads = inputs.rows(3, shape.query_heads(), head, segment.query.clone());
            for (t, (codes, grads)) in expected.codes.chunks(TILE * d).zip(grads.chunks(TILE * d)).enumerate()
            {
                let at = head * call.shape.query_tiles as usize + q_start + t;
                same("Q", &q, at, codes, false);
                same("Q^T", &q_turned, at, codes, true);
                assert_eq!(q_dequant_scale[at].to_bits(), expected.dequant_scale[t].to_bits(), "scale of Q");
                let group = settings.granularity.vectors(d);
                let scales: Vec<Scale> = (0..d)
                    .map(|c| {
                        let first = c / group * group;
                        let of_group = (first..(first + group).min(d))
                            .flat_map(|c| grads.iter().skip(c).step_by(d))
                            .map(|&x| abs_bits(x));
                        Scale::of(of_group.max().unwrap_or(0))
                    })
                    .collect();
                let codes: Vec<i8> =
                    grads.iter().enumerate().map(|(i, &x)| code(x, scales[i % d].quant) as i8).collect();
                same("dO^T", &dout_turned, at, &codes, true);
                for (c, scale) in scales.iter().enumerate() {
                    assert_eq!(
                        dout_dequant_scale[at * padded + c].to_bits(),
                        scale.dequant.to_bits(),
                        "scale of dO"
                    );
                }
            }
        }
        for head in 0..shape.key_heads() {
            let mut rows = inputs.rows(1, shape.key_heads(), head, segment.key.clone());
            if settings.smoothing != Smoothing::None {
                let mean = channel_mean(&rows, d, TILE);
                subtract_mean(&mut rows, &mean);
            }
            let keys = TileCodes::new(&rows, d, TILE);
            let values =
                TileCodes::new(&inputs.rows(2, shape.key_heads(), head, segment.key.clone()), d, TILE);
            let tiles = keys.codes.chunks(TILE * d).zip(values.codes.chunks(TILE * d));
            for (t, (key, value)) in tiles.enumerate() {
                let at = head * call.shape.key_tiles as usize + k_start + t;
                same("K", &k, at, key, false);
                same("V^T", &v, at, value, true);
                assert_eq!(k_dequant_scale[at].to_bits(), keys.dequant_scale[t].to_bits(), "scale of K");
                assert_eq!(v_dequant_scale[at].to_bits(), values.dequant_scale[t].to_bits(), "scale of V");
            }
        }
        q_start += segment.query.len().div_ceil(TILE);
        k_start += segment.key.len().div_ceil(TILE);
    }
    Ok(())
}

/// Every element is written, and nothing beyond the end: buffers start as NaN and end in canaries.
#[test]
#[ignore = "needs a GPU"]
fn kernels_fill_their_buffers_and_no_more() -> Result<()> {
    let schemes: [Scheme; 6] = [
        Scheme::FullPrecision,
        SageBwd::default().into(),
        AttnQat::default().into(),
        AttnQat::default().smoothing(Smoothing::K).value_groups(ValueGroups::HeadDim).into(),
        AttnQat::default().matched_recomputation(false).high_precision_output(false).into(),
        SageBwd { smoothing: Smoothing::Qk, granularity: Granularity::Tile, ..SageBwd::default() }.into(),
    ];
    for (lens, heads, d, packing) in cases() {
        for dtype in [DType::BF16, DType::F16] {
            for scheme in &schemes {
                for deterministic in [false, true] {
                    let inputs = Inputs::new(lens, heads, d, packing.clone(), dtype)?;
                    inputs.with(deterministic, |problem, operands| {
                        let (out, ran) = super::forward(scheme, problem, true)?;
                        let layout = Layout::contiguous(inputs.shape.query_dims());
                        let ran = ran.expect("a forward that keeps its state");
                        let grads =
                            ran.backward(problem, &Past { out: (&out, &layout), dout: operands[3] })?;
                        let dims =
                            [inputs.shape.query_dims(), inputs.shape.key_dims(), inputs.shape.key_dims()];
                        for (storage, dims) in
                            grads.into_iter().zip(dims).chain([(out, inputs.shape.query_dims())])
                        {
                            let none = candle_core::op::BackpropOp::none();
                            let t = Tensor::from_storage(Storage::Cuda(storage), dims, none, false);
                            let sum = t.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()?;
                            assert!(sum.is_finite(), "{lens:?}, d {d}, {scheme}: something was not written");
                        }
                        Ok(())
                    })?;
                }
            }
        }
    }
    Ok(())
}

/// Conversions and scales have the bits of `nvfp4.rs`, and E4M3 those of the hardware, where it has the
/// conversion: for values, midpoints and numbers of all magnitudes.
#[test]
#[ignore = "needs a GPU"]
fn nvfp4_is_the_cpus_to_the_bit() -> Result<()> {
    const COUNT: usize = 1 << 16;
    let mut x: Vec<f32> = Vec::new();
    for code in 0..0x7e {
        let (low, high) = (nvfp4::e4m3_value(code), nvfp4::e4m3_value(code + 1));
        x.extend([low, high, (low + high) / 2.0].into_iter().flat_map(|x| [x, 6.0 * x]));
    }
    x.extend([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0]);
    let near = |x: &f32| [x.to_bits() + 1, x.to_bits().saturating_sub(1)].map(f32::from_bits);
    let neighbours: Vec<f32> = x.iter().flat_map(near).collect();
    x.extend(neighbours);
    // Scales and E4M3 take magnitudes; only E2M1 takes negative numbers.
    x.extend(numbers(9, COUNT - x.len()).into_iter().map(|n| f32::from_bits(n as u32 % 0x7f80_0000)));
    for sign in [1.0, -1.0] {
        let x: Vec<f32> = x.iter().map(|x| sign * x).collect();
        let got: Vec<f32> = run("selftest_nvfp4", &x, &x, 5 * COUNT)?;
        let bits = |x: f32| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
        for (i, &x) in x.iter().enumerate() {
            let scale = nvfp4::Scale::of(x.abs());
            let expected =
                [nvfp4::e2m1(x), nvfp4::e4m3(x.abs()), scale.dequant, scale.quant, nvfp4::e4m3(x.abs())];
            for (n, expected) in expected.into_iter().enumerate() {
                let got = got[n * COUNT + i];
                assert_eq!(bits(got), bits(expected), "conversion {n} of {x:e}: {got:e}, {expected:e}");
            }
        }
    }
    Ok(())
}

/// Q, K and V, as Attn-QAT's products read them, have the CPU's bits.
#[test]
#[ignore = "needs a GPU"]
fn rounded_operands_are_the_cpus_to_the_bit() -> Result<()> {
    for (lens, heads, d, packing) in cases() {
        for dtype in [DType::BF16, DType::F16] {
            for settings in [
                AttnQat::default(),
                AttnQat::default().smoothing(Smoothing::K).value_groups(ValueGroups::HeadDim),
            ] {
                let inputs = Inputs::new(lens, heads, d, packing.clone(), dtype)?;
                inputs.with(false, |problem, _| compare_rounded(&inputs, problem, &settings))?;
            }
        }
    }
    Ok(())
}

fn compare_rounded(inputs: &Inputs, problem: &Problem<'_>, settings: &AttnQat) -> Result<()> {
    let call = Call::new(problem)?;
    let (shape, d) = (&inputs.shape, inputs.shape.head_dim());
    let mut forward = inputs_of(&call)?;
    let operands = super::OnGpu::before_forward(settings, &call, false, &mut forward)?;
    super::guard::check(&call.gpu)?;
    let rounded = &operands.rounded;
    let dims = [shape.query_dims(), shape.key_dims(), shape.key_dims()];
    for (n, (storage, dims)) in rounded.iter().zip(dims).enumerate() {
        let storage = candle_core::backend::BackendStorage::to_cpu_storage(storage)?;
        let got: Vec<f32> = match &storage {
            candle_core::CpuStorage::BF16(x) => x.iter().map(|x| x.to_f32()).collect(),
            candle_core::CpuStorage::F16(x) => x.iter().map(|x| x.to_f32()).collect(),
            _ => unreachable!("16-bit tensors"),
        };
        let along_tokens = n == 2 && settings.value_groups == ValueGroups::Tokens;
        let axis = if along_tokens { Axis::Rows } else { Axis::Channels };
        for segment in shape.segments() {
            let tokens = if n == 0 { segment.query.clone() } else { segment.key.clone() };
            for head in 0..dims.2 {
                let mut rows = inputs.rows(n, dims.2, head, tokens.clone());
                if n == 1 && settings.smoothing != Smoothing::None {
                    let mean = channel_mean(&rows, d, TILE);
                    subtract_mean(&mut rows, &mean);
                }
                let expected = Packed::new(&rows, d, axis).rows(0..tokens.len());
                for (i, token) in tokens.clone().enumerate() {
                    let got = &got[(token * dims.2 + head) * d..][..d];
                    assert_eq!(
                        got,
                        &expected[i * d..(i + 1) * d],
                        "tensor {n}, token {token}, head {head}, {settings}"
                    );
                }
            }
        }
    }
    Ok(())
}
