//! `past_linear` on CUDA for tails without kernels, computed with candle's matmuls in f32. Candle's autograd computes
//! the gradients.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::ops::softmax;

use super::{PastLinear, Tail};
use crate::selection::Blocks;

/// The tail's output, with the query's type.
///
/// In each segment and key head `S_J = phi(K_J)^T [V_J, 1]` is the state of a block of keys, with d rows and d + 1
/// columns (`phi`: softmax over channels). For a block of queries `I`, `H_I = sum_J w_IJ S_J`, where `w_IJ` is 1 if the
/// tail of `I` contains the block of keys `J`, else 0. `phi(Q_I) H_I` contains the sums of values and, in the last
/// column, the normalizers. The states need head_dim / (keys of a block) times the memory of K in f32.
pub(super) fn forward(op: &PastLinear, [q, k, v]: [&Tensor; 3]) -> Result<Tensor> {
    let blocks = op.selection.blocks();
    let mut outputs = Vec::new();
    for (number, segment) in op.shape.segments().iter().enumerate() {
        let (queries, keys) = (&segment.query, &segment.key);
        let rows = |x: &Tensor, start, len| x.get(segment.batch)?.narrow(0, start, len)?.to_dtype(DType::F32);
        let query = rows(q, queries.start, queries.len())?;
        if queries.is_empty() || keys.is_empty() {
            outputs.push(query.zeros_like()?);
            continue;
        }
        let (key, value) = (rows(k, keys.start, keys.len())?, rows(v, keys.start, keys.len())?);
        let key = match op.shape.causal() {
            true => key,
            false => key.broadcast_sub(&key.mean_keepdim(0)?)?,
        };
        let with_ones = Tensor::cat(&[&value, &value.narrow(2, 0, 1)?.ones_like()?], 2)?;
        let states = in_blocks(&softmax(&key, D::Minus1)?, blocks.key)?
            .transpose(2, 3)?
            .contiguous()?
            .matmul(&in_blocks(&with_ones, blocks.key)?)?;
        let (heads, columns, d, width) = states.dims4()?;
        let weights = weights(op, blocks, number)?;
        let sums = weights.matmul(&states.reshape((heads, columns, d * width))?)?;
        // Per block, the rows of a group's query heads form one matrix, since these heads share `sums`.
        let phi = in_blocks(&softmax(&query, D::Minus1)?, blocks.query)?;
        let (query_heads, count, size, _) = phi.dims4()?;
        let group = query_heads / heads;
        let phi = phi.reshape((heads, group, count, size, d))?.transpose(1, 2)?.contiguous()?;
        let products =
            phi.reshape((heads, count, group * size, d))?.matmul(&sums.reshape((heads, count, d, width))?)?;
        let out = products.narrow(3, 0, d)?.broadcast_mul(&inverse_norm(&products.narrow(3, d, 1)?)?)?;
        let out = out.reshape((heads, count, group, size, d))?.transpose(1, 2)?.contiguous()?;
        let out = out.reshape((query_heads, count * size, d))?.narrow(1, 0, queries.len())?;
        outputs.push(out.transpose(0, 1)?);
    }
    // The segments are in the order of the query tensor's tokens.
    Tensor::cat(&outputs, 0)?.reshape(q.shape())?.to_dtype(q.dtype())
}

/// The gradients of query, key and value, through the graph of [`forward`].
pub(super) fn backward(op: &PastLinear, inputs: [&Tensor; 3], dout: &Tensor) -> Result<[Tensor; 3]> {
    let vars = inputs.map(|x| Var::from_tensor(&x.detach()));
    let [q, k, v] = vars;
    let (q, k, v) = (q?, k?, v?);
    let out = forward(op, [&q, &k, &v])?.to_dtype(DType::F32)?;
    let gradients = (out * dout.to_dtype(DType::F32)?)?.sum_all()?.backward()?;
    let of = |var: &Var| gradients.get(var).map_or_else(|| var.zeros_like(), |x| x.contiguous());
    Ok([of(&q)?, of(&k)?, of(&v)?])
}

/// (tokens, heads, channels) -> (heads, blocks, tokens of a block, channels), with rows of zeros after the last token.
fn in_blocks(x: &Tensor, size: usize) -> Result<Tensor> {
    let (len, heads, channels) = x.dims3()?;
    let count = len.div_ceil(size);
    let whole = x.pad_with_zeros(0, 0, count * size - len)?;
    whole.reshape((count, size, heads, channels))?.permute((2, 0, 1, 3))?.contiguous()
}

/// The inverse normalizers; 0 if a normalizer is too small to invert, so that a query with zero weight on every key has
/// zero output and gradients. NaN stays NaN.
pub(crate) fn inverse_norm(norms: &Tensor) -> Result<Tensor> {
    let small = norms.lt(f32::MIN_POSITIVE)?;
    let ones = norms.ones_like()?;
    small.where_cond(&ones.zeros_like()?, &small.where_cond(&ones, norms)?.recip()?)
}

/// (key heads, blocks of queries, blocks of keys): 1 if the tail of the block of queries contains the block of keys,
/// else 0.
fn weights(op: &PastLinear, blocks: &Blocks, segment: usize) -> Result<Tensor> {
    let lists = op.selection.lists();
    let (rows, columns) = (blocks.query_blocks(segment), blocks.key_blocks(segment));
    let candidate = |row, column| if column < blocks.candidates(segment, row) { 1f32 } else { 0.0 };
    let all = (0..rows).flat_map(|row| (0..columns).map(move |column| candidate(row, column)));
    let all = Tensor::from_iter(all, lists.device())?.reshape((1, rows, columns))?;
    let all = all.broadcast_as((blocks.key_heads, rows, columns))?.contiguous()?;
    match op.tail {
        Tail::Past => Ok(all),
        // The lists also contain blocks that are not candidates (`Blocks::always`). For these blocks `all` is 0, and
        // `relu` turns the difference -1 into 0.
        Tail::Complement => (all - listed(lists, blocks.row(segment, 0), rows, columns)?)?.relu(),
    }
}

/// (key heads, `rows`, `columns`): 1 if the list of the row's block of queries contains the column's block of keys,
/// else 0. Row 0 is the block of queries `first`. `lists` is (key heads, blocks of queries, width). Each list begins
/// with its length.
fn listed(lists: &Tensor, first: usize, rows: usize, columns: usize) -> Result<Tensor> {
    let lists = lists.narrow(1, first, rows)?;
    let (heads, _, width) = lists.dims3()?;
    if width == 1 {
        return Tensor::zeros((heads, rows, columns), DType::F32, lists.device());
    }
    let (counts, listed) = (lists.narrow(2, 0, 1)?, lists.narrow(2, 1, width - 1)?.contiguous()?);
    let device: &Device = lists.device();
    let numbers = Tensor::arange(0, width as u32 - 1, device)?.reshape((1, 1, width - 1))?;
    let there = numbers
        .broadcast_as(listed.shape())?
        .contiguous()?
        .lt(&counts.broadcast_as(listed.shape())?.contiguous()?)?;
    // Entries after the end of a list are mapped to an extra column, which is dropped.
    let behind = Tensor::full(columns as u32, listed.shape(), device)?;
    let places = there.where_cond(&listed, &behind)?;
    let ones = Tensor::ones(listed.shape(), DType::F32, device)?;
    let all =
        Tensor::zeros((heads, rows, columns + 1), DType::F32, device)?.scatter_add(&places, &ones, 2)?;
    all.narrow(2, 0, columns)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::past_linear::Gradients;
    use crate::selection::Selection;
    use crate::shape::{AttentionShape, Packing};

    /// Compares outputs and gradients with those of `cpu::past_linear`, which computes the same f32 sums in another
    /// order.
    #[test]
    fn they_are_the_tails_of_the_cpu() -> Result<()> {
        let documents = |cu: &[usize]| Packing::self_attention(cu.to_vec());
        let cases = [
            ((2, 70, 4, 8), (2, 70, 2, 8), None),
            ((1, 33, 2, 24), (1, 90, 2, 24), None),
            ((1, 60, 4, 16), (1, 60, 1, 16), Some(documents(&[0, 1, 1, 40, 60]))),
            ((1, 5, 1, 8), (1, 5, 1, 8), None),
        ];
        for (q_dims, k_dims, packing) in cases {
            for (causal, tail) in
                [(true, Tail::Past), (true, Tail::Complement), (false, Tail::Past), (false, Tail::Complement)]
            {
                if causal && q_dims.1 != k_dims.1 {
                    continue;
                }
                let shape = AttentionShape::new(q_dims, k_dims, k_dims, causal, packing.clone())?;
                let draw = |dims| Tensor::randn(0f32, 1., dims, &Device::Cpu);
                let (q, k, v, dout) = (draw(q_dims)?, draw(k_dims)?, draw(k_dims)?, draw(q_dims)?);
                // Selects every third candidate (block of keys). Without a causal mask, also selects the first one,
                // because no list may be empty. With the mask, `from_lists` adds the blocks on the diagonal.
                let selection = Selection::from_lists(&shape, (16, 8), &Device::Cpu, |at| {
                    let first = usize::from(!causal).min(at.candidates);
                    (0..at.candidates).filter(|n| *n < first || (n + at.block) % 3 == 0).collect()
                })?;
                let op = PastLinear::new([&q, &k, &v], &selection, tail)?;
                let walked = q.apply_op3(&k, &v, PastLinear::new([&q, &k, &v], &selection, tail)?)?;
                let off = |a: &Tensor, b: &Tensor| -> Result<f64> {
                    let norm = |x: Tensor| x.to_dtype(DType::F64)?.sqr()?.sum_all()?.to_scalar::<f64>();
                    Ok((norm((a - b)?)? / norm(b.clone())?.max(1e-30)).sqrt())
                };
                let what = format!("{q_dims:?} {k_dims:?} causal {causal} {tail:?}");
                let out = off(&forward(&op, [&q, &k, &v])?, &walked)?;
                assert!(out < 2e-6, "{what}: {out:e}");
                let expected = Gradients(&op).of([&q, &k, &v], &dout)?;
                for (got, expected) in backward(&op, [&q, &k, &v], &dout)?.iter().zip(&expected) {
                    let error = off(got, expected)?;
                    assert!(error < 4e-6, "gradients of {what}: {error:e}");
                }
            }
        }
        Ok(())
    }

    /// A query with zero weight on every key has zero output. A NaN in a key reaches only the outputs of the same
    /// document. The output has the inputs' type.
    #[test]
    fn what_is_no_number() -> Result<()> {
        let dims = (1, 32, 1, 8);
        let shape =
            AttentionShape::new(dims, dims, dims, false, Some(Packing::self_attention(vec![0, 16, 32])))?;
        let selection = Selection::from_lists(&shape, (8, 8), &Device::Cpu, |_| vec![0])?;
        let x = Tensor::randn(0f32, 1., dims, &Device::Cpu)?;
        let broken = Tensor::cat(&[&(x.narrow(1, 0, 1)? * f64::NAN)?, &x.narrow(1, 1, 31)?], 1)?;
        let op = PastLinear::new([&x, &broken, &x], &selection, Tail::Past)?;
        let out = forward(&op, [&x, &broken, &x])?.to_dtype(DType::F64)?;
        let sum = |first| out.narrow(1, first, 16)?.sum_all()?.to_scalar::<f64>();
        assert!(sum(0)?.is_nan() && sum(16)?.is_finite());
        let half = x.to_dtype(DType::BF16)?;
        let op = PastLinear::new([&half, &half, &half], &selection, Tail::Complement)?;
        assert_eq!(forward(&op, [&half, &half, &half])?.dtype(), DType::BF16);
        // `phi` of a query is non-zero only in channel 0, `phi` of a key only in channel 1. So every weight is zero.
        let one = |channel: usize| -> Result<Tensor> {
            let row: Vec<f32> = (0..8).map(|n| if n == channel { 500.0 } else { 0.0 }).collect();
            Tensor::from_vec(row, (1, 1, 1, 8), &Device::Cpu)?.broadcast_as(dims)?.contiguous()
        };
        let shape = AttentionShape::new(dims, dims, dims, true, None)?;
        let selection = Selection::from_lists(&shape, (8, 8), &Device::Cpu, |_| vec![])?;
        let (q, k) = (one(0)?, one(1)?);
        let op = PastLinear::new([&q, &k, &x], &selection, Tail::Past)?;
        assert_eq!(forward(&op, [&q, &k, &x])?.abs()?.sum_all()?.to_scalar::<f32>()?, 0.0);
        for gradient in backward(&op, [&q, &k, &x], &x)? {
            assert_eq!(gradient.abs()?.sum_all()?.to_scalar::<f32>()?, 0.0);
        }
        Ok(())
    }
}
