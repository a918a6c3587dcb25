//! Mixes the output of sparse attention with the output of the linear tail, on the GPU.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result};

use super::address::{address, address_at, first_index};
use super::attention::SelectionLists;
use super::call::Geometry;
use super::candle::view;
use super::compiled::constants::blend::{SUM_THREADS, THREADS};
use super::compiled::kernel;
use super::kernels::{Gpu, Grid};
use super::params::{self, launch};
use super::plan;
use super::tensor::{Element, Output};
use crate::launch::{Launch, Operand};
use crate::ops::Alpha;
use crate::ops::blend::{Blend, Gradients};

/// One call of the kernels that only mix the sparse output and the tail. (The tail's kernels can also do this mixing:
/// `mixture.rs`.)
pub(super) struct Call<'a> {
    pub(super) gpu: Gpu,
    pub(super) element: Element,
    geometry: Geometry,
    sparse: Operand<'a>,
    weights: Weights<'a>,
}

/// `theta` and the selected keys, which determine the weights `a` in `a * sparse + (1 - a) * tail` (see [`Alpha`]).
pub(super) struct Weights<'a> {
    theta: Operand<'a>,
    seen: SelectionLists<'a>,
    alpha: Alpha,
}

impl<'a> Weights<'a> {
    pub(super) fn new(blend: &'a Blend, theta: Operand<'a>) -> Result<Self> {
        Ok(Self { theta, seen: SelectionLists::new(&blend.selection)?, alpha: blend.alpha })
    }

    pub(super) fn mixture(&self, gpu: &Gpu) -> Result<params::Mixture<'_>> {
        let (storage, layout) = self.theta;
        Ok(params::Mixture {
            theta: address_at(storage.as_cuda_slice::<f32>()?, first_index(layout), gpu)?,
            lists: self.seen.lists(gpu)?,
            by_count: (self.alpha == Alpha::Count).into(),
            ..params::Mixture::default()
        })
    }
}

impl<'a> Call<'a> {
    pub(super) fn new(blend: &'a Blend, sparse: Operand<'a>, theta: Operand<'a>) -> Result<Self> {
        let gpu = Gpu::new(sparse.0.device())?;
        let shape = blend.selection.shape();
        plan::small_head_dim(shape)?;
        let geometry = Geometry::new(&gpu, shape)?;
        let element = Element::of(sparse.0.dtype())?;
        Ok(Self { gpu, element, geometry, sparse, weights: Weights::new(blend, theta)? })
    }

    /// The parameters that all kernels need.
    pub(super) fn params(&self) -> Result<params::Blend<'_>> {
        Ok(params::Blend {
            sparse: view(self.sparse, &self.gpu)?,
            mixture: self.weights.mixture(&self.gpu)?,
            shape: self.geometry.shape(&self.gpu),
            ..params::Blend::default()
        })
    }

    pub(super) fn launch(&self, what: &str, params: &params::Blend<'_>) -> Result<()> {
        let (longest, _) = self.geometry.blocks();
        let heads = self.geometry.sizes.query_heads as u32;
        let grid = Grid {
            blocks: (longest as u32, self.geometry.segment_count() as u32, heads),
            ..Grid::line(1, THREADS)
        };
        launch(&self.gpu, &format!("{what}_{}", self.element.name()), grid, params)
    }
}

/// The output, contiguous.
impl Launch<[Operand<'_>; 3], CudaStorage> for Blend {
    fn launch(&self, [sparse, tail, theta]: [Operand<'_>; 3]) -> Result<CudaStorage> {
        let call = Call::new(self, sparse, theta)?;
        let out = Output::for_candle(&call.gpu, call.element, self.selection.shape().query_dims())?;
        let (tail, to) = (view(tail, &call.gpu)?, out.view(&call.gpu));
        call.launch(kernel!("blend_forward"), &params::Blend { tail, out: to, ..call.params()? })?;
        Ok(out.storage(&call.gpu))
    }
}

/// The gradients of `sparse`, `tail` and `theta`.
impl Launch<[Operand<'_>; 4], [CudaStorage; 3]> for Gradients<'_> {
    fn launch(&self, [sparse, tail, theta, dout]: [Operand<'_>; 4]) -> Result<[CudaStorage; 3]> {
        let selection = &self.0.selection;
        let call = Call::new(self.0, sparse, theta)?;
        let gpu = &call.gpu;
        let dsparse = Output::for_candle(gpu, call.element, selection.shape().query_dims())?;
        let dtail = Output::for_candle(gpu, call.element, selection.shape().query_dims())?;
        let heads = selection.shape().query_heads();
        let parts = gpu.alloc::<f32>(self.0.theta_parts())?;
        let dtheta = gpu.alloc::<f32>(heads)?;
        let mut params = params::Blend {
            tail: view(tail, gpu)?,
            dout: view(dout, gpu)?,
            out: dsparse.view(gpu),
            dtail: dtail.view(gpu),
            dtheta: address(&dtheta, gpu),
            ..call.params()?
        };
        params.mixture.parts = address(&parts, gpu);
        call.launch(kernel!("blend_backward"), &params)?;
        launch(gpu, kernel!("blend_sum_theta"), Grid::line(heads, SUM_THREADS), &params)?;
        Ok([dsparse.storage(gpu), dtail.storage(gpu), gpu.storage(dtheta)])
    }
}
