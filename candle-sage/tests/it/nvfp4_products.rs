//! A warp of `kernels/include/sage/attention/nvfp4_forward.cuh` on the CPU: the same tiles, registers of the same lanes, and the
//! instruction as the PTX manual describes it ("Warp-level matrix instructions with block scaling", m16n8k64, scale_vec::4X).
//! What comes out is Attn-QAT's output, which knows nothing of lanes.

use candle_core::{Device, Result, Tensor};
use candle_sage::nvfp4::{Axis, Packed, Scale, e2m1, e2m1_code, e2m1_value, e4m3_code, e4m3_value};
use candle_sage::{Attention, AttnQat};

const D: usize = 64;
const KEYS: usize = 64;
const ROW: usize = 32;

/// A register of each lane.
type Register = [u32; 32];

/// A tile: rows of 32 bytes of codes, swizzled, and four scales a row.
struct Tile {
    codes: Vec<u8>,
    scales: Vec<[u8; 4]>,
}

impl Tile {
    /// Of rows of 64 codes, to be put where `place` says.
    fn new(
        rows: usize,
        place: impl Fn(usize) -> usize,
        code: impl Fn(usize, usize) -> u8,
        scale: impl Fn(usize, usize) -> u8,
    ) -> Self {
        let mut tile = Self { codes: vec![0; rows * ROW], scales: vec![[0; 4]; rows] };
        for row in 0..rows {
            for i in 0..64 {
                tile.codes[at(place(row), i / 2)] |= code(row, i) << (4 * (i % 2));
            }
            tile.scales[place(row)] = std::array::from_fn(|group| scale(row, group));
        }
        tile
    }

    /// `ldmatrix.x4` of 16 rows: the four registers of a left operand, or of two right ones.
    fn load(&self, first: usize, left: bool) -> [Register; 4] {
        std::array::from_fn(|matrix| {
            let (eight, half) = if left { (matrix % 2, matrix / 2) } else { (matrix / 2, matrix % 2) };
            std::array::from_fn(|lane| {
                let row = first + 8 * eight + lane / 4;
                let start = at(row, 16 * half + lane % 4 * 4);
                u32::from_le_bytes(self.codes[start..start + 4].try_into().expect("four bytes"))
            })
        })
    }

    fn scales_of(&self, row: usize) -> u32 {
        u32::from_le_bytes(self.scales[row])
    }
}

/// Where a byte of a row lies.
fn at(row: usize, byte: usize) -> usize {
    row * ROW + ((byte / 16) ^ (row / 4 % 2)) * 16 + byte % 16
}

/// Where a key is among K's rows, so that accumulators of S are operands of P.
fn row_of_key(key: usize) -> usize {
    let slot = key % 8 + 8 * (key / 32);
    8 * (slot / 2) + 2 * (key / 8 % 4) + slot % 2
}

/// The instruction: 16 x 64 times 64 x 8, added to what each lane has of the sums.
fn mma(
    d: &mut [[f32; 4]; 32],
    a: &[Register; 4],
    b: &[Register; 2],
    a_scales: &Register,
    b_scales: &Register,
) {
    let nibble = |register: u32, k: usize| e2m1_value((register >> (4 * (k % 8))) as u8 & 15);
    let scale = |register: u32, k: usize| e4m3_value((register >> (8 * (k / 16))) as u8);
    for (lane, d) in d.iter_mut().enumerate() {
        for (n, d) in d.iter_mut().enumerate() {
            let (row, column) = (lane / 4 + n / 2 * 8, lane % 4 * 2 + n % 2);
            for k in 0..64 {
                let left = nibble(a[row / 8 + k / 32 * 2][row % 8 * 4 + k % 32 / 8], k);
                let right = nibble(b[k / 32][column * 4 + k % 32 / 8], k);
                *d +=
                    left * scale(a_scales[row % 8 * 4 + row / 8], k) * right * scale(b_scales[column * 4], k);
            }
        }
    }
}

/// Eight column tiles of right operands, times `a`.
fn product(a: &[Register; 4], a_scales: &Register, tile: &Tile) -> Vec<[[f32; 4]; 32]> {
    let mut out = vec![[[0.0; 4]; 32]; 8];
    for (n, d) in out.iter_mut().enumerate() {
        let four = tile.load(n / 2 * 16, false);
        let b = [four[n % 2 * 2], four[n % 2 * 2 + 1]];
        let scales = std::array::from_fn(|lane| tile.scales_of(8 * n + lane / 4));
        mma(d, a, &b, a_scales, &scales);
    }
    out
}

/// The softmax of one tile and its codes: the operand of P, its scales, and each lane's part of the sums.
fn quantize(s: &[[[f32; 4]; 32]]) -> ([Register; 4], Register, [[f32; 2]; 32]) {
    let log2_scale = std::f32::consts::LOG2_E / (D as f32).sqrt();
    let slot = |lane: usize, h: usize, i: usize| s[i / 2][lane][2 * h + i % 2] * log2_scale;
    let (mut operand, mut bytes, mut sums) = ([[0; 32]; 4], [[0u32; 2]; 32], [[0.0; 2]; 32]);
    for lane in 0..32 {
        for h in 0..2 {
            let quad = lane / 4 * 4..lane / 4 * 4 + 4;
            let logits = quad.flat_map(|lane| (0..16).map(move |i| slot(lane, h, i)));
            let reference = logits.fold(f32::NEG_INFINITY, f32::max).ceil();
            for half in 0..2 {
                // The neighbour has the other eight keys of the group.
                let of = |lane: usize| {
                    (8 * half..8 * half + 8).map(move |i| (slot(lane, h, i) - reference).exp2())
                };
                let scale = Scale::of(of(lane).chain(of(lane ^ 1)).fold(0.0, f32::max));
                for (i, p) in of(lane).enumerate() {
                    sums[lane][h] += p;
                    operand[2 * half + h][lane] |= u32::from(e2m1_code(e2m1(p * scale.quant))) << (4 * i);
                }
                bytes[lane][h] |= u32::from(e4m3_code(scale.dequant)) << (16 * half);
            }
        }
    }
    let scales = std::array::from_fn(|lane| bytes[lane][lane % 2] | bytes[lane ^ 2][lane % 2] << 8);
    (operand, scales, sums)
}

#[test]
fn a_warp_of_fp4_products_gives_attn_qats_output() -> Result<()> {
    for seed in 1..6u32 {
        let values = |n: u32, rows: usize| -> Vec<f32> {
            let mut state = 12_345 + 97 * seed + 7 * n;
            let mut next = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / 8_388_608.0 - 1.0
            };
            (0..rows * D).map(|i| (next() + next() + next()) * (1 + i % 3) as f32).collect()
        };
        let (q, k, v) = (values(0, 16), values(1, KEYS), values(2, KEYS));
        let (q4, k4) = (Packed::new(&q, D, Axis::Channels), Packed::new(&k, D, Axis::Channels));
        let v4 = Packed::new(&v, D, Axis::Rows);
        let code = |packed: &Packed, row: usize, channel: usize| {
            packed.codes()[row * D / 2 + channel / 2] >> (4 * (channel % 2)) & 15
        };
        let q_tile = Tile::new(16, |row| row, |r, c| code(&q4, r, c), |r, group| q4.scales()[r * 4 + group]);
        let k_tile =
            Tile::new(KEYS, row_of_key, |r, c| code(&k4, r, c), |r, group| k4.scales()[r * 4 + group]);
        let v_tile =
            Tile::new(D, |row| row, |c, key| code(&v4, key, c), |c, group| v4.scales()[group * D + c]);

        let q_scales = std::array::from_fn(|lane| q_tile.scales_of(lane / 4 + lane % 2 * 8));
        let s = product(&q_tile.load(0, true), &q_scales, &k_tile);
        let (p, p_scales, sums) = quantize(&s);
        let o = product(&p, &p_scales, &v_tile);

        let mut got = vec![0.0; 16 * D];
        for (n, tile) in o.iter().enumerate() {
            for (lane, sums_of) in tile.iter().enumerate() {
                for (i, x) in sums_of.iter().enumerate() {
                    let h = i / 2;
                    let sum: f32 = (lane / 4 * 4..lane / 4 * 4 + 4).map(|lane| sums[lane][h]).sum();
                    got[(lane / 4 + 8 * h) * D + 8 * n + lane % 4 * 2 + i % 2] = x / sum;
                }
            }
        }
        let tensor = |x: &[f32]| Tensor::from_slice(x, (1, x.len() / D, 1, D), &Device::Cpu);
        let out = Attention::new(AttnQat::default()).apply(&tensor(&q)?, &tensor(&k)?, &tensor(&v)?)?;
        let expected = out.flatten_all()?.to_vec1::<f32>()?;
        let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        let error =
            norm(&mut got.iter().zip(&expected).map(|(a, b)| a - b)) / norm(&mut expected.iter().copied());
        // Two exponentials may put a probability on different sides of a midpoint: one key, one code.
        assert!(error < 2e-3, "seed {seed}: {error}");
    }
    Ok(())
}
