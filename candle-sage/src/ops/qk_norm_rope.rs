//! RMSNorm of each head of queries or keys, then the rotary embedding, in one op.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp2, Layout, Result, Shape, Tensor};

use super::rms_norm::checked_eps;
use super::rope::{RopeStyle, check, concatenated_shape};
use super::support::{
    cuda_tensor, f32_tensor, f32_values, shape_error, shapes_of, supported, with_all_cuda, with_cuda,
    with_f32,
};
use crate::cpu::ops::rms_norm;
use crate::cpu::view::to_storage;
use crate::launch::Launch;

const NAME: &str = "qk-norm-rope";

/// `y = rope(rms_norm(x, weight))`: each head is normalized over its channels, then rotated.
///
/// `x` is (batch, sequence, heads, head_dim) in f32, f16 or bf16 with any strides, `weight` (head_dim); `cos` and `sin`
/// are (sequence, head_dim / 2), see [`rope_tables`](super::rope_tables). The output has the shape and type of `x`.
/// Nothing is rounded between the two steps. `x` and `weight` receive gradients: the output's gradient is rotated by
/// the opposite angle, then passed to the backward of [`rms_norm`](super::rms_norm()). (QK-norm: arXiv 2302.05442,
/// section 3. Qwen3 uses this order of norm and rotation.)
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use candle_sage::ops::{RopeStyle, qk_norm_rope, rms_norm, rope, rope_tables};
///
/// let x = Var::randn(0f32, 1., (1, 4, 2, 8), &Device::Cpu)?;
/// let weight = Var::ones(8, DType::F32, &Device::Cpu)?;
/// let (cos, sin) = rope_tables(4, 8, 10000.0, &Device::Cpu)?;
/// let y = qk_norm_rope(&x, &weight, &cos, &sin, 1e-6, RopeStyle::Halves)?;
/// let expected = rope(&rms_norm(&x, &weight, 1e-6)?, &cos, &sin, RopeStyle::Halves)?;
/// let difference = (&y - expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
/// assert!(difference < 1e-6);
/// assert!(y.sqr()?.sum_all()?.backward()?.get(&weight).is_some());
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// When the tables or the weight do not match `x`, the tables are tracked ([`Tensor::track_op`]), or the types are not
/// floats.
pub fn qk_norm_rope(
    x: &Tensor,
    weight: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    eps: f64,
    style: RopeStyle,
) -> Result<Tensor> {
    let op = QkNormRope::new(x, weight, [cos, sin], eps, style)?;
    x.apply_op2(weight, op)
}

/// The input, the weight and the output's gradient of one [`qk_norm_rope`].
#[derive(Debug, Clone, Copy)]
pub struct QkNormRopeGrad<'a> {
    /// The input, (batch, sequence, heads, head_dim).
    pub x: &'a Tensor,
    /// The norm's weight, (head_dim).
    pub weight: &'a Tensor,
    /// The output's gradient, of the shape and type of `x`.
    pub dout: &'a Tensor,
}

/// The gradients of inputs and weights of [`qk_norm_rope`], for query and key in one call. For training loops that do
/// not use candle's graph.
///
/// The gradients of the inputs are concatenated along the heads, (batch, sequence, heads of all inputs, head_dim): if
/// one matmul computed query and key, the concatenation is the operand of one backward matmul. `narrow` in dimension 2
/// returns a single input's gradient. The gradients of the weights are in the order of `all`.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_sage::ops::{QkNormRopeGrad, RopeStyle, qk_norm_rope_backward, rope_tables};
///
/// let x = |heads: usize| Tensor::randn(0f32, 1., (1, 4, heads, 8), &Device::Cpu);
/// let (q, dq, k, dk) = (x(2)?, x(2)?, x(1)?, x(1)?);
/// let weight = Tensor::ones(8, DType::F32, &Device::Cpu)?;
/// let (cos, sin) = rope_tables(4, 8, 10000.0, &Device::Cpu)?;
/// let both = [
///     QkNormRopeGrad { x: &q, weight: &weight, dout: &dq },
///     QkNormRopeGrad { x: &k, weight: &weight, dout: &dk },
/// ];
/// let (dx, dweights) = qk_norm_rope_backward(&both, [&cos, &sin], 1e-6, RopeStyle::Halves)?;
/// assert_eq!((dx.dims4()?, dweights.len()), ((1, 4, 2 + 1, 8), 2));
/// // The output does not depend on the length of a head's vector, so the gradient is orthogonal to this vector.
/// let along = (dx.narrow(2, 0, 2)? * &q)?.sum(3)?.abs()?.max_all()?.to_scalar::<f32>()?;
/// assert!(along < 1e-4);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As [`qk_norm_rope`]; when a `dout` does not have the shape and type of its `x`; when `all` is empty, or its inputs
/// differ in more than the number of heads.
pub fn qk_norm_rope_backward(
    all: &[QkNormRopeGrad<'_>],
    [cos, sin]: [&Tensor; 2],
    eps: f64,
    style: RopeStyle,
) -> Result<(Tensor, Vec<Tensor>)> {
    let dims = checked_backward(all, [cos, sin], eps, style)?;
    let gradients = Gradients { eps: eps as f32, style };
    if cos.device().is_cuda() {
        let tensors: Vec<&Tensor> =
            all.iter().flat_map(|grad| [grad.x, grad.weight, grad.dout]).chain([cos, sin]).collect();
        let (dx, dweights): (_, Vec<_>) = with_all_cuda(NAME, &tensors, |operands| {
            let (inputs, tables) = operands.split_at(3 * all.len());
            let (inputs, _) = inputs.as_chunks::<3>();
            gradients.launch((inputs, [tables[0], tables[1]]))
        })?;
        let dweights = dweights.into_iter().zip(all).map(|(dw, grad)| cuda_tensor(dw, grad.weight.shape()));
        return Ok((cuda_tensor(dx, dims), dweights.collect()));
    }
    let (mut dxs, mut dweights) = (Vec::new(), Vec::new());
    for QkNormRopeGrad { x, weight, dout } in all {
        let (dx, dw) = with_f32(NAME, [x, weight, dout, cos, sin], |[values, w, dy, cos, sin]| {
            let dnormalized = gradients.style.rotate(x.dims(), dy, cos, sin, -1.0);
            Ok(rms_norm::backward(values, w, &dnormalized, gradients.eps))
        })?;
        dxs.push(f32_tensor(dx, x.shape(), x.dtype())?);
        dweights.push(f32_tensor(dw, weight.shape(), weight.dtype())?);
    }
    Ok((Tensor::cat(&dxs, 2)?.reshape(dims)?, dweights))
}

/// Checks the arguments of [`qk_norm_rope_backward`], and returns the dimensions of the `dx` that it returns.
pub(super) fn checked_backward(
    all: &[QkNormRopeGrad<'_>],
    tables: [&Tensor; 2],
    eps: f64,
    style: RopeStyle,
) -> Result<(usize, usize, usize, usize)> {
    for QkNormRopeGrad { x, weight, dout } in all {
        QkNormRope::new(x, weight, tables, eps, style)?;
        if dout.dims() != x.dims() || dout.dtype() != x.dtype() {
            return Err(shape_error(
                "qk_norm_rope: the output's gradient does not match the input",
                shapes_of(&[("x", x), ("dout", dout)]),
                "one shape and one element type",
                "reshape, or convert with `to_dtype`",
            ));
        }
        supported(NAME, &[x, dout])?;
    }
    concatenated_shape("qk_norm_rope", &all.iter().map(|grad| grad.x).collect::<Vec<_>>())
}

/// The tables are fields instead of inputs, since they have no gradients and candle's ops have at most three inputs.
pub(crate) struct QkNormRope {
    cos: Tensor,
    sin: Tensor,
    pub(crate) eps: f32,
    pub(crate) style: RopeStyle,
}

/// The op of [`qk_norm_rope_backward`].
pub(crate) struct Gradients {
    pub(crate) eps: f32,
    pub(crate) style: RopeStyle,
}

impl QkNormRope {
    fn new(
        x: &Tensor,
        weight: &Tensor,
        [cos, sin]: [&Tensor; 2],
        eps: f64,
        style: RopeStyle,
    ) -> Result<Self> {
        check("qk_norm_rope", x, cos, sin)?;
        if weight.dims() != &x.dims()[3..] {
            return Err(shape_error(
                "qk_norm_rope: the weight does not match the input",
                shapes_of(&[("x", x), ("weight", weight)]),
                "x (batch, sequence, heads, head_dim) and weight (head_dim)",
                "the weight has one value per channel of a head",
            ));
        }
        let eps = checked_eps("qk_norm_rope", eps)?;
        supported(NAME, &[x, weight, cos, sin])?;
        Ok(Self { cos: cos.clone(), sin: sin.clone(), eps, style })
    }
}

impl CustomOp2 for QkNormRope {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        w: &CpuStorage,
        w_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (values, weight) = (f32_values(NAME, x, x_layout)?, f32_values(NAME, w, w_layout)?);
        let normalized = rms_norm::forward(&values, &weight, self.eps);
        let out = with_f32(NAME, [&self.cos, &self.sin], |[cos, sin]| {
            Ok(self.style.rotate(x_layout.dims(), &normalized, cos, sin, 1.0))
        })?;
        let dtype = x.dtype();
        Ok((to_storage(out, dtype)?, x_layout.shape().clone()))
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        w: &CudaStorage,
        w_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let out = with_cuda(NAME, [&self.cos, &self.sin], |[cos, sin]| {
            self.launch([(x, x_layout), (w, w_layout), cos, sin])
        })?;
        Ok((out, x_layout.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _out: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let grad = QkNormRopeGrad { x, weight, dout };
        let (dx, dweights) =
            qk_norm_rope_backward(&[grad], [&self.cos, &self.sin], f64::from(self.eps), self.style)?;
        Ok((Some(dx), dweights.into_iter().next()))
    }
}
