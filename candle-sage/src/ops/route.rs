//! The router's computations on the device, without gradients: means of blocks, the choice of the blocks with the
//! largest scores, and the attention mass of blocks.

use candle_core::{DType, Device, Result, Tensor};

use super::support::{cpu_storage, cuda_tensor, dims4, supported, with_cuda};
use crate::cpu::view::View;
use crate::cpu::{self, Problem};
use crate::error::Error;
use crate::launch::Launch;
use crate::selection::{Blocks, Selection};
use crate::shape::AttentionShape;

const NAME: &str = "route";

/// The means of all blocks of queries, (key heads, blocks, head_dim) in f32. A block's mean is over the query heads of
/// a key head, and over tokens: with a causal mask, the block's first query and up to `pool - 1` queries before it;
/// otherwise the block's queries.
pub(crate) fn pool_queries(
    q: &Tensor,
    shape: &AttentionShape,
    blocks: &Blocks,
    pool: usize,
) -> Result<Tensor> {
    Means { shape, blocks, pool: Some(pool) }.of(q)
}

/// The means of the blocks of keys, (key heads, blocks of all segments, head_dim) in f32.
pub(crate) fn pool_keys(k: &Tensor, shape: &AttentionShape, blocks: &Blocks) -> Result<Tensor> {
    Means { shape, blocks, pool: None }.of(k)
}

/// The op of [`pool_queries`] if `pool` is `Some`, otherwise the op of [`pool_keys`].
pub(crate) struct Means<'a> {
    pub(crate) shape: &'a AttentionShape,
    pub(crate) blocks: &'a Blocks,
    pub(crate) pool: Option<usize>,
}

impl Means<'_> {
    fn of(&self, x: &Tensor) -> Result<Tensor> {
        let Self { shape, blocks, pool } = *self;
        supported(NAME, &[x])?;
        dims4("query or key", x)?;
        let count = if pool.is_some() { blocks.rows() } else { blocks.all_key_blocks() };
        let dims = (shape.key_heads(), count, shape.head_dim());
        if x.device().is_cuda() {
            let means = with_cuda(NAME, [x], |operands| self.launch(operands))?;
            return Ok(cuda_tensor(means, dims));
        }
        let (storage, layout) = x.storage_and_layout();
        let view = View::new(cpu_storage(&storage, NAME)?, layout)?;
        let (spans, heads) = match pool {
            Some(pool) => (blocks.pooled_queries(pool), shape.group()),
            None => (blocks.pooled_keys(), 1),
        };
        Tensor::from_vec(cpu::route::pool(&view, shape.key_heads(), heads, &spans), dims, &Device::Cpu)
    }
}

/// Selects at most `most` candidates (blocks of keys, see [`Blocks::candidates`]) for each block of queries: the last
/// `nearest` candidates, and the candidates with the largest scores. `scores` are (key heads, blocks of queries,
/// columns) in f32; for columns see [`Blocks::first_column`].
pub(crate) fn choose(
    scores: &Tensor,
    shape: &AttentionShape,
    blocks: &Blocks,
    most: usize,
    nearest: usize,
) -> Result<Selection> {
    let most = most.min(blocks.most_candidates());
    let choice = Choice { shape, blocks, most, nearest, width: most + blocks.max_always() };
    let dims = (blocks.key_heads, blocks.rows(), 1 + choice.width);
    let lists = if scores.device().is_cuda() {
        let lists = with_cuda(NAME, [&scores.contiguous()?], |operands| choice.launch(operands))?;
        cuda_tensor(lists, dims)
    } else {
        Tensor::from_vec(choice.on_cpu(scores)?, dims, &Device::Cpu)?
    };
    Ok(Selection::from_tensor(choice.shape, blocks.clone(), lists))
}

/// Computes the lists of selected blocks for [`choose`]. Each list has room for `width` blocks.
pub(crate) struct Choice<'a> {
    pub(crate) shape: &'a AttentionShape,
    pub(crate) blocks: &'a Blocks,
    pub(crate) most: usize,
    pub(crate) nearest: usize,
    pub(crate) width: usize,
}

impl Choice<'_> {
    fn on_cpu(&self, scores: &Tensor) -> Result<Vec<u32>> {
        let Self { blocks, most, nearest, width, .. } = *self;
        let values = scores.to_dtype(DType::F32)?.to_vec3::<f32>()?;
        let mut lists = Vec::with_capacity(blocks.key_heads * blocks.rows() * (1 + width));
        for of_head in &values {
            for (scores, (segment, block)) in of_head.iter().zip(blocks.each()) {
                let first = blocks.first_column(segment);
                let candidates = &scores[first..first + blocks.candidates(segment, block)];
                let mut seen = chosen(candidates, most, nearest);
                seen.extend(blocks.always(segment, block).map(|block| block as u32));
                lists.push(seen.len() as u32);
                lists.extend(&seen);
                lists.resize(lists.len() + width - seen.len(), 0);
            }
        }
        Ok(lists)
    }
}

/// Selects at most `most` of the `scores`: the last `nearest` ones, and the largest of the others. Returns their
/// indices in ascending order.
pub(crate) fn chosen(scores: &[f32], most: usize, nearest: usize) -> Vec<u32> {
    let most = most.min(scores.len());
    let nearest = nearest.min(most);
    let (others, last) = scores.split_at(scores.len() - nearest);
    let mut all = cpu::route::largest(others, most - nearest);
    all.extend((others.len()..others.len() + last.len()).map(|block| block as u32));
    all
}

/// The attention mass of each block of queries on each candidate (see [`Blocks::candidates`]). The mass is the sum of
/// dense attention's probabilities over the block's queries, the candidate's keys, and the query heads of the key head.
/// Returns (key heads, blocks of queries, blocks of keys) in f32.
pub(crate) fn block_mass(
    [q, k]: [&Tensor; 2],
    shape: &AttentionShape,
    blocks: &Blocks,
    softmax_scale: f32,
) -> Result<Tensor> {
    supported(NAME, &[q, k])?;
    let mass = Mass { shape, blocks, softmax_scale };
    let dims = (blocks.key_heads, blocks.rows(), blocks.columns());
    if q.device().is_cuda() {
        let mass = with_cuda(NAME, [q, k], |operands| mass.launch(operands))?;
        return Ok(cuda_tensor(mass, dims));
    }
    Tensor::from_vec(mass.on_cpu([q, k])?, dims, &Device::Cpu)
}

pub(crate) struct Mass<'a> {
    pub(crate) shape: &'a AttentionShape,
    pub(crate) blocks: &'a Blocks,
    pub(crate) softmax_scale: f32,
}

impl Mass<'_> {
    fn on_cpu(&self, [q, k]: [&Tensor; 2]) -> Result<Vec<f32>> {
        let Self { shape, blocks, softmax_scale } = *self;
        let guards = [q, k].map(Tensor::storage_and_layout);
        let view =
            |n: usize| -> Result<View<'_>> { Ok(View::new(cpu_storage(&guards[n].0, NAME)?, guards[n].1)?) };
        let (q_dims, k_dims) = (dims4("query", q)?, dims4("key", k)?);
        if (q_dims, k_dims) != (shape.query_dims(), shape.key_dims()) {
            return Err(Error::shape("query and key do not fit the attention shape")
                .got(format!("query {q_dims:?}, key {k_dims:?}"))
                .allowed(format!("query {:?}, key {:?}", shape.query_dims(), shape.key_dims()))
                .hint("make the `AttentionShape` from the dimensions of this query and key")
                .into());
        }
        let problem = Problem::new(shape, softmax_scale, None, [view(0)?, view(1)?, view(1)?]);
        Ok(cpu::route::block_mass(shape, &problem, blocks, blocks.columns()))
    }
}
