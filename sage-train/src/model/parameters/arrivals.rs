//! The all-gathers of updated weights that are in flight, one for each piece of parameter memory. An all-gather
//! overlaps with all work that does not read its piece: the update of other pieces, and the next forward up to the
//! first layer in the piece.

use std::cell::RefCell;

use candle_core::Result;

use crate::ranks::{Group, Transfer};

/// The all-gathers that have not been waited for yet.
#[derive(Debug)]
pub(super) struct PendingGathers {
    group: Group,
    /// The all-gather of each piece.
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
        // The memory of the weights is freed in stream order, after these waits. An error cannot be returned here.
        let _ = self.wait_for_all();
    }
}
