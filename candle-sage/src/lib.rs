//! Trainable low-bit attention for [candle](https://docs.rs/candle-core).
//!
//! [`ops::Attention`] is attention with a forward and a backward of its own: in full precision, on INT8 codes
//! ([`scheme::SageBwd`]), or trained for 4-bit inference ([`scheme::AttnQat`]). It joins candle's graph: call `backward()` as always.
//! Beside it are the other operators that training needs ([`ops`]), modules made of them
//! ([`nn`]), and exact f64 attention to compare with ([`mod@reference`]).
//!
//! Everything runs on the CPU, on all threads, with results that do not depend on their number. (Another
//! kind of CPU may round f32 sums otherwise.) Under feature `cuda` it also runs on NVIDIA GPUs, Ampere and
//! later: attention in f16 and bf16, the other operators in f32 too.

#![deny(missing_docs)]

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod dtype;
mod error;
pub mod nn;
pub mod nvfp4;
pub mod ops;
pub mod reference;
pub mod scheme;
pub mod selection;
pub mod shape;
pub mod sla2;
mod update;

pub use error::{Error, Result};
pub use ops::{Attention, flash_attn, flash_attn_varlen};
pub use scheme::{
    AttnQat, Granularity, Int8Products, PReference, Products, SageBwd, Scheme, Smoothing, ValueGroups,
};
pub use selection::Selection;
pub use shape::{AttentionShape, Packing};
pub use sla2::{Router, Sla2};
