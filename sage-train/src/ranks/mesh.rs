//! The arrangement of the ranks in nodes, and of a node's ranks in groups for context parallelism.

use std::ops::Range;

use candle_sage::{Error, Result};

use super::ControlChannel;

/// A member of a group of processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rank {
    /// Index, from 0.
    pub index: usize,
    /// Number of members.
    pub of: usize,
}

impl Rank {
    /// The only member of its group.
    pub const ALONE: Self = Self { index: 0, of: 1 };

    /// Whether this is member 0, which writes files and prints for all members.
    pub fn is_first(self) -> bool {
        self.index == 0
    }

    /// This member's range of `len` elements, of which each member gets the same number. `len` must be a multiple of
    /// the number of members.
    pub fn part_of(self, len: usize) -> Range<usize> {
        let part = len / self.of;
        self.index * part..(self.index + 1) * part
    }
}

/// The position of a rank. Optimizer states are sharded over the ranks of a node, and every node is a replica
/// (hybrid sharding). Adjacent ranks of a node may share each sequence (context parallelism).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mesh {
    /// The position of this rank among the ranks of its node.
    pub shard: Rank,
    /// The position of this rank's node among the nodes.
    pub replica: Rank,
    /// Number of ranks that share each sequence.
    pub context: usize,
    /// Whether copy engines (units of the GPU that only copy memory) transfer gradients and weights within a node.
    pub engines: bool,
    /// Whether gradients are transferred during the backward.
    pub during_backward: bool,
    /// Once the gradients of one transfer have this many elements, the next parameter begins a new transfer.
    pub piece: usize,
}

/// Default of [`Mesh::piece`]: 680 MB in f32. This was the fastest of several sizes on two GPUs for a model of
/// 274M parameters (docs/several-gpus.md). Larger pieces have a higher bandwidth; smaller pieces shorten the last
/// transfer, which overlaps with nothing.
pub const PIECE: usize = 170_000_000;

/// As [`PIECE`], for transfers during a backward: 200 MB in f32.
pub const PIECE_BESIDE: usize = 50_000_000;

/// With fewer tokens per rank and step than this, copy engines transfer gradients during the backward, else after it.
/// With more tokens the GPU's power limit determines the time of a step, and concurrent transfers leave less power
/// for matmuls. On two H100, transfers during the backward made steps 2.2 % faster at 4k tokens, 1.3 % faster at
/// 8k and 1.1 % slower at 32k (docs/several-gpus.md). So the best value lies between 8k and 32k. The size of the model
/// matters less: matmuls and transfers both grow with it.
pub const FEW_TOKENS: u64 = 16 << 10;

impl Mesh {
    /// The only rank.
    pub const ALONE: Self = Self {
        shard: Rank::ALONE,
        replica: Rank::ALONE,
        context: 1,
        engines: false,
        during_backward: false,
        piece: PIECE,
    };

    /// A rank of a run on one node.
    pub fn node(shard: Rank) -> Self {
        Self { shard, ..Self::ALONE }
    }

    /// The position of this rank among all ranks, which are numbered node by node.
    pub fn rank(&self) -> Rank {
        let Self { shard, replica, .. } = self;
        Rank { index: replica.index * shard.of + shard.index, of: replica.of * shard.of }
    }

    /// The position of this rank's group among the groups that work on separate sequences. Without context parallelism,
    /// each rank is such a group.
    pub fn data(&self) -> Rank {
        let Rank { index, of } = self.rank();
        Rank { index: index / self.context, of: of / self.context }
    }

    /// The position of this rank among the ranks that work on the same sequences.
    pub fn part(&self) -> Rank {
        Rank { index: self.rank().index % self.context, of: self.context }
    }

    /// Agrees on the mesh: every rank reports its index on its node, and the number of ranks on the node.
    ///
    /// # Errors
    /// When nodes have different numbers of ranks, the ranks of a node are not adjacent, or a group that shares a
    /// sequence would span nodes.
    pub fn agree(channel: &ControlChannel, local: Rank, context: usize) -> Result<Self> {
        let rank = channel.rank();
        let place = channel.share("node", &format!("{} of {}", local.index, local.of));
        for (index, place) in place.iter().enumerate() {
            let expected = format!("{} of {}", index % local.of, local.of);
            let uneven = |got, allowed| {
                Err(Error::new("the ranks are not distributed evenly among the nodes")
                    .got(got)
                    .allowed(allowed)
                    .hint("all nodes need the same number of ranks, numbered consecutively: srun --ntasks-per-node, --distribution=block"))
            };
            if *place != expected {
                let because = format!("the node of rank {} has {} ranks", rank.index, local.of);
                return uneven(
                    format!("rank {index} of {} is rank {place} on its node", rank.of),
                    format!("rank {expected}, because {because}"),
                );
            }
            if !rank.of.is_multiple_of(local.of) {
                return uneven(
                    format!("{} ranks, {} on this node", rank.of, local.of),
                    format!("a multiple of {} ranks", local.of),
                );
            }
        }
        if !local.of.is_multiple_of(context) {
            return Err(Error::new("the ranks of a node do not divide into groups that share a sequence")
                .got(format!("--context-parallel {context}, {} ranks on a node", local.of))
                .allowed("a divisor of the number of ranks on a node")
                .hint(format!("--gpus {context}, or a multiple of it")));
        }
        let node = rank.index / local.of;
        Ok(Self {
            shard: local,
            replica: Rank { index: node, of: rank.of / local.of },
            context,
            ..Self::ALONE
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_numbered_node_by_node_and_group_by_group() {
        for index in 0..12 {
            let mesh = Mesh {
                shard: Rank { index: index % 4, of: 4 },
                replica: Rank { index: index / 4, of: 3 },
                context: 2,
                ..Mesh::ALONE
            };
            assert_eq!(mesh.rank(), Rank { index, of: 12 });
            assert_eq!(mesh.data(), Rank { index: index / 2, of: 6 });
            assert_eq!(mesh.part(), Rank { index: index % 2, of: 2 });
        }
    }
}
