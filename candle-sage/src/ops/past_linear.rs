//! The tail of SLA2: linear attention, which SLA2 combines with block-sparse attention.

mod products;

pub(crate) use products::inverse_norm;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp3, Layout, Result, Shape, Tensor};

use super::support::{
    cpu_storage, cuda_tensor, dims4, f32_tensor, shape_error, shapes_of, supported, with_cuda,
};
use crate::cpu::view::{View, to_storage};
use crate::cpu::{self, Problem};
use crate::launch::Launch;
use crate::selection::Selection;
use crate::shape::AttentionShape;

const NAME: &str = "past-linear";

/// The blocks of keys that [`past_linear`] sums over. *Candidates* are the blocks that a block of queries may select:
/// see [`Selection`].
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_sage::ops::{Tail, past_linear};
/// use candle_sage::{AttentionShape, Selection};
///
/// let dims = (1, 4, 1, 8);
/// let shape = AttentionShape::new(dims, dims, dims, true, None)?;
/// // The second block of queries selects its only candidate.
/// let selection = Selection::window(&shape, (2, 2), 1, 0, &Device::Cpu)?;
/// let x = Tensor::ones(dims, DType::F32, &Device::Cpu)?;
/// let sum = |tail| past_linear(&x, &x, &x, &selection, tail)?.sum_all()?.to_scalar::<f32>();
/// assert!((sum(Tail::Past)? - 16.0).abs() < 1e-5);
/// assert_eq!(sum(Tail::Complement)?, 0.0);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Tail {
    /// All candidates, including selected blocks.
    #[default]
    Past,
    /// The candidates that are not selected, as published (arXiv 2602.12675).
    Complement,
}

impl std::fmt::Display for Tail {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Past => "past",
            Self::Complement => "complement",
        })
    }
}

/// Linear attention of each block of queries `I` to its tail ([`Tail`]). For a query `i` of `I`, and the keys `j` in
/// the tail: `out_i = phi(q_i) H_I / (phi(q_i) . z_I)` with `H_I = sum_j phi(k_j)^T v_j`, `z_I = sum_j phi(k_j)` and
/// `phi` the softmax over channels (SLA, arXiv 2509.24006; SLA2, arXiv 2602.12675). The output is zero for queries
/// without a tail.
///
/// Query, key and value are (batch, sequence, heads, head_dim) in f32, f16 or bf16 with any strides, as in
/// [`Attention`](crate::Attention), and all receive gradients; the output has the query's shape and type. Without a
/// causal mask `phi` is applied to K minus its mean over the segment (batch entry or document). With a causal mask no
/// mean is subtracted, because it would depend on later tokens. Sums run in f32. On CUDA there are kernels for
/// [`Tail::Past`] with a causal mask; they round the states `H` to the inputs' type. In all other cases on CUDA,
/// candle's matmuls compute the tail, which is slower and needs more memory: states and copies of all inputs are f32.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use candle_sage::ops::{Tail, past_linear};
/// use candle_sage::{AttentionShape, Selection};
///
/// let dims = (1, 4, 1, 8);
/// let shape = AttentionShape::new(dims, dims, dims, true, None)?;
/// let selection = Selection::window(&shape, (2, 2), 0, 0, &Device::Cpu)?;
/// let (q, k) = (Var::randn(0f32, 1., dims, &Device::Cpu)?, Var::randn(0f32, 1., dims, &Device::Cpu)?);
/// let v = Var::ones(dims, DType::F32, &Device::Cpu)?;
/// let out = past_linear(&q, &k, &v, &selection, Tail::Past)?;
/// // The first block of queries has no tail; the weights of each query in the second block sum to 1.
/// let sums = out.sum(3)?.flatten_all()?.to_vec1::<f32>()?;
/// assert_eq!(sums[..2], [0., 0.]);
/// assert!(sums[2..].iter().all(|sum| (sum - 8.0).abs() < 1e-5));
/// assert!(out.sum_all()?.backward()?.get(&v).is_some());
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// When shapes and types do not match, or the selection was made for another shape.
pub fn past_linear(q: &Tensor, k: &Tensor, v: &Tensor, selection: &Selection, tail: Tail) -> Result<Tensor> {
    let op = PastLinear::new([q, k, v], selection, tail)?;
    if op.lacks_kernels(q) {
        return products::forward(&op, [q, k, v]);
    }
    q.apply_op3(k, v, op)
}

/// The gradients of query, key and value of [`past_linear`] for the output's gradient `dout`. For training loops that
/// do not use candle's graph.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_sage::ops::{Tail, past_linear_backward};
/// # use candle_sage::{AttentionShape, Selection};
/// # let dims = (1, 4, 1, 8);
/// # let shape = AttentionShape::new(dims, dims, dims, true, None)?;
///
/// let selection = Selection::window(&shape, (2, 2), 0, 0, &Device::Cpu)?;
/// let x = || Tensor::randn(0f32, 1., dims, &Device::Cpu);
/// let (q, k, v, dout) = (x()?, x()?, x()?, x()?.ones_like()?);
/// let [_, _, dv] = past_linear_backward([&q, &k, &v], &selection, Tail::Past, &dout)?;
/// // In the tail, the last two queries attend to the first two keys. The two weights of each query sum to 1.
/// let sums = dv.sum(3)?.flatten_all()?.to_vec1::<f32>()?;
/// assert!((sums[0] + sums[1] - 16.0).abs() < 1e-4);
/// assert_eq!(sums[2..], [0., 0.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As [`past_linear`], and when `dout` does not have the query's shape and type.
pub fn past_linear_backward(
    [q, k, v]: [&Tensor; 3],
    selection: &Selection,
    tail: Tail,
    dout: &Tensor,
) -> Result<[Tensor; 3]> {
    Gradients(&PastLinear::new([q, k, v], selection, tail)?).of([q, k, v], dout)
}

/// Adds the result of [`past_linear_backward`] to `gradients`, and returns the sums. On a GPU the sums can overwrite
/// `gradients` in place, so nothing else may use the memory of `gradients`.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_sage::ops::{Tail, past_linear_backward, past_linear_backward_onto};
/// # use candle_sage::{AttentionShape, Selection};
/// # let dims = (1, 4, 1, 8);
/// # let shape = AttentionShape::new(dims, dims, dims, true, None)?;
/// # let selection = Selection::window(&shape, (2, 2), 0, 0, &Device::Cpu)?;
/// # let x = || Tensor::randn(0f32, 1., dims, &Device::Cpu);
/// # let (q, k, v, dout) = (x()?, x()?, x()?, x()?);
///
/// let zeros = [q.zeros_like()?, k.zeros_like()?, v.zeros_like()?];
/// let once = past_linear_backward_onto([&q, &k, &v], &selection, Tail::Past, &dout, zeros)?;
/// let expected = past_linear_backward([&q, &k, &v], &selection, Tail::Past, &dout)?;
/// for (once, expected) in once.iter().zip(&expected) {
///     assert_eq!(once.flatten_all()?.to_vec1::<f32>()?, expected.flatten_all()?.to_vec1::<f32>()?);
/// }
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As [`past_linear_backward`], and when the gradients do not have the inputs' shapes and types.
pub fn past_linear_backward_onto(
    [q, k, v]: [&Tensor; 3],
    selection: &Selection,
    tail: Tail,
    dout: &Tensor,
    gradients: [Tensor; 3],
) -> Result<[Tensor; 3]> {
    let op = PastLinear::new([q, k, v], selection, tail)?;
    for (gradient, input) in gradients.iter().zip([q, k, v]) {
        if gradient.dims() != input.dims() || gradient.dtype() != input.dtype() {
            return Err(shape_error(
                "past_linear: a gradient does not fit its input",
                shapes_of(&[("gradient", gradient)]),
                &shapes_of(&[("input", input)]),
                "gradients have the shapes and types of query, key and value",
            ));
        }
    }
    if q.device().is_cuda() && !op.lacks_kernels(q) {
        op.check_dout(q, dout)?;
        let [dq, dk, dv] = &gradients;
        supported(NAME, &[q, k, v, dout, dq, dk, dv])?;
        with_cuda::<7, ()>(NAME, [q, k, v, dout, dq, dk, dv], |operands| Gradients(&op).launch(operands))?;
        return Ok(gradients);
    }
    let more = Gradients(&op).of([q, k, v], dout)?;
    let [dq, dk, dv] = [0, 1, 2].map(|n| &gradients[n] + &more[n]);
    Ok([dq?, dk?, dv?])
}

pub(crate) struct PastLinear {
    pub(crate) shape: AttentionShape,
    pub(crate) selection: Selection,
    pub(super) tail: Tail,
}

impl PastLinear {
    pub(super) fn new([q, k, v]: [&Tensor; 3], selection: &Selection, tail: Tail) -> Result<Self> {
        supported(NAME, &[q, k, v, selection.lists()])?;
        let shape = selection.shape().clone();
        let given = [dims4("query", q)?, dims4("key", k)?, dims4("value", v)?];
        let same_type = q.dtype() == k.dtype() && q.dtype() == v.dtype();
        if given != [shape.query_dims(), shape.key_dims(), shape.key_dims()] || !same_type {
            return Err(shape_error(
                "past_linear: the inputs do not fit the selection",
                shapes_of(&[("query", q), ("key", k), ("value", v)]),
                &format!("query {:?}, key and value {:?}, of one type", shape.query_dims(), shape.key_dims()),
                "a selection is made for one shape",
            ));
        }
        Ok(Self { shape, selection: selection.clone(), tail })
    }

    pub(super) fn check_dout(&self, q: &Tensor, dout: &Tensor) -> Result<()> {
        if dout.dims() != q.dims() || dout.dtype() != q.dtype() {
            return Err(shape_error(
                "past_linear: the output's gradient does not fit the query",
                shapes_of(&[("dout", dout)]),
                &format!("{:?} {:?}", q.dims(), q.dtype()),
                "`dout` has the shape and element type of the output",
            ));
        }
        Ok(())
    }

    /// Whether the inputs are on a GPU and no kernel computes this tail, so that [`products`] computes it.
    pub(super) fn lacks_kernels(&self, q: &Tensor) -> bool {
        q.device().is_cuda() && (self.tail == Tail::Complement || !self.shape.causal())
    }
}

/// The op that computes the gradients of query, key and value from query, key, value and the output's gradient. On a
/// GPU three more operands may follow, to which the gradients are added in place.
pub(crate) struct Gradients<'a>(pub(crate) &'a PastLinear);

impl Gradients<'_> {
    fn of(&self, [q, k, v]: [&Tensor; 3], dout: &Tensor) -> Result<[Tensor; 3]> {
        let op = self.0;
        op.check_dout(q, dout)?;
        supported(NAME, &[q, k, v, dout])?;
        if op.lacks_kernels(q) {
            return products::backward(op, [q, k, v], dout);
        }
        if q.device().is_cuda() {
            let [dq, dk, dv] = with_cuda(NAME, [q, k, v, dout], |operands| self.launch(operands))?;
            return Ok([cuda_tensor(dq, q.shape()), cuda_tensor(dk, k.shape()), cuda_tensor(dv, v.shape())]);
        }
        let guards = [q, k, v, dout].map(Tensor::storage_and_layout);
        let view =
            |n: usize| -> Result<View<'_>> { Ok(View::new(cpu_storage(&guards[n].0, NAME)?, guards[n].1)?) };
        let problem = Problem::new(&op.shape, 1.0, None, [view(0)?, view(1)?, view(2)?]);
        let except = (op.tail == Tail::Complement).then(|| op.selection.host()).transpose()?;
        let dout = view(3)?;
        let gradients = cpu::past_linear::backward(&problem, op.selection.blocks(), except, &dout);
        let tensor = |values, like: &Tensor| f32_tensor(values, like.shape(), like.dtype());
        Ok([tensor(gradients.dq, q)?, tensor(gradients.dk, k)?, tensor(gradients.dv, v)?])
    }
}

impl CustomOp3 for PastLinear {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let views = [View::new(q, q_layout)?, View::new(k, k_layout)?, View::new(v, v_layout)?];
        let problem = Problem::new(&self.shape, 1.0, None, views);
        let except = (self.tail == Tail::Complement).then(|| self.selection.host()).transpose()?;
        let out = cpu::past_linear::forward(&problem, self.selection.blocks(), except);
        Ok((to_storage(out, q.dtype())?, q_layout.shape().clone()))
    }

    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_layout: &Layout,
        k: &CudaStorage,
        k_layout: &Layout,
        v: &CudaStorage,
        v_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let inputs = [(q, q_layout), (k, k_layout), (v, v_layout)];
        Ok((self.launch(inputs)?, q_layout.shape().clone()))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        _: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [dq, dk, dv] = Gradients(self).of([q, k, v], dout)?;
        Ok((Some(dq), Some(dk), Some(dv)))
    }
}
