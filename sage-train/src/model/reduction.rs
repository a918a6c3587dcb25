//! The reduction of gradients over all ranks, one piece of parameter memory at a time: a reduce-scatter within each
//! node, and an all-reduce of each shard between nodes.

use candle_core::{Result, Tensor};
use candle_sage::ops;

use super::parameters::Parameters;
use crate::ranks::{Ranks, Transfer};

/// A piece whose transfer is in flight.
#[derive(Debug)]
struct PendingTransfer {
    piece: usize,
    /// The receive buffer: the gradients of this rank's shard of the piece, from every rank of the node.
    parts: Tensor,
    transfer: Transfer,
}

/// Sums the gradients of all ranks, in the order of the ranks. Each rank sums its shard of each piece, first over the
/// ranks of its node, then over the nodes. All ranks send the pieces in the same order. The transfer of a piece
/// overlaps with the summation of the piece before it.
#[derive(Debug)]
pub struct Reduction<'a> {
    parameters: &'a Parameters,
    ranks: &'a Ranks,
    order: Vec<usize>,
    sent: usize,
    coming: Option<PendingTransfer>,
    /// For each piece, the sum of squares of the gradients in this rank's shard, after summation over all ranks.
    squares: Vec<Option<Tensor>>,
}

impl<'a> Reduction<'a> {
    /// A reduction that has sent nothing yet. If `Mesh::during_backward` is set, the caller calls
    /// [`Reduction::send_after`] for each layer. Otherwise [`Reduction::finish`] sends all pieces.
    pub fn new(parameters: &'a Parameters, ranks: &'a Ranks) -> Self {
        let during_backward = ranks.mesh().during_backward;
        let pieces = 0..parameters.layout.pieces.len();
        let squares = pieces.clone().map(|_| None).collect();
        let order = if during_backward { parameters.layout.backward_order() } else { pieces.collect() };
        Self { parameters, ranks, order, sent: 0, coming: None, squares }
    }

    /// Called when the backward of a step's last micro-batch has finished `layer`. (A backward runs from the last layer
    /// to the first.) Sends the pieces whose gradients are now complete.
    ///
    /// # Errors
    /// When a rank cannot be reached.
    pub fn send_after(&mut self, layer: usize) -> Result<()> {
        let pieces = &self.parameters.layout.pieces;
        while let Some(&piece) = self.order.get(self.sent) {
            if pieces[piece].first_layer.is_none_or(|first| first < layer) {
                break;
            }
            self.send(piece)?;
        }
        Ok(())
    }

    /// Called when all gradients are complete: sends the gradients of the remaining pieces and sums them over ranks.
    /// Returns the sum of squares of the gradients in this rank's shards, an f64 scalar.
    ///
    /// # Errors
    /// When the model was not made for training, a matrix received no gradient, or another rank cannot be reached.
    pub fn finish(mut self) -> Result<Tensor> {
        self.parameters.check_filled()?;
        while let Some(&piece) = self.order.get(self.sent) {
            self.send(piece)?;
        }
        if let Some(last) = self.coming.take() {
            self.add(last)?;
        }
        let squares = self.squares.into_iter().flatten().map(Ok);
        match squares.reduce(|sum, of_piece: Result<Tensor>| sum? + of_piece?) {
            Some(squares) => squares,
            None => candle_core::bail!("the model has no parameters"),
        }
    }

    fn send(&mut self, piece: usize) -> Result<()> {
        let Parameters { layout, received, .. } = self.parameters;
        let gradients = self.parameters.gradients()?;
        let range = &layout.pieces[piece].range;
        let from = gradients.narrow(0, range.start, range.len())?;
        let shards = self.ranks.shards();
        let (parts, transfer) = match received {
            Some(received) if shards.rank().of > 1 => {
                let parts = received[self.sent % 2].narrow(0, 0, range.len())?;
                let transfer = shards.exchange(&from, &parts)?;
                (parts, transfer)
            }
            _ => (gradients.narrow(0, 0, 0)?, Transfer::NONE),
        };
        self.sent += 1;
        // Sum the previous piece now: the next call of `send` reuses that piece's receive buffer.
        let before = self.coming.replace(PendingTransfer { piece, parts, transfer });
        before.map_or(Ok(()), |before| self.add(before))
    }

    fn add(&mut self, PendingTransfer { piece, parts, transfer }: PendingTransfer) -> Result<()> {
        let shards = self.ranks.shards();
        let own = self.parameters.own(self.parameters.gradients()?, piece)?;
        shards.wait(transfer)?;
        if shards.rank().of > 1 {
            ops::sum_in_order(&own, &parts.reshape((shards.rank().of, ()))?, shards.rank().index)?;
        }
        self.add_nodes(&own)?;
        self.squares[piece] = Some(ops::sum_of_squares(&own)?);
        Ok(())
    }

    /// Sums this rank's shard of a piece's gradients over the nodes. Each node has one rank with this shard. Each of
    /// these ranks sums one part of the shard, and an all-gather then distributes the sums.
    fn add_nodes(&self, own: &Tensor) -> Result<()> {
        let replicas = self.ranks.replicas();
        let (node, Some([_, _, room])) = (replicas.rank(), &self.parameters.received) else { return Ok(()) };
        if node.of == 1 {
            return Ok(());
        }
        let part = node.part_of(own.elem_count());
        let parts = room.narrow(0, 0, own.elem_count())?;
        replicas.wait(replicas.exchange(own, &parts)?)?;
        let own_part = own.narrow(0, part.start, part.len())?;
        ops::sum_in_order(&own_part, &parts.reshape((node.of, ()))?, node.index)?;
        replicas.wait(replicas.gather(&own_part, own)?)
    }
}

impl Parameters {
    /// Checks that the backward wrote all gradients that `clear_gradients` does not set to zero.
    fn check_filled(&self) -> Result<()> {
        for (spec, filled) in self.specs.iter().zip(&self.filled) {
            let filled = filled.load(std::sync::atomic::Ordering::Relaxed);
            if spec.kind.is_overwritten() && !filled {
                candle_core::bail!("{} received no gradient", spec.name);
            }
        }
        Ok(())
    }
}
