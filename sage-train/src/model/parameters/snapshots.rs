//! Copies of weights and moments in host memory, and checksums that show whether all ranks have the same weights.

use candle_core::{DType, Device, Result, Tensor};
use candle_sage::ops;

use super::values::Values;
use super::{Held, Parameters};
use crate::model::pieces::Piece;
use crate::model::snapshot::Snapshot;
use crate::ranks::{Mesh, Ranks};

/// Number of elements that [`sums`] converts to f32 at a time.
const SLICE: usize = 1 << 23;

impl Parameters {
    /// Two sums for each tensor w of weights or FP8 scales: the sum of squares of w, and the sum of squares of w + 1,
    /// which also depends on the signs of w. If all ranks have the same weights, their sums are bit-identical. All
    /// ranks must call this together.
    ///
    /// # Errors
    /// When memory is short, or a rank cannot be reached.
    pub fn checksums(&self, ranks: &Ranks) -> Result<Vec<f64>> {
        self.arrivals.wait_for_all()?;
        let (mut all, mut own) = (self.initial.clone(), Vec::new());
        for held in &self.held {
            match &held.values {
                Values::Stored(values) => all.extend(sums(values)?),
                Values::Fp8(piece) => {
                    for tensor in piece.tensors() {
                        all.extend(sums(&tensor)?);
                    }
                    own.extend(sums(&held.state.get(0)?)?);
                }
            }
        }
        let shards = ranks.shards();
        if own.is_empty() || shards.rank().of == 1 {
            return Ok([all, own].concat());
        }
        let device = self.gradients()?.device();
        let of_shards = Tensor::zeros(own.len() * shards.rank().of, DType::F64, device)?;
        shards.wait(shards.gather(&Tensor::new(own, device)?, &of_shards)?)?;
        all.extend(of_shards.to_vec1::<f64>()?);
        Ok(all)
    }

    /// A copy of all weights in the host memory of rank 0. The copy does not change while training continues. Returns
    /// `None` on the other ranks. All ranks must call this together.
    ///
    /// # Errors
    /// When memory is short, or a rank cannot be reached.
    pub fn weights(&self, ranks: &Ranks) -> Result<Option<Snapshot>> {
        let shards = ranks.shards();
        let of_piece = |(piece, held): (&Piece, &Held)| -> Result<Option<Tensor>> {
            let own = held.state.get(0)?;
            if shards.rank().of == 1 {
                // Copying a view to the host would copy the whole storage behind the view, so the view is first copied
                // to a contiguous tensor.
                let own = || on_host(&own.force_contiguous()?.unsqueeze(0)?);
                return ranks.rank().is_first().then(own).transpose();
            }
            let all = Tensor::zeros(piece.range.len(), DType::F32, own.device())?;
            shards.wait(shards.gather(&own, &all)?)?;
            ranks.rank().is_first().then(|| on_host(&all.unsqueeze(0)?)).transpose()
        };
        // Every rank gathers every piece, because an all-gather needs all ranks; only rank 0 keeps the result.
        let pieces = self.layout.pieces.iter().zip(&self.held).map(of_piece).collect::<Result<Vec<_>>>()?;
        let pieces: Option<Vec<Tensor>> = pieces.into_iter().collect();
        let firsts = self.layout.pieces.iter().map(|piece| piece.range.start);
        pieces.map(|pieces| self.snapshot(firsts.zip(pieces).collect())).transpose()
    }

    /// A copy, on the host, of the weights and moments that this rank writes to a checkpoint. All nodes hold the same
    /// shards, so each node writes only a part of each shard.
    ///
    /// # Errors
    /// When memory is short.
    pub fn state(&self) -> Result<Snapshot> {
        let Mesh { shard, replica, .. } = self.mesh;
        let of_piece = |(piece, held): (&Piece, &Held)| -> Result<(usize, Tensor)> {
            let own = shard.part_of(piece.range.len());
            let part = replica.part_of(own.len());
            let state = match replica.of {
                1 => held.state.clone(),
                _ => held.state.narrow(1, part.start, part.len())?.force_contiguous()?,
            };
            Ok((piece.range.start + own.start + part.start, on_host(&state)?))
        };
        let held = self.layout.pieces.iter().zip(&self.held).map(of_piece).collect::<Result<_>>()?;
        let rows = if self.mesh.rank().is_first() { self.rows()? } else { Vec::new() };
        Ok(Snapshot { rows, ..self.snapshot(held)? })
    }

    fn snapshot(&self, held: Vec<(usize, Tensor)>) -> Result<Snapshot> {
        let (specs, layout) = (self.specs.clone(), self.layout.clone());
        let scales = self.scales.get().map_or_else(|| Ok(Vec::new()), |scales| scales.state())?;
        Ok(Snapshot { specs, layout, moments: self.moments, held, rows: Vec::new(), scales })
    }
}

/// The sums of squares of w and of w + 1.
fn sums(values: &Tensor) -> Result<[f64; 2]> {
    let len = values.elem_count();
    let mut sums = [0.0; 2];
    // Sums slice by slice, because memory may be too small for a second copy of all weights.
    for first in (0..len).step_by(SLICE) {
        let slice = values.narrow(0, first, SLICE.min(len - first))?.to_dtype(DType::F32)?;
        sums[0] += ops::sum_of_squares(&slice)?.to_scalar::<f64>()?;
        sums[1] += ops::sum_of_squares(&slice.affine(1.0, 1.0)?)?.to_scalar::<f64>()?;
    }
    Ok(sums)
}

/// A copy in host memory, even if the tensor is already in host memory.
pub(super) fn on_host(tensor: &Tensor) -> Result<Tensor> {
    if tensor.device().is_cpu() { tensor.force_contiguous() } else { tensor.to_device(&Device::Cpu) }
}
