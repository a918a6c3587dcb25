//! The ranks that train parameters, and the state that an optimizer keeps and updates.

use candle_core::Tensor;
use candle_sage::ops::MuonMatrix;

use super::spec::Kind;
use crate::ranks::{Group, Ranks};

/// The ranks that train parameters, and the state of their optimizer.
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
    /// Whether each hidden matrix is updated as a whole. If so, hidden matrices and other parameters are
    /// stored in separate pieces of memory.
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

/// The input of one optimizer update: this rank's shard of adjacent parameters.
#[derive(Debug)]
pub struct Shard<'a> {
    /// f32 of shape (1 + number of moments, parameters): the weights, then the moments.
    pub state: &'a Tensor,
    /// f32 of shape (parameters): the sum of gradients.
    pub gradient: &'a Tensor,
    /// The shard's weights in the compute type, if the model reads such a copy.
    pub copy: Option<&'a Tensor>,
    /// Whether weight decay applies.
    pub decays: bool,
    /// All matrices of the piece of memory that contains the shard. `None` unless a separate optimizer updates
    /// hidden matrices.
    pub matrices: Option<Matrices<'a>>,
}

/// The matrices of a piece of parameter memory that contains only hidden matrices.
#[derive(Debug)]
pub struct Matrices<'a> {
    /// The optimizer's statistics of the rows of all matrices in f32, in the order of the matrices; equal on all ranks.
    pub rows: Option<&'a Tensor>,
    /// The shape and place of each matrix in the piece, and the number of rows in a head if the rows are divided into
    /// heads. Matrices of one shape are adjacent.
    pub all: Vec<(MuonMatrix, Option<usize>)>,
    /// Number of elements of the whole piece. Each rank's shard is an equal part of it.
    pub elements: usize,
    /// The ranks that own parts of the piece.
    pub ranks: &'a Group,
}
