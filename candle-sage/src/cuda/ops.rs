//! All ops but attention on NVIDIA GPUs: launches of the kernels of the same names on candle's own stream.

pub(crate) mod adamw;
pub(crate) mod cross_entropy;
pub(crate) mod embedding;
mod ids;
mod params;
pub(crate) mod rms_norm;
pub(crate) mod rope;
pub(crate) mod sum_in_order;
pub(crate) mod swiglu;
pub(crate) mod tensor;

pub(crate) use ids::Checked;
