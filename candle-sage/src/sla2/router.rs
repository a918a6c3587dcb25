//! The router of SLA2, and the loss that trains it.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Init, VarBuilder};

use crate::error::Error;
use crate::ops::shapes_of;
use crate::selection::Blocks;
use crate::shape::AttentionShape;
use crate::variables;

/// Scores each block of keys `J` for each block of queries `I`: `s_IJ = (Rq qbar_I) . (Rk kbar_J) / sqrt(head_dim)`,
/// where `qbar_I` and `kbar_J` are the means of the blocks. Each key head has its own matrices `Rq` and `Rk`. If they
/// are identities, as in a new router, the score is the scaled dot product of the means.
///
/// ```
/// use candle_core::Device;
/// use candle_sage::Router;
///
/// let router = Router::new(2, 8, &Device::Cpu)?;
/// let [query, key] = router.weights();
/// assert_eq!((query.dims(), key.dims()), (&[2, 8, 8][..], &[2, 8, 8][..]));
/// // Variables, for an optimizer.
/// assert!(query.is_variable() && key.is_variable());
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Router {
    query: Tensor,
    key: Tensor,
}

impl Router {
    /// A router whose matrices are new variables, initialized to identities.
    ///
    /// # Errors
    /// When the device fails.
    pub fn new(key_heads: usize, head_dim: usize, device: &Device) -> Result<Self> {
        let identity = || -> Result<Tensor> {
            let one = Tensor::eye(head_dim, DType::F32, device)?;
            let all = one.unsqueeze(0)?.repeat((key_heads, 1, 1))?;
            Ok(Var::from_tensor(&all)?.into_inner())
        };
        Ok(Self { query: identity()?, key: identity()? })
    }

    /// A router with given matrices, both (key heads, head_dim, head_dim) in f32.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_sage::Router;
    ///
    /// let matrices = Tensor::randn(0f32, 1., (2, 8, 8), &Device::Cpu)?;
    /// assert!(Router::from_tensors(matrices.clone(), matrices.clone()).is_ok());
    /// assert!(Router::from_tensors(matrices.clone(), matrices.narrow(0, 0, 1)?).is_err());
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the shapes or types do not fit.
    pub fn from_tensors(query: Tensor, key: Tensor) -> Result<Self> {
        let square = |x: &Tensor| x.dims3().is_ok_and(|(_, rows, columns)| rows == columns);
        if !square(&query)
            || query.dims() != key.dims()
            || query.dtype() != DType::F32
            || key.dtype() != DType::F32
        {
            return Err(Error::shape("the router's two matrices have the wrong shape or type")
                .got(shapes_of(&[("query", &query), ("key", &key)]))
                .allowed("two of (key heads, head_dim, head_dim) in f32")
                .hint("`Router::new` makes a matching pair of identity matrices")
                .into());
        }
        Ok(Self { query, key })
    }

    /// A router from a model's variables `q_router.weight` and `k_router.weight`, in f32. If a `VarMap` does not have
    /// the matrices, they start as identities, as in [`Router::new`]. (Matrices of zeros, which cannot rank blocks,
    /// also become identities.)
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_nn::{VarBuilder, VarMap};
    /// use candle_sage::Router;
    ///
    /// let variables = VarMap::new();
    /// let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    /// let router = Router::load(2, 8, vb)?;
    /// assert_eq!(router.weights()[0].to_vec3::<f32>()?, Router::new(2, 8, &Device::Cpu)?.weights()[0].to_vec3::<f32>()?);
    /// let names = variables.data().lock().unwrap();
    /// assert!(names.contains_key("q_router.weight") && names.contains_key("k_router.weight"));
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the variables are missing or have the wrong shape.
    pub fn load(key_heads: usize, head_dim: usize, vb: VarBuilder<'_>) -> Result<Self> {
        let get = |name: &str| {
            let dims = (key_heads, head_dim, head_dim);
            variables::load(&vb.pp(name), dims, "weight", Init::Const(0.0), DType::F32)
        };
        let start = Self::new(key_heads, head_dim, vb.device())?;
        let router = Self::from_tensors(get("q_router")?, get("k_router")?)?;
        for (weight, identity) in router.weights().into_iter().zip(start.weights()) {
            if weight.abs()?.max_all()?.to_scalar::<f32>()? == 0.0 {
                // Writing in place changes the variable itself.
                weight.slice_set(identity, 0, 0)?;
            }
        }
        Ok(router)
    }

    /// The router's matrices: `Rq` for queries, `Rk` for keys.
    pub fn weights(&self) -> [&Tensor; 2] {
        [&self.query, &self.key]
    }

    pub(super) fn detached(&self) -> Self {
        Self { query: self.query.detach(), key: self.key.detach() }
    }

    /// The scores: (key heads, blocks of queries, columns). A column is a block of keys: see [`Blocks::first_column`].
    /// `q` has a mean of queries for each block of queries, and `k` a mean of keys for each block of keys. Both are
    /// (key heads, blocks of all batch entries or documents, head_dim).
    pub(super) fn scores(&self, [q, k]: [Tensor; 2], shape: &AttentionShape) -> Result<Tensor> {
        let (key_heads, rows, d) = q.dims3()?;
        if self.query.dims() != [key_heads, d, d] {
            return Err(Error::shape("the router was made for other numbers of heads or another head_dim")
                .got(format!("{:?}", self.query.dims()))
                .allowed(format!("{:?}", [key_heads, d, d]))
                .hint("a router has a pair of matrices for each key head")
                .into());
        }
        // Each batch entry has its own score matrix. Packed documents share one matrix, in which the scores between
        // different documents are ignored.
        let groups = if shape.is_packed() { 1 } else { shape.batch() };
        let split = |x: Tensor| x.reshape((key_heads * groups, (), d));
        let q = split(q.matmul(&self.query.t()?.contiguous()?)?)?;
        let k = split(k.matmul(&self.key.t()?.contiguous()?)?)?;
        let scores = (q.matmul(&k.t()?.contiguous()?)? / (d as f64).sqrt())?;
        scores.reshape((key_heads, rows, ()))
    }
}

/// The two sums of [`Sla2::router_loss_sums`](super::Sla2::router_loss_sums). `mass` is the `T` of
/// [`Sla2::router_loss`](super::Sla2::router_loss).
pub(super) fn entropy_sums(scores: &Tensor, mass: &Tensor, blocks: &Blocks) -> Result<[Tensor; 2]> {
    let columns = blocks.columns();
    let mut hidden = Vec::with_capacity(blocks.rows() * columns);
    for (segment, block) in blocks.each() {
        let first = blocks.first_column(segment);
        let candidates = first..first + blocks.candidates(segment, block);
        // -1e30 is far below any score, but finite: minus infinity would turn a row without candidates into NaN. In
        // such a row `mass` is 0, and the scores have no gradient.
        hidden.extend((0..columns).map(|column| if candidates.contains(&column) { 0f32 } else { -1e30 }));
    }
    let hidden = Tensor::from_vec(hidden, (1, blocks.rows(), columns), scores.device())?;
    let scores = scores.broadcast_add(&hidden)?;
    let shifted = scores.broadcast_sub(&scores.max_keepdim(2)?.detach())?;
    let log_softmax = shifted.broadcast_sub(&shifted.exp()?.sum_keepdim(2)?.log()?)?;
    // Callers divide the first sum by the second. If no block of queries has a candidate, both are 0. Adding the
    // smallest normal number to the second makes the quotient 0 instead of NaN.
    let all = (mass.sum_all()? + f64::from(f32::MIN_POSITIVE))?;
    Ok([(mass * log_softmax)?.sum_all()?.neg()?, all])
}
