//! The router: two small projections of block means, and the loss that trains them.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Init, VarBuilder};

use crate::error::Error;
use crate::selection::Blocks;
use crate::shape::AttentionShape;

/// Scores of blocks of keys: `s_IJ = (Rq qbar_I) . (Rk kbar_J) / sqrt(head_dim)`, with the means `qbar`, `kbar` of blocks and
/// one pair of matrices a key head. With identities, the start, the score is that of the means themselves.
#[derive(Debug, Clone)]
pub struct Router {
    query: Tensor,
    key: Tensor,
}

impl Router {
    /// A router of variables that start as identities.
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

    /// A router of given matrices, both (key heads, head_dim, head_dim) in f32.
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
            return Err(Error::new("a router's matrices do not fit together")
                .got(format!("{:?} {:?}, {:?} {:?}", query.dims(), query.dtype(), key.dims(), key.dtype()))
                .allowed("two of (key heads, head_dim, head_dim) in f32")
                .hint("`Router::new` makes identities")
                .into());
        }
        Ok(Self { query, key })
    }

    /// A router from a model's variables: `q_router.weight` and `k_router.weight`, in f32. What is missing in
    /// a `VarMap` starts at random; [`Router::new`] starts with identities, which know something already.
    ///
    /// # Errors
    /// When they are missing or have another shape.
    pub fn load(key_heads: usize, head_dim: usize, vb: VarBuilder<'_>) -> Result<Self> {
        let get = |name: &str| {
            let dims = (key_heads, head_dim, head_dim);
            let start = Init::Randn { mean: 0.0, stdev: (head_dim as f64).powf(-0.5) };
            vb.pp(name).get_with_hints_dtype(dims, "weight", start, DType::F32)
        };
        Self::from_tensors(get("q_router")?, get("k_router")?)
    }

    /// The matrices of queries and of keys.
    pub fn weights(&self) -> [&Tensor; 2] {
        [&self.query, &self.key]
    }

    pub(super) fn detached(&self) -> Self {
        Self { query: self.query.detach(), key: self.key.detach() }
    }

    /// (key heads, blocks of queries, columns) from means of (key heads, blocks of all segments, head_dim).
    pub(super) fn scores(&self, [q, k]: [Tensor; 2], shape: &AttentionShape) -> Result<Tensor> {
        let (key_heads, rows, d) = q.dims3()?;
        if self.query.dims() != [key_heads, d, d] {
            return Err(Error::new("the router is one of other heads")
                .got(format!("{:?}", self.query.dims()))
                .allowed(format!("{:?}", [key_heads, d, d]))
                .hint("it has a pair of matrices for each key head")
                .into());
        }
        // Each batch entry has scores of its own; documents share a matrix, whose other parts are no candidates.
        let groups = if shape.is_packed() { 1 } else { shape.batch() };
        let split = |x: Tensor| x.reshape((key_heads * groups, (), d));
        let q = split(q.matmul(&self.query.t()?.contiguous()?)?)?;
        let k = split(k.matmul(&self.key.t()?.contiguous()?)?)?;
        let scores = (q.matmul(&k.t()?.contiguous()?)? / (d as f64).sqrt())?;
        scores.reshape((key_heads, rows, ()))
    }
}

/// `-sum T log softmax(s) / sum T` over the candidates of each row.
pub(super) fn cross_entropy(scores: &Tensor, mass: &Tensor, blocks: &Blocks) -> Result<Tensor> {
    let columns = blocks.columns();
    let mut hidden = Vec::with_capacity(blocks.rows() * columns);
    for (segment, block) in blocks.each() {
        let first = blocks.first_column(segment);
        let candidates = first..first + blocks.candidates(segment, block);
        // Far below any score, and finite: rows without candidates have no mass, and no gradient.
        hidden.extend((0..columns).map(|column| if candidates.contains(&column) { 0f32 } else { -1e30 }));
    }
    let hidden = Tensor::from_vec(hidden, (1, blocks.rows(), columns), scores.device())?;
    let scores = scores.broadcast_add(&hidden)?;
    let shifted = scores.broadcast_sub(&scores.max_keepdim(2)?.detach())?;
    let log_softmax = shifted.broadcast_sub(&shifted.exp()?.sum_keepdim(2)?.log()?)?;
    // No mass at all, where no block has a candidate, gives 0.
    let all = (mass.sum_all()? + f64::from(f32::MIN_POSITIVE))?;
    (mass * log_softmax)?.sum_all()?.neg()? / all
}
