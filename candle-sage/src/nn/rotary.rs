//! Rotary position embedding as a module.

use candle_core::{Device, Result, Tensor};

use super::RmsNorm;
use crate::error::Error;
use crate::ops::{self, RopeStyle};

/// Rotary position embedding with its tables: see [`ops::rope`].
#[derive(Debug, Clone)]
pub struct Rotary {
    cos: Tensor,
    sin: Tensor,
    style: RopeStyle,
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
        Ok(Self { cos, sin, style })
    }

    /// A module with given tables, (positions, head_dim / 2) each, such as those of
    /// [`ops::rope_tables_llama3`].
    ///
    /// # Errors
    /// When they are not two tables of the same shape.
    pub fn from_tables(cos: Tensor, sin: Tensor, style: RopeStyle) -> Result<Self> {
        if cos.rank() != 2 || cos.dims() != sin.dims() {
            return Err(Error::new("the rotary tables do not fit each other")
                .got(format!("cos {:?}, sin {:?}", cos.dims(), sin.dims()))
                .allowed("(positions, head_dim / 2) for both")
                .hint("ops::rope_tables and ops::rope_tables_llama3 make such a pair")
                .into());
        }
        Ok(Self { cos, sin, style })
    }

    /// Rotates `x`, (batch, sequence, heads, head_dim), whose first token is at `position`.
    ///
    /// # Errors
    /// When the sequence runs past the tables.
    pub fn forward(&self, x: &Tensor, position: usize) -> Result<Tensor> {
        let (cos, sin) = self.tables(x, position)?;
        ops::rope(x, &cos, &sin, self.style)
    }

    /// Normalizes each head of `x`, then rotates it, in one op: see [`ops::qk_norm_rope`].
    ///
    /// # Errors
    /// As [`Rotary::forward`], and when the norm's weight is not as wide as a head.
    pub fn forward_normalized(&self, x: &Tensor, norm: &RmsNorm, position: usize) -> Result<Tensor> {
        let (cos, sin) = self.tables(x, position)?;
        ops::qk_norm_rope(x, &norm.weight, &cos, &sin, norm.eps, self.style)
    }

    /// The rows of the tables for the sequence of `x`, whose first token is at `position`.
    fn tables(&self, x: &Tensor, position: usize) -> Result<(Tensor, Tensor)> {
        let len = x.dim(1)?;
        let positions = self.cos.dim(0)?;
        if position + len > positions {
            return Err(Error::new("the sequence runs past the rotary tables")
                .got(format!("positions {position} to {}", position + len - 1))
                .allowed(format!("below {positions}"))
                .hint("make the tables longer: the first argument of Rotary::new")
                .into());
        }
        Ok((self.cos.narrow(0, position, len)?, self.sin.narrow(0, position, len)?))
    }
}
