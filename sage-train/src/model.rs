//! The Llama: its shape, its parameters, its forward and backward.

mod attention;
mod block;
mod config;
mod layers;
mod llama;
mod parameters;

pub use attention::Observe;
pub use config::{LlamaConfig, ParameterSpec, Recompute};
pub use llama::{Input, Llama};
pub use parameters::{Parameters, Snapshot, StateFile, Weight};
