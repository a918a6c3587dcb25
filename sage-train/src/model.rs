//! The Llama: its shape, its parameters, its forward.

mod config;
mod init;
mod llama;

pub use config::{LlamaConfig, ParameterSpec};
pub use init::Parameters;
pub use llama::{Attend, Llama};
