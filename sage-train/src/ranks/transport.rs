//! The interface of the transports, which carry tensors between ranks.

use std::fmt::Debug;
use std::time::Duration;

use candle_core::{DType, Device, Result, Tensor};
use candle_sage::Error;
use clap::ValueEnum;

/// Whether copy engines carry gradients and updated weights among the ranks of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum CopyEngines {
    /// Copy engines if NCCL can use them (version 2.28 or later, GPUs that can access each other's memory), else its
    /// kernels
    #[default]
    Auto,
    /// Copy engines, or an error if NCCL cannot use them. With one GPU per node the setting has no effect
    On,
    /// NCCL's kernels, which occupy multiprocessors
    Off,
}

/// The number of a transfer. The device may compute during the transfer; the tensors that are sent and received into
/// must stay alive until the transfer has been waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "the transfer is complete only after a wait"]
pub struct Transfer(pub(super) u64);

impl Transfer {
    /// No transfer, in a group of one rank.
    pub const NONE: Self = Self(0);
}

/// An exchange of contiguous tensors with one other rank. Each rank sends as many tensors, of the same sizes, as the
/// other expects.
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
/// [`ControlConnection`](super::control::ControlConnection) can report the dead rank and end the process.
const WATCH: Duration = Duration::from_secs(8);

/// The error of a failed transfer, returned after the control channel had time to report the rank that died. Without
/// the wait, a rank whose transfer fails first would exit with its own error instead of the code of a lost rank.
pub(super) fn wait_for_report(error: Error) -> Error {
    std::thread::sleep(WATCH);
    error
}

/// Transfers tensors between ranks that make the same calls in the same order. A transport only copies.
pub(super) trait Transport: Debug {
    /// Starts all exchanges together, after the work that the device has been given so far.
    ///
    /// # Errors
    /// When another rank cannot be reached.
    fn swap(&self, swaps: &[Swap]) -> Result<Transfer>;

    /// Whether this node's ranks have the collectives below.
    fn has_engines(&self) -> bool {
        false
    }

    /// Zeros in memory that the collectives below can transfer. The memory may stay allocated until the process ends.
    /// All ranks of the node must call this with the same size.
    ///
    /// # Errors
    /// When memory is short.
    fn zeros(&self, len: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        Tensor::zeros(len, dtype, device)
    }

    /// All-to-all of the `of` ranks of this node; `None` unless the node has copy engines and both tensors were made by
    /// [`Transport::zeros`].
    ///
    /// # Errors
    /// When another rank cannot be reached.
    fn all_to_all(&self, _from: &Tensor, _into: &Tensor, _of: usize) -> Result<Option<Transfer>> {
        Ok(None)
    }

    /// All-gather of the ranks of this node, on the conditions of [`Transport::all_to_all`].
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
