//! The ranks that train parameters, and the state that an optimizer keeps and updates.

use candle_core::Tensor;
use candle_sage::ops::MuonMatrix;

use super::spec::Kind;
use crate::ranks::{Group, Ranks};

/// The ranks that train parameters, and the optimizer's state.
#[derive(Debug, Clone, Copy)]
pub struct Training<'a> {
    /// The ranks that train the model.
    pub ranks: &'a Ranks,
    /// The state that the optimizer keeps for each parameter.
    pub moments: Moments,
}

/// The names of the tensors that an optimizer keeps in addition to the weights. A name is the prefix that a checkpoint
/// puts before a parameter's name, and ends with `/`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Moments {
    /// For hidden matrices.
    pub matrices: &'static [&'static str],
    /// For all other parameters.
    pub others: &'static [&'static str],
    /// Name of the row statistics (one number for each row of a hidden matrix), if the optimizer keeps them.
    pub rows: Option<&'static str>,
    /// Whether the update of an element of a hidden matrix depends on the whole matrix. If so, a piece of parameter
    /// memory contains either only hidden matrices or only other parameters.
    pub whole_matrices: bool,
}

impl Moments {
    /// The moments of a kind of parameters.
    pub fn of(self, kind: Kind) -> &'static [&'static str] {
        if kind.is_hidden_matrix() { self.matrices } else { self.others }
    }
}

impl<'a> Training<'a> {
    /// Training that computes gradients but has no optimizer.
    pub fn of_gradients(ranks: &'a Ranks) -> Self {
        Self { ranks, moments: Moments::default() }
    }
}

/// The input of one optimizer update: this rank's part of a piece of parameter memory.
#[derive(Debug)]
pub struct Shard<'a> {
    /// f32 of shape (1 + number of moments, parameters): the weights, then the moments.
    pub state: &'a Tensor,
    /// f32 of shape (parameters): the gradients, summed over the step's micro-batches and the ranks.
    pub gradient: &'a Tensor,
    /// The shard's weights in the compute type, if the model reads such a copy.
    pub copy: Option<&'a Tensor>,
    /// Whether weight decay applies.
    pub decays: bool,
    /// The matrices of the shard's piece of parameter memory. `None` unless [`Moments::whole_matrices`] is set and this
    /// piece contains only hidden matrices.
    pub matrices: Option<Matrices<'a>>,
}

/// The matrices of a piece that contains only matrices of hidden layers, which Muon updates.
#[derive(Debug)]
pub struct Matrices<'a> {
    /// The optimizer's statistics: one f32 number for each row of each matrix, in the order of `all`. Every rank has
    /// all of them.
    pub rows: Option<&'a Tensor>,
    /// Each matrix's shape and its position in the piece of memory. For query, key and value projections: the number of
    /// rows of a head. Matrices with the same shape and head size are adjacent.
    pub all: Vec<(MuonMatrix, Option<usize>)>,
    /// Number of elements of the whole piece of memory. Each rank's shard is an equal part of it.
    pub elements: usize,
    /// The ranks that own shards of this piece of parameter memory.
    pub ranks: &'a Group,
}
