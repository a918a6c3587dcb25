//! The interface of the transports, which carry tensors between ranks.

use std::fmt::Debug;
use std::time::Duration;

use candle_core::{DType, Device, Result, Tensor};
use candle_sage::Error;
use clap::ValueEnum;

/// Whether copy engines (units of the GPU that only copy memory) transfer gradients and weights within a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum CopyEngines {
    /// Copy engines if NCCL can use them (NCCL 2.28 or later, GPUs that can access each other's memory), else NCCL's
    /// kernels
    #[default]
    Auto,
    /// Copy engines, or an error if NCCL cannot use them
    On,
    /// NCCL's kernels, which occupy multiprocessors
    Off,
}

/// The number of a transfer. The device may compute during the transfer. The tensors that the transfer reads or writes
/// must stay alive until it has been waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "the transfer is complete only after a wait"]
pub struct Transfer(pub(super) u64);

impl Transfer {
    /// No transfer, in a group of one rank.
    pub const NONE: Self = Self(0);
}

/// An exchange of contiguous tensors with one other rank. A rank must send as many tensors as the other rank receives,
/// with the same sizes.
#[derive(Debug)]
pub(super) struct Swap {
    /// Index of the other rank among all ranks.
    pub(super) peer: usize,
    /// The tensors to send, in order.
    pub(super) sent: Vec<Tensor>,
    /// The tensors to receive into, in the order in which the other rank sends.
    pub(super) comes: Vec<Tensor>,
}

/// How long a rank with a failed transfer waits before it reports its own error. In this time the threads of
/// [`ControlConnection`](super::control::ControlConnection) can report a rank that died and end the process.
const WATCH: Duration = Duration::from_secs(8);

/// Returns the error of a failed transfer, after a delay of [`WATCH`].
pub(super) fn wait_for_report(error: Error) -> Error {
    std::thread::sleep(WATCH);
    error
}

/// Transfers tensors between ranks that make the same calls in the same order. A transport does no arithmetic.
pub(super) trait Transport: Debug {
    /// Starts a transfer that makes all the exchanges. It begins after all earlier work on the device's stream.
    ///
    /// # Errors
    /// When another rank cannot be reached.
    fn swap(&self, swaps: &[Swap]) -> Result<Transfer>;

    /// Whether this node's ranks can use `all_to_all` and `all_gather`.
    fn has_engines(&self) -> bool {
        false
    }

    /// A tensor of zeros that [`Transport::all_to_all`] and [`Transport::all_gather`] can transfer. Its memory may stay
    /// allocated until the process ends. All ranks of the node must call this with the same size.
    ///
    /// # Errors
    /// When memory is short.
    fn zeros(&self, len: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        Tensor::zeros(len, dtype, device)
    }

    /// All-to-all among the `of` ranks of this node. `None` unless [`Transport::has_engines`] is true and both tensors
    /// were made by [`Transport::zeros`].
    ///
    /// # Errors
    /// When another rank cannot be reached.
    fn all_to_all(&self, _from: &Tensor, _into: &Tensor, _of: usize) -> Result<Option<Transfer>> {
        Ok(None)
    }

    /// All-gather among this node's ranks. `None` in the same cases as for [`Transport::all_to_all`].
    ///
    /// # Errors
    /// When another rank cannot be reached.
    fn all_gather(&self, _part: &Tensor, _into: &Tensor) -> Result<Option<Transfer>> {
        Ok(None)
    }

    /// Makes all later work on the device's stream wait for this transfer and for all transfers before it.
    ///
    /// # Errors
    /// When the device fails.
    fn wait(&self, transfer: Transfer) -> Result<()>;
}
