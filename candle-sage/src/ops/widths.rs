//! Attention in which values have another head_dim than queries and keys: the narrower heads are padded with channels
//! of zeros.

use candle_core::{D, Result, Tensor};

use crate::shape::{Dims, HEAD_DIM};

/// The head_dims of a call in which values have another head_dim than queries and keys.
///
/// The narrower tensors can be padded with zero channels: a zero channel of Q and K adds nothing to a logit, and a zero
/// channel of V becomes a zero channel of O. In low-bit schemes zeros change no scale, because a scale is computed from
/// the largest absolute value.
#[derive(Debug, Clone, Copy)]
pub(super) struct Widths {
    query: usize,
    value: usize,
}

impl Widths {
    /// `None` if all head_dims are the same. It is also `None` if dimensions do not match or a head_dim is not
    /// supported: [`AttentionShape::new`](crate::AttentionShape::new) reports these errors.
    pub(super) fn of([(_, _, _, query), (b, s, h, key), (vb, vs, vh, value)]: [Dims; 3]) -> Option<Self> {
        let fits =
            query == key && (b, s, h) == (vb, vs, vh) && [query, value].iter().all(|n| HEAD_DIM.contains(n));
        (fits && query != value).then_some(Self { query, value })
    }

    /// Query, key and value, padded to the larger head_dim.
    pub(super) fn widen(self, inputs: [&Tensor; 3]) -> Result<[Tensor; 3]> {
        let [q, k, v] = inputs.map(|x| widen(x, self.query.max(self.value)));
        Ok([q?, k?, v?])
    }

    /// The output's gradient, padded with channels of zeros.
    pub(super) fn widen_output(self, dout: &Tensor) -> Result<Tensor> {
        widen(dout, self.query.max(self.value))
    }

    /// The output without the channels that padding added.
    pub(super) fn narrow_output(self, out: &Tensor) -> Result<Tensor> {
        out.narrow(D::Minus1, 0, self.value)
    }

    /// The head_dim of values and outputs.
    pub(super) fn value(self) -> usize {
        self.value
    }

    /// The gradients of query, key and value without the channels that padding added.
    pub(super) fn narrow(self, [dq, dk, dv]: [Tensor; 3]) -> Result<[Tensor; 3]> {
        let first = |x: Tensor, channels| x.narrow(D::Minus1, 0, channels);
        Ok([first(dq, self.query)?, first(dk, self.query)?, first(dv, self.value)?])
    }
}

fn widen(x: &Tensor, channels: usize) -> Result<Tensor> {
    match channels - x.dim(D::Minus1)? {
        0 => Ok(x.clone()),
        // Without `contiguous()`, the channels of the padded tensor may not be adjacent in memory. Kernels would then
        // load them one by one.
        missing => x.contiguous()?.pad_with_zeros(D::Minus1, 0, missing),
    }
}
