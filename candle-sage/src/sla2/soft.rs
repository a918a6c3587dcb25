//! A soft selection of blocks, through which the SLA2 paper trains the router.

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::ops::{sigmoid, softmax};

use super::{Router, Sla2};
use crate::error::Error;
use crate::ops::{Alpha, Attention, Tail, soft_top_k};
use crate::scheme::Scheme;
use crate::selection::Blocks;
use crate::shape::AttentionShape;

/// Added to divisors and to arguments of logarithms, which may be 0. The gradient of a
/// quotient divides by the square of the divisor, so the square of this number must not be 0 in f32.
const TINY: f64 = 1e-15;

/// Upper limit of the exponents in [`Sla2::apply_soft`], so that their exponentials are finite.
const LARGEST_EXPONENT: f32 = 60.0;

impl Sla2 {
    /// Computes the output with a soft selection instead of [`Sla2::select`]. For a block of queries `I`, each
    /// block of keys `J` that `I` may select has a weight `m_IJ` between 0 and 1: [`soft_top_k`] of the router's
    /// scores and `tau`. Query, key, value, `theta` and the router's matrices receive gradients.
    ///
    /// The formulas of [`Sla2`] change as follows. `c` is the softmax scale. `w_ij` is `m_IJ` in the blocks that `I`
    /// may select, and 1 for all other keys that query `i` sees.
    ///
    /// ```text
    /// Os_i = sum_j w_ij exp(c q_i . k_j) v_j / sum_j w_ij exp(c q_i . k_j)
    /// ```
    ///
    /// The tail weighs a block by `1 - m_IJ` ([`Tail::Complement`]) or by 1 ([`Tail::Past`]). In the formula for `a_i`,
    /// sums of `w_ij` and of `1 - m_IJ` over keys replace `n` and `m`. As `tau` goes to 0 the result approaches
    /// [`Sla2::apply`] with unquantized attention.
    ///
    /// All pairs of tokens are computed, in f32 by candle's operators: memory grows with the product of the lengths.
    /// This function runs only on the CPU.
    ///
    /// # Errors
    /// As [`Sla2::apply`]; on a GPU; with packed documents or [nearest](Sla2::nearest) blocks; if `tau` is not above 0.
    pub fn apply_soft(
        &self,
        router: &Router,
        [q, k, v]: [&Tensor; 3],
        theta: &Tensor,
        tau: f64,
    ) -> Result<Tensor> {
        let (shape, blocks) = self.shape(q, k)?;
        if shape.is_packed() {
            return Err(Error::unsupported("a soft selection does not support packed documents")
                .got(format!("{} documents", shape.segments().len()))
                .allowed("batch entries of equal length")
                .hint("Sla2::router_loss supports packed documents")
                .into());
        }
        if self.nearest > 0 {
            return Err(Error::unsupported("a soft selection does not support nearest blocks")
                .got(format!("{} nearest blocks", self.nearest))
                .allowed("nearest 0")
                .hint("Sla2::apply supports them")
                .into());
        }
        let (batch, heads, key_heads) = (shape.batch(), shape.query_heads(), shape.key_heads());
        let masks = Masks::new(&shape, &blocks, self.count, q.device())?;
        let rows = (key_heads, batch, blocks.query_blocks(0), blocks.key_blocks(0));
        let scores = router.scores(self.pooled([q, k], &shape, &blocks)?, &shape)?.reshape(rows)?;
        let chosen = soft_top_k(&scores.broadcast_add(&masks.hidden)?, self.count, tau)?;
        let chosen = chosen.index_select(&masks.query_blocks, 2)?.index_select(&masks.key_blocks, 3)?;
        // Repeats the rows of each key head for the query heads of its group.
        let group = |x: Tensor| -> Result<Tensor> {
            let (batch, _, rows, columns) = x.dims4()?;
            let all = x.unsqueeze(2)?.expand((batch, key_heads, heads / key_heads, rows, columns))?;
            all.contiguous()?.reshape((batch, heads, rows, columns))
        };
        let heads_first = |x: &Tensor| x.to_dtype(DType::F32)?.transpose(1, 2)?.contiguous();
        let chosen = group(chosen.transpose(0, 1)?)?;
        let (query, key, value) = (heads_first(q)?, group(heads_first(k)?)?, group(heads_first(v)?)?);

        let weights = chosen.broadcast_add(&masks.always)?;
        let logits = (query.matmul(&key.t()?)? * self.attention.scale_of(&shape))?;
        let peak = (&logits + (&weights + TINY)?.log()?)?.max_keepdim(D::Minus1)?.detach();
        let exponents = logits.broadcast_sub(&peak)?.minimum(LARGEST_EXPONENT)?;
        let sparse = weighted_mean(&(exponents.exp()? * &weights)?, &value)?;
        let out = match self.tail {
            None => sparse,
            Some(tail) => {
                let centered = match shape.causal() {
                    true => key.clone(),
                    false => key.broadcast_sub(&key.mean_keepdim(2)?)?,
                };
                let left = masks.candidates.broadcast_sub(&chosen)?;
                let of_tail = match tail {
                    Tail::Complement => left.clone(),
                    Tail::Past => masks.candidates.broadcast_as(left.shape())?.contiguous()?,
                };
                let features = softmax(&query, D::Minus1)?.matmul(&softmax(&centered, D::Minus1)?.t()?)?;
                let linear = weighted_mean(&(features * of_tail)?, &value)?;
                let theta = theta.to_dtype(DType::F32)?.reshape((1, heads, 1, 1))?;
                let share = match self.alpha {
                    Alpha::Count => {
                        let seen = weights.sum_keepdim(D::Minus1)?.log()?;
                        let unseen = (left.sum_keepdim(D::Minus1)?.relu()? + TINY)?.log()?;
                        sigmoid(&theta.broadcast_add(&(seen - unseen)?)?)?
                    }
                    // Where `has_tail` is 0, the share is 1: the output is `sparse`.
                    Alpha::Constant => {
                        let share = sigmoid(&theta)?.broadcast_mul(&masks.has_tail)?;
                        share.broadcast_sub(&(&masks.has_tail - 1.0)?)?
                    }
                };
                (sparse.broadcast_mul(&share)? + linear.broadcast_mul(&(1.0 - share)?)?)?
            }
        };
        out.transpose(1, 2)?.contiguous()?.to_dtype(q.dtype())
    }

    /// The published loss of the first training stage (arXiv 2602.12675, section 3.3): the mean squared difference
    /// between [`Sla2::apply_soft`] and unquantized dense attention. The loss is a scalar in f32, differentiable with
    /// respect to the router and `theta`; query, key and value are detached.
    ///
    /// [`Sla2::router_loss`] trains the router at least as well as this loss. Unlike this loss, it runs on every
    /// device and does not keep all pairs of tokens in memory.
    ///
    /// # Errors
    /// As [`Sla2::apply_soft`].
    pub fn output_loss(
        &self,
        router: &Router,
        inputs: [&Tensor; 3],
        theta: &Tensor,
        tau: f64,
    ) -> Result<Tensor> {
        let inputs = inputs.map(Tensor::detach);
        let [q, k, v] = &inputs;
        let shape = self.shape(q, k)?.0;
        let dense = Attention::new(Scheme::Unquantized).causal(shape.causal());
        let dense = dense.softmax_scale(self.attention.scale_of(&shape)).apply(q, k, v)?;
        let soft = self.apply_soft(router, [q, k, v], theta, tau)?;
        (soft - dense)?.to_dtype(DType::F32)?.sqr()?.mean_all()
    }
}

/// `sum_j weights_ij value_j / sum_j weights_ij`; zeros where all weights are 0.
fn weighted_mean(weights: &Tensor, value: &Tensor) -> Result<Tensor> {
    weights.matmul(value)?.broadcast_div(&(weights.sum_keepdim(D::Minus1)? + TINY)?)
}

/// Which keys the queries see, as tensors.
struct Masks {
    /// 0 where a block of queries may select a block of keys, else minus infinity: (1, 1, blocks of queries, blocks of
    /// keys).
    hidden: Tensor,
    /// The index of each query's block.
    query_blocks: Tensor,
    /// The index of each key's block.
    key_blocks: Tensor,
    /// 1 where a key is in a block that the query may select: (1, 1, queries, keys).
    candidates: Tensor,
    /// 1 where a query sees a key that is not in a candidate block (`Blocks::candidates`): (1, 1, queries, keys).
    always: Tensor,
    /// 1 for queries with more candidate blocks of keys than they select, else 0: (1, 1, queries, 1).
    has_tail: Tensor,
}

impl Masks {
    fn new(shape: &AttentionShape, blocks: &Blocks, count: usize, device: &Device) -> Result<Self> {
        let segment = shape.segments()[0].clone();
        let (queries, keys) = (segment.query.len(), segment.key.len());
        let of = |query: usize| blocks.candidates(0, query / blocks.query);
        let flag = |yes: bool| if yes { 1f32 } else { 0.0 };
        let pairs = |f: &dyn Fn(usize, usize) -> bool| -> Result<Tensor> {
            let all = (0..queries).flat_map(|i| (0..keys).map(move |j| (i, j)));
            Tensor::from_iter(all.map(|(i, j)| flag(f(i, j))), device)?.reshape((1, 1, queries, keys))
        };
        let (rows, columns) = (blocks.query_blocks(0), blocks.key_blocks(0));
        let blocks_of_pairs = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
        let hidden = blocks_of_pairs.map(|(row, column)| match column < blocks.candidates(0, row) {
            true => 0f32,
            false => f32::NEG_INFINITY,
        });
        let ids = |len: usize, block: usize| Tensor::from_iter((0..len).map(|n| (n / block) as u32), device);
        Ok(Self {
            hidden: Tensor::from_iter(hidden, device)?.reshape((1, 1, rows, columns))?,
            query_blocks: ids(queries, blocks.query)?,
            key_blocks: ids(keys, blocks.key)?,
            candidates: pairs(&|i, j| j / blocks.key < of(i))?,
            always: pairs(&|i, j| j / blocks.key >= of(i) && j < segment.visible_keys(i))?,
            has_tail: Tensor::from_iter((0..queries).map(|i| flag(of(i) > count)), device)?
                .reshape((1, 1, queries, 1))?,
        })
    }
}
