//! Checks of tensors, for operators on CPU and GPU: element types, the layout of rows, and token or class ids.

use candle_core::{DType, Layout};

use crate::error::Error;

/// The result of a check that ids (tokens or classes) are in range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Checked {
    /// The first id that is out of range and not ignored.
    pub(crate) bad: Option<i64>,
    /// Number of ids that are in range and not ignored.
    pub(crate) counted: usize,
}

pub(crate) fn unsupported_dtype(op: &str, dtype: DType) -> Error {
    Error::new(format!("{op} does not support this element type"))
        .got(dtype.as_str())
        .allowed("f32, f16, bf16")
        .hint("convert with `to_dtype(DType::F32)`")
}

/// The distance in elements between consecutive rows. A row is a vector along the last dimension. `None` unless the
/// elements of a row are adjacent in memory and the rows have a constant stride.
pub(crate) fn row_stride(layout: &Layout) -> Option<usize> {
    let mut dims: Vec<(usize, usize)> =
        layout.dims().iter().copied().zip(layout.stride().iter().copied()).collect();
    let (columns, step) = dims.pop().unwrap_or((1, 1));
    // The stride of a dimension of extent 1 has no effect.
    dims.retain(|&(extent, _)| extent != 1);
    let follow = dims.windows(2).all(|pair| pair[0].1 == pair[1].0 * pair[1].1);
    ((step == 1 || columns == 1) && follow).then(|| dims.last().map_or(columns, |&(_, stride)| stride))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_are_equally_far_apart() {
        let of = |dims: &[usize], strides: &[usize]| row_stride(&Layout::new(dims.into(), strides.into(), 0));
        assert_eq!(of(&[4, 5], &[5, 1]), Some(5));
        assert_eq!(of(&[4, 5], &[12, 1]), Some(12));
        assert_eq!(of(&[2, 4, 5], &[48, 12, 1]), Some(12));
        assert_eq!(of(&[2, 4, 5], &[50, 12, 1]), None);
        assert_eq!(of(&[2, 4, 5], &[5, 10, 1]), None);
        assert_eq!(of(&[4, 5], &[1, 4]), None);
        assert_eq!(of(&[2, 1, 5], &[10, 7, 1]), Some(10));
        assert_eq!(of(&[4, 1], &[3, 9]), Some(3));
        assert_eq!(of(&[5], &[1]), Some(5));
        assert_eq!(of(&[], &[]), Some(1));
    }
}
