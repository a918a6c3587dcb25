//! Validation loss by the position of the predicted token in its sequence, which shows how much a model profits from
//! distant tokens.

use std::ops::Range;

use candle_core::Device;
use candle_sage::Result;

use super::Extent;
use crate::data::{Batches, Mixture, SequenceSplit};
use crate::model::{Input, Llama};
use crate::on_device;

/// Number of ranges that a sequence is divided into, if it has enough tokens.
const PARTS: usize = 8;

/// The loss in a range of positions of the sequences.
#[derive(Debug, Clone, PartialEq)]
pub struct PositionLoss {
    /// Positions of the inputs, from 0.
    pub positions: Range<usize>,
    /// Mean loss of the predictions at `positions`, nats per token.
    pub loss: f64,
}

/// Divides the positions into up to eight ranges of about equal length, and returns each range's mean loss. The mean of
/// these losses, weighted by length, equals [`super::evaluate`] over the same tokens. `seen` receives the number
/// of processed tokens and of all tokens.
///
/// # Errors
/// When the data cannot be read, or the device fails.
pub fn by_position(
    model: &Llama,
    data: &Mixture,
    cut: SequenceSplit,
    extent: Extent,
    device: &Device,
    seen: &mut dyn FnMut(u64, u64),
) -> Result<Vec<PositionLoss>> {
    let batches = Batches::new(data, cut);
    let wanted = extent.sequences(&batches, cut);
    let parts = PARTS.min(cut.context);
    let bounds: Vec<usize> = (0..=parts).map(|n| n * cut.context / parts).collect();
    let mut sums = vec![0.0; parts];
    for (first, count) in extent.batches(wanted) {
        let sequences = batches.in_order(first, count as usize)?;
        let mut losses = || -> candle_core::Result<()> {
            let batch = sequences.to_device(device)?;
            let input = Input { ids: &batch.ids, documents: batch.documents.as_ref() };
            let (rows, context) = batch.targets.dims2()?;
            let hidden = model.hidden(input)?.reshape((rows, context, ()))?;
            for (sum, bounds) in sums.iter_mut().zip(bounds.windows(2)) {
                let (start, len) = (bounds[0], bounds[1] - bounds[0]);
                let hidden = hidden.narrow(1, start, len)?.flatten(0, 1)?.contiguous()?;
                let targets = batch.targets.narrow(1, start, len)?.flatten_all()?.contiguous()?;
                let loss = model.loss_of(&hidden, &targets)?;
                *sum += f64::from(loss.to_scalar::<f32>()?) * count as f64;
            }
            Ok(())
        };
        losses().map_err(on_device("the validation failed"))?;
        seen((first + count) * cut.context as u64, wanted * cut.context as u64);
    }
    let of = |(sum, bounds): (f64, &[usize])| PositionLoss {
        positions: bounds[0]..bounds[1],
        loss: sum / wanted as f64,
    };
    Ok(sums.into_iter().zip(bounds.windows(2)).map(of).collect())
}
