//! What ranks do with each other's tensors: two ways of carrying numbers, and no arithmetic. Every addition is ours, in the
//! order of the ranks, so that sums have the same bits whatever carried the parts.

use std::fmt::Debug;

use candle_core::{Result, Tensor};

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
    pub fn part_of(self, len: usize) -> std::ops::Range<usize> {
        let part = len / self.of;
        self.index * part..(self.index + 1) * part
    }
}

/// Something that travels, by its number. The device may compute meanwhile; what was sent and what comes must stay until it was
/// waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "what was sent has not come yet"]
pub struct Transfer(pub(super) u64);

/// Ranks that exchange tensors of one dimension without gaps, on their device, in the order in which all of them call.
pub trait Group: Debug {
    /// All to all: part `j` of `from` goes to rank `j`, and what rank `i` sends comes to `into`, one behind the other in their
    /// order. A rank keeps its own part: `into` has one part fewer than `from`, whose parts are equal.
    ///
    /// # Errors
    /// When a rank cannot be reached.
    fn exchange(&self, from: &Tensor, into: &Tensor) -> Result<Transfer>;

    /// All gather: `part` goes to everybody, and part `i` of `into` comes from rank `i`. `part` may be this rank's own part of
    /// `into`, which is filled in any case.
    ///
    /// # Errors
    /// When a rank cannot be reached.
    fn gather(&self, part: &Tensor, into: &Tensor) -> Result<Transfer>;

    /// What the device is given from here on finds what came with this transfer, and with all before.
    ///
    /// # Errors
    /// When the device fails.
    fn wait(&self, transfer: Transfer) -> Result<()>;
}

/// The only rank.
#[derive(Debug)]
pub struct Alone;

impl Group for Alone {
    fn exchange(&self, from: &Tensor, into: &Tensor) -> Result<Transfer> {
        match into.elem_count() {
            0 => Ok(Transfer(0)),
            more => candle_core::bail!("{} elements of one rank, and {more} of others", from.elem_count()),
        }
    }

    fn gather(&self, part: &Tensor, into: &Tensor) -> Result<Transfer> {
        if part.elem_count() != into.elem_count() {
            candle_core::bail!("a part of {} elements for {}", part.elem_count(), into.elem_count());
        }
        Ok(Transfer(0))
    }

    fn wait(&self, _: Transfer) -> Result<()> {
        Ok(())
    }
}
