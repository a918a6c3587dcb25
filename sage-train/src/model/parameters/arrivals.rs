//! The all-gathers of updated weights that are in flight, one for each piece of parameter memory. The all-gather of a
//! piece overlaps with work that does not read this piece: the update of other pieces, and the layers of the next
//! forward before the first layer that has parameters in this piece.

use std::cell::RefCell;

use candle_core::Result;

use crate::ranks::{Group, Transfer};

#[derive(Debug)]
pub(super) struct PendingGathers {
    group: Group,
    /// By piece: the all-gather of its weights. `None` before [`Self::start`] and after [`Self::wait_for`].
    coming: RefCell<Vec<Option<Transfer>>>,
}

impl PendingGathers {
    pub(super) fn new(group: &Group, pieces: usize) -> Self {
        Self { group: group.clone(), coming: RefCell::new(vec![None; pieces]) }
    }

    /// Records the latest all-gather of a piece. A wait for it also waits for all earlier transfers.
    pub(super) fn start(&self, piece: usize, transfer: Transfer) {
        self.coming.borrow_mut()[piece] = Some(transfer);
    }

    /// Makes later work on the device wait for the all-gather of a piece.
    pub(super) fn wait_for(&self, piece: usize) -> Result<()> {
        let coming = self.coming.borrow_mut()[piece].take();
        coming.map_or(Ok(()), |transfer| self.group.wait(transfer))
    }

    /// Makes later work on the device wait for the all-gathers of all pieces.
    pub(super) fn wait_for_all(&self) -> Result<()> {
        let pieces = self.coming.borrow().len();
        (0..pieces).try_for_each(|piece| self.wait_for(piece))
    }
}

impl Drop for PendingGathers {
    fn drop(&mut self) {
        // The memory of the weights must not be freed before the all-gathers that write to it end. `drop` cannot return
        // an error.
        let _ = self.wait_for_all();
    }
}
