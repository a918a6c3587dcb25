//! Normalization of queries or keys and their rotary embedding, in one op.

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};

use super::rms_norm::{self, checked_eps};
use super::rope::{RopeStyle, check};
#[cfg(feature = "cuda")]
use super::support::{cuda_tensor, with_cuda};
use super::support::{f32_tensor, f32_values, shape_error, supported, with_f32};
use crate::cpu::view::to_storage;
#[cfg(feature = "cuda")]
use crate::cuda;

const NAME: &str = "qk-norm-rope";

/// `y = rope(rms_norm(x, weight))`: each head is normalized over its channels, then rotated.
///
/// `x` is (batch, sequence, heads, head_dim) in f32, f16 or bf16 with any strides, `weight` (head_dim);
/// `cos` and `sin` are (sequence, head_dim / 2), see [`rope_tables`](super::rope_tables). The output has
/// the shape and type of `x`. Between the two steps nothing is rounded. `x` and `weight` receive
/// gradients: those of [`rms_norm`](super::rms_norm()) for what came back, rotated by the opposite angle.
/// (QK-norm: arXiv 2302.05442, section 3; its order with the rotation is that of Qwen3.)
///
/// # Errors
/// When the tables or the weight do not match `x`, the tables are tracked, or the types are not floats.
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

/// The gradients of `x` and the weight of [`qk_norm_rope`] for the output's gradient `dout`: for training loops that keep
/// their own books.
///
/// # Errors
/// As [`qk_norm_rope`], and when `dout` does not have the shape and type of `x`.
pub fn qk_norm_rope_backward(
    x: &Tensor,
    weight: &Tensor,
    [cos, sin]: [&Tensor; 2],
    dout: &Tensor,
    eps: f64,
    style: RopeStyle,
) -> Result<[Tensor; 2]> {
    let op = QkNormRope::new(x, weight, [cos, sin], eps, style)?;
    if dout.dims() != x.dims() || dout.dtype() != x.dtype() {
        return Err(shape_error(
            "qk_norm_rope: the output's gradient does not match the input",
            ((x.dims(), x.dtype()), (dout.dims(), dout.dtype())),
            "one shape and one element type",
            "convert with `to_dtype`",
        ));
    }
    supported(NAME, &[x, dout])?;
    match op.bwd(x, weight, x, dout)? {
        (Some(dx), Some(dweight)) => Ok([dx, dweight]),
        _ => unreachable!("both have a gradient"),
    }
}

/// Holds the tables: they have no gradients, and candle's ops have three inputs at most.
struct QkNormRope {
    cos: Tensor,
    sin: Tensor,
    eps: f32,
    style: RopeStyle,
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
                (x.dims(), weight.dims()),
                "x (batch, sequence, heads, head_dim) and weight (head_dim)",
                "normalization runs over each head",
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

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        w: &CudaStorage,
        w_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let out = with_cuda(NAME, [&self.cos, &self.sin], |[cos, sin]| {
            let rotation = self.style.rotation(cos, sin);
            cuda::ops::rope::norm_forward((x, x_layout), (w, w_layout), rotation, self.eps)
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
        let (cos, sin) = (&self.cos, &self.sin);
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            let [dx, dw] = with_cuda(NAME, [x, weight, dout, cos, sin], |[x, w, dy, cos, sin]| {
                cuda::ops::rope::norm_backward(x, w, dy, self.style.rotation(cos, sin), self.eps)
            })?;
            return Ok((Some(cuda_tensor(dx, x.shape())), Some(cuda_tensor(dw, weight.shape()))));
        }
        let (dx, dw) = with_f32(NAME, [x, weight, dout, cos, sin], |[values, w, dy, cos, sin]| {
            let dnormalized = self.style.rotate(x.dims(), dy, cos, sin, -1.0);
            Ok(rms_norm::backward(values, w, &dnormalized, self.eps))
        })?;
        let dx = f32_tensor(dx, x.shape(), x.dtype())?;
        Ok((Some(dx), Some(f32_tensor(dw, weight.shape(), weight.dtype())?)))
    }
}
