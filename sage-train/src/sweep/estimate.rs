//! Estimates how long a sweep takes, from a few measured steps.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use candle_sage::{Error, Result};

use super::{State, Sweep};
use crate::config::Config;
use crate::device::DeviceKind;
use crate::model::Stage;
use crate::quantity::Quantity;
use crate::runs::{Run, Status, median};
use crate::signals::{self, SecondSignal};
use crate::{during, notify, writing};

/// How many steps a measurement runs, and how many micro-batches each of them has at most. The first step is slower
/// than the others, and its time is not used. A step's time is proportional to its number of micro-batches, so a few
/// micro-batches are enough. On a CPU steps are slow and their times vary little, so fewer steps are enough.
fn sample(device_kind: DeviceKind) -> (u64, u64) {
    match device_kind {
        DeviceKind::Cpu => (2, 1),
        DeviceKind::Cuda => (4, 4),
    }
}

/// The remaining work of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Estimate {
    /// The state of the run.
    pub state: State,
    /// Tokens that remain to be trained on.
    pub tokens: u64,
    /// Tokens per second when no other run shares the device; `None` for a run without remaining work.
    pub speed: Option<f64>,
}

impl Estimate {
    /// Seconds that the remaining tokens take on one device.
    pub fn seconds(&self) -> f64 {
        self.speed.map_or(0.0, |speed| self.tokens as f64 / speed)
    }
}

/// Groups the remaining runs by the settings that the time of a step depends on. For one run of each group, measures a
/// few steps of each [`Stage`]. The measured runs are written to a scratch folder, which is removed.
///
/// # Errors
/// When a run of the sweep cannot be trained on this machine.
pub fn estimate(sweep: &Sweep, retry: bool) -> Result<Vec<Estimate>> {
    // After a signal, `measure` must end its child process and remove its scratch folder before this process ends.
    signals::watch(SecondSignal::IsNotNeeded)?;
    let mut measured: BTreeMap<String, f64> = BTreeMap::new();
    let mut estimates = Vec::new();
    for (run, folder) in sweep.runs.iter().zip(sweep.places()) {
        let config = &run.config;
        if !folder.state.is_open(retry) {
            estimates.push(Estimate { state: folder.state, tokens: 0, speed: None });
            continue;
        }
        let (mut tokens, mut seconds) = (0, 0.0);
        for (stage, steps) in remaining(config, folder.steps).into_iter().filter(|(_, steps)| *steps > 0) {
            let shape = format!("{} {stage:?}", shape(config));
            let speed = match measured.get(&shape) {
                Some(&speed) => speed,
                None => {
                    match config.model.sla2 {
                        Some(_) => notify(&format!("measuring {}, stage {stage:?}", run.name)),
                        None => notify(&format!("measuring {}", run.name)),
                    }
                    let speed = measure(config, stage, &sweep.folder)?;
                    measured.insert(shape, speed);
                    speed
                }
            };
            let of_stage = config.tokens_per_step() * steps;
            tokens += of_stage;
            seconds += of_stage as f64 / speed;
        }
        let speed = (tokens > 0).then(|| tokens as f64 / seconds);
        estimates.push(Estimate { state: folder.state, tokens, speed });
    }
    Ok(estimates)
}

/// The steps that remain of each stage after `done` steps. A model without SLA2 has only dense steps.
fn remaining(config: &Config, done: u64) -> [(Stage, u64); 3] {
    let stage_of = |step| config.model.sla2.map_or(Stage::Dense, |sla2| sla2.stage(step));
    [Stage::Dense, Stage::Router, Stage::Sparse]
        .map(|stage| (stage, (done..config.steps).filter(|&step| stage_of(step) == stage).count() as u64))
}

/// A key for the settings that the time of a step depends on.
fn shape(config: &Config) -> String {
    let mut identity = config.identity();
    for key in [
        "steps",
        "lr",
        "warmup-steps",
        "schedule",
        "min-lr",
        "weight-decay",
        "seed",
        "clip",
        "eval-tokens",
        "eval-attn",
        "sla2-dense-steps",
        "sla2-router-steps",
    ] {
        identity.remove(key);
    }
    identity.retain(|key, _| !crate::config::is_seed(key));
    format!("{identity:?}")
}

/// Tokens per second of a short run in a child process. When the child exits, all memory of the run is freed.
fn measure(config: &Config, stage: Stage, folder: &Path) -> Result<f64> {
    let parent = folder.ancestors().find(|folder| folder.is_dir()).unwrap_or(Path::new("."));
    let scratch = parent.join(format!(".sage-train-measures.{}", std::process::id()));
    std::fs::create_dir_all(&scratch).map_err(writing(&scratch))?;
    let speed = measure_in(config, stage, &scratch);
    let _ = std::fs::remove_dir_all(&scratch);
    speed
}

fn measure_in(config: &Config, stage: Stage, scratch: &Path) -> Result<f64> {
    let micro_batch = (config.micro_batch * config.model.context) as u64;
    let (steps, micro_batches) = sample(config.device);
    let tokens = config.tokens_per_step().min(micro_batches * micro_batch);
    let mut few = config.settings.clone();
    few.batch.steps = Some(Quantity(steps));
    few.batch.tokens = None;
    few.batch.tokens_per_step = Some(Quantity(tokens));
    few.optimizer.forget_warmups();
    let [dense, router] = match stage {
        Stage::Dense => [steps, 0],
        Stage::Router => [steps, steps],
        Stage::Sparse => [0, 0],
    };
    few.sla2.sla2_dense_steps = few.sla2.sla2_dense_steps.map(|_| Quantity(dense));
    few.sla2.sla2_router_steps = few.sla2.sla2_router_steps.map(|_| Quantity(router));
    few.run.eval_every = Some(Quantity(0));
    few.run.eval_tokens = Some(Quantity(1));
    few.run.eval_attn = None;
    few.run.checkpoint_every = Some(Quantity(0));
    few.run.probe_every = Some(Quantity(0));
    few.run.sample_tokens = Some(0);
    few.run.out = Some(scratch.to_owned());
    let (settings, name) = (scratch.join("settings.toml"), "measured");
    let text = Config::resolve(few)?.to_toml();
    std::fs::write(&settings, text).map_err(writing(&settings))?;
    let program = std::env::current_exe().map_err(during("cannot find the path of this program"))?;
    let mut command = Command::new(program);
    command.arg("--config").arg(&settings).args(["--name", name]);
    command.env(signals::PARENT, std::process::id().to_string());
    if config.device == DeviceKind::Cuda
        && let Some(gpu) = crate::device::gpus().first()
    {
        command.env("CUDA_VISIBLE_DEVICES", gpu);
    }
    let stderr = scratch.join("stderr");
    let file = std::fs::File::create(&stderr).map_err(writing(&stderr))?;
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file).spawn();
    let status = wait(child.map_err(during("cannot start a run"))?)?;
    let folder = scratch.join(name);
    let run = Run::read(&folder).ok();
    // The short run may diverge, because it has no warm-up of the learning rate. Its speed is valid nevertheless.
    let ended =
        |run: &Run| matches!(run.status(), Some(Status::Finished | Status::Diverged)) && run.steps() > 1;
    let done = run.as_ref().is_some_and(ended);
    let speed = run.and_then(|run| median(run.points.iter().skip(1).map(|point| point.tokens_per_second)));
    let _ = std::fs::remove_dir_all(&folder);
    match speed {
        Some(speed) if done => Ok(speed),
        _ => {
            let stderr = std::fs::read_to_string(&stderr).unwrap_or_default();
            let stderr = stderr.lines().skip_while(|line| !line.starts_with("error")).collect::<Vec<_>>();
            Err(Error::failed("a run of the sweep cannot be trained on this machine")
                .got(if stderr.is_empty() { status.to_string() } else { stderr.join("\n") })
                .allowed("runs that can train a few steps")
                .hint("--dry-run --no-measure plans without measuring"))
        }
    }
}

/// Waits for a child process that measures speed. If this process receives a signal, it kills the child at once,
/// because a measurement has nothing to save.
fn wait(mut child: Child) -> Result<ExitStatus> {
    loop {
        let ended = child.try_wait().map_err(during("cannot wait for a run"))?;
        // A signal from the terminal reaches the child too, and the child may end first: the signal is checked
        // before the child's exit status.
        if let Some(signal) = signals::received() {
            let _ = child.kill();
            let _ = child.wait();
            return Err(Error::failed("stopped").got(format!("signal {signal} while steps were measured")));
        }
        match ended {
            Some(status) => return Ok(status),
            None => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{Attn, Settings};

    #[test]
    fn stages_remain_one_after_the_other() {
        let config = |attn| {
            Config::resolve(Settings::with(|s| {
                s.attention.attn = Some(attn);
                s.batch.steps = Some(Quantity(100));
                if attn != Attn::EXACT {
                    s.sla2.sla2_dense_steps = Some(Quantity(60));
                    s.sla2.sla2_router_steps = Some(Quantity(10));
                }
            }))
            .expect("a run")
        };
        let steps = |config: &Config, done| remaining(config, done).map(|(_, steps)| steps);
        let sla2 = config("sla2".parse().expect("attention"));
        assert_eq!(steps(&sla2, 0), [50, 10, 40]);
        assert_eq!(steps(&sla2, 55), [0, 5, 40]);
        assert_eq!(steps(&sla2, 75), [0, 0, 25]);
        assert_eq!(steps(&sla2, 100), [0, 0, 0]);
        assert_eq!(steps(&config(Attn::EXACT), 30), [70, 0, 0]);
    }
}
