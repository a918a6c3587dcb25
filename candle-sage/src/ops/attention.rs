//! Trainable attention as a `CustomOp3`.

use std::sync::OnceLock;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor};

use super::support::{cpu_storage, f32_tensor, on_cpu};
use crate::cpu::view::{View, to_storage};
use crate::cpu::{self, Problem};
use crate::error::Error;
use crate::scheme::Scheme;
use crate::shape::{AttentionShape, Dims, Packing};

/// Attention with a backward: `softmax(softmax_scale Q K^T) V`.
///
/// Query, key and value are (batch, sequence, heads, head_dim) in f32, f16 or bf16, with any
/// strides; the output has the query's shape and type. Query heads may be a multiple of the key
/// heads. All three inputs receive gradients through candle's `backward()`.
///
/// ```
/// use candle_core::{Device, Var};
/// use candle_sage::{ops::Attention, scheme::SageBwd};
///
/// let (q, k, v) = {
///     let var = || Var::randn(0f32, 1., (1, 128, 4, 64), &Device::Cpu);
///     (var()?, var()?, var()?)
/// };
/// let out = Attention::new(SageBwd::default()).causal(true).apply(&q, &k, &v)?;
/// let gradients = out.sqr()?.mean_all()?.backward()?;
/// assert_eq!(gradients.get(&k).unwrap().dims(), k.dims());
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Attention {
    scheme: Scheme,
    causal: bool,
    softmax_scale: Option<f64>,
    packing: Option<Packing>,
}

impl Attention {
    /// Attention with the numerics of `scheme`: not causal, the default softmax scale
    /// `1 / sqrt(head_dim)`, no packing.
    pub fn new(scheme: impl Into<Scheme>) -> Self {
        Self { scheme: scheme.into(), ..Self::default() }
    }

    /// Whether a query sees only the keys up to its own position, counted from the end: with
    /// different lengths the last query sees every key (as in FlashAttention).
    #[must_use]
    pub fn causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    /// Replaces the factor of the logits.
    #[must_use]
    pub fn softmax_scale(mut self, softmax_scale: f64) -> Self {
        self.softmax_scale = Some(softmax_scale);
        self
    }

    /// Attention inside packed documents only; the batch must be 1.
    #[must_use]
    pub fn packing(mut self, packing: Packing) -> Self {
        self.packing = Some(packing);
        self
    }

    /// Runs the forward. State for a backward is kept inside the output's graph node, and only
    /// when one of the inputs is tracked; it goes when the graph does.
    ///
    /// # Errors
    /// When shapes, element types or settings are not supported: see [`AttentionShape::new`].
    pub fn apply(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        self.scheme.validate()?;
        let shape = AttentionShape::new(
            dims4("query", q)?,
            dims4("key", k)?,
            dims4("value", v)?,
            self.causal,
            self.packing.clone(),
        )?;
        if q.dtype() != k.dtype() || q.dtype() != v.dtype() {
            let got = [q, k, v].map(|t| t.dtype().as_str()).join(", ");
            return Err(Error::new("query, key and value differ in element type")
                .got(got)
                .allowed("one of f32, f16, bf16 for all three")
                .hint("convert with `to_dtype`")
                .into());
        }
        let softmax_scale = self.softmax_scale.unwrap_or_else(|| shape.default_softmax_scale());
        let as_f32 = softmax_scale as f32;
        if !as_f32.is_finite() || (as_f32 == 0.0 && softmax_scale != 0.0) {
            return Err(Error::new("softmax scale is out of range")
                .got(softmax_scale)
                .allowed("a number that f32 can hold")
                .hint("leave it out for 1 / sqrt(head_dim)")
                .into());
        }
        on_cpu("attention", &[q, k, v])?;
        let tracked = q.track_op() || k.track_op() || v.track_op();
        let op = AttentionOp {
            scheme: self.scheme,
            shape,
            softmax_scale: as_f32,
            saved: tracked.then(OnceLock::new),
        };
        if tracked { q.apply_op3(k, v, op) } else { q.apply_op3_no_bwd(k, v, &op) }
    }
}

fn dims4(name: &str, tensor: &Tensor) -> Result<Dims> {
    tensor.dims4().map_err(|_| {
        Error::new(format!("{name} does not have four dimensions"))
            .got(format!("{:?}", tensor.dims()))
            .allowed("(batch, sequence, heads, head_dim)")
            .hint("add a dimension of 1 with `unsqueeze`")
            .into()
    })
}

/// One call of the op: a fresh value each time, since the state of the call lives in it.
struct AttentionOp {
    scheme: Scheme,
    shape: AttentionShape,
    softmax_scale: f32,
    /// Filled by the forward; `None` when no input is tracked.
    saved: Option<OnceLock<cpu::Saved>>,
}

fn shape_of((batch, sequence, heads, head_dim): Dims) -> Shape {
    Shape::from((batch, sequence, heads, head_dim))
}

impl CustomOp3 for AttentionOp {
    fn name(&self) -> &'static str {
        "sage-attention"
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
        let problem = Problem::new(&self.shape, self.softmax_scale, views);
        let (out, saved) = cpu::forward(&self.scheme, &problem);
        if let Some(slot) = &self.saved {
            slot.set(saved).map_err(|_| Error::new("an attention op value was run twice"))?;
        }
        let dtype = q.dtype();
        Ok((to_storage(out, dtype)?, shape_of(self.shape.query_dims())))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let saved = self
            .saved
            .as_ref()
            .and_then(OnceLock::get)
            .ok_or_else(|| Error::new("attention has no forward to go back from"))?;
        let tensors = [q, k, v, out, dout].map(Tensor::storage_and_layout);
        let mut views = Vec::with_capacity(tensors.len());
        for (storage, layout) in &tensors {
            views.push(View::new(cpu_storage(storage, self.name())?, layout)?);
        }
        let &[q_view, k_view, v_view, out_view, dout_view] = views.as_slice() else {
            unreachable!("five tensors, five views")
        };
        let problem = Problem::new(&self.shape, self.softmax_scale, [q_view, k_view, v_view]);
        let gradients = cpu::backward(&self.scheme, &problem, saved, &out_view, &dout_view);
        let dtype: DType = q.dtype();
        let tensor = |values, dims| f32_tensor(values, shape_of(dims), dtype).map(Some);
        Ok((
            tensor(gradients.dq, self.shape.query_dims())?,
            tensor(gradients.dk, self.shape.key_dims())?,
            tensor(gradients.dv, self.shape.key_dims())?,
        ))
    }
}
