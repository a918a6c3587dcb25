//! Updated weights on their way from the ranks that own them. An all-gather overlaps with everything that does not read its
//! piece: with the update of other pieces, and with the next forward up to the first layer in the piece.

use std::cell::RefCell;

use candle_core::Result;

use crate::ranks::{Group, Transfer};

/// The all-gathers that nobody has waited for yet.
#[derive(Debug)]
pub(super) struct Arrivals {
    group: Group,
    /// By piece.
    coming: RefCell<Vec<Option<Transfer>>>,
}

impl Arrivals {
    pub(super) fn new(group: &Group, pieces: usize) -> Self {
        Self { group: group.clone(), coming: RefCell::new(vec![None; pieces]) }
    }

    /// Notes the all-gather of a piece. The transfers of a group end in the order in which they were started.
    pub(super) fn start(&self, piece: usize, transfer: Transfer) {
        self.coming.borrow_mut()[piece] = Some(transfer);
    }

    /// Makes later work on the device wait for a piece.
    pub(super) fn wait_for(&self, piece: usize) -> Result<()> {
        let coming = self.coming.borrow_mut()[piece].take();
        coming.map_or(Ok(()), |transfer| self.group.wait(transfer))
    }

    /// The same for all pieces.
    pub(super) fn wait_for_all(&self) -> Result<()> {
        let pieces = self.coming.borrow().len();
        (0..pieces).try_for_each(|piece| self.wait_for(piece))
    }
}

impl Drop for Arrivals {
    fn drop(&mut self) {
        // The memory of weights is freed in the order of later work. A device that fails here has failed before.
        let _ = self.wait_for_all();
    }
}
