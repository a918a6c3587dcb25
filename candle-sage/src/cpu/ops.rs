//! The arithmetic of the operators except attention, on slices of f32: one file per operator, as in `ops/` and
//! `cuda/ops/`.

pub(crate) mod adamw;
pub(crate) mod cross_entropy;
pub(crate) mod embedding;
pub(crate) mod layer_norm;
pub(crate) mod muon;
pub(crate) mod rms_norm;
pub(crate) mod rope;
pub(crate) mod soft_top_k;
pub(crate) mod swiglu;
