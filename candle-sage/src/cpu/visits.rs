//! The tiles that forward and backward visit: all tiles that the mask allows or, with a selection, those of the
//! selected blocks.

use std::ops::Range;

use super::numerics::{Head, Problem};
use crate::selection::Lists;

impl Problem<'_> {
    /// Ascending ranges that include every key that any of `queries` sees; `at` is a query head. The ranges start at
    /// multiples of `tile`.
    pub(super) fn keys_seen(&self, at: Head, queries: Range<usize>, tile: usize) -> Vec<Range<usize>> {
        let segment = &self.segments[at.segment];
        let visible = segment.visible_keys(queries.end - 1);
        let Some(lists) = self.lists else {
            return runs(std::iter::once(segment.first_key(queries.start) / tile * tile..visible));
        };
        let block = queries.start / lists.blocks.query;
        let seen = lists.seen(at.segment, self.key_head(at).head, block);
        runs(seen.iter().map(|&block| {
            let keys = lists.blocks.keys(at.segment, block as usize);
            keys.start..keys.end.min(visible)
        }))
    }

    /// Ascending ranges that include every query that sees any of `keys`; `at` is a key head. The ranges start at
    /// multiples of `tile`.
    pub(super) fn queries_that_see(&self, at: Head, keys: Range<usize>, tile: usize) -> Vec<Range<usize>> {
        let segment = &self.segments[at.segment];
        let end = segment.end_query(keys.end - 1);
        // Rounded down to a multiple of `tile`, so the first range may begin with queries that see none of the keys.
        let first = segment.first_query(keys.start) / tile * tile;
        let Some(lists) = self.lists else { return runs(std::iter::once(first..end)) };
        let Lists { blocks, .. } = lists;
        let users = lists.users(at.segment, at.head, keys.start / blocks.key);
        runs(users.iter().map(|&block| {
            let start = block as usize * blocks.query;
            start.max(first)..(start + blocks.query).min(end)
        }))
    }
}

/// The ranges that are not empty.
fn runs(all: impl Iterator<Item = Range<usize>>) -> Vec<Range<usize>> {
    all.filter(|run| !run.is_empty()).collect()
}
