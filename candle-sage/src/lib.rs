//! Trainable low-bit attention for [candle](https://docs.rs/candle-core): custom ops with a forward and a
//! backward, on CPUs and NVIDIA GPUs.
//!
//! ```
//! use candle_core::{Device, Var};
//! use candle_sage::{ops::Attention, scheme::SageBwd};
//!
//! let (q, k, v) = {
//!     let var = || Var::randn(0f32, 1., (1, 128, 4, 64), &Device::Cpu);
//!     (var()?, var()?, var()?)
//! };
//! let out = Attention::new(SageBwd::default()).causal(true).apply(&q, &k, &v)?;
//! let gradients = out.sqr()?.mean_all()?.backward()?;
//! assert_eq!(gradients.get(&k).unwrap().dims(), k.dims());
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! [`ops::Attention`] computes `softmax(scale Q K^T) V` and its gradients in the numerics of a *scheme*: unquantized,
//! in INT8 ([`scheme::SageBwd`]), or in NVFP4, which trains a model for 4-bit inference ([`scheme::AttnQat`]). A
//! [`Selection`] restricts attention to listed blocks of keys; in [`Sla2`], a trainable [`Router`] selects the blocks.
//! The operators join candle's autograd graph: `backward()` works as for every candle op.
//!
//! The crate also has the other operators that training needs ([`ops`]), modules built from them ([`nn`]), and exact
//! attention in f64 as a reference ([`mod@reference`]). [`untrained`] lists a model's variables that received no
//! gradient.
//!
//! On the CPU every operator runs on all threads, and results do not depend on the number of threads. (CPUs with
//! different vector instructions may round f32 sums differently.) With feature `cuda` the operators also run on NVIDIA
//! GPUs, Ampere and later: attention in f16 and bf16, the other operators in f16, bf16 and f32.

#![deny(missing_docs)]

mod cpu;
#[cfg(feature = "kernels")]
mod cuda;
mod dtype;
mod error;
pub mod fp8;
mod launch;
pub mod nn;
pub mod nvfp4;
pub mod ops;
pub mod reference;
pub mod scheme;
pub mod selection;
pub mod shape;
pub mod sla2;
mod update;
mod variables;

#[cfg(feature = "kernels")]
pub use cuda::foreign;
pub use error::{Error, ErrorKind, Result};
pub use ops::{
    Attention, flash_attn, flash_attn_alibi, flash_attn_alibi_windowed, flash_attn_alibi_windowed_softcap,
    flash_attn_varlen, flash_attn_varlen_alibi, flash_attn_varlen_alibi_windowed,
    flash_attn_varlen_alibi_windowed_softcap, flash_attn_varlen_windowed, flash_attn_windowed,
};
pub use scheme::{
    AttnQat, Granularity, Int8Products, KeyMean, PReference, Products, SageBwd, Scheme, Smoothing,
    ValueGroups, ValueScale,
};
pub use selection::Selection;
pub use shape::{AttentionShape, Packing};
pub use sla2::{Router, Sla2, Sla2Cache};
pub use variables::untrained;
