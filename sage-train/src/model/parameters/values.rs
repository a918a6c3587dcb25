//! The weights of a piece (parameters that are transferred together), in the form that the model reads.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use candle_core::{DType, Result, Tensor};
use candle_sage::fp8::Fp8Format;
use candle_sage::ops::{self, Fp8Copies, Fp8Matrix};

use super::Parameters;
use super::scales::largest_of;
use crate::model::pieces::overlap;
use crate::ranks::{Group, Ranks};

/// The FP8 format of weights.
const FORMAT: Fp8Format = Fp8Format::E4M3;

#[derive(Debug)]
pub(super) enum Values {
    /// In the compute type, or in f32.
    Stored(Tensor),
    /// In FP8.
    Fp8(Rc<Fp8Piece>),
}

impl Values {
    /// `whole`: the weights of the piece. `own`: the range of elements that this rank owns, and their f32 weights.
    /// `matrices`: the element range of each matrix, if the piece is in FP8.
    pub(super) fn new(
        whole: Vec<f32>,
        own: (Range<usize>, Tensor),
        dtype: DType,
        matrices: Option<Vec<Range<usize>>>,
        group: &Group,
    ) -> Result<Self> {
        let (len, device) = (whole.len(), own.1.device());
        if let Some(matrices) = matrices {
            return Ok(Self::Fp8(Rc::new(Fp8Piece::new((dtype, len), matrices, own, group)?)));
        }
        // If this rank owns the whole piece and the model computes in f32, model and optimizer share one tensor.
        let values = match own.0.len() == len && dtype == DType::F32 {
            true => own.1.clone(),
            false => Tensor::from_vec(whole, len, device)?.to_dtype(dtype)?,
        };
        Ok(Self::Stored(group.shared(values)?))
    }
}

/// A piece of matrices that are read in FP8 during training. The FP8 values are quantized from the optimizer's f32
/// weights. A copy of the piece in the compute type exists only while a [`WeightCopies`] exists.
#[derive(Debug)]
pub(super) struct Fp8Piece {
    /// The compute type.
    dtype: DType,
    len: usize,
    /// The element range of each matrix in the piece, ascending. Matrices that one matmul reads count as one.
    matrices: Vec<Range<usize>>,
    /// The range of the piece's weights that this rank owns, and these weights in f32.
    own: (Range<usize>, Tensor),
    /// The FP8 values (u8) of the whole piece, and the scale of each of its `matrices`. `None` if this rank owns the
    /// whole piece.
    gathered: Option<(Tensor, RefCell<Tensor>)>,
    /// The whole piece in the compute type, and the number of [`WeightCopies`] that need it.
    copies: RefCell<Option<(Tensor, usize)>>,
}

impl Fp8Piece {
    /// `own`: the range of the piece's weights that this rank owns, and these weights in f32.
    fn new(
        (dtype, len): (DType, usize),
        matrices: Vec<Range<usize>>,
        own: (Range<usize>, Tensor),
        group: &Group,
    ) -> Result<Self> {
        let device = own.1.device();
        let gathered = (group.rank().of > 1).then(|| -> Result<_> {
            let scales = Tensor::ones(matrices.len(), DType::F32, device)?;
            Ok((group.zeros(len, DType::U8, device)?, RefCell::new(scales)))
        });
        Ok(Self { dtype, len, matrices, own, gathered: gathered.transpose()?, copies: RefCell::default() })
    }

    pub(super) fn dtype(&self) -> DType {
        self.dtype
    }

    /// The matrix at `range` in FP8, stored both row by row and transposed.
    pub(super) fn quantized(&self, range: &Range<usize>, dims: (usize, usize)) -> Result<Fp8Matrix> {
        let Some(n) = self.matrices.iter().position(|matrix| matrix == range) else {
            candle_core::bail!("{range:?} is not a matrix of {:?}", self.matrices)
        };
        let view = |all: &Tensor| all.narrow(0, range.start, range.len())?.reshape(dims);
        match &self.gathered {
            None => Fp8Matrix::quantize(&view(&self.own.1)?, FORMAT, Fp8Copies::Both),
            Some((codes, scales)) => {
                Fp8Matrix::from_codes(&view(codes)?, &scales.borrow().narrow(0, n, 1)?, FORMAT)
            }
        }
    }

    /// The piece's weights at `range`, in the compute type.
    pub(super) fn copies(&self, range: &Range<usize>, dims: &[usize]) -> Result<Tensor> {
        match &*self.copies.borrow() {
            Some((all, _)) => all.narrow(0, range.start, range.len())?.reshape(dims),
            None => candle_core::bail!(
                "these weights exist only in FP8; hint: `Parameters::expand` copies them in the compute type"
            ),
        }
    }

    /// The tensor of FP8 values and the tensor of scales, which are the same on all ranks. Without tensors if this rank
    /// owns the whole piece.
    pub(super) fn tensors(&self) -> Vec<Tensor> {
        self.gathered.iter().flat_map(|(codes, scales)| [codes.clone(), scales.borrow().clone()]).collect()
    }

    /// This rank's part of each matrix, as a range of the rank's shard; empty if the rank owns no part.
    fn parts(&self) -> Vec<Range<usize>> {
        let own = &self.own.0;
        let part = |matrix: &Range<usize>| {
            overlap(matrix, own).map_or(0..0, |part| part.start - own.start..part.end - own.start)
        };
        self.matrices.iter().map(part).collect()
    }

    fn expand(&self, group: &Group) -> Result<()> {
        if let Some((_, needed)) = &mut *self.copies.borrow_mut() {
            *needed += 1;
            return Ok(());
        }
        let own = self.own.1.to_dtype(self.dtype)?;
        let all = match group.rank().of {
            1 => own,
            _ => {
                let all = Tensor::zeros(self.len, self.dtype, own.device())?;
                group.wait(group.gather(&own, &all)?)?;
                all
            }
        };
        self.copies.replace(Some((all, 1)));
        Ok(())
    }

    fn release(&self) {
        let mut copies = self.copies.borrow_mut();
        if let Some((_, needed)) = &mut *copies {
            *needed -= 1;
        }
        copies.take_if(|(_, needed)| *needed == 0);
    }

    /// Frees the copy in the compute type, because an update has changed the weights.
    pub(super) fn free_copies(&self) {
        self.copies.take();
    }
}

/// Quantizes the weights of `pieces` that this rank owns. Returns the argument of [`Parameters::gather`], which is
/// empty if the group has only one rank. A matrix's scale follows from its largest absolute value on all ranks, so the
/// FP8 values equal those that [`Fp8Matrix::quantize`] computes from the whole matrix. (In a matrix with a NaN, the NaN
/// stays, but other values may differ.)
pub(super) fn quantize_shards(
    pieces: &[(usize, &Fp8Piece)],
    group: &Group,
) -> Result<Vec<(usize, Tensor, Tensor)>> {
    if group.rank().of == 1 || pieces.is_empty() {
        return Ok(Vec::new());
    }
    let largest = pieces.iter().map(|(_, piece)| ops::fp8_largest(&piece.own.1, &piece.parts()));
    let largest = Tensor::cat(&largest.collect::<Result<Vec<_>>>()?, 0)?;
    let all_scales = ops::fp8_scales(&largest_of(&largest, group)?, FORMAT)?;
    let (mut first, mut quantized) = (0, Vec::with_capacity(pieces.len()));
    for (n, piece) in pieces {
        let Some((codes, scales)) = &piece.gathered else { candle_core::bail!("made for one rank") };
        scales.replace(all_scales.narrow(0, first, piece.matrices.len())?);
        first += piece.matrices.len();
        let (range, weights) = &piece.own;
        let own = codes.narrow(0, range.start, range.len())?;
        ops::fp8_quantize_parts(&own, weights, &piece.parts(), &scales.borrow(), FORMAT)?;
        quantized.push((*n, own, codes.clone()));
    }
    Ok(quantized)
}

/// Copies of the weights that training reads only in FP8. The copies have the compute type, and are read by forwards
/// outside of training.
#[derive(Debug)]
#[must_use = "the copies are freed with this value"]
pub struct WeightCopies<'a>(&'a Parameters);

impl Parameters {
    /// For forwards outside of training: makes copies, in the compute type, of the weights that training reads in FP8.
    /// All ranks must call this together.
    ///
    /// # Errors
    /// When memory is short, or a rank cannot be reached.
    pub fn expand(&self, ranks: &Ranks) -> Result<WeightCopies<'_>> {
        self.fp8_pieces().iter().try_for_each(|(_, piece)| piece.expand(ranks.shards()))?;
        Ok(WeightCopies(self))
    }

    /// The pieces in FP8, with their indices.
    pub(super) fn fp8_pieces(&self) -> Vec<(usize, &Fp8Piece)> {
        let pieces = self.held.iter().enumerate().filter_map(|(n, held)| match &held.values {
            Values::Stored(_) => None,
            Values::Fp8(piece) => Some((n, &**piece)),
        });
        pieces.collect()
    }
}

impl WeightCopies<'_> {
    /// Until the parameters are updated or dropped, keeps the copies that [`Parameters::expand`] made.
    pub fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for WeightCopies<'_> {
    fn drop(&mut self) {
        self.0.fp8_pieces().iter().for_each(|(_, piece)| piece.release());
    }
}
