//! Time that the host needs to issue calls on a GPU: small models are bound by this time.
//!
//! `cargo bench --features cuda --bench host_time`. Each batch of calls gives a mean time per call. Each
//! figure is the 10th percentile of these means, in microseconds. Other work of the host disturbs this percentile less
//! than the median. Calls are issued without waiting for the GPU. A batch has so few calls that the launch queue does
//! not fill.

use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_sage::{Attention, AttnQat, Int8Products, SageBwd, Scheme, ops};

const BATCHES: usize = 400;
const CALLS: usize = 20;

/// The time of a call, in microseconds.
fn time(device: &Device, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut times = Vec::new();
    for _ in 0..BATCHES {
        device.synchronize()?;
        let start = Instant::now();
        for _ in 0..CALLS {
            call()?;
        }
        times.push(start.elapsed().as_secs_f64() * 1e6 / CALLS as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[BATCHES / 10])
}

fn main() -> Result<()> {
    let device = Device::new_cuda(0)?;
    let random =
        |dims: &[usize]| Var::from_tensor(&Tensor::randn(0f32, 1., dims, &device)?.to_dtype(DType::BF16)?);
    let [q, k, v] = [random(&[1, 128, 4, 64])?, random(&[1, 128, 4, 64])?, random(&[1, 128, 4, 64])?];
    let constants = [&q, &k, &v].map(Var::as_detached_tensor);
    println!("{:34} {:>8} {:>8}", "microseconds a call", "forward", "with backward");
    let schemes: [(&str, Scheme); 4] = [
        ("attention, 16 bit", Scheme::Unquantized),
        ("attention, SageBwd", SageBwd::default().into()),
        ("attention, SageBwd `scores`", SageBwd::default().products(Int8Products::SCORES).into()),
        ("attention, Attn-QAT", AttnQat::default().into()),
    ];
    for (name, scheme) in schemes {
        let attention = Attention::new(scheme).causal(true);
        let [cq, ck, cv] = &constants;
        let forward = time(&device, || attention.apply(cq, ck, cv).map(drop))?;
        let both = time(&device, || attention.apply(&q, &k, &v)?.backward().map(drop))?;
        println!("{name:34} {forward:8.1} {both:8.1}");
    }
    let (x, weight) = (random(&[128, 256])?, random(&[256])?);
    let (cx, cweight) = (x.as_detached_tensor(), weight.as_detached_tensor());
    let forward = time(&device, || ops::rms_norm(&cx, &cweight, 1e-6).map(drop))?;
    let both = time(&device, || ops::rms_norm(&x, &weight, 1e-6)?.backward().map(drop))?;
    println!("{:34} {forward:8.1} {both:8.1}", "RMSNorm");
    let candle = time(&device, || cx.affine(2., 1.).map(drop))?;
    println!("{:34} {candle:8.1}", "candle's affine, to compare");
    Ok(())
}
