//! Tests of the internals of the module `cuda`, on a GPU.

mod attn_qat_values;
mod buffers;
mod conversions;
mod foreign;
mod inputs;
mod launch;
mod nvfp4_products;
mod products;
mod sagebwd_codes;

use candle_core::Device;

use super::kernels::Gpu;

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

/// Which of 16 tokens a transposed INT8 tile stores in `slot`: see `layout/permutation.cuh`.
fn token_of_slot(slot: usize) -> usize {
    8 * (slot / 2 % 2) + 2 * (slot / 4) + slot % 2
}
