//! Muon over the matrices among a model's parameters.

use std::sync::OnceLock;

use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, DType, Device, InplaceOp2, InplaceOp3, Layout, Result, Shape, Tensor,
};

use super::support::{
    argument_error, check_update, cuda_tensor, f32_values, f32_values_mut, no_forward, run_twice,
    shape_error, supported, with_cuda,
};
use crate::cpu::ops::muon::{apply, combine, direction, row_factors, scale_rows, unit_traces};
use crate::launch::{Launch, Operand};
pub use crate::update::{Muon, MuonScale, Orthogonalization};

const NAME: &str = "muon";

/// Elements of the matrices that are orthogonalized at once, at most: those of one shape, or one alone.
const AT_ONCE: usize = 1 << 26;

/// A matrix among the parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MuonMatrix {
    /// Its first element.
    pub at: usize,
    /// Its rows, which lie one after the other.
    pub rows: usize,
    /// Its columns.
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

/// Adjacent elements of a matrix: all of them, or those that one of several processes updates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MuonPart {
    /// The first element among the parameters.
    pub at: usize,
    /// The first element among the directions.
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
    /// g = gradient * gradient_factor, clipped          m = momentum m + (1 - momentum) g
    /// d = orthogonal(momentum m + (1 - momentum) g)    w = (1 - lr weight_decay) w - lr scale d
    /// ```
    ///
    /// `state` is contiguous (2, parameters) in f32: weights and m. `gradient` is (parameters) in f32, `sum_of_squares` the result of
    /// [`sum_of_squares`](crate::ops::sum_of_squares) for the gradient of all parameters, also those that this call does not update. Parameters
    /// outside the matrices do not change. `copy`, on a GPU, receives the new weights in f16 or bf16. The products are in f32 on the
    /// CPU; on a GPU the direction is bf16, and sums are f32. When the norm is not finite nothing changes. With `beta2` rows of d are normalized
    /// ([`Muon::normalize_rows`]): `mean_squares` then has a number for each row of the matrices, one matrix after the other. Adjacent matrices
    /// of one shape are orthogonalized together, which is faster.
    ///
    /// It is [`Muon::directions`], [`Muon::orthogonalize`], [`Muon::normalize_rows`] and [`Muon::apply`]. Several processes that share matrices
    /// call these four, and exchange directions after the first and before the last.
    ///
    /// # Errors
    /// When the tensors do not fit together, matrices overlap or lie outside, or the momentum is not in [0, 1); on CUDA, when a matrix does
    /// not start on 16 bytes, or its elements are not a multiple of 8.
    pub fn step(
        &self,
        state: &Tensor,
        gradient: &Tensor,
        sum_of_squares: &Tensor,
        matrices: &[MuonMatrix],
        mean_squares: Option<&Tensor>,
        copy: Option<&Tensor>,
    ) -> Result<()> {
        // Before the momentum changes.
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

    /// Updates the momentum of parts of matrices, and returns `len` elements with the directions of these parts before they are
    /// orthogonal, up to a constant factor: f32 on the CPU, bf16 on a GPU. Where no part lies they are undefined. Arguments as for [`Muon::step`].
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

    /// Makes the singular values of matrices about 1, in place. The matrices lie one after the other in `directions`, from its first element;
    /// adjacent ones of one shape are faster. A constant factor of a matrix does not change the result.
    ///
    /// # Errors
    /// When there are fewer elements.
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

    /// With `beta2`, divides each row d of orthogonal directions by the root of its running mean square v, in place, and multiplies each
    /// matrix so that its Frobenius norm stays as it is (NorMuon, arXiv 2510.05491, algorithm 1):
    ///
    /// ```text
    /// v = beta2 v + (1 - beta2) mean(d^2)          d = d / sqrt(v) * norm(matrix) / norm(matrix of d / sqrt(v))
    /// ```
    ///
    /// Matrices lie in `directions` as for [`Muon::orthogonalize`]. `mean_squares` holds v in f32, (rows of all matrices), zeros before the
    /// first step; it does not change when the norm of the gradient is not finite. Without `beta2` nothing changes.
    ///
    /// # Errors
    /// When there are fewer elements; when `beta2` is not in [0, 1), or there are other numbers of rows.
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

    /// Checks the running mean squares of rows, if this step has some.
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
                &format!("({rows}) in f32, without gaps"),
                "begin with zeros, a number for each row of the matrices",
            )),
        }
    }

    /// Moves the weights of parts of matrices along their orthogonal directions. Arguments as for [`Muon::step`].
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
        // The row of weights has the shape and type that a gradient would have.
        check_update(NAME, 2, state, &state.get(0)?, sum_of_squares, copy)?;
        let dtype = if state.device().is_cuda() { DType::BF16 } else { DType::F32 };
        if directions.rank() != 1 || directions.dtype() != dtype || !directions.is_contiguous() {
            return Err(shape_error(
                "muon: these are no directions",
                (directions.dims(), directions.dtype()),
                &format!("(elements) in {}, without gaps", dtype.as_str()),
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
                "0.95 is the usual one",
            ));
        }
        Ok(())
    }
}

/// Checks that parts have elements, and overlap neither among the parameters nor among the directions.
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
                "muon: a matrix does not fit",
                part,
                &format!("matrices that end by the next one, or by the last element: here {end}"),
                "`at` is the first element, `len` their number: rows times columns of a whole matrix",
            ));
        }
    }
    Ok(())
}

/// Matrices (count, rows, columns), whose singular values become about 1. (Iterating the Gram matrix of flat matrices, even with a new one
/// after two polynomials, saves products, and loses small singular values in bf16: three of twelve runs ended up to .2 nats higher.)
fn orthogonal(mut x: Tensor, polynomials: Orthogonalization) -> Result<Tensor> {
    let (_, rows, columns) = x.dims3()?;
    for (n, abc) in polynomials.polynomials().into_iter().enumerate() {
        // a x + b x^3 + c x^5 is x (a I + b g + c g^2), with the smaller of the two Gram matrices g.
        let turned = x.transpose(1, 2)?;
        let gram = if rows <= columns { x.matmul(&turned)? } else { turned.matmul(&x)? };
        // The polynomials are of x divided by its Frobenius norm, whose square is the trace of the first Gram matrix. The norm divides the
        // Gram matrix and the factor, so that x itself is not passed over.
        let unit = UnitTrace { inverse_norms: OnceLock::new() };
        let gram = if n == 0 { gram.apply_op1_no_bwd(&unit)? } else { gram };
        let factor = gram.matmul(&gram)?;
        let polynomial = Polynomial(abc);
        match unit.inverse_norms.into_inner() {
            Some(inverse) => factor.inplace_op3(&gram, &inverse, &polynomial)?,
            None => factor.inplace_op2(&gram, &polynomial)?,
        }
        x = if rows <= columns { factor.matmul(&x)? } else { x.matmul(&factor)? };
    }
    Ok(x)
}

/// Updates the momentum of parts, and makes their directions.
pub(crate) struct Directions<'a> {
    pub(crate) settings: Muon,
    pub(crate) parts: &'a [MuonPart],
    pub(crate) len: usize,
    made: OnceLock<Tensor>,
}

/// Updates the running mean squares of rows, and makes the factors of rows.
pub(crate) struct RowFactors {
    pub(crate) beta: f64,
    made: OnceLock<Tensor>,
}

/// Multiplies the rows of matrices (count, rows, columns) with factors.
pub(crate) struct ScaleRows;

/// Moves parts along their directions.
pub(crate) struct Apply<'a> {
    pub(crate) settings: Muon,
    pub(crate) parts: &'a [MuonPart],
    copy: Option<&'a Tensor>,
}

/// Matrices (count, size, size) divided by their traces; a trace that is 0 or not finite gives zeros.
pub(crate) struct UnitTrace {
    /// The inverse roots of the traces, (count) in f32; 0 where there are zeros.
    inverse_norms: OnceLock<Tensor>,
}

/// `y = a I + b x + c y` for square matrices (count, size, size), times a factor of each matrix where there are such.
pub(crate) struct Polynomial(pub(crate) [f32; 3]);

impl InplaceOp3 for Directions<'_> {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        state: &mut CpuStorage,
        layout: &Layout,
        gradient: &CpuStorage,
        gradient_layout: &Layout,
        sum_of_squares: &CpuStorage,
        sum_layout: &Layout,
    ) -> Result<()> {
        let sum = sum_of_squares.as_slice::<f64>()?[sum_layout.start_offset()];
        let gradient = f32_values(NAME, gradient, gradient_layout)?;
        let (_, momentum) = f32_values_mut(NAME, state, layout)?.split_at_mut(gradient.len());
        let mut all = vec![0.0; self.len];
        for &MuonPart { at, to, len, .. } in self.parts {
            direction(
                &self.settings,
                sum,
                &mut momentum[at..at + len],
                &gradient[at..at + len],
                &mut all[to..to + len],
            );
        }
        self.made.set(Tensor::from_vec(all, self.len, &Device::Cpu)?).map_err(|made| run_twice(made).into())
    }

    fn cuda_fwd(
        &self,
        state: &mut CudaStorage,
        layout: &Layout,
        gradient: &CudaStorage,
        gradient_layout: &Layout,
        sum_of_squares: &CudaStorage,
        sum_layout: &Layout,
    ) -> Result<()> {
        let all = [(&*state, layout), (gradient, gradient_layout), (sum_of_squares, sum_layout)];
        let made: CudaStorage = self.launch(all)?;
        self.made.set(cuda_tensor(made, self.len)).map_err(|made| run_twice(made).into())
    }
}

impl InplaceOp3 for RowFactors {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        mean_squares: &mut CpuStorage,
        layout: &Layout,
        x: &CpuStorage,
        x_layout: &Layout,
        sum_of_squares: &CpuStorage,
        sum_layout: &Layout,
    ) -> Result<()> {
        let (_, rows, columns) = x_layout.shape().dims3()?;
        let finite = sum_of_squares.as_slice::<f64>()?[sum_layout.start_offset()].is_finite();
        let (x, all) = (f32_values(NAME, x, x_layout)?, f32_values_mut(NAME, mean_squares, layout)?);
        let of_matrices = all.chunks_mut(rows).zip(x.chunks(rows * columns));
        let factors: Vec<f32> =
            of_matrices.flat_map(|(rows, x)| row_factors(rows, x, finite.then_some(self.beta))).collect();
        let len = factors.len();
        self.made.set(Tensor::from_vec(factors, len, &Device::Cpu)?).map_err(|made| run_twice(made).into())
    }

    fn cuda_fwd(
        &self,
        mean_squares: &mut CudaStorage,
        layout: &Layout,
        x: &CudaStorage,
        x_layout: &Layout,
        sum_of_squares: &CudaStorage,
        sum_layout: &Layout,
    ) -> Result<()> {
        let all = [(&*mean_squares, layout), (x, x_layout), (sum_of_squares, sum_layout)];
        let made: CudaStorage = self.launch(all)?;
        let made = cuda_tensor(made, layout.shape().elem_count());
        self.made.set(made).map_err(|made| run_twice(made).into())
    }
}

impl InplaceOp2 for ScaleRows {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, x: &mut CpuStorage, layout: &Layout, factors: &CpuStorage, of: &Layout) -> Result<()> {
        let (factors, x) = (f32_values(NAME, factors, of)?, f32_values_mut(NAME, x, layout)?);
        scale_rows(x, &factors);
        Ok(())
    }

    fn cuda_fwd(
        &self,
        x: &mut CudaStorage,
        layout: &Layout,
        factors: &CudaStorage,
        of: &Layout,
    ) -> Result<()> {
        self.launch([(&*x, layout), (factors, of)])
    }
}

impl InplaceOp3 for Apply<'_> {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        state: &mut CpuStorage,
        layout: &Layout,
        directions: &CpuStorage,
        directions_layout: &Layout,
        sum_of_squares: &CpuStorage,
        sum_layout: &Layout,
    ) -> Result<()> {
        if !sum_of_squares.as_slice::<f64>()?[sum_layout.start_offset()].is_finite() {
            return Ok(());
        }
        let directions = f32_values(NAME, directions, directions_layout)?;
        let weights = f32_values_mut(NAME, state, layout)?;
        for &MuonPart { at, to, len, shape } in self.parts {
            apply(&mut weights[at..at + len], &directions[to..to + len], self.settings.factors(shape));
        }
        Ok(())
    }

    fn cuda_fwd(
        &self,
        state: &mut CudaStorage,
        layout: &Layout,
        directions: &CudaStorage,
        directions_layout: &Layout,
        sum_of_squares: &CudaStorage,
        sum_layout: &Layout,
    ) -> Result<()> {
        let all = [(&*state, layout), (directions, directions_layout), (sum_of_squares, sum_layout)];
        match self.copy {
            None => self.launch((all, None::<Operand<'_>>)),
            Some(copy) => with_cuda(NAME, [copy], |[copy]| self.launch((all, Some(copy)))),
        }
    }
}

impl CustomOp1 for UnitTrace {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, gram: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (count, size, _) = layout.shape().dims3()?;
        let mut gram = f32_values(NAME, gram, layout)?.into_owned();
        let inverse = unit_traces(&mut gram, size);
        self.keep(Tensor::from_vec(inverse, count, &Device::Cpu)?)?;
        Ok((CpuStorage::F32(gram), layout.shape().clone()))
    }

    fn cuda_fwd(&self, gram: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let [gram, inverse]: [CudaStorage; 2] = self.launch([(gram, layout)])?;
        self.keep(cuda_tensor(inverse, layout.dims()[0]))?;
        Ok((gram, layout.shape().clone()))
    }
}

impl UnitTrace {
    fn keep(&self, inverse: Tensor) -> Result<()> {
        self.inverse_norms.set(inverse).map_err(|made| run_twice(made).into())
    }
}

impl InplaceOp2 for Polynomial {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, y: &mut CpuStorage, layout: &Layout, x: &CpuStorage, x_layout: &Layout) -> Result<()> {
        let (count, size, _) = layout.shape().dims3()?;
        let (x, y) = (f32_values(NAME, x, x_layout)?, f32_values_mut(NAME, y, layout)?);
        combine(y, &x, size, self.0, &vec![1.0; count]);
        Ok(())
    }

    fn cuda_fwd(
        &self,
        y: &mut CudaStorage,
        layout: &Layout,
        x: &CudaStorage,
        x_layout: &Layout,
    ) -> Result<()> {
        self.launch(([(&*y, layout), (x, x_layout)], None::<Operand<'_>>))
    }
}

impl InplaceOp3 for Polynomial {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        y: &mut CpuStorage,
        layout: &Layout,
        x: &CpuStorage,
        x_layout: &Layout,
        factors: &CpuStorage,
        factors_layout: &Layout,
    ) -> Result<()> {
        let (_, size, _) = layout.shape().dims3()?;
        let factors = f32_values(NAME, factors, factors_layout)?;
        let (x, y) = (f32_values(NAME, x, x_layout)?, f32_values_mut(NAME, y, layout)?);
        combine(y, &x, size, self.0, &factors);
        Ok(())
    }

    fn cuda_fwd(
        &self,
        y: &mut CudaStorage,
        layout: &Layout,
        x: &CudaStorage,
        x_layout: &Layout,
        factors: &CudaStorage,
        factors_layout: &Layout,
    ) -> Result<()> {
        self.launch(([(&*y, layout), (x, x_layout)], Some((factors, factors_layout))))
    }
}
