//! Where parameters lie in memory: in pieces, runs of neighbours that are exchanged and updated at once.

use std::collections::HashMap;
use std::ops::Range;

use super::config::{LlamaConfig, ParameterSpec};

/// Parameters that follow no other start at multiples of this many elements: 16 bytes are aligned in every element type.
pub(super) const ALIGNMENT: usize = 64;

/// A piece is closed when it has so many elements, 680 MB of gradient: of several sizes this took two GPUs least for a model of
/// 324M parameters (docs/several-gpus.md). Larger ones travel faster, and smaller ones leave less to wait for at the end.
const ENOUGH: usize = 170_000_000;

/// A run of neighbouring parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    /// Its elements among those of all, gaps included; so many that every rank has an equal part.
    pub(super) range: Range<usize>,
    /// Matrices, which decay and which the model reads in its own type; vectors and routers are read in f32.
    pub(super) decays: bool,
}

/// Where each parameter of a model lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Layout {
    /// The index of its spec, and its first element.
    pub(super) places: HashMap<String, (usize, usize)>,
    /// Those that decay come first.
    pub(super) pieces: Vec<Piece>,
}

impl Layout {
    /// For so many ranks.
    pub(super) fn new(specs: &[ParameterSpec], ranks: usize) -> Self {
        Self::with_pieces_of(specs, ranks, ENOUGH)
    }

    fn with_pieces_of(specs: &[ParameterSpec], ranks: usize, enough: usize) -> Self {
        let (mut places, mut pieces, mut len) = (HashMap::new(), Vec::new(), 0usize);
        for decays in [true, false] {
            let mut start = len;
            for (n, spec) in specs.iter().enumerate().filter(|(_, spec)| spec.decays() == decays) {
                // What is multiplied at once lies without gaps, in one piece.
                if !spec.follows {
                    len = len.next_multiple_of(ALIGNMENT);
                    if len - start >= enough {
                        len = start + (len - start).next_multiple_of(ALIGNMENT * ranks);
                        pieces.push(Piece { range: start..len, decays });
                        start = len;
                    }
                }
                places.insert(spec.name.clone(), (n, len));
                len += spec.len() as usize;
            }
            len = start + (len - start).next_multiple_of(ALIGNMENT * ranks);
            if len > start {
                pieces.push(Piece { range: start..len, decays });
            }
        }
        Self { places, pieces }
    }

    /// Elements of all, gaps included.
    pub(super) fn len(&self) -> usize {
        self.pieces.last().map_or(0, |piece| piece.range.end)
    }

    /// Elements of a piece that other ranks send, at most.
    pub(super) fn largest_of_others(&self, ranks: usize) -> usize {
        let largest = self.pieces.iter().map(|piece| piece.range.len()).max().unwrap_or(0);
        largest / ranks * (ranks - 1)
    }

    /// The piece that an element lies in.
    pub(super) fn piece_of(&self, at: usize) -> usize {
        self.pieces.partition_point(|piece| piece.range.end <= at)
    }
}

/// Bytes that a rank sets aside for what others send.
pub fn received_bytes(model: &LlamaConfig, ranks: usize) -> u64 {
    let layout = Layout::new(&model.parameter_specs(), ranks);
    2 * 4 * layout.largest_of_others(ranks) as u64
}

/// What two ranges share.
pub(super) fn overlap(a: &Range<usize>, b: &Range<usize>) -> Option<Range<usize>> {
    let both = a.start.max(b.start)..a.end.min(b.end);
    (both.start < both.end).then_some(both)
}

#[cfg(test)]
mod tests {
    use super::super::config::Start;
    use super::*;

    #[test]
    fn pieces_hold_whole_products_and_divide_by_the_ranks() {
        let spec = |name: &str, dims: &[usize], follows: bool| ParameterSpec {
            name: name.into(),
            dims: dims.into(),
            start: Start::Value(0.0),
            follows,
        };
        let specs = [
            spec("a", &[10, 33], false),
            spec("norm", &[7], false),
            spec("b", &[4, 33], false),
            spec("c", &[5, 33], true),
            spec("d", &[6, 33], true),
            spec("e", &[1, 33], false),
        ];
        for ranks in [1, 2, 3, 8] {
            for enough in [1, 200, 400, usize::MAX] {
                let layout = Layout::with_pieces_of(&specs, ranks, enough);
                let mut end = 0;
                for piece in &layout.pieces {
                    assert_eq!(piece.range.start, end);
                    assert!(piece.range.len().is_multiple_of(ranks * ALIGNMENT));
                    end = piece.range.end;
                }
                assert_eq!(
                    (end, layout.pieces.iter().filter(|piece| !piece.decays).count()),
                    (layout.len(), 1)
                );
                let of = |name: &str| layout.places[name].1;
                assert_eq!((of("c"), of("d")), (of("b") + 4 * 33, of("c") + 5 * 33));
                for (name, (n, at)) in &layout.places {
                    let piece = &layout.pieces[layout.piece_of(*at)];
                    assert!(at + specs[*n].len() as usize <= piece.range.end, "{name}");
                    assert_eq!(piece.decays, specs[*n].decays());
                    assert!(specs[*n].follows || at.is_multiple_of(ALIGNMENT));
                }
            }
        }
        assert_eq!(Layout::with_pieces_of(&specs, 2, 300).pieces.len(), 4);
    }

    #[test]
    fn overlaps() {
        assert_eq!(overlap(&(0..4), &(3..9)), Some(3..4));
        assert_eq!(overlap(&(0..3), &(3..9)), None);
    }
}
