//! Random initial values. Each parameter has its own random stream, so that adding a parameter to a model does not
//! change the initial values of the others.

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Normal};

use crate::model::spec::{ParameterSpec, Start};

pub(super) fn draw(spec: &ParameterSpec, seed: u64) -> Vec<f32> {
    let len = spec.len() as usize;
    let Start::Normal(std) = spec.start else { return spec.fixed_start().unwrap_or_default() };
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(fnv1a(&spec.name));
    let normal = Normal::new(0.0, std as f32).expect("a checked standard deviation");
    (0..len).map(|_| normal.sample(&mut rng)).collect()
}

/// The 64-bit FNV-1a hash of a parameter's name, which selects the parameter's random stream.
fn fnv1a(name: &str) -> u64 {
    name.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}
