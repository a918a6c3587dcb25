//! Rotary position embedding as a module.

use candle_core::{DType, Device, Result, Tensor};

use super::RmsNorm;
use crate::error::Error;
use crate::ops::{self, RopeStyle, dims4, shapes_of, swap_heads};

/// Rotary position embedding with its tables: see [`ops::rope`].
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_sage::{nn::Rotary, ops::RopeStyle};
///
/// let rotary = Rotary::new(16, 8, 10_000.0, RopeStyle::Halves, &Device::Cpu)?;
/// let x = Tensor::randn(0f32, 1., (1, 4, 2, 8), &Device::Cpu)?;
/// // Tokens at positions 2 and 3 are rotated in the same way with and without the tokens before them.
/// let whole = rotary.forward(&x, 0)?.narrow(1, 2, 2)?;
/// let part = rotary.forward(&x.narrow(1, 2, 2)?, 2)?;
/// assert_eq!(part.flatten_all()?.to_vec1::<f32>()?, whole.flatten_all()?.to_vec1::<f32>()?);
/// assert!(rotary.forward(&x, 13).is_err());
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Rotary {
    cos: Tensor,
    sin: Tensor,
    style: RopeStyle,
    /// Batch size and sequence length, for a module that [`Rotary::at`] made. The tables of such a module have one row
    /// for each token.
    tokens: Option<(usize, usize)>,
}

impl Rotary {
    /// A module with tables for the positions `0..max_len`.
    ///
    /// # Errors
    /// See [`ops::rope_tables`].
    pub fn new(
        max_len: usize,
        head_dim: usize,
        base: f64,
        style: RopeStyle,
        device: &Device,
    ) -> Result<Self> {
        let (cos, sin) = ops::rope_tables(max_len, head_dim, base, device)?;
        Ok(Self { cos, sin, style, tokens: None })
    }

    /// A module with given tables, (positions, head_dim / 2) each, such as the tables of [`ops::rope_tables_llama3`].
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_sage::{nn::Rotary, ops::RopeStyle};
    ///
    /// // A table of zero angles rotates nothing.
    /// let (cos, sin) = (Tensor::full(1f32, (3, 4), &Device::Cpu)?, Tensor::full(0f32, (3, 4), &Device::Cpu)?);
    /// let rotary = Rotary::from_tables(cos.clone(), sin, RopeStyle::Halves)?;
    /// let x = Tensor::randn(0f32, 1., (1, 3, 1, 8), &Device::Cpu)?;
    /// assert_eq!((rotary.forward(&x, 0)? - &x)?.abs()?.max_all()?.to_scalar::<f32>()?, 0.0);
    /// assert!(Rotary::from_tables(cos.clone(), cos.narrow(0, 0, 2)?, RopeStyle::Halves).is_err());
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the tables differ in shape, or are not matrices.
    pub fn from_tables(cos: Tensor, sin: Tensor, style: RopeStyle) -> Result<Self> {
        if cos.rank() != 2 || cos.dims() != sin.dims() {
            return Err(Error::shape("the rotary tables are not two matrices of one shape")
                .got(format!("cos {:?}, sin {:?}", cos.dims(), sin.dims()))
                .allowed("(positions, head_dim / 2) for both")
                .hint("ops::rope_tables and ops::rope_tables_llama3 return such a pair")
                .into());
        }
        Ok(Self { cos, sin, style, tokens: None })
    }

    /// A module for tokens at given positions, (batch, sequence) in u32 or i64. Use this module if a batch is padded on
    /// the left, or if its sequences start at different positions. The module rotates tensors of this batch size and
    /// sequence length, and ignores the argument `position` of its methods, so decoding needs a new module for each
    /// step. If `positions` is on a GPU, this function waits for the GPU.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_sage::{nn::Rotary, ops::RopeStyle};
    ///
    /// let rotary = Rotary::new(16, 8, 10_000.0, RopeStyle::Halves, &Device::Cpu)?;
    /// let x = Tensor::randn(0f32, 1., (2, 3, 1, 8), &Device::Cpu)?;
    /// // The second sequence begins after two tokens of padding.
    /// let positions = Tensor::new(&[[0u32, 1, 2], [0, 0, 0]], &Device::Cpu)?;
    /// let out = rotary.at(&positions)?.forward(&x, 0)?;
    /// let alone = rotary.forward(&x.narrow(0, 1, 1)?.narrow(1, 2, 1)?, 0)?;
    /// let last = out.narrow(0, 1, 1)?.narrow(1, 2, 1)?;
    /// assert_eq!((last - alone)?.abs()?.max_all()?.to_scalar::<f32>()?, 0.0);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// When a position is not in the tables, `positions` has the wrong shape or type, or `self` was made by `at`.
    pub fn at(&self, positions: &Tensor) -> Result<Self> {
        let rows = self.cos.dim(0)?;
        let is_matrix = positions.rank() == 2
            && positions.elem_count() > 0
            && matches!(positions.dtype(), DType::U32 | DType::I64);
        if self.tokens.is_some() {
            return Err(Error::shape("this rotary module was itself made by `at`")
                .got("a module with the tables of one batch's positions")
                .allowed("a module with the tables of all positions")
                .hint("call `at` on the module that `Rotary::new` returned")
                .into());
        }
        if !is_matrix {
            return Err(Error::shape("the rotary positions have the wrong shape or type")
                .got(shapes_of(&[("positions", positions)]))
                .allowed("(batch, sequence) in u32 or i64, with at least one position")
                .hint("`unsqueeze(0)` makes a batch of one; `to_dtype(DType::U32)` converts")
                .into());
        }
        let tokens = positions.dims2()?;
        let flat = positions.flatten_all()?.to_dtype(DType::I64)?;
        let bounds = (flat.min_all()?.to_scalar::<i64>()?, flat.max_all()?.to_scalar::<i64>()?);
        if bounds.0 < 0 || bounds.1 as usize >= rows {
            let negative = "give padding any valid position, such as 0";
            return Err(Error::shape("a position is not in the rotary tables")
                .got(format!("positions {} to {}", bounds.0, bounds.1))
                .allowed(format!("at least 0 and below {rows}"))
                .hint(if bounds.0 < 0 {
                    negative
                } else {
                    "make the tables longer: the first argument of Rotary::new"
                })
                .into());
        }
        let flat = flat.to_device(self.cos.device())?;
        let of = |table: &Tensor| table.contiguous()?.index_select(&flat, 0);
        Ok(Self { cos: of(&self.cos)?, sin: of(&self.sin)?, tokens: Some(tokens), ..*self })
    }

    /// Rotates `x`, (batch, sequence, heads, head_dim), whose first token is at `position`. For tensors (batch, heads,
    /// sequence, head_dim), the order of PyTorch and candle-transformers, use [`Rotary::forward_heads_first`]:
    /// `forward` would mistake their heads for tokens.
    ///
    /// # Errors
    /// When the sequence runs past the tables.
    pub fn forward(&self, x: &Tensor, position: usize) -> Result<Tensor> {
        self.turn(x, position, "forward_heads_first", |x, cos, sin| ops::rope(x, cos, sin, self.style))
    }

    /// [`Rotary::forward`] for tensors that are (batch, heads, sequence, head_dim), as in PyTorch and
    /// candle-transformers. The output has the same order. The input is not copied, except by a module that
    /// [`Rotary::at`] made. [`Attention::apply_heads_first`](crate::Attention::apply_heads_first) accepts the output.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_sage::{nn::Rotary, ops::RopeStyle};
    ///
    /// let rotary = Rotary::new(16, 8, 10_000.0, RopeStyle::Halves, &Device::Cpu)?;
    /// let x = Tensor::randn(0f32, 1., (1, 2, 4, 8), &Device::Cpu)?;
    /// let heads_first = rotary.forward_heads_first(&x, 3)?;
    /// let sequence_first = rotary.forward(&x.transpose(1, 2)?, 3)?.transpose(1, 2)?;
    /// assert_eq!(heads_first.dims(), x.dims());
    /// assert_eq!((heads_first - sequence_first)?.abs()?.max_all()?.to_scalar::<f32>()?, 0.0);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Rotary::forward`].
    pub fn forward_heads_first(&self, x: &Tensor, position: usize) -> Result<Tensor> {
        let x = swap_heads("the input of the rotary embedding", x)?;
        self.turn(&x, position, "forward", |x, cos, sin| ops::rope(x, cos, sin, self.style))?.transpose(1, 2)
    }

    /// Normalizes each head of `x`, then rotates it, in one op: see [`ops::qk_norm_rope`].
    ///
    /// ```
    /// use candle_core::{DType, Device, Module, Tensor};
    /// use candle_sage::nn::{RmsNorm, Rotary};
    /// use candle_sage::ops::RopeStyle;
    ///
    /// let norm = RmsNorm::new(Tensor::ones(8, DType::F32, &Device::Cpu)?, 1e-6);
    /// let rotary = Rotary::new(16, 8, 10_000.0, RopeStyle::Halves, &Device::Cpu)?;
    /// let x = Tensor::randn(0f32, 1., (1, 4, 2, 8), &Device::Cpu)?;
    /// let fused = rotary.forward_normalized(&x, &norm, 0)?;
    /// let steps = rotary.forward(&norm.forward(&x)?, 0)?;
    /// assert!((fused - steps)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-5);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Rotary::forward`], and when the norm's weight is not as wide as a head.
    pub fn forward_normalized(&self, x: &Tensor, norm: &RmsNorm, position: usize) -> Result<Tensor> {
        self.turn(x, position, "forward_normalized_heads_first", |x, cos, sin| {
            ops::qk_norm_rope(x, &norm.weight, cos, sin, norm.eps, self.style)
        })
    }

    /// [`Rotary::forward_normalized`] for input and output tensors (batch, heads, sequence, head_dim).
    ///
    /// # Errors
    /// As [`Rotary::forward_normalized`].
    pub fn forward_normalized_heads_first(
        &self,
        x: &Tensor,
        norm: &RmsNorm,
        position: usize,
    ) -> Result<Tensor> {
        let x = swap_heads("the input of the rotary embedding", x)?;
        let turned = self.turn(&x, position, "forward_normalized", |x, cos, sin| {
            ops::qk_norm_rope(x, &norm.weight, cos, sin, norm.eps, self.style)
        });
        turned?.transpose(1, 2)
    }

    /// Calls `rotate` with `x`, (batch, sequence, heads, head_dim), and the rows of `cos` and `sin` for its tokens.
    fn turn(
        &self,
        x: &Tensor,
        position: usize,
        other: &str,
        rotate: impl FnOnce(&Tensor, &Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let Some(tokens) = self.tokens else {
            let (cos, sin) = self.tables(x, position, other)?;
            return rotate(x, &cos, &sin);
        };
        let (batch, len, heads, head_dim) = dims4("the input of the rotary embedding", x)?;
        if (batch, len) != tokens {
            return Err(Error::shape("the input does not match the positions of `Rotary::at`")
                .got(format!("batch {batch}, sequence {len}"))
                .allowed(format!("batch {}, sequence {}", tokens.0, tokens.1))
                .hint("call `Rotary::at` with the positions of this batch")
                .into());
        }
        // The op receives the batch as one long sequence, with a row of the tables for each token.
        rotate(&x.reshape((1, batch * len, heads, head_dim))?, &self.cos, &self.sin)?.reshape(x.shape())
    }

    /// The rows of `cos` and `sin` for the tokens of `x`, (batch, sequence, heads, head_dim). The first token is at
    /// `position`. If `x` is too long, but would fit with sequence and heads swapped, the error suggests `other`: the
    /// method for swapped inputs.
    fn tables(&self, x: &Tensor, position: usize, other: &str) -> Result<(Tensor, Tensor)> {
        let (_, len, heads, _) = dims4("the input of the rotary embedding", x)?;
        let positions = self.cos.dim(0)?;
        let past = |len: usize| position.checked_add(len).is_none_or(|end| end > positions);
        if past(len) {
            let longer = "make the tables longer: the first argument of Rotary::new";
            let hint = match (past(heads), other.ends_with("heads_first")) {
                (true, _) => longer.to_string(),
                (false, true) => {
                    format!(
                        "if the tensor is (batch, heads, sequence, head_dim), call `Rotary::{other}`; else {longer}"
                    )
                }
                (false, false) => {
                    format!(
                        "if the tensor is (batch, sequence, heads, head_dim), call `Rotary::{other}`; else {longer}"
                    )
                }
            };
            return Err(Error::shape("the sequence runs past the rotary tables")
                .got(format!("positions {position} to {}", position.saturating_add(len).saturating_sub(1)))
                .allowed(format!("below {positions}"))
                .hint(hint)
                .into());
        }
        Ok((self.cos.narrow(0, position, len)?, self.sin.narrow(0, position, len)?))
    }
}
