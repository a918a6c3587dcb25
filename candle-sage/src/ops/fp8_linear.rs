//! A linear map with its three matmuls in FP8.

use std::sync::OnceLock;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp2, Layout, Result, Shape, Tensor};

use super::fp8::{Fp8Copies, Fp8Matrix, Fp8Product, Fp8Sums, Quantize, Quantized, check_dims, from_cpu};
use super::support::{
    cuda_tensor, f32_values, no_forward, run_twice, shape_error, shapes_of, supported, with_cuda,
};
use crate::cpu::view::to_storage;
use crate::fp8::Fp8Format;
use crate::launch::Launch;

const LINEAR: &str = "fp8-linear";

/// The settings of [`fp8_linear`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Fp8Linear {
    /// The format of the output's gradient; input and weight are E4M3.
    pub gradient: Fp8Format,
    /// Which accumulators a GPU uses in the matmuls that compute y, dx and dW (see [`fp8_linear`]).
    pub sums: [Fp8Sums; 3],
}

impl Fp8Linear {
    /// Sets the format of the output's gradient.
    #[must_use]
    pub fn gradient(self, gradient: Fp8Format) -> Self {
        Self { gradient, ..self }
    }

    /// Sets the accumulators of the matmuls that compute y, dx and dW on a GPU.
    #[must_use]
    pub fn sums(self, sums: [Fp8Sums; 3]) -> Self {
        Self { sums, ..self }
    }
}

/// `y = x W^T` with all three matmuls in FP8:
///
/// ```text
/// y  = f(x) f(W)^T      x (rows, inputs), W (outputs, inputs)
/// dx = f(dy) f(W)       f: rounds to FP8, with a scale from the matrix's largest absolute value
/// dW = f(dy)^T f(x)
/// ```
///
/// `x` and W have one type (f32, f16, bf16) and receive gradients of this type; rows, inputs and outputs are multiples
/// of 16. The CPU multiplies the same FP8 values as a GPU, with sums in f32. (Micikevicius et al., arXiv 2209.05433.)
///
/// ```
/// use candle_core::{Device, Var};
/// use candle_sage::ops::{Fp8Linear, fp8_linear};
///
/// let x = Var::randn(0f32, 1., (32, 64), &Device::Cpu)?;
/// let w = Var::randn(0f32, 1., (16, 64), &Device::Cpu)?;
/// let gradients = fp8_linear(&x, &w, Fp8Linear::default())?.sqr()?.sum_all()?.backward()?;
/// assert_eq!(gradients.get(&w).unwrap().dims(), [16, 64]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// When shapes or types do not match, and on GPUs without FP8 units (compute capability below 8.9).
pub fn fp8_linear(x: &Tensor, weight: &Tensor, settings: Fp8Linear) -> Result<Tensor> {
    check_dims(LINEAR, x.dims())?;
    check_dims(LINEAR, weight.dims())?;
    if x.dim(1)? != weight.dim(1)? || x.dtype() != weight.dtype() {
        return Err(shape_error(
            "fp8_linear: the input does not fit the weight",
            shapes_of(&[("x", x), ("weight", weight)]),
            "x (rows, inputs) and weight (outputs, inputs) of one type",
            "a weight is (outputs, inputs); convert with `to_dtype`",
        ));
    }
    supported(LINEAR, &[x, weight])?;
    x.apply_op2(weight, LinearOp { settings, saved: OnceLock::new() })
}

struct LinearOp {
    settings: Fp8Linear,
    /// The transposes of input and weight, quantized.
    saved: OnceLock<[Fp8Matrix; 2]>,
}

impl LinearOp {
    fn save(&self, x: Fp8Matrix, weight: Fp8Matrix) -> Result<()> {
        self.saved.set([x.without_rows(), weight.without_rows()]).map_err(|saved| run_twice(saved).into())
    }
}

const OPERAND: Quantize = Quantize { format: Fp8Format::E4M3, copies: Fp8Copies::Both };

impl CustomOp2 for LinearOp {
    fn name(&self) -> &'static str {
        LINEAR
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        lx: &Layout,
        w: &CpuStorage,
        lw: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let quantized = |storage: &CpuStorage, layout: &Layout| {
            let (values, dims) = (f32_values(LINEAR, storage, layout)?, layout.shape().dims2()?);
            Ok::<_, candle_core::Error>(OPERAND.on_cpu(&values, dims).into_matrix(
                OPERAND.format,
                dims,
                from_cpu,
            ))
        };
        let (a, b) = (quantized(x, lx)?, quantized(w, lw)?);
        let shape = (a.dims().0, b.dims().0);
        let mut out = vec![0.0; shape.0 * shape.1];
        a.product_on_cpu(&b, &mut out, false)?;
        self.save(a, b)?;
        Ok((to_storage(out, x.dtype())?, shape.into()))
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        lx: &Layout,
        w: &CudaStorage,
        lw: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let quantized = |operand: (&CudaStorage, &Layout)| {
            let quantized: Quantized<CudaStorage> = OPERAND.launch(operand)?;
            let dims = operand.1.shape().dims2()?;
            Ok::<_, candle_core::Error>(quantized.into_matrix(OPERAND.format, dims, cuda_tensor))
        };
        let (a, b) = (quantized((x, lx))?, quantized((w, lw))?);
        let op =
            Fp8Product { formats: [a.format(), b.format()], sums: self.settings.sums[0], dtype: x.dtype() };
        let shape = (a.dims().0, b.dims().0);
        let out =
            with_cuda(LINEAR, [a.rows()?, b.rows()?, a.scale(), b.scale()], |operands| op.launch(operands))?;
        self.save(a, b)?;
        Ok((out, shape.into()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        _w: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [x_saved, w_saved] = self.saved.get().ok_or_else(no_forward)?;
        let Fp8Linear { gradient, sums: [_, of_dx, of_dw] } = self.settings;
        let dy = Fp8Matrix::quantize(dy, gradient, Fp8Copies::Both)?;
        let dx = dy.product(&w_saved.t(), x.dtype(), of_dx)?;
        let dw = dy.t().product(&x_saved.t(), x.dtype(), of_dw)?;
        Ok((Some(dx), Some(dw)))
    }
}
