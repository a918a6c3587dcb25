//! SLA2 (arXiv 2602.12675): a router selects the blocks of keys to which a block of queries attends exactly. Linear
//! attention covers the blocks that are not selected, and by default the selected ones too ([`Tail`]). A learned weight
//! mixes the two outputs.
//!
//! ```
//! use candle_core::{Device, Tensor, Var};
//! use candle_sage::{Router, SageBwd, Sla2};
//!
//! let device = Device::Cpu;
//! let var = || Var::randn(0f32, 1., (1, 512, 4, 64), &device);
//! let (q, k, v) = (var()?, var()?, var()?);
//! let router = Router::new(4, 64, &device)?;
//! let theta = Var::from_tensor(&Tensor::full(2f32, 4, &device)?)?;
//!
//! let sla2 = Sla2::new(SageBwd::default()).blocks(2).block((64, 64)).causal(true);
//! let selection = sla2.select(&router, &q, &k)?;
//! let out = sla2.apply(&q, &k, &v, &selection, &theta)?;
//! let gradients = out.sqr()?.mean_all()?.backward()?;
//! assert_eq!(gradients.get(&theta).unwrap().dims(), [4]);
//! # Ok::<(), candle_core::Error>(())
//! ```

mod cached;
mod router;
mod soft;
mod vjp;

pub use cached::Sla2Cache;
use candle_core::{Result, Tensor};
pub use router::Router;
pub use vjp::Sla2Vjp;

use crate::error::Error;
use crate::ops::mixture::Mixture;
pub use crate::ops::{Alpha, Tail};
use crate::ops::{Attention, blend, block_mass, choose, past_linear, pool_keys, pool_queries};
use crate::scheme::Scheme;
use crate::selection::{Blocks, Selection};
use crate::shape::{AttentionShape, Packing};

/// Block-sparse attention with a router and a linear tail.
///
/// For a query `i` of block `I`, let `S(I)` be the selected blocks of keys and, with a causal mask, the blocks on the
/// diagonal, masked token by token:
///
/// ```text
/// Os_i = softmax attention over S(I), in the numerics of a scheme
/// Ol_i = phi(q_i) H_I / (phi(q_i) . z_I), linear attention over the blocks of the tail
/// a_i  = sigmoid(theta + log(n / m)), or 1 if m = 0: i sees n keys of S(I), and the other candidates have m keys
/// O_i  = a_i Os_i + (1 - a_i) Ol_i
/// ```
///
/// The *candidates* are the blocks of keys that a block of queries may select: see [`Selection`]. The tail covers all
/// candidates, or those that are not selected ([`Tail`]). [`past_linear`](fn@crate::ops::past_linear) defines `phi`,
/// `H_I` and `z_I`. Query, key and value are as in [`Attention`]. `theta` has one f32 value for each query head; 2 is a
/// good initial value. The router's choice has no gradient: Q, K, V and `theta` train through the output, the router
/// through [`Sla2::router_loss`]. With a causal mask, the first blocks of queries have at most as many candidates as
/// the router may select: their result is dense attention.
///
/// With a causal mask no token after a query changes the query's output: the router represents a block of queries by
/// the mean of its first query and of earlier queries, no candidate contains a later key, and the tail sums only over
/// candidates. (With [`SageBwd`](crate::SageBwd) K's mean over all tokens is subtracted before quantizing, so that
/// later tokens change K's rounding errors; unquantized attention has no such dependence.)
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_sage::{Attention, Router, Scheme, Sla2};
///
/// let x = Tensor::randn(0f32, 1., (1, 64, 2, 8), &Device::Cpu)?;
/// let (router, theta) = (Router::new(2, 8, &Device::Cpu)?, Tensor::zeros(2, DType::F32, &Device::Cpu)?);
/// // If all blocks may be selected, nothing is left to the tail: the result is dense attention.
/// let sla2 = Sla2::new(Scheme::Unquantized).block((16, 16)).blocks(4).causal(true);
/// let out = sla2.apply(&x, &x, &x, &sla2.select(&router, &x, &x)?, &theta)?;
/// let dense = Attention::new(Scheme::Unquantized).causal(true).apply(&x, &x, &x)?;
/// assert!((out - dense)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-5);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Sla2 {
    /// Has no selection: each call adds one.
    attention: Attention,
    count: usize,
    nearest: usize,
    block: (usize, usize),
    pool: Option<usize>,
    tail: Option<Tail>,
    alpha: Alpha,
}

impl Sla2 {
    /// SLA2 that uses `scheme` for the attention over the selected blocks. By default each block of 128 queries selects
    /// at most 4 blocks of 128 keys, and the mask is not causal.
    pub fn new(scheme: impl Into<Scheme>) -> Self {
        Self {
            attention: Attention::new(scheme),
            count: 4,
            nearest: 0,
            block: (128, 128),
            pool: None,
            tail: Some(Tail::Past),
            alpha: Alpha::Count,
        }
    }

    /// The factor of `Q K^T` in the attention over selected blocks, and in the dense attention that the router is
    /// trained to match. The default is 1 / sqrt(head_dim). The tail does not use this factor.
    #[must_use]
    pub fn softmax_scale(mut self, softmax_scale: f64) -> Self {
        self.attention = self.attention.softmax_scale(softmax_scale);
        self
    }

    /// The largest number of blocks of keys that a block of queries selects. With a causal mask, 0 is allowed: queries
    /// then use only the block on the diagonal and the tail.
    #[must_use]
    pub fn blocks(mut self, count: usize) -> Self {
        self.count = count;
        self
    }

    /// With a causal mask: the number of nearest blocks before the diagonal that are always selected; the router
    /// selects the others. A router may drop near blocks in favour of far ones, and then misses attention mass that a
    /// window would cover. The default is 0. The maximum is [`Sla2::blocks`]; with it, the router selects nothing. If
    /// fewer than `count` blocks are before the diagonal, all of them are selected. The sums in [`Sla2::router_loss`]
    /// include the nearest blocks.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_sage::{Router, Scheme, Sla2};
    ///
    /// let x = Tensor::randn(0f32, 1., (1, 128, 2, 8), &Device::Cpu)?;
    /// let router = Router::new(2, 8, &Device::Cpu)?;
    /// let sla2 = Sla2::new(Scheme::Unquantized).block((16, 16)).blocks(3).nearest(2).causal(true);
    /// let list = sla2.select(&router, &x, &x)?.list(0, 0, 7)?;
    /// // The router's block, the two nearest ones, and the diagonal.
    /// assert!(list[0] < 5 && list[1..] == [5, 6, 7]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    #[must_use]
    pub fn nearest(mut self, count: usize) -> Self {
        self.nearest = count;
        self
    }

    /// (tokens of a block of queries, tokens of a block of keys). CUDA allows only (128, 128), the CPU only multiples
    /// of [`Scheme::block_unit`].
    #[must_use]
    pub fn block(mut self, block: (usize, usize)) -> Self {
        self.block = block;
        self
    }

    /// Whether a query sees only the keys up to its own position.
    #[must_use]
    pub fn causal(mut self, causal: bool) -> Self {
        self.attention = self.attention.causal(causal);
        self
    }

    /// With a causal mask, the router represents a block of queries by the mean of the block's first query and the
    /// `queries - 1` queries before it. The default of `queries` is a quarter of the block. (Without a mask, the router
    /// uses the mean of the whole block.)
    #[must_use]
    pub fn pool(mut self, queries: usize) -> Self {
        self.pool = Some(queries);
        self
    }

    /// The blocks that the linear tail sums over. `None`: block-sparse attention without a tail.
    #[must_use]
    pub fn tail(mut self, tail: Option<Tail>) -> Self {
        self.tail = tail;
        self
    }

    /// How the mixing weight `a` depends on `theta`.
    #[must_use]
    pub fn alpha(mut self, alpha: Alpha) -> Self {
        self.alpha = alpha;
        self
    }

    /// Packed documents: a query sees only keys of the same document. The batch must be 1. A document's blocks start at
    /// its first token.
    #[must_use]
    pub fn packing(mut self, packing: Packing) -> Self {
        self.attention = self.attention.packing(packing);
        self
    }

    /// See [`Attention::deterministic`].
    #[must_use]
    pub fn deterministic(mut self, deterministic: bool) -> Self {
        self.attention = self.attention.deterministic(deterministic);
        self
    }

    fn shape(&self, q: &Tensor, k: &Tensor) -> Result<(AttentionShape, Blocks)> {
        let shape = self.attention.shape([q, k, k])?;
        let blocks = Blocks::new(&shape, self.block)?;
        if self.count == 0 && !shape.causal() {
            return Err(Error::new("`blocks` must be at least 1 without a causal mask")
                .got("0 blocks without a causal mask")
                .allowed("at least 1 block")
                .hint("with a causal mask, 0 blocks are allowed, because the block on the diagonal is always included")
                .into());
        }
        if self.nearest > self.count || self.nearest > 0 && !shape.causal() {
            let mask = if shape.causal() { "a causal mask" } else { "no causal mask" };
            return Err(Error::new("`nearest` is out of range")
                .got(format!("nearest {}, blocks {}, {mask}", self.nearest, self.count))
                .allowed("with a causal mask: 0 to `blocks`; without a causal mask: 0")
                .hint("nearest blocks count towards `blocks`; the router selects the others")
                .into());
        }
        if self.pool == Some(0) {
            return Err(Error::new("`pool` is out of range")
                .got("pool 0")
                .allowed("at least 1 query")
                .hint("omit `pool` for the default, a quarter of the queries of a block")
                .into());
        }
        Ok((shape, blocks))
    }

    /// The means of the blocks of queries and of the blocks of keys, without gradients.
    fn pooled(&self, [q, k]: [&Tensor; 2], shape: &AttentionShape, blocks: &Blocks) -> Result<[Tensor; 2]> {
        Ok([
            pool_queries(&q.detach(), shape, blocks, self.pool_of_block())?,
            pool_keys(&k.detach(), shape, blocks)?,
        ])
    }

    /// The setting [`pool`](Self::pool), or its default.
    fn pool_of_block(&self) -> usize {
        self.pool.unwrap_or_else(|| (self.block.0 / 4).max(1))
    }

    /// The router's selection for these queries and keys: for each block of queries the [nearest](Sla2::nearest)
    /// candidates and the candidates with the largest scores, at most [`Sla2::blocks`] candidates in all. Of
    /// candidates with equal scores, the earlier are selected first. The selection has no gradient.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_sage::{Router, Scheme, Sla2};
    ///
    /// let x = Tensor::randn(0f32, 1., (1, 64, 2, 8), &Device::Cpu)?;
    /// let router = Router::new(2, 8, &Device::Cpu)?;
    /// let sla2 = Sla2::new(Scheme::Unquantized).block((16, 16)).blocks(1).causal(true);
    /// let selection = sla2.select(&router, &x, &x)?;
    /// // A list also has the block on the diagonal. The first block of queries has no candidates.
    /// assert_eq!(selection.list(0, 0, 0)?, [0]);
    /// assert_eq!(selection.list(0, 0, 3)?.len(), 2);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// When shapes or settings do not fit.
    pub fn select(&self, router: &Router, q: &Tensor, k: &Tensor) -> Result<Selection> {
        let (shape, blocks) = self.shape(q, k)?;
        let scores = router.detached().scores(self.pooled([q, k], &shape, &blocks)?, &shape)?;
        choose(&scores, &shape, &blocks, self.count, self.nearest)
    }

    /// Computes the output in candle's graph: query, key, value and `theta` receive gradients.
    ///
    /// # Errors
    /// When shapes, types or settings do not fit.
    pub fn apply(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        selection: &Selection,
        theta: &Tensor,
    ) -> Result<Tensor> {
        let sparse = self.attention.clone().select(selection).apply(q, k, v)?;
        let Some(tail) = self.tail else { return Ok(sparse) };
        let inputs = [q, k, v, &sparse, theta];
        if !inputs.iter().any(|input| input.track_op()) {
            // Nothing is differentiated, so the tail does not have to be in a graph.
            return Ok(Mixture::new(inputs, selection, tail, self.alpha)?.forward(inputs)?.0);
        }
        let linear = past_linear(q, k, v, selection, tail)?;
        blend(&sparse, &linear, theta, selection, self.alpha)
    }

    /// Computes the output outside candle's graph, together with its vector-Jacobian product: for training
    /// loops that do not use candle's graph.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_sage::{Router, Scheme, Sla2};
    ///
    /// let x = Tensor::randn(0f32, 1., (1, 64, 2, 8), &Device::Cpu)?;
    /// let router = Router::new(2, 8, &Device::Cpu)?;
    /// let sla2 = Sla2::new(Scheme::Unquantized).block((16, 16)).blocks(1).causal(true);
    /// let theta = Tensor::full(2f32, 2, &Device::Cpu)?;
    /// let (out, vjp) = sla2.vjp(&x, &x, &x, &sla2.select(&router, &x, &x)?, &theta)?;
    /// let [dq, dk, dv, dtheta] = vjp.apply(&out)?;
    /// assert!([dq, dk, dv].iter().all(|gradient| gradient.dims() == x.dims()));
    /// assert_eq!(dtheta.to_vec1::<f32>()?, vjp.theta_gradient(&out)?.to_vec1::<f32>()?);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Sla2::apply`].
    pub fn vjp(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        selection: &Selection,
        theta: &Tensor,
    ) -> Result<(Tensor, Sla2Vjp)> {
        let (sparse, attention) = self.attention.clone().select(selection).vjp(q, k, v)?;
        let inputs = [q, k, v, &sparse, theta].map(Tensor::detach);
        let (out, mixture) = match self.tail {
            None => (sparse, None),
            Some(tail) => {
                let mixture = Mixture::new(inputs.each_ref(), selection, tail, self.alpha)?;
                let (out, kept) = mixture.forward(inputs.each_ref())?;
                (out, Some((mixture, kept)))
            }
        };
        Ok((out, Sla2Vjp { attention, inputs, mixture }))
    }

    /// The loss that trains the router: the cross-entropy `-sum_IJ T_IJ log softmax_J(s_IJ) / sum T`. The softmax of
    /// the router's scores `s_IJ` is over the blocks that may be selected. `T_IJ` is the sum of dense attention's
    /// probabilities of the keys of block `J` for the queries of block `I`, over all query heads that share a key head.
    /// The loss is a scalar in f32, differentiable only with respect to the router.
    ///
    /// The SLA2 paper instead trains the router through a soft selection ([`Sla2::apply_soft`]).
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_sage::{Router, Scheme, Sla2};
    ///
    /// let x = Tensor::randn(0f32, 1., (1, 64, 2, 8), &Device::Cpu)?;
    /// let router = Router::new(2, 8, &Device::Cpu)?;
    /// let sla2 = Sla2::new(Scheme::Unquantized).block((16, 16)).blocks(1).causal(true);
    /// let gradients = sla2.router_loss(&router, &x, &x)?.backward()?;
    /// assert!(router.weights().iter().all(|weight| gradients.get(weight).is_some()));
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// When shapes or settings do not fit.
    pub fn router_loss(&self, router: &Router, q: &Tensor, k: &Tensor) -> Result<Tensor> {
        let [entropy, mass] = self.router_loss_sums(router, q, k)?;
        entropy / mass
    }

    /// The two sums whose quotient is [`Sla2::router_loss`]: `-sum_IJ T_IJ log softmax_J(s_IJ)`, and `sum T`, which has
    /// no gradient. If heads are split among devices, sum both over the devices before dividing.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_sage::{Router, Scheme, Sla2};
    ///
    /// let x = Tensor::randn(0f32, 1., (1, 64, 2, 8), &Device::Cpu)?;
    /// let router = Router::new(2, 8, &Device::Cpu)?;
    /// let sla2 = Sla2::new(Scheme::Unquantized).block((16, 16)).blocks(1).causal(true);
    /// let [entropy, mass] = sla2.router_loss_sums(&router, &x, &x)?;
    /// let quotient = (entropy / mass)?.to_scalar::<f32>()?;
    /// assert_eq!(quotient, sla2.router_loss(&router, &x, &x)?.to_scalar::<f32>()?);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// When shapes or settings do not fit.
    pub fn router_loss_sums(&self, router: &Router, q: &Tensor, k: &Tensor) -> Result<[Tensor; 2]> {
        let (shape, blocks) = self.shape(q, k)?;
        let (q, k) = (q.detach(), k.detach());
        let scores = router.scores(self.pooled([&q, &k], &shape, &blocks)?, &shape)?;
        let scale = self.attention.scale_of(&shape) as f32;
        let mass = block_mass([&q, &k], &shape, &blocks, scale)?;
        router::entropy_sums(&scores, &mass, &blocks)
    }

    /// The sum of dense attention's probabilities on the selected candidates (see [`Selection`]), divided by the sum on
    /// all candidates: 0 to 1. Each sum is over all queries and heads. On a GPU the call waits for the device.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_sage::{Router, Scheme, Sla2};
    ///
    /// let x = Tensor::randn(0f32, 1., (1, 64, 2, 8), &Device::Cpu)?;
    /// let router = Router::new(2, 8, &Device::Cpu)?;
    /// let sla2 = Sla2::new(Scheme::Unquantized).block((16, 16)).blocks(1).causal(true);
    /// let some = sla2.select(&router, &x, &x)?;
    /// let all = sla2.clone().blocks(4).select(&router, &x, &x)?;
    /// let (some, all) = (sla2.mass_caught(&some, &x, &x)?, sla2.mass_caught(&all, &x, &x)?);
    /// assert!(0.0 < some && some < all && (all - 1.0).abs() < 1e-6);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// When shapes or settings do not fit.
    pub fn mass_caught(&self, selection: &Selection, q: &Tensor, k: &Tensor) -> Result<f64> {
        let (shape, blocks) = self.shape(q, k)?;
        if *selection.shape() != shape || selection.block() != self.block {
            return Err(Error::shape("the selection was made for other queries and keys")
                .got(format!("blocks {:?} of {:?}", selection.block(), selection.shape()))
                .allowed(format!("blocks {:?} of {shape:?}", self.block))
                .hint("call `Sla2::select` with the queries and keys of this call")
                .into());
        }
        let scale = self.attention.scale_of(&shape) as f32;
        let mass = block_mass([&q.detach(), &k.detach()], &shape, &blocks, scale)?.to_vec3::<f32>()?;
        let lists = selection.host()?;
        let (mut caught, mut all) = (0f64, 0f64);
        for (key_head, mass) in mass.iter().enumerate() {
            for (mass, (segment, block)) in mass.iter().zip(blocks.each()) {
                let first = blocks.first_column(segment);
                let mass = &mass[first..first + blocks.candidates(segment, block)];
                all += mass.iter().map(|&x| f64::from(x)).sum::<f64>();
                let seen = lists.seen(segment, key_head, block).iter().map(|&at| at as usize);
                caught += seen.filter_map(|at| mass.get(at)).map(|&x| f64::from(x)).sum::<f64>();
            }
        }
        Ok(if all == 0.0 { 1.0 } else { caught / all })
    }
}
