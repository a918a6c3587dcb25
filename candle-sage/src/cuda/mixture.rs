//! The mixture of the linear tail and exact attention (attention over selected keys) on the GPU.

use candle_core::{CudaStorage, Result};

use super::address::{address, address_at, first_index};
use super::candle::view;
use super::compiled::constants::blend::SUM_THREADS;
use super::compiled::kernel;
use super::kernels::Grid;
use super::params::launch;
use super::params::{self, Blend, Linear};
use super::tensor::Output;
use super::{blend, past_linear};
use crate::launch::{Launch, Operand};
use crate::ops::mixture::Mixture;

/// The mixture's output, from query, key, value, exact attention's output, and `theta`.
impl Launch<[Operand<'_>; 5], CudaStorage> for Mixture {
    fn launch(&self, [q, k, v, sparse, theta]: [Operand<'_>; 5]) -> Result<CudaStorage> {
        let call = past_linear::Call::new(&self.tail, [q, k, v])?;
        let weights = blend::Weights::new(&self.blend, theta)?;
        let (sparse, mixture) = (view(sparse, &call.gpu)?, weights.mixture(&call.gpu)?);
        call.forward(Linear { sparse, mixture, ..call.params()? })
    }
}

/// Returns the gradient of `sparse` (exact attention's output), and for each block of queries a partial sum of
/// `theta`'s gradient.
impl Launch<[Operand<'_>; 3], [CudaStorage; 2]> for Mixture {
    fn launch(&self, [sparse, theta, dout]: [Operand<'_>; 3]) -> Result<[CudaStorage; 2]> {
        let blend = &self.blend;
        let call = blend::Call::new(blend, sparse, theta)?;
        let gpu = &call.gpu;
        let dsparse = Output::for_candle(gpu, call.element, blend.selection.shape().query_dims())?;
        let parts = gpu.alloc::<f32>(blend.theta_parts())?;
        let mut params = Blend { dout: view(dout, gpu)?, out: dsparse.view(gpu), ..call.params()? };
        params.mixture.parts = address(&parts, gpu);
        call.launch(kernel!("blend_backward_exact"), &params)?;
        Ok([dsparse.storage(gpu), gpu.storage(parts)])
    }
}

/// Adds the tail's gradients to the gradients of query, key and value, and the tail's terms to the partial sums of
/// `theta`'s gradient. Returns the gradient of `theta`.
impl Launch<[Operand<'_>; 9], CudaStorage> for Mixture {
    fn launch(&self, [q, k, v, theta, dout, dq, dk, dv, parts]: [Operand<'_>; 9]) -> Result<CudaStorage> {
        let Self { tail, blend } = self;
        let call = past_linear::Call::new(tail, [q, k, v])?;
        let (gpu, weights) = (call.gpu.clone(), blend::Weights::new(blend, theta)?);
        let onto = [view(dq, &gpu)?, view(dk, &gpu)?, view(dv, &gpu)?];
        let parts = address_at(parts.0.as_cuda_slice::<f32>()?, first_index(parts.1), &gpu)?;
        let mixture = params::Mixture { parts, ..weights.mixture(&gpu)? };
        call.backward(Linear { add: 1, mixture, ..call.params()? }, dout, onto)?;
        // Frees the states of the linear tail: the last launch does not read them.
        drop(call);
        let heads = blend.selection.shape().query_heads();
        let dtheta = gpu.alloc::<f32>(heads)?;
        let sums = Blend { dtheta: address(&dtheta, &gpu), mixture, ..Blend::default() };
        launch(&gpu, kernel!("blend_sum_theta"), Grid::line(heads, SUM_THREADS), &sums)?;
        Ok(gpu.storage(dtheta))
    }
}
