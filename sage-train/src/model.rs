//! The Llama: its shape, its parameters, its forward and its backward.

mod attention;
mod block;
mod config;
mod decode;
mod layers;
mod llama;
mod parameters;
mod pieces;
mod reduction;
mod sla2;
mod snapshot;
mod state;
mod ulysses;

pub use attention::Observe;
pub use config::{LlamaConfig, ParameterSpec, Recompute, Start};
pub use decode::Past;
pub use llama::{Input, Left, Llama, Watch};
pub(crate) use parameters::InitialValues;
pub use parameters::{Parameters, Weight};
pub use pieces::received_bytes;
pub use reduction::Reduction;
pub use sla2::{Choice, Selected, Sla2Config, Stage};
pub use snapshot::{Parts, Snapshot};
pub use state::{State, StateFile};
