//! What carries tensors between ranks.

use std::fmt::Debug;

use candle_core::{Result, Tensor};

/// Something that travels, by its number. The device may compute meanwhile; what was sent and what comes must stay until it was
/// waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "what was sent has not come yet"]
pub struct Transfer(pub(super) u64);

/// What two ranks send each other: tensors of one dimension without gaps.
#[derive(Debug)]
pub(super) struct Swap {
    /// The other one.
    pub(super) peer: usize,
    /// What it gets.
    pub(super) sent: Tensor,
    /// Where what it sends comes to.
    pub(super) comes: Tensor,
}

/// Carries tensors, between ranks that call in one order. It adds nothing.
pub(super) trait Transport: Debug {
    /// Sends and receives all at once, when the device has come so far.
    ///
    /// # Errors
    /// When a rank cannot be reached.
    fn swap(&self, swaps: &[Swap]) -> Result<Transfer>;

    /// What the device is given from here on finds what came with this transfer, and with all before.
    ///
    /// # Errors
    /// When the device fails.
    fn wait(&self, transfer: Transfer) -> Result<()>;
}
