//! Several processes that train one model, each with a GPU of its own: who they are, how they meet, how they exchange tensors,
//! and how they notice that one of them is gone.
//!
//! A run with one process has one rank, and takes the same way.

mod group;
mod launch;
mod loopback;
mod meeting;
mod mesh;
mod message;
#[cfg(feature = "cuda")]
mod nccl;
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
pub use mesh::{Mesh, PIECE, PIECE_BESIDE, Rank};
pub use transport::Transfer;
pub use world::{World, variables};

use launch::Launch;
use loopback::Loopback;
use meeting::Meeting;
use transport::Transport;

use crate::during;

/// How long a rank may make no progress, where nothing else is said.
pub const STALL: Duration = Duration::from_secs(120);

/// Whether this process has met others.
static MET: AtomicBool = AtomicBool::new(false);

/// Ends a process that was one of several ranks; any other goes on to its own end. What a GPU's libraries do when a process
/// ends may wait for ranks that are gone.
pub fn end(code: u8) {
    if MET.load(Ordering::Relaxed) {
        let _ = std::io::stdout().flush();
        signal_hook::low_level::exit(code.into());
    }
}

/// What this process is to the ranks of a run.
#[derive(Debug)]
pub enum Role {
    /// It started them, and they have ended with this code.
    Launcher(i32),
    /// One of them, that has met the others.
    Rank {
        /// The others.
        words: Words,
        /// Which it is on its machine.
        local: Rank,
    },
}

impl Role {
    /// The only one.
    pub fn alone() -> Self {
        Self::Rank { words: Words::alone(), local: Rank::ALONE }
    }

    /// By the environment; else it starts as many ranks as `gpus` says, and waits for them.
    ///
    /// # Errors
    /// When the environment says half of it or something else, ranks cannot be started, or do not meet.
    pub fn take(gpus: Option<usize>, restarts: u32, stall: Duration) -> Result<Self> {
        gpus.map_or(Ok(()), launch::check)?;
        match (gpus, World::from_environment()?) {
            (Some(1), None) if restarts > 0 => Err(Error::new("one process has no rank to lose")
                .got(format!("--gpus 1 --restarts {restarts}"))
                .allowed("--restarts with two GPUs and more")
                .hint("a shell's loop around `--resume auto` begins a single process again")),
            (Some(_), Some(world)) if restarts > 0 && !world.is_launched() => {
                Err(Error::new("another launcher begins processes again")
                    .got(format!("--restarts {restarts} under {}", world.launcher))
                    .allowed("--restarts where --gpus starts the processes")
                    .hint("torchrun has --max-restarts, Slurm --requeue"))
            }
            (Some(ranks @ 2..), None) => launch::launch(Launch { ranks, restarts }).map(Self::Launcher),
            (Some(gpus), Some(world)) if gpus != world.rank.of => {
                Err(Error::new("two launchers say how many processes there are")
                    .got(format!("--gpus {gpus}, and {} of {}", world.rank.of, world.launcher))
                    .allowed("one of them")
                    .hint("--gpus starts processes by itself: leave it out under torchrun or srun"))
            }
            (_, Some(world)) => Ok(Self::Rank { words: Words::meet(&world, stall)?, local: world.local }),
            (_, None) => Ok(Self::alone()),
        }
    }
}

/// The ranks of a run, as one of them sees them: words by way of their meeting, tensors by way of their devices.
#[derive(Debug)]
pub struct Ranks {
    mesh: Mesh,
    all: Group,
    shards: Group,
    replicas: Group,
    context: Group,
    words: Words,
}

impl Ranks {
    /// One process.
    pub fn alone() -> Self {
        let alone = Group::alone;
        let (all, shards, replicas, context) = (alone(), alone(), alone(), alone());
        Self { mesh: Mesh::ALONE, all, shards, replicas, context, words: Words::alone() }
    }

    /// Connects the devices of ranks that have met and lie so.
    ///
    /// # Errors
    /// When they cannot reach each other.
    pub fn connect(words: Words, mesh: Mesh, device: &Device) -> Result<Self> {
        let Some(meeting) = &words.meeting else { return Ok(Self { mesh, ..Self::alone() }) };
        let transport: Rc<dyn Transport> = match device {
            Device::Cpu => Rc::new(Loopback::connect(meeting)?),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                words.doing("connecting the GPUs");
                Rc::new(nccl::Nccl::connect(&words, device)?)
            }
            _ => return Err(Error::new("this device has no others to connect to")),
        };
        let Mesh { shard, replica, .. } = mesh;
        let group = |rank, first, step| Group::new(&transport, rank, first, step);
        Ok(Self {
            mesh,
            all: group(mesh.rank(), 0, 1),
            shards: group(shard, replica.index * shard.of, 1),
            replicas: group(replica, shard.index, shard.of),
            context: group(mesh.part(), mesh.data().index * mesh.context, 1),
            words,
        })
    }

    /// Which one this is.
    pub fn rank(&self) -> Rank {
        self.mesh.rank()
    }

    /// How they lie.
    pub fn mesh(&self) -> Mesh {
        self.mesh
    }

    /// Everybody.
    pub fn all(&self) -> &Group {
        &self.all
    }

    /// Those of this node.
    pub fn shards(&self) -> &Group {
        &self.shards
    }

    /// Those that have this one's place on the other nodes.
    pub fn replicas(&self) -> &Group {
        &self.replicas
    }

    /// Those that have one sequence together.
    pub fn context(&self) -> &Group {
        &self.context
    }

    /// How words travel.
    pub fn words(&self) -> &Words {
        &self.words
    }

    /// The numbers of each rank, as many of each.
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
        let all = gather().map_err(during("cannot gather the ranks' numbers"))?;
        Ok(all.chunks(numbers.len().max(1)).map(<[f64]>::to_vec).collect())
    }
}

/// What ranks say to each other, from any thread. All must come to a topic equally often.
#[derive(Debug, Clone)]
pub struct Words {
    rank: Rank,
    meeting: Option<Arc<Meeting>>,
}

impl Words {
    /// One process has nobody to talk to.
    pub fn alone() -> Self {
        Self { rank: Rank::ALONE, meeting: None }
    }

    /// Meets the others. `stall` is how long a rank may make no progress.
    ///
    /// # Errors
    /// When they do not come, or are of another version.
    pub fn meet(world: &World, stall: Duration) -> Result<Self> {
        MET.store(true, Ordering::Relaxed);
        Ok(Self { rank: world.rank, meeting: Some(Arc::new(Meeting::join(world, stall)?)) })
    }

    /// Which rank this is.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// What each rank says.
    ///
    /// # Errors
    /// When another rank is gone.
    pub fn share(&self, topic: &str, text: &str) -> Result<Vec<String>> {
        match &self.meeting {
            None => Ok(vec![text.to_owned()]),
            Some(meeting) => meeting.share(topic, text),
        }
    }

    /// What rank 0 says.
    ///
    /// # Errors
    /// When another rank is gone.
    pub fn from_first(&self, topic: &str, text: &str) -> Result<String> {
        Ok(self.share(topic, if self.rank.is_first() { text } else { "" })?.swap_remove(0))
    }

    /// Waits until all have come so far.
    ///
    /// # Errors
    /// When another rank is gone.
    pub fn wait(&self, topic: &str) -> Result<()> {
        self.share(topic, "").map(drop)
    }

    /// Checks that all ranks have the same.
    ///
    /// # Errors
    /// When one has something else.
    pub fn agree(&self, what: &str, text: &str) -> Result<()> {
        self.meeting.as_ref().map_or(Ok(()), |meeting| meeting.agree(what, text))
    }

    /// Something was done: the others see that it goes on.
    pub fn tick(&self) {
        if let Some(meeting) = &self.meeting {
            meeting.tick();
        }
    }

    /// What is being done, for the others to know.
    pub fn doing(&self, what: &str) {
        if let Some(meeting) = &self.meeting {
            meeting.doing(what, false);
        }
    }

    /// Begins a step, from 1: a rank that is at an earlier one than the rest holds them up.
    pub fn step(&self, step: u64, what: &str) {
        if let Some(meeting) = &self.meeting {
            meeting.step(step, what);
        }
    }

    /// Does something that may take long, and for which the others wait.
    pub fn aside<T>(&self, what: &str, work: impl FnOnce() -> T) -> T {
        let Some(meeting) = &self.meeting else { return work() };
        meeting.doing(what, true);
        let done = work();
        meeting.doing(what, false);
        done
    }

    /// What to do, told why, where other ranks end this process.
    pub fn at_end(&self, last_word: impl FnOnce(&str) + Send + 'static) {
        if let Some(meeting) = &self.meeting {
            meeting.at_end(Box::new(last_word));
        }
    }

    /// Leaves, as was agreed or because of an error, which ends the others.
    pub fn leave(&self, failed: Option<&Error>) {
        if let Some(meeting) = &self.meeting {
            meeting.leave(failed);
        }
    }
}
