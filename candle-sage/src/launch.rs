//! The interface between operators and kernels, in types that also exist in builds without kernels.

use candle_core::{CudaStorage, Layout, Result};

/// A tensor on a GPU as candle passes it to an op: storage and layout.
pub(crate) type Operand<'a> = (&'a CudaStorage, &'a Layout);

pub(crate) const HAS_KERNELS: bool = cfg!(feature = "cuda");

pub(crate) const HOW_TO_GET_KERNELS: &str = "build candle-sage with feature `cuda` for NVIDIA GPUs";

/// A computation on a GPU, from operands `In` to results `Out`.
///
/// Each operator has a type for which the module `cuda` implements this trait.
pub(crate) trait Launch<In, Out> {
    /// Launches the kernels, on candle's own stream.
    fn launch(&self, inputs: In) -> Result<Out>;
}

/// The backward that a forward on a GPU returns, with the state that the backward needs.
pub(crate) type Backward<const N: usize, Out> = Box<dyn for<'a> Launch<[Operand<'a>; N], Out> + Send + Sync>;

/// In a build without kernels every launch fails. Operators check the device of their inputs first, and therefore never
/// reach a launch.
#[cfg(not(feature = "cuda"))]
impl<T, In, Out> Launch<In, Out> for T {
    fn launch(&self, _: In) -> Result<Out> {
        let error = crate::error::Error::unsupported("this build has no kernels for GPUs");
        Err(error.hint(HOW_TO_GET_KERNELS).into())
    }
}
