//! One sequence over several ranks, as DeepSpeed-Ulysses has it (arXiv 2309.14509, section 3): each has neighbouring tokens of
//! all sequences, and for attention some heads of all tokens. Attention itself sees whole sequences, as it does on one rank.

use candle_core::{DType, Result, Tensor};

use crate::ranks::Group;

/// Carries heads between ranks that have one sequence together.
#[derive(Debug, Clone)]
pub(super) struct Ulysses {
    group: Group,
    /// Of queries, and of keys or values; of all ranks.
    heads: [usize; 2],
}

/// What lies side by side in a tensor of heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Heads {
    /// Queries, or outputs.
    Queries,
    /// Keys, or values.
    Keys,
}

impl Ulysses {
    /// With so many heads of queries and of keys, which divide by the ranks; or each key head is the same for several ranks.
    pub(super) fn new(group: &Group, heads: [usize; 2]) -> Self {
        Self { group: group.clone(), heads }
    }

    /// Ranks of the group.
    pub(super) fn ranks(&self) -> usize {
        self.group.rank().of
    }

    /// Heads of queries and of keys, of all ranks.
    pub(super) fn heads(&self) -> [usize; 2] {
        self.heads
    }

    /// With how many each rank attends.
    pub(super) fn own(&self) -> [usize; 2] {
        [self.own_of(Heads::Queries), self.own_of(Heads::Keys)]
    }

    fn heads_of(&self, kind: Heads) -> usize {
        self.heads[usize::from(kind == Heads::Keys)]
    }

    fn own_of(&self, kind: Heads) -> usize {
        (self.heads_of(kind) / self.ranks()).max(1)
    }

    /// (batch, own tokens, heads of all kinds, head_dim) -> (batch, tokens, own heads of all kinds, head_dim).
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

    /// The way back: (batch, tokens, own heads of all kinds, head_dim) -> (batch, own tokens, heads of all kinds, head_dim).
    /// What several ranks have of one key head is added up in f32, in their order.
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

    /// Part `j` goes to rank `j`; what came of each, one behind the other.
    fn all_to_all(&self, parts: &[Tensor]) -> Result<Tensor> {
        let flat = parts.iter().map(|part| part.contiguous()?.flatten_all()).collect::<Result<Vec<_>>>()?;
        let len: usize = flat.iter().map(Tensor::elem_count).sum();
        let into = Tensor::zeros(len, parts[0].dtype(), parts[0].device())?;
        let transfer = self.group.all_to_all(&flat, &into)?;
        self.group.wait(transfer)?;
        Ok(into)
    }
}

/// The same as in f32, rounded once.
fn sum_in_order(parts: &[Tensor]) -> Result<Tensor> {
    let (first, rest) = parts.split_first().expect("at least one rank");
    let sum =
        rest.iter().try_fold(first.to_dtype(DType::F32)?, |sum, part| sum + part.to_dtype(DType::F32)?)?;
    sum.to_dtype(first.dtype())
}
