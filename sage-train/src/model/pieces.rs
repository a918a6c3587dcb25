//! The layout of the parameters in memory: pieces ("buckets" in PyTorch). The parameters of a piece are adjacent, and
//! are updated and gathered together; their gradients are reduced together.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::ops::Range;

use candle_sage::ops::FP8_PART;

use super::spec::{Kind, ParameterSpec};
use crate::ranks::Mesh;

/// A parameter starts at a multiple of this many elements (a multiple of 16 bytes in every element type), unless it
/// must follow another parameter without padding, as the key's matrix follows the query's matrix.
pub(super) const ALIGNMENT: usize = 64;

/// A run of adjacent parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    /// The elements of the piece in the layout of all parameters, padding included. Their number is a multiple of the
    /// number of ranks, so that all shards have equal size.
    pub(super) range: Range<usize>,
    /// The properties that all parameters of the piece share.
    pub(super) common: Common,
    /// The first layer with a parameter in the piece. The backward of this layer completes the piece's gradients.
    /// `None` if the piece contains the embedding, whose gradient is completed last.
    pub(super) first_layer: Option<usize>,
}

/// The properties that all parameters of a piece share, derived from their [`Kind`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Common {
    /// Whether weight decay applies.
    pub(super) decays: bool,
    /// Whether the model always reads the parameters in f32, even if it computes in bf16 or f16.
    pub(super) wide: bool,
    /// Whether the parameters are hidden matrices that Muon updates.
    pub(super) apart: bool,
    /// Whether the forward and backward of training use the parameters only in FP8.
    pub(super) fp8: bool,
}

impl Common {
    /// All combinations of these properties that occur. In memory, pieces are in this order: pieces with weight decay
    /// come first.
    const ALL: [Self; 7] = [
        Self { decays: true, wide: false, apart: false, fp8: false },
        Self { decays: true, wide: false, apart: false, fp8: true },
        Self { decays: true, wide: false, apart: true, fp8: false },
        Self { decays: true, wide: false, apart: true, fp8: true },
        Self { decays: true, wide: true, apart: false, fp8: false },
        Self { decays: false, wide: false, apart: false, fp8: false },
        Self { decays: false, wide: true, apart: false, fp8: false },
    ];

    fn of(spec: &ParameterSpec, matrices_apart: bool) -> Self {
        let kind = spec.kind;
        Self {
            decays: kind.decays(),
            wide: kind.is_wide(),
            apart: matrices_apart && kind.is_hidden_matrix(),
            fp8: spec.fp8,
        }
    }

    /// Each rank's shard of a piece has a multiple of this number of elements.
    fn multiple_of_shards(self) -> usize {
        if self.fp8 { FP8_PART } else { ALIGNMENT }
    }
}

/// Where each parameter of a model is in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Layout {
    /// By parameter name: the index of its [`ParameterSpec`], and the index of its first element, counted over all
    /// pieces.
    pub(super) places: HashMap<String, (usize, usize)>,
    /// In the order of [`Common::ALL`].
    pub(super) pieces: Vec<Piece>,
    /// Ranges of gradients that are zeroed before a backward because no matmul overwrites them.
    pub(super) cleared: Vec<Range<usize>>,
}

impl Layout {
    /// Lays out the parameters of a model for the ranks of a mesh. With `matrices_apart`, no piece contains both hidden
    /// matrices and other parameters.
    pub(super) fn new(specs: &[ParameterSpec], mesh: Mesh, matrices_apart: bool) -> Self {
        Self::with_pieces_of(specs, mesh.rank().of, mesh.piece, matrices_apart)
    }

    /// Once a piece has at least `enough` elements, the next parameter begins a new piece.
    fn with_pieces_of(specs: &[ParameterSpec], ranks: usize, enough: usize, matrices_apart: bool) -> Self {
        let of = |spec: &ParameterSpec| Common::of(spec, matrices_apart);
        let (mut places, mut pieces, mut len) = (HashMap::new(), Vec::new(), 0usize);
        for common in Common::ALL {
            let mut start = len;
            let multiple = common.multiple_of_shards() * ranks;
            for (n, spec) in specs.iter().enumerate().filter(|(_, spec)| of(spec) == common) {
                // A parameter that `follows` another is stored in the same piece, without a gap between them.
                if !spec.follows {
                    len = len.next_multiple_of(ALIGNMENT);
                    if len - start >= enough {
                        len = start + (len - start).next_multiple_of(multiple);
                        pieces.push(Piece { range: start..len, common, first_layer: Some(usize::MAX) });
                        start = len;
                    }
                }
                places.insert(spec.name.clone(), (n, len));
                len += spec.len() as usize;
            }
            len = start + (len - start).next_multiple_of(multiple);
            if len > start {
                pieces.push(Piece { range: start..len, common, first_layer: Some(usize::MAX) });
            }
        }
        let mut layout = Self { places, pieces, cleared: Vec::new() };
        for spec in specs {
            let piece = layout.piece_of(layout.places[&spec.name].1);
            let piece = &mut layout.pieces[piece];
            piece.first_layer = piece.first_layer.min(first_layer(spec));
        }
        for piece in &layout.pieces {
            let of = |spec: &&ParameterSpec| piece.range.contains(&layout.places[&spec.name].1);
            if !specs.iter().filter(of).any(|spec| spec.kind.is_overwritten()) {
                layout.cleared.push(piece.range.clone());
                continue;
            }
            for spec in specs.iter().filter(of).filter(|spec| !spec.kind.is_overwritten()) {
                let at = layout.places[&spec.name].1;
                layout.cleared.push(at..at + spec.len() as usize);
            }
        }
        layout
    }

    /// The indices of the pieces, in the order in which a backward completes their gradients.
    pub(super) fn backward_order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.pieces.len()).collect();
        order.sort_by_key(|piece| Reverse(self.pieces[*piece].first_layer));
        order
    }

    /// The indices of the pieces, roughly in the order in which a forward reads them: first the pieces without weight
    /// decay, then the pieces with it.
    pub(super) fn forward_order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.pieces.len()).collect();
        order.sort_by_key(|piece| self.pieces[*piece].common.decays);
        order
    }

    /// The element range of each matrix within its piece, ascending. Matrices that one matmul reads count as one.
    pub(super) fn matmuls(&self, specs: &[ParameterSpec], piece: &Piece) -> Vec<Range<usize>> {
        let mut all: Vec<Range<usize>> = Vec::new();
        // A parameter with `follows` extends the range of the parameter before it in `specs`.
        for spec in specs {
            let at = self.places[&spec.name].1;
            if !piece.range.contains(&at) {
                continue;
            }
            let (start, len) = (at - piece.range.start, spec.len() as usize);
            match all.last_mut() {
                Some(last) if spec.follows => last.end += len,
                _ => all.push(start..start + len),
            }
        }
        all
    }

    /// Number of elements, padding included.
    pub(super) fn len(&self) -> usize {
        self.pieces.last().map_or(0, |piece| piece.range.end)
    }

    /// The largest numbers of gradient elements that a rank receives in one exchange within its node, and in one
    /// exchange between nodes.
    pub(super) fn largest_received(&self, Mesh { shard, replica, .. }: Mesh) -> [usize; 2] {
        let largest = self.pieces.iter().map(|piece| piece.range.len()).max().unwrap_or(0);
        let room = |len: usize, of: usize| if of == 1 { 0 } else { len };
        [room(largest, shard.of), room(largest / shard.of, replica.of)]
    }

    /// The index of the piece that contains element `at`.
    pub(super) fn piece_of(&self, at: usize) -> usize {
        self.pieces.partition_point(|piece| piece.range.end <= at)
    }
}

/// The layer of a parameter. `usize::MAX` for the output matrix and the final norm, whose gradients a backward
/// completes first; `None` for the embedding, whose gradient it completes last.
fn first_layer(spec: &ParameterSpec) -> Option<usize> {
    let number = spec.name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next());
    let layer = number.and_then(|number| number.parse().ok());
    match spec.kind {
        Kind::Embedding => None,
        Kind::Output => Some(usize::MAX),
        Kind::Norm => layer.or(Some(usize::MAX)),
        Kind::Matrix | Kind::Heads(_) | Kind::Bias | Kind::Sinks | Kind::Router | Kind::Theta => layer,
    }
}

/// Bytes of the receive buffers of a rank. `whole_matrices` says whether the optimizer updates each hidden matrix as a
/// whole.
pub fn received_bytes(specs: &[ParameterSpec], mesh: Mesh, whole_matrices: bool) -> u64 {
    let layout = Layout::new(specs, mesh, whole_matrices);
    let [node, nodes] = layout.largest_received(mesh);
    4 * (2 * node + nodes) as u64
}

/// The intersection of two ranges, unless it is empty.
pub(crate) fn overlap(a: &Range<usize>, b: &Range<usize>) -> Option<Range<usize>> {
    let both = a.start.max(b.start)..a.end.min(b.end);
    (both.start < both.end).then_some(both)
}

#[cfg(test)]
mod tests {
    use super::super::spec::{EMBEDDING, Start};
    use super::*;
    use crate::ranks::Rank;

    #[test]
    fn pieces_hold_whole_products_and_divide_by_the_ranks() {
        let spec = |name: &str, dims: &[usize], follows: bool| ParameterSpec {
            name: name.into(),
            kind: if dims.len() == 2 { Kind::Matrix } else { Kind::Norm },
            dims: dims.into(),
            start: Start::Value(0.0),
            follows,
            fp8: false,
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
                let layout = Layout::with_pieces_of(&specs, ranks, enough, false);
                let mut end = 0;
                for piece in &layout.pieces {
                    assert_eq!(piece.range.start, end);
                    assert!(piece.range.len().is_multiple_of(ranks * ALIGNMENT));
                    end = piece.range.end;
                }
                assert_eq!(
                    (end, layout.pieces.iter().filter(|piece| !piece.common.decays).count()),
                    (layout.len(), 1)
                );
                let of = |name: &str| layout.places[name].1;
                assert_eq!((of("c"), of("d")), (of("b") + 4 * 33, of("c") + 5 * 33));
                for (name, (n, at)) in &layout.places {
                    let piece = &layout.pieces[layout.piece_of(*at)];
                    assert!(at + specs[*n].len() as usize <= piece.range.end, "{name}");
                    assert_eq!(piece.common, Common::of(&specs[*n], false));
                    assert!(specs[*n].follows || at.is_multiple_of(ALIGNMENT));
                }
            }
        }
        assert_eq!(Layout::with_pieces_of(&specs, 2, 300, false).pieces.len(), 4);
    }

    #[test]
    fn pieces_in_fp8_have_whole_matmuls() {
        let spec = |name: &str, rows: usize, follows: bool, fp8: bool| ParameterSpec {
            name: name.into(),
            kind: Kind::Matrix,
            dims: vec![rows, 48],
            start: Start::Value(0.0),
            follows,
            fp8,
        };
        let specs = [
            spec("a", 48, false, true),
            spec("first", 16, false, false),
            spec("b", 16, false, true),
            spec("c", 32, true, true),
        ];
        let layout = Layout::with_pieces_of(&specs, 3, usize::MAX, false);
        let [plain, fp8] = &layout.pieces[..] else { panic!("{:?}", layout.pieces) };
        assert_eq!((plain.common.fp8, fp8.common.fp8), (false, true));
        assert_eq!(layout.matmuls(&specs, fp8), [0..2304, 2304..4608]);
        assert!(fp8.range.len().is_multiple_of(3 * FP8_PART));
    }

    #[test]
    fn a_backward_is_done_with_the_last_layers_first() {
        let spec = |name: &str, dims: &[usize]| ParameterSpec {
            name: name.into(),
            kind: match dims.len() {
                2 if name == EMBEDDING => Kind::Embedding,
                2 => Kind::Matrix,
                _ => Kind::Norm,
            },
            dims: dims.into(),
            start: Start::Value(0.0),
            follows: false,
            fp8: false,
        };
        let layer = |n: usize| {
            let at = |name: &str| format!("model.layers.{n}.{name}.weight");
            [spec(&at("mlp"), &[64, 64]), spec(&at("norm"), &[64])]
        };
        let specs = [
            &[spec(EMBEDDING, &[64, 64])],
            &layer(0)[..],
            &layer(1),
            &layer(2),
            &[spec("model.norm.weight", &[64])],
        ]
        .concat();
        let layout = Layout::with_pieces_of(&specs, 2, 4096, false);
        let firsts: Vec<_> = layout.pieces.iter().map(|piece| piece.first_layer).collect();
        assert_eq!(firsts, [None, Some(0), Some(1), Some(2), Some(0)]);
        assert_eq!(layout.backward_order(), [3, 2, 1, 4, 0]);
        assert_eq!(layout.forward_order(), [4, 0, 1, 2, 3]);
        // If a separate optimizer updates the hidden matrices, no piece contains both them and other parameters.
        let layout = Layout::with_pieces_of(&specs, 1, usize::MAX, true);
        let apart: Vec<_> =
            layout.pieces.iter().map(|piece| (piece.common.apart, piece.range.len())).collect();
        assert_eq!(apart, [(false, 4096), (true, 3 * 4096), (false, 256)]);
    }

    #[test]
    fn a_rank_has_room_for_what_others_send() {
        let spec = |name: &str| ParameterSpec {
            name: name.into(),
            kind: Kind::Matrix,
            dims: vec![64, 96],
            start: Start::Value(0.0),
            follows: false,
            fp8: false,
        };
        let layout = Layout::with_pieces_of(&[spec("a"), spec("b")], 6, 1, false);
        let largest = 64 * 96;
        let rank = |of| Rank { index: 0, of };
        for (shards, replicas, room) in
            [(1, 1, [0, 0]), (2, 1, [largest, 0]), (1, 3, [0, largest]), (2, 3, [largest, largest / 2])]
        {
            let mesh = Mesh { shard: rank(shards), replica: rank(replicas), ..Mesh::ALONE };
            assert_eq!(layout.largest_received(mesh), room);
        }
    }

    #[test]
    fn overlaps() {
        assert_eq!(overlap(&(0..4), &(3..9)), Some(3..4));
        assert_eq!(overlap(&(0..3), &(3..9)), None);
    }
}
