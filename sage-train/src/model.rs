//! The Llama: its shape, its parameters, its forward and backward.

mod attention;
mod block;
mod config;
mod layers;
mod llama;
mod parameters;
mod pieces;
mod sla2;
mod snapshot;
mod state;

pub use attention::Observe;
pub use config::{LlamaConfig, ParameterSpec, Recompute, Start};
pub use llama::{Input, Llama};
pub use parameters::{Parameters, Weight};
pub use pieces::received_bytes;
pub use sla2::{Choice, Sla2Config, Stage};
pub use snapshot::{Parts, Snapshot};
pub use state::{State, StateFile};
