//! The learned mixture of attention over selected keys (exact attention) and the linear tail.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp3, DType, Layout, Result, Shape, Tensor};

use super::support::{
    cuda_tensor, f32_tensor, f32_values, shape_error, shapes_of, supported, with_cuda, with_f32,
};
use crate::cpu::blend;
use crate::cpu::view::to_storage;
use crate::launch::Launch;
use crate::selection::Selection;

const NAME: &str = "blend";

/// How [`blend`] computes `a` in `a * sparse + (1 - a) * tail`. `sparse` is the output of exact attention to selected
/// blocks of keys, and `a` is the weight of `sparse`.
///
/// In every variant `a` is 1 for a query whose exact attention covers all keys that the query sees.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_sage::ops::{Alpha, blend};
/// # use candle_sage::{AttentionShape, Selection};
/// # let dims = (1, 4, 1, 8);
/// # let shape = AttentionShape::new(dims, dims, dims, true, None)?;
///
/// // Two blocks of two keys: the second block of queries leaves the first block of keys to the tail.
/// let selection = Selection::window(&shape, (2, 2), 0, 0, &Device::Cpu)?;
/// let sparse = Tensor::ones(dims, DType::F32, &Device::Cpu)?;
/// let (tail, theta) = (sparse.zeros_like()?, Tensor::zeros(1, DType::F32, &Device::Cpu)?);
/// let a = |alpha| {
///     let out = blend(&sparse, &tail, &theta, &selection, alpha)?;
///     out.narrow(3, 0, 1)?.flatten_all()?.to_vec1::<f32>()
/// };
/// assert_eq!(a(Alpha::Constant)?, [1., 1., 0.5, 0.5]);
/// // The third query has one key in exact attention, the fourth has two; both leave two keys to the tail.
/// let by_count = a(Alpha::Count)?;
/// assert!((by_count[2] - 1. / 3.).abs() < 1e-6 && (by_count[3] - 1. / 2.).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Alpha {
    /// `a = sigmoid(theta + log(n / m))` is the weight of exact attention, which covers `n` of the keys that the query
    /// sees and omits the other `m`. A learned `theta` can be used with any sequence length and number of selected
    /// blocks.
    #[default]
    Count,
    /// `a = sigmoid(theta)`, as published (arXiv 2602.12675).
    Constant,
}

impl std::fmt::Display for Alpha {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Count => "count",
            Self::Constant => "constant",
        })
    }
}

/// `out = a * sparse + (1 - a) * tail`, where a query's `a` depends on the `theta` of its head and on the number of
/// keys that the selection leaves to the tail: see [`Alpha`].
///
/// `sparse` and `tail` are (batch, sequence, query heads, head_dim) of one type, `theta` is (query heads) in
/// f32. All three receive gradients: `dsparse = a * dout`, `dtail = (1 - a) * dout`,
/// `dtheta = sum(a * (1 - a) * dout . (sparse - tail))`.
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use candle_sage::ops::{Alpha, blend};
/// use candle_sage::{AttentionShape, Selection};
///
/// let dims = (1, 4, 1, 8);
/// let shape = AttentionShape::new(dims, dims, dims, true, None)?;
/// let selection = Selection::window(&shape, (2, 2), 0, 0, &Device::Cpu)?;
/// let sparse = Tensor::ones(dims, DType::F32, &Device::Cpu)?;
/// let tail = sparse.zeros_like()?;
/// let theta = Var::zeros(1, DType::F32, &Device::Cpu)?;
/// let out = blend(&sparse, &tail, &theta, &selection, Alpha::Constant)?;
/// // For two queries `a` is 1/2, for the others it is 1: dtheta sums a * (1 - a) over two queries and eight channels.
/// let gradients = out.sum_all()?.backward()?;
/// assert_eq!(gradients.get(&theta).unwrap().to_vec1::<f32>()?, [16. * 0.25]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// When shapes and types do not match.
pub fn blend(
    sparse: &Tensor,
    tail: &Tensor,
    theta: &Tensor,
    selection: &Selection,
    alpha: Alpha,
) -> Result<Tensor> {
    let theta = &theta.contiguous()?;
    let op = Blend::new([sparse, tail, theta], selection, alpha)?;
    sparse.apply_op3(tail, theta, op)
}

/// The gradients of `sparse`, `tail` and `theta` of [`blend`] for the output's gradient `dout`. For training loops that
/// do not use candle's graph.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_sage::ops::{Alpha, blend_backward};
/// # use candle_sage::{AttentionShape, Selection};
/// # let dims = (1, 4, 1, 8);
/// # let shape = AttentionShape::new(dims, dims, dims, true, None)?;
///
/// let selection = Selection::window(&shape, (2, 2), 0, 0, &Device::Cpu)?;
/// let x = || Tensor::randn(0f32, 1., dims, &Device::Cpu);
/// let (sparse, tail, dout) = (x()?, x()?, x()?);
/// let theta = Tensor::zeros(1, DType::F32, &Device::Cpu)?;
/// let [dsparse, dtail, _] = blend_backward([&sparse, &tail, &theta], &selection, Alpha::Count, &dout)?;
/// // The weights a and 1 - a sum to 1.
/// let difference = ((dsparse + dtail)? - dout)?.abs()?.max_all()?.to_scalar::<f32>()?;
/// assert!(difference < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As [`blend`], and when `dout` does not have the shape and type of `sparse`.
pub fn blend_backward(
    [sparse, tail, theta]: [&Tensor; 3],
    selection: &Selection,
    alpha: Alpha,
    dout: &Tensor,
) -> Result<[Tensor; 3]> {
    let theta = &theta.contiguous()?;
    Gradients(&Blend::new([sparse, tail, theta], selection, alpha)?).of([sparse, tail, theta], dout)
}

pub(crate) struct Blend {
    pub(crate) selection: Selection,
    pub(crate) alpha: Alpha,
}

impl Blend {
    pub(super) fn new(
        [sparse, tail, theta]: [&Tensor; 3],
        selection: &Selection,
        alpha: Alpha,
    ) -> Result<Self> {
        let shape = selection.shape();
        let (batch, len, heads, d) = shape.query_dims();
        if sparse.dims() != [batch, len, heads, d]
            || tail.dims() != sparse.dims()
            || tail.dtype() != sparse.dtype()
            || theta.dims() != [heads]
            || theta.dtype() != DType::F32
        {
            return Err(shape_error(
                "blend: the inputs do not fit the selection",
                shapes_of(&[("sparse", sparse), ("tail", tail), ("theta", theta)]),
                &format!("two tensors {:?} of one type, theta ({heads}) in f32", shape.query_dims()),
                "theta has one value per query head",
            ));
        }
        supported(NAME, &[sparse, tail, theta, selection.lists()])?;
        Ok(Self { selection: selection.clone(), alpha })
    }
}

impl Blend {
    /// Number of partial sums of `theta`'s gradient on a GPU: for each query head, one for each block of queries.
    pub(crate) fn theta_parts(&self) -> usize {
        self.selection.shape().query_heads() * self.selection.blocks().rows()
    }
}

/// The backward of [`blend`].
pub(crate) struct Gradients<'a>(pub(crate) &'a Blend);

impl Gradients<'_> {
    fn of(&self, [sparse, tail, theta]: [&Tensor; 3], dout: &Tensor) -> Result<[Tensor; 3]> {
        if dout.dims() != sparse.dims() || dout.dtype() != sparse.dtype() {
            return Err(shape_error(
                "blend: the output's gradient does not fit the output",
                shapes_of(&[("dout", dout)]),
                &shapes_of(&[("output", sparse)]),
                "`dout` has the shape and element type of the output",
            ));
        }
        supported(NAME, &[sparse, tail, theta, dout])?;
        let Blend { selection, alpha } = self.0;
        if sparse.device().is_cuda() {
            let tensors = [sparse, tail, theta, dout];
            let [dsparse, dtail, dtheta] = with_cuda(NAME, tensors, |operands| self.launch(operands))?;
            let like = |storage| cuda_tensor(storage, sparse.shape());
            return Ok([like(dsparse), like(dtail), cuda_tensor(dtheta, theta.shape())]);
        }
        let token_counts = selection.host()?.token_counts();
        let [dsparse, dtail, dtheta] =
            with_f32(NAME, [sparse, tail, theta, dout], |[sparse, tail, theta, dout]| {
                let shape = selection.shape();
                Ok(blend::backward(shape, &token_counts, *alpha == Alpha::Count, [sparse, tail, theta], dout))
            })?;
        let like = |values| f32_tensor(values, sparse.shape(), sparse.dtype());
        Ok([like(dsparse)?, like(dtail)?, f32_tensor(dtheta, theta.shape(), DType::F32)?])
    }
}

impl CustomOp3 for Blend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        sparse: &CpuStorage,
        sparse_layout: &Layout,
        tail: &CpuStorage,
        tail_layout: &Layout,
        theta: &CpuStorage,
        theta_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let values = [
            f32_values(NAME, sparse, sparse_layout)?,
            f32_values(NAME, tail, tail_layout)?,
            f32_values(NAME, theta, theta_layout)?,
        ];
        let token_counts = self.selection.host()?.token_counts();
        let inputs = values.each_ref().map(|values| values.as_ref());
        let out = blend::forward(self.selection.shape(), &token_counts, self.alpha == Alpha::Count, inputs);
        Ok((to_storage(out, sparse.dtype())?, sparse_layout.shape().clone()))
    }

    fn cuda_fwd(
        &self,
        sparse: &CudaStorage,
        sparse_layout: &Layout,
        tail: &CudaStorage,
        tail_layout: &Layout,
        theta: &CudaStorage,
        theta_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let inputs = [(sparse, sparse_layout), (tail, tail_layout), (theta, theta_layout)];
        let out = self.launch(inputs)?;
        Ok((out, sparse_layout.shape().clone()))
    }

    fn bwd(
        &self,
        sparse: &Tensor,
        tail: &Tensor,
        theta: &Tensor,
        _: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [dsparse, dtail, dtheta] = Gradients(self).of([sparse, tail, theta], dout)?;
        Ok((Some(dsparse), Some(dtail), Some(dtheta)))
    }
}
