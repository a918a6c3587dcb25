//! Sequence parallelism as in DeepSpeed-Ulysses (arXiv 2309.14509, section 3): each rank has consecutive
//! tokens of all sequences and, for attention, some heads of all tokens. Attention therefore sees whole
//! sequences, as it does on one rank.

use candle_core::{DType, Result, Tensor};

use crate::ranks::Group;

/// The all-to-all of heads between the ranks that share each sequence.
#[derive(Debug, Clone)]
pub(super) struct Ulysses {
    group: Group,
    /// Numbers of query heads, and of key (or value) heads, over all ranks.
    heads: [usize; 2],
}

/// A kind of heads in a tensor that concatenates several kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Heads {
    /// Heads of queries, or of outputs.
    Queries,
    /// Heads of keys, or of values.
    Keys,
}

impl Ulysses {
    /// For these numbers of query and key heads. Both are multiples of the ranks, except that several ranks
    /// may share each key head.
    pub(super) fn new(group: &Group, heads: [usize; 2]) -> Self {
        Self { group: group.clone(), heads }
    }

    /// Number of ranks in the group.
    pub(super) fn ranks(&self) -> usize {
        self.group.rank().of
    }

    /// Numbers of query heads and of key heads, over all ranks.
    pub(super) fn heads(&self) -> [usize; 2] {
        self.heads
    }

    /// Numbers of query heads and of key heads that this rank attends with.
    pub(super) fn own(&self) -> [usize; 2] {
        [self.own_of(Heads::Queries), self.own_of(Heads::Keys)]
    }

    /// The first of the query heads, and of the key heads, that this rank attends with.
    pub(super) fn first(&self) -> [usize; 2] {
        self.heads.map(|heads| self.group.rank().index * heads / self.ranks())
    }

    /// The sum of a scalar over all ranks, in their order.
    pub(super) fn sum(&self, x: &Tensor) -> Result<Tensor> {
        let all = Tensor::zeros(self.ranks(), x.dtype(), x.device())?;
        let transfer = self.group.gather(&x.reshape(1)?, &all)?;
        self.group.wait(transfer)?;
        all.sum_all()
    }

    fn heads_of(&self, kind: Heads) -> usize {
        self.heads[usize::from(kind == Heads::Keys)]
    }

    fn own_of(&self, kind: Heads) -> usize {
        (self.heads_of(kind) / self.ranks()).max(1)
    }

    /// (batch, own tokens, heads of all kinds, head_dim) -> (batch, tokens, own heads of all kinds,
    /// head_dim).
    pub(super) fn to_heads(&self, x: &Tensor, kinds: &[Heads]) -> Result<Tensor> {
        let (batch, tokens, _, head_dim) = x.dims4()?;
        let of = self.ranks();
        let of_rank = |rank: usize| {
            let mut before = 0;
            let runs = kinds.iter().map(|kind| {
                let first = before + rank * self.heads_of(*kind) / of;
                before += self.heads_of(*kind);
                x.narrow(2, first, self.own_of(*kind))
            });
            Tensor::cat(&runs.collect::<Result<Vec<_>>>()?, 2)
        };
        let came = self.all_to_all(&(0..of).map(of_rank).collect::<Result<Vec<_>>>()?)?;
        let own: usize = kinds.iter().map(|kind| self.own_of(*kind)).sum();
        let came = came.reshape((of, batch, tokens, own, head_dim))?.transpose(0, 1)?;
        came.contiguous()?.reshape((batch, of * tokens, own, head_dim))
    }

    /// The inverse: (batch, tokens, own heads of all kinds, head_dim) -> (batch, own tokens, heads of all
    /// kinds, head_dim). If several ranks share a key head, their values are summed in f32, in the order of
    /// the ranks.
    pub(super) fn to_tokens(&self, x: &Tensor, kinds: &[Heads]) -> Result<Tensor> {
        let (batch, tokens, own, head_dim) = x.dims4()?;
        let of = self.ranks();
        let tokens = tokens / of;
        let of_rank = |rank: usize| x.narrow(1, rank * tokens, tokens);
        let came = self.all_to_all(&(0..of).map(of_rank).collect::<Result<Vec<_>>>()?)?;
        let came = came.reshape((of, batch, tokens, own, head_dim))?;
        let (mut first, mut all) = (0, Vec::new());
        for kind in kinds {
            let count = self.own_of(*kind);
            let parts = (0..of).map(|rank| came.get(rank)?.narrow(2, first, count));
            let parts = parts.collect::<Result<Vec<_>>>()?;
            first += count;
            match of * count / self.heads_of(*kind) {
                1 => all.extend(parts),
                same => {
                    let sums = parts.chunks(same).map(sum_in_order);
                    all.extend(sums.collect::<Result<Vec<_>>>()?);
                }
            }
        }
        Tensor::cat(&all, 2)
    }

    /// Sends part `j` to rank `j`. Returns the received parts, concatenated in the order of the ranks.
    fn all_to_all(&self, parts: &[Tensor]) -> Result<Tensor> {
        let flat = parts.iter().map(|part| part.contiguous()?.flatten_all()).collect::<Result<Vec<_>>>()?;
        let len: usize = flat.iter().map(Tensor::elem_count).sum();
        let into = Tensor::zeros(len, parts[0].dtype(), parts[0].device())?;
        let transfer = self.group.all_to_all(&flat, &into)?;
        self.group.wait(transfer)?;
        Ok(into)
    }
}

/// The sum in f32, in the order of the parts, rounded once.
fn sum_in_order(parts: &[Tensor]) -> Result<Tensor> {
    let (first, rest) = parts.split_first().expect("at least one rank");
    let sum =
        rest.iter().try_fold(first.to_dtype(DType::F32)?, |sum, part| sum + part.to_dtype(DType::F32)?)?;
    sum.to_dtype(first.dtype())
}
