//! Measures the speed of SLA2 and of dense attention in the same scheme.

use candle_core::Tensor;
use candle_sage::{Attention, AttentionShape, Error, Result, Router, Scheme, Selection, Sla2};

use super::clock::{Clock, peak_bytes};
use super::{Plan, ROTATING};
use crate::during;
use crate::model::Sla2Config;
use crate::settings::{Attn, Settings, Share};

/// A row of the benchmark, written `D:N:SPARSITY`. The mask is causal.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Row {
    /// head_dim.
    pub head_dim: usize,
    /// Tokens of a sequence.
    pub tokens: usize,
    /// The fraction of the unmasked (query, key) pairs that is skipped.
    pub sparsity: Share,
}

impl std::str::FromStr for Row {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut parts = text.splitn(3, ':');
        let mut number = || parts.next().and_then(|part| part.parse::<usize>().ok());
        let (head_dim, tokens) = (number(), number());
        let sparsity = parts.next().and_then(|part| part.parse().ok());
        match (head_dim, tokens, sparsity) {
            (Some(head_dim @ 8..=256), Some(tokens @ 1..), Some(sparsity)) => {
                Ok(Self { head_dim, tokens, sparsity })
            }
            _ => Err(Error::new("not a row of the benchmark")
                .got(format!("`{text}`"))
                .allowed("D:N:SPARSITY (head_dim 8 to 256, tokens, a fraction), such as 128:16384:90%")
                .hint("leave the rows out for the default rows")),
        }
    }
}

/// The default rows.
pub fn usual_rows() -> Vec<Row> {
    let row = |tokens, sparsity| Row { head_dim: 128, tokens, sparsity: Share(sparsity) };
    vec![row(4096, 0.85), row(16384, 0.9), row(32768, 0.95), row(131_072, 0.95)]
}

/// The result of one scheme on one row. Times are in milliseconds. A forward that is timed alone stores nothing
/// for a backward.
#[derive(Debug, Clone)]
pub struct Measured {
    /// The shape.
    pub row: Row,
    /// Number of past blocks that a query block selects.
    pub blocks: usize,
    /// The sparsity for this number of blocks: the fraction of the unmasked (query, key) pairs that is skipped.
    pub sparsity: f64,
    /// Batch size: number of sequences.
    pub batch: usize,
    /// Number of heads.
    pub heads: usize,
    /// The numerics.
    pub scheme: Scheme,
    /// Dense attention: forward, and forward with backward.
    pub dense: [f64; 2],
    /// Times of attention to the selected blocks, with precomputed block lists: forward, and forward with backward.
    pub sparse: [f64; 2],
    /// Times of all of SLA2 (with the router, the block lists and the tail): forward, and forward with backward.
    pub sla2: [f64; 2],
    /// Attention to the sequence's first block and to the blocks nearest to each query block: forward with backward.
    pub sink: f64,
    /// Time of the router and of building the block lists.
    pub select: f64,
    /// Peak memory of forward with backward, without the inputs, in bytes: for dense attention and for SLA2. `None` on
    /// a CPU.
    pub extra_bytes: Option<[u64; 2]>,
}

/// Measures one row of the benchmark: first without quantization, then with SageBwd.
///
/// # Errors
/// When the row's sparsity cannot be reached, the device has no kernels for the shape, or memory is short.
pub fn measure(plan: &Plan, row: Row) -> Result<Vec<Measured>> {
    let settings = Settings::with(|s| s.sla2.sla2_sparsity = Some(row.sparsity));
    let attn: Attn = "sla2".parse()?;
    let on_gpu = !plan.device.is_cpu();
    let Some(config) = attn.sla2(&settings.sla2, row.tokens, 1, on_gpu)? else { return Ok(Vec::new()) };
    let failed = |e| during(format!("cannot measure {}:{}:{}", row.head_dim, row.tokens, row.sparsity))(e);
    [Scheme::Unquantized, candle_sage::SageBwd::default().into()]
        .into_iter()
        .map(|scheme| measure_scheme(plan, row, &config, scheme.for_blocks(config.block)))
        .collect::<candle_core::Result<_>>()
        .map_err(failed)
}

fn measure_scheme(
    plan: &Plan,
    row: Row,
    config: &Sla2Config,
    scheme: Scheme,
) -> candle_core::Result<Measured> {
    let device = &plan.device;
    let dims = plan.dims(row.head_dim, row.tokens);
    let (batch, _, heads, _) = dims;
    let new = || Tensor::randn(0f32, 1., dims, device)?.to_dtype(plan.dtype());
    let inputs: Vec<[Tensor; 4]> =
        (0..ROTATING).map(|_| Ok([new()?, new()?, new()?, new()?])).collect::<candle_core::Result<_>>()?;
    let (router, theta) = (Router::new(heads, row.head_dim, device)?, Tensor::full(2f32, heads, device)?);
    let block = (config.block, config.block);
    let sla2 = Sla2::new(scheme).blocks(config.blocks).block(block).causal(true);
    let dense = Attention::new(scheme).causal(true);
    let lists: Vec<Selection> =
        inputs.iter().map(|[q, k, ..]| sla2.select(&router, q, k)).collect::<candle_core::Result<_>>()?;
    let shape = AttentionShape::new(dims, dims, dims, true, None)?;
    let sink = Selection::window(&shape, block, config.blocks.saturating_sub(1), 1, device)?;
    let clock = Clock::new(device, plan.rest)?;
    let attend = |attention: &Attention, n: usize, back: bool| {
        let [q, k, v, dout] = &inputs[n % ROTATING];
        match back {
            false => attention.apply(q, k, v).map(drop),
            true => attention.vjp(q, k, v)?.1.apply(dout).map(drop),
        }
    };
    let all = |n: usize, back: bool| {
        let [q, k, v, dout] = &inputs[n % ROTATING];
        let selection = sla2.select(&router, q, k)?;
        match back {
            false => sla2.apply(q, k, v, &selection, &theta).map(drop),
            true => sla2.vjp(q, k, v, &selection, &theta)?.1.apply(dout).map(drop),
        }
    };
    let both = |call: &dyn Fn(usize, bool) -> candle_core::Result<()>| -> candle_core::Result<[f64; 2]> {
        Ok([clock.median(plan.repeats, |n| call(n, false))?, clock.median(plan.repeats, |n| call(n, true))?])
    };
    let listed = |n: usize| dense.clone().select(&lists[n % ROTATING]);
    let extra = [peak_bytes(device, || attend(&dense, 0, true))?, peak_bytes(device, || all(0, true))?];
    Ok(Measured {
        row,
        blocks: config.blocks,
        sparsity: config.sparsity(row.tokens),
        batch,
        heads,
        scheme,
        dense: both(&|n, back| attend(&dense, n, back))?,
        sparse: both(&|n, back| attend(&listed(n), n, back))?,
        sla2: both(&all)?,
        sink: clock.median(plan.repeats, |n| attend(&dense.clone().select(&sink), n, true))?,
        select: clock.median(plan.repeats, |n| {
            let [q, k, ..] = &inputs[n % ROTATING];
            sla2.select(&router, q, k).map(drop)
        })?,
        extra_bytes: extra[0].zip(extra[1]).map(<[u64; 2]>::from),
    })
}

/// The head of the table.
pub fn table_head(plan: &Plan) -> String {
    let place = if plan.device.is_cpu() { "CPU, f32" } else { "GPU, bf16" };
    format!(
        "{place}; causal; milliseconds of forward + backward (f+b; in brackets: forward only); speedup over dense \
         attention\n\n{:>4} {:>7} {:>8} {:>6} {:>5} {:>5}  {:<8} {:>16} {:>16} {:>16} {:>7} {:>7} {:>10} {:>17}\n",
        "D",
        "N",
        "sparsity",
        "blocks",
        "batch",
        "heads",
        "numerics",
        "dense",
        "blocks alone",
        "SLA2",
        "speedup",
        "router",
        "window f+b",
        "memory SLA2/dense"
    )
}

/// One line of the table.
pub fn table_line(m: &Measured) -> String {
    let pair = |[forward, both]: [f64; 2]| format!("{both:.3} ({forward:.3})");
    let memory =
        m.extra_bytes.map_or("-".into(), |[dense, sla2]| format!("{:.2}", sla2 as f64 / dense as f64));
    format!(
        "{:>4} {:>7} {:>6.1} % {:>6} {:>5} {:>5}  {:<8} {:>16} {:>16} {:>16} {:>7.2} {:>7.3} {:>10.3} {memory:>17}\n",
        m.row.head_dim,
        m.row.tokens,
        m.sparsity * 100.0,
        m.blocks,
        m.batch,
        m.heads,
        m.scheme.name(),
        pair(m.dense),
        pair(m.sparse),
        pair(m.sla2),
        m.dense[1] / m.sla2[1],
        m.select,
        m.sink,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_parse() {
        let row: Row = "128:16384:90%".parse().expect("a row");
        assert_eq!((row.head_dim, row.tokens, row.sparsity), (128, 16384, Share(0.9)));
        for bad in ["", "128:16384", "128:16384:1", "0:16384:90%", "128:0:90%"] {
            assert!(bad.parse::<Row>().is_err(), "{bad}");
        }
    }
}
