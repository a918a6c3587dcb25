//! Where a call's memory comes from: the driver, or the caller.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use candle_core::Result;

use crate::error::{Error, REPORT};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// A result.
    Output,
    /// State of the forward that its backward reads.
    Kept,
    /// Memory that only this call uses.
    Scratch,
}

impl Purpose {
    /// The purpose of memory that a backward would read. `backward`: whether a backward follows.
    pub(super) fn kept(backward: bool) -> Self {
        if backward { Self::Kept } else { Self::Scratch }
    }
}

#[derive(Debug, Clone, Default)]
pub(super) enum Memory {
    #[default]
    Driver,
    Lent(Rc<Arenas>),
}

/// Memory that the caller provides. `kept` and `scratch` allocate consecutive ranges, so that two calls of the same
/// shape get the same ranges.
#[derive(Debug)]
pub(super) struct Arenas {
    /// Addresses of the results, in reverse order of allocation. `None` in a call that only counts memory.
    outputs: Option<RefCell<Vec<u64>>>,
    pub(super) kept: Arena,
    pub(super) scratch: Arena,
}

/// A bump allocator over a range of memory.
#[derive(Debug)]
pub(super) struct Arena {
    start: u64,
    bytes: usize,
    used: Cell<usize>,
}

/// Alignment of allocations in an arena, in bytes.
const ALIGNMENT: usize = 256;

impl Arena {
    pub(super) fn new(start: u64, bytes: usize) -> Self {
        Self { start, bytes, used: Cell::new(0) }
    }

    /// An arena that only counts bytes. Its addresses are not valid.
    pub(super) fn counting() -> Self {
        Self::new(0, usize::MAX)
    }

    pub(super) fn used(&self) -> usize {
        self.used.get()
    }

    fn take(&self, bytes: usize) -> Result<u64> {
        let at = self.used.get();
        let end = at + bytes.next_multiple_of(ALIGNMENT);
        if end > self.bytes {
            return Err(Error::new("the state or scratch memory of an attention call is too small")
                .got(format!("{} bytes", self.bytes))
                .allowed(format!("{end} bytes so far; the rest of the call may need more"))
                .hint("`forward_sizes` and `backward_scratch` of `ForeignAttention` return the sizes")
                .into());
        }
        self.used.set(end);
        Ok(self.start + at as u64)
    }
}

impl Arenas {
    /// `outputs`: the addresses of the results, in the order in which the attention call allocates them.
    pub(super) fn new(mut outputs: Vec<u64>, kept: Arena, scratch: Arena) -> Self {
        outputs.reverse();
        Self { outputs: Some(RefCell::new(outputs)), kept, scratch }
    }

    /// Arenas that count the memory of a call.
    pub(super) fn counting() -> Self {
        Self { outputs: None, kept: Arena::counting(), scratch: Arena::counting() }
    }

    pub(super) fn take(&self, purpose: Purpose, bytes: usize) -> Result<u64> {
        match purpose {
            Purpose::Kept => self.kept.take(bytes),
            Purpose::Scratch => self.scratch.take(bytes),
            Purpose::Output => match &self.outputs {
                None => Ok(0),
                Some(outputs) => outputs.borrow_mut().pop().ok_or_else(|| {
                    Error::new("an attention call has more results than the caller provided memory for")
                        .hint(REPORT)
                        .into()
                }),
            },
        }
    }
}
