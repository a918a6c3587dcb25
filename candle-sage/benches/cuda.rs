//! Time of attention on a GPU: forward, and forward + backward, all quantization included.
//!
//! `cargo bench --features cuda --bench cuda -- [D:N:causal ...]`; B*N = 16384 tokens, H = 2048/D heads, bf16. Times are
//! the median of calls between CUDA events, over inputs that rotate so that none waits in the cache.

use candle_core::{DType, Device, Result, Tensor};
use candle_sage::{Attention, SageBwd, Scheme};

fn main() -> Result<()> {
    let rows: Vec<String> = std::env::args().skip(1).filter(|arg| arg.contains(':')).collect();
    let repeats: usize = std::env::var("REPEATS").ok().and_then(|n| n.parse().ok()).unwrap_or(20);
    let rows = if rows.is_empty() {
        ["64:1024:1", "64:8192:1", "64:16384:1", "128:1024:1", "128:8192:1", "128:16384:1"].map(String::from).to_vec()
    } else {
        rows
    };
    let device = Device::new_cuda(0)?;
    let stream = device.as_cuda_device()?.cuda_stream();
    let event = || stream.record_event(Some(cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT)).expect("an event");
    println!("   D      N caus | scheme           fwd ms   f+b ms  fwd TF  f+b TF");
    for row in rows {
        let parts: Vec<usize> = row.split(':').map(|n| n.parse().expect("a number")).collect();
        let &[d, n, causal] = parts.as_slice() else { panic!("D:N:causal, got {row}") };
        let (b, h) = ((16384 / n).max(1), 2048 / d);
        let new = || Tensor::randn(0f32, 1., (b, n, h, d), &device)?.to_dtype(DType::BF16);
        let sets = (0..3).map(|_| Ok([new()?, new()?, new()?, new()?])).collect::<Result<Vec<_>>>()?;
        let flops = 4.0 * (b * h * n * n * d) as f64 / if causal == 1 { 2.0 } else { 1.0 };
        for scheme in [Scheme::FullPrecision, SageBwd::default().into()] {
            let attention = Attention::new(scheme).causal(causal == 1);
            let median = |both: bool| -> Result<f64> {
                let mut times = Vec::new();
                for i in 0..repeats + 3 {
                    let [q, k, v, g] = &sets[i % sets.len()];
                    let start = event();
                    if both {
                        let (_, vjp) = attention.vjp(q, k, v)?;
                        vjp.apply(g)?;
                    } else {
                        attention.apply(q, k, v)?;
                    }
                    times.push((start, event()));
                }
                device.synchronize()?;
                let mut times: Vec<f32> =
                    times.iter().skip(3).map(|(a, b)| a.elapsed_ms(b).expect("two events")).collect();
                times.sort_by(f32::total_cmp);
                Ok(f64::from(times[times.len() / 2]))
            };
            let (forward, both) = (median(false)?, median(true)?);
            println!(
                "{d:4} {n:6} {causal:4} | {:14} {forward:8.3} {both:8.3} {:7.0} {:7.0}",
                scheme.to_string().split(',').next().unwrap_or_default(),
                flops / forward / 1e9,
                3.5 * flops / both / 1e9
            );
        }
    }
    Ok(())
}
