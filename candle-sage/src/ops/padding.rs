//! Converts padded batches to packed documents and back, with gradients.

use candle_core::{DType, Device, Result, Tensor};

use super::support::{argument_error, shape_error, shapes_of};
use crate::shape::Packing;

/// Which tokens of a padded batch, (batch, sequence), are real.
///
/// In any scheme, attention over packed documents needs no padding mask, and skips the padding, forward and backward.
/// Call [`pack_padded`] on the batch, run the model with [`Padding::packing`], and call [`unpack_padded`] on tensors
/// that have to be batches again. Norms and linear layers in between run on fewer tokens too.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_sage::Attention;
/// use candle_sage::ops::{Padding, pack_padded, unpack_padded};
///
/// // Two texts of 3 and 5 tokens, padded to 5.
/// let mask = Tensor::new(&[[1u8, 1, 1, 0, 0], [1, 1, 1, 1, 1]], &Device::Cpu)?;
/// let padding = Padding::from_mask(&mask)?;
/// let x = Tensor::randn(0f32, 1., (2, 5, 2, 8), &Device::Cpu)?;
/// let packed = pack_padded(&x, &padding)?;
/// assert_eq!(packed.dims(), [1, 8, 2, 8]);
/// let out = Attention::default().packing(padding.packing()).apply(&packed, &packed, &packed)?;
/// let out = unpack_padded(&out, &padding)?;
/// // The first text sees its own three tokens.
/// let alone = x.narrow(0, 0, 1)?.narrow(1, 0, 3)?;
/// let alone = Attention::default().apply(&alone, &alone, &alone)?;
/// let first = out.narrow(0, 0, 1)?.narrow(1, 0, 3)?;
/// assert!((first - alone)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Padding {
    batch: usize,
    sequence: usize,
    /// Cumulative numbers of real tokens, from 0.
    cu_seqlens: Vec<usize>,
    /// The positions of the real tokens in the flattened batch, u32.
    real: Tensor,
}

impl Padding {
    /// From a mask (batch, sequence) of any type: 0 for padding, not 0 for real tokens. Real tokens may be
    /// anywhere in a row (left or right padding), and keep their order. A row may have no real token. The host reads
    /// the mask, and therefore waits if the mask is on a GPU.
    ///
    /// # Errors
    /// When the mask is not a matrix, or has no real token.
    pub fn from_mask(mask: &Tensor) -> Result<Self> {
        let (batch, sequence) = mask.dims2().map_err(|_| {
            shape_error(
                "padding: the mask is not a matrix",
                shapes_of(&[("mask", mask)]),
                "(batch, sequence)",
                "1 for a token, 0 for padding",
            )
        })?;
        let rows = mask.ne(&mask.zeros_like()?)?.to_dtype(DType::U8)?.to_vec2::<u8>()?;
        let real = rows.iter().enumerate().flat_map(|(row, tokens)| {
            let of_row = tokens.iter().enumerate().filter(|(_, real)| **real != 0);
            of_row.map(move |(at, _)| row * sequence + at)
        });
        let lengths = rows.iter().map(|tokens| tokens.iter().filter(|real| **real != 0).count());
        Self::new((batch, sequence), lengths, real, mask.device())
    }

    /// From the number of real tokens in each row of a batch (batch, sequence). Real tokens precede the padding.
    ///
    /// # Errors
    /// When a row is longer than the sequence, or no row has a token.
    pub fn from_lengths(lengths: &[usize], sequence: usize, device: &Device) -> Result<Self> {
        if let Some(longest) = lengths.iter().find(|length| **length > sequence) {
            return Err(argument_error(
                "padding: a row is longer than the sequence",
                longest,
                &format!("up to {sequence} tokens"),
                "lengths count real tokens, not padding",
            ));
        }
        let real = lengths
            .iter()
            .enumerate()
            .flat_map(|(row, length)| (0..*length).map(move |at| row * sequence + at));
        Self::new((lengths.len(), sequence), lengths.iter().copied(), real, device)
    }

    fn new(
        (batch, sequence): (usize, usize),
        lengths: impl Iterator<Item = usize>,
        real: impl Iterator<Item = usize>,
        device: &Device,
    ) -> Result<Self> {
        let mut cu_seqlens = vec![0];
        for length in lengths {
            cu_seqlens.push(cu_seqlens.last().copied().unwrap_or(0) + length);
        }
        let real: Vec<u32> =
            real.map(u32::try_from).collect::<std::result::Result<_, _>>().map_err(|_| {
                argument_error(
                    "padding: the batch is too large",
                    format!("({batch}, {sequence})"),
                    "fewer than 2^32 tokens",
                    "split the batch",
                )
            })?;
        if real.is_empty() {
            return Err(argument_error(
                "padding: all tokens are padding",
                format!("({batch}, {sequence})"),
                "at least one real token",
                "a mask is 1 for a token and 0 for padding",
            ));
        }
        Ok(Self { batch, sequence, cu_seqlens, real: Tensor::new(real, device)? })
    }

    /// The packing for self-attention, with each row of the batch as a document.
    pub fn packing(&self) -> Packing {
        Packing::self_attention(self.cu_seqlens.clone())
    }

    /// Number of real tokens.
    pub fn tokens(&self) -> usize {
        self.cu_seqlens.last().copied().unwrap_or(0)
    }
}

/// The real tokens of a padded batch, one row after the other: (batch, sequence, ..) -> (1, tokens, ..).
/// Differentiable.
///
/// # Errors
/// When `x` does not begin with (batch, sequence), or is on another device than the padding.
pub fn pack_padded(x: &Tensor, padding: &Padding) -> Result<Tensor> {
    let expected = [padding.batch, padding.sequence];
    if x.dims().get(..2) != Some(&expected[..]) {
        return Err(shape_error(
            "pack_padded: the batch does not fit the padding",
            shapes_of(&[("x", x)]),
            &format!("({}, {}, ..)", padding.batch, padding.sequence),
            "the padding was made from a mask or lengths of another batch",
        ));
    }
    x.flatten(0, 1)?.contiguous()?.index_select(&padding.real, 0)?.unsqueeze(0)
}

/// The inverse of [`pack_padded`], with zeros for padding: (1, tokens, ..) -> (batch, sequence, ..). Differentiable.
///
/// # Errors
/// When `x` does not begin with (1, tokens), or is on another device than the padding.
pub fn unpack_padded(x: &Tensor, padding: &Padding) -> Result<Tensor> {
    let tokens = padding.tokens();
    if x.dims().get(..2) != Some(&[1, tokens][..]) {
        return Err(shape_error(
            "unpack_padded: the tokens do not fit the padding",
            shapes_of(&[("x", x)]),
            &format!("(1, {tokens}, ..)"),
            "`pack_padded` makes such a tensor",
        ));
    }
    let rest = &x.dims()[2..];
    let rows = padding.batch * padding.sequence;
    let zeros = Tensor::zeros([&[rows], rest].concat(), x.dtype(), x.device())?;
    let all = zeros.index_add(&padding.real, &x.squeeze(0)?.contiguous()?, 0)?;
    all.reshape([&[padding.batch, padding.sequence], rest].concat())
}
