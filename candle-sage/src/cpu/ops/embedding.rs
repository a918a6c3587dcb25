//! The gradient of an embedding's table, on slices of f32.

use rayon::prelude::*;

/// Row `r` of the result, (rows, width), is the sum of the rows `n` of `dout` with `ids[n] = r`. All `ids` are below
/// `rows`.
pub(crate) fn add_rows(ids: Vec<i64>, dout: &[f32], rows: usize, width: usize) -> Vec<f32> {
    // Pairs (id, position in `dout`) are sorted, so that vectors with the same id are added in the order of their
    // positions.
    let mut places: Vec<(usize, usize)> =
        ids.into_iter().enumerate().map(|(n, id)| (id as usize, n)).collect();
    places.sort_unstable();
    let mut grad = vec![0.0; rows * width];
    grad.par_chunks_mut(width).enumerate().with_min_len(64).for_each(|(row, grad)| {
        let first = places.partition_point(|&(id, _)| id < row);
        for &(_, n) in places[first..].iter().take_while(|&&(id, _)| id == row) {
            grad.iter_mut().zip(&dout[n * width..(n + 1) * width]).for_each(|(g, x)| *g += x);
        }
    });
    grad
}
