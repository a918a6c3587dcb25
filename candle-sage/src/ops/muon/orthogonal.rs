//! Makes the singular values of matrices about 1.

use std::sync::OnceLock;

use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, Device, InplaceOp2, InplaceOp3, Layout, Result, Shape, Tensor,
};

use super::{NAME, Orthogonalization};
use crate::cpu::ops::muon::{combine, unit_traces};
use crate::launch::{Launch, Operand};
use crate::ops::support::{cuda_tensor, f32_values, f32_values_mut, run_twice};

/// Makes the singular values of matrices (count, rows, columns) about 1. (Computing each Gram matrix from the previous
/// one instead of from `x` was tried and rejected: see `docs/muon.md`.)
pub(super) fn orthogonal(mut x: Tensor, polynomials: Orthogonalization) -> Result<Tensor> {
    let (_, rows, columns) = x.dims3()?;
    for (n, abc) in polynomials.polynomials().into_iter().enumerate() {
        // With the smaller Gram matrix g, a x + b x^3 + c x^5 is the product of x and (a I + b g + c g^2).
        let turned = x.transpose(1, 2)?;
        let gram = if rows <= columns { x.matmul(&turned)? } else { turned.matmul(&x)? };
        // The polynomials are applied to x divided by its Frobenius norm, which is the root of the first Gram matrix's
        // trace. To save a pass over x, the first iteration does not divide x. It divides `gram` by its trace, and
        // `factor` by the norm of x.
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

/// Divides Gram matrices (count, size, size) by their traces; the result is zero if the trace is 0 or not finite.
pub(crate) struct UnitTrace {
    /// `1 / sqrt(trace)` of each Gram matrix, (count) in f32; 0 if the trace is 0 or not finite.
    inverse_norms: OnceLock<Tensor>,
}

/// `Polynomial([a, b, c])` replaces each matrix y of the first operand by `a I + b x + c y`, where x is the second
/// operand's matrix. Both operands are (count, size, size). If a third operand (count) is given, its element i
/// multiplies result i.
pub(crate) struct Polynomial(pub(crate) [f32; 3]);

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
