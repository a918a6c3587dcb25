//! AdamW, and the sum of a tensor's squares, on the GPU.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result};

use crate::cuda::address::{Address, PAD, address, check_vectors, first_index};
use crate::cuda::compiled::constants::adamw::{THREADS, V};
use crate::cuda::compiled::kernel;
use crate::cuda::floats::{Dense, Float, PARTS, element, elementwise_of, start};
use crate::cuda::kernels::{Gpu, Grid};
use crate::cuda::params::{self, launch};
use crate::launch::{Launch, Operand};
use crate::ops::adamw::SumOfSquares;
use crate::update::AdamW;

/// The sum of squares, an f64 scalar.
impl Launch<[Operand<'_>; 1], CudaStorage> for SumOfSquares {
    fn launch(&self, [x]: [Operand<'_>; 1]) -> Result<CudaStorage> {
        let gpu = Gpu::new(x.0.device())?;
        let len = x.1.shape().elem_count();
        let x = Dense::new(x, &gpu)?;
        x.operand().0.as_cuda_slice::<f32>()?;
        let (partials, out) = (gpu.alloc::<f64>(PARTS)?, gpu.alloc::<f64>(1)?);
        let parts = len.div_ceil(THREADS * V).clamp(1, PARTS);
        let at = x.start(&gpu)?;
        let params = params::SumOfSquares {
            x: at,
            partials: address(&partials, &gpu),
            out: address(&out, &gpu),
            len: len as i64,
            parts: parts as i32,
            vector: at.is_multiple_of(16).into(),
        };
        launch(&gpu, kernel!("sum_of_squares"), Grid::line(parts, THREADS), &params)?;
        launch(&gpu, kernel!("sum_of_squares_end"), Grid::line(1, THREADS), &params)?;
        Ok(gpu.storage(out))
    }
}

/// The state, the gradient and its sum of squares, and the 16-bit copy of the weights.
type Tensors<'a> = ([Operand<'a>; 3], Option<Operand<'a>>);

/// Updates the 16-bit copy of the weights, and the state, whose rows are the weights and two moments.
impl Launch<Tensors<'_>, ()> for AdamW {
    fn launch(&self, ([state, gradient, sum_of_squares], copy): Tensors<'_>) -> Result<()> {
        let gpu = Gpu::new(state.0.device())?;
        let (_, len) = state.1.shape().dims2()?;
        let row = |n| element(state.0, first_index(state.1) + n * len, &gpu);
        let (weights, mean, square) = (row(0)?, row(1)?, row(2)?);
        let (gradient, sum) = (start(gradient, &gpu)?, start(sum_of_squares, &gpu)?);
        let (copy, copy_type) = match copy {
            None => (Address::NULL, Float::F32),
            Some(copy) => (start(copy, &gpu)?, Float::of("adamw", copy.0)?),
        };
        check_vectors("adamw", &[weights, gradient, copy], len, V, PAD)?;
        // `AdamW::factors` uses the other settings.
        let Self { beta1, beta2, eps, decayed, gradient_factor, clip, lr: _, weight_decay: _, step: _ } =
            *self;
        let factors = self.factors();
        let params = params::AdamW {
            weights,
            mean,
            square,
            gradient,
            sum_of_squares: sum,
            copy,
            len: len as i64,
            decayed: decayed as i64,
            factor: gradient_factor as f32,
            clip: clip.map_or(f32::INFINITY, |clip| clip as f32),
            beta1: beta1 as f32,
            beta2: beta2 as f32,
            rate: factors.rate,
            root: factors.root,
            eps: eps as f32,
            keep: factors.keep,
            copy_type: copy_type as i32,
            padding: 0,
        };
        launch(&gpu, kernel!("adamw"), elementwise_of(len, V, THREADS), &params)
    }
}
