//! Tiles of the (query, key) plane, and their masks.

use crate::shape::Segment;

/// A tile of one head's (query, key) plane: queries `row..row + rows` and keys `col..col + cols` of a [`Segment`].
/// `row` and `col` are multiples of the tile size. At the end of the segment a tile may be smaller.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tile {
    pub(crate) row: usize,
    pub(crate) rows: usize,
    pub(crate) col: usize,
    pub(crate) cols: usize,
}

/// Sets logits to minus infinity if the query does not see the key.
pub(crate) fn mask(segment: &Segment, tile: Tile, logits: &mut [f32]) {
    // The first and the last visible key never decrease from one query to the next. So the tile has no masked logit if
    // its first row sees the tile's last key, and its last row sees the tile's first key.
    let last = tile.row + tile.rows - 1;
    if segment.visible_keys(tile.row) >= tile.col + tile.cols && segment.first_key(last) <= tile.col {
        return;
    }
    for (r, row) in logits.chunks_exact_mut(tile.cols).enumerate() {
        let within = |key: usize| key.saturating_sub(tile.col).min(tile.cols);
        row[..within(segment.first_key(tile.row + r))].fill(f32::NEG_INFINITY);
        row[within(segment.visible_keys(tile.row + r))..].fill(f32::NEG_INFINITY);
    }
}
