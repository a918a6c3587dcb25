//! How tokens are divided into blocks, and which blocks of keys can be selected for a block of queries.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::shape::{AttentionShape, Segment};

/// How the tokens of a call are divided into blocks. The blocks of each segment (batch entry or packed document) start
/// at the segment's first token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Blocks {
    /// The number of tokens in a block of queries (`query`) and in a block of keys (`key`).
    pub(crate) query: usize,
    pub(crate) key: usize,
    pub(crate) key_heads: usize,
    causal: bool,
    packed: bool,
    pub(super) segments: Vec<Segment>,
    /// Entry `n` is the number of blocks of queries (`starts`) or of keys (`key_starts`) in the segments
    /// before segment `n`; the last entry is the total.
    starts: Vec<usize>,
    key_starts: Vec<usize>,
}

impl Blocks {
    pub(crate) fn new(shape: &AttentionShape, (query, key): (usize, usize)) -> Result<Self> {
        let segments = shape.segments();
        if query == 0 || key == 0 {
            return Err(Error::new("a block needs at least one token")
                .got(format!("{query} queries x {key} keys"))
                .allowed("at least 1 query and 1 key")
                .hint("GPUs support 128 x 128"));
        }
        if shape.window().is_finite() {
            return Err(Error::new("a selection cannot be combined with a window of tokens")
                .got(shape.window())
                .allowed("a causal mask, or no mask")
                .hint("select the blocks of the window instead: `Selection::window`"));
        }
        if let Some(odd) = segments.iter().find(|s| shape.causal() && s.query.len() != s.key.len()) {
            return Err(Error::shape("a selection with a causal mask needs as many keys as queries")
                .got(format!("{} queries, {} keys", odd.query.len(), odd.key.len()))
                .allowed("equal lengths in every batch entry or document")
                .hint("without a selection, causal attention accepts any lengths"));
        }
        let (mut starts, mut key_starts) = (vec![0], vec![0]);
        for (n, segment) in segments.iter().enumerate() {
            starts.push(starts[n] + segment.query.len().div_ceil(query));
            key_starts.push(key_starts[n] + segment.key.len().div_ceil(key));
        }
        let (key_heads, causal, packed) = (shape.key_heads(), shape.causal(), shape.is_packed());
        Ok(Self { query, key, key_heads, causal, packed, segments, starts, key_starts })
    }

    /// Checks that the block sizes are multiples of `unit` (queries, keys).
    pub(crate) fn check_unit(&self, unit: (usize, usize)) -> Result<()> {
        if self.query.is_multiple_of(unit.0) && self.key.is_multiple_of(unit.1) {
            return Ok(());
        }
        Err(Error::shape("the blocks of the selection do not fit the scheme's tiles")
            .got(format!("{} queries x {} keys", self.query, self.key))
            .allowed(format!("multiples of {} x {}", unit.0, unit.1))
            .hint("128 x 128 fits every scheme's default"))
    }

    /// Number of blocks of queries in all segments.
    pub(crate) fn rows(&self) -> usize {
        self.starts[self.segments.len()]
    }

    /// Index of a segment's block of queries among the blocks of all segments.
    pub(crate) fn row(&self, segment: usize, block: usize) -> usize {
        self.starts[segment] + block
    }

    /// Index of a segment's block of keys among the blocks of all segments and key heads.
    pub(super) fn column(&self, key_head: usize, segment: usize, block: usize) -> usize {
        key_head * self.all_key_blocks() + self.key_starts[segment] + block
    }

    pub(crate) fn query_blocks(&self, segment: usize) -> usize {
        self.starts[segment + 1] - self.starts[segment]
    }

    pub(crate) fn key_blocks(&self, segment: usize) -> usize {
        self.key_starts[segment + 1] - self.key_starts[segment]
    }

    /// Number of candidates of a block of queries. Candidates are the blocks of keys that may be selected: the blocks
    /// `0..candidates` of the segment. With a causal mask the first query of `block` sees every key of a candidate, so
    /// that a query's selection does not depend on later tokens.
    pub(crate) fn candidates(&self, segment: usize, block: usize) -> usize {
        if self.causal {
            self.segments[segment].visible_keys(block * self.query) / self.key
        } else {
            self.key_blocks(segment)
        }
    }

    /// The blocks of keys, other than the [candidates](Self::candidates), that some query of `block` sees. Every
    /// selection includes these blocks. With a causal mask they are the blocks on the diagonal.
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

    #[cfg(feature = "kernels")]
    pub(crate) fn segments(&self) -> usize {
        self.segments.len()
    }

    /// The largest number of blocks in [`Blocks::always`], over all blocks of queries.
    pub(crate) fn max_always(&self) -> usize {
        self.each().map(|(segment, block)| self.always(segment, block).len()).max().unwrap_or(0)
    }

    /// In the matrix of the router's scores, the column of the segment's first block of keys. Each batch entry has a
    /// separate matrix; packed documents share one.
    pub(crate) fn first_column(&self, segment: usize) -> usize {
        if self.packed { self.key_starts[segment] } else { 0 }
    }

    pub(crate) fn columns(&self) -> usize {
        if self.packed { self.all_key_blocks() } else { self.key_blocks(0) }
    }

    pub(crate) fn all_key_blocks(&self) -> usize {
        self.key_starts[self.segments.len()]
    }

    /// For each block of keys: its segment, and the tokens (indices in the tensor) whose mean represents the block.
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

    /// For each block of queries: its segment, and the tokens (indices in the tensor) whose mean represents the block.
    /// With a causal mask these tokens are the last `pool` queries up to and including the block's first query, so that
    /// a query's selection does not depend on later queries.
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
