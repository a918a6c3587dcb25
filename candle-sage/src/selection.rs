//! Selections: for each block of queries, a list of the blocks of keys that it attends to.
//!
//! The lists are one tensor on the device where attention runs, so that a router can write them there without
//! synchronizing with the host.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use candle_core::{Device, Tensor};

use crate::error::{Error, Result};
use crate::shape::{AttentionShape, Segment};

/// One block of queries, for the query heads that share a key head and therefore a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueryBlock {
    /// Index of the segment: a batch entry, or a packed document.
    pub segment: usize,
    /// The key head; the query heads that share it share the list.
    pub key_head: usize,
    /// Index of the block inside its segment.
    pub block: usize,
    /// Number of blocks of keys that may be listed: they are `0..candidates`.
    pub candidates: usize,
}

/// How the tokens of a call are divided into blocks. The blocks of each segment start at its first token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Blocks {
    /// Tokens of a block of queries (`query`) and of a block of keys (`key`).
    pub(crate) query: usize,
    pub(crate) key: usize,
    pub(crate) key_heads: usize,
    causal: bool,
    packed: bool,
    segments: Vec<Segment>,
    /// Entry `n` is the number of blocks of queries (`starts`) or of keys (`key_starts`) in the segments
    /// before segment `n`; the last entry is the total.
    starts: Vec<usize>,
    key_starts: Vec<usize>,
}

impl Blocks {
    pub(crate) fn new(shape: &AttentionShape, (query, key): (usize, usize)) -> Result<Self> {
        let segments = shape.segments();
        if query == 0 || key == 0 {
            return Err(Error::new("blocks without tokens")
                .got(format!("{query} queries x {key} keys"))
                .allowed("at least 1 of each")
                .hint("128 x 128 is what GPUs take"));
        }
        if let Some(odd) = segments.iter().find(|s| shape.causal() && s.query.len() != s.key.len()) {
            return Err(Error::new("selected blocks with a causal mask need as many keys as queries")
                .got(format!("{} queries, {} keys", odd.query.len(), odd.key.len()))
                .allowed("equal lengths in every batch entry or document")
                .hint("without a selection, causal attention takes any lengths"));
        }
        let (mut starts, mut key_starts) = (vec![0], vec![0]);
        for (n, segment) in segments.iter().enumerate() {
            starts.push(starts[n] + segment.query.len().div_ceil(query));
            key_starts.push(key_starts[n] + segment.key.len().div_ceil(key));
        }
        let (key_heads, causal, packed) = (shape.key_heads(), shape.causal(), shape.is_packed());
        Ok(Self { query, key, key_heads, causal, packed, segments, starts, key_starts })
    }

    /// Number of blocks of queries of all segments, which is the number of lists of a key head.
    pub(crate) fn rows(&self) -> usize {
        self.starts[self.segments.len()]
    }

    /// Index of a segment's block of queries among the blocks of all segments.
    pub(crate) fn row(&self, segment: usize, block: usize) -> usize {
        self.starts[segment] + block
    }

    /// Index of a segment's block of keys among the blocks of all segments and key heads.
    fn column(&self, key_head: usize, segment: usize, block: usize) -> usize {
        key_head * self.all_key_blocks() + self.key_starts[segment] + block
    }

    pub(crate) fn query_blocks(&self, segment: usize) -> usize {
        self.starts[segment + 1] - self.starts[segment]
    }

    pub(crate) fn key_blocks(&self, segment: usize) -> usize {
        self.key_starts[segment + 1] - self.key_starts[segment]
    }

    /// Number of candidates of a block of queries: the first so many blocks of keys of the segment may be
    /// listed. With a causal mask these are the blocks that the block's first query sees as a whole, so that
    /// a query's selection does not depend on later tokens.
    pub(crate) fn candidates(&self, segment: usize, block: usize) -> usize {
        if self.causal {
            self.segments[segment].visible_keys(block * self.query) / self.key
        } else {
            self.key_blocks(segment)
        }
    }

    /// The blocks of keys after the candidates that some query of the block sees. They are always visited and
    /// masked by token; with a causal mask they are the blocks on the diagonal.
    pub(crate) fn always(&self, segment: usize, block: usize) -> Range<usize> {
        let candidates = self.candidates(segment, block);
        let bounds = &self.segments[segment];
        let last = ((block + 1) * self.query).min(bounds.query.len()) - 1;
        candidates..bounds.visible_keys(last).div_ceil(self.key).max(candidates)
    }

    /// The keys of a block, as indices inside the segment.
    pub(crate) fn keys(&self, segment: usize, block: usize) -> Range<usize> {
        let len = self.segments[segment].key.len();
        (block * self.key).min(len)..((block + 1) * self.key).min(len)
    }

    /// The largest number of candidates of any block of queries: a router cannot choose more.
    pub(crate) fn most_candidates(&self) -> usize {
        self.each().map(|(segment, block)| self.candidates(segment, block)).max().unwrap_or(0)
    }

    /// Number of segments.
    #[cfg(feature = "cuda")]
    pub(crate) fn segments(&self) -> usize {
        self.segments.len()
    }

    /// The largest number of always visited blocks that any list has besides the chosen candidates.
    pub(crate) fn most_always(&self) -> usize {
        self.each().map(|(segment, block)| self.always(segment, block).len()).max().unwrap_or(0)
    }

    /// The first column of a segment's blocks of keys in its score matrix. Each batch entry has a score
    /// matrix of its own; packed documents share one.
    pub(crate) fn first_column(&self, segment: usize) -> usize {
        if self.packed { self.key_starts[segment] } else { 0 }
    }

    /// Number of columns of a score matrix.
    pub(crate) fn columns(&self) -> usize {
        if self.packed { self.all_key_blocks() } else { self.key_blocks(0) }
    }

    /// Number of blocks of keys of all segments.
    pub(crate) fn all_key_blocks(&self) -> usize {
        self.key_starts[self.segments.len()]
    }

    /// For each block of keys: its segment, and the tokens (indices in the tensor) whose mean represents it.
    pub(crate) fn pooled_keys(&self) -> Vec<(Segment, Range<usize>)> {
        let of_segment = |number: usize| {
            let segment = &self.segments[number];
            (0..self.key_blocks(number)).map(move |block| {
                let keys = self.keys(number, block);
                (segment.clone(), segment.key.start + keys.start..segment.key.start + keys.end)
            })
        };
        (0..self.segments.len()).flat_map(of_segment).collect()
    }

    /// For each block of queries: its segment, and the tokens (indices in the tensor) whose mean represents
    /// it. With a causal mask these are the last `pool` queries up to and including the block's first query,
    /// so that a query's selection does not depend on later queries.
    pub(crate) fn pooled_queries(&self, pool: usize) -> Vec<(Segment, Range<usize>)> {
        let span = |(number, block): (usize, usize)| {
            let segment = &self.segments[number];
            let first = block * self.query;
            let tokens = if self.causal {
                (first + 1).saturating_sub(pool)..first + 1
            } else {
                first..(first + self.query).min(segment.query.len())
            };
            (segment.clone(), segment.query.start + tokens.start..segment.query.start + tokens.end)
        };
        self.each().map(span).collect()
    }

    /// All pairs (segment, block of queries), in the order of [`Blocks::row`].
    pub(crate) fn each(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        (0..self.segments.len())
            .flat_map(|segment| (0..self.query_blocks(segment)).map(move |block| (segment, block)))
    }
}

/// Which blocks of keys each block of queries sees: the argument of
/// [`Attention::select`](crate::Attention::select).
///
/// Each segment (batch entry or packed document) is divided into blocks, starting at its first token. The
/// query heads that share a key head share a list. With a causal mask, the *candidates* of a block of queries
/// are the blocks of keys that its first query sees as a whole. The blocks on the diagonal are no candidates:
/// they are always seen, and masked by token, so that a list may be empty. Without a mask all blocks are
/// candidates, and every list has at least one.
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
/// // The two blocks of 64 keys before the diagonal, and the first one.
/// let window = Selection::window(&shape, (64, 64), 2, 1, &Device::Cpu)?;
/// let out = Attention::new(Scheme::FullPrecision).causal(true).select(&window).apply(&x, &x, &x)?;
/// assert_eq!(window.list(0, 0, 7)?, [0, 5, 6, 7]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Selection {
    shape: AttentionShape,
    blocks: Blocks,
    /// u32, (key heads, blocks of queries, 1 + width): how many blocks are seen, then which, in ascending
    /// order.
    lists: Tensor,
    /// The same lists on the host, copied when they are first read.
    host: Arc<OnceLock<Lists>>,
}

impl Selection {
    /// A selection from lists that the caller makes. `list` returns the candidates that a block of queries
    /// sees, in any order. `blocks` is the number of tokens of a block of queries and of a block of keys;
    /// `device` is the device on which attention will run.
    ///
    /// # Errors
    /// When a list has a block twice, or a block that is no candidate; when a block of queries sees nothing;
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
                        .allowed("at least one block of keys where there is no causal mask")
                        .hint("list the block at the same place")
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

    /// A selection of every candidate: dense attention.
    ///
    /// # Errors
    /// As [`Selection::from_lists`].
    pub fn all(shape: &AttentionShape, blocks: (usize, usize), device: &Device) -> candle_core::Result<Self> {
        Self::from_lists(shape, blocks, device, |at| (0..at.candidates).collect())
    }

    /// A sliding window: the `nearest` candidates and the first `sinks` blocks of each segment. With a causal
    /// mask the nearest candidates are the last ones, otherwise those around the position of the block of
    /// queries.
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
                // The block of keys at the position of the middle query of the block of queries.
                let middle = ((2 * at.block + 1) * query / (2 * key)).min(at.candidates.saturating_sub(1));
                let first = middle.saturating_sub(nearest / 2).min(at.candidates.saturating_sub(nearest));
                first..(first + nearest).min(at.candidates)
            };
            let sinks = 0..sinks.min(at.candidates);
            sinks.clone().chain(near.filter(|block| !sinks.contains(block))).collect()
        })
    }

    /// A selection whose lists a router has written on a device.
    pub(crate) fn from_tensor(shape: &AttentionShape, blocks: Blocks, lists: Tensor) -> Self {
        Self { shape: shape.clone(), blocks, lists, host: Arc::default() }
    }

    /// The blocks of keys that a block of queries sees, in ascending order, with those on the diagonal. On a
    /// GPU this waits for the device.
    ///
    /// # Errors
    /// When there is no such block, or the device fails.
    pub fn list(&self, segment: usize, key_head: usize, block: usize) -> candle_core::Result<Vec<usize>> {
        if segment >= self.blocks.segments.len()
            || key_head >= self.blocks.key_heads
            || block >= self.blocks.query_blocks(segment)
        {
            return Err(Error::new("there is no such block of queries")
                .got(format!("segment {segment}, key head {key_head}, block {block}"))
                .allowed(format!(
                    "{} segments, {} key heads, {} blocks in all",
                    self.blocks.segments.len(),
                    self.blocks.key_heads,
                    self.blocks.rows()
                ))
                .hint("blocks are counted inside their segment")
                .into());
        }
        Ok(self.host()?.seen(segment, key_head, block).iter().map(|&block| block as usize).collect())
    }

    /// The fraction of the (query, key) pairs of dense attention that the selection leaves out, over all
    /// heads, with masks counted by token. On a GPU this waits for the device.
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

    /// The same lists on another device.
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

    /// The lists: u32, (key heads, blocks of queries, 1 + width).
    pub(crate) fn lists(&self) -> &Tensor {
        &self.lists
    }

    /// Checks that the selection was made for `shape`, and that its blocks are multiples of `unit` tokens (of
    /// queries, of keys).
    pub(crate) fn check(&self, shape: &AttentionShape, unit: (usize, usize)) -> Result<()> {
        let (query, key) = self.block();
        if *shape != self.shape {
            return Err(Error::new("the selection is one of another shape")
                .got(format!("{shape:?}"))
                .allowed(format!("{:?}", self.shape))
                .hint("make the selection anew for each shape"));
        }
        if query % unit.0 != 0 || key % unit.1 != 0 {
            return Err(Error::new("the blocks of the selection do not fit the scheme's tiles")
                .got(format!("{query} queries x {key} keys"))
                .allowed(format!("multiples of {} x {}", unit.0, unit.1))
                .hint("128 x 128 fits every scheme's default"));
        }
        Ok(())
    }

    /// The lists on the host. The first call copies them from the device.
    pub(crate) fn host(&self) -> candle_core::Result<&Lists> {
        if let Some(lists) = self.host.get() {
            return Ok(lists);
        }
        let (_, _, stride) = self.lists.dims3()?;
        let values = self.lists.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<u32>()?;
        let seen: Vec<Vec<u32>> =
            values.chunks_exact(stride).map(|row| row[1..1 + row[0] as usize].to_vec()).collect();
        let blocks = &self.blocks;
        let mut users = vec![Vec::new(); blocks.key_heads * blocks.all_key_blocks()];
        for key_head in 0..blocks.key_heads {
            for (segment, block) in blocks.each() {
                for &key_block in &seen[key_head * blocks.rows() + blocks.row(segment, block)] {
                    users[blocks.column(key_head, segment, key_block as usize)].push(block as u32);
                }
            }
        }
        let lists = Lists { shape: self.shape.clone(), blocks: blocks.clone(), seen, users };
        Ok(self.host.get_or_init(|| lists))
    }
}

fn check_list(seen: &[usize], at: QueryBlock) -> Result<()> {
    let twice = seen.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0]);
    let beyond = seen.last().copied().filter(|&last| last >= at.candidates);
    let Some(wrong) = twice.or(beyond) else { return Ok(()) };
    Err(Error::new(match twice {
        Some(_) => "a block of keys is listed twice",
        None => "a block of keys is listed that is no candidate",
    })
    .got(format!("block {wrong} in {at:?}"))
    .allowed(format!("each of the blocks below {} at most once", at.candidates))
    .hint("with a causal mask candidates end before the first query of the block; the diagonal is seen in any case"))
}

/// A selection on the host, indexed by blocks of queries and by blocks of keys.
#[derive(Debug)]
pub(crate) struct Lists {
    shape: AttentionShape,
    pub(crate) blocks: Blocks,
    /// (key head, block of queries): the blocks of keys that it sees, ascending.
    seen: Vec<Vec<u32>>,
    /// (key head, block of keys): the blocks of queries that see it, ascending.
    users: Vec<Vec<u32>>,
}

impl Lists {
    /// The blocks of keys that a block of queries sees.
    pub(crate) fn seen(&self, segment: usize, key_head: usize, block: usize) -> &[u32] {
        &self.seen[key_head * self.blocks.rows() + self.blocks.row(segment, block)]
    }

    /// For each token of (key heads, batch, token): the number of keys that it sees exactly, and the number
    /// of candidate keys that it leaves to the linear tail.
    pub(crate) fn odds(&self) -> Vec<(u32, u32)> {
        let (batch, len) = (self.shape.batch(), self.shape.query_len());
        let mut odds = vec![(0, 0); self.blocks.key_heads * batch * len];
        for key_head in 0..self.blocks.key_heads {
            for (number, block) in self.blocks.each() {
                let segment = &self.blocks.segments[number];
                let candidates = self.blocks.candidates(number, block);
                let tokens =
                    |blocks: Range<usize>| blocks.map(|b| self.blocks.keys(number, b).len()).sum::<usize>();
                let chosen = self.seen(number, key_head, block).iter().map(|&b| b as usize);
                let chosen: usize =
                    chosen.filter(|&b| b < candidates).map(|b| self.blocks.keys(number, b).len()).sum();
                let past = tokens(0..candidates);
                for query in
                    block * self.blocks.query..((block + 1) * self.blocks.query).min(segment.query.len())
                {
                    let own = segment.visible_keys(query) - past;
                    let token = (key_head * batch + segment.batch) * len + segment.query.start + query;
                    odds[token] = ((chosen + own) as u32, (past - chosen) as u32);
                }
            }
        }
        odds
    }

    /// The blocks of queries that see a block of keys.
    pub(crate) fn users(&self, segment: usize, key_head: usize, block: usize) -> &[u32] {
        &self.users[self.blocks.column(key_head, segment, block)]
    }
}
