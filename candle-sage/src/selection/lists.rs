//! A selection's lists on the host.

use std::ops::Range;

use super::Blocks;
use crate::shape::AttentionShape;

#[derive(Debug)]
pub(crate) struct Lists {
    shape: AttentionShape,
    pub(crate) blocks: Blocks,
    /// For each (key head, block of queries): the blocks of keys that the queries see, ascending.
    seen: Vec<Vec<u32>>,
    /// For each (key head, block of keys): the blocks of queries that see the keys, ascending.
    users: Vec<Vec<u32>>,
}

impl Lists {
    /// Reads the lists of a selection. Each list is `stride` values: a count, the indices of that many blocks of keys,
    /// and padding.
    pub(super) fn new(shape: &AttentionShape, blocks: &Blocks, values: &[u32], stride: usize) -> Self {
        let seen: Vec<Vec<u32>> =
            values.chunks_exact(stride).map(|row| row[1..1 + row[0] as usize].to_vec()).collect();
        let mut users = vec![Vec::new(); blocks.key_heads * blocks.all_key_blocks()];
        for key_head in 0..blocks.key_heads {
            for (segment, block) in blocks.each() {
                for &key_block in &seen[key_head * blocks.rows() + blocks.row(segment, block)] {
                    users[blocks.column(key_head, segment, key_block as usize)].push(block as u32);
                }
            }
        }
        Self { shape: shape.clone(), blocks: blocks.clone(), seen, users }
    }

    /// The blocks of keys that a block of queries sees.
    pub(crate) fn seen(&self, segment: usize, key_head: usize, block: usize) -> &[u32] {
        &self.seen[key_head * self.blocks.rows() + self.blocks.row(segment, block)]
    }

    /// For each (key head, batch entry, query): the number of visible keys that exact attention covers, and the number
    /// of visible keys that it omits.
    pub(crate) fn token_counts(&self) -> Vec<(u32, u32)> {
        let (batch, len) = (self.shape.batch(), self.shape.query_len());
        let mut token_counts = vec![(0, 0); self.blocks.key_heads * batch * len];
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
                    token_counts[token] = ((chosen + own) as u32, (past - chosen) as u32);
                }
            }
        }
        token_counts
    }

    /// The blocks of queries that see a block of keys.
    pub(crate) fn users(&self, segment: usize, key_head: usize, block: usize) -> &[u32] {
        &self.users[self.blocks.column(key_head, segment, block)]
    }
}
