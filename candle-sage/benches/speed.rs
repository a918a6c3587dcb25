//! Times of the forward and of forward + backward of each scheme, and of the same attention written with
//! candle's matmul and softmax.
//!
//! `cargo bench -p candle-sage --bench speed`

use std::time::{Duration, Instant};

use candle_core::{D, Device, Result, Tensor, Var};
use candle_sage::{Attention, AttnQat, Granularity, SageBwd, Scheme, Smoothing};

const ROUNDS: usize = 9;

struct Case {
    len: usize,
    heads: usize,
    head_dim: usize,
    causal: bool,
}

/// Attention written with candle's operators. Tensors are (batch, heads, sequence, head_dim).
fn composed(q: &Tensor, k: &Tensor, v: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
    let scale = 1.0 / (q.dim(D::Minus1)? as f64).sqrt();
    let mut logits = (q.matmul(&k.t()?)? * scale)?;
    if let Some(mask) = mask {
        logits = logits.broadcast_add(mask)?;
    }
    candle_nn::ops::softmax(&logits, D::Minus1)?.matmul(v)
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

/// Median forward and forward + backward times.
fn time(forward: impl Fn() -> Result<Tensor>) -> Result<(Duration, Duration)> {
    let (mut fwd, mut both) = (Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        let start = Instant::now();
        let out = forward()?;
        let middle = start.elapsed();
        // A random output gradient: the output gradient of a plain sum would be all ones.
        let loss =
            (out.flatten_all()? * Tensor::randn(0f32, 1., out.elem_count(), &Device::Cpu)?)?.sum_all()?;
        let back = Instant::now();
        std::hint::black_box(loss.backward()?);
        if round > 0 {
            fwd.push(middle);
            both.push(middle + back.elapsed());
        }
    }
    Ok((median(fwd), median(both)))
}

fn main() -> Result<()> {
    println!("f32, batch 1, {} threads, median of {ROUNDS}\n", rayon::current_num_threads());
    println!(
        "{:>5} {:>5} {:>3} {:>6}  {:<24} {:>9} {:>9} {:>9}",
        "N", "heads", "d", "causal", "attention", "fwd ms", "fwd+bwd", "GFLOP/s"
    );
    for case in [
        Case { len: 1024, heads: 8, head_dim: 64, causal: false },
        Case { len: 1024, heads: 8, head_dim: 64, causal: true },
        Case { len: 1024, heads: 4, head_dim: 128, causal: true },
        Case { len: 4096, heads: 2, head_dim: 64, causal: true },
    ] {
        run(&case)?;
    }
    Ok(())
}

fn run(case: &Case) -> Result<()> {
    let &Case { len, heads, head_dim, causal } = case;
    let var = |dims: (usize, usize, usize, usize)| Var::randn(0f32, 1., dims, &Device::Cpu);
    // FLOPs as FlashAttention counts them: 4 n^2 d per head forward, 2.5 times as many backward, half if causal.
    let flops = 3.5 * 4.0 * (len * len * head_dim * heads) as f64 * if causal { 0.5 } else { 1.0 };
    let mut baseline = 0.0;
    let mut print = |name: &str, (fwd, both): (Duration, Duration)| {
        let (fwd, both) = (fwd.as_secs_f64() * 1e3, both.as_secs_f64() * 1e3);
        if baseline == 0.0 {
            baseline = both;
        }
        println!(
            "{len:>5} {heads:>5} {head_dim:>3} {causal:>6}  {name:<24} {fwd:>9.2} {both:>9.2} {:>9.0}   {:.2}x candle",
            flops / both / 1e6,
            baseline / both,
        );
    };
    {
        let dims = (1, heads, len, head_dim);
        let (q, k, v) = (var(dims)?, var(dims)?, var(dims)?);
        let mask: Vec<f32> =
            (0..len * len).map(|n| if n % len > n / len { f32::NEG_INFINITY } else { 0.0 }).collect();
        let mask = if causal { Some(Tensor::from_vec(mask, (len, len), &Device::Cpu)?) } else { None };
        print("candle matmul + softmax", time(|| composed(&q, &k, &v, mask.as_ref()))?);
    }
    let dims = (1, len, heads, head_dim);
    let (q, k, v) = (var(dims)?, var(dims)?, var(dims)?);
    let sage = SageBwd::default();
    let schemes = [
        ("unquantized", Scheme::Unquantized),
        ("sagebwd", sage.into()),
        ("sagebwd, tile scales", sage.granularity(Granularity::Tile).into()),
        ("sagebwd, qk smoothing", sage.smoothing(Smoothing::Qk).into()),
        ("sagebwd, kv smoothing", sage.smoothing(Smoothing::Kv).into()),
        ("attn-qat", AttnQat::default().into()),
    ];
    for (name, scheme) in schemes {
        print(name, time(|| Attention::new(scheme).causal(causal).apply(&q, &k, &v))?);
    }
    println!();
    Ok(())
}
