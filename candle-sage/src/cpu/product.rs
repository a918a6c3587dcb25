//! Matmuls of small row-major matrices with the `gemm` crate.

use gemm::Parallelism;

/// A contiguous row-major f32 matrix, or its transpose.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mat<'a> {
    values: &'a [f32],
    rows: usize,
    cols: usize,
    transposed: bool,
}

impl<'a> Mat<'a> {
    /// A matrix of `values`.
    ///
    /// # Panics
    /// When `values` is not `rows * cols` long.
    pub(crate) fn new(values: &'a [f32], rows: usize, cols: usize) -> Self {
        assert_eq!(values.len(), rows * cols, "a {rows} x {cols} matrix");
        Self { values, rows, cols, transposed: false }
    }

    pub(crate) fn dims(self) -> (usize, usize) {
        if self.transposed { (self.cols, self.rows) } else { (self.rows, self.cols) }
    }

    /// The transpose. No value is moved.
    pub(crate) fn t(self) -> Self {
        Self { transposed: !self.transposed, ..self }
    }

    /// (rows, columns, row stride, column stride); those of the transpose if `transposed`.
    fn seen(&self) -> (usize, usize, isize, isize) {
        let stride = self.cols as isize;
        if self.transposed { (self.cols, self.rows, 1, stride) } else { (self.rows, self.cols, stride, 1) }
    }
}

/// `out = factor * a b`, or `out += factor * a b` with `accumulate`; single-threaded, f32 sums.
///
/// Sums of whole numbers are exact below 2^24. INT8 matmuls stay below this limit, since values are at most 127 and
/// reductions have at most 1040 terms.
///
/// # Panics
/// When the sizes do not match.
pub(crate) fn product(out: &mut [f32], a: Mat<'_>, b: Mat<'_>, factor: f32, accumulate: bool) {
    product_with(out, a, b, factor, accumulate, Parallelism::None);
}

/// [`product`] on all threads. The result does not depend on the number of threads.
pub(crate) fn product_parallel(out: &mut [f32], a: Mat<'_>, b: Mat<'_>, factor: f32, accumulate: bool) {
    product_with(out, a, b, factor, accumulate, Parallelism::Rayon(0));
}

fn product_with(
    out: &mut [f32],
    a: Mat<'_>,
    b: Mat<'_>,
    factor: f32,
    accumulate: bool,
    parallelism: Parallelism,
) {
    let (m, k, a_row, a_col) = a.seen();
    let (b_rows, n, b_row, b_col) = b.seen();
    assert_eq!(k, b_rows, "inner dimensions");
    assert_eq!(out.len(), m * n, "output size");
    let keep = if accumulate { 1.0 } else { 0.0 };
    // SAFETY: `Mat::new` and the assertions above make every (row, column) of the three matrices
    // an index inside its slice, and `out` is exclusively borrowed.
    #[allow(unsafe_code)]
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            n as isize,
            accumulate,
            a.values.as_ptr(),
            a_col,
            a_row,
            b.values.as_ptr(),
            b_col,
            b_row,
            keep,
            factor,
            false,
            false,
            false,
            parallelism,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transposes_and_accumulates() {
        let (a, b) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, -1.0, 2.0, 0.5, 0.0, 3.0]);
        let mut out = vec![1.0; 4];
        product(&mut out, Mat::new(&a, 2, 3), Mat::new(&b, 3, 2), 2.0, true);
        assert_eq!(out, [11.0, 19.0, 29.0, 34.0]);
        let mut out = vec![f32::NAN; 9];
        product(&mut out, Mat::new(&a, 2, 3).t(), Mat::new(&b, 3, 2).t(), 1.0, false);
        assert_eq!(out, [-3.0, 4.0, 12.0, -3.0, 6.5, 15.0, -3.0, 9.0, 18.0]);
    }

    #[test]
    fn sums_of_code_products_are_exact() {
        let k = 1040;
        let (a, b) = (vec![127.0; k], vec![-127.0; k]);
        let mut out = vec![0.0; 1];
        product(&mut out, Mat::new(&a, 1, k), Mat::new(&b, k, 1), 1.0, false);
        assert_eq!(out[0] as i64, -127 * 127 * k as i64);
    }
}
