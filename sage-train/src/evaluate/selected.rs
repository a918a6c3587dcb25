//! The block selections of SLA2 on validation text.

use candle_core::Device;
use candle_sage::Result;

use crate::data::{Batches, Mixture, SequenceSplit};
use crate::model::{Input, Llama, Selected};
use crate::on_device;

/// Statistics of the blocks that a model with SLA2 selects in the first sequence of `data`. Every validation uses this
/// sequence. The model selects blocks even while it still trains with dense attention. `None` for a model without SLA2.
///
/// # Errors
/// When the data cannot be read, or the device fails.
pub fn selected(
    model: &Llama,
    data: &Mixture,
    cut: SequenceSplit,
    device: &Device,
) -> Result<Option<Selected>> {
    let sequences = Batches::new(data, cut).in_order(0, 1)?;
    let measure = || {
        let batch = sequences.to_device(device)?;
        model.selected(Input { ids: &batch.ids, documents: batch.documents.as_ref() })
    };
    measure().map_err(on_device("the validation failed"))
}
