//! The ranks that train parameters, and the state that an optimizer keeps and updates.

use candle_core::Tensor;
use candle_sage::ops::MuonMatrix;

use super::spec::Kind;
use crate::ranks::{Group, Ranks};

/// How a model is trained: by which ranks, and with which optimizer state.
#[derive(Debug, Clone, Copy)]
pub struct Training<'a> {
    /// The ranks that train the model.
    pub ranks: &'a Ranks,
    /// The state that the optimizer keeps for each parameter.
    pub moments: Moments,
}

/// The names of the tensors that an optimizer keeps in addition to the weights. Such a name ends with `/`; in a
/// checkpoint, the parameter's name follows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Moments {
    /// For hidden matrices.
    pub matrices: &'static [&'static str],
    /// For all other parameters.
    pub others: &'static [&'static str],
    /// Name of the row statistics (one number for each row of a hidden matrix), if the optimizer keeps them.
    pub rows: Option<&'static str>,
    /// Whether the update of an element of a hidden matrix depends on the whole matrix. If so, no piece contains both
    /// hidden matrices and other parameters.
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
    /// The bf16 or f16 copy of the shard's weights, if the model reads one.
    pub copy: Option<&'a Tensor>,
    /// Whether weight decay applies.
    pub decays: bool,
    /// All matrices of the piece that contains the shard. `None` unless [`Moments::whole_matrices`] is set and the
    /// piece contains only hidden matrices.
    pub matrices: Option<Matrices<'a>>,
}

/// The matrices of a piece that contains only matrices of hidden layers, which Muon updates.
#[derive(Debug)]
pub struct Matrices<'a> {
    /// For each row of each matrix, in the order of `all`: a running mean square of Muon's update direction, in f32.
    /// Every rank has all rows.
    pub rows: Option<&'a Tensor>,
    /// The shape of each matrix and its position in the piece, and, for query, key and value projections, the number of
    /// rows of a head. Matrices with the same shape and head size are adjacent.
    pub all: Vec<(MuonMatrix, Option<usize>)>,
    /// Number of elements of the whole piece of parameter memory. Each rank's shard is an equal part of the piece.
    pub elements: usize,
    /// The ranks that own shards of this piece of parameter memory.
    pub ranks: &'a Group,
}
