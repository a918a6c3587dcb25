//! Muon over the matrices among a model's parameters.

pub(crate) mod orthogonal;
pub(crate) mod passes;

use std::sync::OnceLock;

use candle_core::{DType, Result, Tensor};

use super::support::{argument_error, check_update, no_forward, shape_error, shapes_of, supported};
use orthogonal::orthogonal;
use passes::{Apply, Directions, RowFactors, ScaleRows};

pub use crate::update::{Muon, MuonScale, Orthogonalization};

const NAME: &str = "muon";

/// The largest total number of elements of matrices that are orthogonalized together. A larger matrix is processed by
/// itself.
const AT_ONCE: usize = 1 << 26;

/// A matrix among the parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MuonMatrix {
    /// Index of the matrix's first element in the flat vector of all parameters.
    pub at: usize,
    /// Number of rows; the matrix is stored in row-major order.
    pub rows: usize,
    /// Number of columns.
    pub columns: usize,
}

impl MuonMatrix {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.rows * self.columns
    }

    /// Rows and columns.
    pub fn shape(&self) -> (usize, usize) {
        (self.rows, self.columns)
    }
}

/// Adjacent elements of a matrix: all elements, or the shard that one of several processes updates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MuonPart {
    /// Index of the part's first element in the flat vector of all parameters.
    pub at: usize,
    /// Index of the part's first element in the tensor that [`Muon::directions`] returns.
    pub to: usize,
    /// Number of elements.
    pub len: usize,
    /// Rows and columns of the whole matrix.
    pub shape: (usize, usize),
}

impl Muon {
    /// Updates matrices in place, and does not wait for the device:
    ///
    /// ```text
    /// g = gradient * gradient_factor, clipped            m = momentum * m + (1 - momentum) g
    /// d = orthogonal(momentum * m + (1 - momentum) g)    w = (1 - lr * weight_decay) w - lr * scale * d
    /// ```
    ///
    /// Without `nesterov` d is `orthogonal(m)`.
    ///
    /// `state` is contiguous (2, parameters) in f32: weights and m. `gradient` is (parameters) in f32, `sum_of_squares`
    /// is the [`sum_of_squares`](crate::ops::sum_of_squares) of the gradient of all parameters, including parameters
    /// that this call does not update. Parameters outside the matrices do not change. On a GPU `copy` receives the new
    /// weights in f16 or bf16. On the CPU d is computed in f32; on a GPU d is bf16, and matmuls sum in f32. When
    /// the gradient's norm is not finite, nothing changes. With `beta2` the rows of d are normalized
    /// ([`Muon::normalize_rows`]): `mean_squares` then has a number for each row of the matrices, one matrix after the
    /// other. Adjacent matrices of one shape are orthogonalized together, which is faster than one by one.
    ///
    /// A step is [`Muon::directions`], [`Muon::orthogonalize`], [`Muon::normalize_rows`] and [`Muon::apply`]. Processes
    /// that update shards of the same matrices call these four functions. After the first and before the last call,
    /// they exchange elements of the tensor that the first call returned.
    ///
    /// # Errors
    /// When the tensors do not match, matrices overlap or are out of bounds, or the momentum is not in [0, 1); on CUDA,
    /// when a matrix is not aligned to 16 bytes, or its number of elements is not a multiple of 8.
    pub fn step(
        &self,
        state: &Tensor,
        gradient: &Tensor,
        sum_of_squares: &Tensor,
        matrices: &[MuonMatrix],
        mean_squares: Option<&Tensor>,
        copy: Option<&Tensor>,
    ) -> Result<()> {
        // All checks come before the first change.
        self.check(state, gradient, sum_of_squares, copy)?;
        let shapes: Vec<_> = matrices.iter().map(MuonMatrix::shape).collect();
        self.check_rows(mean_squares, &shapes)?;
        let mut to = 0;
        let parts: Vec<MuonPart> = matrices
            .iter()
            .map(|matrix| {
                let part = MuonPart { at: matrix.at, to, len: matrix.elements(), shape: matrix.shape() };
                to += part.len;
                part
            })
            .collect();
        let directions = self.directions(state, gradient, sum_of_squares, &parts, to)?;
        self.orthogonalize(&directions, &shapes)?;
        self.normalize_rows(&directions, sum_of_squares, &shapes, mean_squares)?;
        self.apply(state, &directions, sum_of_squares, &parts, copy)
    }

    /// Updates the momentum of `parts`. Returns the directions of these parts before orthogonalization, times 2^24, in
    /// a tensor of `len` elements (f32 on the CPU, bf16 on a GPU). This tensor's elements outside the parts are
    /// undefined. The other arguments are those of [`Muon::step`].
    ///
    /// # Errors
    /// As [`Muon::step`].
    pub fn directions(
        &self,
        state: &Tensor,
        gradient: &Tensor,
        sum_of_squares: &Tensor,
        parts: &[MuonPart],
        len: usize,
    ) -> Result<Tensor> {
        self.check(state, gradient, sum_of_squares, None)?;
        check_parts(parts, gradient.elem_count(), len)?;
        let op = Directions { settings: *self, parts, len, made: OnceLock::new() };
        state.inplace_op3(gradient, sum_of_squares, &op)?;
        Ok(op.made.into_inner().ok_or_else(no_forward)?)
    }

    /// Makes the singular values of matrices about 1, in place. The matrices are stored one after the other in
    /// `directions`, from its first element. Adjacent matrices of one shape are processed together, which is faster.
    /// Multiplying a matrix by a positive constant does not change the result.
    ///
    /// # Errors
    /// When `directions` has fewer elements than the matrices.
    pub fn orthogonalize(&self, directions: &Tensor, shapes: &[(usize, usize)]) -> Result<()> {
        let mut at = 0;
        for same in shapes.chunk_by(|a, b| a == b) {
            let (rows, columns) = same[0];
            for group in same.chunks((AT_ONCE / (rows * columns).max(1)).max(1)) {
                let len = group.len() * rows * columns;
                let x = directions.narrow(0, at, len)?.reshape((group.len(), rows, columns))?;
                let x = orthogonal(x, self.orthogonalization)?;
                directions.slice_set(&x.flatten_all()?, 0, at)?;
                at += len;
            }
        }
        Ok(())
    }

    /// With `beta2`, divides each row d of orthogonal directions by the root of the row's running mean square v, in
    /// place, and scales each matrix so that its Frobenius norm does not change. (NorMuon, arXiv 2510.05491, instead
    /// scales each step to the norm `0.2 lr sqrt(rows * columns)`.)
    ///
    /// ```text
    /// v = beta2 * v + (1 - beta2) mean(d^2)        d = d / sqrt(v) * norm(matrix) / norm(matrix of d / sqrt(v))
    /// ```
    ///
    /// Matrices are stored in `directions` as for [`Muon::orthogonalize`]. `mean_squares` is v in f32, (rows of all
    /// matrices), zeros before the first step. It does not change when `sum_of_squares`, which is that of
    /// [`Muon::step`], is not finite. Without `beta2` nothing changes.
    ///
    /// # Errors
    /// When `directions` has fewer elements than the matrices, `beta2` is not in [0, 1), or `mean_squares` is missing
    /// or has another shape or type.
    pub fn normalize_rows(
        &self,
        directions: &Tensor,
        sum_of_squares: &Tensor,
        shapes: &[(usize, usize)],
        mean_squares: Option<&Tensor>,
    ) -> Result<()> {
        let Some((beta, mean_squares)) = self.check_rows(mean_squares, shapes)? else { return Ok(()) };
        let (mut at, mut row) = (0, 0);
        for same in shapes.chunk_by(|a, b| a == b) {
            let (rows, columns) = same[0];
            let all = rows * same.len();
            let x = directions.narrow(0, at, all * columns)?.reshape((same.len(), rows, columns))?;
            let factors = RowFactors { beta, made: OnceLock::new() };
            mean_squares.narrow(0, row, all)?.inplace_op3(&x, sum_of_squares, &factors)?;
            x.inplace_op2(&factors.made.into_inner().ok_or_else(no_forward)?, &ScaleRows)?;
            (at, row) = (at + all * columns, row + all);
        }
        Ok(())
    }

    /// Checks `beta2` and `mean_squares`. Returns `None` without `beta2`.
    fn check_rows<'a>(
        &self,
        mean_squares: Option<&'a Tensor>,
        shapes: &[(usize, usize)],
    ) -> Result<Option<(f64, &'a Tensor)>> {
        let Some(beta) = self.beta2 else { return Ok(None) };
        if !(0.0..1.0).contains(&beta) {
            return Err(argument_error(
                "muon: beta2 is out of range",
                beta,
                "0 and up, below 1",
                "0.95 is usual",
            ));
        }
        let rows: usize = shapes.iter().map(|(rows, _)| rows).sum();
        match mean_squares {
            Some(all) if all.dims() == [rows] && all.dtype() == DType::F32 && all.is_contiguous() => {
                supported(NAME, &[all])?;
                Ok(Some((beta, all)))
            }
            other => Err(shape_error(
                "muon: the mean squares of rows do not fit",
                other.map_or_else(
                    || "none".into(),
                    |other| format!("{:?} {}", other.dims(), other.dtype().as_str()),
                ),
                &format!("contiguous ({rows}) in f32"),
                "start with a tensor of zeros, with one value per row of all matrices",
            )),
        }
    }

    /// Moves the weights of `parts` along the orthogonalized `directions`. `state`, `sum_of_squares` and `copy` are
    /// those of [`Muon::step`].
    ///
    /// # Errors
    /// As [`Muon::step`].
    pub fn apply(
        &self,
        state: &Tensor,
        directions: &Tensor,
        sum_of_squares: &Tensor,
        parts: &[MuonPart],
        copy: Option<&Tensor>,
    ) -> Result<()> {
        // `check_update` needs a gradient. `apply` has no gradient, and passes the weights, which have the same shape.
        check_update(NAME, 2, state, &state.get(0)?, sum_of_squares, copy)?;
        let dtype = if state.device().is_cuda() { DType::BF16 } else { DType::F32 };
        if directions.rank() != 1 || directions.dtype() != dtype || !directions.is_contiguous() {
            return Err(shape_error(
                "muon: the directions have the wrong type, shape or layout",
                shapes_of(&[("directions", directions)]),
                &format!("contiguous (elements) in {}", dtype.as_str()),
                "`Muon::directions` makes them",
            ));
        }
        supported(NAME, &[state, directions])?;
        check_parts(parts, state.dim(1)?, directions.elem_count())?;
        state.inplace_op3(directions, sum_of_squares, &Apply { settings: *self, parts, copy })
    }

    fn check(
        &self,
        state: &Tensor,
        gradient: &Tensor,
        sum_of_squares: &Tensor,
        copy: Option<&Tensor>,
    ) -> Result<()> {
        check_update(NAME, 2, state, gradient, sum_of_squares, copy)?;
        if !(0.0..1.0).contains(&self.momentum) {
            return Err(argument_error(
                "muon: the momentum is out of range",
                self.momentum,
                "0 and up, below 1",
                "0.95 is usual",
            ));
        }
        Ok(())
    }
}

/// Checks that no part is empty, and that parts overlap neither in the parameters nor in the directions.
fn check_parts(parts: &[MuonPart], parameters: usize, directions: usize) -> Result<()> {
    let mut sorted = parts.to_vec();
    for (first, end) in [(|part: &MuonPart| part.at) as fn(&MuonPart) -> usize, |part| part.to]
        .into_iter()
        .zip([parameters, directions])
    {
        sorted.sort_by_key(first);
        let ends = sorted.iter().skip(1).map(first).chain([end]);
        if let Some((part, end)) =
            sorted.iter().zip(ends).find(|(part, end)| part.len == 0 || first(part) + part.len > *end)
        {
            return Err(argument_error(
                "muon: a part is empty, overlaps the next part, or ends after the last element",
                format!("at {}, to {}, len {}", part.at, part.to, part.len),
                &format!("a `len` of at least 1, and an end (`at + len` or `to + len`) of at most {end}"),
                "`at` indexes the parameters, `to` the directions; `len` of a whole matrix is rows x columns",
            ));
        }
    }
    Ok(())
}
