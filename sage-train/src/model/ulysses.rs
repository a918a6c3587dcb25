//! Sequence parallelism as in DeepSpeed-Ulysses (arXiv 2309.14509, section 3): each rank has consecutive tokens of all
//! sequences and, for attention, some heads of all tokens. Attention therefore sees whole sequences, as on a single
//! rank.

use candle_core::{DType, Result, Tensor};
use candle_sage::ops;

use crate::ranks::Group;

/// The all-to-all of heads between the ranks that share each sequence.
#[derive(Debug, Clone)]
pub(super) struct Ulysses {
    group: Group,
    /// Numbers of query heads, and of key (or value) heads, over all ranks.
    heads: [usize; 2],
}

/// A kind of attention heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Heads {
    /// Heads of queries, or of outputs.
    Queries,
    /// Heads of keys, or of values.
    Keys,
}

impl Ulysses {
    /// `heads` are the numbers of query and key heads. The number of query heads is a multiple of the number of ranks.
    /// The number of key heads is a multiple or a divisor of the number of ranks. If it is smaller than the number of
    /// ranks, several ranks share each key head.
    pub(super) fn new(group: &Group, heads: [usize; 2]) -> Self {
        Self { group: group.clone(), heads }
    }

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

    /// The first query head and the first key head that this rank attends with.
    pub(super) fn first(&self) -> [usize; 2] {
        self.heads.map(|heads| self.group.rank().index * heads / self.ranks())
    }

    /// The sum of a scalar over all ranks. Every rank gets the same sum.
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

    /// (batch, own tokens, heads of `kinds`, head_dim) -> (batch, tokens, own heads of `kinds`, head_dim). Data to send
    /// is copied once. Received data arrives directly in the result.
    pub(super) fn to_heads(&self, x: &Tensor, kinds: &[Heads]) -> Result<Tensor> {
        let (batch, tokens, _, head_dim) = x.dims4()?;
        let (of, me) = (self.ranks(), self.group.rank().index);
        let own: usize = kinds.iter().map(|kind| self.own_of(*kind)).sum();
        let to_send = place((of * batch, tokens, own, head_dim), x)?;
        let out = place((batch, of * tokens, own, head_dim), x)?;
        // Copies the heads of `rank` from `x` to `into`.
        let gather = |rank: usize, into: &Tensor| -> Result<()> {
            let (mut first, mut before) = (0, 0);
            for kind in kinds {
                let count = self.own_of(*kind);
                let heads = x.narrow(2, before + rank * self.heads_of(*kind) / of, count)?;
                ops::copy_heads(&into.narrow(2, first, count)?, &heads)?;
                (first, before) = (first + count, before + self.heads_of(*kind));
            }
            Ok(())
        };
        for rank in (0..of).filter(|rank| *rank != me) {
            gather(rank, &to_send.narrow(0, rank * batch, batch)?)?;
        }
        let transfer = self.group.swap(|rank| {
            let sequence =
                |n| Ok([to_send.get(rank * batch + n)?, out.get(n)?.narrow(0, rank * tokens, tokens)?]);
            (0..batch).map(sequence).collect()
        })?;
        // Copies this rank's own part from `x` to `out` during the transfer. An error of this copy is returned only
        // after the transfer, which uses `to_send` and `out`.
        let own = out.narrow(1, me * tokens, tokens).and_then(|own| gather(me, &own));
        self.group.wait(transfer)?;
        own.map(|()| out)
    }

    /// The inverse of `to_heads`: (batch, tokens, own heads of `kinds`, head_dim) -> (batch, own tokens, heads of
    /// `kinds`, head_dim). If several ranks share a key head, their tensors for this head are summed in f32, in the
    /// order of the ranks.
    pub(super) fn to_tokens(&self, x: &Tensor, kinds: &[Heads]) -> Result<Tensor> {
        let x = x.contiguous()?;
        let (batch, tokens, own, head_dim) = x.dims4()?;
        let (of, me) = (self.ranks(), self.group.rank().index);
        let tokens = tokens / of;
        let came = place((of * batch, tokens, own, head_dim), &x)?;
        let all: usize = kinds.iter().map(|kind| self.heads_of(*kind)).sum();
        let out = place((batch, tokens, all, head_dim), &x)?;
        let part = |rank: usize, first: usize, count: usize| -> Result<Tensor> {
            match rank == me {
                true => x.narrow(1, me * tokens, tokens)?.narrow(2, first, count),
                false => came.narrow(0, rank * batch, batch)?.narrow(2, first, count),
            }
        };
        // Copies heads to their places in `out`. If `others` is false, these are the heads that only this rank
        // computed; if it is true, all remaining heads.
        let put = |others: bool| -> Result<()> {
            let (mut first, mut before) = (0, 0);
            for kind in kinds {
                let (count, heads) = (self.own_of(*kind), self.heads_of(*kind));
                let same = of * count / heads;
                for ranks in (0..of).step_by(same).map(|rank| rank..rank + same) {
                    if others != (ranks == (me..me + 1)) {
                        let into = out.narrow(2, before + ranks.start / same * count, count)?;
                        ops::copy_heads(&into, &sum_in_order(ranks.map(|rank| part(rank, first, count)))?)?;
                    }
                }
                (first, before) = (first + count, before + heads);
            }
            Ok(())
        };
        let transfer = self.group.swap(|rank| {
            let sequence = |n| Ok([x.get(n)?.narrow(0, rank * tokens, tokens)?, came.get(rank * batch + n)?]);
            (0..batch).map(sequence).collect()
        })?;
        let own = put(false);
        self.group.wait(transfer)?;
        own?;
        put(true)?;
        Ok(out)
    }
}

/// An uninitialized tensor with the type and device of `like`. Callers write every element before it is read.
fn place(dims: (usize, usize, usize, usize), like: &Tensor) -> Result<Tensor> {
    // SAFETY: [`Ulysses`] reads no element before a copy or a transfer has written it.
    #[allow(unsafe_code)]
    unsafe {
        Tensor::empty(dims, like.dtype(), like.device())
    }
}

/// The sum in f32, in the order of the parts, rounded once; a single part is returned unchanged.
fn sum_in_order(mut parts: impl ExactSizeIterator<Item = Result<Tensor>>) -> Result<Tensor> {
    let first = parts.next().expect("at least one rank")?;
    if parts.len() == 0 {
        return Ok(first);
    }
    let sum = parts.try_fold(first.to_dtype(DType::F32)?, |sum, part| sum + part?.to_dtype(DType::F32)?)?;
    sum.to_dtype(first.dtype())
}
