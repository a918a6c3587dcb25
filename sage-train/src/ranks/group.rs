//! Collective operations on tensors: all-to-all and all-gather. They only move data. To sum over ranks, the caller adds
//! the received tensors in the order of the ranks, so that sums are bit-identical for every [`Transport`].

use std::rc::Rc;

use candle_core::{DType, Device, Result, Tensor};

use super::mesh::Rank;
use super::transport::{Swap, Transfer, Transport};

/// A group of ranks that includes this rank. Its members exchange contiguous tensors. Each member's tensors are on that
/// member's device. All members must make the same calls in the same order.
#[derive(Debug, Clone)]
pub struct Group {
    /// `None` in a group of one rank.
    transport: Option<Rc<dyn Transport>>,
    /// The position of this rank among the members.
    rank: Rank,
    /// The first member's index among all ranks.
    first: usize,
    /// The difference between the indexes of consecutive members.
    step: usize,
    /// Whether the members are all the ranks of one node. Such a group may use collectives on the copy engines (units
    /// of the GPU that only copy memory).
    node: bool,
}

impl Group {
    /// A group of one rank.
    pub fn alone() -> Self {
        Self { transport: None, rank: Rank::ALONE, first: 0, step: 1, node: false }
    }

    /// A group of `rank.of` ranks: `first`, `first + step`, ... among all ranks.
    pub(super) fn new(transport: &Rc<dyn Transport>, rank: Rank, first: usize, step: usize) -> Self {
        let transport = (rank.of > 1).then(|| transport.clone());
        Self { transport, rank, first, step, node: false }
    }

    /// The group of all ranks of a node.
    pub(super) fn node(transport: &Rc<dyn Transport>, rank: Rank, first: usize) -> Self {
        Self { node: true, ..Self::new(transport, rank, first, 1) }
    }

    /// The position of this rank among the members.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// A tensor of zeros: a buffer for frequent transfers by [`Group::exchange`] or [`Group::gather`]. Copy engines
    /// transfer only tensors whose memory this function has allocated. The memory may stay allocated until the process
    /// ends. All members must call this with the same size.
    ///
    /// # Errors
    /// When memory is short.
    pub fn zeros(&self, len: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        match self.of_node() {
            Some(transport) if len > 0 => transport.zeros(len, dtype, device),
            _ => Tensor::zeros(len, dtype, device),
        }
    }

    /// Copies vector `x` into a tensor from [`Group::zeros`]. In a group of one rank, returns `x` itself.
    ///
    /// # Errors
    /// When memory is short.
    pub fn shared(&self, x: Tensor) -> Result<Tensor> {
        if self.rank.of == 1 {
            return Ok(x);
        }
        let shared = self.zeros(x.elem_count(), x.dtype(), x.device())?;
        shared.slice_set(&x, 0, 0)?;
        Ok(shared)
    }

    /// The transport, if the members are all the ranks of one node. Only such a group may use the transport's
    /// collectives.
    fn of_node(&self) -> Option<&dyn Transport> {
        self.transport.as_deref().filter(|_| self.node)
    }

    /// Exchanges tensors with every other member. `with` returns, for a member, pairs of a tensor to send and a tensor
    /// to receive into.
    ///
    /// # Errors
    /// When another rank cannot be reached.
    pub fn swap(&self, with: impl Fn(usize) -> Result<Vec<[Tensor; 2]>>) -> Result<Transfer> {
        self.send_receive(|member| {
            let (sent, comes) = with(member)?.into_iter().map(|[sent, comes]| (sent, comes)).unzip();
            Ok([sent, comes])
        })
    }

    /// As [`Group::swap`], but `with` returns two lists for a member: the tensors to send to the member, and buffers
    /// for the tensors that the member sends, in the order of sending. The lists may differ in length.
    ///
    /// # Errors
    /// When another rank cannot be reached.
    pub fn send_receive(&self, with: impl Fn(usize) -> Result<[Vec<Tensor>; 2]>) -> Result<Transfer> {
        let Some(transport) = &self.transport else { return Ok(Transfer::NONE) };
        let others = (0..self.rank.of).filter(|member| *member != self.rank.index);
        let swaps = others.map(|member| {
            let [sent, comes] = with(member)?;
            Ok(Swap { peer: self.first + member * self.step, sent, comes })
        });
        transport.swap(&swaps.collect::<Result<Vec<_>>>()?)
    }

    /// All-to-all. Part `j` of `from` is sent to member `j`, and part `i` of `into` is received from member `i`; this
    /// member's own part may or may not be copied. Both tensors have `rank.of` equal parts.
    ///
    /// # Errors
    /// When the tensors do not fit the group, or another rank cannot be reached.
    pub fn exchange(&self, from: &Tensor, into: &Tensor) -> Result<Transfer> {
        let of = self.rank.of;
        let part = from.elem_count() / of;
        if part * of != from.elem_count() || from.elem_count() != into.elem_count() {
            candle_core::bail!(
                "all-to-all of {} elements over {of} ranks: the receive buffer has {} elements, and both must be the same \
                 multiple of {of}",
                from.elem_count(),
                into.elem_count()
            );
        }
        if let Some(transport) = self.of_node()
            && let Some(transfer) = transport.all_to_all(from, into, of)?
        {
            return Ok(transfer);
        }
        let part = |all: &Tensor, member| all.narrow(0, member * part, part);
        self.swap(|member| Ok(vec![[part(from, member)?, part(into, member)?]]))
    }

    /// All-gather: `part` is sent to every member, and part `i` of `into` is received from member `i`. If `part` is not
    /// a view of `into`, it is copied to this member's part of `into`.
    ///
    /// # Errors
    /// When the tensors do not fit the group, or another rank cannot be reached.
    pub fn gather(&self, part: &Tensor, into: &Tensor) -> Result<Transfer> {
        let len = part.elem_count();
        if len * self.rank.of != into.elem_count() {
            candle_core::bail!(
                "all-gather of {len} elements from each of {} ranks: the receive buffer has {} elements",
                self.rank.of,
                into.elem_count()
            );
        }
        if !share_memory(part, into) {
            into.slice_set(part, 0, self.rank.index * len)?;
        }
        let of = |member| into.narrow(0, member * len, len);
        let part = of(self.rank.index)?;
        if let Some(transport) = self.of_node()
            && let Some(transfer) = transport.all_gather(&part, into)?
        {
            return Ok(transfer);
        }
        self.swap(|member| Ok(vec![[part.clone(), of(member)?]]))
    }

    /// Makes all later work on the device's stream wait for this transfer and for all transfers before it.
    ///
    /// # Errors
    /// When the device fails.
    pub fn wait(&self, transfer: Transfer) -> Result<()> {
        self.transport.as_ref().map_or(Ok(()), |transport| transport.wait(transfer))
    }
}

/// Whether two tensors are views of the same storage.
fn share_memory(a: &Tensor, b: &Tensor) -> bool {
    let ((a, _), (b, _)) = (a.storage_and_layout(), b.storage_and_layout());
    std::ptr::eq(&raw const *a, &raw const *b)
}
