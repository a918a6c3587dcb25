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

/// Ranks that exchange tensors of one dimension without gaps, on their device, in the order in which all of them call.
pub trait Group: Debug {
    /// Which one this is.
    fn rank(&self) -> Rank;

    /// All to all: part `j` of `from` goes to rank `j`, and part `i` of `into` comes from rank `i`. Both are of one length, a
    /// multiple of the ranks.
    ///
    /// # Errors
    /// When a rank cannot be reached.
    fn exchange(&self, from: &Tensor, into: &Tensor) -> Result<()>;

    /// All gather: `part` goes to everybody, and part `i` of `into` comes from rank `i`. `part` may be this rank's own part of
    /// `into`.
    ///
    /// # Errors
    /// When a rank cannot be reached.
    fn gather(&self, part: &Tensor, into: &Tensor) -> Result<()>;
}

/// The only rank.
#[derive(Debug)]
pub struct Alone;

impl Group for Alone {
    fn rank(&self) -> Rank {
        Rank::ALONE
    }

    fn exchange(&self, from: &Tensor, into: &Tensor) -> Result<()> {
        into.slice_set(from, 0, 0)
    }

    fn gather(&self, part: &Tensor, into: &Tensor) -> Result<()> {
        if part.elem_count() != into.elem_count() {
            candle_core::bail!("a part of {} elements for {}", part.elem_count(), into.elem_count());
        }
        Ok(())
    }
}
