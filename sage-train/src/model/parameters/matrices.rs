//! The hidden matrices in a [`Piece`], and the optimizer's statistics of their rows.

use candle_core::{Result, Tensor};
use candle_sage::ops::MuonMatrix;

use super::snapshots::on_host;
use super::{InitialRows, Parameters};
use crate::model::pieces::{Layout, Piece};
use crate::model::spec::{Kind, ParameterSpec};

/// A hidden matrix in a [`Piece`] that contains only hidden matrices.
pub(super) struct MatrixOfPiece<'a> {
    pub(super) name: &'a str,
    /// The matrix's shape, and the index of its first element in the [`Piece`].
    pub(super) of: MuonMatrix,
    /// Number of rows in a head, if the rows are divided into heads.
    pub(super) head: Option<usize>,
}

/// The matrices of a piece that contains only hidden matrices; `None` for other pieces. In the result, matrices with
/// the same shape and number of heads are adjacent.
pub(super) fn matrices_of<'a>(
    specs: &'a [ParameterSpec],
    layout: &Layout,
    piece: &Piece,
) -> Option<Vec<MatrixOfPiece<'a>>> {
    let matrix = |spec: &'a ParameterSpec| {
        let at = layout.places[&spec.name].1;
        let head = if let Kind::Heads(rows) = spec.kind { Some(rows) } else { None };
        piece.range.contains(&at).then(|| {
            let [rows, columns] = spec.dims[..] else {
                panic!("{} is not a matrix: {:?}", spec.name, spec.dims)
            };
            let of = MuonMatrix { at: at - piece.range.start, rows, columns };
            MatrixOfPiece { name: &spec.name, of, head }
        })
    };
    piece.common.apart.then(|| {
        let mut all: Vec<_> = specs.iter().filter_map(matrix).collect();
        all.sort_by_key(|matrix| (matrix.head, matrix.of.shape(), matrix.of.at));
        all
    })
}

/// The optimizer's initial row statistics for the matrices in `piece`: one number for each row. Empty if the optimizer
/// keeps no row statistics. `values` is called with `prefix` followed by the matrix's name.
pub(super) fn initial_rows(
    specs: &[ParameterSpec],
    layout: &Layout,
    piece: &Piece,
    prefix: Option<&str>,
    values: Option<&InitialRows<'_>>,
) -> candle_sage::Result<Vec<f32>> {
    let (Some(prefix), Some(matrices)) = (prefix, matrices_of(specs, layout, piece)) else {
        return Ok(Vec::new());
    };
    let mut all = Vec::new();
    for matrix in matrices {
        all.extend(match values {
            Some(values) => values(format!("{prefix}{}", matrix.name), matrix.of.rows)?,
            None => vec![0.0; matrix.of.rows],
        });
    }
    Ok(all)
}

impl Parameters {
    /// For each matrix, a named copy of the row statistics that the optimizer keeps.
    pub(super) fn rows(&self) -> Result<Vec<(String, Tensor)>> {
        let mut all = Vec::new();
        for (piece, held) in self.layout.pieces.iter().zip(&self.held) {
            let (Some(prefix), Some(rows)) = (self.moments.rows, &held.rows) else { continue };
            let (rows, mut first) = (on_host(rows)?, 0);
            for matrix in matrices_of(&self.specs, &self.layout, piece).into_iter().flatten() {
                all.push((format!("{prefix}{}", matrix.name), rows.narrow(0, first, matrix.of.rows)?));
                first += matrix.of.rows;
            }
        }
        Ok(all)
    }
}
