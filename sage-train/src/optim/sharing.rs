//! Assigns matrices to the ranks of a node for orthogonalization, and exchanges the data for it. A rank updates a shard
//! of each piece of parameter memory, and a shard can end inside a matrix; but a matrix is orthogonalized as a whole.
//! So each rank sends its parts of a matrix to the matrix's owner, and receives the orthogonal directions of these
//! parts. In both exchanges together, each of R ranks sends at most about 2/R of the piece's elements (in BF16 on a
//! GPU), and receives as many.

use std::ops::Range;

use candle_core::{Result, Tensor};
use candle_sage::ops::{MuonMatrix, MuonPart};

use crate::model::{Matrices, overlap};
use crate::ranks::{Group, Rank, Transfer};

/// One rank's work on a piece of parameter memory. The rank has one tensor of update directions: first those of the
/// matrices that it owns, then those of its shard's parts of other matrices.
#[derive(Debug, PartialEq)]
pub(super) struct WorkShare {
    /// Rows and columns of the rank's own matrices.
    pub(super) own: Vec<(usize, usize)>,
    /// One part for each matrix, own or not, that overlaps the rank's shard.
    pub(super) parts: Vec<MuonPart>,
    pub(super) len: usize,
    /// For each rank, the row numbers of the matrices that the rank owns. The rows of all matrices are numbered
    /// consecutively.
    rows: Vec<Range<usize>>,
    /// For each other rank M, two lists of ranges in this rank's tensor of update directions. First list: matrices that
    /// rank M orthogonalizes, as far as they overlap this rank's shard. Second list: matrices that this rank
    /// orthogonalizes, as far as they overlap rank M's shard.
    with: Vec<[Vec<Range<usize>>; 2]>,
}

impl WorkShare {
    /// With `heads_apart` each head of a query, key or value matrix is a separate matrix.
    pub(super) fn new(matrices: &Matrices<'_>, heads_apart: bool) -> Self {
        let split = |&(matrix, head): &(MuonMatrix, Option<usize>)| {
            let rows = head.filter(|_| heads_apart).unwrap_or(matrix.rows);
            let at = move |n| matrix.at + n * rows * matrix.columns;
            (0..matrix.rows / rows).map(move |n| MuonMatrix { at: at(n), rows, ..matrix })
        };
        let all: Vec<MuonMatrix> = matrices.all.iter().flat_map(split).collect();
        Self::of(&all, matrices.elements, matrices.ranks.rank())
    }

    fn of(matrices: &[MuonMatrix], elements: usize, rank: Rank) -> Self {
        let owners = owners(matrices, rank.of);
        let is_own = |owner: usize| owner == rank.index;
        let own: Vec<MuonMatrix> = matrices
            .iter()
            .zip(&owners)
            .filter(|(_, owner)| is_own(**owner))
            .map(|(matrix, _)| *matrix)
            .collect();
        let mut len = own.iter().map(MuonMatrix::elements).sum();
        let (mut parts, mut with, mut of_own) = (Vec::new(), vec![[Vec::new(), Vec::new()]; rank.of], 0);
        let shards = (0..rank.of).map(|index| Rank { index, ..rank }.part_of(elements));
        let shards: Vec<Range<usize>> = shards.collect();
        let mut rows = vec![0..0; rank.of];
        let mut row = 0;
        for (matrix, &owner) in matrices.iter().zip(&owners) {
            if rows[owner].is_empty() {
                rows[owner].start = row;
            }
            row += matrix.rows;
            rows[owner].end = row;
            let whole = matrix.at..matrix.at + matrix.elements();
            for (member, shard) in shards.iter().enumerate() {
                let Some(here) = overlap(&whole, shard) else { continue };
                let to = match is_own(owner) {
                    true => of_own + here.start - whole.start,
                    false if member == rank.index => len,
                    false => continue,
                };
                if member == rank.index {
                    let at = here.start - shard.start;
                    parts.push(MuonPart { at, to, len: here.len(), shape: matrix.shape() });
                } else {
                    with[member][1].push(to..to + here.len());
                }
                if !is_own(owner) {
                    with[owner][0].push(to..to + here.len());
                    len += here.len();
                }
            }
            of_own += if is_own(owner) { whole.len() } else { 0 };
        }
        Self { own: own.iter().map(MuonMatrix::shape).collect(), parts, len, rows, with }
    }

    /// Sends this rank's parts of update directions to the ranks that own the matrices. After the transfer,
    /// `directions` contains the whole update directions of the matrices that this rank owns.
    pub(super) fn collect(&self, directions: &Tensor, ranks: &Group) -> Result<Transfer> {
        ranks.send_receive(|member| {
            let [of_others, own] = &self.with[member];
            Ok([views(directions, of_others)?, views(directions, own)?])
        })
    }

    /// The inverse of [`WorkShare::collect`]: sends the directions back to the ranks that they came from. `rows`
    /// contains the row statistics of all matrices. Each rank sends the statistics of the matrices that it owns to all
    /// other ranks.
    pub(super) fn give_back(
        &self,
        directions: &Tensor,
        rows: Option<&Tensor>,
        ranks: &Group,
    ) -> Result<Transfer> {
        ranks.send_receive(|member| {
            let [of_others, own] = &self.with[member];
            let rows_of = |rank: usize| match rows {
                Some(rows) if !self.rows[rank].is_empty() => views(rows, &self.rows[rank..=rank]),
                _ => Ok(Vec::new()),
            };
            Ok([
                [views(directions, own)?, rows_of(ranks.rank().index)?].concat(),
                [views(directions, of_others)?, rows_of(member)?].concat(),
            ])
        })
    }

    /// The part of `rows` (row statistics of all matrices) for the matrices that this rank owns.
    pub(super) fn own_rows(&self, rows: &Tensor, ranks: &Group) -> Result<Tensor> {
        let own = &self.rows[ranks.rank().index];
        rows.narrow(0, own.start, own.len())
    }
}

fn views(all: &Tensor, ranges: &[Range<usize>]) -> Result<Vec<Tensor>> {
    ranges.iter().map(|range| all.narrow(0, range.start, range.len())).collect()
}

/// The owner of each matrix: each rank owns adjacent matrices, and all ranks have about equal cost.
fn owners(matrices: &[MuonMatrix], ranks: usize) -> Vec<usize> {
    // Number of multiplications in one iteration of the orthogonalization of X. The iteration computes the Gram matrix
    // G of X, the product G G, and (a I + b G + c G G) X.
    let cost = |matrix: &MuonMatrix| {
        let (small, large) = (matrix.rows.min(matrix.columns), matrix.rows.max(matrix.columns));
        (small * small) as u128 * (2 * large + small) as u128
    };
    let all: u128 = matrices.iter().map(cost).sum();
    let mut before = 0;
    let owner = |matrix| {
        // The total cost is cut into equal shares, one for each rank. A matrix belongs to the rank whose share contains
        // the middle of the matrix's cost.
        let middle = 2 * before + cost(matrix);
        before += cost(matrix);
        (middle * ranks as u128 / (2 * all)) as usize
    };
    matrices.iter().map(owner).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All ranks together update each element of each matrix once. For each pair of ranks, one sends as many elements
    /// as the other receives. Each matrix is owned by one rank.
    #[test]
    fn ranks_share_all_matrices() {
        let mut at = 0;
        let shapes = [(8, 24), (8, 8), (24, 8), (8, 8), (8, 24), (16, 8), (8, 8)];
        let mut matrices = shapes.map(|(rows, columns)| {
            at += 8;
            let matrix = MuonMatrix { at, rows, columns };
            at += rows * columns;
            matrix
        });
        matrices.sort_by_key(|matrix| (matrix.shape(), matrix.at));
        for of in [1, 2, 3, 5, 12] {
            let elements = at.next_multiple_of(8 * of);
            let all: Vec<WorkShare> =
                (0..of).map(|index| WorkShare::of(&matrices, elements, Rank { index, of })).collect();
            let mut updated = vec![0; elements];
            for (rank, sharing) in all.iter().enumerate() {
                let shard = Rank { index: rank, of }.part_of(elements);
                for part in &sharing.parts {
                    updated[shard.start + part.at..][..part.len].iter_mut().for_each(|times| *times += 1);
                    assert!(part.at + part.len <= shard.len() && part.to + part.len <= sharing.len);
                }
                for (other, theirs) in all.iter().enumerate() {
                    let lengths = |ranges: &[Range<usize>]| {
                        ranges.iter().map(ExactSizeIterator::len).collect::<Vec<_>>()
                    };
                    assert_eq!(lengths(&sharing.with[other][0]), lengths(&theirs.with[rank][1]));
                }
            }
            for matrix in matrices {
                assert!(updated[matrix.at..matrix.at + matrix.elements()].iter().all(|times| *times == 1));
            }
            assert_eq!(
                updated.iter().sum::<i32>(),
                matrices.iter().map(|m| m.elements() as i32).sum::<i32>()
            );
            assert_eq!(all.iter().map(|sharing| sharing.own.len()).sum::<usize>(), matrices.len());
            // In the numbering of all rows, each rank's range starts where the previous rank's range ends.
            let mut end = 0;
            for (rank, rows) in all[0].rows.iter().enumerate().filter(|(_, rows)| !rows.is_empty()) {
                let own: usize = all[rank].own.iter().map(|(rows, _)| rows).sum();
                assert_eq!((rows.start, rows.len()), (end, own));
                end = rows.end;
            }
            assert_eq!(end, matrices.iter().map(|matrix| matrix.rows).sum::<usize>());
        }
        let own = |index| WorkShare::of(&matrices, 1024, Rank { index, of: 2 }).own.len();
        assert_eq!([own(0), own(1)], [4, 3]);
    }
}
