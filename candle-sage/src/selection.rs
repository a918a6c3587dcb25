//! Selections: for each block of queries, a list of the blocks of keys that it attends to.
//!
//! The lists are one tensor on the device where attention runs, so that a router can write them there without
//! synchronizing with the host.

mod blocks;
mod by_hand;
mod lists;

use std::sync::{Arc, OnceLock};

pub(crate) use blocks::Blocks;
pub use by_hand::QueryBlock;
use candle_core::{Device, Tensor};
pub(crate) use lists::Lists;

use crate::error::{Error, Result};
use crate::shape::AttentionShape;

/// Which blocks of keys each block of queries sees: the argument of
/// [`Attention::select`](crate::Attention::select).
///
/// Each segment (batch entry or packed document) is divided into blocks, starting at its first token. The query heads
/// that share a key head see the same blocks. With a causal mask, the *candidates* of a block of queries are the blocks
/// of keys that its first query sees entirely. The blocks on the diagonal are not candidates: they are always seen, and
/// masked token by token, so a block of queries need not select a candidate. Without a mask all blocks are candidates,
/// and each block of queries selects at least one.
///
/// Cloning is cheap.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_sage::{Attention, AttentionShape, Scheme, Selection};
///
/// let x = Tensor::randn(0f32, 1., (1, 512, 2, 64), &Device::Cpu)?;
/// let dims = x.dims4()?;
/// let shape = AttentionShape::new(dims, dims, dims, true, None)?;
/// // The block of 64 keys on the diagonal, the two blocks before it, and the first block of the sequence.
/// let window = Selection::window(&shape, (64, 64), 2, 1, &Device::Cpu)?;
/// let out = Attention::new(Scheme::Unquantized).causal(true).select(&window).apply(&x, &x, &x)?;
/// assert_eq!(window.list(0, 0, 7)?, [0, 5, 6, 7]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Selection {
    shape: AttentionShape,
    blocks: Blocks,
    /// u32, (key heads, blocks of queries, 1 + width). A row contains the number of key blocks that the query block
    /// sees, then the indices of these key blocks in ascending order, then unused values.
    lists: Tensor,
    /// A copy of `lists` on the host, made when the host first reads them.
    host: Arc<OnceLock<Lists>>,
}

impl Selection {
    /// A selection from lists that a router wrote on a device.
    pub(crate) fn from_tensor(shape: &AttentionShape, blocks: Blocks, lists: Tensor) -> Self {
        Self { shape: shape.clone(), blocks, lists, host: Arc::default() }
    }

    /// The blocks of keys that a block of queries sees, in ascending order, including the blocks on the diagonal. On a
    /// GPU the call waits for the device.
    ///
    /// # Errors
    /// When the block does not exist, or the device fails.
    pub fn list(&self, segment: usize, key_head: usize, block: usize) -> candle_core::Result<Vec<usize>> {
        if segment >= self.blocks.segments.len()
            || key_head >= self.blocks.key_heads
            || block >= self.blocks.query_blocks(segment)
        {
            return Err(Error::new("the block of queries does not exist")
                .got(format!("segment {segment}, key head {key_head}, block {block}"))
                .allowed(format!(
                    "segment below {}, key head below {}, block below the number of blocks in its segment: {:?}",
                    self.blocks.segments.len(),
                    self.blocks.key_heads,
                    (0..self.blocks.segments.len()).map(|n| self.blocks.query_blocks(n)).collect::<Vec<_>>()
                ))
                .hint("a segment is a batch entry or a document; all numbers start at 0")
                .into());
        }
        Ok(self.host()?.seen(segment, key_head, block).iter().map(|&block| block as usize).collect())
    }

    /// The fraction of dense attention's (query, key) pairs that the selection skips, over all heads. Pairs that the
    /// causal mask or the packing excludes are not counted. On a GPU the call waits for the device.
    ///
    /// # Errors
    /// When the device fails.
    pub fn sparsity(&self) -> candle_core::Result<f64> {
        let lists = self.host()?;
        let (mut dense, mut seen) = (0u64, 0u64);
        for key_head in 0..self.blocks.key_heads {
            for (segment, block) in self.blocks.each() {
                let bounds = &self.blocks.segments[segment];
                let end = ((block + 1) * self.blocks.query).min(bounds.query.len());
                for query in block * self.blocks.query..end {
                    let visible = bounds.visible_keys(query);
                    dense += visible as u64;
                    for &block in lists.seen(segment, key_head, block) {
                        let keys = self.blocks.keys(segment, block as usize);
                        seen += keys.end.min(visible).saturating_sub(keys.start) as u64;
                    }
                }
            }
        }
        Ok(1.0 - seen as f64 / dense.max(1) as f64)
    }

    /// Number of tokens of a block of queries, and of a block of keys.
    pub fn block(&self) -> (usize, usize) {
        (self.blocks.query, self.blocks.key)
    }

    /// The selection with its lists on `device`.
    ///
    /// # Errors
    /// When the device fails.
    pub fn to_device(&self, device: &Device) -> candle_core::Result<Self> {
        Ok(Self {
            shape: self.shape.clone(),
            blocks: self.blocks.clone(),
            lists: self.lists.to_device(device)?,
            host: self.host.clone(),
        })
    }

    /// The shape that the selection was made for.
    pub fn shape(&self) -> &AttentionShape {
        &self.shape
    }

    pub(crate) fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    pub(crate) fn lists(&self) -> &Tensor {
        &self.lists
    }

    /// Checks that the selection was made for `shape`, and that its blocks are multiples of `unit` (queries, keys).
    pub(crate) fn check(&self, shape: &AttentionShape, unit: (usize, usize)) -> Result<()> {
        // A selection does not depend on the head_dim.
        if shape.with_head_dim(self.shape.head_dim()) != self.shape {
            return Err(Error::shape("the selection was made for another shape")
                .got(format!("{shape:?}"))
                .allowed(format!("{:?}", self.shape))
                .hint("make a selection for each shape"));
        }
        self.blocks.check_unit(unit)
    }

    /// The lists on the host. The first call copies them from the device.
    pub(crate) fn host(&self) -> candle_core::Result<&Lists> {
        if let Some(lists) = self.host.get() {
            return Ok(lists);
        }
        let (_, _, stride) = self.lists.dims3()?;
        let values = self.lists.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<u32>()?;
        let lists = Lists::new(&self.shape, &self.blocks, &values, stride);
        Ok(self.host.get_or_init(|| lists))
    }
}
