//! Muon's passes over matrices on the GPU.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result};
use half::bf16;

use crate::cuda::address::{Address, address, address_at, check_vectors, first_index};
use crate::cuda::compiled::constants::muon::{THREADS, V, V16};
use crate::cuda::compiled::kernel;
use crate::cuda::floats::{Float, PARTS, count, element, start};
use crate::cuda::kernels::{Gpu, Grid};
use crate::cuda::params::{self, launch};
use crate::launch::{Launch, Operand};
use crate::ops::muon::MuonPart;
use crate::ops::muon::orthogonal::{Polynomial, UnitTrace};
use crate::ops::muon::passes::{Apply, Directions, RowFactors, ScaleRows};
use crate::update::{DIRECTION_UNIT, MomentumPass};

/// A grid for `len` elements, in which a thread processes packs of `each` elements.
fn line(len: usize, each: usize) -> Grid {
    Grid::line(len.div_ceil(THREADS * each).clamp(1, PARTS), THREADS)
}

/// Joins parts of matrices that an update treats in the same way (`equal`), if they are adjacent both in the vector of
/// all parameters and in the tensor that `Muon::directions` returns. This saves launches: a launch takes as long as the
/// update of a small matrix.
fn joined(parts: &[MuonPart], equal: impl Fn(&MuonPart, &MuonPart) -> bool) -> Result<Vec<MuonPart>> {
    let mut all: Vec<MuonPart> = Vec::new();
    for part in parts {
        check_matrix(&[], part.len)?;
        match all.last_mut() {
            Some(last)
                if last.at + last.len == part.at && last.to + last.len == part.to && equal(last, part) =>
            {
                last.len += part.len;
            }
            _ => all.push(*part),
        }
    }
    Ok(all)
}

fn check_matrix(starts: &[Address<'_>], len: usize) -> Result<()> {
    let hint = "start each matrix of a vector at a multiple of 8 elements; AdamW supports any size";
    check_vectors("Muon", starts, len, V16, hint)
}

impl Launch<[Operand<'_>; 3], CudaStorage> for Directions<'_> {
    fn launch(&self, [state, gradient, sum_of_squares]: [Operand<'_>; 3]) -> Result<CudaStorage> {
        let gpu = Gpu::new(state.0.device())?;
        let (_, parameters) = state.1.shape().dims2()?;
        let directions = gpu.alloc::<bf16>(self.len)?;
        let MomentumPass { beta, nesterov, gradient_factor, clip } = self.settings.momentum_pass();
        let first = first_index(state.1) + parameters;
        for MuonPart { at, to, len, .. } in joined(self.parts, |_, _| true)? {
            let params = params::MuonMomentum {
                momentum: element(state.0, first + at, &gpu)?,
                gradient: element(gradient.0, first_index(gradient.1) + at, &gpu)?,
                sum_of_squares: start(sum_of_squares, &gpu)?,
                direction: address_at(&directions, to, &gpu)?,
                len: len as i64,
                factor: gradient_factor as f32,
                clip: clip.map_or(f32::INFINITY, |clip| clip as f32),
                beta,
                unit: DIRECTION_UNIT,
                nesterov: nesterov.into(),
                padding: 0,
            };
            check_matrix(&[params.momentum, params.gradient, params.direction], len)?;
            launch(&gpu, kernel!("muon_momentum"), line(len, V), &params)?;
        }
        Ok(gpu.storage(directions))
    }
}

impl Launch<[Operand<'_>; 3], CudaStorage> for RowFactors {
    fn launch(&self, [mean_squares, x, sum_of_squares]: [Operand<'_>; 3]) -> Result<CudaStorage> {
        let gpu = Gpu::new(x.0.device())?;
        let (matrices, rows, columns) = x.1.shape().dims3()?;
        let factors = gpu.alloc::<f32>(matrices * rows)?;
        let params = params::MuonRows {
            x: start(x, &gpu)?,
            mean_squares: start(mean_squares, &gpu)?,
            factors: address(&factors, &gpu),
            sum_of_squares: start(sum_of_squares, &gpu)?,
            rows: count("rows", rows)?,
            columns: count("columns", columns)?,
            beta: self.beta as f32,
            padding: 0,
        };
        launch(&gpu, kernel!("muon_row_squares"), Grid::line(matrices * rows, THREADS), &params)?;
        launch(&gpu, kernel!("muon_row_factors"), Grid::line(matrices, THREADS), &params)?;
        Ok(gpu.storage(factors))
    }
}

impl Launch<[Operand<'_>; 2], ()> for ScaleRows {
    fn launch(&self, [x, factors]: [Operand<'_>; 2]) -> Result<()> {
        let gpu = Gpu::new(x.0.device())?;
        let (matrices, rows, columns) = x.1.shape().dims3()?;
        let params = params::MuonRows {
            x: start(x, &gpu)?,
            mean_squares: Address::NULL,
            factors: start(factors, &gpu)?,
            sum_of_squares: Address::NULL,
            rows: count("rows", rows)?,
            columns: count("columns", columns)?,
            beta: 0.0,
            padding: 0,
        };
        launch(&gpu, kernel!("muon_scale_rows"), Grid::line(matrices * rows, THREADS), &params)
    }
}

type Tensors<'a> = ([Operand<'a>; 3], Option<Operand<'a>>);

impl Launch<Tensors<'_>, ()> for Apply<'_> {
    fn launch(&self, ([state, directions, sum_of_squares], copy): Tensors<'_>) -> Result<()> {
        let gpu = Gpu::new(state.0.device())?;
        let factors = |part: &MuonPart| self.settings.factors(part.shape);
        for MuonPart { at, to, len, shape } in joined(self.parts, |a, b| factors(a) == factors(b))? {
            let [keep, rate] = self.settings.factors(shape);
            let (copy, copy_type) = match copy {
                None => (Address::NULL, Float::F32),
                Some(copy) => (element(copy.0, first_index(copy.1) + at, &gpu)?, Float::of("muon", copy.0)?),
            };
            let params = params::MuonApply {
                weights: element(state.0, first_index(state.1) + at, &gpu)?,
                direction: element(directions.0, first_index(directions.1) + to, &gpu)?,
                sum_of_squares: start(sum_of_squares, &gpu)?,
                copy,
                len: len as i64,
                rate,
                keep,
                copy_type: copy_type as i32,
                padding: 0,
            };
            check_matrix(&[params.weights, params.direction, params.copy], len)?;
            launch(&gpu, kernel!("muon_apply"), line(len, V), &params)?;
        }
        Ok(())
    }
}

impl Launch<[Operand<'_>; 1], [CudaStorage; 2]> for UnitTrace {
    fn launch(&self, [gram]: [Operand<'_>; 1]) -> Result<[CudaStorage; 2]> {
        let gpu = Gpu::new(gram.0.device())?;
        let (matrices, size, _) = gram.1.shape().dims3()?;
        let inverse = gpu.alloc::<f32>(matrices)?;
        let unit = gpu.alloc::<bf16>(matrices * size * size)?;
        let params = params::MuonTrace {
            x: start(gram, &gpu)?,
            inverse: address(&inverse, &gpu),
            size: count("rows", size)?,
            padding: 0,
        };
        launch(&gpu, kernel!("muon_trace"), Grid::line(matrices, THREADS), &params)?;
        let sum = Sum { abc: [0.0, 1.0, 0.0], inverse: params.inverse, power: 2 };
        sum.launch(&gpu, gram, address(&unit, &gpu))?;
        Ok([gpu.storage(unit), gpu.storage(inverse)])
    }
}

impl Launch<([Operand<'_>; 2], Option<Operand<'_>>), ()> for Polynomial {
    fn launch(&self, ([y, x], inverse): ([Operand<'_>; 2], Option<Operand<'_>>)) -> Result<()> {
        let gpu = Gpu::new(y.0.device())?;
        let power = inverse.is_some().into();
        let inverse = inverse.map_or(Ok(Address::NULL), |inverse| start(inverse, &gpu))?;
        Sum { abc: self.0, inverse, power }.launch(&gpu, x, start(y, &gpu)?)
    }
}

/// `y = f (a I + b x + c y)` with `f = inverse^power`.
struct Sum<'a> {
    abc: [f32; 3],
    inverse: Address<'a>,
    power: i32,
}

impl Sum<'_> {
    fn launch(self, gpu: &Gpu, x: Operand<'_>, y: Address<'_>) -> Result<()> {
        let (len, (_, size, _)) = (x.1.shape().elem_count(), x.1.shape().dims3()?);
        let ([a, b, c], size) = (self.abc, count("rows", size)?);
        let (inverse, power, len, x) = (self.inverse, self.power, len as i64, start(x, gpu)?);
        let params = params::MuonCombine { x, y, inverse, len, size, power, a, b, c, padding: 0 };
        let grid = Grid::line((len as usize).div_ceil(THREADS * V16).max(1), THREADS);
        launch(gpu, kernel!("muon_combine"), grid, &params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_parts_are_joined_if_equal() {
        let part = |at, to, shape: (usize, usize)| MuonPart { at, to, len: shape.0 * shape.1, shape };
        let parts = [
            part(0, 64, (8, 8)),
            part(64, 128, (8, 8)),
            part(128, 192, (4, 16)),
            part(200, 256, (8, 8)),
            part(264, 400, (8, 8)),
        ];
        let lens = |equal: fn(&MuonPart, &MuonPart) -> bool| -> Vec<usize> {
            joined(&parts, equal).expect("multiples of 8").iter().map(|part| part.len).collect()
        };
        assert_eq!(lens(|_, _| true), [192, 64, 64]);
        assert_eq!(lens(|a, b| a.shape == b.shape), [128, 64, 64, 64]);
        // Each part must have a multiple of 8 elements. It is not enough that two parts together have 8.
        assert!(joined(&[part(0, 0, (2, 2)), part(4, 4, (2, 2))], |_, _| true).is_err());
    }
}
