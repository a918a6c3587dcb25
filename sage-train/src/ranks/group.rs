//! What ranks do with each other's tensors: three ways of carrying numbers, and no arithmetic. Every addition is ours, in the
//! order of the ranks, so that sums have the same bits whatever carried the parts.

use std::rc::Rc;

use candle_core::{Result, Tensor};

use super::mesh::Rank;
use super::transport::{Swap, Transfer, Transport};

/// Some of the ranks, this one among them. They exchange tensors of one dimension without gaps, on their device, in the order in
/// which all of them call.
#[derive(Debug, Clone)]
pub struct Group {
    /// None where it is alone.
    transport: Option<Rc<dyn Transport>>,
    /// Which member this one is.
    rank: Rank,
    /// The first of them among all ranks, and how far they are apart.
    first: usize,
    step: usize,
}

impl Group {
    /// The only one.
    pub fn alone() -> Self {
        Self { transport: None, rank: Rank::ALONE, first: 0, step: 1 }
    }

    /// `rank.of` ranks from the `first` of all on, `step` apart.
    pub(super) fn new(transport: &Rc<dyn Transport>, rank: Rank, first: usize, step: usize) -> Self {
        let transport = (rank.of > 1).then(|| transport.clone());
        Self { transport, rank, first, step }
    }

    /// Which member this one is.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Swaps with each other member, by its number among them.
    fn swap(&self, with: impl Fn(usize) -> Result<[Tensor; 2]>) -> Result<Transfer> {
        let Some(transport) = &self.transport else { return Ok(Transfer(0)) };
        let others = (0..self.rank.of).filter(|member| *member != self.rank.index);
        let swaps = others.map(|member| {
            let [sent, comes] = with(member)?;
            Ok(Swap { peer: self.first + member * self.step, sent, comes })
        });
        transport.swap(&swaps.collect::<Result<Vec<_>>>()?)
    }

    /// All to all: part `j` of `from` goes to member `j`, and what member `i` sends comes to `into`, one behind the other in
    /// their order. A member keeps its own part: `into` has one part fewer than `from`, whose parts are equal.
    ///
    /// # Errors
    /// When a rank cannot be reached.
    pub fn exchange(&self, from: &Tensor, into: &Tensor) -> Result<Transfer> {
        let Rank { index, of } = self.rank;
        let part = from.elem_count() / of;
        if part * of != from.elem_count() || part * (of - 1) != into.elem_count() {
            candle_core::bail!("{} elements of {of} ranks for {}", from.elem_count(), into.elem_count());
        }
        self.swap(|member| {
            let comes = member - usize::from(member > index);
            Ok([from.narrow(0, member * part, part)?, into.narrow(0, comes * part, part)?])
        })
    }

    /// All to all, where `into` has every part, this member's own among them: `parts[j]` goes to member `j`.
    ///
    /// # Errors
    /// When a rank cannot be reached.
    pub fn all_to_all(&self, parts: &[Tensor], into: &Tensor) -> Result<Transfer> {
        let Rank { index, of } = self.rank;
        let len = into.elem_count() / of;
        if parts.len() != of || parts.iter().any(|part| part.elem_count() != len) {
            candle_core::bail!("{} parts of {of} ranks for {}", parts.len(), into.elem_count());
        }
        let transfer = self.swap(|member| Ok([parts[member].clone(), into.narrow(0, member * len, len)?]))?;
        // Beside what travels.
        into.slice_set(&parts[index], 0, index * len)?;
        Ok(transfer)
    }

    /// All gather: `part` goes to everybody, and part `i` of `into` comes from member `i`. `part` may be this member's own part
    /// of `into`, which is filled in any case.
    ///
    /// # Errors
    /// When a rank cannot be reached.
    pub fn gather(&self, part: &Tensor, into: &Tensor) -> Result<Transfer> {
        let len = part.elem_count();
        if len * self.rank.of != into.elem_count() {
            candle_core::bail!("{} times {len} elements for {}", self.rank.of, into.elem_count());
        }
        if !share_memory(part, into) {
            into.slice_set(part, 0, self.rank.index * len)?;
        }
        self.swap(|member| Ok([part.clone(), into.narrow(0, member * len, len)?]))
    }

    /// What the device is given from here on finds what came with this transfer, and with all before.
    ///
    /// # Errors
    /// When the device fails.
    pub fn wait(&self, transfer: Transfer) -> Result<()> {
        self.transport.as_ref().map_or(Ok(()), |transport| transport.wait(transfer))
    }
}

/// Whether they are views of one memory: then the one is where it belongs in the other.
fn share_memory(a: &Tensor, b: &Tensor) -> bool {
    let ((a, _), (b, _)) = (a.storage_and_layout(), b.storage_and_layout());
    std::ptr::eq(&raw const *a, &raw const *b)
}
