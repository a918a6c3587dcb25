//! For whom parameters are trained, and what an optimizer keeps and sees of them.

use candle_core::Tensor;
use candle_sage::ops::MuonMatrix;

use super::spec::Kind;
use crate::ranks::{Group, Ranks};

/// For whom parameters are trained.
#[derive(Debug, Clone, Copy)]
pub struct Training<'a> {
    /// The ranks that train the model.
    pub ranks: &'a Ranks,
    /// What their optimizer keeps of each parameter.
    pub moments: Moments,
}

/// What an optimizer keeps of parameters in addition to their weights: prefixes of their names in a checkpoint, each with a `/`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Moments {
    /// Of hidden matrices.
    pub matrices: &'static [&'static str],
    /// Of all other parameters.
    pub others: &'static [&'static str],
    /// Of each row of a hidden matrix, if it keeps something: one number.
    pub rows: Option<&'static str>,
    /// Whether hidden matrices are updated as a whole, and so lie in pieces of their own.
    pub whole_matrices: bool,
}

impl Moments {
    /// Of a kind of parameters.
    pub fn of(self, kind: Kind) -> &'static [&'static str] {
        if kind.is_hidden_matrix() { self.matrices } else { self.others }
    }
}

impl<'a> Training<'a> {
    /// Gradients without an optimizer.
    pub fn of_gradients(ranks: &'a Ranks) -> Self {
        Self { ranks, moments: Moments::default() }
    }
}

/// What one update of an optimizer is for: adjacent parameters, of which this rank owns a part.
#[derive(Debug)]
pub struct Shard<'a> {
    /// (1 + moments, parameters) in f32: weights and moments.
    pub state: &'a Tensor,
    /// (parameters) in f32: the sum of gradients.
    pub gradient: &'a Tensor,
    /// The weights as the model reads them, where that is another tensor.
    pub copy: Option<&'a Tensor>,
    /// Whether weight decay applies.
    pub decays: bool,
    /// The matrices of the whole piece, of which this rank owns a part, if their optimizer is another than that of everything else.
    pub matrices: Option<Matrices<'a>>,
}

/// The matrices of a piece that has nothing else.
#[derive(Debug)]
pub struct Matrices<'a> {
    /// What the optimizer keeps of the rows of all matrices in f32, in the order of the matrices; the same on all ranks.
    pub rows: Option<&'a Tensor>,
    /// Where they lie in the piece, and the rows of a head where the rows are heads. Those of one shape are adjacent.
    pub all: Vec<(MuonMatrix, Option<usize>)>,
    /// Elements of the piece, which the ranks divide evenly.
    pub elements: usize,
    /// Those that own parts of it.
    pub ranks: &'a Group,
}
