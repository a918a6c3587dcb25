//! The Llama: its shape, its parameters, its forward and its backward.

mod attention;
mod block;
mod config;
mod decode;
mod layers;
mod linear;
mod llama;
mod operands;
mod parameters;
mod pieces;
mod reduction;
mod rope_scaling;
mod rotary;
mod sla2;
mod snapshot;
mod spec;
mod state;
mod ulysses;
mod windows;

pub use attention::Observe;
pub use config::{LlamaConfig, Recompute};
pub use decode::TokenCache;
pub use linear::{LinearPrecision, ObserveProducts, Products, Scaling};
pub use llama::{Input, LayerDone, Llama, Watch};
pub(crate) use parameters::InitialValues;
pub use parameters::{Matrices, Moments, Parameters, Shard, Training, Weight};
pub(crate) use pieces::overlap;
pub use pieces::received_bytes;
pub use reduction::Reduction;
pub use rope_scaling::RopeScaling;
pub use sla2::{Choice, Selected, Sla2Config, Stage};
pub use snapshot::{Parts, Snapshot};
pub(crate) use spec::OUTPUT;
pub use spec::{Kind, ParameterSpec, Start};
pub use state::{State, StateFile};
pub use windows::{WindowPattern, Windows, causal_pairs};
