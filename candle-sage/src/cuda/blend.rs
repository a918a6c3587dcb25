//! The mixture of attention over selected keys and the linear tail, on the GPU.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result};

use super::call::Geometry;
use super::kernels::{Gpu, Grid};
use super::params::{Address, launch, sla2};
use super::plan;
use super::selection::lists;
use super::tensor::{Element, address, output, view};
use crate::launch::{Launch, Operand};
use crate::ops::Alpha;
use crate::ops::blend::{Blend, Gradients};

/// One call of the mixture's own kernels.
pub(super) struct Call {
    pub(super) gpu: Gpu,
    pub(super) element: Element,
    geometry: Geometry,
    pub(super) params: sla2::Blend,
}

/// What weights are made of: `theta`, and what each query sees.
pub(super) fn mixture(
    Blend { selection, alpha }: &Blend,
    theta: Operand<'_>,
    gpu: &Gpu,
) -> Result<sla2::Mixture> {
    let start = (theta.1.start_offset() * size_of::<f32>()) as Address;
    Ok(sla2::Mixture {
        theta: address(theta.0.as_cuda_slice::<f32>()?, gpu) + start,
        lists: lists(selection, gpu)?,
        by_count: (*alpha == Alpha::Count).into(),
        ..sla2::Mixture::default()
    })
}

impl Call {
    pub(super) fn new(blend: &Blend, sparse: Operand<'_>, theta: Operand<'_>) -> Result<Self> {
        let gpu = Gpu::new(sparse.0.device())?;
        let shape = blend.selection.shape();
        plan::padded_head_dim(shape)?;
        let geometry = Geometry::new(&gpu, shape)?;
        let params = sla2::Blend {
            sparse: view(sparse.0, sparse.1, &gpu)?,
            mixture: mixture(blend, theta, &gpu)?,
            shape: geometry.shape,
            ..sla2::Blend::default()
        };
        let element = Element::of(sparse.0.dtype())?;
        Ok(Self { gpu, element, geometry, params })
    }

    pub(super) fn launch(&self, what: &str) -> Result<()> {
        let (longest, _) = self.geometry.blocks();
        let heads = self.params.shape.query_heads as u32;
        let grid = Grid {
            blocks: (longest as u32, self.geometry.segment_count() as u32, heads),
            ..Grid::line(1, 256)
        };
        launch(&self.gpu, &format!("{what}_{}", self.element.name()), grid, &self.params)
    }
}

/// The output, contiguous.
impl Launch<[Operand<'_>; 3], CudaStorage> for Blend {
    fn launch(&self, [sparse, tail, theta]: [Operand<'_>; 3]) -> Result<CudaStorage> {
        let mut call = Call::new(self, sparse, theta)?;
        let (out, out_view) = output(&call.gpu, call.element, self.selection.shape().query_dims())?;
        call.params.tail = view(tail.0, tail.1, &call.gpu)?;
        call.params.out = out_view;
        call.launch("blend_forward")?;
        Ok(out)
    }
}

/// The gradients of `sparse`, `tail` and `theta`.
impl Launch<[Operand<'_>; 4], [CudaStorage; 3]> for Gradients<'_> {
    fn launch(&self, [sparse, tail, theta, dout]: [Operand<'_>; 4]) -> Result<[CudaStorage; 3]> {
        let selection = &self.0.selection;
        let mut call = Call::new(self.0, sparse, theta)?;
        let (dsparse, dsparse_view) = output(&call.gpu, call.element, selection.shape().query_dims())?;
        let (dtail, dtail_view) = output(&call.gpu, call.element, selection.shape().query_dims())?;
        let heads = selection.shape().query_heads();
        let parts = call.gpu.alloc::<f32>(heads * selection.blocks().rows())?;
        let dtheta = call.gpu.alloc::<f32>(heads)?;
        call.params.tail = view(tail.0, tail.1, &call.gpu)?;
        call.params.dout = view(dout.0, dout.1, &call.gpu)?;
        (call.params.out, call.params.dtail) = (dsparse_view, dtail_view);
        call.params.mixture.parts = address(&parts, &call.gpu);
        call.params.dtheta = address(&dtheta, &call.gpu);
        call.launch("blend_backward")?;
        launch(&call.gpu, "blend_sum_theta", Grid::line(heads, 32), &call.params)?;
        Ok([dsparse, dtail, CudaStorage::wrap_cuda_slice(dtheta, call.gpu.device.clone())])
    }
}
