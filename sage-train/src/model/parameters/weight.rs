//! A parameter as a model uses it.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use candle_core::{Result, Tensor};

use super::arrivals::Arrivals;

/// A parameter of a model, or several adjacent matrices as one: its value, and its gradient if it is trained.
#[derive(Debug, Clone)]
pub struct Weight {
    /// The index of the piece that contains the value.
    pub(super) piece: usize,
    pub(super) arrivals: Rc<Arrivals>,
    pub(super) value: Tensor,
    /// In f32.
    pub gradient: Option<Tensor>,
    /// Whether the gradient has been written since it was cleared, for each parameter in this weight.
    pub(super) filled: Vec<Arc<AtomicBool>>,
    pub(super) updates: Arc<AtomicU64>,
}

impl Weight {
    /// The value, in the model's compute type; norms and routers in f32. The device waits for it if other ranks have
    /// updated it.
    ///
    /// # Errors
    /// When the device fails.
    pub fn value(&self) -> Result<&Tensor> {
        self.arrivals.wait_for(self.piece)?;
        Ok(&self.value)
    }

    /// The number of updates that the value has received.
    pub(in crate::model) fn update(&self) -> u64 {
        self.updates.load(Ordering::Relaxed)
    }

    /// The tensor that the gradient is added to.
    ///
    /// # Errors
    /// When the model was not made for training.
    pub fn gradient(&self) -> Result<&Tensor> {
        match &self.gradient {
            Some(gradient) => Ok(gradient),
            None => candle_core::bail!("the model was not made for training"),
        }
    }

    /// For matmuls that write the whole gradient: returns whether the matmul has to add to the existing contents, and
    /// marks the gradient as written. Returns false for the first matmul after [`Parameters::clear_gradients`].
    pub(in crate::model) fn take_turn(&self) -> bool {
        let turns: Vec<bool> =
            self.filled.iter().map(|filled| filled.swap(true, Ordering::Relaxed)).collect();
        debug_assert!(turns.iter().all(|turn| *turn == turns[0]), "filled in part");
        turns[0]
    }
}
