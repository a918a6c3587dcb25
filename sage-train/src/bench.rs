//! Speed of attention over rows of shapes: forward, and forward with backward. Times include all
//! quantization.

mod clock;
pub mod links;
pub mod sla2;

use std::fmt::Write as _;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use candle_sage::{Attention, Error, Int8Products, KeyMean, Result, SageBwd, Scheme};
use clock::{Clock, peak_bytes};

use crate::during;

/// Number of input sets that calls use in turn, so that no call finds its inputs in the cache.
const ROTATING: usize = 3;

/// A row of the benchmark: `D:N:causal`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// head_dim.
    pub head_dim: usize,
    /// Tokens of a sequence.
    pub tokens: usize,
    /// Whether the mask is causal.
    pub causal: bool,
}

impl std::str::FromStr for Row {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let parts: Vec<Option<usize>> = text.split(':').map(|part| part.parse().ok()).collect();
        match parts.as_slice() {
            &[Some(head_dim @ 8..=256), Some(tokens @ 1..), Some(causal @ 0..=1)] => {
                Ok(Self { head_dim, tokens, causal: causal == 1 })
            }
            _ => Err(Error::new("not a row of the benchmark")
                .got(format!("`{text}`"))
                .allowed("D:N:causal, such as 64:8192:1: head_dim 8 to 256, tokens, 0 or 1")
                .hint("without rows the usual ones run")),
        }
    }
}

/// What to measure.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The device.
    pub device: Device,
    /// The shapes.
    pub rows: Vec<Row>,
    /// Tokens of all sequences of a batch. A longer sequence is a batch of its own.
    pub total_tokens: usize,
    /// Width of all heads together: heads = width / head_dim.
    pub width: usize,
    /// Timed calls of each kind; the result is their median.
    pub repeats: usize,
    /// Pause before each series of timed calls, in which a GPU that power slows down recovers.
    pub rest: Duration,
}

impl Plan {
    /// (batch, sequence, heads, head_dim) of a row.
    fn dims(&self, head_dim: usize, tokens: usize) -> (usize, usize, usize, usize) {
        ((self.total_tokens / tokens).max(1), tokens, (self.width / head_dim).max(1), head_dim)
    }

    /// The element type of the inputs: bf16, and f32 on the CPU.
    fn dtype(&self) -> DType {
        if self.device.is_cpu() { DType::F32 } else { DType::BF16 }
    }
}

/// The result of one scheme on one row.
#[derive(Debug, Clone)]
pub struct Measured {
    /// The shape.
    pub row: Row,
    /// Batch size: number of sequences.
    pub batch: usize,
    /// Number of heads.
    pub heads: usize,
    /// The numerics.
    pub scheme: Scheme,
    /// Milliseconds of a forward that keeps nothing for a backward.
    pub forward_ms: f64,
    /// Milliseconds of a forward and its backward.
    pub both_ms: f64,
    /// Peak memory of a forward and backward, in bytes, beyond the inputs. Not known on the CPU.
    pub extra_bytes: Option<u64>,
}

impl Measured {
    /// Operations of the forward: 4 B H N^2 D, half of that with a causal mask.
    fn operations(&self) -> f64 {
        let all =
            4.0 * (self.batch * self.heads * self.row.head_dim) as f64 * (self.row.tokens as f64).powi(2);
        if self.row.causal { all / 2.0 } else { all }
    }

    /// TFLOP/s of the forward, and of forward and backward (3.5 times the operations), in 16-bit-equivalent
    /// operations.
    pub fn tflops(&self) -> (f64, f64) {
        (self.operations() / self.forward_ms / 1e9, 3.5 * self.operations() / self.both_ms / 1e9)
    }
}

/// The default rows: short and long sequences, both native head_dims, causal; on the CPU short ones alone.
pub fn usual_rows(device: &Device) -> Vec<Row> {
    let lengths: &[usize] = if device.is_cpu() { &[1024] } else { &[1024, 8192, 16384] };
    let of = |head_dim| lengths.iter().map(move |&tokens| Row { head_dim, tokens, causal: true });
    [64, 128].into_iter().flat_map(of).collect()
}

/// The schemes to measure: every scheme, and SageBwd with fewer INT8 products, and with K's mean over a sample. Of heads over 128
/// channels a GPU has full precision alone.
fn schemes(row: Row, device: &Device) -> Vec<Scheme> {
    if row.head_dim > 128 && !device.is_cpu() {
        return vec![Scheme::FullPrecision];
    }
    let few = SageBwd::default().products(Int8Products::FORWARD_AND_S);
    let sampled = few.key_mean(KeyMean::Sample(64));
    let sets = [few, sampled, few.products(Int8Products::FORWARD), sampled.products(Int8Products::SCORES)];
    let sets = sets.map(Scheme::from);
    Scheme::all()
        .into_iter()
        .flat_map(|scheme| match scheme {
            Scheme::SageBwd(_) => [&[scheme][..], &sets[..]].concat(),
            other => vec![other],
        })
        .collect()
}

/// The name of a scheme in the table: with its INT8 products and the tokens of K's mean unless they are the default.
fn label(scheme: &Scheme) -> String {
    let mut label = scheme.name().to_owned();
    if let Scheme::SageBwd(settings) = scheme {
        let default = SageBwd::default();
        if settings.products != default.products {
            label += &format!("/{}", settings.products);
        }
        if settings.key_mean != default.key_mean {
            label += &format!("/{}", settings.key_mean);
        }
    }
    label
}

/// Measures one row, one scheme after the other.
///
/// # Errors
/// When the device has no kernels for the shape, or runs out of memory.
pub fn measure(plan: &Plan, row: Row, seen: &mut dyn FnMut(Measured) -> Result<()>) -> Result<()> {
    let dims = plan.dims(row.head_dim, row.tokens);
    let (batch, _, heads, _) = dims;
    let failed = |e| during(format!("cannot measure {row}"))(e);
    let new = || Tensor::randn(0f32, 1., dims, &plan.device).and_then(|t| t.to_dtype(plan.dtype()));
    let inputs: Vec<[Tensor; 4]> = (0..ROTATING)
        .map(|_| Ok([new()?, new()?, new()?, new()?]))
        .collect::<candle_core::Result<_>>()
        .map_err(failed)?;
    let clock = Clock::new(&plan.device, plan.rest).map_err(failed)?;
    for scheme in schemes(row, &plan.device) {
        let attention = Attention::new(scheme).causal(row.causal);
        let forward = |n: usize| {
            let [q, k, v, _] = &inputs[n % ROTATING];
            attention.apply(q, k, v).map(drop)
        };
        let both = |n: usize| {
            let [q, k, v, dout] = &inputs[n % ROTATING];
            attention.vjp(q, k, v)?.1.apply(dout).map(drop)
        };
        let measured = || -> candle_core::Result<Measured> {
            let forward_ms = clock.median(plan.repeats, forward)?;
            let both_ms = clock.median(plan.repeats, both)?;
            let extra_bytes = peak_bytes(&plan.device, || both(0))?;
            Ok(Measured { row, batch, heads, scheme, forward_ms, both_ms, extra_bytes })
        };
        seen(measured().map_err(failed)?)?;
    }
    Ok(())
}

impl std::fmt::Display for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}:{}", self.head_dim, self.tokens, u8::from(self.causal))
    }
}

/// The head of the table.
pub fn table_head(plan: &Plan) -> String {
    let place = if plan.device.is_cpu() { "CPU, f32" } else { "GPU, bf16" };
    format!(
        "{place}; TFLOP/s in 16-bit-equivalent operations; memory beyond the inputs\n\n{:>4} {:>7} {:>6} {:>5} {:>5}  {:<31} {:>9} {:>9} {:>8} {:>8} {:>9}\n",
        "D", "N", "causal", "batch", "heads", "attn", "fwd ms", "f+b ms", "fwd TF", "f+b TF", "MiB"
    )
}

/// One line of the table.
pub fn table_line(m: &Measured) -> String {
    let (forward, both) = m.tflops();
    let mib = m.extra_bytes.map_or("-".into(), |bytes| format!("{:.0}", bytes as f64 / (1 << 20) as f64));
    format!(
        "{:>4} {:>7} {:>6} {:>5} {:>5}  {:<31} {:>9.3} {:>9.3} {:>8} {:>8} {mib:>9}\n",
        m.row.head_dim,
        m.row.tokens,
        if m.row.causal { "yes" } else { "no" },
        m.batch,
        m.heads,
        label(&m.scheme),
        m.forward_ms,
        m.both_ms,
        speed(forward),
        speed(both),
    )
}

/// TFLOP/s with more decimals for smaller values, so that slow devices show digits too.
fn speed(tflops: f64) -> String {
    match tflops {
        ..0.01 => format!("{tflops:.5}"),
        ..1.0 => format!("{tflops:.3}"),
        _ => format!("{tflops:.1}"),
    }
}

/// All results as comma-separated values.
pub fn csv(all: &[Measured]) -> String {
    let mut out = String::from(
        "head_dim,tokens,causal,batch,heads,attn,forward_ms,both_ms,forward_tflops,both_tflops,extra_bytes\n",
    );
    for m in all {
        let (forward, both) = m.tflops();
        let _ = writeln!(
            out,
            "{},{},{},{},{},{},{:.4},{:.4},{:.2},{:.2},{}",
            m.row.head_dim,
            m.row.tokens,
            u8::from(m.row.causal),
            m.batch,
            m.heads,
            label(&m.scheme),
            m.forward_ms,
            m.both_ms,
            forward,
            both,
            m.extra_bytes.map_or(String::new(), |bytes| bytes.to_string()),
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_print_and_parse() {
        for row in usual_rows(&Device::Cpu) {
            assert_eq!(row.to_string().parse(), Ok(row));
        }
        for bad in ["", "64", "64:8192", "64:8192:2", "0:8192:1", "64:0:1", "a:b:c"] {
            assert!(bad.parse::<Row>().is_err(), "{bad}");
        }
    }

    #[test]
    fn operations_are_those_of_two_products() {
        let row = Row { head_dim: 64, tokens: 1024, causal: true };
        let scheme = Scheme::FullPrecision;
        let m =
            Measured { row, batch: 2, heads: 3, scheme, forward_ms: 1.0, both_ms: 1.0, extra_bytes: None };
        assert_eq!(m.operations(), 2.0 * 2.0 * 3.0 * 1024.0 * 1024.0 * 64.0);
    }
}
