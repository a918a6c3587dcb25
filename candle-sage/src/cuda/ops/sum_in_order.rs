//! The sum of several GPUs' gradients, in a fixed order.

use candle_core::Result;
use candle_core::backend::BackendStorage;

use crate::cuda::address::{PAD, check_vectors};
use crate::cuda::compiled::constants::partial_sums::{ROWS, SUM_LEVELS, SUM_THREADS, SUM_VALUES};
use crate::cuda::compiled::kernel;
use crate::cuda::floats::{count, elementwise_of, start};
use crate::cuda::kernels::Gpu;
use crate::cuda::params::{self, launch};
use crate::error::Error;
use crate::launch::{Launch, Operand};
use crate::ops::accumulate::InOrder;

/// `sum = parts[0] + parts[1] + ..`, but the old value of `sum` is added instead of `parts[place]`. Neighbouring terms
/// are added in pairs, then the sums of neighbouring pairs, and so on.
impl Launch<[Operand<'_>; 2], ()> for InOrder {
    fn launch(&self, [sum, parts]: [Operand<'_>; 2]) -> Result<()> {
        let gpu = Gpu::new(sum.0.device())?;
        let width = sum.1.shape().elem_count();
        let params = params::SumInOrder {
            parts: start(parts, &gpu)?,
            sum: start(sum, &gpu)?,
            width: width as i64,
            count: count("parts", parts.1.shape().elem_count() / width.max(1))?,
            place: self.place as i32,
        };
        check_vectors("sum_in_order", &[params.parts, params.sum], width, SUM_VALUES, PAD)?;
        let most = ROWS * ((1 << SUM_LEVELS) - 1);
        if params.count as usize > most {
            return Err(Error::unsupported("too many parts for sum_in_order on CUDA")
                .got(params.count)
                .allowed(format!("up to {most}"))
                .hint("add them in several calls")
                .into());
        }
        launch(&gpu, kernel!("sum_in_order"), elementwise_of(width, SUM_VALUES, SUM_THREADS), &params)
    }
}
