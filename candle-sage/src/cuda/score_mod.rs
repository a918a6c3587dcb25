//! A soft cap, `ALiBi` slopes and sinks, as kernels take them.

use candle_core::{CudaStorage, Layout, Result, Storage, StorageRef, Tensor};

use super::address::{Address, address};
use super::call::Call;
use super::compiled::constants::quantize::SINK_THREADS;
use super::compiled::kernel;
use super::kernels::{Gpu, Grid};
use super::plan::TILE;
use super::{ops, params};
use crate::error::Error;
use crate::ops::attention::ScoreMod;

/// A number for each query head, in f32, whose memory it lends; or none.
pub(super) struct OfHeads<'a>(Option<(StorageRef<'a>, &'a Layout)>);

impl<'a> OfHeads<'a> {
    pub(super) fn new(numbers: Option<&'a Tensor>) -> Self {
        Self(numbers.map(Tensor::storage_and_layout))
    }

    /// Null without numbers.
    pub(super) fn address(&self, gpu: &Gpu) -> Result<Address<'_>> {
        match &self.0 {
            None => Ok(Address::default()),
            Some((storage, layout)) => match &**storage {
                Storage::Cuda(storage) => ops::tensor::start((storage, *layout), gpu),
                _ => Err(Error::new("numbers of heads are on another device").into()),
            },
        }
    }
}

/// A soft cap and `ALiBi` slopes.
pub(super) struct Modifier<'a> {
    softcap: f32,
    slopes: OfHeads<'a>,
}

impl<'a> Modifier<'a> {
    pub(super) fn new(score_mod: Option<&'a ScoreMod>) -> Self {
        Self {
            softcap: score_mod.map_or(0.0, |score_mod| score_mod.softcap),
            slopes: OfHeads::new(score_mod.and_then(|score_mod| score_mod.alibi_slopes.as_ref())),
        }
    }

    /// In the form that kernels take.
    pub(super) fn params(&self, heads: usize, gpu: &Gpu) -> Result<params::ScoreMod<'_>> {
        let alibi_slopes = self.slopes.address(gpu)?;
        Ok(params::ScoreMod { alibi_slopes, softcap: self.softcap, heads: heads as i32 })
    }
}

/// The gradient of a call's sinks, if it has any, from what its backward reads.
pub(super) fn sink_gradient(call: &Call<'_>, params: &params::Backward<'_>) -> Result<Option<CudaStorage>> {
    let Some(sinks) = call.problem.sinks else { return Ok(None) };
    let (gpu, heads, sinks) = (&call.gpu, call.problem.shape.query_heads(), OfHeads::new(Some(sinks)));
    let gradient = gpu.alloc::<f32>(heads)?;
    let own = params::SinkGradient {
        sinks: sinks.address(gpu)?,
        minus_lse2: params.minus_lse2,
        minus_delta: params.minus_delta,
        gradient: address(&gradient, gpu),
        rows: (call.query_tiles() * TILE / heads) as i64,
    };
    params::launch(gpu, kernel!("sink_gradient_of_heads"), Grid::line(heads, SINK_THREADS), &own)?;
    Ok(Some(gpu.storage(gradient)))
}
