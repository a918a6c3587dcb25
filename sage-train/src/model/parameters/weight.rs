//! A parameter as a model uses it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use candle_core::{DType, Result, Tensor};
use candle_sage::fp8::Fp8Format;
use candle_sage::ops::{Fp8Copies, Fp8Matrix};

use super::arrivals::PendingGathers;
use super::values::Fp8Piece;

/// Weights in FP8. The key is the weight's `at` and `rows`. The `u64` is the number of optimizer updates before the
/// weight was quantized.
pub(super) type Quantized = RefCell<HashMap<(usize, usize), (u64, Fp8Matrix)>>;

/// A parameter of a model, or several matrices that are adjacent in the layout of all parameters and are used as one
/// matrix. Contains the value, and the gradient if the parameter is trained.
#[derive(Debug, Clone)]
pub struct Weight {
    pub(super) source: Source,
    /// The index of the weight's first element in the layout of all parameters.
    pub(super) at: usize,
    /// The size of the weight's first dimension.
    pub(super) rows: usize,
    /// The index, in `Layout::pieces`, of the piece that contains the weight.
    pub(super) piece: usize,
    pub(super) arrivals: Rc<PendingGathers>,
    /// In f32.
    pub gradient: Option<Tensor>,
    /// Whether the gradient has been written since it was cleared. If the weight joins several matrices, each matrix
    /// has a flag.
    pub(super) filled: Vec<Arc<AtomicBool>>,
    pub(super) updates: Arc<AtomicU64>,
    pub(super) quantized: Rc<Quantized>,
}

/// Where a value is read from.
#[derive(Debug, Clone)]
pub(super) enum Source {
    /// In the compute type, or in f32.
    Stored(Tensor),
    /// The elements `range` of an FP8 piece, as a tensor of shape `dims`.
    Fp8 { piece: Rc<Fp8Piece>, range: Range<usize>, dims: Vec<usize> },
}

impl Weight {
    /// The value, in the model's compute type; norms, sinks, routers and SLA2's `theta` are in f32. If other ranks have
    /// updated the value, the device waits until the new value has arrived.
    ///
    /// # Errors
    /// When the device fails, or the value exists only in FP8 ([`Parameters::expand`](super::Parameters::expand)).
    pub fn value(&self) -> Result<Tensor> {
        self.arrivals.wait_for(self.piece)?;
        match &self.source {
            Source::Stored(value) => Ok(value.clone()),
            Source::Fp8 { piece, range, dims } => piece.copies(range, dims),
        }
    }

    pub(in crate::model) fn dtype(&self) -> DType {
        match &self.source {
            Source::Stored(value) => value.dtype(),
            Source::Fp8 { piece, .. } => piece.dtype(),
        }
    }

    /// The value in FP8, quantized once after each update.
    ///
    /// # Errors
    /// When the value is not a matrix, or the device fails.
    pub(in crate::model) fn quantized(&self) -> Result<Fp8Matrix> {
        let update = self.updates.load(Ordering::Relaxed);
        let key = (self.at, self.rows);
        if let Some((of, matrix)) = self.quantized.borrow().get(&key)
            && *of == update
        {
            return Ok(matrix.clone());
        }
        self.arrivals.wait_for(self.piece)?;
        let matrix = match &self.source {
            Source::Stored(value) => Fp8Matrix::quantize(value, Fp8Format::E4M3, Fp8Copies::Both)?,
            Source::Fp8 { piece, range, dims } => {
                let [rows, columns] = dims[..] else { candle_core::bail!("not a matrix: {dims:?}") };
                piece.quantized(range, (rows, columns))?
            }
        };
        self.quantized.borrow_mut().insert(key, (update, matrix.clone()));
        Ok(matrix)
    }

    /// The tensor in which the gradient is accumulated.
    ///
    /// # Errors
    /// When the model was not made for training.
    pub fn gradient(&self) -> Result<&Tensor> {
        match &self.gradient {
            Some(gradient) => Ok(gradient),
            None => candle_core::bail!("the model was not made for training"),
        }
    }

    /// Marks the weight's gradient as written. Returns whether the caller must add to it; otherwise the caller must
    /// overwrite all of it. Only the first call after [`Parameters::clear_gradients`] returns false.
    ///
    /// [`Parameters::clear_gradients`]: super::Parameters::clear_gradients
    pub(in crate::model) fn take_turn(&self) -> bool {
        let turns: Vec<bool> =
            self.filled.iter().map(|filled| filled.swap(true, Ordering::Relaxed)).collect();
        debug_assert!(turns.iter().all(|turn| *turn == turns[0]), "filled in part");
        turns[0]
    }
}
