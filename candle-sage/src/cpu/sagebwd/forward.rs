//! The forward of SageBwd on the CPU: an online softmax that quantizes probabilities to INT8, and INT8 matmuls with V.
//! If only S runs in INT8, the softmax and the matmuls with V are not quantized.

use std::ops::Range;

use multiversion::multiversion;

use super::{HeadCodes, Keys, Products, Settings, Values};
use crate::cpu::lanes;
use crate::cpu::numerics::{Finished, ForwardNumerics, Head, Problem, Softmax, cut, per_head};
use crate::cpu::product::{Mat, product};
use crate::cpu::quantize::{TileCodes, subtract_mean, token_mean};
use crate::cpu::tile::Tile;
use crate::cpu::unquantized;

/// V in the forward.
pub(super) enum ForwardValues {
    /// V in INT8, one entry per segment (batch entry or packed document) and key head.
    Codes(Vec<HeadCodes>),
    /// Unquantized V.
    Rows,
}

impl ForwardValues {
    pub(super) fn new(settings: &Settings, problem: &Problem<'_>) -> Self {
        if !settings.products.o {
            return Self::Rows;
        }
        Self::Codes(per_head(problem, problem.shape.key_heads(), |at| {
            let d = problem.head_dim();
            let mut rows = problem.v_rows(at, 0..problem.segments[at.segment].key.len());
            let mut mean = Vec::new();
            if settings.smoothing.of_values() {
                mean = token_mean(&rows, d, settings);
                subtract_mean(&mut rows, &mean);
            }
            HeadCodes { codes: TileCodes::new(&rows, d, settings.tile_k), mean }
        }))
    }
}

impl Values for ForwardValues {
    fn rows(&self, problem: &Problem<'_>, at: Head, index: usize, tokens: Range<usize>) -> Vec<f32> {
        match self {
            Self::Codes(heads) => heads[index].codes.rows_f32(tokens, problem.head_dim()),
            Self::Rows => problem.v_rows(at, tokens),
        }
    }
}

impl ForwardNumerics for Products<'_, ForwardValues> {
    type RowState = Softmax;
    const OUTPUTS: usize = 1;
    const STATES: usize = 1;

    fn rows(&self, count: usize) -> Softmax {
        Softmax::new(count, self.d())
    }

    fn attend(&self, keys: &Keys, tile: Tile, logits: &mut [f32], rows: &mut Softmax) {
        let d = self.d();
        let v = Mat::new(cut(&keys.v, keys.start, tile.col, tile.cols, d), tile.cols, d);
        let ForwardValues::Codes(heads) = &self.values else {
            unquantized::online_softmax(tile.cols, logits, rows);
            return product(&mut rows.acc[0], Mat::new(logits, tile.rows, tile.cols), v, 1.0, true);
        };
        let v_dequant = heads[keys.index].codes.dequant_scale[tile.col / self.settings.tile_k];
        let mut steps = vec![Step::default(); tile.rows];
        online_softmax(tile.cols, logits, rows, &mut steps);
        let mut pv = vec![0.0; tile.rows * d];
        product(&mut pv, Mat::new(logits, tile.rows, tile.cols), v, 1.0, false);
        accumulate_steps(&mut rows.acc[0], &pv, &steps, v_dequant);
    }

    fn finish(&self, at: Head, rows: Softmax, sees: &dyn Fn(usize) -> bool) -> Finished {
        let mut finished = rows.finish(self.problem.sink(at), sees);
        if let ForwardValues::Codes(heads) = &self.values {
            finished.add_value_mean(&heads[self.key_index(at)].mean, sees);
        }
        finished
    }
}

/// Result of one step of the online softmax for a row.
#[derive(Debug, Clone, Copy, Default)]
struct Step {
    /// Factor that rescales the accumulator.
    decay: f32,
    /// Dequantization scale of the row's probabilities.
    p_dequant: f32,
}

/// Turns a tile of logits into INT8 probabilities, with one scale per row.
///
/// The INT8 value of logit t is `round(127 * 2^(t - row_max))`, where `row_max` is the row's maximum inside the tile.
/// The dequantization scale is `2^(row_max - max) / 127`, where `max` is the row's maximum in all tiles so far.
#[multiversion(targets = "simd")]
fn online_softmax(cols: usize, logits: &mut [f32], softmax: &mut Softmax, steps: &mut [Step]) {
    let state = softmax.reference.iter_mut().zip(&mut softmax.sum).zip(steps);
    for (row, ((max, sum), step)) in logits.chunks_exact_mut(cols).zip(state) {
        let row_max = lanes::max(row);
        let new_max = if row_max > *max { row_max } else { *max };
        // As long as all logits of the row are -inf, any finite shift gives 2^-inf = 0.
        let shift = if new_max == f32::NEG_INFINITY { 0.0 } else { new_max };
        let row_shift = if row_max == f32::NEG_INFINITY { 0.0 } else { row_max } - lanes::LOG2_127;
        for x in row.iter_mut() {
            *x = lanes::exp2(*x - row_shift);
        }
        step.p_dequant = lanes::exp2(row_max - shift - lanes::LOG2_127);
        step.decay = lanes::exp2(*max - shift);
        // The sum is over unquantized probabilities.
        *sum = step.decay * *sum + step.p_dequant * lanes::sum(row);
        *max = new_max;
        for x in row.iter_mut() {
            *x = x.round_ties_even();
        }
    }
}

/// `acc = decay * acc + pv * (p_dequant * v_dequant)`, row by row.
#[multiversion(targets = "simd")]
fn accumulate_steps(acc: &mut [f32], pv: &[f32], steps: &[Step], v_dequant: f32) {
    let d = acc.len() / steps.len();
    for ((acc, pv), step) in acc.chunks_exact_mut(d).zip(pv.chunks_exact(d)).zip(steps) {
        let dequant = step.p_dequant * v_dequant;
        for (acc, pv) in acc.iter_mut().zip(pv) {
            *acc = step.decay * *acc + dequant * pv;
        }
    }
}
