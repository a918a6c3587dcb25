//! The interface of the transports, which carry tensors between ranks.

use std::fmt::Debug;

use candle_core::{Result, Tensor};

/// The number of a transfer. The device may compute during the transfer; the tensors that are sent and
/// received into must stay alive until the transfer was waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "what was sent has not come yet"]
pub struct Transfer(pub(super) u64);

/// An exchange with one other rank, of contiguous tensors. Both ranks send as many, of the sizes that the other expects.
#[derive(Debug)]
pub(super) struct Swap {
    /// Index of the other rank among all ranks.
    pub(super) peer: usize,
    /// The tensors to send, in order.
    pub(super) sent: Vec<Tensor>,
    /// The tensors to receive into, in the order in which the other rank sends.
    pub(super) comes: Vec<Tensor>,
}

/// Carries tensors between ranks that make the same calls in the same order. It adds nothing.
pub(super) trait Transport: Debug {
    /// Starts all exchanges together, after the work that the device was given so far.
    ///
    /// # Errors
    /// When another rank cannot be reached.
    fn swap(&self, swaps: &[Swap]) -> Result<Transfer>;

    /// Makes all later work on the device's stream wait for this transfer and for all transfers before it.
    ///
    /// # Errors
    /// When the device fails.
    fn wait(&self, transfer: Transfer) -> Result<()>;
}
