//! Estimates for several ranks: the work, memory and traffic of each rank, and the time of a step.

use super::Config;
use super::summary::{H100, Memory};
use crate::device::DeviceKind;
use crate::model::received_bytes;
use crate::quantity::{counted, gib, grouped};
use crate::ranks::{FEW_TOKENS, Mesh, PIECE_BESIDE};

/// A hypothetical cluster for `--dry-run`: its mesh, and the bandwidths of its links.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cluster {
    /// The mesh, as one of its ranks sees it. The choice of the rank does not matter.
    pub mesh: Mesh,
    /// Bytes a second between a GPU and the other GPUs of its node, each way.
    pub link: f64,
    /// Bytes a second between nodes, per GPU, each way.
    pub network: f64,
    /// Tokens a second of one GPU while it computes gradients. `None` assumes an H100 at 40 % of its peak FLOP/s.
    pub gpu: Option<f64>,
}

/// Bytes a second of NVLink between H100 or H200, each way, as measured in the exchange of gradients.
pub const LINK: f64 = 300e9;

/// Bytes a second between nodes: 90 % of 400 Gb/s per GPU.
pub const NETWORK: f64 = 45e9;

/// Bytes a second of a GPU's memory, as measured in the optimizer's updates.
const MEMORY: f64 = 3e12;

/// Bytes a second of the exchange of heads between ranks that share sequences. The time includes copies that reorder
/// heads. For a sequence of 64k tokens on two H100, the exchange takes 2 ms per layer (from docs/several-gpus.md).
const SHARED: f64 = 130e9;

/// Bytes of memory that NCCL uses on a GPU, divided by the number of ranks of the GPU's node, or by 4 if it has fewer.
/// Runs needed more memory than estimates that omit NCCL (docs/several-gpus.md): 1.9 to 2.4 GiB more in five runs on
/// four H100, and 4.0 to 5.5 GiB more in eight runs on eight H200. The error of the estimate on a single GPU is
/// subtracted from these differences.
const NCCL: u64 = 1 << 29;

/// Fraction of the gradient exchange that overlaps with the backward, if copy engines (units of the GPU that only copy
/// memory) transfer the gradients and a GPU has few tokens per step. Measured on two H100 (docs/several-gpus.md).
const BESIDE: f64 = 0.6;

/// The time of transfers that forward and backward can hide, as a fraction of the time of forward and backward.
/// Transfers between nodes are hidden first, and then transfers within a node.
const HIDES: f64 = 0.6;

/// Seconds of the phases of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Seconds {
    gradients: f64,
    /// Time of the exchange of heads between ranks that share sequences.
    shared: f64,
    update: f64,
    /// Transfers between nodes: the total, and the part that forward and backward do not hide (`exposed`).
    network: f64,
    exposed: f64,
}

impl Seconds {
    fn all(&self) -> f64 {
        self.gradients + self.shared + self.update + self.exposed
    }
}

/// The sizes that determine the time of an optimizer update.
struct Updated {
    parameters: u64,
    /// Bytes read plus bytes written, per parameter.
    moved: u64,
    /// Bytes of all weights, which the ranks of a node gather after the update.
    gathered: u64,
}

/// Seconds of an update, including the exchange of gradients between the ranks of a node. `link` is the bandwidth
/// between these ranks. The backward hides the fraction `BESIDE` of the exchange, but at most `hides` seconds.
fn update_seconds(updated: Updated, mesh: Mesh, link: f64, hides: f64) -> f64 {
    let Updated { parameters, moved, gathered } = updated;
    let (bytes, ranks) = (4.0 * parameters as f64, mesh.shard.of as f64);
    let others = (ranks - 1.0) / ranks;
    let sums = if mesh.shard.of == 1 { 0.0 } else { (bytes + bytes / ranks) / MEMORY };
    let exchange = others * bytes / link;
    let (gather, update) = (others * gathered as f64 / link, moved as f64 / 4.0 * bytes / ranks / MEMORY);
    exchange - (BESIDE * exchange).min(hides) + sums + gather + update
}

impl Config {
    /// The estimates for several ranks as a table.
    pub fn of_ranks(&self, world: Cluster) -> String {
        let mesh = world.mesh;
        let memory = self.memory_of_ranks(mesh);
        let seconds = self.seconds(world, self.accumulation.div_ceil(mesh.data().of));
        let mut rows = vec![
            ("ranks", self.distribution(mesh)),
            (
                "memory of each",
                format!("about {} MiB plus the data: {memory}", grouped(memory.total() >> 20)),
            ),
            ("sent in a step", self.sent(mesh, world.link)),
        ];
        if mesh.replica.of > 1 {
            rows.push(("between nodes", self.between_nodes(world, &seconds)));
        }
        rows.push(("step", self.step(world, &seconds)));
        rows.iter().map(|(label, text)| format!("{label:<14} {text}\n")).collect()
    }

    /// How the micro-batches of a step are distributed among the ranks.
    fn distribution(&self, mesh: Mesh) -> String {
        let (all, groups) = (self.accumulation, mesh.data().of);
        let (most, fewest) = (all.div_ceil(groups), all / groups);
        let (who, in_groups) = match mesh.context {
            1 => ("rank", String::new()),
            of => ("group", format!(", in {groups} groups of {of}")),
        };
        let distribution = match all - fewest * groups {
            0 => format!("each {who} computes {most} of a step's {all} micro-batches"),
            n => format!(
                "a step's {all} micro-batches: {most} each for {}, {fewest} each for {}",
                counted(n as u64, who),
                counted((groups - n) as u64, who)
            ),
        };
        let idle = 100.0 * (1.0 - all as f64 / (most * groups) as f64);
        format!(
            "{} on {}{in_groups}; {distribution}; ranks idle {idle:.0} % of the time",
            mesh.rank().of,
            match mesh.replica.of {
                1 => "one node".into(),
                nodes => format!("{nodes} nodes of {}", mesh.shard.of),
            },
        )
    }

    /// What a rank sends over the links of its node in a step.
    fn sent(&self, mesh: Mesh, link: f64) -> String {
        let of = mesh.shard.of as u64;
        let sent = |bytes: u64| gib(bytes / of * (of - 1));
        format!(
            "gradients {:.2} GiB, weights {:.2} GiB per rank and direction, links of {:.0} GB/s",
            sent(4 * self.model.parameters()),
            sent(self.gathered_bytes()),
            link / 1e9
        )
    }

    /// What a rank sends to other nodes in a step.
    fn between_nodes(&self, Cluster { mesh, network, .. }: Cluster, seconds: &Seconds) -> String {
        let others = (mesh.replica.of - 1) as f64 / mesh.replica.of as f64;
        let bytes = 2.0 * others * 4.0 * self.model.parameters() as f64 / mesh.shard.of as f64;
        format!(
            "{:.2} GiB per rank and direction, {:.1} ms at {:.0} GB/s, of which forward and backward hide {:.1}",
            bytes / f64::from(1 << 30),
            1e3 * seconds.network,
            network / 1e9,
            1e3 * (seconds.network - seconds.exposed),
        )
    }

    /// The time of a step and of its phases, and the throughput.
    fn step(&self, world: Cluster, seconds: &Seconds) -> String {
        let of_step = |part: f64| 100.0 * part / seconds.all();
        let shared = match world.mesh.context {
            1 => String::new(),
            _ => format!(", {:.1} to share sequences", 1e3 * seconds.shared),
        };
        let speed = match world.gpu {
            None => format!("at {:.0} % of an H100's peak", 100.0 * H100.1),
            Some(gpu) => format!("at {} tokens/s", grouped(gpu as u64)),
        };
        format!(
            "about {:.1} ms: {:.1} gradients {speed}{shared}, {:.1} update ({:.1} %){}; {} tokens/s, {:.1} % of the \
             throughput of as many independent GPUs",
            1e3 * seconds.all(),
            1e3 * seconds.gradients,
            1e3 * seconds.update,
            of_step(seconds.update),
            match seconds.exposed > 0.0 {
                true => format!(", {:.1} waiting for other nodes", 1e3 * seconds.exposed),
                false => String::new(),
            },
            grouped((self.tokens_per_step() as f64 / seconds.all()) as u64),
            100.0 * self.efficiency(world, seconds),
        )
    }

    fn updated(&self) -> Updated {
        let moved = self.optimizer.moved_bytes(self.device.dtype().size_in_bytes() as u64);
        Updated { parameters: self.model.parameters(), moved, gathered: self.gathered_bytes() }
    }

    /// Bytes of all weights, which the ranks of a node gather in each step.
    fn gathered_bytes(&self) -> u64 {
        self.model.read_bytes(self.device.dtype().size_in_bytes() as u64)
    }

    fn tokens_a_second(&self, world: Cluster) -> f64 {
        world.gpu.unwrap_or(H100.0 * H100.1 / self.model.dense16_flops_per_token())
    }

    fn seconds(&self, world: Cluster, micro_batches: usize) -> Seconds {
        let Cluster { mesh, link, network, .. } = world;
        let tokens = self.micro_batch * self.model.context * micro_batches / mesh.context;
        let gradients = tokens as f64 / self.tokens_a_second(world);
        // The ranks of a group exchange the heads of query, key, value and output, in the forward and in the backward.
        let element = self.device.dtype().size_in_bytes();
        let (queries, keys) = (self.model.heads, self.model.key_heads.max(mesh.context));
        let heads = 4 * queries + 4 * keys;
        let others = (mesh.context - 1) as f64 / mesh.context as f64;
        let attends = self.model.scheme.is_some() && mesh.context > 1;
        let bytes = heads * self.model.head_dim * element * self.model.layers * tokens;
        let shared = if attends { others * bytes as f64 / SHARED } else { 0.0 };
        let parameters = self.model.parameters();
        let nodes = mesh.replica.of as f64;
        let part = 4.0 * parameters as f64 / mesh.shard.of as f64;
        let last = PIECE_BESIDE as f64 / parameters as f64;
        let network = 2.0 * (nodes - 1.0) / nodes * part / network;
        // With `FEW_TOKENS` or more, an exchange of gradients during the backward saves no time.
        let hides = match mesh.engines && mesh.during_backward && (tokens as u64) < FEW_TOKENS {
            true => (HIDES * gradients - network).max(0.0),
            false => 0.0,
        };
        Seconds {
            gradients,
            shared,
            update: update_seconds(self.updated(), mesh, link, hides),
            network,
            // The last transfer has no concurrent backward.
            exposed: (network - HIDES * gradients).max(network * last.min(1.0)),
        }
    }

    /// Tokens a second of all ranks, relative to the same number of GPUs that each train independently.
    fn efficiency(&self, world: Cluster, seconds: &Seconds) -> f64 {
        let ranks = world.mesh.rank().of as f64;
        let tokens = self.tokens_per_step() as f64 / ranks;
        let alone = tokens / self.tokens_a_second(world)
            + update_seconds(self.updated(), Mesh::ALONE, world.link, 0.0);
        alone / seconds.all()
    }

    /// Peak memory of a rank. It includes buffers for data from other ranks, and only a shard of the f32 weights and of
    /// the moments.
    pub fn memory_of_ranks(&self, mesh: Mesh) -> Memory {
        let (memory, parameters) = (self.memory(), self.model.parameters());
        if mesh.rank().of == 1 {
            return memory;
        }
        let element = self.device.dtype().size_in_bytes() as u64;
        let of = mesh.shard.of as u64;
        let (specs, whole) = (self.model.parameter_specs(), self.optimizer.moments().whole_matrices);
        Memory {
            weights: parameters * 4 / of + self.model.copies_of_weights(element),
            optimizer: memory.optimizer / of,
            gradients: memory.gradients + received_bytes(&specs, mesh, whole),
            activations: memory.activations / mesh.context as u64 + self.exchanged_bytes(mesh, element),
            links: if self.device == DeviceKind::Cpu { 0 } else { NCCL * mesh.shard.of.max(4) as u64 },
        }
    }

    /// Peak bytes of the exchange of heads between ranks that share a sequence: three copies of the gradients of query,
    /// key and value (as sent, as received, and in their final order).
    fn exchanged_bytes(&self, mesh: Mesh, element: u64) -> u64 {
        let heads = (self.model.heads + 2 * self.model.key_heads) as u64;
        let tokens = (self.micro_batch * self.model.context) as u64;
        match mesh.context {
            1 => 0,
            ranks => 3 * element * tokens * heads * self.model.head_dim as u64 / ranks as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Recompute;
    use crate::quantity::Quantity;
    use crate::ranks::Rank;
    use crate::settings::{Preset, Settings};

    fn config(micro_batch: usize, context: u64, sequences: u64, vocabulary: u64, heads: usize) -> Config {
        Config::resolve(Settings::with(|s| {
            s.run.preset = Some(Preset::Paper325m);
            s.run.device = Some(DeviceKind::Cuda);
            s.data.context = Some(Quantity(context));
            s.data.vocab_size = Some(Quantity(vocabulary));
            s.model.heads = Some(heads);
            s.model.head_dim = Some(1024 / heads);
            s.batch.micro_batch = Some(micro_batch);
            s.batch.tokens_per_step = Some(Quantity(sequences * context));
        }))
        .expect("settings")
    }

    /// Compares predicted step times of two and four GPUs with docs/several-gpus.md. Each prediction starts from the
    /// measured time in which one GPU computes its gradients. The test omits the measurements from which the constants
    /// `BESIDE` (two H100, 4k tokens per GPU) and `SHARED` (two H100 that share sequences) were derived.
    #[test]
    fn steps_of_several_gpus_are_predicted() {
        let after = Mesh::node(Rank { index: 0, of: 2 });
        let during_backward = Mesh { engines: true, during_backward: true, ..after };
        let four = Rank { index: 0, of: 4 };
        // The first three rows were measured on two H200, the next four on two H100, the next one on four H100, and
        // the last two on four H200.
        for (mesh, vocabulary, heads, micro_batch, context, gradients, measured) in [
            (after, 1078, 16, 1, 4096, 21.94, 26.26),
            (after, 1078, 16, 2, 4096, 39.77, 44.77),
            (after, 1078, 16, 8, 4096, 151.51, 156.39),
            (after, 50_257, 16, 1, 4096, 23.49, 28.90),
            (during_backward, 50_257, 16, 2, 4096, 44.69, 49.95),
            (after, 50_257, 16, 8, 4096, 169.64, 176.31),
            (during_backward, 50_257, 16, 8, 4096, 169.64, 178.20),
            (Mesh { shard: four, engines: true, ..after }, 50_257, 16, 8, 4096, 171.22, 178.62),
            (Mesh { shard: four, engines: true, ..after }, 50_257, 16, 8, 4096, 167.18, 174.7),
            (Mesh { shard: four, ..during_backward }, 50_257, 16, 2, 4096, 43.53, 47.3),
        ] {
            let sequences = (micro_batch * mesh.data().of) as u64;
            let config = config(micro_batch, context, sequences, vocabulary, heads);
            let gpu = Some((micro_batch as u64 * context) as f64 / gradients * 1e3);
            let seconds = config.seconds(Cluster { mesh, link: LINK, network: NETWORK, gpu }, 1);
            let reckoned = 1e3 * seconds.all();
            assert!((reckoned / measured - 1.0).abs() < 0.03, "{mesh:?}: {reckoned} for {measured}");
        }
    }

    /// Compares the predicted peak memory of a GPU, in GiB, with two runs of docs/several-gpus.md. In the runs, four or
    /// eight H200 share one sequence and recompute activations.
    #[test]
    fn memory_of_a_shared_sequence_is_predicted() {
        for (ranks, context, recompute, measured) in
            [(4, 1 << 20, Recompute::Block, 35.2), (8, 1 << 18, Recompute::Attention, 25.3)]
        {
            let mut config = config(1, context, 1, 50_257, 8);
            config.model.recompute = recompute;
            let rank = Rank { index: 0, of: ranks };
            let mesh = Mesh { engines: true, context: ranks, ..Mesh::node(rank) };
            let predicted = config.memory_of_ranks(mesh).total() as f64 / f64::from(1 << 30);
            assert!((predicted / measured - 1.0).abs() < 0.1, "{ranks} GPUs: {predicted} for {measured}");
        }
    }
}
