//! Ranks: several processes, each with a separate GPU, that train one model. This module finds a process's rank,
//! connects the ranks, exchanges tensors between them, and detects that a rank has died.
//!
//! A run with one process has one rank, and uses the same code as a run with several.

mod control;
mod greeting;
mod group;
mod launch;
mod loopback;
mod mesh;
mod message;
#[cfg(feature = "cuda")]
mod nccl;
mod secret;
mod transport;
mod world;

use std::io::Write;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use candle_sage::{Error, Result};

pub use group::Group;
pub use mesh::{FEW_TOKENS, Mesh, PIECE, PIECE_BESIDE, Rank};
pub use message::first_message;
pub use transport::{CopyEngines, Transfer};
pub use world::{World, variables};

use control::ControlConnection;
use launch::Launch;
use loopback::Loopback;
use transport::Transport;

use crate::during;

/// How long a rank may go without progress, by default.
pub const STALL: Duration = Duration::from_secs(120);

/// Whether this process has joined other ranks.
static MET: AtomicBool = AtomicBool::new(false);

/// Exits the process at once if it was one of several ranks; otherwise returns, and the process ends normally. A normal
/// end runs the exit handlers of the GPU's libraries, which may wait for ranks that have died.
pub fn end(code: u8) {
    if MET.load(Ordering::Relaxed) {
        let _ = std::io::stdout().flush();
        signal_hook::low_level::exit(code.into());
    }
}

/// The role of this process in a run.
#[derive(Debug)]
pub enum Role {
    /// This process started the ranks and has waited for their end. The number is the exit code of the run.
    Launcher(i32),
    /// This process is one of the ranks, and is connected to the others.
    Rank {
        /// The control channel to the other ranks.
        channel: ControlChannel,
        /// The position of this rank among the ranks of its machine.
        local: Rank,
    },
}

impl Role {
    /// The only rank of a run.
    pub fn alone() -> Self {
        Self::Rank { channel: ControlChannel::alone(), local: Rank::ALONE }
    }

    /// Takes the rank from the environment, if a launcher has set it. Otherwise starts `gpus` ranks and waits
    /// until they end, or makes this process the only rank if `gpus` is 1 or `None`.
    ///
    /// # Errors
    /// When the environment is incomplete or contradicts `gpus` or `restarts`, when the ranks cannot be
    /// started, or when they do not connect.
    pub fn take(gpus: Option<usize>, restarts: u32, stall: Duration) -> Result<Self> {
        gpus.map_or(Ok(()), launch::check)?;
        match (gpus, World::from_environment()?) {
            (Some(1), None) if restarts > 0 => Err(Error::new("one process has no ranks to restart")
                .got(format!("--gpus 1 --restarts {restarts}"))
                .allowed("--restarts with --gpus 2 or more")
                .hint("a shell loop around `--resume auto` restarts a single process")),
            (Some(_), Some(world)) if restarts > 0 && !world.is_launched() => {
                Err(Error::new("--restarts does not work under another launcher")
                    .got(format!("--restarts {restarts} under {}", world.launcher))
                    .allowed("--restarts together with --gpus, without another launcher")
                    .hint("torchrun has --max-restarts, Slurm --requeue"))
            }
            (Some(ranks @ 2..), None) => launch::launch(Launch { ranks, restarts }).map(Self::Launcher),
            (Some(gpus), Some(world)) if gpus != world.rank.of => {
                Err(Error::new("--gpus and another launcher set different numbers of processes")
                    .got(format!("--gpus {gpus}, and {} processes of {}", world.rank.of, world.launcher))
                    .allowed("--gpus or another launcher, or the same number from both")
                    .hint("--gpus itself starts processes: leave it out under torchrun or srun"))
            }
            (_, Some(world)) => {
                Ok(Self::Rank { channel: ControlChannel::connect(&world, stall)?, local: world.local })
            }
            (_, None) => Ok(Self::alone()),
        }
    }
}

/// The ranks of a run, as seen from one of them: a control channel that exchanges text, and [`Group`]s that exchange
/// tensors.
#[derive(Debug)]
pub struct Ranks {
    mesh: Mesh,
    all: Group,
    shards: Group,
    replicas: Group,
    context: Group,
    channel: ControlChannel,
}

impl Ranks {
    /// The ranks of a run with one process.
    pub fn alone() -> Self {
        let alone = Group::alone;
        let (all, shards, replicas, context) = (alone(), alone(), alone(), alone());
        Self { mesh: Mesh::ALONE, all, shards, replicas, context, channel: ControlChannel::alone() }
    }

    /// Connects the ranks' devices.
    ///
    /// # Errors
    /// When the devices cannot reach each other.
    pub fn connect(
        channel: ControlChannel,
        mesh: Mesh,
        engines: CopyEngines,
        device: &Device,
    ) -> Result<Self> {
        let Some(connection) = &channel.connection else { return Ok(Self { mesh, ..Self::alone() }) };
        let transport: Rc<dyn Transport> = match device {
            Device::Cpu if engines == CopyEngines::On => {
                return Err(Error::new("CPUs have no copy engines")
                    .got("--copy-engines on, --device cpu")
                    .allowed("auto or off")
                    .hint("leave --copy-engines out"));
            }
            Device::Cpu => Rc::new(Loopback::connect(connection)?),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                channel.set_activity("connecting the GPUs");
                Rc::new(nccl::Nccl::connect(&channel, mesh, engines, device)?)
            }
            _ => return Err(Error::new("several ranks need CUDA GPUs, or the CPU")),
        };
        let mesh = Mesh { engines: transport.has_engines(), ..mesh };
        let Mesh { shard, replica, .. } = mesh;
        let group = |rank, first, step| Group::new(&transport, rank, first, step);
        Ok(Self {
            mesh,
            all: group(mesh.rank(), 0, 1),
            shards: Group::node(&transport, shard, replica.index * shard.of),
            replicas: group(replica, shard.index, shard.of),
            context: group(mesh.part(), mesh.data().index * mesh.context, 1),
            channel,
        })
    }

    /// Applies `plan` to the mesh. `plan` may change when and how gradients are reduced, but not the ranks.
    pub fn planned(self, plan: impl FnOnce(Mesh) -> Mesh) -> Self {
        Self { mesh: plan(self.mesh), ..self }
    }

    /// The position of this rank among all ranks.
    pub fn rank(&self) -> Rank {
        self.mesh.rank()
    }

    /// The arrangement of the ranks in nodes and groups.
    pub fn mesh(&self) -> Mesh {
        self.mesh
    }

    /// All ranks.
    pub fn all(&self) -> &Group {
        &self.all
    }

    /// The ranks of this node.
    pub fn shards(&self) -> &Group {
        &self.shards
    }

    /// The ranks that own the same shard as this rank, one on each node.
    pub fn replicas(&self) -> &Group {
        &self.replicas
    }

    /// The ranks that share each sequence with this rank.
    pub fn context(&self) -> &Group {
        &self.context
    }

    /// The control channel.
    pub fn channel(&self) -> &ControlChannel {
        &self.channel
    }

    /// All-gathers numbers: returns the `numbers` of each rank, in the order of the ranks. Every rank must pass the
    /// same count.
    ///
    /// # Errors
    /// When another rank cannot be reached.
    pub fn gather(&self, numbers: &[f64], device: &Device) -> Result<Vec<Vec<f64>>> {
        if self.rank().of == 1 {
            return Ok(vec![numbers.to_vec()]);
        }
        let gather = || -> candle_core::Result<Vec<f64>> {
            let all = Tensor::zeros(numbers.len() * self.rank().of, DType::F64, device)?;
            let own = Tensor::new(numbers, device)?;
            self.all.wait(self.all.gather(&own, &all)?)?;
            all.to_vec1()
        };
        let all = gather().map_err(during("cannot gather the results of all ranks"))?;
        Ok(all.chunks(numbers.len().max(1)).map(<[f64]>::to_vec).collect())
    }
}

/// The control channel of the ranks: collective operations on text, callable from any thread. Calls are
/// matched by topic, so all ranks must make the same number of calls on each topic.
#[derive(Debug, Clone)]
pub struct ControlChannel {
    rank: Rank,
    connection: Option<Arc<ControlConnection>>,
}

impl ControlChannel {
    /// The control channel of a run with one process, which connects to nothing.
    pub fn alone() -> Self {
        Self { rank: Rank::ALONE, connection: None }
    }

    /// Connects to the other ranks. `stall` is how long a rank may go without progress.
    ///
    /// # Errors
    /// When the other ranks do not connect in time, or run another version of this program.
    pub fn connect(world: &World, stall: Duration) -> Result<Self> {
        MET.store(true, Ordering::Relaxed);
        Ok(Self { rank: world.rank, connection: Some(Arc::new(ControlConnection::join(world, stall)?)) })
    }

    /// The position of this rank among all ranks.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// An all-gather of text: the text of each rank, in the order of the ranks. The death of another rank ends this
    /// process.
    pub fn share(&self, topic: &str, text: &str) -> Vec<String> {
        match &self.connection {
            None => vec![text.to_owned()],
            Some(connection) => connection.share(topic, text),
        }
    }

    /// A broadcast of the text of rank 0.
    pub fn from_first(&self, topic: &str, text: &str) -> String {
        self.share(topic, if self.rank.is_first() { text } else { "" }).swap_remove(0)
    }

    /// A barrier: waits until all ranks have reached it.
    pub fn wait(&self, topic: &str) {
        self.share(topic, "");
    }

    /// Checks that all ranks pass the same text.
    ///
    /// # Errors
    /// When a rank passes another text.
    pub fn agree(&self, what: &str, text: &str) -> Result<()> {
        self.connection.as_ref().map_or(Ok(()), |connection| connection.agree(what, text))
    }

    /// Counts a batch as progress. Ranks without progress for a while are considered stalled.
    pub fn tick(&self) {
        if let Some(connection) = &self.connection {
            connection.tick();
        }
    }

    /// Sets this rank's activity. Other ranks name it in their error messages about this rank.
    pub fn set_activity(&self, what: &str) {
        if let Some(connection) = &self.connection {
            connection.set_activity(what, false);
        }
    }

    /// Sets the step that this rank starts (the first step is 1), and this rank's activity.
    pub fn step(&self, step: u64, what: &str) {
        if let Some(connection) = &self.connection {
            connection.step(step, what);
        }
    }

    /// Runs `work` while the other ranks wait. This rank counts as stalled only after 6 hours without progress.
    pub fn while_peers_wait<T>(&self, what: &str, work: impl FnOnce() -> T) -> T {
        let Some(connection) = &self.connection else { return work() };
        let (before, was_waited_for) = connection.set_activity(what, true);
        let done = work();
        connection.set_activity(&before, was_waited_for);
        done
    }

    /// Sets a function that is called before the control channel ends this process because of a failure. The function's
    /// argument is the reason.
    pub fn at_end(&self, last_word: impl FnOnce(&str) + Send + 'static) {
        if let Some(connection) = &self.connection {
            connection.at_end(Box::new(last_word));
        }
    }

    /// Leaves the run. At the regular end of the run `failed` is `None`; otherwise it is an error, which ends the other
    /// ranks too.
    pub fn leave(&self, failed: Option<&Error>) {
        if let Some(connection) = &self.connection {
            connection.leave(failed);
        }
    }
}
