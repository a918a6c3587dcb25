//! Muon over the matrices among a model's parameters.

use std::sync::OnceLock;

use candle_core::{CpuStorage, CudaStorage, Device, InplaceOp2, InplaceOp3, Layout, Result, Tensor};

use super::support::{
    argument_error, check_update, cuda_tensor, f32_values, f32_values_mut, no_forward, run_twice, with_cuda,
};
use crate::cpu::ops::muon::{apply, direction};
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
    fn len(&self) -> usize {
        self.rows * self.columns
    }
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
    /// CPU; on a GPU the direction is bf16, and sums are f32. When the norm is not finite nothing changes.
    ///
    /// # Errors
    /// When the tensors do not fit together, matrices overlap or lie outside, or the momentum is not in [0, 1); on CUDA, when a matrix or its
    /// row does not start on 16 bytes.
    pub fn step(
        &self,
        state: &Tensor,
        gradient: &Tensor,
        sum_of_squares: &Tensor,
        matrices: &[MuonMatrix],
        copy: Option<&Tensor>,
    ) -> Result<()> {
        self.check(state, gradient, sum_of_squares, matrices, copy)?;
        for group in groups(matrices) {
            let MuonMatrix { rows, columns, .. } = group[0];
            let starts: Vec<usize> = group.iter().map(|matrix| matrix.at).collect();
            let dims = (starts.len(), rows, columns);
            let find = Direction { settings: *self, dims, starts, made: OnceLock::new() };
            state.inplace_op3(gradient, sum_of_squares, &find)?;
            let direction = find.made.into_inner().ok_or_else(no_forward)?;
            let direction = orthogonal(direction, self.orthogonalization)?;
            let update = Update { settings: *self, dims, starts: find.starts, copy };
            state.inplace_op3(&direction, sum_of_squares, &update)?;
        }
        Ok(())
    }

    fn check(
        &self,
        state: &Tensor,
        gradient: &Tensor,
        sum_of_squares: &Tensor,
        matrices: &[MuonMatrix],
        copy: Option<&Tensor>,
    ) -> Result<()> {
        check_update(NAME, 2, state, gradient, sum_of_squares, copy)?;
        let len = gradient.elem_count();
        let mut sorted = matrices.to_vec();
        sorted.sort_by_key(|matrix| matrix.at);
        let ends = sorted.iter().skip(1).map(|matrix| matrix.at).chain([len]);
        if let Some((matrix, end)) =
            sorted.iter().zip(ends).find(|(matrix, end)| matrix.len() == 0 || matrix.at + matrix.len() > *end)
        {
            return Err(argument_error(
                "muon: a matrix does not fit",
                matrix,
                &format!("matrices that end by the next one, or by the last parameter: here {end}"),
                "`at` is the first element, `rows * columns` their number",
            ));
        }
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

/// The matrices by shape, in their order, at most [`AT_ONCE`] elements together.
fn groups(matrices: &[MuonMatrix]) -> Vec<Vec<MuonMatrix>> {
    let mut groups: Vec<Vec<MuonMatrix>> = Vec::new();
    for matrix in matrices {
        let fits = |group: &&mut Vec<MuonMatrix>| {
            (group[0].rows, group[0].columns) == (matrix.rows, matrix.columns)
                && (group.len() + 1) * matrix.len() <= AT_ONCE
        };
        match groups.iter_mut().rev().find(fits) {
            Some(group) => group.push(*matrix),
            None => groups.push(vec![*matrix]),
        }
    }
    groups
}

/// Matrices (count, rows, columns) of Frobenius norm 1, whose singular values become about 1.
fn orthogonal(mut x: Tensor, polynomials: Orthogonalization) -> Result<Tensor> {
    let (_, rows, columns) = x.dims3()?;
    for polynomial in polynomials.polynomials() {
        // a x + b x^3 + c x^5 is x (a I + b g + c g^2), with the smaller of the two Gram matrices g.
        let turned = x.transpose(1, 2)?;
        let gram = if rows <= columns { x.matmul(&turned)? } else { turned.matmul(&x)? };
        let factor = gram.matmul(&gram)?;
        factor.inplace_op2(&gram, &Polynomial(polynomial))?;
        x = if rows <= columns { factor.matmul(&x)? } else { x.matmul(&factor)? };
    }
    Ok(x)
}

/// Updates the momentum of matrices of one shape, and makes their directions, (count, rows, columns), of Frobenius norm 1.
pub(crate) struct Direction {
    pub(crate) settings: Muon,
    pub(crate) dims: (usize, usize, usize),
    /// The first element of each matrix.
    pub(crate) starts: Vec<usize>,
    made: OnceLock<Tensor>,
}

/// Moves matrices along their directions.
pub(crate) struct Update<'a> {
    pub(crate) settings: Muon,
    pub(crate) dims: (usize, usize, usize),
    pub(crate) starts: Vec<usize>,
    copy: Option<&'a Tensor>,
}

/// `y = a I + b x + c y` for square matrices (count, size, size).
pub(crate) struct Polynomial(pub(crate) [f32; 3]);

impl InplaceOp3 for Direction {
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
        let (_, rows, columns) = self.dims;
        let all: Vec<f32> = self
            .starts
            .iter()
            .flat_map(|&at| {
                let here = at..at + rows * columns;
                direction(&self.settings, sum, &mut momentum[here.clone()], &gradient[here])
            })
            .collect();
        self.made.set(Tensor::from_vec(all, self.dims, &Device::Cpu)?).map_err(|made| run_twice(made).into())
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
        self.made.set(cuda_tensor(made, self.dims)).map_err(|made| run_twice(made).into())
    }
}

impl InplaceOp3 for Update<'_> {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        state: &mut CpuStorage,
        layout: &Layout,
        direction: &CpuStorage,
        direction_layout: &Layout,
        sum_of_squares: &CpuStorage,
        sum_layout: &Layout,
    ) -> Result<()> {
        if !sum_of_squares.as_slice::<f64>()?[sum_layout.start_offset()].is_finite() {
            return Ok(());
        }
        let direction = f32_values(NAME, direction, direction_layout)?;
        let weights = f32_values_mut(NAME, state, layout)?;
        let (_, rows, columns) = self.dims;
        let [keep, rate] = self.settings.factors(rows, columns);
        for (&at, direction) in self.starts.iter().zip(direction.chunks(rows * columns)) {
            apply(&mut weights[at..at + rows * columns], direction, keep, rate);
        }
        Ok(())
    }

    fn cuda_fwd(
        &self,
        state: &mut CudaStorage,
        layout: &Layout,
        direction: &CudaStorage,
        direction_layout: &Layout,
        sum_of_squares: &CudaStorage,
        sum_layout: &Layout,
    ) -> Result<()> {
        let all = [(&*state, layout), (direction, direction_layout), (sum_of_squares, sum_layout)];
        match self.copy {
            None => self.launch((all, None::<Operand<'_>>)),
            Some(copy) => with_cuda(NAME, [copy], |[copy]| self.launch((all, Some(copy)))),
        }
    }
}

impl InplaceOp2 for Polynomial {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, y: &mut CpuStorage, layout: &Layout, x: &CpuStorage, x_layout: &Layout) -> Result<()> {
        let (_, size, _) = layout.shape().dims3()?;
        let [a, b, c] = self.0;
        let (x, y) = (f32_values(NAME, x, x_layout)?, f32_values_mut(NAME, y, layout)?);
        apply(y, &x, c, -b);
        y.chunks_mut(size * size).for_each(|y| y.iter_mut().step_by(size + 1).for_each(|y| *y += a));
        Ok(())
    }

    fn cuda_fwd(
        &self,
        y: &mut CudaStorage,
        layout: &Layout,
        x: &CudaStorage,
        x_layout: &Layout,
    ) -> Result<()> {
        self.launch([(&*y, layout), (x, x_layout)])
    }
}
