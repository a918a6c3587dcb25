//! Who the ranks are and how they lie: so many on each node, in groups that have one sequence together.

use std::ops::Range;

use candle_sage::{Error, Result};

use super::Words;

/// One of several processes, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rank {
    /// Which.
    pub index: usize,
    /// Of how many.
    pub of: usize,
}

impl Rank {
    /// The only one.
    pub const ALONE: Self = Self { index: 0, of: 1 };

    /// Whether it is the one that writes and speaks for all.
    pub fn is_first(self) -> bool {
        self.index == 0
    }

    /// Of `len` elements, a multiple of the ranks: this rank's part.
    pub fn part_of(self, len: usize) -> Range<usize> {
        let part = len / self.of;
        self.index * part..(self.index + 1) * part
    }
}

/// Where a rank lies. Optimizer states are sharded over the ranks of a node, and every node is a replica of the others (hybrid
/// sharding); neighbours on a node may have one sequence together (context parallel).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mesh {
    /// Which rank of its node.
    pub shard: Rank,
    /// Which node.
    pub replica: Rank,
    /// Ranks that have one sequence together.
    pub context: usize,
    /// Elements of gradient that travel at once, at least.
    pub piece: usize,
}

/// 680 MB of gradient: of several sizes this took two GPUs least for a model of 274M parameters (docs/several-gpus.md). Larger
/// pieces travel faster, and smaller ones leave less to wait for at the end.
pub const PIECE: usize = 170_000_000;

/// Where they travel beside a backward: 200 MB, a few layers.
pub const PIECE_BESIDE: usize = 50_000_000;

impl Mesh {
    /// Of the only rank.
    pub const ALONE: Self = Self { shard: Rank::ALONE, replica: Rank::ALONE, context: 1, piece: PIECE };

    /// Of ranks of one node.
    pub fn node(shard: Rank) -> Self {
        Self { shard, ..Self::ALONE }
    }

    /// Which of all ranks.
    pub fn rank(&self) -> Rank {
        let Self { shard, replica, .. } = self;
        Rank { index: replica.index * shard.of + shard.index, of: replica.of * shard.of }
    }

    /// Which of the groups that have sequences of their own: a rank, where each has.
    pub fn data(&self) -> Rank {
        let Rank { index, of } = self.rank();
        Rank { index: index / self.context, of: of / self.context }
    }

    /// Which part of its group's sequences.
    pub fn part(&self) -> Rank {
        Rank { index: self.rank().index % self.context, of: self.context }
    }

    /// What all ranks say of their nodes: which it is on its own, and of how many.
    ///
    /// # Errors
    /// When nodes have different numbers of ranks, their ranks are no neighbours, or groups would span nodes.
    pub fn agree(words: &Words, local: Rank, context: usize) -> Result<Self> {
        let rank = words.rank();
        let said = words.share("node", &format!("{} of {}", local.index, local.of))?;
        for (index, said) in said.iter().enumerate() {
            let expected = format!("{} of {}", index % local.of, local.of);
            if *said != expected || !rank.of.is_multiple_of(local.of) {
                return Err(Error::new("the ranks are not dealt out evenly among the nodes")
                    .got(format!("rank {index} of {} is {said} on its node", rank.of))
                    .allowed(format!("{expected}, as the number of rank {} has it", rank.index))
                    .hint("every node needs as many ranks, and neighbours on one: srun --ntasks-per-node, --distribution=block"));
            }
        }
        if !local.of.is_multiple_of(context) {
            return Err(Error::new("the ranks of a node do not divide into groups that share a sequence")
                .got(format!("--context-parallel {context}, {} ranks on a node", local.of))
                .allowed("a divisor of the ranks of a node")
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
