//! The linear tail mixed with attention over selected keys, on the GPU: the tail's kernels mix as they write.

use candle_core::{CudaStorage, Result};

use super::kernels::Grid;
use super::params::launch;
use super::tensor::{address, output, view};
use super::{blend, past_linear};
use crate::launch::{Launch, Operand};
use crate::ops::mixture::{Gradients, Mixture};

/// The output of query, key, value, exact attention and `theta`.
impl Launch<[Operand<'_>; 5], CudaStorage> for Mixture {
    fn launch(&self, [q, k, v, sparse, theta]: [Operand<'_>; 5]) -> Result<CudaStorage> {
        let mut call = past_linear::Call::new(&self.tail, [q, k, v])?;
        call.params.sparse = view(sparse.0, sparse.1, &call.gpu)?;
        call.params.mixture = blend::mixture(&self.blend, theta, &call.gpu)?;
        call.forward()
    }
}

/// The gradient of exact attention's output, and a part of that of `theta` for each block of queries.
impl Launch<[Operand<'_>; 3], [CudaStorage; 2]> for Gradients<'_> {
    fn launch(&self, [sparse, theta, dout]: [Operand<'_>; 3]) -> Result<[CudaStorage; 2]> {
        let selection = &self.0.blend.selection;
        let mut call = blend::Call::new(&self.0.blend, sparse, theta)?;
        let (dsparse, dsparse_view) = output(&call.gpu, call.element, selection.shape().query_dims())?;
        let parts = call.gpu.alloc::<f32>(selection.shape().query_heads() * selection.blocks().rows())?;
        call.params.dout = view(dout.0, dout.1, &call.gpu)?;
        call.params.out = dsparse_view;
        call.params.mixture.parts = address(&parts, &call.gpu);
        call.launch("blend_backward_exact")?;
        Ok([dsparse, CudaStorage::wrap_cuda_slice(parts, call.gpu.device.clone())])
    }
}

/// Adds the tail's gradients to those of query, key and value, its part of `theta`'s to the parts, and returns their sum.
impl Launch<[Operand<'_>; 10], CudaStorage> for Gradients<'_> {
    fn launch(
        &self,
        [q, k, v, sparse, theta, dout, dq, dk, dv, parts]: [Operand<'_>; 10],
    ) -> Result<CudaStorage> {
        let Mixture { tail, blend } = self.0;
        let mut call = past_linear::Call::new(tail, [q, k, v])?;
        let gpu = call.gpu.clone();
        let at = |(storage, layout): Operand<'_>| view(storage, layout, &gpu);
        let onto = [at(dq)?, at(dk)?, at(dv)?];
        call.params.add = 1;
        let mut sums = blend::Call::new(blend, sparse, theta)?;
        sums.params.mixture.parts = address(parts.0.as_cuda_slice::<f32>()?, &gpu);
        call.params.mixture = sums.params.mixture;
        call.backward(dout, onto)?;
        let heads = blend.selection.shape().query_heads();
        let dtheta = gpu.alloc::<f32>(heads)?;
        sums.params.dtheta = address(&dtheta, &gpu);
        launch(&gpu, "blend_sum_theta", Grid::line(heads, 32), &sums.params)?;
        Ok(CudaStorage::wrap_cuda_slice(dtheta, gpu.device.clone()))
    }
}
