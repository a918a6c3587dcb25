//! Selections without a router.

use candle_core::{Device, Tensor};

use super::{Blocks, Selection};
use crate::error::{Error, Result};
use crate::shape::AttentionShape;

/// A block of queries, for the query heads that share a key head. These heads see the same blocks of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueryBlock {
    /// Index of the segment: a batch entry, or a packed document.
    pub segment: usize,
    /// The key head.
    pub key_head: usize,
    /// Index of the block inside its segment.
    pub block: usize,
    /// Number of candidates: a list of [`Selection::from_lists`] may contain the blocks of keys `0..candidates`.
    pub candidates: usize,
}

impl Selection {
    /// A selection from the caller's lists. `list` returns the [candidates](QueryBlock::candidates) that a block of
    /// queries sees, in any order. `blocks` is (tokens of a block of queries, tokens of a block of keys). Attention
    /// will run on `device`.
    ///
    /// # Errors
    /// When a list has a block twice, or a block that is not a candidate; when a block of queries sees nothing;
    /// when a block has no tokens; when the mask is causal and a segment has different numbers of queries and
    /// keys.
    pub fn from_lists(
        shape: &AttentionShape,
        blocks: (usize, usize),
        device: &Device,
        mut list: impl FnMut(QueryBlock) -> Vec<usize>,
    ) -> candle_core::Result<Self> {
        let blocks = Blocks::new(shape, blocks)?;
        let mut all = Vec::with_capacity(blocks.key_heads * blocks.rows());
        for key_head in 0..blocks.key_heads {
            for (segment, block) in blocks.each() {
                let candidates = blocks.candidates(segment, block);
                let at = QueryBlock { segment, key_head, block, candidates };
                let mut seen = list(at);
                seen.sort_unstable();
                check_list(&seen, at)?;
                seen.extend(blocks.always(segment, block));
                if seen.is_empty() {
                    return Err(Error::new("a block of queries sees nothing")
                        .got(format!("an empty list for {at:?}"))
                        .allowed("at least one block of keys, unless the mask is causal")
                        .hint("list a block of keys for each block of queries; in `Selection::window`, raise `nearest`")
                        .into());
                }
                all.push(seen);
            }
        }
        let width = all.iter().map(Vec::len).max().unwrap_or(0);
        let mut values = Vec::with_capacity(all.len() * (1 + width));
        for seen in &all {
            values.push(seen.len() as u32);
            values.extend(seen.iter().map(|&block| block as u32));
            values.resize(values.len() + width - seen.len(), 0);
        }
        let lists = Tensor::from_vec(values, (blocks.key_heads, blocks.rows(), 1 + width), device)?;
        Ok(Self::from_tensor(shape, blocks, lists))
    }

    /// A selection of all [candidates](QueryBlock::candidates): dense attention.
    ///
    /// # Errors
    /// As [`Selection::from_lists`].
    pub fn all(shape: &AttentionShape, blocks: (usize, usize), device: &Device) -> candle_core::Result<Self> {
        Self::from_lists(shape, blocks, device, |at| (0..at.candidates).collect())
    }

    /// A sliding window in whole blocks; [`Attention::window`](crate::Attention::window) is exact to the token. Each
    /// list contains the first `sinks` [candidates](QueryBlock::candidates), and the `nearest` candidates that are
    /// nearest to the block of queries. With a causal mask these are the last candidates; otherwise they surround the
    /// position of the block of queries.
    ///
    /// # Errors
    /// As [`Selection::from_lists`].
    pub fn window(
        shape: &AttentionShape,
        blocks: (usize, usize),
        nearest: usize,
        sinks: usize,
        device: &Device,
    ) -> candle_core::Result<Self> {
        let (query, key) = blocks;
        Self::from_lists(shape, blocks, device, |at| {
            let near = if shape.causal() {
                at.candidates.saturating_sub(nearest)..at.candidates
            } else {
                // The block of keys at the same position as the middle of this block of queries.
                let middle = ((2 * at.block + 1) * query / (2 * key)).min(at.candidates.saturating_sub(1));
                let first = middle.saturating_sub(nearest / 2).min(at.candidates.saturating_sub(nearest));
                first..(first + nearest).min(at.candidates)
            };
            let sinks = 0..sinks.min(at.candidates);
            sinks.clone().chain(near.filter(|block| !sinks.contains(block))).collect()
        })
    }
}

fn check_list(seen: &[usize], at: QueryBlock) -> Result<()> {
    let twice = seen.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0]);
    let beyond = seen.last().copied().filter(|&last| last >= at.candidates);
    let Some(wrong) = twice.or(beyond) else { return Ok(()) };
    Err(Error::new(match twice {
        Some(_) => "a block of keys is listed twice",
        None => "a listed block of keys is not a candidate",
    })
    .got(format!("block {wrong} in {at:?}"))
    .allowed(format!("no block number of {} or more, and no number twice", at.candidates))
    .hint("with a causal mask, list only earlier blocks of keys; the block on the diagonal is always seen"))
}
