//! Muon's operations except the orthogonalization: updates of momentum and weights, and normalization of rows.

use std::sync::OnceLock;

use candle_core::{CpuStorage, CudaStorage, Device, InplaceOp2, InplaceOp3, Layout, Result, Tensor};

use super::{Muon, MuonPart, NAME};
use crate::cpu::ops::muon::{apply, direction, row_factors, scale_rows};
use crate::launch::{Launch, Operand};
use crate::ops::support::{cuda_tensor, f32_values, f32_values_mut, run_twice, with_cuda};

/// Updates the momentum of `parts`, and computes their directions, which are not yet orthogonalized.
pub(crate) struct Directions<'a> {
    pub(crate) settings: Muon,
    pub(crate) parts: &'a [MuonPart],
    pub(crate) len: usize,
    pub(super) made: OnceLock<Tensor>,
}

/// Updates the running mean squares of the rows of matrices, and computes the factors that normalize the rows.
pub(crate) struct RowFactors {
    pub(crate) beta: f64,
    pub(super) made: OnceLock<Tensor>,
}

/// Multiplies each row of matrices by the row's factor from [`RowFactors`].
pub(crate) struct ScaleRows;

/// Updates the weights of `parts` from their directions, which [`Directions`] computes and [`Muon::orthogonalize`]
/// orthogonalizes.
pub(crate) struct Apply<'a> {
    pub(crate) settings: Muon,
    pub(crate) parts: &'a [MuonPart],
    pub(super) copy: Option<&'a Tensor>,
}

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
