//! Measures the speed of attention for a list of shapes: forward, and forward with backward. Times include all
//! quantization.

mod clock;
pub mod links;
pub mod sla2;

use std::fmt::Write as _;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use candle_sage::ops::alibi_slopes;
use candle_sage::{Attention, Error, ErrorKind, Int8Products, KeyMean, Result, SageBwd, Scheme};
use clock::{Clock, peak_bytes};

use crate::device::Hardware;
use crate::during;
use crate::model::causal_pairs;

/// Number of input sets that calls use in turn, so that no call finds its inputs in the cache.
const ROTATING: usize = 3;

/// A row of the benchmark, written `head_dim:tokens:causal`, such as `64:8192:1`. `192/128:8192:1` has head_dim 192 for
/// queries and keys, and 128 for values. `64:8192:1:1024` has a sliding window of 1024 tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// head_dim of queries and keys.
    pub head_dim: usize,
    /// head_dim of values.
    pub value_dim: usize,
    /// Tokens of a sequence.
    pub tokens: usize,
    /// Whether the mask is causal.
    pub causal: bool,
    /// `W` of a sliding window: a query attends to its own token and to the `W - 1` tokens before it. Without a causal
    /// mask it also attends to the `W - 1` tokens after it. `None`: all tokens.
    pub window: Option<usize>,
}

impl Row {
    /// The approximate number of unmasked (query, key) pairs of one head: with a causal mask and no window, half of all
    /// pairs.
    fn pairs(self) -> f64 {
        let before = causal_pairs(self.tokens, self.window);
        if self.causal { before } else { 2.0 * before }
    }

    /// Whether heads have more channels than most kernels support.
    fn is_large(self) -> bool {
        self.head_dim.max(self.value_dim) > 128
    }

    /// The head_dim of queries and keys, then `/` and the head_dim of values if it differs.
    fn heads(&self) -> String {
        match self.value_dim {
            v if v == self.head_dim => v.to_string(),
            v => format!("{}/{v}", self.head_dim),
        }
    }
}

impl std::str::FromStr for Row {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (heads, shape) = text.split_once(':').unwrap_or((text, ""));
        let (head_dim, value_dim) = heads.split_once('/').unwrap_or((heads, heads));
        let numbers = [head_dim, value_dim].into_iter().chain(shape.split(':'));
        let mut parts: Vec<Option<usize>> = numbers.map(|part| part.parse().ok()).collect();
        let window = if parts.len() > 4 {
            parts.pop().map(|window| window.filter(|&tokens| tokens > 0))
        } else {
            None
        };
        match parts.as_slice() {
            &[
                Some(head_dim @ 8..=256),
                Some(value_dim @ 8..=256),
                Some(tokens @ 1..),
                Some(causal @ 0..=1),
            ] if window != Some(None) => {
                Ok(Self { head_dim, value_dim, tokens, causal: causal == 1, window: window.flatten() })
            }
            _ => Err(Error::new("not a row of the benchmark")
                .got(format!("`{text}`"))
                .allowed(
                    "D:N:CAUSAL (D: head_dim, 8 to 256; N: tokens; CAUSAL: 0 or 1), such as 64:8192:1; \
                     192/128:8192:1 for head_dim 192 of keys and 128 of values; 64:8192:1:1024 for a window of \
                     1024 tokens",
                )
                .hint("leave the rows out for the default rows")),
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
    /// The schemes; the default schemes if empty.
    pub schemes: Vec<Scheme>,
    /// Number of tokens in a batch. A sequence with more tokens is a batch by itself.
    pub total_tokens: usize,
    /// Width of all heads together: heads = width / head_dim.
    pub width: usize,
    /// Number of timed calls. Their median is the reported time.
    pub repeats: usize,
    /// Pause before each series of timed calls: a GPU under long load is slower.
    pub rest: Duration,
    /// Soft cap of the logits; 0 for none.
    pub softcap: f64,
    /// Whether a multiple of the distance between query and key is subtracted from each logit (ALiBi).
    pub alibi: bool,
    /// Whether heads have sinks.
    pub sinks: bool,
}

impl Plan {
    /// (batch, sequence, heads, head_dim) of a row.
    fn dims(&self, head_dim: usize, tokens: usize) -> (usize, usize, usize, usize) {
        ((self.total_tokens / tokens).max(1), tokens, (self.width / head_dim).max(1), head_dim)
    }

    /// The attention of a scheme, with the mask of the benchmark's `row` and this plan's options.
    fn attention(&self, row: Row, scheme: Scheme) -> candle_core::Result<Attention> {
        let beside = row.window.map(|window| window - 1);
        let mut attention =
            Attention::new(scheme).causal(row.causal).window(beside, beside).softcap(self.softcap);
        let (_, _, heads, _) = self.dims(row.head_dim, row.tokens);
        if self.sinks {
            attention = attention.sinks(&Tensor::zeros(heads, DType::F32, &self.device)?);
        }
        if !self.alibi {
            return Ok(attention);
        }
        Ok(attention.alibi(&alibi_slopes(heads, &self.device)?))
    }

    /// The element type of the inputs: bf16 on a GPU, f32 on the CPU.
    fn dtype(&self) -> DType {
        if self.device.is_cpu() { DType::F32 } else { DType::BF16 }
    }
}

/// The result of one scheme for one shape.
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
    /// Milliseconds of a forward that stores nothing for a backward.
    pub forward_ms: f64,
    /// Milliseconds of a forward and its backward.
    pub both_ms: f64,
    /// Peak memory of a forward and backward, in bytes, beyond the inputs. Not known on the CPU.
    pub extra_bytes: Option<u64>,
}

impl Measured {
    /// Operations of the forward, and of forward and backward: `2 * batch * heads * pairs * channels`. `pairs`
    /// counts (query, key) pairs of one head; `channels` is a sum over the matmuls. If queries and keys have `d`
    /// channels and values have `v`, the forward has `d` channels for S and `v` for O. The backward has `d` for each of
    /// S, dQ and dK, and `v` for each of dP and dV.
    fn operations(&self) -> (f64, f64) {
        let Row { head_dim: d, value_dim: v, .. } = self.row;
        let of = |channels| (2 * self.batch * self.heads * channels) as f64 * self.row.pairs();
        (of(d + v), of(4 * d + 3 * v))
    }

    /// TFLOP/s of the forward, and of forward and backward. The number of operations is the same for every scheme.
    pub fn tflops(&self) -> (f64, f64) {
        let (forward, both) = self.operations();
        (forward / self.forward_ms / 1e9, both / self.both_ms / 1e9)
    }
}

/// The default rows: head_dim 64 and 128, causal, with short and long sequences (on the CPU only short ones).
pub fn usual_rows(device: &Device) -> Vec<Row> {
    let lengths: &[usize] = if device.is_cpu() { &[1024] } else { &[1024, 8192, 16384] };
    let of = |head_dim| {
        lengths.iter().map(move |&tokens| Row {
            head_dim,
            value_dim: head_dim,
            tokens,
            causal: true,
            window: None,
        })
    };
    [64, 128].into_iter().flat_map(of).collect()
}

/// The schemes to measure if none are named: every scheme with its default settings, and SageBwd with four other sets
/// of settings. On a GPU, if heads have more than 128 channels: unquantized attention and SageBwd with one set of
/// settings.
fn usual_schemes(row: Row, device: &Device) -> Vec<Scheme> {
    let few = SageBwd::default().products(Int8Products::FORWARD_AND_S);
    let sampled = few.key_mean(KeyMean::Sample(64));
    let scores = sampled.products(Int8Products::SCORES);
    if row.is_large() && !device.is_cpu() {
        return vec![Scheme::Unquantized, scores.into()];
    }
    let sets = [few, sampled, few.products(Int8Products::FORWARD), scores];
    let sets = sets.map(Scheme::from);
    Scheme::all()
        .into_iter()
        .flat_map(|scheme| match scheme {
            Scheme::SageBwd(_) => [&[scheme][..], &sets[..]].concat(),
            other => vec![other],
        })
        .collect()
}

/// A scheme's name, then its settings that differ from the default. The settings in `COMMON` are written as values
/// only, the others as `name=value`.
fn label(scheme: &Scheme) -> String {
    const COMMON: [&str; 3] = ["products", "key-mean", "smoothing"];
    let default = Scheme::from_name(scheme.name()).map_or_else(|_| Vec::new(), |default| default.settings());
    let own = scheme.settings().into_iter().filter(|setting| !default.contains(setting));
    let (mut common, others): (Vec<_>, Vec<_>) = own.partition(|(name, _)| COMMON.contains(name));
    common.sort_by_key(|(name, _)| COMMON.iter().position(|common| common == name));
    let mut label = scheme.name().to_owned();
    common.iter().for_each(|(_, value)| label += &format!("/{value}"));
    others.iter().for_each(|(name, value)| label += &format!("/{name}={value}"));
    label
}

/// Measures one shape with one scheme after another, and passes each result to `seen`. Quantized schemes that do not
/// support the shape are skipped if `plan.schemes` is empty or heads have more than 128 channels.
///
/// # Errors
/// When a scheme does not support the shape and is not skipped, or the device runs out of memory.
pub fn measure(plan: &Plan, row: Row, seen: &mut dyn FnMut(Measured) -> Result<()>) -> Result<()> {
    let (batch, _, heads, _) = plan.dims(row.head_dim, row.tokens);
    let failed = |e| during(format!("cannot measure {row}"))(e);
    let new = |channels| {
        let dims = (batch, row.tokens, heads, channels);
        Tensor::randn(0f32, 1., dims, &plan.device).and_then(|t| t.to_dtype(plan.dtype()))
    };
    let (d, v) = (row.head_dim, row.value_dim);
    let inputs: Vec<[Tensor; 4]> = (0..ROTATING)
        .map(|_| Ok([new(d)?, new(d)?, new(v)?, new(v)?]))
        .collect::<candle_core::Result<_>>()
        .map_err(failed)?;
    let clock = Clock::new(&plan.device, plan.rest).map_err(failed)?;
    let schemes = match plan.schemes.as_slice() {
        [] => usual_schemes(row, &plan.device),
        named => named.to_vec(),
    };
    for scheme in schemes {
        let attention = plan.attention(row, scheme).map_err(failed)?;
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
        match measured() {
            Err(e)
                if scheme != Scheme::Unquantized
                    && (row.is_large() || plan.schemes.is_empty())
                    && ErrorKind::of(&e) == ErrorKind::Unsupported => {}
            measured => seen(measured.map_err(failed)?)?,
        }
    }
    Ok(())
}

impl std::fmt::Display for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}:{}", self.heads(), self.tokens, u8::from(self.causal))?;
        self.window.map_or(Ok(()), |window| write!(f, ":{window}"))
    }
}

/// The head of the table.
pub fn table_head(plan: &Plan) -> String {
    let place = if plan.device.is_cpu() { "CPU, f32" } else { "GPU, bf16" };
    let cap = match plan.softcap {
        0.0 => String::new(),
        cap => format!(", soft cap {cap}"),
    };
    let alibi = if plan.alibi { ", ALiBi" } else { "" };
    let sinks = if plan.sinks { ", sinks" } else { "" };
    format!(
        "{place}{cap}{alibi}{sinks}; TFLOP/s in 16-bit-equivalent operations; memory beyond the inputs\n\n{:>7} {:>7} {:>6} {:>6} {:>5} {:>5}  {:<31} {:>9} {:>9} {:>8} {:>8} {:>9}\n",
        "D", "N", "causal", "window", "batch", "heads", "attn", "fwd ms", "f+b ms", "fwd TF", "f+b TF", "MiB"
    )
}

/// One line of the table.
pub fn table_line(m: &Measured) -> String {
    let (forward, both) = m.tflops();
    let mib = m.extra_bytes.map_or("-".into(), |bytes| format!("{:.0}", bytes as f64 / (1 << 20) as f64));
    format!(
        "{:>7} {:>7} {:>6} {:>6} {:>5} {:>5}  {:<31} {:>9.3} {:>9.3} {:>8} {:>8} {mib:>9}\n",
        m.row.heads(),
        m.row.tokens,
        if m.row.causal { "yes" } else { "no" },
        m.row.window.map_or("-".into(), |window| window.to_string()),
        m.batch,
        m.heads,
        label(&m.scheme),
        m.forward_ms,
        m.both_ms,
        speed(forward),
        speed(both),
    )
}

/// TFLOP/s as text. Smaller values get more decimals, so that the speed of a slow device is not rounded to 0.0.
fn speed(tflops: f64) -> String {
    match tflops {
        ..0.01 => format!("{tflops:.5}"),
        ..1.0 => format!("{tflops:.3}"),
        _ => format!("{tflops:.1}"),
    }
}

/// All results as CSV, after lines `# key: value` that describe how and where they were measured.
pub fn csv(plan: &Plan, all: &[Measured]) -> String {
    // A shell needs quotes around the semicolons that separate attention schemes.
    let quoted = |word: String| if word.contains([';', ' ']) { format!("\"{word}\"") } else { word };
    let words: Vec<_> =
        std::env::args_os().skip(1).map(|word| quoted(word.to_string_lossy().into_owned())).collect();
    let mut out =
        format!("# command: sage-train {}\n# device: {}\n", words.join(" "), Hardware::of(&plan.device));
    let about = [
        ("date", Some(chrono::Utc::now().format("%F").to_string())),
        ("driver", Hardware::driver(&plan.device)),
        ("commit", option_env!("SAGE_TRAIN_COMMIT").map(Into::into)),
        ("rest", Some(format!("{} s", plan.rest.as_secs_f64()))),
        ("repeats", Some(plan.repeats.to_string())),
    ];
    for (key, value) in about.iter().filter_map(|(key, value)| Some((key, value.as_ref()?))) {
        let _ = writeln!(out, "# {key}: {value}");
    }
    out.push_str(
        "head_dim,value_dim,tokens,causal,window,batch,heads,attn,forward_ms,both_ms,forward_tflops,both_tflops,extra_bytes\n",
    );
    for m in all {
        let (forward, both) = m.tflops();
        let _ = writeln!(
            out,
            "{},{},{},{},{},{},{},{},{:.4},{:.4},{:.2},{:.2},{}",
            m.row.head_dim,
            m.row.value_dim,
            m.row.tokens,
            u8::from(m.row.causal),
            m.row.window.map_or(String::new(), |window| window.to_string()),
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
        let narrower = Row { head_dim: 192, value_dim: 128, tokens: 4096, causal: false, window: None };
        assert_eq!(narrower.to_string(), "192/128:4096:0");
        let windowed = Row { window: Some(1024), ..narrower };
        assert_eq!(windowed.to_string(), "192/128:4096:0:1024");
        for row in usual_rows(&Device::Cpu).into_iter().chain([narrower, windowed]) {
            assert_eq!(row.to_string().parse(), Ok(row));
        }
        for bad in [
            "",
            "64",
            "64:8192",
            "64:8192:2",
            "0:8192:1",
            "64:0:1",
            "a:b:c",
            "64/:8192:1",
            "64/7:8192:1",
            "64/64/64:8192:1",
            "64:8192:1:0",
            "64:8192:1:x",
            "64:8192:1:8:8",
        ] {
            assert!(bad.parse::<Row>().is_err(), "{bad}");
        }
    }

    #[test]
    fn operations_are_those_of_two_products() {
        let of = |value_dim| {
            let row = Row { head_dim: 64, value_dim, tokens: 1024, causal: true, window: None };
            let scheme = Scheme::Unquantized;
            Measured { row, batch: 2, heads: 3, scheme, forward_ms: 1.0, both_ms: 1.0, extra_bytes: None }
                .operations()
        };
        let unit = 2.0 * 3.0 * 1024.0 * 1024.0 * 64.0;
        assert_eq!(of(64), (2.0 * unit, 7.0 * unit));
        assert_eq!(of(32), (1.5 * unit, 5.5 * unit));
        let pairs = |causal, window| Row { head_dim: 64, value_dim: 64, tokens: 8, causal, window }.pairs();
        assert_eq!([pairs(true, None), pairs(true, Some(9)), pairs(false, None)], [32.0, 32.0, 64.0]);
        // Causal: 8 queries with 2 keys each, minus about 2 pairs, because the first queries have fewer keys. Without a
        // causal mask: twice as many pairs.
        assert_eq!([pairs(true, Some(2)), pairs(false, Some(2))], [14.0, 28.0]);
    }
}
