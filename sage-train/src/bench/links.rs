//! Measures the bandwidth of the links between GPUs, and the time of an optimizer step that reduces gradients over
//! these links.

use std::fmt::Write as _;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use candle_sage::Result;

use super::clock::Clock;
use crate::config::Config;
use crate::during;
use crate::model::{Llama, LlamaConfig, Parameters, Reduction};
use crate::optim::OptimizerStep;
use crate::ranks::Ranks;

/// Megabytes of f32 in an exchange (all-to-all). A gather (all-gather) has the same number of elements, on a GPU in 16
/// bits. In preset `325m`, one layer has 54.5 MB, the embedding 206 MB, all parameters 1297 MB.
const SIZES: [f64; 4] = [4.0, 54.5, 206.0, 1297.0];

/// The times of one size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Bytes of f32 on each rank.
    pub bytes: u64,
    /// Milliseconds of an exchange of these bytes.
    pub exchange: f64,
    /// Milliseconds of a gather of `bytes / 4` weights.
    pub gather: f64,
}

/// The time of a model's update: reduction and norm of the gradients, AdamW, all-gather of the weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UpdateTimes {
    /// Number of parameters.
    pub parameters: u64,
    /// Milliseconds of the update if each rank updates the whole model.
    pub alone: f64,
    /// Milliseconds of the update if the ranks share it.
    pub together: f64,
}

/// All measurements.
#[derive(Debug, Clone, PartialEq)]
pub struct Links {
    ranks: usize,
    /// Whether the GPUs' copy engines (DMA units) transferred the data.
    engines: bool,
    /// The type of the weights in an all-gather.
    weights: DType,
    /// The times of an exchange and a gather, for each size.
    pub links: Vec<Link>,
    /// Milliseconds of a gather of 64 bytes.
    pub latency: f64,
    /// The update of the model.
    pub update: UpdateTimes,
}

/// Measures all-to-alls and all-gathers of up to `most` megabytes, and an optimizer step. All ranks must call this.
/// `say` receives the name of each measurement before the measurement starts.
///
/// # Errors
/// When another rank cannot be reached, or memory is short.
pub fn measure(
    config: &Config,
    ranks: &Ranks,
    device: &Device,
    repeats: usize,
    most: f64,
    say: &dyn Fn(&str),
) -> Result<Links> {
    let measured = || -> candle_core::Result<Links> {
        let clock = Clock::new(device, Duration::ZERO)?;
        let of = ranks.rank().of;
        let on_node = ranks.mesh().replica.of == 1;
        let group = if on_node { ranks.shards() } else { ranks.all() };
        let mut links = Vec::new();
        // Transfers of all sizes share three buffers, to save memory: buffers for copy engines stay allocated until the
        // process ends.
        let len = |megabytes: f64| ((megabytes * 1e6 / 4.0) as usize).next_multiple_of(64 * of);
        let sizes: Vec<f64> = SIZES.into_iter().filter(|size| *size <= most).collect();
        let largest = sizes.last().map_or(0, |size| len(*size));
        let from = group.shared(Tensor::randn(0f32, 1.0, largest, device)?)?;
        let into = group.zeros(largest, DType::F32, device)?;
        let dtype = config.device.dtype();
        let weights = group.zeros(largest, dtype, device)?;
        for megabytes in sizes {
            say(&format!("exchange and gather of {megabytes} MB"));
            let len = len(megabytes);
            let [from, into, weights] = [&from, &into, &weights].map(|all| all.narrow(0, 0, len));
            let (from, into, weights) = (from?, into?, weights?);
            let own = ranks.rank().part_of(len);
            let part = weights.narrow(0, own.start, own.len())?;
            links.push(Link {
                bytes: 4 * len as u64,
                exchange: clock.median(repeats, |_| group.wait(group.exchange(&from, &into)?))?,
                gather: clock.median(repeats, |_| group.wait(group.gather(&part, &weights)?))?,
            });
        }
        let (number, numbers) =
            (Tensor::zeros(8, DType::F64, device)?, Tensor::zeros(8 * of, DType::F64, device)?);
        let latency = clock.median(4 * repeats, |_| group.wait(group.gather(&number, &numbers)?))?;
        let update = |ranks: &Ranks| update(config, ranks, device, &clock, repeats);
        let (parameters, engines) = (config.model.parameters(), on_node && ranks.mesh().engines);
        let what = format!("update of {:.1}M parameters", parameters as f64 / 1e6);
        say(&format!("{what} by each rank alone"));
        let alone = update(&Ranks::alone())?;
        say(&format!("{what} shared by the ranks"));
        let together = update(ranks)?;
        let update = UpdateTimes { parameters, alone, together };
        Ok(Links { ranks: of, engines, weights: dtype, links, latency, update })
    };
    measured().map_err(during("cannot measure the links"))
}

/// The median time of one update of the model's parameters, in milliseconds.
fn update(
    config: &Config,
    ranks: &Ranks,
    device: &Device,
    clock: &Clock,
    repeats: usize,
) -> candle_core::Result<f64> {
    let model = LlamaConfig { context: 64, ..config.model.clone() };
    let parameters =
        Parameters::init(model.parameter_specs(), 0, config.training(ranks), device, config.device.dtype())?;
    // One backward computes the gradients that the update needs.
    parameters.clear_gradients()?;
    let ids = Tensor::zeros((1, model.context), DType::U32, device)?;
    Llama::new(&model, &parameters, device)?.train(&ids, &ids)?;
    let step = OptimizerStep { step: 1, lr: 0.0, gradients: 1 };
    let (of, group) = (ranks.rank().of, ranks.all());
    let all = Tensor::zeros(of, DType::F64, device)?;
    clock.median(repeats, |_| {
        let squares = Reduction::new(&parameters, ranks).finish()?.unsqueeze(0)?;
        let sum = match of {
            1 => squares.get(0)?,
            _ => {
                group.wait(group.gather(&squares, &all)?)?;
                (1..of).try_fold(all.get(0)?, |sum, n| sum + all.get(n)?)?
            }
        };
        parameters.update(|shard| config.optimizer.update(step, shard, &sum), ranks)
    })
}

/// The measurements as a table.
pub fn table(measured: &Links) -> String {
    let gather = format!("gather, {}", measured.weights.as_str());
    let mut out = format!(
        "{} ranks, {}; per rank and direction\n{:>10} {:>22} {gather:>26}\n",
        measured.ranks,
        if measured.engines { "copy engines" } else { "no copy engines" },
        "MB",
        "exchange, f32"
    );
    let others = (measured.ranks - 1) as f64 / measured.ranks as f64;
    for link in &measured.links {
        let speed = |bytes: f64, ms: f64| bytes * others / ms / 1e6;
        let bytes = link.bytes as f64;
        let gathered = bytes / 4.0 * measured.weights.size_in_bytes() as f64;
        let _ = writeln!(
            out,
            "{:>10.1} {:>9.3} ms {:>5.0} GB/s {:>12.3} ms {:>5.0} GB/s",
            bytes / 1e6,
            link.exchange,
            speed(bytes, link.exchange),
            link.gather,
            speed(gathered, link.gather),
        );
    }
    let UpdateTimes { parameters, alone, together } = measured.update;
    let _ = writeln!(out, "gather of 64 bytes: {:.1} us", 1e3 * measured.latency);
    let _ = writeln!(
        out,
        "update of {:.1}M parameters: {together:.2} ms shared by the ranks, {alone:.2} ms by each rank alone, \
         difference {:+.2} ms",
        parameters as f64 / 1e6,
        together - alone,
    );
    out
}
