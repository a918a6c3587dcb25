//! Adding up the gradients of all ranks, each its own parts: beside the backward that makes them, or behind it.

use candle_core::{Result, Tensor};
use candle_sage::ops;

use super::parameters::{EMBEDDING, Parameters};
use crate::ranks::{Ranks, Transfer};

/// A piece that is on its way.
#[derive(Debug)]
struct Coming {
    piece: usize,
    /// What the other ranks of the node send of it.
    parts: Tensor,
    transfer: Transfer,
}

/// Adds up the gradients of all ranks, in their order, each in the parts that it owns: first those of a node, then those of
/// the nodes. Pieces go in one order on every rank, that in which a backward is done with them; the next travels while one is
/// added up.
#[derive(Debug)]
pub struct Reduction<'a> {
    parameters: &'a Parameters,
    ranks: &'a Ranks,
    /// In which order pieces go.
    order: Vec<usize>,
    /// How many of them went.
    sent: usize,
    coming: Option<Coming>,
    /// Of each piece: the sum of squares of this rank's part.
    squares: Vec<Option<Tensor>>,
}

impl<'a> Reduction<'a> {
    /// Nothing is sent yet. `beside`: a backward will say which layers it has left; else all go at the end, the vectors last,
    /// which leave least to wait for.
    pub fn new(parameters: &'a Parameters, ranks: &'a Ranks, beside: bool) -> Self {
        let pieces = 0..parameters.layout.pieces.len();
        let squares = pieces.clone().map(|_| None).collect();
        let order = if beside { parameters.layout.backward_order() } else { pieces.collect() };
        Self { parameters, ranks, order, sent: 0, coming: None, squares }
    }

    /// The last backward has left this layer, from behind: what no layer before it adds to may go.
    ///
    /// # Errors
    /// When a rank cannot be reached.
    pub fn left(&mut self, layer: usize) -> Result<()> {
        let pieces = &self.parameters.layout.pieces;
        while let Some(&piece) = self.order.get(self.sent) {
            if pieces[piece].first_layer.is_none_or(|first| first < layer) {
                break;
            }
            self.send(piece)?;
        }
        Ok(())
    }

    /// All gradients are there. Returns the sum of squares of this rank's parts, an f64 scalar.
    ///
    /// # Errors
    /// When nothing is trained, a matrix received no gradient, or a rank cannot be reached.
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
        let others = range.len() - range.len() / self.ranks.mesh().shard.of;
        let parts = match received {
            Some(received) => received[self.sent % 2].narrow(0, 0, others)?,
            None => gradients.narrow(0, 0, 0)?,
        };
        let transfer = self.ranks.shards().exchange(&from, &parts)?;
        self.sent += 1;
        // There is room for two.
        let before = self.coming.replace(Coming { piece, parts, transfer });
        before.map_or(Ok(()), |before| self.add(before))
    }

    fn add(&mut self, Coming { piece, parts, transfer }: Coming) -> Result<()> {
        let shards = self.ranks.shards();
        let own = self.parameters.own(self.parameters.gradients()?, piece)?;
        shards.wait(transfer)?;
        if shards.rank().of > 1 {
            ops::sum_in_order(&own, &parts.reshape((shards.rank().of - 1, ()))?, shards.rank().index)?;
        }
        self.add_nodes(&own)?;
        self.squares[piece] = Some(ops::sum_of_squares(&own)?);
        Ok(())
    }

    /// What every node has of a part, added up: each of those that have this part adds a part of it, and all gather.
    fn add_nodes(&self, own: &Tensor) -> Result<()> {
        let replicas = self.ranks.replicas();
        let (node, Some([_, _, room])) = (replicas.rank(), &self.parameters.received) else { return Ok(()) };
        if node.of == 1 {
            return Ok(());
        }
        let part = node.part_of(own.elem_count());
        let parts = room.narrow(0, 0, own.elem_count() - part.len())?;
        replicas.wait(replicas.exchange(own, &parts)?)?;
        let own_part = own.narrow(0, part.start, part.len())?;
        ops::sum_in_order(&own_part, &parts.reshape((node.of - 1, ()))?, node.index)?;
        replicas.wait(replicas.gather(&own_part, own)?)
    }
}

impl Parameters {
    /// Checks that a backward has filled every matrix.
    fn check_filled(&self) -> Result<()> {
        for (spec, filled) in self.specs.iter().zip(&self.filled) {
            let filled = filled.load(std::sync::atomic::Ordering::Relaxed);
            if spec.decays() && spec.name != EMBEDDING && !filled {
                candle_core::bail!("{} received no gradient", spec.name);
            }
        }
        Ok(())
    }
}
