//! Peak heap use of forward + backward as the sequence grows: linear for unquantized attention and SageBwd, quadratic
//! for attention written with matmul and softmax. A second table compares the peak heap use of `linear_cross_entropy`
//! with the size of all logits, and with the peak of candle's matmul and cross-entropy.
//!
//! `cargo bench -p candle-sage --bench memory`

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use candle_core::{D, Device, Result, Tensor, Var};
use candle_sage::ops::{CrossEntropy, linear_cross_entropy};
use candle_sage::{Attention, SageBwd, Scheme};

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: every call is passed on to the system allocator, and counting does not affect the allocations.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(HELD.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Relaxed);
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The largest number of bytes allocated during `run`, minus the bytes allocated before.
fn peak(run: impl FnOnce() -> Result<()>) -> Result<usize> {
    let before = HELD.load(Relaxed);
    PEAK.store(before, Relaxed);
    run()?;
    Ok(PEAK.load(Relaxed) - before)
}

fn main() -> Result<()> {
    let (heads, d) = (2, 64);
    println!("f32, batch 1, {heads} heads of {d}, peak MiB of forward + backward (ours causal)\n");
    println!("{:>6} {:>14} {:>14} {:>24}", "N", "unquantized", "sagebwd", "candle matmul + softmax");
    for len in [1024, 2048, 4096, 8192] {
        let dims = (1, len, heads, d);
        let var = || Var::randn(0f32, 1., dims, &Device::Cpu);
        let (q, k, v) = (var()?, var()?, var()?);
        let mut row = format!("{len:>6}");
        for (scheme, width) in [(Scheme::Unquantized, 14), (SageBwd::default().into(), 14)] {
            let bytes = peak(|| {
                let out = Attention::new(scheme).causal(true).apply(&q, &k, &v)?;
                out.sqr()?.sum_all()?.backward().map(drop)
            })?;
            row += &format!(" {:>width$.1}", bytes as f64 / 1048576.0);
        }
        if len <= 4096 {
            let bytes = peak(|| {
                let t = |x: &Tensor| x.transpose(1, 2)?.contiguous();
                let logits = (t(&q)?.matmul(&t(&k)?.t()?)? * 0.125)?;
                let out = candle_nn::ops::softmax(&logits, D::Minus1)?.matmul(&t(&v)?)?;
                out.sqr()?.sum_all()?.backward().map(drop)
            })?;
            row += &format!(" {:>24.1}", bytes as f64 / 1048576.0);
        }
        println!("{row}");
    }
    cross_entropy()
}

fn cross_entropy() -> Result<()> {
    let (width, classes) = (64, 32 * 1024);
    println!("\ncross-entropy, width {width}, {classes} classes: peak MiB of forward + backward\n");
    println!(
        "{:>6} {:>20} {:>14} {:>24}",
        "rows", "linear_cross_entropy", "all logits", "candle matmul + loss"
    );
    let weight = Var::randn(0f32, 0.1, (classes, width), &Device::Cpu)?;
    for rows in [512, 1024, 2048] {
        let hidden = Var::randn(0f32, 1., (rows, width), &Device::Cpu)?;
        let targets = Tensor::arange(0u32, rows as u32, &Device::Cpu)?;
        let ours = peak(|| {
            let loss = linear_cross_entropy(&hidden, &weight, &targets, CrossEntropy::default())?;
            loss.backward().map(drop)
        })?;
        let theirs = peak(|| {
            let logits = hidden.matmul(&weight.t()?)?;
            candle_nn::loss::cross_entropy(&logits, &targets)?.backward().map(drop)
        })?;
        let mib = |bytes: usize| bytes as f64 / 1048576.0;
        println!("{rows:>6} {:>20.1} {:>14.1} {:>24.1}", mib(ours), mib(4 * rows * classes), mib(theirs));
    }
    Ok(())
}
